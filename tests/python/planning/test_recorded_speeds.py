"""Predictions against speeds that were measured on a GPU, so that a constant that makes no sense is noticed.

The other tests of predictions check sums by the same sums. Here are real models' shapes, planned as `sharpi plan` does
for the machine of the measurement, and what the model then did; see `data/recorded_speeds.json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fake_weights import MACHINE
from recorded_models import recorded, write_without_weights

from sharpi import model as models
from sharpi.machine.hardware import Gpu
from sharpi.planning.plan import Plan
from sharpi.planning.planner import make_plan
from sharpi.planning.prediction.streams import forecast

WHAT = ("decode", "prefill", "draft_step")
GIB = 1 << 30


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By name: the file and the core's description."""
    folder = tmp_path_factory.mktemp("recorded")

    @cache
    def describe(name: str) -> Any:
        path: Path = folder / f"{name}.gguf"
        write_without_weights(path, name)
        return models.describe(path)

    return describe


def planned(row: dict[str, Any], described: Any, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """The plan of the measured run."""
    file, spec = described(row["model"])
    rates = {name: value for name, value in recorded()["machines"][row["machine"]].items() if name != "said"}
    monkeypatch.setattr(
        "sharpi.planning.planner.current_profile", lambda measure, announce=None, gpu_index=0: replace(MACHINE, **rates)
    )
    monkeypatch.setattr("sharpi.planning.planner.gpu", lambda: Gpu("NVIDIA H200", 0, "9.0", 132, 140 * GIB, 139 * GIB))
    for name in ("SHARPI_CUDA_PARTIAL_WEIGHT_CACHE", "SHARPI_CUDA_PARTIAL_WEIGHT_CACHE_GB", "SHARPI_CPU_MOE"):
        monkeypatch.delenv(name, raising=False)
    if "cached" in row:
        whole = sum(tensor.nbytes for tensor in file.tensors)
        monkeypatch.setenv("SHARPI_CUDA_PARTIAL_WEIGHT_CACHE_GB", f"{whole * row['cached'] / GIB:.6f}")
    monkeypatch.setenv("SHARPI_CUDA_ROW_SPLIT", str(int(row.get("cpu_rows", True))))
    vram = row["vram_gib"] * GIB if "vram_gib" in row else None
    return make_plan(file, spec, device="cuda", vram=vram, context=row.get("depth", 2304), threads=16,
                     cpu_moe=row.get("cpu_moe"), prompt=row.get("prompt"), shown=True, ram=125 * GIB)


def predicted(row: dict[str, Any], plan: Plan) -> Iterator[tuple[str, float]]:
    """What was measured, and the speed that is predicted for it."""
    assert plan.decode is not None and plan.prefill is not None and plan.fits and plan.batch == 2048
    decode = plan.decode_full if "depth" in row else plan.decode
    assert decode is not None
    speeds = {"decode": decode.tokens_per_second, "prefill": plan.prefill.tokens_per_second,
              "draft_step": 1 + (plan.draft_cost or 0.0)}
    yield from ((what, speeds[what]) for what in WHAT if what in row)


def name_of(row: dict[str, Any]) -> str:
    return "-".join(
        str(row[name])
        for name in ("machine", "model", "cached", "cpu_rows", "vram_gib", "cpu_moe", "prompt", "depth")
        if name in row
    )


@pytest.mark.parametrize("row", recorded()["measured"], ids=name_of)
def test_a_prediction_is_as_near_as_it_was(row: dict[str, Any], described: Any,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    for what, speed in predicted(row, planned(row, described, monkeypatch)):
        measured, within = row[what]
        assert speed == pytest.approx(measured, rel=within / 100), f"{what} of {name_of(row)}, {row['section']}"


@pytest.mark.parametrize("row", recorded()["shared_steps"], ids=name_of)
def test_the_time_of_a_shared_step_is_as_near(row: dict[str, Any], described: Any,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps after 256 tokens of each row, up to 64 rows."""
    plan, (file, spec) = planned(row, described, monkeypatch), described(row["model"])
    for rows, measured in row["milliseconds"].items():
        expected = forecast(plan, file, spec, int(rows), 342)
        assert expected is not None
        assert 1e3 * expected.step_seconds == pytest.approx(measured, rel=row["within"] / 100), f"{rows} rows"


def test_the_files_are_the_models(described: Any) -> None:
    """Their bytes are those of the table, and a token of theirs reads what RESULTS.md says."""
    for name, gib in (("qwen3-8b", 4.68), ("qwen3-30b-a3b", 17.28), ("qwen3.6-27b", 15.65)):
        file, spec = described(name)
        assert sum(tensor.nbytes for tensor in file.tensors) / GIB == pytest.approx(gib, abs=0.005)
        assert not any(path.stat().st_blocks * 512 > 4 << 20 for path in file.paths), "it is a hole"
    read = {name: sum(use[4] for use in described(name)[1].tensor_uses()) / 1e9
            for name in ("smollm2-1.7b", "qwen3-8b", "qwen3-30b-a3b")}
    assert read == pytest.approx({"smollm2-1.7b": 1.05, "qwen3-8b": 4.67, "qwen3-30b-a3b": 1.92}, rel=0.02)
