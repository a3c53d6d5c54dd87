"""Shapes that OpenAI's chat and completions share."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sharpi import __version__
from sharpi.serve.errors import ApiError
from sharpi.serve.http.wording import openai_error
from sharpi.serve.sse import COMMENT
from sharpi.serve.turns import Ended, Score, Usage

__all__ = ["FINGERPRINT", "LOWEST", "OpenAiWording", "ending", "likelihood", "timings", "usage_body"]

LOWEST = -9999.0  # JSON knows no infinities


# What decides answers beside the request and the model's file.
FINGERPRINT = f"sharpi-{__version__}"


def ending(ended: Ended) -> dict[str, str]:
    """How a choice ended. OpenAI has no word for an answer whose time is over, and strict clients take no other: it is
    cut off, which they know as "length". `stop_reason`, as vLLM has it, tells it apart, and which text ended one."""
    if ended.reason == "timeout":
        return {"finish_reason": "length", "stop_reason": "timeout"}
    named = {} if ended.stop_text is None else {"stop_reason": ended.stop_text}
    return {"finish_reason": ended.reason, **named}


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


class OpenAiWording:
    """What both have in common: the fields that every chunk has, and how a stream ends. Its last chunk has the timings:
    that of the usage, if it is asked for, else the one that ends the last choice."""

    def __init__(self, id: str, object: str, model: str, choices: int, include_usage: bool) -> None:
        self._head = {"id": f"{id}-{secrets.token_hex(14)}", "object": object, "created": int(time.time()),
                      "model": model, "system_fingerprint": FINGERPRINT}
        self._include_usage = include_usage
        self._unfinished = choices
        self._last = b""  # the chunk that waits for the timings
        # What every chunk ends with, but for that of the usage.
        self._tail = ',"usage":null}\n\n' if include_usage else "}\n\n"

    def failed(self, error: ApiError) -> bytes:
        return self._last + self._data(openai_error(error))

    def end(self) -> bytes:
        return self._last + b"data: [DONE]\n\n"

    def idle(self) -> bytes:
        return COMMENT

    def _finished(self, chunk: bytes) -> bytes:
        """What is said when a choice ends, whose last chunk this is."""
        self._unfinished -= 1
        if self._unfinished or self._include_usage:
            return chunk
        self._last = chunk
        return b""

    def _usage(self, usage: Usage) -> bytes:
        if not self._include_usage:
            last, self._last = self._last.removesuffix(b"}\n\n"), b""
            return last + f',"timings":{json.dumps(timings(usage))}}}\n\n'.encode() if last else b""
        return self._data({**self._head, "choices": [], "usage": usage_body(usage), "timings": timings(usage)})

    @staticmethod
    def _data(value: Mapping[str, Any]) -> bytes:
        return f"data: {json.dumps(value)}\n\n".encode()


def likelihood(score: Score) -> float:
    return LOWEST if score.logprob is None or not math.isfinite(score.logprob) else score.logprob
