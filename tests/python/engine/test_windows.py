"""Models whose layers see a window, in a KV cache that keeps little more of their text than that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from golden_models import write_golden

from sharpi import Model

WINDOW, CONTEXT, BATCH, PAGE = 70, 1000, 16, 64
# The floats of a token's keys in the layers that keep them: those that see a window, and those that see everything.
KEPT = {
    "gemma2": (2 * 4 * 32, 2 * 4 * 32),
    "gemma3": (6 * 2 * 32, 1 * 2 * 32),
    "gemma4": (5 * 4 * 32, 1 * 2 * 64),
    "gemma4-moe": (5 * 4 * 32, 1 * 2 * 64),
    "gemma4-e": (4 * 1 * 32, 1 * 1 * 64),  # five layers of ten read those of others
    "gpt-oss": (2 * 2 * 64, 2 * 2 * 64),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_small_cache_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    path = write_golden(name, tmp_path, keys={"attention.sliding_window": WINDOW})
    tokens = np.random.default_rng(1).integers(0, 200, 900).tolist()
    found, held = [], []
    for sequences in (1, 64):  # 64 of them see more than the context holds
        with Model.load(path, device="cpu", context=CONTEXT, batch=BATCH, sequences=sequences, threads=2,
                        kv_dtype="fp32") as model:
            assert model.stats()["kv_bytes"] == model.plan.kv_bytes
            held.append((model.plan.kv_bytes, model.plan.kv_bytes_if_all_seen))
            found.append(model.logits(tokens))
            read = [model.spec.kv_bytes_read("fp32", count) for count in (50, 900)]
    assert np.array_equal(*found)
    windowed, full = KEPT[name]
    # A window, and 64 tokens to roll back, in pages at any place, and one more page.
    pages = (WINDOW - 1 + 64 + PAGE - 2) // PAGE + 2
    every = -(-CONTEXT // PAGE)
    page = 2 * 4 * PAGE  # of keys and values
    assert held == [(page * (pages * windowed + every * full), page * every * (windowed + full)),
                    (page * every * (windowed + full),) * 2]
    if name != "gemma4-e":  # there other layers read too
        assert read == [2 * 4 * 50 * (windowed + full), 2 * 4 * (WINDOW * windowed + 900 * full)]
