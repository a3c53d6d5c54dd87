"""Models that are larger than what they may take of the GPU's memory: the same answers at every budget, what is kept
where, and what becomes of a plan when memory is short.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from test_gpu import BATCH, LARGE, MIB, ONE_BY_ONE, TOKENS, free_bytes, greedy, load, needs_a_gpu  # noqa: F401 - a fixture
from tiny_models import MODELS, TinyModel, write

from sharpi.errors import OutOfMemoryError

pytestmark = pytest.mark.gpu

DENSE = {name: model for name, model in MODELS.items() if not model.experts}
GIB = 1 << 30
# A model of some 60 MiB, so that budgets of whole granules differ.
MEDIUM = TinyModel("qwen3", qk_norm="head", layers=6, type="Q4_0", **LARGE)


@pytest.fixture()
def cache(monkeypatch: pytest.MonkeyPatch):  # noqa: ANN201 - a function
    """Sets how many bytes of weights may be cached, and whether the CPU takes rows."""
    def choose(size: float, rows: bool) -> None:
        monkeypatch.setenv("SHARPI_CUDA_PARTIAL_WEIGHT_CACHE_GB", f"{size / GIB:.12f}")
        monkeypatch.setenv("SHARPI_CUDA_ROW_SPLIT", "1" if rows else "0")
    return choose


@pytest.mark.parametrize("name", DENSE)
def test_the_cache_size_never_changes_the_answer(name: str, tmp_path: Path, cache) -> None:  # noqa: ANN001
    path = write(tmp_path / "m.gguf", DENSE[name])
    with load(path) as model:
        steps, prefill = model.logits(TOKENS, chunks=ONE_BY_ONE), model.logits(TOKENS)
        tokens, whole = greedy(model, TOKENS[:3], 60), model.stats()["placement"]["vram"]
    kept = set()
    for part in range(8):
        for rows in (False, True):
            cache(whole * part / 7, rows)
            with load(path) as model:
                np.testing.assert_array_equal(model.logits(TOKENS), prefill)
                np.testing.assert_array_equal(model.logits(TOKENS, chunks=ONE_BY_ONE), steps)
                ragged = np.random.default_rng(part).integers(1, 9, len(TOKENS)).tolist()
                np.testing.assert_array_equal(model.logits(TOKENS, chunks=ragged), steps)
                assert greedy(model, TOKENS[:3], 60) == tokens
                kept.add(model.stats()["placement"]["vram"])
    assert len(kept) > 3


def test_every_budget_runs_and_is_kept_to(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", MEDIUM)
    with load(path, kv_dtype="bf16") as model:
        expected, tokens, needed = model.logits(TOKENS, chunks=ONE_BY_ONE), greedy(model, TOKENS[:3], 40), model.plan.total_bytes
    ran: dict[int, int] = {}
    before = free_bytes()

    def run(budget: int) -> None:
        with load(path, kv_dtype="bf16", vram=budget) as model:
            np.testing.assert_array_equal(model.logits(TOKENS, chunks=ONE_BY_ONE), expected)
            assert greedy(model, TOKENS[:3], 40) == tokens
            ran[budget] = model.stats()["placement"]["vram"]
            assert model.plan.total_bytes <= budget
            assert before - free_bytes() <= budget + 64 * MIB
            assert abs(model.stats()["vram_bytes"] - model.plan.total_bytes) <= 64 * MIB

    for budget in range(4 * MIB, needed + 8 * MIB, 2 * MIB):
        try:
            run(budget)
        except OutOfMemoryError as error:
            assert not ran, "what fits into less fits"
            assert "\n" not in str(error) and "would" in str(error)
    kept = list(ran.values())
    assert len(kept) > 8 and kept == sorted(kept) and kept[0] < kept[-1], "more memory keeps more weights"
    # By now the driver has what it keeps for good.
    before = free_bytes()
    for budget in list(ran)[::4]:
        run(budget)
        assert before - free_bytes() <= 2 * MIB, budget


def test_less_memory_than_planned(tmp_path: Path) -> None:
    """What others take between planning and loading makes the cache smaller, and a line says so."""
    path = write(tmp_path / "m.gguf", MEDIUM)
    with load(path, kv_dtype="bf16") as model:
        expected, homes, spec, plan = model.logits(TOKENS, chunks=ONE_BY_ONE), model.plan.homes, model.spec, model.plan
        paths = [str(part) for part in model.file.paths]
    from sharpi import _core

    engine = _core.Engine(spec, paths, plan.context, plan.batch, 2, "bf16", "cuda", plan.total_bytes - 20 * MIB,
                          [tuple(home) for home in homes])
    assert len(engine.notes) == 1 and "free" in engine.notes[0]
    assert 0 < engine.placement()["vram"] < sum(t.nbytes for t in model.file.tensors)
    np.testing.assert_array_equal(_core.Session(engine).logits(TOKENS, list(ONE_BY_ONE)), expected)


def test_a_killed_run_leaves_nothing(tmp_path: Path, cache) -> None:  # noqa: ANN001
    path = write(tmp_path / "m.gguf", MEDIUM)
    cache(20 * MIB, True)
    script = ("import sys\nfrom sharpi import Model\nm = Model.load(sys.argv[1], device='cuda')\nprint('up', flush=True)\n"
              "while True: list(m.generate([1, 2, 3], max_tokens=200, temperature=0.0))\n")
    free_bytes()
    before = free_bytes()
    for wait in (0.0, 0.05, 0.3):
        run = subprocess.Popen([sys.executable, "-c", script, path], stdout=subprocess.PIPE, text=True, env=os.environ)
        assert run.stdout is not None and run.stdout.readline() == "up\n"
        time.sleep(wait)
        run.send_signal(signal.SIGKILL)
        run.wait(timeout=30)
        for _ in range(50):  # the driver cleans up behind the process
            if before - free_bytes() <= 2 * MIB:
                break
            time.sleep(0.1)
        assert before - free_bytes() <= 2 * MIB


def test_an_interrupt_leaves_the_model_usable(tmp_path: Path, cache) -> None:  # noqa: ANN001
    path = write(tmp_path / "m.gguf", MEDIUM)
    cache(20 * MIB, True)
    with load(path, kv_dtype="bf16", batch=BATCH) as model:
        expected = greedy(model, TOKENS[:3], 30)
        tokens = model.generate(TOKENS[:3], max_tokens=30, temperature=0.0)
        next(tokens)
        tokens.close()
        assert greedy(model, TOKENS[:3], 30) == expected
