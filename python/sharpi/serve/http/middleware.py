"""What every request passes on its way to an API. All of it is plain ASGI: Starlette's BaseHTTPMiddleware would hide
from the APIs that a client has gone.

From the outside in: `Observed` counts, `CrossOrigin` (Starlette's) answers pages of other origins, `Guarded` checks
where the request comes from and its key, `Gated` refuses requests when the server ends, and `Bounded` limits bodies.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sharpi.serve.errors import ApiError
from sharpi.serve.http import limits
from sharpi.serve.http.keys import Keys
from sharpi.serve.http.traffic import Traffic
from sharpi.serve.http.wording import encoded, error_headers, http_error
from sharpi.serve.models.store import ending_error
from sharpi.serve.settings import ServerSettings, is_loopback
from sharpi.serve.sse import BODIES

__all__ = ["Bounded", "Gated", "Guarded", "Hosts", "Observed", "refuse"]

# What health checks need, and what a browser fetches before it can know a key.
_WITHOUT_KEY = frozenset({"/", "/health", "/v1/health", "/favicon.ico"})
_PAGE = "/page/"
# Of a server that ends, these still tell how it is.
_WHILE_ENDING = frozenset({"/health", "/v1/health", "/metrics"})
_READING = ("GET", "HEAD", "OPTIONS")

_log = logging.getLogger(__name__)

Record = Callable[[str, int, float], None]
"""Is told the path, the status and the seconds of each request; status 0: there was no answer."""


async def refuse(scope: Scope, send: Send, error: ApiError) -> None:
    """Answers with an error, in the shape of the path's API."""
    body = encoded(scope["path"], error)
    await send({"type": "http.response.start", "status": error.status, "headers": error_headers(error, body)})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for known, value in scope["headers"] if known == name), None)


class Observed:
    """Counts each request, and logs it without its contents."""

    def __init__(self, app: ASGIApp, traffic: Traffic, record: Record) -> None:
        self._app, self._traffic, self._record = app, traffic, record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began, status = time.perf_counter(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._traffic.active += 1
        scope[BODIES] = send
        try:
            await self._app(scope, receive, watched)
        except Exception:  # Starlette answers it outside of here
            status = status or 500
            raise
        finally:
            self._traffic.active -= 1
            seconds = time.perf_counter() - began
            self._record(scope["path"], status, seconds)
            _log.info("%s %s %d %.3f s", scope["method"], ascii(scope["path"][:200])[1:-1], status, seconds)


class Hosts:
    """The names in the Host header by which this server may be reached. A page of another site that has its name lead
    to this machine (DNS rebinding) comes with that name."""

    def __init__(self, settings: ServerSettings) -> None:
        names = {"localhost", "127.0.0.1", "::1", settings.host.strip("[]").lower(),
                 *(host.lower() for host in settings.hosts)}
        self._any = "*" in names
        self._addresses = not is_loopback(settings.host)
        if self._addresses:
            names.add(socket.gethostname().lower())
            # Nobody else's page has a key.
            self._any |= settings.has_keys
        self._names = names

    def allows(self, header: bytes | None) -> bool:
        """Clients that send no Host are no browsers."""
        if self._any or header is None:
            return True
        name = _host_name(header.decode("latin-1").strip().lower())
        if name in self._names or name.endswith(".localhost"):
            return True
        return self._addresses and _is_address(name)


def _host_name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Guarded:
    """Lets requests through that come by a known name, not from a foreign page, and with a key if one is needed. The
    state of the request then has `client`: a name for the owner of the key; empty without keys."""

    def __init__(self, app: ASGIApp, hosts: Hosts, keys: Keys, origins: tuple[str, ...]) -> None:
        self._app, self._hosts, self._keys, self._origins = app, hosts, keys, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        client = self._client(scope)
        if isinstance(client, ApiError):
            return await refuse(scope, send, client)
        scope.setdefault("state", {})["client"] = client
        await self._app(scope, receive, send)

    def _client(self, scope: Scope) -> str | ApiError:
        if not self._hosts.allows(_header(scope, b"host")):
            return http_error(403, "this server is not known by the name in the Host header; --allowed-host NAME lets"
                                   " it be", code="host_not_allowed")
        if self._is_foreign(scope):
            return http_error(403, "pages of other origins may not use this server; --cors-origin ORIGIN lets one",
                              code="origin_not_allowed")
        if not self._keys.needed:
            return ""
        owner = self._keys.owner(_key(scope))
        if owner is not None:
            return owner
        if scope["path"] in _WITHOUT_KEY or scope["path"].startswith(_PAGE):
            return ""
        return http_error(401, "the API key is missing or wrong: send it as \"Authorization: Bearer KEY\"",
                          code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _is_foreign(self, scope: Scope) -> bool:
        """Whether a page of another origin sends this. A browser lets it send, and only keeps it from reading the
        answer."""
        if scope["method"] in _READING or _header(scope, b"sec-fetch-site") not in (b"cross-site", b"same-site"):
            return False
        origin = (_header(scope, b"origin") or b"").decode("latin-1")
        return not ("*" in self._origins or origin in self._origins)


def _key(scope: Scope) -> bytes:
    """The key that a request has, as OpenAI's clients or as Anthropic's send it; empty if it has none."""
    scheme, _, key = (_header(scope, b"authorization") or b"").partition(b" ")
    if scheme.lower() == b"bearer" and key:
        return key.strip()
    return _header(scope, b"x-api-key") or b""


class Gated:
    """Refuses requests while the server ends. Those that had to be given up before they were answered are told so."""

    def __init__(self, app: ASGIApp, traffic: Traffic) -> None:
        self._app, self._traffic = app, traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if self._traffic.ending and scope["path"] not in _WHILE_ENDING:
            error = ending_error()
            error.headers["Connection"] = "close"
            return await refuse(scope, send, error)
        answered = False

        async def watched(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if answered or not self._traffic.ending:
                raise
            await refuse(scope, send, ending_error())


class Bounded:
    """Limits the body's size, and the time in which it comes. The API that reads the body sees an `ApiError`."""

    def __init__(self, app: ASGIApp, body_bytes: int = limits.BODY_BYTES,
                 body_seconds: float = limits.BODY_SECONDS) -> None:
        self._app, self._bytes, self._seconds = app, body_bytes, body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        announced = _header(scope, b"content-length") or b""
        if announced.isdigit() and (len(announced) > 18 or int(announced) > self._bytes):
            return await refuse(scope, send, self._too_large())
        deadline, read, complete = time.monotonic() + self._seconds, 0, False

        async def bounded() -> Message:
            nonlocal read, complete
            if complete:  # from here on it only tells that the client has gone
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(0.0, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                raise http_error(408, "the body did not come in time", headers={"Connection": "close"}) from None
            read += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if read > self._bytes:
                raise self._too_large()
            return message

        await self._app(scope, bounded, send)

    def _too_large(self) -> ApiError:
        # The rest of the body would have to be read before the connection could be used again.
        return http_error(413, f"the body is larger than {self._bytes:,} bytes", code="request_too_large",
                          headers={"Connection": "close"})
