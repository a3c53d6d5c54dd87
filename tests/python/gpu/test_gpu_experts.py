"""Experts that do not fit into the GPU's memory: the same answers whatever the slots hold, whoever computes what they
miss and whatever is guessed ahead; and counts that add up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_gpu import BATCH, MIB, ONE_BY_ONE, TOKENS, free_bytes, greedy, load, needs_a_gpu  # noqa: F401 - a fixture
from tiny_models import HYBRIDS, MODELS, Delta, TinyModel, fused, write

from sharpi import Model
from sharpi.errors import OutOfMemoryError
from sharpi.loading.description import describe
from sharpi.machine.profile import ASSUMED
from sharpi.planning.expert_stats import ExpertStats
from sharpi.planning.placement import Inventory

pytestmark = pytest.mark.gpu

GIB = 1 << 30
# Large enough that slots, which a plan gives whole MiB, hold a part of the experts.
SIZES: dict[str, Any] = {"width": 256, "heads": 4, "head_dim": 64, "hidden": 256, "layers": 3, "experts": 24,
                         "experts_used": 3}
ARCHITECTURES = {name: replace(model, **SIZES) for name, model in MODELS.items() if model.experts}
# Without its prediction layer, whose experts count only if it drafts: see test_gpu_hybrids.py.
ARCHITECTURES["qwen35moe"] = replace(HYBRIDS["qwen35moe"], **SIZES, shared=256, predictions=0,
                                     delta=Delta(value_heads=4, head_dim=64, interval=3))
QWEN = replace(ARCHITECTURES["qwen3moe"], type="Q4_K")
EVERY_MODEL = [pytest.param(replace(model, type=kind), id=f"{name}-{kind}")
               for name, model in ARCHITECTURES.items() for kind in ("F32", "Q4_K")]
EVERY_MODEL.append(pytest.param(fused(QWEN), id="fused"))

# Pieces of few decode rows, where single experts count; and pieces of a prompt of few rows and of many.
FEW = (8, 3, 1, 7, 5, 2, 8, 8, 1, 6, 4, 8, 8, 8, 3)
MIXED = (20, 1, 1, 5, 30, 3, 20)


# --- what is to come out ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """What a model says where all of it is resident: of decode rows and exact prompts what the CPU says, bit for
    bit."""

    steps: np.ndarray
    prefill: np.ndarray
    story: list[int]  # after a prompt of few rows
    reply: list[int]  # after one of many

    @classmethod
    def of(cls, path: Path | None) -> Answers:
        with load(path, device="cpu") as model:
            steps, story = model.logits(TOKENS), greedy(model, TOKENS[:3], 60)
        with load(path) as model:
            assert model.plan.resident
            found = cls(model.logits(TOKENS, chunks=ONE_BY_ONE, kind="decode"), model.logits(TOKENS),
                        greedy(model, TOKENS[:3], 60), greedy(model, TOKENS[:40], 40))
        np.testing.assert_array_equal(found.steps, steps)
        with load(path, prompt="exact") as model:
            np.testing.assert_array_equal(model.logits(TOKENS), steps)
            assert greedy(model, TOKENS[:3], 60) == story and np.isfinite(steps).all()
        return found


def loaded(path: Path | None, **options: Any) -> Model:
    """A model whose misses are shared out by the same rates on every machine."""
    return load(path, **{"profile": ASSUMED, **options})


def choices_per_token(model: Model) -> int:
    """How many experts a token chooses, in all layers."""
    metadata, architecture = model.file.metadata, model.file.architecture
    return metadata[f"{architecture}.expert_used_count"] * metadata[f"{architecture}.block_count"]


def checked_counts(model: Model, rows: int, few: int) -> dict[str, Any]:
    """What `Model.stats` says of experts after so many rows, of them so many in batches of decode rows alone."""
    experts, per_row = model.stats()["experts"], choices_per_token(model)
    hits, computed, fetched = experts["hits"], experts["computed"], experts["fetched"]
    assert experts["uses"] == rows * per_row
    assert hits + computed + fetched == few * per_row
    assert experts["hit_rate"] == hits / (few * per_row)
    assert experts["resident"] <= experts["slots"]
    assert experts["slots"] or not hits + fetched + experts["loads"]
    for predictor in experts["predictors"].values():
        assert predictor["used"] <= min(predictor["named"], predictor["wanted"])
    return experts


def agrees(model: Model, expected: Answers) -> dict[str, Any]:
    """Holds a model just loaded against `expected`, however tokens are cut, replayed and launched; gives its counts
    after the first look at every cut."""
    def logits() -> None:
        np.testing.assert_array_equal(model.logits(TOKENS), expected.prefill)
        for chunks in (ONE_BY_ONE, FEW):
            steps = model.logits(TOKENS, chunks=chunks, kind="decode")
            np.testing.assert_array_equal(steps, expected.steps, err_msg=str(chunks[:3]))

    logits()
    counts = checked_counts(model, 3 * len(TOKENS), sum(ONE_BY_ONE) + sum(FEW))
    # A recurrent model computes rows of a cut prompt more than once, which would count.
    np.testing.assert_array_equal(model.logits(TOKENS, chunks=MIXED), expected.prefill)
    assert greedy(model, TOKENS[:3], 60) == expected.story
    assert greedy(model, TOKENS[:40], 40) == expected.reply
    logits()
    model.graphs = False
    logits()
    return counts


@pytest.fixture()
def cache(monkeypatch: pytest.MonkeyPatch):
    """Lets VRAM hold, of what may also be elsewhere, all but experts, and so many of the experts' bytes."""
    def choose(path: Path | None, part: float) -> None:
        file, spec = describe(path)
        inventory = Inventory.of(file, spec)
        others, everything = (inventory.movable_bytes(count)
                              for count in (inventory.before_experts, inventory.before_experts + 1))
        limit = others + part * (everything - others)
        monkeypatch.setenv("SHARPI_CUDA_PARTIAL_WEIGHT_CACHE_GB", f"{limit / GIB:.12f}")
    return choose


