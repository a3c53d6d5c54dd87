"""Turns as HTTP responses: streamed as they come, or whole. A client that goes away ends its turn."""

from __future__ import annotations

import asyncio
import json
import logging
import time
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

__all__ = ["BODIES", "COMMENT", "EVENT_STREAM", "GONE", "NDJSON", "SILENCE", "TurnStream", "Wording", "answered",
           "collected", "json_response"]

EVENT_STREAM, NDJSON = "text/event-stream", "application/x-ndjson"
COMMENT = b":\n\n"  # tells proxies and clients that the connection is alive

SILENCE = 5.0  # seconds that an event stream may say nothing
GONE = 499  # the status of an answer whose client has gone: nobody reads it, but logs and metrics do

BODIES = "sharpi.bodies"
"""Where a request's scope has the function that sends a response's bodies. What wraps an application only looks at how
responses begin, and each wrapper would cost every token of a stream a call."""

_MOST_AT_ONCE = 1 << 16  # bytes of events that are worded before they are sent

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
    """Streams a turn's events: what comes at once goes out at once, and a slow reader delays nobody else.

    One task reads and writes. A client that does not read holds it back, so no more is worded than what is being sent.
    """

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
        self._ended = False
        self._comment: list[asyncio.Task[None]] = []  # the last that broke a silence
        self._sending_since: float | None = None
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        bodies = scope.get(BODIES, send)
        writing, leaving = (asyncio.ensure_future(work) for work in (self._write(send, bodies), _gone(receive)))
        watching = asyncio.ensure_future(self._watch(writing, bodies))
        try:
            await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if writing.done() and not writing.cancelled():
                writing.result()
        except OSError:
            pass  # the client has gone
        finally:
            await _stop(writing, leaving, watching, *self._comment)
            await self._turn.aclose()
            if self._closing is not None:
                await self._closing()

    async def _write(self, send: Send, bodies: Send) -> None:
        await self._send(send, {"type": "http.response.start", "status": self.status_code,
                                "headers": self.raw_headers})
        data = self._wording.begin()
        while True:
            if data:
                await self._send(bodies, {"type": "http.response.body", "body": data, "more_body": True})
            if self._ended:
                break
            data = await self._next()
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self) -> bytes:
        """Waits for an event, and words it and those that came with it. At the end, it is what a stream ends with."""
        try:
            turn, word = self._turn, self._wording.word
            while (event := turn.ready()) is None:
                if not await turn.more():
                    self._ended = True
                    return self._wording.end()
            data = word(event)
            while len(data) < _MOST_AT_ONCE and (event := turn.ready()) is not None:
                data += word(event)
            return data
        except ApiError as error:
            data = self._wording.failed(error)
        except Exception:
            _log.exception("a stream failed")
            data = self._wording.failed(ApiError(500, "server_error", "the server failed: its log says how"))
        self._ended = True
        return data

    async def _send(self, send: Send, message: Any) -> None:
        self._sending_since = time.monotonic()
        await send(message)
        self._sending_since = None
        self._sent_at = time.monotonic()

    async def _watch(self, writing: asyncio.Task[None], bodies: Send) -> None:
        """Breaks silences, and gives up a client that reads nothing."""
        self._sent_at = time.monotonic()
        due = self._silence
        while True:
            await asyncio.sleep(due)
            due = self._silence
            now = time.monotonic()
            if self._sending_since is not None:
                if now - self._sending_since >= self._stall:
                    writing.cancel()
            elif now - self._sent_at < self._silence:
                due -= now - self._sent_at
            elif self.media_type == EVENT_STREAM and not self._ended and (idle := self._wording.idle()):
                message = {"type": "http.response.body", "body": idle, "more_body": True}
                self._comment = [asyncio.ensure_future(self._send(bodies, message))]
