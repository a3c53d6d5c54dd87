"""Requests' bodies: read, and refused by the name of the field that is wrong."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from sharpi.serve.errors import ApiError

__all__ = ["Body", "error_body", "read_body"]

B = TypeVar("B", bound="Body")

_LONGEST = 200  # characters of a client's own text in an error


class Body(BaseModel):
    """An object of a request. Unknown fields are ignored, a null is the same as nothing, and no text is taken for a
    number."""

    model_config = ConfigDict(extra="ignore", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {name: part for name, part in value.items() if part is not None} if isinstance(value, dict) else value


def read_body(kind: type[B], body: bytes) -> B:
    """Raises `ApiError` for a body that is not of this kind."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
        text = f"{name}: {first['msg']}" if name else f"the body is wrong: {first['msg']}"
        raise ApiError(400, "invalid_request_error", text[:_LONGEST], param=name or None) from None


def error_body(error: ApiError) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code,
                      **error.details}}
