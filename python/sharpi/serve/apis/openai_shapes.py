"""Shapes that OpenAI's chat and completions share."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sharpi import _core
from sharpi.serve.errors import ApiError
from sharpi.serve.turns import Ended, Score, Usage

__all__ = ["LOWEST", "DONE", "error_body", "fingerprint", "finish_reason", "likelihood", "seconds_now", "timings",
           "usage_body"]

DONE = b"data: [DONE]\n\n"
LOWEST = -9999.0  # JSON knows no infinities


def error_body(error: ApiError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code,
                      **error.details}}


@functools.cache
def fingerprint() -> str:
    """What decides answers beside the request and the model's file."""
    return f"sharpi-{_core.version}"


def seconds_now() -> int:
    return int(time.time())


def finish_reason(ended: Ended) -> Literal["stop", "length", "tool_calls"]:
    """OpenAI has no word for an answer whose time is over."""
    return "length" if ended.reason == "timeout" else ended.reason


def usage_body(usage: Usage) -> dict[str, Any]:
    return {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": usage.thinking_tokens}}


def timings(usage: Usage) -> dict[str, Any]:
    """What llama.cpp's server says of speed: of the prompt's part that was computed, and of the tokens after that. Of
    several choices, the slowest."""
    figures: Sequence[Mapping[str, Any]] = usage.figures or ({},)
    first = max(float(one.get("first_token_seconds", 0.0)) for one in figures)
    queued = max(float(one.get("queued_seconds", 0.0)) for one in figures)
    prompt = max(0.0, first - queued)
    predicted = max(0.0, max(float(one.get("seconds", 0.0)) for one in figures) - first)
    computed = usage.prompt_tokens - usage.cached_tokens
    return {"cache_n": usage.cached_tokens, "prompt_n": computed, "prompt_ms": 1000 * prompt,
            "prompt_per_second": computed / prompt if prompt else None, "predicted_n": usage.completion_tokens,
            "predicted_ms": 1000 * predicted,
            "predicted_per_second": usage.completion_tokens / predicted if predicted else None,
            "queued_ms": 1000 * queued}


def likelihood(score: Score) -> float:
    return LOWEST if score.logprob is None or not math.isfinite(score.logprob) else score.logprob
