"""Mixtures that are larger than RAM: whatever slots in RAM hold, answers stay, and what cannot be read is an error."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from fake_model import cli_runner
from tiny_models import HYBRIDS, MODELS, Delta, fused, write

from sharpi import Model, ModelFileError
from sharpi.cli import main
from sharpi.loading.description import describe
from sharpi.machine.profile import ASSUMED
from sharpi.planning.expert_stats import ExpertStats
from sharpi.planning.plan import Plan
from sharpi.planning.planner import make_plan
from sharpi.serve.models.catalog import ModelFile
from sharpi.serve.models.loading import ModelLoader
from sharpi.serve.settings import ServerSettings

MIB = 1 << 20
SIZES: dict[str, Any] = {"width": 256, "heads": 4, "head_dim": 64, "hidden": 256, "layers": 3, "experts": 24,
                         "experts_used": 3}
SHAPES = {"qwen3moe": replace(MODELS["qwen3moe"], **SIZES, type="Q4_K"),
          "fused": fused(replace(MODELS["qwen3moe"], **SIZES, type="Q4_K")),
          "float32": replace(MODELS["olmoe"], **SIZES),
          "hybrid": replace(HYBRIDS["qwen35moe"], **SIZES, shared=256, type="Q6_K",
                            delta=Delta(value_heads=4, head_dim=64, interval=3))}
TOKENS = np.random.default_rng(5).integers(0, 96, 120).tolist()
# Pieces of few rows and of so many that the next layer's experts are read ahead.
PIECES = (1, 1, 40, 2, 5, 60, 1, 8, 1, 1)


def planned(path: Path, ram: int, **options: Any) -> Plan:
    file, spec = describe(path)
    return make_plan(file, spec, **{"device": "cpu", "context": 128, "threads": 2, "ram": ram, "profile": ASSUMED,
                                    **options})


def needed(path: Path) -> int:
    """The RAM with which everything stays mapped."""
    return planned(path, 1 << 40).total_bytes


def is_recurrent(path: Path) -> bool:
    return describe(path)[1].state_bytes > 0


def loaded(path: Path, folder: Path, ram: int) -> Model:
    """The model as a machine with so little RAM would load it, without copies of pages."""
    plan = planned(path, ram, spill_bytes=0)
    saved = folder / f"{ram}.json"
    saved.write_text(json.dumps(plan.to_dict()), encoding="utf-8")
    return Model.load(path, plan=saved)


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write(tmp_path_factory.mktemp("models") / "m.gguf", SHAPES[request.param])


def answers(path: Path, **options: Any) -> tuple[np.ndarray, np.ndarray, str]:
    with options.get("model") or Model.load(path, device="cpu", context=128, threads=2) as model:
        text = "".join(map(str, model.generate(TOKENS[:5], max_tokens=40, temperature=0.7, seed=3)))
        return model.logits(TOKENS), model.logits(TOKENS, chunks=PIECES), text


def test_no_answer_depends_on_the_slots(model: Path, tmp_path: Path) -> None:
    prefill, steps, text = answers(model)
    whole = needed(model)
    for share in (0.1, 0.4, 0.7):
        experts = planned(model, whole * 7 // 8).disk_bytes
        # The margin takes an eighth, and copies of states a sixteenth.
        ram = round((whole - experts * (1 - share)) / (1 - 1 / 8 - is_recurrent(model) / 16))
        plan = planned(model, ram, spill_bytes=0)
        slots = sum(pool.slots for pool in plan.expert_pools)
        assert 0 < slots < sum(pool.experts for pool in plan.expert_pools), share
        assert plan.fits and plan.total_bytes <= ram
        with loaded(model, tmp_path, ram) as small:
            assert small.logits(TOKENS).tobytes() == prefill.tobytes(), share
            assert small.logits(TOKENS, chunks=PIECES).tobytes() == steps.tobytes(), share
            made = "".join(map(str, small.generate(TOKENS[:5], max_tokens=40, temperature=0.7, seed=3)))
            stats = ExpertStats.from_engine(small.engine, small.plan)
            assert made == text and stats and stats.capacity == stats.resident == slots
            # What came first makes room for what is used more.
            assert stats.loads.sum() - stats.evictions.sum() == slots and stats.evictions.sum() > 0
            hits, fetched = stats.hits.sum(), stats.fetched.sum()
            assert hits + fetched == stats.uses.sum() and min(hits, fetched) > 0


def test_saved_statistics_fill_the_slots(model: Path, tmp_path: Path) -> None:
    """With what was used most, before the first token."""
    whole = needed(model)
    ram = round((whole - planned(model, whole * 7 // 8).disk_bytes * 0.6) / (1 - 1 / 8 - is_recurrent(model) / 16))
    with loaded(model, tmp_path, ram) as cold:
        text = "".join(map(str, cold.generate(TOKENS[:5], max_tokens=40, temperature=0.7, seed=3)))
        stats = ExpertStats.from_engine(cold.engine, cold.plan)
    assert stats and 0 < stats.capacity < stats.uses.size
    said: list[str] = []
    with Model.load(model, plan=tmp_path / f"{ram}.json", warm=stats, notice=said.append) as warm:
        assert said[0].startswith("reading ") and said[0].endswith("iB of the most used experts to RAM")
        filled = ExpertStats.from_engine(warm.engine, warm.plan)
        assert filled and filled.resident == filled.capacity and not filled.uses.sum()
        assert "".join(map(str, warm.generate(TOKENS[:5], max_tokens=40, temperature=0.7, seed=3))) == text
        used = ExpertStats.from_engine(warm.engine, warm.plan)
    assert used and used.hits.sum() > stats.hits.sum() and used.uses.sum() == stats.uses.sum()


def test_a_model_that_fits_has_no_slots(model: Path) -> None:
    whole = needed(model)
    for ram, has in ((whole, False), (whole - 1, True)):
        plan = planned(model, ram)
        assert (plan.expert_slots > 0) == has == (plan.disk_bytes > 0)
        assert plan.mapped_bytes == plan.weights_bytes - plan.disk_bytes
    experts = sum(tensor.nbytes for tensor in describe(model)[0].tensors if "_exps" in tensor.name)
    assert planned(model, whole - 1).disk_bytes == experts


def test_room_for_too_few_slots_is_none(model: Path) -> None:
    whole = needed(model)
    experts = planned(model, whole - 1).disk_bytes
    for spared in range(0, experts, experts // 60):
        plan = planned(model, whole - spared)
        slots = sum(pool.slots for pool in plan.expert_pools)
        assert (slots > 0) == (plan.expert_slots > 0) == plan.fits == (plan.disk_bytes > 0) or spared == 0
        if not plan.fits:
            assert plan.fitting_context < plan.context and plan.fitting_batch < plan.batch


def test_a_model_whose_other_weights_do_not_fit_says_so(model: Path) -> None:
    whole = needed(model)
    least = whole - planned(model, whole - 1).disk_bytes
    assert not planned(model, least - 4096).fits and not planned(model, least - 4096).expert_slots


def test_slots_leave_room_for_a_schedulers_copies(model: Path) -> None:
    whole = needed(model)
    ram, others = whole * 9 // 10, whole - planned(model, whole - 1).disk_bytes
    states = ram // 16 if is_recurrent(model) else 0
    plain = planned(model, ram, spill_bytes=0)
    assert plain.available_bytes == ram - states and plain.expert_slots == ram - ram // 8 - states - others
    for spill_bytes, takes in ((None, ram // 16), (ram // 10, ram // 10)):
        plan = planned(model, ram, spill_bytes=spill_bytes)
        assert plan.fits and plan.available_bytes == ram - states - takes
        assert plan.expert_slots == plain.expert_slots - takes
    first = planned(model, ram, spill_bytes=plain.expert_slots)
    assert first.fits and first.available_bytes == ram, "slots come before copies"
    assert first.expert_slots == plain.expert_slots + states
    assert not planned(model, whole, spill_bytes=whole).expert_slots, "what all fits into has no need of slots"


def test_a_budget_bounds_slots_and_copies(model: Path) -> None:
    whole = needed(model)
    ram, spill_bytes = whole - 1, MIB // 2
    states = ram // 16 if is_recurrent(model) else 0
    free = planned(model, ram, spill_bytes=spill_bytes)
    budget = free.total_bytes + states + spill_bytes - MIB
    plan = planned(model, ram, spill_bytes=spill_bytes, ram_budget=budget)
    assert 0 < plan.expert_slots < free.expert_slots and plan.total_bytes + states + spill_bytes <= budget
    assert plan.available_bytes == budget - states - spill_bytes
    for most in (MIB, ram):
        assert planned(model, ram, spill_bytes=spill_bytes, ram_budget=most) == free
    assert planned(model, whole, ram_budget=budget).expert_slots == 0


def test_a_server_takes_what_a_plan_says_and_no_more_than_there_is(model: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    ram = needed(model) * 9 // 10
    for where in ("planning.disk.ram_bytes", "planning.disk.free_ram_bytes",
                  "scheduler.ram_bytes", "serve.models.loading.ram_bytes"):
        monkeypatch.setattr(f"sharpi.{where}", lambda: ram)
    monkeypatch.setattr("sharpi.planning.planner.current_profile", lambda *_: ASSUMED)
    file, sizes = ModelFile("m", model), []
    for spill in (None, "0", "1MiB"):
        settings = ServerSettings(device="cpu", threads=2, context=128, parallel=3, spill=spill)
        loader = ModelLoader(settings, lambda *_: None)  # type: ignore[arg-type, return-value]
        opened = loader.open(file)
        try:
            plan = opened.model.plan
            assert plan.expert_slots and plan.total_bytes < opened.bytes + (spill == "0") <= ram
            assert loader.needs(file) == opened.bytes
            said = cli_runner().invoke(main, ["plan", str(model), "-c", "128", "--device", "cpu", "--sequences", "4",
                                              "--json", *(["--spill", spill] if spill else [])],
                                       catch_exceptions=False).stdout
            assert json.loads(said)["expert_slots"] == plan.expert_slots
            sizes.append(plan.expert_slots)
        finally:
            opened.close()
    assert len(set(sizes)) == 3
    settings = ServerSettings(device="cpu", threads=2, context=128, spill="0", memory=ram - MIB)
    opened = ModelLoader(settings, lambda *_: None).open(file)  # type: ignore[arg-type, return-value]
    opened.close()
    assert opened.model.plan.expert_slots and opened.bytes <= ram - MIB


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """A model whose file ends with the last layer's experts, so that they can be cut off."""
    shape = replace(SHAPES["qwen3moe"], type="F32")
    last = f"blk.{shape.layers - 1}.ffn_down_exps.weight"
    path = write(tmp_path / "all.gguf", shape)
    data = next(tensor.data for tensor in gguf.GGUFReader(path).tensors if tensor.name == last)
    return write(tmp_path / "cut.gguf", shape, skip=last, extra=((last, np.array(data)),))


