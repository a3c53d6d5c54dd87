"""A plan worth saving, and the GPU it is for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fake_weights import GIB, MACHINE, FakeWeights

from sharpi.machine.hardware import Gpu
from sharpi.planning.plan import Plan
from sharpi.planning.planner import make_plan

CARD = Gpu("Some GPU", 0, "9.0", 132, 80 * GIB, 79 * GIB)


def plan_of(model: FakeWeights, **options: Any) -> Plan:
    """A plan with something of everything: resident, direct and the CPU's."""
    slow = replace(MACHINE, pcie_bytes_per_second_shared=1e9, pcie_bytes_per_second=1e9)
    return make_plan(model, model, **{"device": "cuda", "vram": model.total * 2 // 3, "context": 1000, "batch": 100,
                                      "threads": 3, "profile": slow, "shown": True, **options})
