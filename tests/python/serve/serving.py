"""A server with one loaded model, for tests of the APIs: in the test's event loop, or in a thread on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sharpi import Model, Scheduler
from sharpi.files.metadata import Metadata
from sharpi.serve.answering.runner import ModelRunner, RunnerLimits
from sharpi.serve.errors import ApiError
from sharpi.serve.http.wording import openai_error
from sharpi.serve.server import Card
from sharpi.serve.sse import json_response

TEMPLATE = ("{% if tools is defined %}<tools>{{ tools | tojson }}\n{% endif %}"
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n"
            "{% for c in m.tool_calls %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>\n{% endfor %}{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}"
            "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}")
NAME = "story"


class OneModelServer:
    """A `Server` whose only model is loaded already. It is its own store. Use it in one event loop."""

    def __init__(self, model: Model, scheduler: Scheduler, limits: RunnerLimits | None = None) -> None:
        self.model = model
        self.scheduler = scheduler
        self.store = self
        self.leases = 0  # those that have not ended
        self.runner = ModelRunner(model, scheduler, limits)

    def names(self) -> list[str]:
        return [NAME]

    def card(self, name: str) -> Card:
        return Card(name, self.model.file.paths[0], loaded=True)

    @contextlib.asynccontextmanager
    async def lease(self, name: str | None) -> AsyncIterator[Any]:
        if name not in (None, NAME):
            raise ApiError(404, "not_found_error", f"there is no model {name!r}", param="model", code="model_not_found")
        self.leases += 1
        try:
            yield SimpleNamespace(name=NAME, model=self.model, runner=self.runner)
        finally:
            self.leases -= 1


def with_template(model: Model, template: str = TEMPLATE) -> Model:
    """`model` as if its file held this chat template."""
    metadata = {**model.file.metadata, "tokenizer.chat_template": template}
    model.file = replace(model.file, metadata=Metadata(model.file.paths[0], metadata))
    return model


@contextlib.contextmanager
def story_server(limits: RunnerLimits | None = None, template: str = TEMPLATE,
                 **options: Any) -> Iterator[OneModelServer]:
    """The bundled model with a chat template, on the CPU. options: of the scheduler."""
    loaded = Model.load(device="cpu", context=512, cache_tokens=4096, sequences=16, threads=1)
    with with_template(loaded, template) as model, model.scheduler(**options) as scheduler:
        server = OneModelServer(model, scheduler, limits)
        yield server
        server.runner.close()


def app_of(server: Any, *apis: Callable[[Any], list[BaseRoute]]) -> Starlette:
    """The routes of these APIs, with OpenAI's errors."""
    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        response = json_response(openai_error(error), error.status)
        response.headers.update(error.headers)
        return response

    return Starlette(routes=[route for api in apis for route in api(server)], exception_handlers={ApiError: refused})


@contextlib.contextmanager
def running(app: Any) -> Iterator[str]:
    """The address at which `app` is served, by a thread of its own."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=asyncio.run, args=(server.serve([listener]),), daemon=True)
        thread.start()
        wait_until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)


def wait_until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not become true in time"
        time.sleep(0.01)


def sse_data(lines: Sequence[str]) -> list[str]:
    """The data of an event stream's events."""
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
