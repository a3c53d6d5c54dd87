"""Streams over HTTP: silence, disconnects, slow readers, and answers whose clients go away."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from fake_turns import HELLO, USAGE, FakeTurn, Step
from serving import OneModelServer, app_of, running, story_server, wait_until
from starlette.requests import ClientDisconnect

from sharpi.serve.answering.joined_turns import JoinedTurns
from sharpi.serve.answering.merging import Merged
from sharpi.serve.apis import openai_chat, openai_completions
from sharpi.serve.errors import ApiError
from sharpi.serve.sse import COMMENT, EVENT_STREAM, NDJSON, TurnStream, collected
from sharpi.serve.turns import Ended, Event, Said, Usage

ENDLESS = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0.0, "ignore_eos": True}


class Lines:
    """A wording of one line for each event."""

    def begin(self) -> bytes:
        return b"begin\n"

    def word(self, event: Event) -> bytes:
        return f"{event.text}\n".encode() if isinstance(event, Said) else b""

    def failed(self, error: ApiError) -> bytes:
        return f"failed: {error.message}\n".encode()

    def end(self) -> bytes:
        return b"end\n"

    def idle(self) -> bytes:
        return COMMENT

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        return {"events": len(events)}


class Client:
    """The other side of an ASGI application. slow: seconds that it takes for each message. leaves: after this many
    bodies."""

    def __init__(self, slow: float = 0.0, leaves: int | None = None) -> None:
        self.bodies: list[bytes] = []
        self._slow = slow
        self._leaves = leaves
        self._left = asyncio.Event()

    async def receive(self) -> Any:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await asyncio.sleep(self._slow)
        if body := message.get("body"):
            self.bodies.append(body)
            if len(self.bodies) == self._leaves:
                self._left.set()

    @property
    def text(self) -> str:
        return b"".join(self.bodies).decode()


def streamed(turn: Any, client_options: dict[str, Any] | None = None, media_type: str = EVENT_STREAM,
             **options: Any) -> tuple[Client, list[str]]:
    """What a client gets of a turn, and what was closed at the end."""
    closed: list[str] = []

    async def close() -> None:
        closed.append("lease")

    async def run() -> Client:
        client = Client(**(client_options or {}))
        await TurnStream(turn, Lines(), media_type, close, **options)({}, client.receive, client.send)
        assert len(asyncio.all_tasks()) == 1, "no task is left behind"
        return client

    return asyncio.run(run()), closed


def test_events_are_worded_in_order() -> None:
    turn = FakeTurn(HELLO)
    client, closed = streamed(turn)
    assert client.text == "begin\nHel\nlo.\nend\n"
    assert closed == ["lease"] and turn.closed


def test_what_comes_at_once_goes_out_at_once() -> None:
    steps: list[Step] = [Said(0, "a")] * 50 + [0.05] + [Said(0, "b")] * 50
    client, _ = streamed(FakeTurn(steps))
    assert [len(body) for body in client.bodies] == [6, 100, 100, 4]


def test_silence_is_broken_by_comments() -> None:
    steps: list[Step] = [0.35, Said(0, "a"), 0.25, Said(0, "b")]
    client, _ = streamed(FakeTurn(steps), silence=0.1)
    before, _, after = client.text.partition("a\n")
    assert 2 <= before.count(":\n\n") <= 3 and 1 <= after.count(":\n\n") <= 2
    assert client.text.replace(":\n\n", "") == "begin\na\nb\nend\n"


def test_other_streams_have_no_comments() -> None:
    client, _ = streamed(FakeTurn([0.3, Said(0, "a")]), media_type=NDJSON, silence=0.05)
    assert client.text == "begin\na\nend\n"


@pytest.mark.parametrize(("failure", "told"), [(ApiError(503, "server_error", "we end"), "we end"),
                                               (RuntimeError("secret"), "the server failed: its log says how")])
def test_an_error_ends_a_stream(failure: Exception, told: str) -> None:
    turn = FakeTurn([Said(0, "a"), failure, Said(0, "b")])
    client, closed = streamed(turn)
    assert client.text == f"begin\na\nfailed: {told}\n"
    assert closed == ["lease"] and turn.closed


def test_a_client_that_leaves_closes_the_turn() -> None:
    turn = FakeTurn([Said(0, "a"), 30.0])
    before = time.monotonic()
    _, closed = streamed(turn, {"leaves": 1})
    assert closed == ["lease"] and turn.closed and time.monotonic() - before < 10


def test_a_slow_reader_holds_its_own_turn_back_only() -> None:
    steps: list[Step] = [Said(0, "x" * 1000) for _ in range(1000)]
    turn = FakeTurn(steps)
    held: list[int] = []

    async def run() -> None:
        client = Client(slow=0.02)
        task = asyncio.ensure_future(TurnStream(turn, Lines())({}, client.receive, client.send))
        ticks = 0
        while not task.done():
            await asyncio.sleep(0.001)
            ticks += 1
            held.append(1000 - len(turn._steps) - client.text.count("x" * 1000))
        assert client.text.count("x" * 1000) == 1000 and client.text.endswith("end\n")
        assert ticks > 50, "the loop goes on"

    asyncio.run(run())
    assert max(held) <= 2 * 66 + 2, "no more waits than the bound allows: what is being sent, and what comes next"


def test_a_reader_that_has_stopped_is_given_up() -> None:
    turn = FakeTurn([Said(0, "a"), 30.0])
    before = time.monotonic()
    _, closed = streamed(turn, {"slow": 1000.0}, silence=0.05, stall=0.2)
    assert closed == ["lease"] and turn.closed and time.monotonic() - before < 10


def test_a_whole_answer_ends_with_its_client() -> None:
    async def run() -> None:
        gone = FakeTurn([Said(0, "a"), 30.0])
        client = Client()
        client._left.set()
        with pytest.raises(ClientDisconnect):
            await collected(gone, client.receive)
        kept = FakeTurn(HELLO)
        assert await collected(kept, Client().receive) == [*HELLO]
        assert gone.closed and kept.closed
        with pytest.raises(ApiError):
            await collected(FakeTurn([ApiError(500, "server_error", "no")]), Client().receive)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


# --- several at once --------------------------------------------------------------------------------------------------


def test_merging_is_fair_and_loses_nothing() -> None:
    async def numbers(count: int, pause: float) -> Any:
        for number in range(count):
            await asyncio.sleep(pause)
            yield number

    async def run() -> list[tuple[int, int | None]]:
        merged: Merged[int] = Merged([numbers(5, 0.05), numbers(3, 0.0), numbers(4, 0.0)])
        arrived: list[tuple[int, int | None]] = []
        while more := await merged.next():
            arrived += more
        return arrived

    arrived = asyncio.run(run())
    for index, count in enumerate((5, 3, 4)):
        assert [item for source, item in arrived if source == index] == [*range(count), None]
    ready = [source for source, _ in arrived if source in (1, 2)]
    assert ready[:6] == [1, 2, 1, 2, 1, 2]
    assert arrived.index((2, None)) < arrived.index((0, 0)), "a slow source delays no other"


def test_turns_are_joined() -> None:
    first = FakeTurn([Said(1, "b"), Said(0, "a"), Ended(0, "stop"), Ended(1, "stop"), Usage(3, 1, 4, 1, ({"a": 1},))])
    second = FakeTurn([0.01, Said(0, "c"), Ended(0, "length"), Usage(5, 2, 6, 0, ({"b": 2},))])

    async def run() -> list[Event]:
        return await collected(JoinedTurns([first, second], 2), Client().receive)

    events = asyncio.run(run())
    assert events == [Said(1, "b"), Said(0, "a"), Ended(0, "stop"), Ended(1, "stop"), Said(2, "c"), Ended(2, "length"),
                      Usage(8, 3, 10, 1, ({"a": 1}, {"b": 2}))]
    assert first.closed and second.closed and USAGE


# --- real connections -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def story() -> Iterator[OneModelServer]:
    with story_server() as server:
        yield server


@pytest.fixture(scope="module")
def address(story: OneModelServer) -> Iterator[tuple[str, int]]:
    with running(app_of(story, openai_chat.routes, openai_completions.routes)) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


def request(path: str, body: Any) -> bytes:
    data = json.dumps(body).encode()
    return (f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n").encode() + data


def idle(server: OneModelServer) -> bool:
    counts = server.scheduler.counts()
    return server.leases == 0 and not any(counts[state] for state in ("waiting", "preparing", "writing"))


# Each of them would go on for much longer than the test waits.
@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", {**ENDLESS, "stream": True}),
    ("/v1/chat/completions", ENDLESS),
    ("/v1/chat/completions", {**ENDLESS, "n": 4}),
    ("/v1/completions", {"prompt": ["One", "Two", "Three"], "max_tokens": 480, "ignore_eos": True, "stream": True}),
    ("/v1/completions", {"prompt": ["One", "Two", "Three"], "max_tokens": 480, "ignore_eos": True}),
])
def test_an_answer_ends_with_its_connection(story: OneModelServer, address: tuple[str, int], path: str,
                                            body: Any) -> None:
    finished = story.scheduler.counts()["step_tokens"]
    with socket.create_connection(address) as client:
        client.sendall(request(path, body))
        wait_until(lambda: story.scheduler.counts()["writing"] > 0)
    wait_until(lambda: idle(story))
    answers = body.get("n", 1) if "messages" in body else 3
    assert story.scheduler.counts()["step_tokens"] - finished < 400 * answers, "it was cancelled, not completed"


def test_a_client_that_reads_nothing_delays_nobody(story: OneModelServer, address: tuple[str, int]) -> None:
    with socket.create_connection(address) as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.sendall(request("/v1/chat/completions", {**ENDLESS, "stream": True}))
        with socket.create_connection(address) as eager:
            eager.sendall(request("/v1/chat/completions", {**ENDLESS, "max_tokens": 20}))
            assert b"200 OK" in eager.recv(1 << 16)
    wait_until(lambda: idle(story))