# --- the same answers ------------------------------------------------------------------------------------------------


def test_the_cuts_are_what_they_are_said_to_be() -> None:
    assert sum(FEW) == sum(MIXED) == len(TOKENS)
    assert max(FEW) == 8 and max(MIXED) < BATCH


@pytest.mark.parametrize("model", EVERY_MODEL)
def test_what_slots_hold_never_changes_the_answer(model: TinyModel, tmp_path: Path, cache) -> None:
    path = write(tmp_path / "m.gguf", model)
    expected = Answers.of(path)
    slots, rates = [], []
    for part in (0.0, 0.2, 0.5, 0.8):
        cache(path, part)
        with loaded(path) as sharpi:
            assert sharpi.stats()["placement"]["slots"] > 0
            counts = agrees(sharpi, expected)
            slots.append(counts["slots"])
            rates.append(counts["hit_rate"])
    assert slots[0] == 0 < slots[1] < slots[2] < slots[3] < 3 * model.experts
    assert rates[0] == 0 < rates[1] < rates[2] < rates[3] < 1
    cache(path, 1.01)
    with loaded(path) as sharpi:  # at most the embedding is elsewhere
        assert sharpi.stats()["placement"]["slots"] == 0
        np.testing.assert_array_equal(sharpi.logits(TOKENS), expected.prefill)
        np.testing.assert_array_equal(sharpi.logits(TOKENS, chunks=FEW, kind="decode"), expected.steps)


