"""The bounds of a request before an API reads it; those of its fields are in `apis/fields`."""

from __future__ import annotations

__all__ = ["BODY_BYTES", "BODY_SECONDS", "HEADER_BYTES", "HEADER_SECONDS"]

BODY_BYTES, BODY_SECONDS = 8 << 20, 120.0
HEADER_BYTES, HEADER_SECONDS = 64 << 10, 30.0
