"""Errors as the clients of each API expect them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any, Literal

from sharpi.serve.errors import ApiError

__all__ = ["anthropic_error", "encoded", "error_headers", "http_error", "ollama_error", "openai_error",
           "shape_of"]

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
          429: "rate_limit_error", 500: "server_error", 503: "server_error"}
_ANTHROPIC = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
              404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
              504: "timeout_error"}


def http_error(status: int, message: str, *, kind: str | None = None, code: str | None = None,
               headers: Mapping[str, str] | None = None) -> ApiError:
    """An error that a status says enough about."""
    return ApiError(status, kind or _KINDS.get(status, "invalid_request_error"), message, code=code, headers=headers)


def openai_error(error: ApiError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code,
                      **error.details}}


def anthropic_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """The body of a refusal, and the data of an `error` event."""
    message = _named(error)
    if error.code == "exceed_context_size_error":
        # Claude Code shortens the conversation if it reads these words, which are Anthropic's.
        message = f"prompt is too long: {error.details['n_prompt_tokens']} tokens > {error.details['n_ctx']} maximum"
    kind = _ANTHROPIC.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def ollama_error(error: ApiError) -> dict[str, Any]:
    return {"error": _named(error)}


def _named(error: ApiError) -> str:
    """The message, for clients that have no place for the name of the field."""
    named = error.param is not None and error.param not in error.message
    return f"{error.param}: {error.message}" if named else error.message


def error_headers(error: ApiError, body: bytes) -> list[tuple[bytes, bytes]]:
    """The headers of a refusal with this body, as ASGI has them."""
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def shape_of(path: str) -> Literal["openai", "anthropic", "ollama"]:
    """Whose clients ask for this path."""
    if path.startswith("/v1/messages"):
        return "anthropic"
    return "ollama" if path.startswith("/api/") else "openai"


def encoded(path: str, error: ApiError) -> bytes:
    """The body of a refusal as JSON, in the shape of the API that has this path: Anthropic's, Ollama's, or else
    OpenAI's."""
    shape = shape_of(path)
    if shape == "anthropic":
        body = anthropic_error(error, f"req_{secrets.token_hex(12)}")
    else:
        body = ollama_error(error) if shape == "ollama" else openai_error(error)
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
