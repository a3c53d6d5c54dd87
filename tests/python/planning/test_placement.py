"""Homes: the order in which VRAM is filled, what may share rows with the CPU, and the switches."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from fake_weights import FakeWeights
from golden_models import write_golden
from tiny_models import HYBRIDS, MODELS, write

from sharpi import _core
from sharpi.errors import InvalidRequestError
from sharpi.loading.description import describe
from sharpi.planning.placement import ROLES, ExpertPool, Inventory, Switches, TensorHome

SWITCHES = ("SHARPI_CUDA_PARTIAL_WEIGHT_CACHE", "SHARPI_CUDA_PARTIAL_WEIGHT_CACHE_GB", "SHARPI_CUDA_ROW_SPLIT",
            "SHARPI_CPU_MOE")


@pytest.fixture(autouse=True)
def no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)


def names(model: FakeWeights, inventory: Inventory) -> list[list[str]]:
    return [[model.tensors[tensor].name for tensor in unit.tensors] for unit in inventory.movable]


# --- the order -------------------------------------------------------------------------------------------------------


def test_the_order_of_benefit() -> None:
    model = FakeWeights(layers=2)
    assert names(model, Inventory.of(model, model)) == [
        ["blk.0.attn_q", "blk.0.attn_k", "blk.0.attn_output"], ["blk.1.attn_q", "blk.1.attn_k", "blk.1.attn_output"],
        ["output"], ["blk.0.ffn_gate", "blk.0.ffn_up"], ["blk.0.ffn_down"], ["blk.1.ffn_gate", "blk.1.ffn_up"],
        ["blk.1.ffn_down"], ["token_embd"]]


def test_the_order_of_benefit_with_experts() -> None:
    """The model's are one unit; what a token reads in full comes before them, the embedding after."""
    model = FakeWeights(layers=4, experts=(0, 1, 2))
    inventory = Inventory.of(model, model)
    stacks = [f"blk.{layer}.ffn_{name}_exps" for layer in (0, 1, 2) for name in ("gate", "up", "down")]
    assert names(model, inventory)[4:] == [
        ["blk.0.ffn_gate_inp"], ["blk.2.ffn_gate_inp"], ["blk.1.ffn_gate_inp"], ["output"],
        ["blk.3.ffn_gate", "blk.3.ffn_up"], ["blk.3.ffn_down"], stacks, ["token_embd"]]
    assert inventory.movable[inventory.before_experts].kind == "experts" and inventory.before_experts == 10
    for tensor, home in zip(model.tensors, inventory.homes(0), strict=True):
        assert (home.home == "vram") is ("norm" in tensor.name), tensor.name


def test_experts_outside_of_vram_are_in_slots() -> None:
    """All or none of them, at every number of units; everything else is direct if it is not in VRAM."""
    for tied in (False, True):
        model = FakeWeights(layers=4, experts=(0, 1, 2), tied=tied)
        inventory = Inventory.of(model, model)
        assert inventory.has_experts
        for resident in range(len(inventory.movable) + 1):
            homes = inventory.homes(resident)
            inventory.check(homes)
            seen: dict[bool, set[str]] = {True: set(), False: set()}
            for home, tensor in zip(homes, model.tensors, strict=True):
                seen["_exps" in tensor.name].add(home.home)
            assert seen[True] == {"vram" if resident > inventory.before_experts else "slots"}
            assert seen[False] <= {"vram", "direct"}
            assert inventory.streamed(homes) is (resident <= inventory.before_experts)
        lean = inventory.homes(inventory.before_experts)
        direct = [tensor.name for home, tensor in zip(lean, model.tensors, strict=True) if home.home == "direct"]
        assert direct == ([] if tied else ["token_embd"]), "an embedding's rows need no VRAM"
    dense = Inventory.of(FakeWeights(), FakeWeights())
    assert not dense.has_experts and dense.before_experts == len(dense.movable)


