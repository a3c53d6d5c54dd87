"""Turns as HTTP responses: streamed as they come, or whole. A client that goes away ends its turn."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sharpi.serve.errors import ApiError
from sharpi.serve.server import Lease, OpenTurn, Server
from sharpi.serve.turns import Event, Turn

__all__ = ["COMMENT", "EVENT_STREAM", "GONE", "NDJSON", "SILENCE", "TurnStream", "Wording", "answered", "collected",
           "json_response"]

EVENT_STREAM, NDJSON = "text/event-stream", "application/x-ndjson"
COMMENT = b":\n\n"  # tells proxies and clients that the connection is alive

SILENCE = 5.0  # seconds that an event stream may say nothing
GONE = 499  # the status of an answer whose client has gone: nobody reads it, but logs and metrics do

# What may wait for a slow reader; beyond that, its turn's events are not read.
_MOST_WAITING = 1 << 16

_log = logging.getLogger(__name__)


class Wording(Protocol):
    """How an API words one turn."""

    def begin(self) -> bytes:
        """What a stream begins with, perhaps nothing."""

    def word(self, event: Event) -> bytes:
        """What a stream says of an event, perhaps nothing."""

    def failed(self, error: ApiError) -> bytes:
        """What a stream ends with after an error."""

    def end(self) -> bytes:
        """What a stream ends with after the last event."""

    def idle(self) -> bytes:
        """What breaks a silence of an event stream. There is nothing of the kind between lines of JSON."""

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""


async def answered(request: Request, server: Server, model: str | None, turns: Sequence[Turn] | Turn,
                   worded: Callable[[Lease, OpenTurn], Wording], *, stream: bool, media_type: str = EVENT_STREAM,
                   joined: Callable[[Sequence[OpenTurn]], OpenTurn] | None = None,
                   silence: float | None = None) -> Response:
    """Runs a turn with a model of the server. Raises `ApiError` for all that is wrong before the answer begins.

    worded: makes the answer's wording. joined: makes one turn of several. silence: see `TurnStream`.
    """
    owner = getattr(request.state, "client", None) or ""  # of the key that the request came with
    given = [turns] if isinstance(turns, Turn) else turns
    asked = [replace(turn, salt=owner, key=f"{owner} {turn.key}".strip()) for turn in given]
    async with AsyncExitStack() as stack:
        lease = await stack.enter_async_context(server.store.lease(model))
        opened: list[OpenTurn] = []
        for turn in asked:
            opened.append(await lease.runner.open(turn))
            stack.push_async_callback(opened[-1].aclose)
        one = opened[0] if joined is None else joined(opened)
        stack.push_async_callback(one.aclose)
        wording = worded(lease, one)
        if stream:
            return TurnStream(one, wording, media_type, stack.pop_all().aclose, silence=silence)
        try:
            events = await collected(one, request.receive)
        except ClientDisconnect:
            return Response(status_code=GONE)
        return json_response(wording.whole(events))
    raise AssertionError("the stack swallows no exceptions")


def json_response(body: Any, status: int = 200) -> Response:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return Response(text.encode("utf-8", "replace"), status, media_type="application/json")


async def collected(turn: OpenTurn, receive: Receive) -> list[Event]:
    """All events of a turn. The turn is closed if the client goes away, and `ClientDisconnect` raised."""
    reading = asyncio.ensure_future(_all(turn))
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise ClientDisconnect
        return reading.result()
    finally:
        await _stop(reading, leaving)
        await turn.aclose()


async def _all(turn: OpenTurn) -> list[Event]:
    return [event async for event in turn]


async def _gone(receive: Receive) -> None:
    """Returns when the client has gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stop(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class TurnStream(Response):
    """Streams a turn's events. One task reads them and one writes, so that what comes at once goes out at once, and a
    slow reader delays nobody else."""

    def __init__(self, turn: OpenTurn, wording: Wording, media_type: str = EVENT_STREAM,
                 closing: Callable[[], Awaitable[None]] | None = None, *, silence: float | None = None,
                 stall: float = 120.0) -> None:
        """closing: called at the end, whatever that is. silence: the seconds after which the wording's `idle` is
        sent. stall: those after which a client that reads nothing is given up."""
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._turn = turn
        self._wording = wording
        self._closing = closing
        self._silence = SILENCE if silence is None else silence
        self._stall = stall
        self._waiting: list[bytes] = []
        self._size = 0
        self._ended = False
        self._arrival = asyncio.Event()
        self._room = asyncio.Event()
        self._sending_since: float | None = None
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks = [asyncio.ensure_future(work) for work in (self._write(send), self._read(), _gone(receive))]
        writing, _, leaving = tasks
        watching = asyncio.ensure_future(self._watch(writing))
        try:
            await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if writing.done() and not writing.cancelled():
                writing.result()
        except OSError:
            pass  # the client has gone
        finally:
            await _stop(*tasks, watching)
            await self._turn.aclose()
            if self._closing is not None:
                await self._closing()

    async def _read(self) -> None:
        """Words the events, as fast as the client takes them."""
        try:
            self._put(self._wording.begin())
            async for event in self._turn:
                self._put(self._wording.word(event))
                while self._size > _MOST_WAITING:
                    self._room.clear()
                    await self._room.wait()
            self._put(self._wording.end())
        except ApiError as error:
            self._put(self._wording.failed(error))
        except Exception:
            _log.exception("a stream failed")
            self._put(self._wording.failed(ApiError(500, "server_error", "the server failed: its log says how")))
        finally:
            self._ended = True
            self._arrival.set()

    def _put(self, data: bytes) -> None:
        if data:
            self._waiting.append(data)
            self._size += len(data)
            self._arrival.set()

    async def _write(self, send: Send) -> None:
        await self._send(send, {"type": "http.response.start", "status": self.status_code,
                                "headers": self.raw_headers})
        while True:
            if not self._waiting:
                if self._ended:
                    break
                self._arrival.clear()
                await self._arrival.wait()
                continue
            data = b"".join(self._waiting)
            self._waiting.clear()
            self._size = 0
            self._room.set()
            await self._send(send, {"type": "http.response.body", "body": data, "more_body": True})
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: Any) -> None:
        loop = asyncio.get_running_loop()
        self._sending_since = loop.time()
        await send(message)
        self._sending_since = None
        self._sent_at = loop.time()

    async def _watch(self, writing: asyncio.Task[None]) -> None:
        """Breaks silences, and gives up a client that reads nothing."""
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        due = self._silence
        while True:
            await asyncio.sleep(due)
            now = loop.time()
            if self._sending_since is not None:
                due = self._silence
                if now - self._sending_since >= self._stall:
                    writing.cancel()
            elif now - self._sent_at >= self._silence:
                self._put(self._wording.idle() if self.media_type == EVENT_STREAM else b"")
                due = self._silence
            else:
                due = self._silence - (now - self._sent_at)
