"""Predicted and measured speed: when they are compared, what is said, and when the machine is measured again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_model import cli_runner
from fake_weights import MACHINE, FakeWeights, set_gpu
from profiled_machine import Machine, machine_fixture  # noqa: F401

from sharpi.agreement import LEAST_READ, LEAST_STEPS, Seen, disagreement, seen_in_bench, seen_in_run
from sharpi.cli import main
from sharpi.machine import profile_cache
from sharpi.machine.profile import HardwareProfile
from sharpi.machine.profile_cache import cached_profile, current_profile, keep
from sharpi.machine.type_costs import COST_TYPES
from sharpi.planning.placement import Inventory
from sharpi.planning.planner import make_plan
from sharpi.planning.prediction.decode import decode_on_cpu
from sharpi.words import speed

AGAIN = "this machine's speeds are measured again at the next start"
NOT_AGAIN = "measuring this machine again did not help, the prediction is off for this model"


class Loaded:
    """What a comparison needs of a loaded model."""

    def __init__(self, weights: FakeWeights, **options: Any) -> None:
        self.file = self.spec = weights
        self.plan = make_plan(weights, weights, **{"device": "cpu", "threads": 16, "context": 1000, **options})
        self.engine = SimpleNamespace(notes=[])
        self.hit_rate = self.plan.hit_rate

    def stats(self) -> dict[str, Any]:
        return {"experts": {"hit_rate": self.hit_rate}}


def large() -> FakeWeights:
    """A model of which a token reads more than caches hold."""
    weights = FakeWeights(layers=60)
    assert sum(use.read_bytes for use in Inventory.of(weights, weights).uses) > LEAST_READ
    return weights


def expected(model: Loaded) -> float:
    """The decode that is predicted on the CPU of the machine that is kept."""
    profile = cached_profile()
    assert profile is not None
    return decode_on_cpu(Inventory.of(model.file, model.spec).model_uses, profile, 16).tokens_per_second


def said(model: Loaded, part: float, known: bool = False, elsewhere: bool = False, **changes: Any) -> str | None:
    """What is said of decode at this part of its prediction."""
    seen = Seen(**{"what": "decode", "tokens_per_second": part * expected(model), "tokens": 64, "held": 40.0,
                   **changes})
    return disagreement(model, seen, elsewhere=elsewhere, known=known)  # type: ignore[arg-type]


def measurements(machine: Machine) -> int:
    """How often the machine is measured, counting the next start."""
    current_profile()
    return len(machine.requests)


@pytest.mark.parametrize("changes", [{"disk_bytes": 1}, {"ram_slots": 1}, {"disk_bytes_per_second": 1e9}])
def test_what_the_disk_bounds_is_not_compared(machine: Machine, changes: dict[str, Any]) -> None:
    current_profile()
    model = Loaded(large())
    plan = model.plan
    model.plan = replace(plan, **changes)
    assert said(model, 0.1, known=True) is None
    model.plan = plan
    assert said(model, 0.1, known=True) is not None, "it is only said once"


@pytest.mark.parametrize("part", [1.0, 0.68, 1.32])
def test_a_third_is_near_enough(machine: Machine, part: float) -> None:
    current_profile()
    assert said(Loaded(large()), part, known=True) is None and measurements(machine) == 1


@pytest.mark.parametrize("part", [0.66, 0.1, 1.34, 7.0])
def test_more_than_a_third_off_measures_again_once(machine: Machine, part: float) -> None:
    current_profile()
    model = Loaded(large())
    line = said(model, part)
    assert line == (f"decode was predicted at {expected(model):.1f} tokens/s and ran at"
                    f" {speed(part * expected(model))}: {AGAIN}")
    assert said(model, part, known=True) is None, "it is already to be measured again"
    machine.now += profile_cache.BUSY_AGE
    assert measurements(machine) == 2
    for _ in range(3):
        assert said(model, part) is None
        line = said(model, part, known=True)
        assert line is not None and line.endswith(NOT_AGAIN)
        assert measurements(machine) == 2
    # Another model is another matter.
    other = Loaded(FakeWeights(layers=61))
    assert said(other, part) is not None and measurements(machine) == 3
    assert said(other, part) is None and measurements(machine) == 3


def test_another_machines_plan_is_only_spoken_of(machine: Machine) -> None:
    current_profile()
    model = Loaded(large())
    line = said(model, 0.5, elsewhere=True)
    assert line is not None and "`sharpi hardware` measures this one" in line and measurements(machine) == 1
    assert said(model, 0.9, elsewhere=True) is None
    # Nor is the kept profile doubted for what was predicted from another one.
    model.plan = replace(model.plan, profile=replace(MACHINE, measured="2026-01-01", cpu="Another CPU"))
    assert said(model, 0.1) is not None and measurements(machine) == 1


def test_what_cannot_be_compared_is_not(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    current_profile()
    model = Loaded(large())
    assert said(Loaded(FakeWeights(layers=4)), 0.1) is None, "a small model's weights are in the caches"
    assert said(model, 0.1, held=900_000.0) is None, "the KV cache takes more than what is predicted"
    assert said(Loaded(large(), threads=4), 0.1) is None, "few threads may reach as much as all"
    for name in ("SHARPI_CPU_ISA", "SHARPI_CUDA_GRAPH"):
        monkeypatch.setenv(name, "0")
        assert said(model, 0.1) is None, "a switch makes it slower"
        monkeypatch.delenv(name)
    machine.now += profile_cache.LONGEST_AGE * 2
    assert said(model, 0.1) is None, "an old profile is measured again anyway"
    machine.cpu = "Another CPU"
    assert disagreement(model, Seen("decode", 0.1, 64), elsewhere=False, known=True) is None, "nothing is known"
    machine.cpu = "Test CPU @ 3 GHz"
    machine.now -= profile_cache.LONGEST_AGE * 2
    model.plan = replace(model.plan, profile=replace(MACHINE, assumed=True))
    assert said(model, 0.1) is None, "an assumed machine may be any"
    model.plan = replace(model.plan, profile=None)
    assert said(model, 0.1) is not None


def test_what_a_token_does_not_see_does_not_count(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    current_profile()
    model = Loaded(large())
    assert said(model, 0.1, held=900_000.0) is None
    monkeypatch.setattr(model.spec, "kv_bytes_read", lambda kv_dtype, tokens: min(tokens, 500))
    assert said(model, 0.1, held=900_000.0) is not None


def on_gpu(monkeypatch: pytest.MonkeyPatch, weights: FakeWeights, **options: Any) -> Loaded:
    set_gpu(monkeypatch, 60 << 30)
    return Loaded(weights, device="cuda", batch=2048, context=4000, shown=True, **options)


def test_on_the_gpu_the_plan_is_what_counts(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    current_profile()
    weights = large()
    for vram, prompt in ((None, "fast"), (None, "exact"), (weights.total // 2, "exact"), (weights.total // 2, None)):
        model = on_gpu(monkeypatch, weights, vram=vram, prompt=prompt)
        assert model.plan.decode is not None and model.plan.prefill is not None
        for what, found, tokens in (("decode", model.plan.decode, 64), ("prefill", model.plan.prefill, 2048)):
            for part, off in ((1.0, False), (0.7, False), (1.3, False), (0.6, True), (1.4, True)):
                seen = Seen(what, part * found.tokens_per_second, tokens)
                line = disagreement(model, seen, elsewhere=True, known=True)  # type: ignore[arg-type]
                assert (line is not None) is off, (what, part)
    seen = Seen("prefill", 1.0, 2048)
    assert disagreement(model, replace(seen, tokens=512), elsewhere=True, known=True) is None  # type: ignore[arg-type]
    assert disagreement(model, replace(seen, tokens=4096), elsewhere=True, known=True) is None  # type: ignore[arg-type]
    model.engine.notes.append("only 5 MiB of VRAM are free")
    assert disagreement(model, seen, elsewhere=True, known=True) is None  # type: ignore[arg-type]


def test_experts_are_found_in_slots_as_expected(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    current_profile()
    monkeypatch.setattr("sharpi.agreement.LEAST_READ", 0)
    weights = FakeWeights(layers=6, experts=tuple(range(6)))
    model = on_gpu(monkeypatch, weights, vram=weights.total // 2)
    assert model.plan.decode is not None and model.plan.hit_rate is not None and 0.2 < model.plan.hit_rate < 0.8
    decode = model.plan.decode.tokens_per_second
    for hit_rate, part, line in ((model.plan.hit_rate, 1.0, False), (model.plan.hit_rate + 0.1, 0.5, True),
                                 (model.plan.hit_rate + 0.2, 2.0, False), (model.plan.hit_rate - 0.2, 0.5, False),
                                 (None, 0.5, False)):
        model.hit_rate = hit_rate
        seen = Seen("decode", part * decode, 64)
        found = disagreement(model, seen, elsewhere=True, known=True)  # type: ignore[arg-type]
        assert (found is not None) is line, (hit_rate, part)


def test_what_a_run_tells() -> None:
    stats = {"steps": 32, "drafted_tokens": 0, "reused_tokens": 10, "prompt_tokens": 5,
             "generation_tokens_per_second": 7.5}
    assert seen_in_run(stats) == Seen("decode", 7.5, 32, 31.0)
    assert seen_in_run({**stats, "steps": LEAST_STEPS - 1}) is None and seen_in_run({}) is None
    assert seen_in_run({**stats, "drafted_tokens": 1}) is None


def test_what_a_bench_tells() -> None:
    at = {"tokens_per_second": {"median": 9.0, "min": 1.0, "max": 99.0}}
    entries = [{"kind": "prefill", "tokens": 512, **at}, {"kind": "prefill", "tokens": 255, **at},
               {"kind": "decode", "tokens": 64, "depth": 100, "graphs": True, **at},
               {"kind": "decode", "tokens": 64, "graphs": False, **at}, {"kind": "decode", "tokens": 31, **at},
               {"kind": "drafts", "tokens": 64, "seconds_per_step": {}}, {"kind": "decode", "tokens": 32, **at}]
    assert seen_in_bench(entries) == [Seen("prefill", 9.0, 512), Seen("decode", 9.0, 64, 132.0),
                                      Seen("decode", 9.0, 32, 17.0)]


# --- the commands ---------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> HardwareProfile:
    """A profile of this very machine, kept, by which it is far faster than any; and the bundled model is worth
    comparing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SHARPI_CPU_ISA", "")
    monkeypatch.setattr(profile_cache, "_measures_all", lambda: True)
    monkeypatch.setattr("sharpi.agreement.LEAST_READ", 0)
    here = profile_cache._this_machine()
    rates = {"ram_bytes_per_second": 1e14, "cpu_flops": 1e16}
    gpu = {name: getattr(MACHINE, name) for name in ("pcie_bytes_per_second", "ram_bytes_per_second_shared",
                                                    "pcie_bytes_per_second_shared", "vram_bytes_per_second",
                                                    "gpu_kernel_seconds", "gpu_flops")} if here["gpu"] else {}
    profile = HardwareProfile(**here, **rates, **gpu, threads=here["cores"], spread=dict.fromkeys(rates, 0.1),
                              cpu_type_costs=dict.fromkeys(COST_TYPES, 1.0),
                              measured=profile_cache._now().isoformat(timespec="seconds"))
    assert keep(profile) and profile_cache.why_stale(profile) is None
    return profile


