"""A server for the page: its static files, and answers that a test has written. What a test writes is streamed as the
real one words it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sharpi.serve import page_routes

GIB = 1 << 30
WAIT = "wait"  # in an answer: the stream goes no further until `FakeServer.resume`

PROPERTIES: Mapping[str, Any] = {
    "model": "Qwen3-30B-A3B-Q4_K_M", "n_ctx": 32768,
    "plan": [{"name": "in VRAM", "role": "vram", "bytes": 11.2 * GIB},
             {"name": "in RAM, with slots in VRAM", "role": "ram", "bytes": 5.1 * GIB},
             {"name": "in RAM, computed by the CPU", "role": "cpu", "bytes": 1.4 * GIB}],
    "experts": {"hit_rate": 0.937},
    "default_generation_settings": {"params": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}},
}


def said(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


def thought(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"reasoning_content": text, "reasoning": text}}]}


def progress(processed: int, total: int) -> dict[str, Any]:
    return {"choices": [], "prompt_progress": {"total": total, "cache": 0, "processed": processed, "time_ms": 100}}


def speed(tokens: int, rate: float) -> dict[str, Any]:
    return {"choices": [], "timings": {"predicted_n": tokens, "predicted_ms": 1000 * tokens / rate,
                                       "predicted_per_second": rate}}


def ended(reason: str = "stop", *, prompt: int = 1204, cached: int = 1024, tokens: int = 312,
          rate: float = 48.3) -> list[dict[str, Any]]:
    return [
        {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
        {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": tokens,
                                  "prompt_tokens_details": {"cached_tokens": cached}},
         "timings": {"prompt_n": prompt - cached, "prompt_ms": 210.0, "predicted_n": tokens,
                     "predicted_ms": tokens / rate * 1000, "cache_n": cached}},
    ]


class FakeServer:
    """Answers with `answers`, one for each request, and with the last one from then on; an answer is an HTTP response
    of its own, or pieces: objects to send as events, texts to send as they are, seconds to wait, and `WAIT`."""

    def __init__(self) -> None:
        self.reset()
        self.app = Starlette(routes=[
            *page_routes.routes(),
            Route("/v1/models", self._models), Route("/props", self._properties), Route("/slots", self._slots),
            Route("/v1/chat/completions", self._complete, methods=["POST"])])

    def reset(self) -> None:
        self.answers: list[Sequence[Any] | Response] = [[said("Hello."), *ended()]]
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.key: str | None = None
        self.properties: Mapping[str, Any] | None = PROPERTIES
        self.given_up = 0
        self._resumed = threading.Event()

    def resume(self) -> None:
        self._resumed.set()

    def _refused(self, request: Request) -> Response | None:
        given = request.headers.get("authorization")
        self.keys.append(given)
        if self.key is None or given == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "wrong key", "type": "authentication_error"}}, 401)

    async def _models(self, request: Request) -> Response:
        names = (PROPERTIES["model"], "SmolLM2-135M")
        return self._refused(request) or JSONResponse({"object": "list", "data": [{"id": name} for name in names]})

    async def _properties(self, request: Request) -> Response:
        return self._refused(request) or JSONResponse(self.properties, 404 if self.properties is None else 200)

    async def _slots(self, request: Request) -> Response:
        return self._refused(request) or JSONResponse([{"id": i, "is_processing": i == 0} for i in range(4)])

    async def _complete(self, request: Request) -> Response:
        refused = self._refused(request)
        if refused:
            return refused
        self.requests.append(await request.json())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Response):
            return answer
        return StreamingResponse(self._events(request, answer), media_type="text/event-stream")

    async def _events(self, request: Request, pieces: Sequence[Any]) -> AsyncIterator[str]:
        yield ":\n\n"
        try:
            for piece in pieces:
                if piece == WAIT:
                    while not self._resumed.is_set():
                        await asyncio.sleep(0.01)
                    self._resumed.clear()
                elif isinstance(piece, float):
                    await asyncio.sleep(piece)
                elif isinstance(piece, str):
                    yield piece
                else:
                    yield f"data: {json.dumps(piece)}\n\n"
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.given_up += 1
            raise


@contextmanager
def listening(server: FakeServer) -> Iterator[str]:
    """The address where a server answers, in a thread of its own."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        config = uvicorn.Config(server.app, log_level="warning", timeout_graceful_shutdown=1)
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [bound]})
        thread.start()
        while not running.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}/"
        finally:
            running.should_exit = True
            thread.join()
