"""Logits held against those of other programs.

The reference folder is not part of the repository: SHARPI_SHARED names it, else it is looked for as `shared` beside
the repository. It holds a script that writes tiny float32 models and what an engine of other authors answers for them,
float32 throughout. Where it is absent these tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy_model import relative_error

pytest.importorskip("sharpi._core")
from sharpi import Model  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("SHARPI_SHARED") or REPOSITORY.parent / "shared")
REFERENCE = SHARED / "reference"
NAMES = ["llama", "llama-tied", "llama-scaled", "mixtral", "qwen2", "qwen3", "qwen3moe", "olmoe", "qwen35", "qwen35moe"]
STORY = Path(__file__).parent / "data" / "story_golden.npz"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (REFERENCE / "make_tiny.py").exists():
        pytest.skip(f"no reference in {REFERENCE}")
    out = tmp_path_factory.mktemp("reference")
    for name in NAMES:
        subprocess.run([sys.executable, REFERENCE / "make_tiny.py", out, "--seed", "7", "--only", name], check=True,
                       capture_output=True)
    return out


@pytest.mark.parametrize("name", NAMES)
def test_tiny_models(name: str, models: Path) -> None:
    golden = np.load(REFERENCE / "golden" / f"{name}.npz")
    tokens, positions, expected = golden["tokens"].tolist(), golden["positions"], golden["logits"]
    ragged = np.random.default_rng(3).integers(1, 100, 20).tolist()
    with Model.load(models / f"{name}.gguf", device="cpu", kv_dtype="fp32", batch=len(tokens)) as model:
        for chunks in ([], [1] * len(tokens), ragged):
            # Row r of the reference follows tokens[: positions[r] + 1], as row positions[r] of ours does.
            found = model.logits(tokens, chunks=chunks)[positions]
            assert relative_error(found, expected) < 1e-5, chunks[:3]


@pytest.mark.skipif(not STORY.exists(), reason="no reference of the bundled model")
def test_bundled_model() -> None:
    """The reference dequantizes the weights and computes in float32. Here activations are rounded to int8: 0.6 % of a
    row at each of some dozens of matmuls, errors that add up as squares and of which the residual stream dilutes most.
    That leaves 1 to 2 % at worst, 0.4 % as measured, and the likeliest tokens stay."""
    golden = np.load(STORY)
    with Model.load(device="cpu", kv_dtype="fp32") as model:
        found = model.logits(golden["tokens"])[golden["positions"]]
    expected = golden["logits"]
    assert relative_error(found, expected) < 0.02
    for row, expected_row in zip(found, expected, strict=True):
        assert expected_row.max() - expected_row[row.argmax()] < 0.1
