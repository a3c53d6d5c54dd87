"""Plans for the GPU of mixtures that are larger than VRAM and RAM: what slots in RAM hold, and what the disk costs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_weights import GIB, MIB, FakeWeights, plain_machine, set_gpu, stats_of  # noqa: F401 - a fixture
from planning import plan_command, plan_of, refused

from sharpi import _core
from sharpi.errors import OutOfMemoryError
from sharpi.loading.opening import engine_options
from sharpi.planning.placement import Inventory, Placed
from sharpi.planning.plan import Plan, load_plan
from sharpi.planning.planner import VRAM_MARGIN
from sharpi.planning.shortage import load_planned

# Four layers of eight experts, of which a token uses two.
MOE: dict[str, Any] = {"layers": 4, "experts": (0, 1, 2, 3)}
EXPERT = 3 * MIB // 2
LEAST = 2 * EXPERT  # of slots: one, and one for experts on their way
EMBEDDING = 4 * MIB
DISK = 1e9


@pytest.fixture(autouse=True)
def _machine(plain_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    set_gpu(monkeypatch, 79 * GIB)
    monkeypatch.setattr("sharpi.planning.request.ASSUMED_BYTES_PER_SECOND", DISK)


def vram_for(model: FakeWeights, slots: int) -> int:
    """The VRAM that has room for this many experts, and for all else but the embedding."""
    inventory = Inventory.of(model, model)
    return model.taken(100, 1000, inventory.homes(inventory.before_experts), (slots + 1) * EXPERT)


def planned(model: FakeWeights, ram: int | None, slots: int = 7, **options: Any) -> Plan:
    return plan_of(model, **{"vram": vram_for(model, slots), "ram": ram, "shown": True, **options})


def left(ram: int, spill: int | None = None) -> int:
    """What a margin and the copies of a scheduler leave to weights."""
    return ram - ram // 8 - (ram // 16 if spill is None else spill)


def experts_of(plan: Plan) -> Placed:
    return next(placed for placed in plan.placement if placed.kind == "experts")


def seconds(speed: Any) -> float:
    return 1 / speed.tokens_per_second


def in_ram(plan: Plan) -> int:
    return sum(pool.slots for pool in plan.ram_pools)


# --- how much -------------------------------------------------------------------------------------------------------


def test_slots_take_what_other_weights_leave() -> None:
    model = FakeWeights(**MOE)
    plain = planned(model, GIB)
    assert plain.experts_in_slots == 7 and not plain.reads_disk and plain.ram_hit_rate is None
    for ram in (12 * MIB, 20 * MIB, 30 * MIB, 36 * MIB):
        plan = planned(model, ram)
        assert plan.ram_slots == left(ram) - EMBEDDING, "nothing else is outside of VRAM"
        assert plan.ram_pools == tuple(model.pools([("slots", 0)] * len(model.tensors), plan.ram_slots))
        assert (plan.homes, plan.lines, plan.expert_slots, plan.expert_pools, plan.hit_rate) == (
            plain.homes, plain.lines, plain.expert_slots, plain.expert_pools, plain.hit_rate), "VRAM is as it was"
        held = in_ram(plan)
        assert 0 < held < 25 and plan.ram_hit_rate == pytest.approx(held / 32)
        assert experts_of(plan) == Placed("experts", 7 * EXPERT, 0, 0, held * EXPERT, 0, (25 - held) * EXPERT)
        assert [placed for placed in plan.placement if placed.kind != "experts"] == [
            placed for placed in plain.placement if placed.kind != "experts"]
        assert plan.fits and plan.reads_disk and plan.disk_bytes_per_second == DISK


def test_the_bounds() -> None:
    """RAM that has room for all experts has no slots, and room for less than one expert is none."""
    model = FakeWeights(**MOE)
    outside, whole = 16 * EXPERT, 32 * EXPERT
    plain = planned(model, GIB, slots=16)
    seen = set()
    for ram in (*range(0, whole, MIB // 2), whole - 1, whole, whole + 1):
        plan = planned(model, ram, slots=16, spill_bytes=0)
        room = left(ram, 0) - EMBEDDING
        has = ram < whole and room >= LEAST
        all_held = has and in_ram(plan) >= 16
        seen.add((has, ram < whole, all_held))
        assert plan.ram_slots == (room if has else 0) < whole
        assert (in_ram(plan) > 0) is bool(plan.ram_pools) is (plan.ram_hit_rate is not None) is has
        assert plan.reads_disk is (ram < whole)
        assert (experts_of(plan).disk > 0) is (has and not all_held)
        if all_held:  # once it has been read, nothing is
            assert plan.decode == plain.decode and plan.disk_bytes_per_second is None
        elif not has:
            # Then the page cache is all there is.
            assert plan.placement == plain.placement
            part = 1 - max(0, left(ram, 0)) / outside if ram < whole else 0
            read = part * 4 * 2 * EXPERT * (1 - 16 / 32)
            assert seconds(plan.decode) == pytest.approx(seconds(plain.decode) + read / DISK)
    assert seen == {(False, True, False), (True, True, False), (True, True, True), (False, False, False)}


def test_copies_come_first() -> None:
    model = FakeWeights(**MOE)
    for spill in (0, 5 * MIB):
        assert planned(model, 30 * MIB, spill_bytes=spill).ram_slots == left(30 * MIB, spill) - EMBEDDING
    recurrent = planned(FakeWeights(**MOE, state_bytes=1000), 30 * MIB)
    assert recurrent.ram_slots == left(30 * MIB) - 30 * MIB // 16 - EMBEDDING
    # They may take more than there is: then all of it is read.
    plain, plan = planned(model, GIB), planned(model, 30 * MIB, spill_bytes=GIB)
    assert plan.ram_slots == 0
    assert seconds(plan.decode) == pytest.approx(seconds(plain.decode) + 4 * 2 * EXPERT * (1 - 7 / 32) / DISK)


@pytest.mark.parametrize("cpu_moe", [False, True])
def test_experts_without_slots_in_vram_have_slots_in_ram(cpu_moe: bool) -> None:
    """Whether VRAM has no room for any, or they are left to the CPU; other weights outside of VRAM come first."""
    model = FakeWeights(**MOE)
    budget = {"vram": 2 * model.total if cpu_moe else model.taken(100, 1000, Inventory.of(model, model).homes(3))}
    plain, plan = (planned(model, ram, cpu_moe=cpu_moe, **budget) for ram in (GIB, 40 * MIB))
    others = sum(sum(placed[2:]) for placed in plain.placement if placed.kind != "experts")
    assert (others > EMBEDDING) is not cpu_moe and experts_of(plain) == Placed("experts", 0, 0, 32 * EXPERT)
    assert plan.ram_slots == left(40 * MIB) - others and plan.expert_slots == 0 and plan.hit_rate == 0
    held = in_ram(plan)
    assert held and experts_of(plan) == Placed("experts", 0, 0, held * EXPERT, 0, 0, (32 - held) * EXPERT)
    assert plan.ram_hit_rate == pytest.approx(held / 32)
    read = 4 * 2 * EXPERT * (1 - held / 32)
    assert seconds(plan.decode) == pytest.approx(seconds(plain.decode) + read / DISK)


# --- speeds ---------------------------------------------------------------------------------------------------------


def test_the_disk_adds_what_no_slot_holds() -> None:
    model = FakeWeights(**MOE)
    plain, before = planned(model, GIB), 0.0
    for ram in (12 * MIB, 24 * MIB, 36 * MIB):
        plan = planned(model, ram)
        part = 1 - 7 / 32 - in_ram(plan) / 32
        read = 4 * 2 * EXPERT * part / DISK
        for made, known in ((plan.decode, plain.decode), (plan.decode_full, plain.decode_full)):
            assert seconds(made) == pytest.approx(seconds(known) + read)
        assert plan.prefill and plan.prefill.tokens_per_second == pytest.approx(100 / (32 * EXPERT * part / DISK))
        assert plan.decode and {plan.decode.bound, plan.prefill.bound} == {"disk"}
        assert plan.decode.tokens_per_second > before
        before = plan.decode.tokens_per_second


def test_a_quick_disk_bounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharpi.planning.request.ASSUMED_BYTES_PER_SECOND", 1e15)
    plain, plan = (planned(FakeWeights(**MOE), ram) for ram in (GIB, 24 * MIB))
    assert plan.ram_slots and plan.prefill == plain.prefill and plan.decode and plain.decode
    assert plan.decode.bound == plain.decode.bound != "disk"


def test_saved_statistics_fill_vram_first_and_then_ram() -> None:
    """Eight experts are used much, and VRAM has room for four of them."""
    model = FakeWeights(**MOE)
    warm = stats_of(model, np.array([[1000, 1000, 1, 1, 1, 1, 1, 1]] * 4, np.uint64))
    ram = 17 * MIB
    plain, plan = (planned(model, each, slots=4, warm=warm) for each in (GIB, ram))
    held = in_ram(plan)
    assert plan.experts_in_slots == 4 and held == 5
    hit, ram_hit = 4 * 1000 / 2006 / 4, (4 * 1000 + 1) / 2006 / 4
    assert plan.hit_rate == pytest.approx(hit) and plan.ram_hit_rate == pytest.approx(ram_hit)
    read = 4 * 2 * EXPERT * (1 - hit - ram_hit) / DISK
    assert seconds(plan.decode) == pytest.approx(seconds(plain.decode) + read)
    # A prompt uses all of them.
    assert seconds(plan.prefill) == pytest.approx(32 * EXPERT * (1 - 9 / 32) / DISK / 100)


def test_the_prediction_layer_reads_for_drafts_alone() -> None:
    model = FakeWeights(layers=4, experts=(0, 1, 2, 3, 4), prediction_layers=1)
    plain, plan = (planned(model, ram) for ram in (GIB, 30 * MIB))
    part = 1 - (plan.experts_in_slots + in_ram(plan)) / 40
    assert plan.ram_slots and 0 < part < 1
    one = 2 * EXPERT * part / DISK  # of a layer
    assert seconds(plan.decode) == pytest.approx(seconds(plain.decode) + 4 * one)
    assert seconds(plan.prefill) == pytest.approx(32 * EXPERT * part / DISK / 100)
    assert plan.draft_cost is not None and plain.draft_cost is not None
    added = plain.draft_cost * seconds(plain.decode) + 5 * one
    assert plan.draft_cost == pytest.approx(added / (seconds(plain.decode) + 4 * one))


def test_statistics_whose_parts_add_up_to_more_than_all() -> None:
    """By rounding. A saved plan would not be read again."""
    model = FakeWeights(**MOE)
    uses = np.array([[47, 13, 7, 47, 4, 7, 7, 0]] * 4, np.uint64)
    plan = planned(model, GIB, slots=28, warm=stats_of(model, uses))
    assert plan.experts_in_slots == 28 and plan.hit_rate == 1
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_auto_counts_slots_in_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights(**MOE)
    set_gpu(monkeypatch, VRAM_MARGIN + vram_for(model, 7))
    plan = planned(model, 36 * MIB, vram=None, device="auto", shown=False)
    assert plan.device == "cuda" and plan.ram_slots and plan.decode
    assert f"decode is predicted at {plan.decode.tokens_per_second:.1f} tokens/s with the GPU" in plan.why


# --- carrying it out ------------------------------------------------------------------------------------------------


def test_the_engine_is_told() -> None:
    model = FakeWeights(**MOE)
    for ram in (GIB, 24 * MIB):
        plan = planned(model, ram)
        options = engine_options(plan)
        assert (options.expert_ram_bytes, options.expert_slot_bytes) == (plan.ram_slots, plan.expert_slots)
        assert (plan.ram_slots > 0) is (ram < GIB) and tuple(model.memory_lines(options)) == plan.lines


def test_a_plan_is_refused_if_ram_is_short_now(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(FakeWeights(**MOE), 24 * MIB)
    for free, enough in ((plan.ram_slots, True), (plan.ram_slots - 1, False)):
        monkeypatch.setattr("sharpi.planning.plan.free_ram_bytes", lambda free=free: free)
        if enough:
            plan.require()
        else:
            said = refused(plan.require, OutOfMemoryError)
            assert re.match(r"the plan holds 15\.50 MiB of experts in RAM, and .* are free: make a new plan", said)
    replace(plan, ram_slots=0).require()
    assert "VRAM" in refused(replace(plan, available_bytes=1).require, OutOfMemoryError)


def test_saved_plans(tmp_path: Path) -> None:
    model = FakeWeights(**MOE)
    plan = planned(model, 24 * MIB)
    path = tmp_path / "plan.json"

    def read(**changes: Any) -> Plan:
        told = {**plan.to_dict(), **changes}
        path.write_text(json.dumps({name: value for name, value in told.items() if value != "gone"}), encoding="utf-8")
        return load_plan(path, model, model)

    assert read() == plan and plan.to_dict()["ram_pools"] == [
        {"layers": 4, "experts": 32, "slot_bytes": EXPERT, "slots": in_ram(plan)}]
    old = read(ram_slots="gone", ram_pools="gone", ram_hit_rate="gone")
    assert old == replace(plan, ram_slots=0, ram_pools=(), ram_hit_rate=None)
    inside = [["vram", 0] if home.home == "slots" else list(home) for home in plan.homes]
    assert "slots for experts, none of which are to be in slots" in refused(
        lambda: read(homes=inside, expert_slots=0))
    assert "'ram_slots' are for a GPU's plan" in refused(lambda: read(device="cpu", prompt="exact"))


class Loading:
    """Fails while a plan takes more than `capacity` of VRAM."""

    def __init__(self, model: FakeWeights, capacity: int) -> None:
        self._model, self._capacity = model, capacity

    def __call__(self, plan: Plan) -> str:
        wanted = sum(count for _, count in self._model.memory_lines(engine_options(plan)))
        if wanted > self._capacity:
            error = OutOfMemoryError("layer 3 needs 5 bytes")
            error.available, error.wanted = self._capacity, wanted
            raise error
        return "loaded"

    def run(self, plan: Plan) -> Plan:
        load: Callable[[Plan], str] = self
        return load_planned(plan, self._model, self._model, None, load)[1]  # type: ignore[arg-type]


def set_free(monkeypatch: pytest.MonkeyPatch, ram: int) -> None:
    for name in ("ram_bytes", "free_ram_bytes"):
        monkeypatch.setattr(f"sharpi.planning.disk.{name}", lambda: ram)


def test_less_vram_than_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights(**MOE)
    ram = 30 * MIB
    set_free(monkeypatch, ram)
    plan = planned(model, None, slots=20)
    assert plan.ram_slots and not experts_of(plan).disk, "RAM has room for the experts outside of VRAM"
    fewer = Loading(model, vram_for(model, 6)).run(plan)
    assert 0 < fewer.experts_in_slots < 6 and fewer.ram_slots == left(ram) - EMBEDDING and fewer.reads_disk
    assert sum(experts_of(fewer)[1:]) == 32 * EXPERT and experts_of(fewer).disk > 0
    assert fewer.ram_hit_rate == pytest.approx(in_ram(fewer) / 32) and fewer.decode and fewer.decode.bound == "disk"
    none = Loading(model, model.taken(100, 1000, Inventory.of(model, model).homes(3)) * 16 // 15 + 1).run(fewer)
    others = sum(sum(placed[2:]) for placed in none.placement if placed.kind != "experts")
    assert others > EMBEDDING and none.ram_slots == left(ram) - others and none.experts_in_slots == 0
    assert experts_of(none).cpu == pytest.approx(in_ram(none) * EXPERT)


def test_slots_in_ram_never_grow_and_may_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they left when the plan was made may be for a scheduler."""
    model = FakeWeights(**MOE)
    plan = planned(model, 30 * MIB, slots=11, spill_bytes=12 * MIB)
    assert plan.ram_slots == left(30 * MIB, 12 * MIB) - EMBEDDING < left(30 * MIB) - EMBEDDING
    set_free(monkeypatch, 30 * MIB)
    made = Loading(model, vram_for(model, 6)).run(plan)
    assert 0 < made.experts_in_slots < plan.experts_in_slots
    assert (made.ram_slots, made.ram_pools) == (plan.ram_slots, plan.ram_pools) and experts_of(made).disk > (
        experts_of(plan).disk)
    set_free(monkeypatch, GIB)
    made = Loading(model, vram_for(model, 6)).run(plan)
    assert (made.ram_slots, made.ram_pools, made.ram_hit_rate, made.reads_disk) == (0, (), None, False)


