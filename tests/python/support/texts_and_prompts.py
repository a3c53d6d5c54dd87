"""A text long enough to show small errors, and prompts that begin alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sharpi import Model

LONG = 32768
BEGINNING = [5 + (7 * i) % 300 for i in range(192)]
PROMPT = [*BEGINNING, 11, 12, 13]
LONGER = [*BEGINNING, 40, 41, 42, 43, 44]


def long_logits(path: Path, **options: Any) -> tuple[list[int], np.ndarray]:
    """A random text of 32,768 tokens, and the logits of each: what goes wrong a little with each shows at its end."""
    tokens = np.random.default_rng(1).integers(0, 96, LONG).tolist()
    with Model.load(path, **{"device": "cpu", "threads": 2, "batch": 512, "context": LONG, **options}) as model:
        return tokens, model.logits(tokens)


def said(scheduler: Any, prompt: list[int], **options: Any) -> tuple[list[Any], int]:
    """The tokens with all that is known of them, and how many of the prompt were not computed."""
    answer = scheduler.submit(prompt, max_tokens=12, temperature=0.8, seed=3, scores=3, ignore_end=True, **options)
    return [(token.id, token.logprob, token.top) for token in answer], answer.figures["reused_tokens"]
