"""Prompts that begin alike, and what a scheduler answers them: for tests of what outlives the cache's memory."""

from __future__ import annotations

from typing import Any

BEGINNING = [5 + (7 * i) % 300 for i in range(192)]
PROMPT = [*BEGINNING, 11, 12, 13]
LONGER = [*BEGINNING, 40, 41, 42, 43, 44]


def said(scheduler: Any, prompt: list[int], **options: Any) -> tuple[list[Any], int]:
    """The tokens with all that is known of them, and how many of the prompt were not computed."""
    answer = scheduler.submit(prompt, max_tokens=12, temperature=0.8, seed=3, scores=3, ignore_end=True, **options)
    return [(token.id, token.logprob, token.top) for token in answer], answer.figures["reused_tokens"]
