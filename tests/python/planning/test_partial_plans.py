"""Plans for models that do not fit into the VRAM whole: what is in it, at any budget, and which device is chosen."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from fake_weights import GIB, MACHINE, MIB, NO_GPU, STREAMING, FakeWeights, plain_machine, set_gpu  # noqa: F401
from planning import Measuring, held, machine_with, plan_command, plan_of, refused

from sharpi.errors import InternalError, OutOfMemoryError
from sharpi.machine.hardware import Gpu
from sharpi.machine.profile import ASSUMED
from sharpi.planning.placement import Inventory
from sharpi.planning.plan import Plan
from sharpi.planning.planner import VRAM_MARGIN
from sharpi.planning.prediction.cpu_share import share_rows
from sharpi.planning.prediction.decode import decode_on_gpu
from sharpi.planning.prediction.prefill import prefill_on_gpu

pytestmark = pytest.mark.usefixtures("plain_machine")


# --- how prompts are computed ---------------------------------------------------------------------------------------


def test_predictions_are_for_the_prompts_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights()
    uses = Inventory.of(model, model).model_uses
    plans = {prompt: plan_of(model, 8 * GIB, shown=True, prompt=prompt) for prompt in ("exact", "fast")}
    for prompt, plan in plans.items():
        assert plan.prefill == prefill_on_gpu(uses, plan.homes, MACHINE, 100, prompt=prompt)
        said = " ".join(plan_command(monkeypatch, model, "--vram", "8GiB", "--prompt", prompt).stdout.split())
        assert f"prefill of 100 {plan.prefill.tokens_per_second:,.0f} tokens/s" in said
    assert plans["exact"].decode == plans["fast"].decode and plans["exact"].homes == plans["fast"].homes
    assert plans["exact"].prefill.tokens_per_second < plans["fast"].prefill.tokens_per_second


# --- a prediction layer ---------------------------------------------------------------------------------------------


def test_a_plan_with_a_prediction_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, without = FakeWeights(prediction_layers=1), FakeWeights()
    for vram in (8 * GIB, model.total * 2 // 3):
        plan = plan_of(model, vram, shown=True)
        assert plan.mtp and plan.draft_cost is not None and 0 < plan.draft_cost < 1
        layer = [use[0] for use in model.uses if use[3] == 4]
        held_there = sum(model.sizes[tensor] for tensor in layer if plan.homes[tensor].home == "vram")
        assert plan.prediction_bytes == held_there > 0 and len(plan.layer_bytes) == 4
        assert sum(sum(placed[1:]) for placed in plan.placement) == model.total, "the table counts it"
    assert plan_of(model, 8 * GIB, shown=True).decode == plan_of(without, 8 * GIB, shown=True).decode
    plain = plan_of(without, 8 * GIB, shown=True)
    assert (plain.mtp, plain.draft_cost, plain.prediction_bytes) == (False, None, 0)
    said = plan_command(monkeypatch, model, "--vram", "8GiB").stdout
    assert re.search(r"\n  prediction +[\d.]+ MiB +a layer that drafts tokens\n", said)
    cost = f"{100 * plan_of(model, 8 * GIB, shown=True).draft_cost:.0f} %"
    words = " ".join(said.split())
    assert f"adds about {cost} to a step: drafts pay if more than {cost} of them are accepted." in words
    said = plan_command(monkeypatch, without, "--vram", "8GiB").stdout
    assert "prediction" not in said and "drafted" not in said
    on_cpu = plan_command(monkeypatch, model, "--device", "cpu").stdout
    assert "A token from the prediction layer adds about" in " ".join(on_cpu.split())


def test_drafts_that_cannot_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights(layers=1, prediction_layers=1)
    model.resize(model.index("blk.1.ffn_up"), 100 * MIB)  # to draft takes longer than to decode
    cost = plan_of(model, device="cpu", shown=True).draft_cost
    assert cost is not None and cost >= 1
    said = plan_command(monkeypatch, model, "--device", "cpu").stdout
    assert "it drafts only with --draft mtp" in " ".join(said.split())


# --- homes at every budget -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"experts": (1,)}, {"granule": 4096}, {"layers": 1},
                                     {"granule": 2 * MIB}, {"experts": (0, 1, 2, 3)},
                                     {"experts": (0, 2), "granule": 2 * MIB, "tied": True}])
def test_homes_at_many_budgets(options: dict) -> None:
    model = FakeWeights(mixed=random.Random(2), **options)
    inventory = Inventory.of(model, model)
    whole, least = model.taken(100, 1000), model.taken(100, 1000, inventory.homes(0))
    assert least < whole
    before: set[int] = set()
    sizes, slots = set(), 0
    for budget in sorted({least, whole - 1, whole, 2 * whole, *range(least, whole, (whole - least) // 97 or 1)}):
        plan = plan_of(model, budget)
        assert plan.fits and plan.total_bytes <= budget
        assert plan.total_bytes == model.taken(100, 1000, plan.homes, plan.expert_slots)
        resident = held(plan)
        assert before <= resident, "more VRAM drove something out"
        # The longest beginning of the order of benefit that fits, all tried; what comes after the experts does not
        # count without them.
        most = max(count for count in [*range(len(inventory.movable)), 0]
                   if model.taken(100, 1000, inventory.homes(count)) <= budget)
        most = len(inventory.movable) if budget >= whole else most
        assert resident == held(replace(plan, homes=inventory.homes(most)))
        assert plan.resident is (budget >= whole)
        assert (plan.streaming_bytes > 0) is (most < len(inventory.movable) - (not model.tied))
        inventory.check(plan.homes)
        assert sum(row.vram for row in plan.placement if row.kind != "experts") == sum(
            model.sizes[tensor] for tensor in resident if "_exps" not in model.tensors[tensor].name)
        assert sum(sum(row[1:]) for row in plan.placement) == model.total
        # Slots take what is left, to the last MiB, and only once nothing else needs it.
        slotted = most == inventory.before_experts and inventory.has_experts
        assert plan.expert_slots % MIB == 0 and (not plan.expert_slots or slotted)
        if slotted:
            more = plan.expert_slots + MIB
            holds = any(pool[3] for pool in model.pools(plan.homes, more))
            assert model.taken(100, 1000, plan.homes, more) > budget or not holds
            assert plan.experts_in_slots >= slots
            slots = plan.experts_in_slots
        before = resident
        sizes.add(len(resident))
    assert len(sizes) >= min(4, len(inventory.movable)) and (slots > 0) is inventory.has_experts
    short = plan_of(model, least - 1)
    assert not short.fits and short.total_bytes == least


def test_a_model_smaller_than_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetching all of it would take more room than keeping all but the embedding, whose rows need no slots."""
    model = FakeWeights(layers=1, context_length=100)
    for name in ("output", "blk.0.ffn_gate", "blk.0.ffn_up", "blk.0.ffn_down"):
        model.resize(model.index(name), 100_000)
    inventory = Inventory.of(model, model)
    totals = [model.taken(1, 1, inventory.homes(count)) for count in range(len(inventory.movable))]
    assert totals[-1] < totals[0]
    options = {"context": 1, "batch": 1}
    plan = plan_of(model, totals[-1], **options)
    assert plan.fits and plan.homes == inventory.homes(len(inventory.movable) - 1)
    plan = plan_of(model, totals[-1] - 1, **options)
    assert not plan.fits and plan.total_bytes == totals[-1]
    monkeypatch.setenv("SHARPI_CUDA_PARTIAL_WEIGHT_CACHE", "0")
    plan = plan_of(model, totals[-1], **options)
    assert not plan.fits and plan.homes == inventory.homes(0), "a switch is not overruled"


