"""What a client is told if a request cannot be served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ApiError"]


class ApiError(Exception):
    """Ends a request with an HTTP status. Each API words it in its own shape.

    kind: the error's type in OpenAI's terms, such as "invalid_request_error". param: the field that is wrong. code: a
    short name for programs, such as "exceed_context_size_error". details: further fields of the body. headers: such as
    Retry-After.
    """

    def __init__(self, status: int, kind: str, message: str, *, param: str | None = None, code: str | None = None,
                 details: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code
        self.details = dict(details or {})
        self.headers = dict(headers or {})