def test_what_cannot_be_read_is_an_error_and_the_model_goes_on(cut: Path, tmp_path: Path) -> None:
    expected = answers(cut)[0]
    size, content = cut.stat().st_size, cut.read_bytes()
    with loaded(cut, tmp_path, needed(cut) * 3 // 5) as model:
        assert model.plan.expert_slots
        os.truncate(cut, size - 20 * 256 * 256 * 4)  # all but four of the last layer's
        for _ in range(3):
            with pytest.raises(ModelFileError, match=r"cut\.gguf: a part of it cannot be read"):
                model.logits(TOKENS)
        cut.write_bytes(content) if cut.stat().st_size == size else _append(cut, content)
        assert model.logits(TOKENS).tobytes() == expected.tobytes()


def test_an_expert_that_was_read_ahead_in_vain_is_read_again(cut: Path, tmp_path: Path) -> None:
    prompts = [np.random.default_rng(seed).integers(0, 96, 17).tolist() for seed in range(60)]
    with Model.load(cut, device="cpu", context=128, threads=2) as model:
        expected = [model.logits(prompt).tobytes() for prompt in prompts]
    content, outcomes = cut.read_bytes(), set()
    with loaded(cut, tmp_path, needed(cut) * 4 // 5) as model:
        os.truncate(cut, len(content) - 256 * 256 * 4)  # the last layer's last expert, which few of these prompts spare
        for prompt, logits in zip(prompts, expected, strict=True):
            try:
                assert model.logits(prompt).tobytes() == logits
                outcomes.add("spared")
            except ModelFileError:
                outcomes.add("failed")
        assert outcomes == {"spared", "failed"}
        _append(cut, content)
        assert [model.logits(prompt).tobytes() for prompt in prompts] == expected


def _append(path: Path, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(content[file.tell():])


# --- what plans say ----------------------------------------------------------------------------------------------


def test_the_disk_bounds_the_speed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr("sharpi.planning.request.disk_bytes_per_second", lambda path: asked.append(path) or 1e6)
    whole = needed(model)
    inside, outside = (planned(model, ram, shown=True) for ram in (1 << 40, whole * 4 // 5))
    assert inside.decode and outside.decode and inside.prefill and outside.prefill and asked == [model]
    layers, used = SIZES["layers"], SIZES["experts_used"]
    one = outside.disk_bytes / sum(pool.experts for pool in outside.expert_pools)
    held = sum(pool.slots for pool in outside.expert_pools) / sum(pool.experts for pool in outside.expert_pools)
    missed = layers * used * one * (1 - held) / 1e6
    assert outside.hit_rate == pytest.approx(held)
    assert 1 / outside.decode.tokens_per_second == pytest.approx(1 / inside.decode.tokens_per_second + missed)
    read = layers * SIZES["experts"] * one * (1 - held) / 1e6
    assert outside.prefill.tokens_per_second == pytest.approx(outside.batch / read)
    assert {outside.decode.bound, outside.prefill.bound} == {"disk"}
    assert sum(placed.disk for placed in outside.placement) == pytest.approx(outside.disk_bytes * (1 - held), abs=1)


def test_the_command_shows_what_is_on_the_disk(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharpi.planning.disk.ram_bytes", lambda: needed(model) * 4 // 5)
    monkeypatch.setattr("sharpi.planning.planner.current_profile", lambda *_: ASSUMED)
    said = " ".join(cli_runner().invoke(main, ["plan", str(model), "-c", "128", "--device", "cpu"],
                                        catch_exceptions=False).stdout.split())
    for part in ("mapped from the file, without the experts", "on the disk, read when a token chooses them",
                 "Experts in slots:", "disk "):
        assert part in said, part


def test_a_plan_of_before_is_still_read(model: Path, tmp_path: Path) -> None:
    told = planned(model, 1 << 40).to_dict()
    del told["disk_bytes"], told["disk_bytes_per_second"]
    saved = tmp_path / "old.json"
    saved.write_text(json.dumps(told), encoding="utf-8")
    with Model.load(model, plan=saved) as opened:
        assert opened.plan.disk_bytes == 0