def test_what_is_free_is_a_budget_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights()
    budget = model.total * 2 // 3
    set_gpu(monkeypatch, budget + VRAM_MARGIN)
    assert plan_of(model).homes == plan_of(model, budget).homes == plan_of(model, 2 * budget).homes
    assert plan_of(model).available_bytes == budget and 0 < len(held(plan_of(model))) < len(model.tensors)


def test_the_speed_of_a_plan_is_that_of_its_homes() -> None:
    model = FakeWeights()
    uses = Inventory.of(model, model).uses
    speeds = []
    for budget in range(STREAMING + 2 * MIB, model.total * 2, MIB):
        plan = plan_of(model, budget, shown=True)
        assert plan.profile == MACHINE and plan.decode == decode_on_gpu(uses, plan.homes, MACHINE, 16)
        assert plan.prefill is not None and plan.prefill.tokens_per_second > 0
        speeds.append(plan.decode.tokens_per_second)
    assert max(speeds) > 2 * min(speeds)


def test_the_cpu_takes_rows_where_that_is_faster() -> None:
    # Large enough that reading weights takes most of the time.
    model = FakeWeights(layers=4)
    quick = replace(MACHINE, pcie_bytes_per_second=2e9, pcie_bytes_per_second_shared=2e9, ram_bytes_per_second=4e9,
                    ram_bytes_per_second_shared=3e9)
    plan = plan_of(model, model.total * 2 // 3, profile=quick)
    rows = {model.tensors[tensor].name: home.cpu_rows for tensor, home in enumerate(plan.homes) if home.cpu_rows}
    assert rows and all(".ffn_" in name or name == "output" for name in rows)
    # The head is in VRAM, with the rows that it gives if it has to leave.
    assert plan.homes[model.index("output")].home == "vram" and rows["output"] == share_rows(
        8192, rows["blk.3.ffn_gate"] / 4096)
    assert rows["blk.3.ffn_gate"] == rows["blk.3.ffn_up"] > rows["blk.3.ffn_down"] > 0
    assert any(row.cpu for row in plan.placement)
    none = replace(quick, ram_bytes_per_second=1e7, ram_bytes_per_second_shared=1e7)
    assert not any(home.cpu_rows for home in plan_of(model, model.total * 2 // 3, profile=none).homes)


def test_a_fused_matrix_gives_the_cpu_as_many_rows() -> None:
    """At any budget, gate and up in one tensor are planned as if they were two."""
    quick = replace(MACHINE, pcie_bytes_per_second=2e9, pcie_bytes_per_second_shared=2e9, ram_bytes_per_second=4e9,
                    ram_bytes_per_second_shared=3e9)
    fused, plain = FakeWeights(layers=4, fused=True), FakeWeights(layers=4)
    for part in (0.3, 0.5, 0.7, 0.9):
        plans = [plan_of(model, int(model.total * part), profile=quick) for model in (fused, plain)]
        rows = [{model.tensors[tensor].name: home.cpu_rows for tensor, home in enumerate(plan.homes)}
                for model, plan in zip((fused, plain), plans, strict=True)]
        assert rows[0] == {name: count for name, count in rows[1].items() if "ffn_gate" not in name}
        assert rows[0]["blk.0.ffn_up"] > 0
        assert plans[0].decode == plans[1].decode and plans[0].placement == plans[1].placement


def test_a_resident_model_has_rows_for_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """With known rates: none is measured or guessed for it."""
    model = FakeWeights(layers=4)
    set_gpu(monkeypatch, 10 * GIB)
    cache = Measuring(monkeypatch)
    assert not any(home.cpu_rows for home in plan_of(model).homes) and cache.measured == 0
    cache.cached = True
    plan = plan_of(model)
    rows = {model.tensors[tensor].name: home.cpu_rows for tensor, home in enumerate(plan.homes) if home.cpu_rows}
    assert plan.resident and set(rows) == {"output", *(
        f"blk.{layer}.ffn_{name}" for layer in range(4) for name in ("gate", "up", "down"))}
    assert not any(row.cpu or row.direct for row in plan.placement)
    assert plan_of(model, profile=MACHINE).homes == plan.homes
    monkeypatch.setenv("SHARPI_CUDA_ROW_SPLIT", "0")
    assert not any(home.cpu_rows for home in plan_of(model).homes)


# --- the switches ----------------------------------------------------------------------------------------------------


def test_nothing_is_cached_where_the_cache_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights(experts=(1,))
    monkeypatch.setenv("SHARPI_CUDA_PARTIAL_WEIGHT_CACHE", "0")
    for vram in (None, model.total * 2, model.total):
        plan = plan_of(model, vram)
        assert plan.homes == plan_of(model, vram).homes and plan.streaming_bytes == STREAMING
        assert plan.expert_slots == 0 and plan.expert_slots_bytes > 0, "but for what goes with slots"
        assert {model.tensors[tensor].name.split(".")[-1] for tensor in held(plan)} == {"attn_norm", "output_norm"}


@pytest.mark.parametrize("experts", [(), (0, 3)])
@pytest.mark.parametrize("megabytes", [0, 1, 3, 5, 8, 30, 100])
def test_the_cache_holds_no_more_than_was_said(megabytes: int, experts: tuple[int, ...],
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights(experts=experts)
    monkeypatch.setenv("SHARPI_CUDA_PARTIAL_WEIGHT_CACHE_GB", str(megabytes / 1024))
    for vram in (None, model.total * 2):
        plan = plan_of(model, vram)
        inventory = Inventory.of(model, model)
        fixed = inventory.kept_bytes(inventory.homes(0))
        cached = sum(model.sizes[tensor] for tensor in held(plan)) - fixed
        assert cached <= megabytes * MIB
        units = [unit for unit in inventory.movable if set(unit.tensors) <= held(plan)]
        if len(units) < len(inventory.movable):
            assert cached + inventory.movable[len(units)].nbytes > megabytes * MIB
        # What is left of it is for slots.
        assert cached + plan.expert_slots <= megabytes * MIB
        if experts and len(units) == inventory.before_experts:
            assert (plan.expert_slots > 0) is (megabytes * MIB - cached >= 2 * MIB)
            assert cached + plan.expert_slots > (megabytes - 1) * MIB or not plan.expert_slots
        assert plan.resident is (megabytes == 100)


def test_no_rows_for_the_cpu_where_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights()
    profile = replace(MACHINE, pcie_bytes_per_second=1e8, pcie_bytes_per_second_shared=1e8)
    budget = model.total * 2 // 3
    assert any(home.cpu_rows for home in plan_of(model, budget, profile=profile).homes)
    monkeypatch.setenv("SHARPI_CUDA_ROW_SPLIT", "0")
    plan = plan_of(model, budget, profile=profile)
    assert not plan.resident and not any(home.cpu_rows for home in plan.homes)


@pytest.mark.parametrize("name", ["SHARPI_CUDA_PARTIAL_WEIGHT_CACHE", "SHARPI_CUDA_PARTIAL_WEIGHT_CACHE_GB",
                                  "SHARPI_CUDA_ROW_SPLIT", "SHARPI_CPU_MOE"])
def test_switches_that_say_nothing_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "perhaps")
    set_gpu(monkeypatch, 10 * GIB)
    for device in ("cuda", "auto", "cpu"):
        assert name in refused(lambda device=device: plan_of(FakeWeights(), device=device))


# --- what cannot be --------------------------------------------------------------------------------------------------


def test_a_budget_that_is_too_small_says_what_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpu(monkeypatch, GIB)
    model = FakeWeights(per_token=50_000, per_row=200_000)
    for batch, context in ((None, 1000), (100, 1000), (None, 100), (1, 1)):
        options = {"batch": batch, "context": context}
        plan = plan_of(model, MIB, **options)
        message = refused(plan.require, OutOfMemoryError)
        would = int(message.split("--vram ")[1].split("MiB")[0])
        assert plan.fitting_vram == would * MIB == -(-plan.total_bytes // MIB) * MIB, "what is shown is the least"
        assert plan_of(model, would * MIB, **options).fits and not plan_of(model, (would - 1) * MIB, **options).fits
    # What is not possible is not offered.
    set_gpu(monkeypatch, VRAM_MARGIN + 20 * MIB)
    message = refused(plan_of(model, MIB, batch=100).require, OutOfMemoryError)
    assert "--vram" not in message and "-b 50" not in message
    assert "--vram" not in refused(plan_of(model, batch=100).require, OutOfMemoryError), "none was set"
    monkeypatch.setattr("sharpi.planning.planner.gpu", lambda: NO_GPU)
    assert plan_of(model, MIB).fitting_vram > 0


def test_the_default_batch_shrinks_before_nothing_fits() -> None:
    model = FakeWeights()
    homes = Inventory.of(model, model).homes(0)
    for batch in (1000, 500, 250, 125):
        plan = plan_of(model, model.taken(batch, 1000, homes), batch=None)
        assert plan.fits and plan.batch == batch and not plan.resident
    # A whole model with small batches is faster than large batches without it.
    tied = FakeWeights(tied=True)
    plan = plan_of(tied, tied.taken(250, 1000), batch=None)
    assert plan.resident and plan.batch == 250


def test_the_embedding_leaves_before_the_batch_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read a row a token: in RAM it costs next to nothing, while a small batch makes prefill slow."""
    model = FakeWeights()
    inventory = Inventory.of(model, model)
    lean = inventory.homes(len(inventory.movable) - 1)
    assert not inventory.streamed(lean) and inventory.streamed(inventory.homes(len(inventory.movable) - 2))
    assert [model.tensors[tensor].name for tensor, home in enumerate(lean) if home.home == "direct"] == ["token_embd"]
    cache = Measuring(monkeypatch)
    for batch in (1000, 500):
        plan = plan_of(model, model.taken(batch, 1000), batch=None)
        assert plan.batch == 1000 and plan.resident is (batch == 1000)
        plan = plan_of(model, model.taken(batch, 1000, lean), batch=None)
        assert plan.batch == batch and plan.homes == lean and plan.streaming_bytes == 0
        set_gpu(monkeypatch, VRAM_MARGIN + model.taken(batch, 1000, lean))
        plan = plan_of(model, batch=None, device="auto")
        assert plan.device == "cuda" and plan.homes == lean and "but for the embedding" in plan.why
    assert cache.measured == 0, "nothing is streamed, so its speed is not needed"
    monkeypatch.setenv("SHARPI_CUDA_PARTIAL_WEIGHT_CACHE_GB", f"{(inventory.movable_bytes(9) + 1) / GIB:.9f}")
    assert len(held(plan_of(model, batch=None))) < len(held(replace(plan, homes=lean)))


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_budget_above_the_card_is_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpu(monkeypatch, 10 * GIB)
    model = FakeWeights()
    assert plan_of(model, 80 * GIB, device=device).fits
    message = refused(lambda: plan_of(model, 80 * GIB + 1, device=device))
    assert "80.00 GiB" in message and "Some GPU" in message
    set_gpu(monkeypatch, NO_GPU)
    assert plan_of(model, 80 * GIB + 1, device=device)


# --- which device, and when it is measured ---------------------------------------------------------------------------


def test_auto_takes_the_device_that_decodes_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights()
    set_gpu(monkeypatch, VRAM_MARGIN + model.total // 2 + STREAMING)
    monkeypatch.setenv("SHARPI_CUDA_ROW_SPLIT", "0")
    for profile, device in ((machine_with(10e9), "cuda"), (machine_with(10e9, 1e9), "cpu")):
        plan = plan_of(model, device="auto", profile=profile)
        assert plan.device == device and "does not fit into the VRAM whole" in plan.why and "\n" not in plan.why
        faster, slower = (float(words.split()[0]) for words in plan.why.split(" at ")[1].split(", "))
        assert faster > slower
        assert (plan.homes == ()) is (device == "cpu")
    set_gpu(monkeypatch, VRAM_MARGIN + 2 * model.total)
    plan = plan_of(model, device="auto", profile=machine_with(1e14, 1e7))
    assert (plan.device, plan.why) == ("cuda", "the model fits into its memory")


def test_it_is_measured_only_where_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights()
    set_gpu(monkeypatch, 10 * GIB)
    for options, times in (({}, 0), ({"device": "auto"}, 0), ({"device": "cpu"}, 0), ({"vram": MIB}, 0),
                           ({"vram": model.total * 2 // 3}, 1), ({"vram": model.total * 2 // 3, "device": "auto"}, 1),
                           ({"vram": model.total * 2 // 3, "profile": MACHINE}, 0), ({"shown": True}, 1),
                           ({"shown": True, "device": "cpu"}, 1), ({"shown": True, "vram": MIB}, 0)):
        cache = Measuring(monkeypatch)
        plan = plan_of(model, **options, notice=cache.said.append)
        assert cache.measured == times, options
        assert cache.said == ["measuring this machine once, a few seconds"] * times
        assert (plan.profile is not None) is (times == 1 or "profile" in options)
        cache.said.clear()
        plan_of(model, **options, notice=cache.said.append)
        assert cache.measured == times and not cache.said, "it is known by now"


def test_a_gpu_that_is_not_here_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights()
    for cached in (True, False):
        cache = Measuring(monkeypatch, cached)
        for device in ("cuda", "auto"):
            plan = plan_of(model, model.total * 2 // 3, device=device, shown=True)
            assert (plan.device, cache.measured) == ("cuda", 0)
            assert plan.profile is not None and plan.profile.assumed is not cached


def test_of_free_memory_256_mib_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpu(monkeypatch, 10 * GIB)
    assert plan_of(FakeWeights()).available_bytes == 10 * GIB - (256 << 20)
    assert plan_of(FakeWeights(), 10 * GIB - (100 << 20)).available_bytes == 10 * GIB - (256 << 20)
    assert plan_of(FakeWeights(), 9 * GIB).available_bytes == 9 * GIB


def test_a_machine_that_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(measure: bool, announce: Callable[[str], None] | None = None, gpu_index: int = 0) -> None:
        announce("")
        raise InternalError("the GPU fell off the bus")

    monkeypatch.setattr("sharpi.planning.planner.current_profile", fail)
    set_gpu(monkeypatch, 10 * GIB)
    said: list[str] = []
    model = FakeWeights()
    plan = plan_of(model, model.total * 2 // 3, notice=said.append)
    assert plan.profile == ASSUMED and len(said) == 2 and "fell off the bus" in said[1]


def test_a_plan_for_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile in a plan that is only shown is the machine; in one that is run it only says how fast this one is."""
    model = FakeWeights(layers=30)
    other = replace(MACHINE, gpu="Small GPU", vram_bytes=VRAM_MARGIN + model.total // 2, ram_bytes=GIB)
    for here in (NO_GPU, 10 * GIB):
        set_gpu(monkeypatch, here)
        plan = plan_of(model, profile=other, shown=True)
        assert plan.available_bytes == model.total // 2 and not plan.resident
        assert isinstance(plan.gpu, Gpu) and plan.gpu.name == "Small GPU"
        assert plan_of(model, profile=other, shown=True, device="auto").gpu == plan.gpu
        assert plan_of(model, profile=other, shown=True, device="cpu").available_bytes == GIB
        assert "Small GPU" in refused(lambda: plan_of(model, 10 * GIB, profile=other, shown=True))
    assert plan_of(model, profile=other).resident, "this machine's memory counts for a run"


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_shows_what_lives_where(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(machine_with(2e9, 2e9), cpu="A processor of a name so long that it needs two lines of a terminal")
    monkeypatch.setattr("sharpi.planning.planner.current_profile", lambda measure, announce=None, gpu_index=0: slow)
    model = FakeWeights(layers=6)
    result = plan_command(monkeypatch, model, "--vram", str(model.total * 2 // 3))
    assert result.exit_code == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    bar = next(line for line in lines if line.startswith("  [")).strip(" []")
    assert len(bar) == 60 and sorted(set(bar)) == ["#", "-", ":", "="] and bar == "".join(sorted(bar, key="#=-:".index))
    shares = [float(line.split()[1]) for line in lines if line.split() and line.split()[-2:] and " % in " in line]
    assert len(shares) == 4 and sum(shares) == pytest.approx(100, abs=1.5)
    for mark, share in zip("#=-:", shares, strict=True):
        assert bar.count(mark) == pytest.approx(60 * share / 100, abs=1.5)
    for words in ("in VRAM", "over PCIe", "by the CPU", "by row", "streaming", "Predicted:", "prefill of 100",
                  "bound by"):
        assert words in result.stdout
    assert next(line for line in lines if line.startswith("  norms")).split().count("-") == 3


def test_the_command_shows_a_model_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    result = plan_command(monkeypatch, FakeWeights(), "--device", "cpu")
    assert "by the CPU" in result.stdout and "in VRAM" not in result.stdout
    assert "[" + "-" * 60 + "]" in result.stdout and "bound by RAM" in result.stdout
    assert "For Some CPU: RAM 100 GB/s, as measured." in result.stdout and "PCIe" not in result.stdout


def test_a_prediction_says_when_its_rates_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights()
    spread = {"ram_bytes_per_second": 0.04, "pcie_bytes_per_second": 0.01, "vram_bytes_per_second": 0.11,
              "cpu_flops": 0.5}
    for device, busy, said in (("cpu", False, "measured 2026-11-22, spread 4 %."),
                               ("cuda", False, "measured 2026-11-22, spread 11 %."),
                               ("cpu", True, "measured 2026-11-22 while other programs were busy, spread 4 %.")):
        known = replace(MACHINE, measured="2026-11-22T09:13:55+00:00", spread=spread, busy=busy)
        monkeypatch.setattr(
            "sharpi.planning.planner.current_profile", lambda measure, announce=None, gpu_index=0, known=known: known
        )
        vram = ("--vram", "5MiB") if device == "cuda" else ()
        assert said in " ".join(plan_command(monkeypatch, model, "--device", device, *vram).stdout.split())



def test_the_command_says_when_speeds_are_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharpi.planning.planner.current_profile", lambda measure, announce=None, gpu_index=0: ASSUMED)
    said = " ".join(plan_command(monkeypatch, FakeWeights(), "--vram", "1GiB").stdout.split())
    assert "For a CPU of 8 cores (assumed)" in said and "RAM 40 GB/s, PCIe 24 GB/s, VRAM 350 GB/s. " in said
    assert "run `sharpi hardware --save FILE` on that machine" in said and "as measured" not in said


@pytest.mark.parametrize("tied", [False, True])
def test_a_table_of_rows_for_each_layer_takes_no_vram(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much there is: a table as large as the rest of the model stays in the file."""
    model, without = FakeWeights(tied=tied, layer_table=16384), FakeWeights(tied=tied)
    table = model.index("per_layer_token_embd")
    assert model.sizes[table] > without.total
    for vram in (8 * GIB, model.total, without.total * 2 // 3):
        plan, same = plan_of(model, vram, shown=True), plan_of(without, vram, shown=True)
        assert plan.homes[table].home == "direct" and plan.total_bytes == same.total_bytes
        assert [home for tensor, home in enumerate(plan.homes) if tensor != table] == list(same.homes)
        assert next(row for row in plan.placement if row.by_row and row.kind == "layer embeddings")[1:] == (
            0, 0, 0, 0, model.sizes[table], 0)
        assert sum(sum(row[1:]) for row in plan.placement) == model.total
        # A token reads a row of it.
        assert plan.decode.tokens_per_second == pytest.approx(same.decode.tokens_per_second, rel=0.02)
        assert plan.prefill.tokens_per_second == pytest.approx(same.prefill.tokens_per_second, rel=0.02)
        assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    said = plan_command(monkeypatch, model, "--vram", "8GiB").stdout
    assert re.search(r"\n  layer embeddings +- +64.0 MiB\n", said) and "of the weights are read by row." in said
    set_gpu(monkeypatch, 8 * GIB)
    assert plan_of(model, None, device="auto").device == "cuda"
    on_cpu = plan_of(model, device="cpu", shown=True)
    assert next(row for row in on_cpu.placement if row.kind == "layer embeddings").cpu == model.sizes[table]


@pytest.mark.parametrize("tied", [False, True])
def test_the_command_says_what_takes_no_vram(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights(tied=tied)
    inventory = Inventory.of(model, model)
    some, none = (plan_command(monkeypatch, model, "--vram", str(count)).stdout for count in (
        model.taken(100, 1000, inventory.homes(6)), 2 * model.total))
    assert "layers" in some and ", some in RAM" in some and "% of the weights in RAM" in some
    assert "in RAM" not in none and "streaming" not in none
    assert ("embedding/head" in none) is tied and ("the same weights" in none) is tied
    if not tied:
        assert "in the file, where a token reads one row" in some
        lean = plan_command(monkeypatch, model, "--vram", str(model.taken(100, 1000, inventory.homes(
            len(inventory.movable) - 1)))).stdout
        assert ", some in RAM" not in lean and "streaming" not in lean and "to spare" in lean


def test_the_command_measures_once_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    Measuring(monkeypatch)
    said = [plan_command(monkeypatch, FakeWeights(), "--device", "cpu").stderr for _ in range(2)]
    assert said == ["sharpi: measuring this machine once, a few seconds\n", ""]


def test_the_command_says_what_budget_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights()
    result = plan_command(monkeypatch, model, "--vram", "1MiB")
    assert result.exit_code == 1 and "does not fit" in result.stdout and "Predicted" not in result.stdout
    would = result.stdout.split("--vram ")[-1].split()[0]
    assert "It fits" in plan_command(monkeypatch, model, "--vram", would).stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize("text", ["-1GiB", "81GiB", "0", "many"])
def test_budgets_that_cannot_be(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpu(monkeypatch, 10 * GIB)
    result = plan_command(monkeypatch, FakeWeights(), "--vram", text)
    assert (result.exit_code, result.stdout) == (2, "") and result.stderr.count("\n") == 1
