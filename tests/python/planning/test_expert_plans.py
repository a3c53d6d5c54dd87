"""Plans for models whose experts do not fit: slots take the VRAM that is left, and a part of the uses hits them."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_weights import GIB, MIB, FakeWeights, plain_machine, set_gpu, stats_of  # noqa: F401 - a fixture
from planning import Measuring, held, machine_with, plan_command, plan_of, refused

from sharpi.errors import OutOfMemoryError
from sharpi.planning.placement import Inventory
from sharpi.planning.plan import Plan
from sharpi.planning.planner import VRAM_MARGIN
from sharpi.planning.prediction.decode import cached_experts, decode_on_gpu
from sharpi.planning.prediction.prefill import prefill_on_gpu

pytestmark = pytest.mark.usefixtures("plain_machine")

MOE = {"layers": 4, "experts": (0, 1, 2, 3)}


def experts_in_vram(model: FakeWeights, plan: Plan) -> bool:
    """Whether all are there; else all have slots."""
    homes = {home for home, tensor in zip(plan.homes, model.tensors, strict=True) if "_exps" in tensor.name}
    assert len(homes) == 1
    home = homes.pop()
    assert home.home in ("vram", "slots") and home.cpu_rows == 0
    return home.home == "vram"


def test_experts_need_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights(**MOE)
    inventory = Inventory.of(model, model)
    size = model.layer_expert_bytes(0)
    least = model.taken(100, 1000, inventory.homes(0))
    assert least < 32 * size / 4
    seen = set()
    for budget in range(least, model.total + 3 * MIB, MIB // 2):
        plan = plan_of(model, budget)
        inside, slots = experts_in_vram(model, plan), plan.experts_in_slots
        seen.add((inside, slots))
        # What a token reads in full is there before any expert is, and they before the embedding.
        others = {model.tensors[tensor].name for tensor in held(plan) if "_exps" not in model.tensors[tensor].name}
        assert not (inside or slots) or len(others) >= len(model.tensors) - 12 - 1
        assert "token_embd" not in others or inside
        row = next(row for row in plan.placement if row.kind == "experts")
        if inside:
            assert row[1:] == (32 * size, 0, 0, 0, 0, 0) and not plan.expert_slots
            assert (plan.expert_pools, plan.hit_rate, plan.hit_source) == ((), None, "")
        else:
            rest = (32 - slots) * size
            assert row[1:] == (slots * size, 0, 0 if slots else rest, rest if slots else 0, 0, 0)
            assert plan.expert_pools == ((4, 32, size, slots),) and (plan.expert_slots > 0) is (slots > 0)
            assert plan.hit_rate == pytest.approx(slots / 32) and plan.hit_source == "uniform routing assumed"
            assert plan.expert_rates == (75e9, 45e9)
        assert (plan.decode is not None) is (plan.prefill is not None) is (not inside), "if something is fetched"
    assert {(False, 0), (False, 1), (False, 7), (False, 20), (False, 25), (True, 0)} <= seen
    set_gpu(monkeypatch, GIB)
    assert "beside the weights that may stay in RAM" in refused(plan_of(model, least - 1).require, OutOfMemoryError)


def test_layers_of_different_experts_share_the_room() -> None:
    model = FakeWeights(**MOE, mixed=random.Random(3))
    assert len({model.layer_expert_bytes(layer) for layer in range(4)}) > 1
    inventory = Inventory.of(model, model)
    homes = inventory.homes(inventory.before_experts)
    plan = plan_of(model, model.taken(100, 1000, homes, 20 * MIB))
    assert held(plan) == held(replace(plan, homes=homes)) and 20 * MIB <= plan.expert_slots <= 21 * MIB
    assert plan.expert_pools == tuple(model.pools(homes, plan.expert_slots))
    assert len({pool.slot_bytes for pool in plan.expert_pools}) > 1
    assert (plan.experts, plan.experts_in_slots) == (32, sum(pool.slots for pool in plan.expert_pools))
    assert plan.slots_per_layer == plan.experts_in_slots / 4
    assert plan.hit_rate == plan.experts_in_slots / 32
    row = next(row for row in plan.placement if row.kind == "experts")
    assert row.vram == pytest.approx(sum(row[1:]) * plan.experts_in_slots / 32, abs=12), "but for the rounding"


def test_resident_experts_have_rates_for_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with rows of matrices: only if it is known."""
    model = FakeWeights(**MOE)
    set_gpu(monkeypatch, 10 * GIB)
    cache = Measuring(monkeypatch)
    for cached, rates in ((False, (0, 0)), (True, (75e9, 45e9))):
        cache.cached = cached
        plan = plan_of(model)
        assert plan.resident and plan.expert_rates == rates and cache.measured == 0
        assert plan_of(FakeWeights()).expert_rates == (0, 0), "there are none to share"
    assert plan_of(model, threads=4).expert_rates == (75e9 / 4, 45e9)