def test_fused_experts_count_once() -> None:
    model = FakeWeights(layers=1, experts=(0,), mixed=random.Random(4))
    gate, up = model.index("blk.0.ffn_gate_exps"), model.index("blk.0.ffn_up_exps")
    # The core tells of each half of the fused stack; the other tensor has no use now.
    model.resize(gate, 3 << 20)
    model.uses = [(gate, *use[1:4], (3 << 20) // 8, *use[5:]) if use[0] in (gate, up) else use for use in model.uses]
    inventory = Inventory.of(model, model)
    experts = next(unit for unit in inventory.movable if unit.kind == "experts")
    down = model.index("blk.0.ffn_down_exps")
    assert experts.tensors == (gate, down) and experts.nbytes == (3 << 20) + model.sizes[down]
    assert sum(use.batch_bytes for use in inventory.uses if use.role == "experts") == experts.nbytes
    placed = next(row for row in inventory.placed(inventory.homes(0)) if row.kind == "experts")
    assert placed == ("experts", 0, 0, experts.nbytes, 0, 0, 0)


def test_an_embedding_that_is_the_head_counts_as_the_head() -> None:
    model = FakeWeights(layers=1, tied=True)
    assert names(model, Inventory.of(model, model))[-3:] == [
        ["token_embd"], ["blk.0.ffn_gate", "blk.0.ffn_up"], ["blk.0.ffn_down"]]


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"experts": (0, 2)}, {"experts": (0, 1, 2, 3), "tied": True}])
def test_more_room_only_adds(options: dict) -> None:
    model = FakeWeights(mixed=random.Random(1), **options)
    inventory = Inventory.of(model, model)
    before: set[int] = set()
    for resident in range(len(inventory.movable) + 1):
        homes = inventory.homes(resident)
        held = {tensor for tensor, home in enumerate(homes) if home.home == "vram"}
        assert before < held
        gained = held - before
        if resident:
            assert gained == set(inventory.movable[resident - 1].tensors)
        assert inventory.kept_bytes(homes) == sum(model.sizes[tensor] for tensor in held)
        fixed = inventory.kept_bytes(inventory.homes(0))
        assert inventory.movable_bytes(resident) == inventory.kept_bytes(homes) - fixed
        before = held
    assert before == set(range(len(model.tensors)))


def test_fewer_units_leave_other_homes_as_they_are() -> None:
    """What is outside of VRAM stays there, what leaves keeps its rows, and what has to stay stays."""
    model = FakeWeights(experts=(1,))
    inventory = Inventory.of(model, model)
    for planned in range(len(inventory.movable) + 1):
        most = [home._replace(cpu_rows=32) for home in inventory.homes(planned)]
        for resident in range(len(inventory.movable) + 1):
            assert inventory.homes(resident, most) == tuple(
                home._replace(cpu_rows=32) for home in inventory.homes(min(planned, resident)))


def test_roles_are_those_of_the_core(tmp_path: Path) -> None:
    assert _core.tensor_roles == ROLES
    found = set()
    paths = [write(tmp_path / f"{name}.gguf", layout) for name, layout in {**MODELS, **HYBRIDS}.items()]
    for path in (*paths, write_golden("gemma4-e", tmp_path)):
        _, spec = describe(path)
        found |= {role for _, _, role, *_ in spec.tensor_uses()}
    assert found == set(ROLES)


@pytest.mark.parametrize("layers", [2, 3, 5, 28, 36, 64, 80])
def test_what_is_direct_is_spread_over_the_model(layers: int) -> None:
    """For any prefix of the order, no layer in VRAM is far from the next one, so none waits for many."""
    model = FakeWeights(layers=layers)
    units = [unit for unit in Inventory.of(model, model).movable if unit.kind == "feed-forward"]
    assert len(units) == 2 * layers and sorted(unit.layer for unit in units[::2]) == list(range(layers))
    for count in range(len(units) + 1):
        resident = Counter(unit.layer for unit in units[:count])
        whole = [layer for layer in range(layers) if resident[layer] == 2]
        assert sum(1 for some in resident.values() if some == 1) == count % 2, "a layer is finished before the next"
        runs = [after - before - 1 for before, after in zip([-1, *whole], [*whole, layers], strict=True)]
        assert max(runs) <= 2.7 * layers / (len(whole) + 1) + 1


# --- the CPU's rows --------------------------------------------------------------------------------------------------


def test_what_may_be_shared() -> None:
    model = FakeWeights(layers=2)
    inventory = Inventory.of(model, model)
    shared = {use.name for use in inventory.shareable(inventory.homes(0))}
    assert shared == {f"blk.{layer}.ffn_{name}" for layer in (0, 1) for name in ("gate", "up", "down")} | {"output"}
    # Layer 0's gate and up are resident, its down is not.
    shared = {use.name for use in inventory.shareable(inventory.homes(4))}
    assert shared == {"blk.0.ffn_down", "blk.1.ffn_gate", "blk.1.ffn_up", "blk.1.ffn_down"}
    assert inventory.shareable(inventory.homes(len(inventory.movable))) == []