def sharpi(*arguments: str) -> Any:
    result = cli_runner().invoke(main, [*arguments], catch_exceptions=False, prog_name="sharpi")
    assert result.exit_code == 0, result.stderr
    return result


RUN = ("run", "-p", "Once upon a time", "-n", "40", "--device", "cpu", "--seed", "1")


def test_run_says_it_once(kept: HardwareProfile) -> None:
    threads = ("-t", str(kept.threads))
    first = sharpi(*RUN, *threads)
    line = first.stderr.splitlines()[-1]
    assert line.startswith("sharpi: decode was predicted at ") and line.endswith(AGAIN)
    assert profile_cache.why_stale(kept) == "a model did not run at the predicted speed"
    assert keep(kept), "as the next start does, which measures the same here"
    second = sharpi(*RUN, *threads)
    assert "predicted" not in second.stderr and second.stdout == first.stdout
    assert profile_cache.why_stale(kept) is None


def test_run_is_quiet_about_what_it_notes_where_no_statistics_are_wanted(kept: HardwareProfile) -> None:
    assert sharpi(*RUN, "-t", str(kept.threads), "--no-stats").stderr == ""
    assert profile_cache.why_stale(kept) is not None


def test_run_with_a_given_profile_changes_nothing(kept: HardwareProfile, tmp_path: Path) -> None:
    kept.save(tmp_path / "machine.json")
    result = sharpi(*RUN, "-t", str(kept.threads), "--profile", str(tmp_path / "machine.json"))
    assert "`sharpi hardware` measures this one" in result.stderr
    assert profile_cache.why_stale(kept) is None


def test_bench_says_it_each_time(kept: HardwareProfile) -> None:
    bench = ("bench", "--device", "cpu", "-t", str(kept.threads), "--prefill", "0", "--decode", "32", "--repeat", "1")
    assert AGAIN in sharpi(*bench).stderr
    assert keep(kept)
    for _ in range(2):
        assert NOT_AGAIN in sharpi(*bench).stderr
    assert profile_cache.why_stale(kept) is None
    assert sharpi(*bench, "--no-warmup").stderr == "", "a first run reads the file"


def test_the_bundled_model_is_too_small_to_tell(kept: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharpi.agreement.LEAST_READ", LEAST_READ)
    assert "predicted" not in sharpi(*RUN, "-t", str(kept.threads)).stderr
    assert profile_cache.why_stale(kept) is None
