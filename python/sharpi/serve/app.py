"""The server as an ASGI application: its endpoints, what requests pass on their way to them, and how it begins and
ends."""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Lifespan

from sharpi.errors import SharpiError
from sharpi.serve.document import document_route
from sharpi.serve.errors import ApiError
from sharpi.serve.http.middleware import Bounded, Gated, Guarded, Hosts, Observed
from sharpi.serve.http.state import ApiServer
from sharpi.serve.http.wording import encoded, http_error
from sharpi.serve.models.catalog import ModelFile, catalogue
from sharpi.serve.models.loading import MakeRunner
from sharpi.serve.models.store import Loader
from sharpi.serve.settings import ServerSettings
from sharpi.serve.sse import GONE

__all__ = ["create_app", "server_of"]

# Each has `routes(server)`. The first route that fits a request answers it: Ollama's greeting shares "/" with the page.
_API_MODULES = ("apis.openai_chat", "apis.openai_completions", "apis.responses", "apis.anthropic", "apis.ollama",
                "apis.models", "apis.tokens", "apis.status", "page_routes")

_log = logging.getLogger(__name__)


def create_app(settings: ServerSettings, files: tuple[ModelFile, ...] | None = None, *,
               make_runner: MakeRunner | None = None, loader: Loader | None = None,
               failed: Callable[[str], None] | None = None) -> Starlette:
    """The application. It loads models while it runs, between the begin and the end of its lifespan.

    files: the models; without it, those of the settings, of which those on the Hub must be in its cache. make_runner:
    instead of `ModelRunner`. loader: instead of loading models with `Model.load`. failed: is called with a line if the
    first model cannot be loaded at the start. Raises `SharpiError` for settings that cannot be carried out.
    """
    server = ApiServer(settings, catalogue(settings.models, _in_cache) if files is None else files,
                       make_runner=make_runner, loader=loader)
    routes = [route for module in _API_MODULES for route in _routes(module, server)]
    routes.append(document_route(routes.copy()))
    label = _Labels(routes)
    middleware = [Middleware(Observed, server.traffic, lambda path, *rest: server.metrics.request(label(path), *rest))]
    if settings.cors_origins:
        middleware.append(Middleware(CORSMiddleware, allow_origins=settings.cors_origins, allow_headers=["*"],
                                     allow_methods=["GET", "POST", "DELETE"], allow_credentials=False))
    middleware += [Middleware(Guarded, Hosts(settings), server.keys, settings.cors_origins),
                   Middleware(Gated, server.traffic), Middleware(Bounded)]
    app = Starlette(routes=routes, middleware=middleware, lifespan=_lifespan(server, failed), exception_handlers={
        ApiError: _refused, HTTPException: _not_served, ClientDisconnect: _gone, Exception: _broken})
    app.router.redirect_slashes = False
    app.state.server = server
    return app


def server_of(app: Starlette) -> ApiServer:
    """What the endpoints of an application share."""
    server = app.state.server
    assert isinstance(server, ApiServer)
    return server


def _in_cache(name: str) -> str:
    """The file of a model on the Hub. Nothing is downloaded here."""
    from sharpi import hub

    found = hub.look(name)
    if found.missing:
        raise SharpiError(f"{name} is not downloaded: `sharpi pull {name}` does that")
    return str(found.path)


def _routes(module: str, server: ApiServer) -> list[BaseRoute]:
    name = f"sharpi.serve.{module}"
    if find_spec(name) is None:
        return []
    routes: list[BaseRoute] = importlib.import_module(name).routes(server)
    return routes


class _Labels:
    """Names requests in metrics by their endpoints: paths that clients make up must not become new counters."""

    def __init__(self, routes: list[BaseRoute]) -> None:
        paths = [route.path for route in routes if isinstance(route, Route)]
        self._whole = {path for path in paths if "{" not in path}
        self._begun = {path.partition("{")[0]: path for path in paths if "{" in path}

    def __call__(self, path: str) -> str:
        if path in self._whole:
            return path
        return next((name for begin, name in self._begun.items() if path.startswith(begin)), "other")


def _lifespan(server: ApiServer, failed: Callable[[str], None] | None) -> Lifespan[Starlette]:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(server.watch.keep_looking())]
        if server.settings.preload:
            tasks.append(asyncio.create_task(_preload(server, failed)))
        try:
            yield
        finally:
            server.traffic.ending = True
            server.store.end()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.store.close()

    return lifespan


async def _preload(server: ApiServer, failed: Callable[[str], None] | None) -> None:
    """Loads the first model, so that the first request need not wait for it."""
    server.store.failures_are_told = failed is not None
    try:
        async with server.store.lease(None):
            _log.info("ready")
    except ApiError as error:
        if failed is not None and not server.traffic.ending:
            failed(error.message)
    finally:
        server.store.failures_are_told = False


# --- errors -----------------------------------------------------------------------------------------------------------


def _answer(request: Request, error: ApiError) -> Response:
    return Response(encoded(request.url.path, error), error.status, error.headers, "application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _answer(request, error)


async def _not_served(request: Request, error: Exception) -> Response:
    """A path or a method that there is not."""
    assert isinstance(error, HTTPException)
    messages = {404: f"there is no {request.url.path[:200]!r} here",
                405: f"{request.url.path[:200]!r} does not take {request.method}"}
    message = messages.get(error.status_code, error.detail)
    return _answer(request, http_error(error.status_code, message, headers=error.headers))


async def _gone(request: Request, error: Exception) -> Response:
    """The client went away before it had sent its body."""
    return Response(status_code=GONE)


async def _broken(request: Request, error: Exception) -> Response:
    """A bug. Its text may hold anything, so it goes to the log only."""
    return _answer(request, http_error(500, "the server has failed at this request; its log says how",
                                       code="internal_error"))
