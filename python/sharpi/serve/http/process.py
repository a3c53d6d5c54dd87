"""Runs the application as a process: sockets, signals, and an orderly end.

SIGTERM or SIGINT: new requests are refused, those that have begun may finish within `drain_seconds`, and what is left
then is cancelled. A second signal ends the process at once. SIGHUP: the key file is read again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from sharpi.errors import InvalidRequestError
from sharpi.serve.app import create_app, server_of
from sharpi.serve.http.protocol import BoundedProtocol
from sharpi.serve.models.catalog import ModelFile
from sharpi.serve.settings import ServerSettings, is_loopback

__all__ = ["address", "listen", "serve"]

_BACKLOG = 1024
# How long the event loop may keep the interpreter while the scheduler waits to ask for a mask. Python's own limit is
# ten times as long, which a step of a GPU would notice.
_SWITCH_SECONDS = 0.0005
_CANCELLED_SECONDS = 3  # for what is cancelled to tell its clients
_ENDING = (signal.SIGINT, signal.SIGTERM)

Tell = Callable[[str], None]


def serve(settings: ServerSettings, files: tuple[ModelFile, ...], tell: Tell) -> str | None:
    """Serves until a signal ends it. tell: is called with lines for people. Returns why the server could not begin, if
    it could not. Raises `SharpiError` for settings that cannot be carried out, and `OSError` for an address that cannot
    be listened to."""
    settings.require_safe()
    sys.setswitchinterval(_SWITCH_SECONDS)
    failures: list[str] = []
    app = create_app(settings, files, failed=failures.append)
    with contextlib.closing(listen(settings.host, settings.port)) as listening:
        # What uvicorn says is for its own users, but for the traces of bugs.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        config = uvicorn.Config(
            app, http=BoundedProtocol, loop="uvloop", ws="none", lifespan="on", log_config=None, access_log=False,
            server_header=False, proxy_headers=False, timeout_keep_alive=round(settings.keep_alive_seconds) or 1,
            timeout_graceful_shutdown=_CANCELLED_SECONDS)
        process = _Process(config, app, settings, failures, lambda: _greet(settings, files, listening, tell), tell)
        process.run([listening])
    return failures[0] if failures else None


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there, on IPv4 or IPv6 as the host says. Raises `InvalidRequestError`."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM,
                                                              flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise InvalidRequestError(f"{host} is no address to listen at: {_reason(error)}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise InvalidRequestError(f"{host} port {port} cannot be listened at: {_reason(error)}") from error
    return listening


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def address(host: str, port: int) -> str:
    """What to type into a browser on this machine."""
    if host in ("0.0.0.0", "::", "[::]"):
        host = "localhost"
    return f"http://[{host.strip('[]')}]:{port}" if ":" in host else f"http://{host}:{port}"


def _greet(settings: ServerSettings, files: tuple[ModelFile, ...], listening: socket.socket, tell: Tell) -> None:
    port = listening.getsockname()[1]
    url = address(settings.host, port)
    tell(f"listening at {url} for {settings.host} port {port}" if not is_loopback(settings.host)
         else f"listening at {url}")
    tell(f"the page is {url}/ and the API {url}/v1")
    names = [file.name for file in files]
    tell(f"the model is {names[0]}" if len(names) == 1 else f"the models are {', '.join(names)}")
    if settings.insecure and not settings.has_keys and not is_loopback(settings.host):
        tell("anyone who can reach this machine can use the models: there is no key")


class _Process(uvicorn.Server):
    """uvicorn's server, with an end that lets requests finish."""

    def __init__(self, config: uvicorn.Config, app: Starlette, settings: ServerSettings, failures: list[str],
                 begun: Callable[[], None], tell: Tell) -> None:
        super().__init__(config)
        self._server = server_of(app)
        self._drain_seconds = settings.drain_seconds
        self._failures = failures
        self._begun = begun
        self._tell = tell
        self._reload = False
        self._ending_since: float | None = None
        self._told = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._begun()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if self._reload:
            self._reload = False
            self._server.keys.reload()
        if self._failures:
            self.should_exit = True
        if self._ending_since is not None:
            self._drain(time.monotonic() - self._ending_since)
        return await super().on_tick(counter)

    def _drain(self, seconds: float) -> None:
        active = self._server.traffic.active
        self._server.traffic.ending = True
        self._server.store.end()
        if not self._told and active:
            self._told = True
            self._tell(f"ending when {active} requests are finished, at most {self._drain_seconds:g} s;"
                       " a second signal ends at once")
        if not active or seconds >= self._drain_seconds:
            self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The process ends as if nothing had happened: a signal is the usual way to end it."""
        before = {number: signal.signal(number, self.handle_exit) for number in _ENDING}
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._ask_reload)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._ending_since is None:
            self._ending_since = time.monotonic()
        else:
            os._exit(128 + sig)  # a thread may be busy for minutes, loading a model

    def _ask_reload(self, sig: int, frame: FrameType | None) -> None:
        self._reload = True