def test_slots_make_it_faster() -> None:
    model = FakeWeights(**MOE)
    inventory = Inventory.of(model, model)
    homes = inventory.homes(inventory.before_experts)
    slow = replace(machine_with(4e9, 2e9), gpu_kernel_seconds=1e-6)
    decode, prefill, before = 0.0, 0.0, -1
    for slots in range(0, 48 * MIB, 4 * MIB):
        plan = plan_of(model, model.taken(100, 1000, homes, slots), profile=slow)
        assert plan.decode is not None and plan.prefill is not None and before < plan.experts_in_slots < 32
        before, uses = plan.experts_in_slots, inventory.uses
        cached = cached_experts(uses, plan.expert_pools)
        assert plan.decode == decode_on_gpu(uses, plan.homes, slow, 16, cached)
        assert plan.prefill == prefill_on_gpu(uses, plan.homes, slow, 100, cached)
        assert plan.decode.tokens_per_second > decode and plan.prefill.tokens_per_second > prefill
        decode, prefill = plan.decode.tokens_per_second, plan.prefill.tokens_per_second


def test_saved_statistics_are_what_hits_are_expected_by() -> None:
    model = FakeWeights(**MOE)
    inventory = Inventory.of(model, model)
    budget = model.taken(100, 1000, inventory.homes(inventory.before_experts), 12 * MIB)
    uses = np.array([[1000, 1000, 1, 1, 1, 1, 1, 1]] * 4, np.uint64)
    cold, warm = plan_of(model, budget), plan_of(model, budget, warm=stats_of(model, uses))
    assert cold.experts_in_slots == warm.experts_in_slots >= 7 and cold.lines == warm.lines
    assert (cold.hit_rate, cold.hit_source) == (pytest.approx(cold.experts_in_slots / 32), "uniform routing assumed")
    assert (warm.hit_rate, warm.hit_source) == (pytest.approx(min(8, warm.experts_in_slots) / 8, abs=0.01),
                                                "by saved statistics")
    assert warm.decode.tokens_per_second > cold.decode.tokens_per_second
    whole = plan_of(model, 2 * model.total, warm=stats_of(model, uses))
    assert whole.resident and (whole.hit_rate, whole.hit_source) == (None, "")


