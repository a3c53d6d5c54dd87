"""Expert statistics with random counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from sharpi.planning.expert_stats import COUNTS, ExpertStats, Predictor

PRESENT = (5, 8, 3)
LAYERS = (1, 2, 7)


def random_stats(seed: int = 3, **changes: Any) -> ExpertStats:
    """Three layers, which have different numbers of experts; every count is another."""
    random = np.random.default_rng(seed)
    there = np.arange(max(PRESENT)) < np.array(PRESENT)[:, None]
    counts = {name: random.integers(0, 1 << 40, there.shape).astype(np.uint64) * there for name in COUNTS}
    predictors = (Predictor("next-token", 1000, 370, 500), Predictor("next-layer", 0, 0, 500))
    stats = ExpertStats("tiny", "qwen3moe", "9-abc", LAYERS, PRESENT, **counts, predictors=predictors, capacity=7,
                        resident=6)
    return replace(stats, **changes)


def table(*rows: list[int]) -> np.ndarray:
    return np.array([row + [0] * (max(PRESENT) - len(row)) for row in rows], np.uint64)
