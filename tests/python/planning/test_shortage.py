"""Loading with less memory than a plan was made for: what is loaded instead, what people hear, and what is raised."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_weights import GIB, MIB, FakeWeights, plain_machine, set_gpu  # noqa: F401 - a fixture
from tiny_models import MODELS, write

from sharpi import _core
from sharpi.errors import OutOfMemoryError
from sharpi.loading.description import describe
from sharpi.loading.opening import engine_options
from sharpi.planning.placement import Inventory
from sharpi.planning.plan import Plan
from sharpi.planning.planner import make_plan
from sharpi.planning.shortage import RESERVE, load_planned

pytestmark = pytest.mark.usefixtures("plain_machine")


class Device:
    """A device with this many bytes to give. Its first loadings fail, whatever they ask for."""

    def __init__(self, model: FakeWeights, capacity: int, failures: int = 0) -> None:
        self.model = model
        self.capacity = capacity
        self.failures = failures
        self.tried: list[Plan] = []

    def load(self, plan: Plan) -> str:
        self.tried.append(plan)
        wanted = sum(count for _, count in self.model.memory_lines(engine_options(plan)))
        if len(self.tried) <= self.failures or wanted > self.capacity:
            error = OutOfMemoryError("layer 3 needs 5 bytes")
            error.available, error.wanted = self.capacity, wanted
            raise error
        return "loaded"

    def run(self, plan: Plan) -> tuple[Plan, list[str]]:
        loaded, made, notes = load_planned(plan, self.model, self.model, None, self.load)  # type: ignore[arg-type]
        assert loaded == "loaded" and made is self.tried[-1]
        return made, notes


def planned(monkeypatch: pytest.MonkeyPatch, model: FakeWeights, vram: int | None = None, **options: object) -> Plan:
    set_gpu(monkeypatch, 79 * GIB)
    given = {"device": "cuda", "context": 500, "batch": 64, "vram": vram, **options}
    return make_plan(model, model, **given)  # type: ignore[arg-type]


def room(capacity: int) -> int:
    return capacity - min(RESERVE, capacity // 16)


def refusal(load: Callable[[], object]) -> OutOfMemoryError:
    with pytest.raises(OutOfMemoryError) as raised:
        load()
    return raised.value


def test_what_fits_is_loaded_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights()
    plan = planned(monkeypatch, model)
    for failures in (0, 1):
        device = Device(model, plan.total_bytes, failures)
        made, notes = device.run(plan)
        assert made is plan and notes == [] and len(device.tried) == failures + 1


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"layers": 1}, {"granule": 2 * MIB},
                                     {"layers": 12, "granule": 4096}])
def test_as_much_is_kept_as_there_is_room_for(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """All units up to the last that fits, and a line that says what became of the plan."""
    model = FakeWeights(mixed=random.Random(5), **options)
    plan = planned(monkeypatch, model)
    inventory = Inventory.of(model, model)
    takes = [model.taken(plan.batch, plan.context, inventory.homes(count))
             for count in range(len(inventory.movable) + 1)]
    before = -1
    for capacity in range(min(takes) * 16 // 15 + 1, plan.total_bytes, max(1, plan.total_bytes // 37)):
        made, notes = Device(model, capacity).run(plan)
        kept = max(count for count, taken in enumerate(takes) if taken <= room(capacity))
        assert [home.home for home in made.homes] == [home.home for home in inventory.homes(kept)]
        assert made.total_bytes == takes[kept] and made.fits and made.available_bytes == capacity
        assert (made.context, made.batch, made.kv_dtype, made.vram) == (plan.context, plan.batch, plan.kv_dtype, None)
        assert sum(row.vram for row in made.placement) == inventory.kept_bytes(made.homes)
        held = inventory.kept_bytes(made.homes)
        assert notes == [f"only {capacity >> 20} MiB of VRAM are free: {held >> 20} MiB of weights are kept there, not"
                         f" the {model.total >> 20} MiB of the plan; it will be slower"]
        assert kept >= before, "more memory made a unit leave"
        before = kept
    assert before > 0


def test_what_a_plan_left_in_the_file_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan from a file may have any homes; only what is in VRAM leaves."""
    model = FakeWeights(layers=6)
    plan = planned(monkeypatch, model)
    inventory = Inventory.of(model, model)
    for seed in range(8):
        dice = random.Random(seed)
        outside = {tensor for unit in inventory.movable if dice.random() < 0.3 for tensor in unit.tensors}
        homes = tuple(home._replace(home="direct") if tensor in outside else home
                      for tensor, home in enumerate(plan.homes))
        given = replace(plan, homes=homes)
        whole = model.taken(plan.batch, plan.context, homes)
        made, _ = Device(model, whole - 1).run(given)
        assert made.homes != homes and model.taken(plan.batch, plan.context, made.homes) <= room(whole - 1)
        left = {tensor for tensor, home in enumerate(made.homes) if home.home != "vram"}
        assert outside < left
        gone = [unit for unit in inventory.movable if set(unit.tensors) <= left - outside]
        stays = [unit for unit in inventory.movable if not set(unit.tensors) & left]
        assert gone and max(unit.rank for unit in stays) < min(unit.rank for unit in gone)