def test_a_token_reads_few_experts_and_a_prompt_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights(**MOE)
    plan = plan_of(model, model.total // 2, cpu_moe=True, profile=machine_with(1e8))
    used = sum(use[4] for use in model.uses if use[2] == "experts")
    assert plan.decode is not None and plan.prefill is not None and plan.decode.bound == "RAM"
    assert 0.95 * used / 1e8 < 1 / plan.decode.tokens_per_second < 1.1 * used / 1e8
    plan = plan_of(model, model.total // 2, cpu_moe=True, profile=machine_with(1e12, 1e8))
    assert plan.prefill is not None and plan.prefill.bound == "PCIe"
    assert 0.95 * 4 * used / 1e8 < 100 / plan.prefill.tokens_per_second < 1.1 * 4 * used / 1e8


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_all_experts_may_be_left_to_the_cpu(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights(layers=4, experts=(0, 1, 3))
    inventory = Inventory.of(model, model)
    if how == "environment":
        monkeypatch.setenv("SHARPI_CPU_MOE", "1")
    options = {"cpu_moe": True} if how == "argument" else {}
    top = inventory.before_experts
    whole, least = (model.taken(100, 1000, inventory.homes(count)) for count in (top, 0))
    before: set[int] = set()
    for budget in sorted({2 * model.total, model.total, *range(least, whole + MIB, MIB // 3), whole}):
        plan = plan_of(model, budget, **options)
        assert plan.fits and plan.total_bytes == model.taken(100, 1000, plan.homes) <= budget
        assert not experts_in_vram(model, plan) and before <= held(plan) and plan.streaming_bytes > 0
        assert (plan.expert_slots, plan.experts_in_slots, plan.hit_rate) == (0, 0, 0.0)
        assert plan.expert_rates == (75e9, 0.0), "nothing is fetched"
        row = next(row for row in plan.placement if row.kind == "experts")
        assert row[1:] == (0, 0, sum(24 // 3 * model.layer_expert_bytes(layer) for layer in (0, 1, 3)), 0, 0, 0)
        before = held(plan)
        most = max(count for count in range(top + 1) if model.taken(100, 1000, inventory.homes(count)) <= budget)
        assert before == held(replace(plan, homes=inventory.homes(most)))
    assert len(before) == len(model.tensors) - 9 - 1, "all else fits, but for the embedding's rows"
    assert not plan_of(model, least - 1, **options).fits
    # A smaller default batch is better than less in VRAM, as it is without experts.
    plan = plan_of(model, model.taken(500, 1000, inventory.homes(top)), batch=None, **options)
    assert (plan.homes, plan.batch) == (inventory.homes(top), 500)
    # What is said last counts.
    assert plan_of(model, 2 * model.total, cpu_moe=False).resident
    # There is nothing to leave.
    assert plan_of(FakeWeights(), 2 * model.total, **options).resident
    assert plan_of(model, None, **options, device="cpu").homes == ()


def test_auto_says_that_experts_were_left_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights(**MOE)
    set_gpu(monkeypatch, VRAM_MARGIN + 2 * model.total)
    for kernel, device in ((1e-6, "cuda"), (1e-2, "cpu")):
        profile = replace(machine_with(10e9), gpu_kernel_seconds=kernel)
        plan = plan_of(model, device="auto", cpu_moe=True, profile=profile)
        assert plan.device == device
        assert plan.why.startswith("the experts are left to the CPU, and decode is predicted at ")
    assert plan_of(model, device="auto", cpu_moe=False).why == "the model fits into its memory"
    set_gpu(monkeypatch, VRAM_MARGIN + model.total // 2)
    assert "does not fit into the VRAM whole" in plan_of(model, device="auto").why
    dense = FakeWeights(layers=8)
    assert "does not fit into the VRAM whole" in plan_of(dense, dense.total // 2, device="auto", cpu_moe=True).why


def test_experts_leave_before_the_default_batch_shrinks() -> None:
    """Only for having all, or all but the rows of an embedding, is a smaller batch taken."""
    for tied in (False, True):
        model = FakeWeights(**MOE, tied=tied)
        inventory = Inventory.of(model, model)
        least = model.taken(1000, 1000, inventory.homes(0))
        for resident in range(1, len(inventory.movable) - (not tied)):
            budget = model.taken(250, 1000, inventory.homes(resident))
            if budget >= least:
                plan = plan_of(model, budget, batch=None)
                assert plan.batch == 1000 and plan.streaming_bytes
                assert len(held(plan)) < len(held(replace(plan, homes=inventory.homes(resident))))
        assert budget >= least and plan_of(model, model.taken(250, 1000), batch=None).batch in (250, 1000)


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_shows_where_experts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights(**MOE)
    inventory = Inventory.of(model, model)
    homes = inventory.homes(inventory.before_experts)
    none, some = (str(model.taken(100, 1000, homes, slots)) for slots in (0, 26 * MIB))
    assert model.pools(homes, 26 * MIB)[0][3] == 16
    for arguments, places, cells in (
            (["--vram", "1GiB"], ["in VRAM"], ["48.0 MiB"]),
            (["--vram", "1GiB", "--cpu-moe"], ["in VRAM", "by the CPU", "by row"], ["-", "48.0 MiB", "-"]),
            (["--vram", none], ["in VRAM", "by the CPU", "by row"], ["-", "48.0 MiB", "-"]),
            (["--vram", some], ["in VRAM", "on a miss", "by row"], ["24.0 MiB", "24.0 MiB", "-"])):
        lines = plan_command(monkeypatch, model, *arguments).stdout.splitlines()
        title, row = (next(line for line in lines if line.startswith(f"  {name} ")) for name in ("weights", "experts"))
        assert re.split(" {2,}", title.strip()) == ["weights", *places]
        assert re.split(" {2,}", row.strip()) == ["experts", *cells]
        assert any("in RAM, computed by the CPU" in line for line in lines) is ("by the CPU" in places)
        assert any("on a miss computed" in line for line in lines) is ("on a miss" in places)
        assert [line.split()[2:4] for line in lines if line.startswith("  expert slots")] == (
            [["26.0", "MiB"]] if "on a miss" in places else [])
        assert max(map(len, lines)) <= 80
        said = " ".join(" ".join(lines).split())
        outside = sum(float(cell.split()[0]) * MIB for cell in cells[1:] if cell != "-")
        assert (f"It fits with {round(100 * outside / model.total)} % of the weights in RAM" in said) is (outside > 0)
        assert (", some in RAM" in said) is (outside > 0)
        assert ("Experts in slots: 16 of 32 (50 %), 4.0 a layer; expected hit rate 50 % (uniform routing assumed)."
                in said) is ("on a miss" in places) is ("Experts in slots" in said)


def test_the_command_reads_saved_statistics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = FakeWeights(**MOE)
    inventory = Inventory.of(model, model)
    some = str(model.taken(100, 1000, inventory.homes(inventory.before_experts), 26 * MIB))
    path = tmp_path / "experts.json"
    stats_of(model, np.array([[97, 1, 1, 1, 0, 0, 0, 0]] * 4, np.uint64)).save(path)
    result = plan_command(monkeypatch, model, "--vram", some, "--warm", str(path))
    assert "expected hit rate 100 % (by saved statistics)." in " ".join(result.stdout.split())
    plan = json.loads(plan_command(monkeypatch, model, "--vram", some, "--warm", str(path), "--json").stdout)
    assert (plan["experts"], plan["experts_in_slots"], plan["slots_per_layer"]) == (32, 16, 4)
    assert (plan["hit_rate"], plan["hit_source"], plan["expert_slots"]) == (1, "by saved statistics", 26 * MIB)
    assert plan["expert_pools"] == [
        {"layers": 4, "experts": 32, "slots": 16, "slot_bytes": model.layer_expert_bytes(0)}
    ]
    assert plan["expert_slots_bytes"] == sum(line["bytes"] for line in plan["lines"] if line["name"] == "expert slots")
    result = plan_command(monkeypatch, FakeWeights(layers=5, experts=(0,)), "--warm", str(path))
    assert (result.exit_code, result.stdout) == (2, "") and result.stderr.count("\n") == 1
    assert str(path) in result.stderr and "of another fake" in result.stderr