def test_a_tied_head_is_shared_as_the_head() -> None:
    model = FakeWeights(layers=1, tied=True)
    inventory = Inventory.of(model, model)
    assert [use.role for use in inventory.shareable(inventory.homes(0)) if use.name == "token_embd"] == ["head"]
    homes = [home._replace(cpu_rows=64) if tensor == 0 else home for tensor, home in enumerate(inventory.homes(0))]
    inventory.check(homes)
    head = next(row for row in inventory.placed(homes) if row.kind == "output head")
    assert (head.direct, head.cpu) == (model.sizes[0] * 8128 // 8192, model.sizes[0] * 64 // 8192)
    with pytest.raises(InvalidRequestError, match="8224 rows"):
        inventory.check([home._replace(cpu_rows=8224) if not tensor else home for tensor, home in enumerate(homes)])


def test_rows_of_what_is_in_vram_are_nowhere_else() -> None:
    model = FakeWeights(layers=2)
    inventory = Inventory.of(model, model)
    homes = inventory.homes(len(inventory.movable))
    rows = {use.tensor: 32 for use in inventory.shareable()}
    assert len(rows) == 3 * 2 + 1
    carrying = [home._replace(cpu_rows=rows.get(tensor, 0)) for tensor, home in enumerate(homes)]
    inventory.check(carrying)
    assert inventory.placed(carrying) == inventory.placed(homes)
    assert inventory.shareable(carrying) == [] and not inventory.streamed(carrying)


def test_a_matrix_of_few_rows_is_not_shared() -> None:
    model = FakeWeights(layers=1)
    down = model.index("blk.0.ffn_down")
    model.uses = [(*use[:5], 31, use[6]) if use[0] == down else use for use in model.uses]
    inventory = Inventory.of(model, model)
    assert [use.role for use in inventory.shareable(inventory.homes(0))] == ["ffn_gate", "ffn_up", "head"]


def test_both_halves_of_a_fused_matrix_are_shared() -> None:
    """As many rows of each as of a gate and an up that are tensors of their own."""
    fused, plain = FakeWeights(layers=2, fused=True), FakeWeights(layers=2)
    inventory, other = Inventory.of(fused, fused), Inventory.of(plain, plain)
    assert [(use.role, use.rows) for use in inventory.shareable(inventory.homes(0))] == [
        (use.role, use.rows) for use in other.shareable(other.homes(0))]
    both = fused.index("blk.0.ffn_up")
    unit = next(unit for unit in inventory.movable if both in unit.tensors)
    assert unit.tensors == (both,) and unit.nbytes == fused.sizes[both], "its bytes count once"
    rows = {"blk.0.ffn_gate": 64, "blk.0.ffn_up": 64}
    placed = [of.placed([home._replace(cpu_rows=rows.get(model.tensors[tensor].name, 0))
                         for tensor, home in enumerate(of.homes(0))])
              for model, of in ((fused, inventory), (plain, other))]
    assert placed[0] == placed[1] and any(row.cpu for row in placed[0])
    inventory.check([home._replace(cpu_rows=4096) if tensor == both else home
                     for tensor, home in enumerate(inventory.homes(0))])
    with pytest.raises(InvalidRequestError, match="4128 rows"):
        inventory.check([home._replace(cpu_rows=4128) if tensor == both else home
                         for tensor, home in enumerate(inventory.homes(0))])


def test_a_part_without_a_gate_is_shared() -> None:
    model = FakeWeights(layers=1, gated=False)
    inventory = Inventory.of(model, model)
    assert [use.role for use in inventory.shareable(inventory.homes(0))] == ["ffn_up", "ffn_down", "head"]
    assert [unit.tensors for unit in inventory.movable if unit.kind == "feed-forward"] == [
        (model.index("blk.0.ffn_up"),), (model.index("blk.0.ffn_down"),)]


def test_a_gate_without_its_up_is_not_shared() -> None:
    model = FakeWeights(layers=1)
    up = model.index("blk.0.ffn_up")
    model.uses = [(*use[:5], 31, use[6]) if use[0] == up else use for use in model.uses]
    inventory = Inventory.of(model, model)
    assert [use.role for use in inventory.shareable(inventory.homes(0))] == ["ffn_down", "head"]


@pytest.mark.parametrize("name", ["phi3", "arcee"])
def test_the_core_describes_what_may_be_shared(name: str, tmp_path: Path) -> None:
    """Phi has gate and up in one tensor, Arcee has no gate."""
    inventory = Inventory.of(*describe(write_golden(name, tmp_path)))
    first = [(use.name, use.role, use.rows) for use in inventory.shareable() if use.layer == 0]
    up = ("blk.0.ffn_up.weight", "ffn_up", 384)
    gate = [("blk.0.ffn_up.weight", "ffn_gate", 384)] if name == "phi3" else []
    assert first == [*gate, up, ("blk.0.ffn_down.weight", "ffn_down", 256)]


def test_every_byte_is_in_one_place() -> None:
    dice = random.Random(3)
    seen = set()
    for _ in range(50):
        model = FakeWeights(layers=dice.randint(1, 5), tied=dice.random() < 0.5, mixed=dice, experts=(0, 3))
        inventory = Inventory.of(model, model)
        homes = list(inventory.homes(dice.randint(0, len(inventory.movable))))
        # Any expert may be chosen: without slots all are the CPU's.
        experts = on_cpu = sum(size for size, home, tensor in zip(model.sizes, homes, model.tensors, strict=True)
                               if "_exps" in tensor.name and home.home == "slots")
        assert next((row.cpu for row in inventory.placed(homes) if row.kind == "experts"), 0) == experts
        seen.add(experts)
        for use in inventory.shareable(homes):
            rows = 32 * dice.randint(0, use.rows // 32)
            homes[use.tensor] = homes[use.tensor]._replace(cpu_rows=rows)
            on_cpu += use.read_bytes * rows // use.rows
        placed = inventory.placed(homes)
        resident = sum(size for size, home in zip(model.sizes, homes, strict=True) if home.home == "vram")
        assert sum(row.vram for row in placed) == resident
        assert sum(row.cpu for row in placed) == on_cpu
        assert sum(sum(row[1:]) for row in placed) == model.total
        assert all(row.cpu == 0 for row in placed if row.kind not in ("feed-forward", "output head", "experts"))
        alone = inventory.placed_on_cpu()
        assert sum(row.cpu for row in alone) == model.total == sum(sum(row[1:]) for row in alone)
    assert 0 in seen and len(seen) > 5


def test_experts_are_placed_by_what_the_slots_hold() -> None:
    model = FakeWeights(layers=4, experts=(0, 1, 3))
    inventory = Inventory.of(model, model)
    homes = inventory.homes(inventory.before_experts)
    layer = 8 * model.layer_expert_bytes(0)

    def experts(pools: list[ExpertPool]) -> tuple[int, ...]:
        placed = inventory.placed(homes, pools)
        assert sum(sum(row[1:]) for row in placed) == model.total
        assert not any(row.missed for row in placed if row.kind != "experts")
        return next(row for row in placed if row.kind == "experts")[1:]

    pools = [ExpertPool(2, 16, 1, 4), ExpertPool(1, 8, 1, 2)]
    inside = 3 * layer // 4
    assert experts(pools) == (inside, 0, 0, 3 * layer - inside, 0, 0)
    assert experts([ExpertPool(3, 24, 1, 0)]) == (0, 0, 3 * layer, 0, 0, 0), "there is no place to fetch to"
    assert experts([ExpertPool(3, 24, 1, 24)]) == (3 * layer, 0, 0, 0, 0, 0)


# --- homes from elsewhere --------------------------------------------------------------------------------------------


def test_homes_that_a_model_cannot_have() -> None:
    model = FakeWeights(layers=2)
    inventory = Inventory.of(model, model)
    sound = inventory.homes(4)
    inventory.check(sound)

    def refused(changes: dict[str, dict]) -> str:
        homes = list(sound)
        for name, change in changes.items():
            homes[model.index(name)] = homes[model.index(name)]._replace(**change)
        with pytest.raises(InvalidRequestError) as refusal:
            inventory.check(homes)
        assert "\n" not in str(refusal.value)
        return str(refusal.value)

    gate, up = "blk.1.ffn_gate", "blk.1.ffn_up"
    inventory.check([home._replace(cpu_rows=64) if model.tensors[tensor].name in (gate, up) else home
                     for tensor, home in enumerate(sound)])
    inventory.check([home._replace(home="direct", cpu_rows=64) if model.tensors[tensor].name == "output" else home
                     for tensor, home in enumerate(sound)])
    assert "has to be in VRAM" in refused({"blk.0.attn_norm": {"home": "direct"}})
    assert "'disk'" in refused({gate: {"home": "disk"}})
    for rows in (33, -32, 4096 + 32):
        assert f"{rows} rows" in refused({gate: {"cpu_rows": rows}, up: {"cpu_rows": rows}})
    assert "different rows" in refused({gate: {"cpu_rows": 64}})
    assert "different homes" in refused({gate: {"home": "vram"}})
    # What is in VRAM has the rows for when it leaves it, by the same rules.
    inventory.check([home._replace(cpu_rows=32) if model.tensors[tensor].name in (
        "blk.0.ffn_gate", "blk.0.ffn_up", "output") else home for tensor, home in enumerate(sound)])
    assert {sound[model.index(name)].home for name in ("blk.0.ffn_gate", "output")} == {"vram"}
    assert "different rows" in refused({"blk.0.ffn_gate": {"cpu_rows": 32}})
    assert "8224 rows of output" in refused({"output": {"cpu_rows": 8192 + 32}})
    assert "32 rows of blk.0.attn_q" in refused({"blk.0.attn_q": {"cpu_rows": 32}})
    for name in ("blk.1.attn_q", "token_embd"):
        assert f"32 rows of {name}" in refused({name: {"home": "direct", "cpu_rows": 32}})
    with pytest.raises(InvalidRequestError, match=f"homes for 1 tensors, the model has {len(sound)}"):
        inventory.check([TensorHome()])


def test_experts_leave_together() -> None:
    model = FakeWeights(layers=2, experts=(0, 1))
    inventory = Inventory.of(model, model)
    first, last = (model.index(f"blk.{layer}.ffn_{name}_exps") for layer, name in ((0, "gate"), (1, "up")))
    resident, outside = (inventory.homes(inventory.before_experts + 1), inventory.homes(inventory.before_experts))
    assert (resident[first].home, outside[last].home) == ("vram", "slots")
    for homes, tensor, change, words in (
            (resident, first, {"home": "slots"}, "the experts have different homes"),
            (outside, last, {"home": "vram"}, "the experts have different homes"),
            (outside, first, {"home": "direct"}, "blk.0.ffn_gate_exps has the home 'direct'"),
            (outside, model.index("output"), {"home": "slots"}, "output has the home 'slots'"),
            (outside, last, {"cpu_rows": 32}, "32 rows of blk.1.ffn_up_exps"),
            (resident, first, {"cpu_rows": 32}, "32 rows of blk.0.ffn_gate_exps")):
        inventory.check(homes)
        with pytest.raises(InvalidRequestError, match=words):
            inventory.check([home._replace(**change) if index == tensor else home for index, home in enumerate(homes)])


# --- the switches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache, gigabytes, limit", [
    (None, None, None), ("1", None, None), ("", "", None), ("0", None, 0), ("0", "4", 0), ("1", "4", 4 << 30),
    (None, "2.5", 5 << 29), (None, "0", 0), (None, " 1 ", 1 << 30),
])
def test_the_cache_switches(cache: str | None, gigabytes: str | None, limit: int | None,
                            monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(SWITCHES, (cache, gigabytes), strict=False):
        if value is not None:
            monkeypatch.setenv(name, value)
    assert Switches.read().limit == limit


@pytest.mark.parametrize("value, on", [("1", True), ("0", False), ("", True)])
def test_the_row_switch(value: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARPI_CUDA_ROW_SPLIT", value)
    assert Switches.read().rows is on


@pytest.mark.parametrize("value, on", [("1", True), ("0", False), ("", False), (None, False)])
def test_the_switch_for_experts(value: str | None, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is not None:
        monkeypatch.setenv("SHARPI_CPU_MOE", value)
    assert Switches.read().cpu_moe is on


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", ["maybe", "-1", "nan", "1e3", "two", "0x1", "٣"])
def test_switches_that_say_nothing(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidRequestError) as refusal:
        Switches.read()
    assert name in str(refusal.value) and "\n" not in str(refusal.value)
