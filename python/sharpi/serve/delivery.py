"""An answer's way to a client that may be slow, or leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sharpi.serve.errors import ApiError
from sharpi.serve.server import OpenTurn, Store
from sharpi.serve.turns import Event, Turn
from sharpi.serve.whole import Whole, whole

__all__ = ["LINES", "SSE", "Endpoint", "Framing", "Wording", "deliver", "refusing"]

T = TypeVar("T")

Endpoint = Callable[[Request], Awaitable[ASGIApp]]

_log = logging.getLogger(__name__)

_SILENCE = 5.0  # seconds: proxies and clients give up on a connection without a byte
_CLIENT_LEFT = 499  # seen by logs alone
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Framing:
    """How objects are written one after the other."""

    def __init__(self, media_type: str, frame: Callable[[Mapping[str, Any]], bytes]) -> None:
        self.media_type = media_type
        self.frame = frame


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


SSE = Framing("text/event-stream; charset=utf-8",
              lambda value: f"event: {value['type']}\ndata: {_json(value)}\n\n".encode())
LINES = Framing("application/x-ndjson", lambda value: f"{_json(value)}\n".encode())


class Wording(Protocol):
    """How an API writes one answer."""

    framing: Framing

    def body(self, answer: Whole) -> dict[str, Any]:
        """An answer that is not streamed."""

    def begin(self, turn: OpenTurn) -> Iterable[Mapping[str, Any]]:
        """What comes before the first event, which is there."""

    def word(self, event: Event) -> Iterable[Mapping[str, Any]]:
        """What a client is sent for an event."""

    def idle(self, begun: bool) -> bytes:
        """What is sent while there is nothing to say. begun: whether `begin` has been sent."""

    def fail(self, error: ApiError) -> Mapping[str, Any]:
        """How an error ends the stream."""


async def deliver(request: Request, store: Store, model: str | None, turn: Turn, stream: bool,
                  wording: Callable[[str], Wording], headers: Mapping[str, str] | None = None) -> ASGIApp:
    """Runs a turn, and words its answer by what `wording` makes for the model's name. The model stays loaded until the
    answer has ended."""
    async with contextlib.AsyncExitStack() as held:
        lease = await held.enter_async_context(store.lease(model))
        words = wording(lease.name)
        opened = await lease.runner.open(turn)
        if stream:
            return Streamed(opened, words, held.pop_all(), headers)
        try:
            answer = await unless_gone(request.receive, whole(opened))
        finally:
            await opened.aclose()
        return Response(status_code=_CLIENT_LEFT) if answer is None else JSONResponse(words.body(answer), 200, headers)


def refusing(endpoint: Endpoint, worded: Callable[[ApiError], Mapping[str, Any]]) -> Endpoint:
    """The endpoint with its errors worded by the API."""

    async def refuses(request: Request) -> ASGIApp:
        try:
            return await endpoint(request)
        except ApiError as error:
            return JSONResponse(worded(error), error.status, error.headers)

    return refuses


class Streamed:
    """The response that streams a turn. Whatever ends it closes the turn and then `held`, which keeps the model."""

    def __init__(self, turn: OpenTurn, wording: Wording, held: contextlib.AsyncExitStack,
                 headers: Mapping[str, str] | None = None) -> None:
        self._turn = turn
        self._wording = wording
        self._held = held
        self._headers = {"content-type": wording.framing.media_type, **_HEADERS, **(headers or {})}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            try:
                headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await unless_gone(receive, self._stream(send))
            finally:
                await self._turn.aclose()

    async def _stream(self, send: Send) -> None:
        async for frame in self._frames():
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _frames(self) -> AsyncIterator[bytes]:
        wording, frame, begun = self._wording, self._wording.framing.frame, False
        try:
            async for event in _with_silences(self._turn):
                if event is None:
                    idle = wording.idle(begun)
                    if idle:
                        yield idle
                    continue
                words = [*([] if begun else wording.begin(self._turn)), *wording.word(event)]
                begun = True
                if words:
                    yield b"".join(map(frame, words))
        except ApiError as error:
            yield frame(wording.fail(error))
        except Exception:
            _log.exception("an answer failed")
            yield frame(wording.fail(ApiError(500, "server_error", "the server failed on this request")))


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T | None:
    """What `work` gives, or nothing if the client leaves first; then the work is cancelled."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_leave(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


async def _leave(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _with_silences(events: AsyncIterator[Event]) -> AsyncIterator[Event | None]:
    """The events, with `None` for each silence."""
    while True:
        coming = asyncio.ensure_future(anext(events))
        try:
            while not coming.done():
                await asyncio.wait({coming}, timeout=_SILENCE)
                if not coming.done():
                    yield None
        finally:
            if not coming.done():
                coming.cancel()
        try:
            yield coming.result()
        except StopAsyncIteration:
            return