def test_less_ram_than_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """VRAM stays as it was planned."""
    model = FakeWeights(**MOE)
    set_free(monkeypatch, 30 * MIB)
    plan = planned(model, None)
    said: list[str] = []

    class Short(Loading):
        def __call__(self, tried: Plan) -> str:
            if tried.ram_slots > 15 * MIB:
                set_free(monkeypatch, 18 * MIB)  # what it was when there turned out to be too little
                error = OutOfMemoryError("no RAM")
                error.available, error.wanted = self._capacity, self._capacity - 1
                raise error
            return super().__call__(tried)

        def run(self, tried: Plan) -> Plan:
            load: Callable[[Plan], str] = self
            _, made, notes = load_planned(tried, self._model, self._model, None, load)  # type: ignore[arg-type]
            said.extend(notes)
            return made

    made = Short(model, GIB).run(plan)
    assert made.ram_slots == left(18 * MIB) - EMBEDDING < 15 * MIB < plan.ram_slots
    assert (made.homes, made.expert_slots) == (plan.homes, plan.expert_slots)
    assert said == [f"only {made.ram_slots >> 20} MiB of RAM are left for experts, not the {plan.ram_slots >> 20} MiB"
                    " of the plan: more is read from the disk"]


def test_slots_in_ram_are_no_larger_than_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """SHARPI_RAM_GB promises RAM that is taken when it comes, and slots are taken at once."""
    model = FakeWeights(**MOE)
    set_free(monkeypatch, 30 * MIB)
    monkeypatch.setattr(_core, "free_ram", lambda: 20 * MIB)
    assert planned(model, None).ram_slots == 20 * MIB - 20 * MIB // 8 - 30 * MIB // 16 - EMBEDDING


