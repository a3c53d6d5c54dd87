"""Errors as the clients of each API expect them, for what is refused before the API sees it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from sharpi.serve.errors import ApiError

__all__ = ["encoded", "error_body", "error_headers", "http_error"]

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
          429: "rate_limit_error", 500: "server_error", 503: "server_error"}
_ANTHROPIC = {"server_error": "api_error", "not_found_error": "not_found_error"}


def http_error(status: int, message: str, *, kind: str | None = None, code: str | None = None,
               headers: Mapping[str, str] | None = None) -> ApiError:
    """An error that a status says enough about."""
    return ApiError(status, kind or _KINDS.get(status, "invalid_request_error"), message, code=code, headers=headers)


def error_body(path: str, error: ApiError) -> dict[str, Any]:
    """The body of a refusal, in the shape of the API that has this path: Anthropic's, Ollama's, or else OpenAI's."""
    if path.startswith("/v1/messages"):
        kind = "overloaded_error" if error.status == 503 else _ANTHROPIC.get(error.kind, error.kind)
        return {"type": "error", "error": {"type": kind, "message": error.message},
                "request_id": f"req_{secrets.token_hex(12)}"}
    if path.startswith("/api/"):
        return {"error": error.message}
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code,
                      **error.details}}


def error_headers(error: ApiError, body: bytes) -> list[tuple[bytes, bytes]]:
    """The headers of a refusal with this body, as ASGI has them."""
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def encoded(path: str, error: ApiError) -> bytes:
    """`error_body` as JSON."""
    return json.dumps(error_body(path, error), ensure_ascii=False).encode("utf-8", "replace")
