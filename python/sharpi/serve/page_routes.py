"""The page at `/`: static files of the package, which speak only to the server that they come from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

__all__ = ["PAGE_HEADERS", "is_page", "routes"]

# No script, style or request but the server's own, none of them inline, and no HTML parsed from a text: a model's
# answer is shown by DOM calls, and would stay harmless if one of them were wrong.
_POLICY = ("default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
           "require-trusted-types-for 'script'; trusted-types 'none'")

PAGE_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    # The browser keeps the files and asks whether they are still the same, so a new version is seen at once.
    "Cache-Control": "no-cache",
}

_TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8",
          ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}


@dataclass(frozen=True)
class _File:
    content: bytes
    type: str
    tag: str


def is_page(path: str) -> bool:
    """Whether a path belongs to the page. A browser cannot send a key for these, and they tell nothing."""
    return path == "/" or path.startswith("/page/")


def routes(server: object = None) -> list[BaseRoute]:
    """Reads the files once; a path that names none of them is 404, whatever is in the folder."""
    files = {file.name: _read(file.name, file.read_bytes())
             for file in (resources.files(__package__) / "page").iterdir() if _suffix(file.name) in _TYPES}

    async def start(request: Request) -> Response:
        response = _answer(request, files["index.html"])
        response.headers["Vary"] = "Accept"  # others than browsers are greeted here, as by Ollama
        return response

    async def part(request: Request) -> Response:
        file = files.get(request.path_params["name"])
        return _answer(request, file) if file else Response(status_code=404, headers=PAGE_HEADERS)

    return [Route("/", start), Route("/page/{name}", part)]


def _suffix(name: str) -> str:
    return name[name.rfind("."):]


def _read(name: str, content: bytes) -> _File:
    return _File(content, _TYPES[_suffix(name)], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def _answer(request: Request, file: _File) -> Response:
    headers = {**PAGE_HEADERS, "ETag": file.tag}
    if _same(request.headers.getlist("if-none-match"), file.tag):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers={**headers, "Content-Type": file.type})


def _same(known: Iterable[str], tag: str) -> bool:
    """Whether the browser has this version already. A proxy that compresses marks the tag as weak."""
    tags = [part.strip().removeprefix("W/") for header in known for part in header.split(",")]
    return tag in tags or "*" in tags