def test_the_last_attempt_leaves_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was free before was not. 128 MiB are left of much, a sixteenth of little."""
    for layers, per_token in ((4, 1000), (12, 5 * MIB)):
        model = FakeWeights(layers=layers, per_token=per_token)
        plan = planned(monkeypatch, model)
        reserve = min(RESERVE, plan.total_bytes // 15)
        assert (reserve == RESERVE) is (per_token > 1000)
        for failures in (0, 1, 2):
            made, notes = Device(model, plan.total_bytes + reserve - MIB, failures).run(plan)
            assert (made is plan) is (failures < 2) and bool(notes) is (failures == 2)
            made, notes = Device(model, plan.total_bytes + reserve + MIB, failures).run(plan)
            assert made.homes == plan.homes and notes == [], failures


def test_slots_shrink_to_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights(layers=6, experts=tuple(range(6)))
    plan = planned(monkeypatch, model, FakeWeights(layers=6, experts=tuple(range(6))).total * 3 // 4)
    assert plan.expert_slots > 8 * MIB
    none = model.taken(plan.batch, plan.context, plan.homes)
    for capacity in range((none + 3 * MIB) * 16 // 15, plan.total_bytes, MIB):
        made, notes = Device(model, capacity).run(plan)
        assert [home.home for home in made.homes] == [home.home for home in plan.homes] and len(notes) == 1
        assert 0 < made.expert_slots < plan.expert_slots and made.total_bytes <= room(capacity)
        assert made.experts_in_slots == sum(pool.slots for pool in made.expert_pools) < plan.experts_in_slots
        assert made.hit_rate is not None and plan.hit_rate is not None and made.hit_rate < plan.hit_rate
        assert made.decode is not None and plan.decode is not None
        assert made.decode.tokens_per_second < plan.decode.tokens_per_second
        more = model.taken(plan.batch, plan.context, made.homes, made.expert_slots + MIB)
        assert more > room(capacity), "there was room for more"


@pytest.mark.parametrize("cpu_moe", [False, True])
def test_experts_that_do_not_fit_whole_leave_their_room_to_slots(cpu_moe: bool,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they were left to the CPU: then there are no slots, however much is free."""
    model = FakeWeights(layers=6, experts=tuple(range(6)))
    plan = planned(monkeypatch, model, cpu_moe=cpu_moe)
    assert plan.resident is not cpu_moe
    made, notes = Device(model, plan.total_bytes - 2 * MIB).run(plan)
    experts = [tensor for tensor, known in enumerate(model.tensors) if "_exps" in known.name]
    assert {made.homes[tensor].home for tensor in experts} == {"slots"}
    assert len(notes) == 1 and (made.experts_in_slots == 0) is cpu_moe and made.fits
    assert made.expert_rates[0] > 0 and (made.expert_rates[1] == 0) is cpu_moe