# --- the command ----------------------------------------------------------------------------------------------------


def shown(monkeypatch: pytest.MonkeyPatch, model: FakeWeights, ram: int, *arguments: str) -> list[str]:
    monkeypatch.setattr("sharpi.planning.disk.ram_bytes", lambda: ram)
    monkeypatch.setattr("sharpi.planning.disk.free_ram_bytes", lambda: ram)
    lines = plan_command(monkeypatch, model, "--device", "cuda", *arguments).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    return lines


def test_the_command_shows_three_places(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights(**MOE)
    asked = ["--vram", str(vram_for(model, 7))]
    lines = shown(monkeypatch, model, 24 * MIB, *asked)
    said = " ".join(" ".join(lines).split())
    plan = json.loads("\n".join(shown(monkeypatch, model, 24 * MIB, *asked, "--json")))
    assert plan["ram_slots"] == left(24 * MIB) - EMBEDDING
    held = plan["ram_pools"][0]["slots"]
    assert held == 9
    assert "RAM slots 15.5 MiB for experts, of 37.5 MiB outside VRAM" in said
    title, row = (next(line for line in lines if line.startswith(f"  {name} ")) for name in ("weights", "experts"))
    assert re.split(" {2,}", title.strip()) == ["weights", "in VRAM", "on a miss", "by row", "on disk"]
    assert re.split(" {2,}", row.strip()) == ["experts", "10.5 MiB", "13.5 MiB", "-", "24.0 MiB"]
    assert ("Experts in slots: 7 (22 %) in VRAM and 9 (28 %) in RAM, of 32; expected hit rates 22 % and 28 %"
            " (uniform routing assumed).") in said
    bar = next(line for line in lines if line.startswith("  ["))
    assert 0 < bar.count("~") < bar.count(".") and "on the disk, read when a token chooses them" in said
    whole = model.total / MIB
    assert f"of the weights in RAM, {100 * 24 / whole:.0f} % on the disk, and" in said
    assert f"fits with {100 * 13.5 / whole:.0f} % of" in said
    assert "4 of them, some in RAM and on the disk" in said
    assert len(re.findall("bound by disk", said)) >= 2 and "disk 1.0 GB/s" in said


def test_the_command_without_slots_in_vram_or_in_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights(**MOE)
    asked = ["--vram", str(vram_for(model, 7))]
    said = " ".join(" ".join(shown(monkeypatch, model, 24 * MIB, "--cpu-moe", *asked)).split())
    assert "Experts in slots: 9 of 32 (28 %) in RAM; expected hit rate 28 %" in said
    said = " ".join(" ".join(shown(monkeypatch, model, GIB, *asked)).split())
    assert "Experts in slots: 7 of 32 (22 %), 1.8 a layer; expected hit rate 22 %" in said and "disk" not in said
    assert "RAM slots" not in said
    # Other weights are outside of VRAM too, so all places are used.
    small = str(model.taken(100, 1000, Inventory.of(model, model).homes(3)))
    lines = shown(monkeypatch, model, 40 * MIB, "--vram", small)
    title = next(line for line in lines if line.startswith("  weights "))
    assert re.split(" {2,}", title.strip()) == ["weights", "in VRAM", "over PCIe", "by the CPU", "by row", "on disk"]