@pytest.mark.parametrize("part", [0.0, 0.25, 0.6])
def test_the_bundled_model_in_slots(part: float, tmp_path: Path, cache) -> None:
    """With a quarter of its experts in VRAM the model tells the same story. If that is the quarter that was used most,
    more than a quarter of the choices are hits."""
    def story(model: Model) -> str:
        return "".join(token.text for token in model.generate("Once", max_tokens=200, temperature=0.0))

    saved = tmp_path / "experts.json"
    with load(None, device="cpu", expert_stats=saved) as model:
        written = story(model)
    expected = Answers.of(None)
    cache(None, part)
    with loaded(None) as model:
        agrees(model, expected)
    with loaded(None, prompt="exact") as model:
        assert story(model) == written
    with loaded(None, prompt="exact", warm=saved) as model:
        assert story(model) == written
        counts = model.stats()["experts"]
    held = counts["slots"] / sum(pool.experts for pool in model.plan.expert_pools)
    assert 0.6 * part <= held <= part
    assert counts["hit_rate"] > 1.2 * held or not part


@pytest.mark.parametrize("mode", ["off", "count", "next-token", "next-layer"])
@pytest.mark.parametrize("part", [0.0, 0.3])
def test_guesses_never_change_the_answer(mode: str, part: float, tmp_path: Path, cache,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m.gguf", QWEN)
    expected = Answers.of(path)
    monkeypatch.setenv("SHARPI_EXPERT_PREFETCH", mode)
    cache(path, part)
    with loaded(path) as model:
        counts = agrees(model, expected)
    assert (counts["loads"] > 0) is (part > 0)
    wanted = {"off": set(), "next-token": {"next-token"}}.get(mode, {"next-token", "next-layer"})
    assert set(counts["predictors"]) >= wanted or not part
    for name, predictor in counts["predictors"].items():
        assert predictor["wanted"] > 0 and 0 < predictor["accuracy"] <= 1, name


def test_without_pinning_nothing_is_fetched(tmp_path: Path, cache, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m.gguf", QWEN)
    expected = Answers.of(path)
    monkeypatch.setenv("SHARPI_CUDA_PIN", "0")
    cache(path, 0.4)
    with loaded(path) as model:
        counts = agrees(model, expected)
        assert model.stats()["experts"]["fetched"] == counts["fetched"] == 0 < counts["slots"]
        assert counts["hits"] > 0 < counts["computed"]


@pytest.mark.parametrize("how", ["variable", "option"])
def test_all_experts_are_the_cpus(how: str, tmp_path: Path, cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if they would fit."""
    path = write(tmp_path / "m.gguf", QWEN)
    expected = Answers.of(path)
    if how == "variable":
        monkeypatch.setenv("SHARPI_CPU_MOE", "1")
    options: dict[str, Any] = {"cpu_moe": True} if how == "option" else {}
    for part in (None, 0.5):
        if part is not None:
            cache(path, part)
        with loaded(path, **options) as model:
            counts = agrees(model, expected)
            total = model.stats()["experts"]
            assert model.stats()["placement"]["slots"] > 0
        assert counts["slots"] == total["hits"] == total["fetched"] == total["loads"] == 0
        assert counts["hit_rate"] == 0.0


def test_sessions_share_the_slots(tmp_path: Path, cache) -> None:
    """Prompts of few rows and of many, answered in turn, each step finding what the others left."""
    path = write(tmp_path / "m.gguf", QWEN)
    prompts = [TOKENS[:1], TOKENS[:40], TOKENS[5:75], TOKENS[3:6]]
    with load(path, context=480) as model:
        expected = [greedy(model, prompt, 50) for prompt in prompts]
    cache(path, 0.3)
    with loaded(path, context=480) as model:
        for graphs in (True, False):
            model.graphs = graphs
            running = [model.session().generate(prompt, max_tokens=50, temperature=0.0) for prompt in prompts]
            said = [[token.id for token in tokens] for tokens in zip(*zip(*running, strict=True), strict=True)]
            assert said == expected
        assert model.stats()["experts"]["hits"] > 0


def test_every_budget_is_kept_to(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", TinyModel("qwen3moe", qk_norm="head", layers=12, width=512, heads=4, head_dim=128,
                                                hidden=1024, experts=32, experts_used=4, vocab=512, type="Q6_K"))
    with load(path, kv_dtype="bf16") as model:
        expected, needed = model.logits(TOKENS, chunks=ONE_BY_ONE, kind="decode"), model.plan.total_bytes
    # What the driver takes with the first streaming run, it keeps for good.
    with loaded(path, kv_dtype="bf16", vram=needed - 16 * MIB) as model:
        model.logits(TOKENS, chunks=ONE_BY_ONE, kind="decode")
        assert not model.plan.resident
    before = free_bytes()
    slots: list[int] = []
    for budget in range(24 * MIB, needed - 4 * MIB, 24 * MIB):
        try:
            with loaded(path, kv_dtype="bf16", vram=budget) as model:
                np.testing.assert_array_equal(model.logits(TOKENS, chunks=ONE_BY_ONE, kind="decode"), expected)
                slots.append(checked_counts(model, len(TOKENS), len(TOKENS))["slots"])
                assert model.plan.total_bytes <= budget and slots[-1] == sum(p.slots for p in model.plan.expert_pools)
                assert before - free_bytes() <= budget + 4 * MIB
                taken = sum(entry[2] for entry in model.engine.trace if entry[0] != "graphs")
                assert abs(taken - (model.plan.total_bytes - model.plan.graphs_bytes)) <= 4 * MIB
        except OutOfMemoryError:
            assert not slots, "what fits into less fits"
        assert before - free_bytes() <= 2 * MIB, budget
    assert slots == sorted(slots) and slots[0] < slots[-1] and len(set(slots)) > 3


# --- what is counted, and what it is good for ------------------------------------------------------------------------


@pytest.mark.parametrize("part", [0.3, 1.01])
def test_loading_is_no_use(part: float, tmp_path: Path, cache) -> None:
    path = write(tmp_path / "m.gguf", QWEN)
    cache(path, part)
    with loaded(path) as model:
        experts = model.stats()["experts"]
        assert (experts["uses"], experts["hits"], experts["hit_rate"]) == (0, 0, None)
        model.logits(TOKENS)
        assert model.stats()["experts"]["uses"] == len(TOKENS) * choices_per_token(model)


def test_slots_that_are_warmed_hold_what_is_used(tmp_path: Path, cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of few tokens uses few experts. Saved, these are what the next run finds; where nothing can be fetched,
    exactly these."""
    path, saved = write(tmp_path / "m.gguf", QWEN), tmp_path / "experts.json"
    text = np.random.default_rng(4).choice([3, 14, 15, 92], len(TOKENS)).tolist()
    cache(path, 0.3)
    with loaded(path, expert_stats=saved) as model:
        expected = model.logits(text, chunks=ONE_BY_ONE, kind="decode")
    stats = ExpertStats.load(saved)
    assert int(stats.choices.sum()) == int(stats.uses.sum()) == len(text) * choices_per_token(model)
    assert stats.capacity > 0
    most_used = np.sort(stats.uses, axis=None)[::-1][: stats.capacity]
    random_rate = stats.capacity / stats.uses.size
    best_rate = int(most_used.sum()) / int(stats.uses.sum())
    assert best_rate > 1.3 * random_rate, "routing is not skewed"
    for warm in (saved, stats):
        with loaded(path, warm=warm) as model:
            np.testing.assert_array_equal(model.logits(text, chunks=ONE_BY_ONE, kind="decode"), expected)
            found = checked_counts(model, len(text), len(text))
        assert found["resident"] == found["slots"] == stats.capacity
        assert found["hit_rate"] > 1.2 * random_rate
    monkeypatch.setenv("SHARPI_CUDA_PIN", "0")
    with loaded(path, warm=saved) as model:
        np.testing.assert_array_equal(model.logits(text, chunks=ONE_BY_ONE, kind="decode"), expected)
        found = checked_counts(model, len(text), len(text))
    assert found["hits"] == most_used.sum() and found["evictions"] == 0
