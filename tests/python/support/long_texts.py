"""Logits of a text of 32,768 tokens: what goes wrong a little with each token shows at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sharpi import Model

LONG = 32768


def long_logits(path: Path, **options: Any) -> tuple[list[int], np.ndarray]:
    """A random text, and the logits of each of its tokens."""
    tokens = np.random.default_rng(1).integers(0, 96, LONG).tolist()
    with Model.load(path, **{"device": "cpu", "threads": 2, "batch": 512, "context": LONG, **options}) as model:
        return tokens, model.logits(tokens)
