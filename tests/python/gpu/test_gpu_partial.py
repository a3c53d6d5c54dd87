"""Models that are larger than what they may take of the GPU's memory: the same answers at every budget, what is kept
where, and what becomes of a plan when memory is short.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from test_gpu import BATCH, LARGE, MIB, ONE_BY_ONE, TOKENS, free_bytes, greedy, load, needs_a_gpu  # noqa: F401
from tiny_models import ON_GPU, TinyModel, write

from sharpi import Model
from sharpi.errors import OutOfMemoryError

pytestmark = pytest.mark.gpu

DENSE = {name: model for name, model in ON_GPU.items() if not model.experts}
WITH_EXPERTS = {name: model for name, model in ON_GPU.items() if model.experts}
GIB = 1 << 30
# A model of some 60 MiB, so that budgets of whole granules differ.
MEDIUM = TinyModel("qwen3", qk_norm="head", layers=6, type="Q4_0", **LARGE)


@pytest.fixture()
def cache(monkeypatch: pytest.MonkeyPatch):
    """Sets how many bytes of weights may be cached, and whether the CPU takes rows."""
    def choose(size: float, rows: bool) -> None:
        monkeypatch.setenv("SHARPI_CUDA_PARTIAL_WEIGHT_CACHE_GB", f"{size / GIB:.12f}")
        monkeypatch.setenv("SHARPI_CUDA_ROW_SPLIT", "1" if rows else "0")
    return choose


def placement_with_answers(path: Path, seed: int, prefill: np.ndarray, steps: np.ndarray,
                           tokens: list[int]) -> dict[str, int]:
    """Where a model's weights are, loaded as the environment says; its answers are these, however tokens are cut."""
    with load(path) as model:
        ragged = np.random.default_rng(seed).integers(1, 9, len(TOKENS)).tolist()
        for chunks in ((), ragged):
            np.testing.assert_array_equal(model.logits(TOKENS, chunks=chunks), prefill)
        for chunks in (ONE_BY_ONE, ragged):
            np.testing.assert_array_equal(model.logits(TOKENS, chunks=chunks, kind="decode"), steps)
        assert greedy(model, TOKENS[:3], 60) == tokens
        return model.stats()["placement"]