def test_nothing_is_measured_while_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights()
    plan = planned(monkeypatch, model)
    assert plan.profile is None

    def measure(measures: bool, announce: object = None, gpu_index: int = 0) -> object:
        assert not measures, "it is measured"
        from sharpi.machine.profile import ASSUMED

        return ASSUMED

    monkeypatch.setattr("sharpi.planning.planner.current_profile", measure)
    made, _ = Device(model, plan.total_bytes - MIB).run(plan)
    assert not made.resident and made.profile is made.decode is made.prefill is None


def test_it_is_tried_three_times_and_then_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights(per_token=100_000)
    plan = planned(monkeypatch, model, context=20_000)
    least = min(model.taken(plan.batch, plan.context, Inventory.of(model, model).homes(0)),
                model.taken(plan.batch, plan.context))
    device = Device(model, least * 3 // 4)
    error = refusal(lambda: device.run(plan))
    assert len(device.tried) == 3
    words = str(error)
    assert words.startswith("layer 3 needs 5 bytes; a context of ") and words.endswith(" tokens would fit")
    assert (error.available, error.wanted) == (device.capacity, device.tried[-1].total_bytes)
    context = int(words.split("context of ")[1].split()[0])
    for tokens, fits in ((context, True), (context + 1, False)):
        homes = device.tried[-1].homes
        assert (model.taken(plan.batch, tokens, homes) <= device.capacity) is fits


def test_a_smaller_batch_is_advised_before_a_much_shorter_context(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights(per_row=100_000)
    plan = planned(monkeypatch, model, batch=500)
    fixed = model.taken(64, plan.context, Inventory.of(model, model).homes(0)) - 64 * model.per_row
    words = str(refusal(lambda: Device(model, fixed + 200 * model.per_row).run(plan)))
    assert words.endswith("; a batch of 125 would fit")
    words = str(refusal(lambda: Device(model, fixed // 100).run(plan)))
    assert words.endswith("; the model does not fit there: use device cpu")


def test_other_memory_that_is_short_is_not_taken_for_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights()
    plan = planned(monkeypatch, model)
    device = Device(model, 2 * plan.total_bytes, failures=3)
    assert str(refusal(lambda: device.run(plan))) == "layer 3 needs 5 bytes", "with advice about the device's"
    assert len(device.tried) == 3


def test_an_error_without_facts_is_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tried = FakeWeights(), []

    def load(plan: Plan) -> None:
        tried.append(plan)
        raise OutOfMemoryError("no thread")

    plan = planned(monkeypatch, model)
    error = refusal(lambda: load_planned(plan, model, model, None, load))  # type: ignore[arg-type]
    assert (str(error), error.available, len(tried)) == ("no thread", None, 1)


def test_on_the_cpu_there_is_nothing_to_leave_out(tmp_path: Path) -> None:
    """The core's own error, with its facts."""
    large = replace(MODELS["llama"], context=1 << 20, layers=8, heads=32, kv_heads=32, head_dim=128, rope_dims=4)
    file, spec = describe(write(tmp_path / "m.gguf", large))
    plan = make_plan(file, spec, device="cpu", context=1 << 20, batch=32, kv_dtype="fp32")
    tried: list[Plan] = []

    def load(made: Plan) -> _core.Engine:
        tried.append(made)
        return _core.Engine(spec, [str(path) for path in file.paths], engine_options(made))

    error = refusal(lambda: load_planned(plan, file, spec, None, load))
    assert tried == [plan]
    assert error.available is not None and error.wanted == plan.total_bytes - plan.mapped_bytes > error.available
    assert "'KV cache' needs 256.0 GiB" in str(error) and "; a context of " in str(error)
