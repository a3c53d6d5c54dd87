"""What is worth saving: a plan with the GPU it is for, and expert statistics with random counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from fake_weights import GIB, MACHINE, FakeWeights

from sharpi.machine.hardware import Gpu
from sharpi.planning.expert_stats import COUNTS, ExpertStats, Predictor
from sharpi.planning.plan import Plan
from sharpi.planning.planner import make_plan

CARD = Gpu("Some GPU", 0, "9.0", 132, 80 * GIB, 79 * GIB)


def plan_of(model: FakeWeights, **options: Any) -> Plan:
    """A plan with something of everything: resident, direct and the CPU's."""
    slow = replace(MACHINE, pcie_bytes_per_second_shared=1e9, pcie_bytes_per_second=1e9)
    return make_plan(model, model, **{"device": "cuda", "vram": model.total * 2 // 3, "context": 1000, "batch": 100,
                                      "threads": 3, "profile": slow, "shown": True, **options})


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