@pytest.mark.parametrize("name", DENSE)
def test_the_cache_size_never_changes_the_answer(name: str, tmp_path: Path, cache) -> None:
    path = write(tmp_path / "m.gguf", DENSE[name])
    with load(path) as model:
        steps, prefill = model.logits(TOKENS, chunks=ONE_BY_ONE, kind="decode"), model.logits(TOKENS)
        tokens, whole = greedy(model, TOKENS[:3], 60), model.stats()["placement"]["vram"]
    kept = set()
    for part in range(8):
        for rows in (False, True):
            cache(whole * part / 7, rows)
            kept.add(placement_with_answers(path, part, prefill, steps, tokens)["vram"])
    assert len(kept) > 3


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_where_experts_are_never_changes_the_answer(name: str, tmp_path: Path, cache,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """With all experts on the CPU, and with all in VRAM if they fit. If they do not, they are in slots, which
    test_gpu_experts.py tests."""
    path = write(tmp_path / "m.gguf", WITH_EXPERTS[name])
    monkeypatch.setenv("SHARPI_CPU_MOE", "0")
    with load(path) as model:
        steps, prefill = model.logits(TOKENS, chunks=ONE_BY_ONE, kind="decode"), model.logits(TOKENS)
        tokens, whole = greedy(model, TOKENS[:3], 60), model.stats()["placement"]["vram"]
        experts = sum(tensor.nbytes for tensor in model.file.tensors if "_exps." in tensor.name)
        assert model.plan.resident and 0 < experts < whole

    in_slots, kept = set(), set()
    for part in range(8):
        for rows in (False, True):
            cache(whole * part / 7, rows)
            placement = placement_with_answers(path, part, prefill, steps, tokens)
            in_slots.add(placement["slots"])
            kept.add(placement["vram"])
    assert len(kept) > 2 and in_slots == {0, experts}
    monkeypatch.setenv("SHARPI_CPU_MOE", "1")
    for size in (0.0, whole / 3, 2.0 * whole):
        cache(size, True)
        assert placement_with_answers(path, 9, prefill, steps, tokens)["slots"] == experts


def test_every_budget_runs_and_is_kept_to(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", MEDIUM)
    with load(path, kv_dtype="bf16") as model:
        expected, needed = model.logits(TOKENS, chunks=ONE_BY_ONE, kind="decode"), model.plan.total_bytes
        tokens = greedy(model, TOKENS[:3], 40)
    ran: dict[int, int] = {}

    def run(budget: int) -> None:
        with load(path, kv_dtype="bf16", vram=budget) as model:
            np.testing.assert_array_equal(model.logits(TOKENS, chunks=ONE_BY_ONE, kind="decode"), expected)
            assert greedy(model, TOKENS[:3], 40) == tokens
            ran[budget] = model.stats()["placement"]["vram"]
            assert model.plan.total_bytes <= budget
            assert before - free_bytes() <= budget + 4 * MIB
            # Captured steps are left out: the plan estimates them, and none is captured before the first token.
            taken = sum(entry[2] for entry in model.engine.trace if entry[0] != "graphs")
            assert abs(taken - (model.plan.total_bytes - model.plan.graphs_bytes)) <= 4 * MIB

    # What the driver takes with the first streaming run, it keeps for good.
    with load(path, kv_dtype="bf16", vram=needed - 6 * MIB) as model:
        assert not model.plan.resident
        model.logits(TOKENS, chunks=ONE_BY_ONE, kind="decode"), greedy(model, TOKENS[:3], 40)
    before = free_bytes()
    for budget in range(4 * MIB, needed + 8 * MIB, 2 * MIB):
        try:
            run(budget)
        except OutOfMemoryError as error:
            assert not ran, "what fits into less fits"
            assert "\n" not in str(error) and "would" in str(error)
    kept = list(ran.values())
    assert len(kept) > 8 and kept == sorted(kept) and kept[0] < kept[-1], "more memory keeps more weights"
    before = free_bytes()
    for budget in list(ran)[::4]:
        run(budget)
        assert before - free_bytes() <= 2 * MIB, budget


def test_less_memory_than_planned(tmp_path: Path) -> None:
    """What others take between planning and loading makes the cache smaller, and a line says so."""
    path, saved = write(tmp_path / "m.gguf", MEDIUM), tmp_path / "plan.json"
    with load(path, kv_dtype="bf16") as model:
        expected = model.logits(TOKENS, chunks=ONE_BY_ONE, kind="decode")
        plan = model.plan
    saved.write_text(json.dumps({**plan.to_dict(), "vram": plan.total_bytes - 20 * MIB}))
    said: list[str] = []
    with Model.load(path, plan=saved, notice=said.append) as model:
        assert len(said) == 1 and said[0].startswith("only ") and "of VRAM are free" in said[0]
        stats, made = model.stats(), model.plan
        assert stats["notes"] == said
        assert 0 < stats["placement"]["vram"] < sum(t.nbytes for t in model.file.tensors)
        assert stats["placement"]["vram"] == sum(row.vram for row in made.placement)
        # The least that the model needs may be more than there is, by the room for records of steps.
        assert made.homes != plan.homes and made.total_bytes < plan.total_bytes
        np.testing.assert_array_equal(model.logits(TOKENS, chunks=ONE_BY_ONE, kind="decode"), expected)


def test_a_killed_run_leaves_nothing(tmp_path: Path, cache) -> None:
    """Killed while it starts, pins, loads or answers: whenever that is."""
    path = write(tmp_path / "m.gguf", MEDIUM)
    cache(20 * MIB, True)
    script = (
        "import sys\nfrom sharpi import Model\nm = Model.load(sys.argv[1], device='cuda')\nprint('up', flush=True)\n"
        "while True: list(m.generate([1, 2, 3], max_tokens=200, temperature=0.0))\n"
    )
    free_bytes()
    before = free_bytes()

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", script, path], stdout=subprocess.PIPE, text=True, env=os.environ)

    def kill(run: subprocess.Popen[str]) -> None:
        assert run.poll() is None, "it ended by itself"
        run.send_signal(signal.SIGKILL)
        run.communicate(timeout=30)
        for _ in range(50):  # the driver cleans up behind the process
            if before - free_bytes() <= 2 * MIB:
                break
            time.sleep(0.1)
        assert before - free_bytes() <= 2 * MIB

    up_after = 0.0
    for wait in (0.0, 0.05, 0.3):
        started, run = time.monotonic(), start()
        assert run.stdout is not None and run.stdout.readline() == "up\n"
        up_after = time.monotonic() - started
        time.sleep(wait)
        kill(run)
    # Python and the driver start first: the later moments are those of pinning and loading.
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    for part in np.random.default_rng(seed).uniform(0.2, 1.0, 12):
        run = start()
        time.sleep(up_after * part)
        kill(run)


def test_an_interrupt_leaves_the_model_usable(tmp_path: Path, cache) -> None:
    path = write(tmp_path / "m.gguf", MEDIUM)
    cache(20 * MIB, True)
    with load(path, kv_dtype="bf16", batch=BATCH) as model:
        expected = greedy(model, TOKENS[:3], 30)
        tokens = model.generate(TOKENS[:3], max_tokens=30, temperature=0.0)
        next(tokens)
        tokens.close()
        assert greedy(model, TOKENS[:3], 30) == expected
