"""`benchmarks/constraints.py --speed`: that it compares answers of one length, and what it makes of the times."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import constraints  # noqa: E402

from sharpi import Model  # noqa: E402


def test_both_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    constraints.main(["--speed", "--device", "cpu", "--rounds", "1", "--streams", "1", "3"])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == ["1", "3"]
    assert all(float(cell) > 0 for row in rows for cell in row.replace("%", "").split("|")[2:-1])


def test_an_answer_that_ends_early_is_no_measurement() -> None:
    class Short:
        def __init__(self) -> None:
            self.count = 0

        def fill(self, words: Any) -> bool:
            return False

        def accept(self, token: int) -> None:
            self.count += 1

        def rollback(self, tokens: int) -> None:
            self.count -= tokens

        def ended(self) -> bool:
            return self.count == 5

    with Model.load(device="cpu") as model, model.scheduler() as scheduler, pytest.raises(RuntimeError, match=r"\[5\]"):
        asyncio.run(constraints.cost(scheduler, [[1, 2, 3]], Short))


def test_ratios_are_medians_of_pairs() -> None:
    cost = constraints.Cost
    pairs = [(cost(0.1, 1.0), cost(0.2, 4.0)), (cost(0.1, 1.0), cost(0.1, 2.0)), (cost(0.2, 1.0), cost(0.25, 2.0))]
    assert constraints.speed_row(2, pairs) == "| 2 | 10 | 5 | 80.0% | 50.0% |"
