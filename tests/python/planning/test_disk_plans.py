"""Models that are larger than RAM, planned for a machine with a GPU: whatever RAM has no room for is read from the
disk, on either device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_weights import GIB, MACHINE, MIB, STREAMING, FakeWeights, plain_machine, set_gpu  # noqa: F401
from planning import machine_with, plan_of
from recorded_models import write_without_weights

from sharpi import _core
from sharpi.loading.description import describe
from sharpi.planning.copies import kept
from sharpi.planning.placement import Inventory
from sharpi.planning.plan import Plan
from sharpi.planning.planner import VRAM_MARGIN, make_plan
from sharpi.planning.prediction.decode import read_outside_vram
from sharpi.planning.prediction.streams import forecast

DISK = 1e9
SMALL = replace(MACHINE, vram_bytes=6 * GIB)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """17.3 GiB, of which 16.2 are experts."""
    path = tmp_path_factory.mktemp("disk") / "mixture.gguf"
    write_without_weights(path, "qwen3-30b-a3b")
    return describe(path)


@pytest.fixture(autouse=True)
def _machine(plain_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    set_gpu(monkeypatch, 6 * GIB)
    monkeypatch.setattr("sharpi.planning.request.disk_bytes_per_second", lambda path: DISK)


def planned(described: Any, ram: int, **asked: Any) -> Plan:
    return make_plan(*described, **{"ram": ram, "device": "cuda", "context": 2048, "threads": 16, "shown": True,
                                    "profile": SMALL, **asked})


def seconds(plan: Plan) -> float:
    assert plan.decode is not None
    return 1 / plan.decode.tokens_per_second


def test_a_mixture_has_slots_in_ram_and_the_rest_is_read_from_the_disk(mixture: Any) -> None:
    plain = planned(mixture, 64 * GIB)
    assert plain.decode and plain.decode_full and plain.prefill and not plain.ram_slots and not plain.reads_disk
    outside = sum(placed.direct + placed.missed + placed.cpu for placed in plain.placement)
    assert 11 * GIB < outside < 13 * GIB
    ram = 10 * GIB
    plan = planned(mixture, ram)
    assert plan.fits and (plan.homes, plan.lines) == (plain.homes, plain.lines) and plan.reads_disk
    assert plan.decode and plan.decode_full and plan.prefill and plan.disk_bytes_per_second == DISK
    by_row = sum(placed.by_row for placed in plan.placement)
    assert plan.ram_slots == ram - GIB - kept(ram, recurrent=False).total - by_row
    spec = mixture[1]
    core = _core.EngineOptions(device="cpu", context=2048, expert_slot_bytes=plan.ram_slots)
    assert [tuple(pool) for pool in plan.ram_pools] == spec.expert_pools(core), "the core lays them out as on the CPU"
    held = sum(pool.slots for pool in (*plan.expert_pools, *plan.ram_pools)) / plan.experts
    inventory = Inventory.of(*mixture)
    experts = [use for use in inventory.model_uses if use.role == "experts"]
    read = sum(use.read_bytes for use in experts) * (1 - held) / DISK
    assert seconds(plan) == pytest.approx(seconds(plain) + read, rel=1e-6)
    assert 1 / plan.decode_full.tokens_per_second == pytest.approx(1 / plain.decode_full.tokens_per_second + read)
    brought = sum(use.batch_bytes for use in experts) * (1 - held)
    assert plan.prefill.tokens_per_second == pytest.approx(plan.batch / (brought / DISK))
    assert plan.decode.bound == plan.prefill.bound == "disk"
    assert forecast(plain, *mixture, 8, 512) is not None and forecast(plan, *mixture, 8, 512) is None
    assert seconds(planned(mixture, ram, spill_bytes=0)) < seconds(plan), "copies take RAM, too"
    # Which experts are in VRAM changes, so their file is needed whole.
    whole = outside + next(placed.vram for placed in plain.placement if placed.kind == "experts")
    for just, reads in ((whole, False), (whole - 1, True)):
        made = planned(mixture, just)
        assert (made.ram_slots > 0) is made.reads_disk is reads and made.disk_bytes_per_second is None
    almost = planned(mixture, outside + GIB)
    assert almost.ram_slots and almost.disk_bytes_per_second == DISK, "a margin and copies leave too little"


def test_a_part_of_the_ram_is_never_locked(mixture: Any) -> None:
    """The system can take nothing of it back, and a margin of 1 GiB would be too little beside many GiB."""
    ram = 16 * GIB + 150 * MIB
    plan = planned(mixture, ram, spill_bytes=0)
    assert plan.ram_slots == ram - ram // 16 - sum(placed.by_row for placed in plan.placement)


def test_a_dense_model_beside_a_gpu_comes_through_the_page_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights(layers=8)
    monkeypatch.setattr("sharpi.planning.request.ASSUMED_BYTES_PER_SECOND", DISK)
    vram = model.total // 2
    plain = plan_of(model, vram, ram=GIB, shown=True)
    outside = sum(placed.direct + placed.cpu for placed in plain.placement)
    ram = outside * 2 // 3
    plan = plan_of(model, vram, ram=ram, shown=True)
    assert (plan.homes, plan.lines, plan.placement) == (plain.homes, plain.lines, plain.placement)
    assert not plan.ram_slots and not plan.ram_pools and plan.ram_hit_rate is None and plan.reads_disk
    part = 1 - (ram - ram // 8 - ram // 16) / outside
    read = sum(use.read_bytes for use in Inventory.of(model, model).model_uses
               if use.role != "embedding" and plan.homes[use.tensor].home != "vram")
    assert seconds(plan) == pytest.approx(seconds(plain) + part * read / DISK)
    assert plan.prefill and plan.prefill.tokens_per_second == pytest.approx(plan.batch / (part * outside / DISK))
    for just, reads in ((outside, False), (outside - 1, True)):
        assert plan_of(model, vram, ram=just, shown=True).reads_disk is reads


@pytest.mark.parametrize("experts", [(), (0, 1, 2, 3)])
def test_what_a_token_reads_outside_vram(experts: tuple[int, ...]) -> None:
    model = FakeWeights(experts=experts)
    inventory = Inventory.of(model, model)
    for count in range(len(inventory.movable) + 1):
        homes = inventory.homes(count)
        read = sum(use.read_bytes for use in inventory.model_uses
                   if homes[use.tensor].home != "vram" and use.role != "embedding")
        assert read_outside_vram(inventory.model_uses, homes, {}) == pytest.approx(read)


def test_auto_counts_the_disk_on_both_sides(mixture: Any) -> None:
    slow = replace(SMALL, vram_bytes_per_second=20e9)
    asked: dict[str, Any] = {"device": "auto", "profile": slow, "shown": False}
    in_ram = planned(mixture, 64 * GIB, **asked)
    assert in_ram.device == "cpu", "its RAM is faster than this VRAM"
    from_disk = planned(mixture, 14 * GIB, **asked)
    assert from_disk.device == "cuda" and from_disk.ram_slots, "VRAM and RAM together hold more than RAM"
    there, here = (float(words.split()[0]) for words in from_disk.why.split(" at ")[1].split(", "))
    shown = planned(mixture, 14 * GIB, device="cpu", profile=slow).decode
    assert shown and here == pytest.approx(shown.tokens_per_second, abs=0.1) and here < there
    both = planned(mixture, 10 * GIB, **asked)
    assert both.decode and f"at {both.decode.tokens_per_second:.1f} tokens/s" in both.why
    assert both.decode.bound == "disk"


def test_auto_takes_no_cpu_whose_ram_lacks_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights()
    set_gpu(monkeypatch, VRAM_MARGIN + model.total // 2 + STREAMING)
    monkeypatch.setenv("SHARPI_CUDA_ROW_SPLIT", "0")
    slow = machine_with(10e9, 1e9)
    assert plan_of(model, device="auto", profile=slow).device == "cpu"
    plan = plan_of(model, device="auto", profile=slow, ram=model.total - MIB)
    assert plan.device == "cuda" and plan.fits and "and not into RAM either" in plan.why


def test_a_dense_model_that_ram_has_no_room_for_now_is_read_from_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The RAM is there, and others have it."""
    model = FakeWeights()
    for name, count in (("ram_bytes", 4 * model.total), ("free_ram_bytes", model.total // 2)):
        monkeypatch.setattr(f"sharpi.planning.disk.{name}", lambda count=count: count)
    roomy = plan_of(model, device="cpu", ram=4 * model.total, shown=True)
    plan = plan_of(model, device="cpu", shown=True)
    rate = plan.disk_bytes_per_second
    assert plan.fits and roomy.disk_bytes_per_second is None and rate
    read = sum(use.read_bytes for use in Inventory.of(model, model).model_uses if use.role != "embedding")
    added = seconds(plan) - seconds(roomy)
    assert read / 2 / rate < added < read / rate
    assert plan.prefill == roomy.prefill, "a batch computes for longer than the disk reads"
    assert plan.decode and plan.decode.bound == "disk"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_file_that_is_in_ram_already_needs_none(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Its file system is. The weights that others leave room for are not read from a disk either."""
    model = FakeWeights(layers=8, experts=tuple(range(8)))
    set_gpu(monkeypatch, VRAM_MARGIN + model.total // 2)
    for name, count in (("ram_bytes", 4 * model.total), ("free_ram_bytes", model.total // 4)):
        monkeypatch.setattr(f"sharpi.planning.disk.{name}", lambda count=count: count)
    roomy, plan = plan_of(model, device=device, ram=4 * model.total), plan_of(model, device=device)
    assert roomy.reads_disk is False and plan.reads_disk is True
    monkeypatch.setattr("sharpi.planning.disk.bytes_in_ram", lambda paths: model.total)
    assert plan_of(model, device=device) == roomy
