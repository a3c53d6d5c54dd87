"""The bounds of what a request may ask for, in one place. A client that needs more finds them by name in its refusal."""

from __future__ import annotations

__all__ = ["BODY_BYTES", "BODY_SECONDS", "CHOICES", "HEADER_BYTES", "HEADER_SECONDS", "LOGIT_BIAS", "SCHEMA_BYTES",
           "STOP_CHARACTERS", "STOP_TEXTS", "TOKENIZED_IDS", "TOP_LOGPROBS"]

BODY_BYTES, BODY_SECONDS = 8 << 20, 120.0
HEADER_BYTES, HEADER_SECONDS = 64 << 10, 30.0
CHOICES = 8
STOP_TEXTS, STOP_CHARACTERS = 16, 256
LOGIT_BIAS = 1024
TOP_LOGPROBS = 20
SCHEMA_BYTES = 256 << 10
TOKENIZED_IDS = 1 << 20
