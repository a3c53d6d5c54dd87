"""What tests of plans share: plans of models that are only sizes, made or shown by the command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_model import cli_runner
from fake_weights import MACHINE, FakeWeights

from sharpi.cli import main
from sharpi.errors import InvalidRequestError
from sharpi.machine.profile import ASSUMED
from sharpi.planning.plan import Plan
from sharpi.planning.planner import make_plan


def plan_of(model: FakeWeights, vram: int | None = None, **options: Any) -> Plan:
    """A plan for the GPU; the options are those of `make_plan`."""
    return make_plan(model, model, **{"device": "cuda", "vram": vram, "context": 1000, "batch": 100, "threads": 16,
                                      **options})


def held(plan: Plan) -> set[int]:
    """The tensors that have a place of their own in VRAM."""
    return {tensor for tensor, home in enumerate(plan.homes) if home.home == "vram"}


def refused(call: Callable[[], Any], error: type[Exception] = InvalidRequestError) -> str:
    """The one line in which a call is refused."""
    with pytest.raises(error) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def machine_with(ram: float, pcie: float = 50e9) -> Any:
    """`MACHINE`, with buses of these rates that do not get in each other's way."""
    return replace(MACHINE, ram_bytes_per_second=ram, ram_bytes_per_second_shared=ram, pcie_bytes_per_second=pcie,
                   pcie_bytes_per_second_shared=pcie)


class Measuring:
    """Stands in for the profile's cache: what it holds, and how often it was measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cached: bool = False) -> None:
        self.cached = cached
        self.measured = 0
        self.said: list[str] = []
        monkeypatch.setattr("sharpi.planning.planner.current_profile", self)

    def __call__(self, measure: bool, announce: Callable[[str], None] | None = None, gpu_index: int = 0) -> Any:
        if not self.cached and measure:
            assert announce is not None
            announce("")
            self.measured += 1
            self.cached = True
        return MACHINE if self.cached else ASSUMED


def plan_command(monkeypatch: pytest.MonkeyPatch, model: FakeWeights, *arguments: str) -> Any:
    """What `sharpi plan` says of a model."""
    monkeypatch.setattr("sharpi.loading.description.describe", lambda path=None, mtp=True, rope=None: (model, model))
    monkeypatch.setattr(
        "sharpi.machine.hardware.core_count", lambda: 16
    )  # on any machine, as many as threads are asked for
    return cli_runner().invoke(main, ["plan", "-c", "1000", "-b", "100", "-t", "16", *arguments],
                               catch_exceptions=False, prog_name="sharpi")
