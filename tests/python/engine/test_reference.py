"""Logits held against those of another program.

tests/data/golden holds logits for small models that `golden_models` writes. Most are llama.cpp's, float32 throughout;
those of qwen3vl, qwen3vlmoe, smollm3 and of the models in `golden_families` come from a forward pass in float64 numpy,
which llama.cpp matches to 1e-5.
If there is a folder with the originals (SHARPI_SHARED, or `shared` beside the repository), they are checked to be the
same.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from golden_models import GOLDEN, LOGITS, LONG_LLAMA4, STORY, digest, write_golden
from numpy_model import relative_error

from sharpi import Model

REPOSITORY = Path(__file__).resolve().parents[3]
SHARED = Path(os.environ.get("SHARPI_SHARED") or REPOSITORY.parent / "shared")
ORIGINALS = SHARED / "reference"
NAMES = list(GOLDEN)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the models that the logits are of."""
    folder = tmp_path_factory.mktemp("reference")
    for name in NAMES:
        write_golden(name, folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_tiny_models(name: str, models: Path) -> None:
    golden = np.load(LOGITS / f"{name}.npz")
    tokens, positions, expected = golden["tokens"].tolist(), golden["positions"], golden["logits"]
    ragged = np.random.default_rng(3).integers(1, 100, 20).tolist()
    with Model.load(models / f"{name}.gguf", device="cpu", kv_dtype="fp32", batch=len(tokens)) as model:
        for chunks in ([], [1] * len(tokens), ragged):
            # Row r of the reference follows tokens[: positions[r] + 1], as row positions[r] of ours does.
            found = model.logits(tokens, chunks=chunks)[positions]
            assert relative_error(found, expected) < 1e-5, chunks[:3]


def test_chunks_and_temperature_of_llama_4(models: Path) -> None:
    """They begin after 8192 tokens: a prompt that reaches beyond, and one whose end comes token by token. A temperature
    that began one position later would move one row, and all rows together by 3e-3."""
    golden = np.load(LONG_LLAMA4)
    tokens, positions, expected = golden["tokens"].tolist(), golden["positions"], golden["logits"]
    with Model.load(models / "llama4.gguf", device="cpu", kv_dtype="fp32", batch=500, context=len(tokens)) as model:
        for chunks in ([], [8170, *[1] * 40, 7, 40]):
            found = model.logits(tokens, chunks=chunks)[positions]
            assert relative_error(found, expected) < 1e-5, chunks[:3]


@pytest.mark.parametrize("name", NAMES)
def test_the_models_are_those_of_the_logits(name: str) -> None:
    """A weight that is drawn in another way shows here, and not as a wrong logit."""
    assert digest(name) == GOLDEN[name].digest


@pytest.mark.skipif(not (ORIGINALS / "make_tiny.py").exists(), reason=f"no originals in {ORIGINALS}")
@pytest.mark.parametrize("name", [name for name in NAMES if GOLDEN[name].maker])
def test_models_and_logits_are_the_originals(name: str, models: Path, tmp_path: Path) -> None:
    maker = ORIGINALS / GOLDEN[name].maker
    subprocess.run([sys.executable, maker, tmp_path / "original", "--seed", "7", "--only", name],
                   check=True, capture_output=True)
    original, ours = ({tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
                      for path in (tmp_path / "original" / f"{name}.gguf", models / f"{name}.gguf"))
    assert original.keys() == ours.keys()
    for tensor in ours:
        assert np.array_equal(original[tensor], ours[tensor]), tensor
    assert_same_logits(LOGITS / f"{name}.npz", ORIGINALS / "golden" / f"{name}.npz")


def assert_same_logits(ours: Path, original: Path) -> None:
    found, expected = np.load(ours), np.load(original)
    for array in ("tokens", "positions", "logits"):
        assert np.array_equal(found[array], expected[array]), array


@pytest.mark.skipif(not (ORIGINALS / "golden-long").exists(), reason=f"no originals in {ORIGINALS}")
def test_the_long_logits_are_the_originals() -> None:
    assert_same_logits(LONG_LLAMA4, ORIGINALS / "golden-long" / "llama4.npz")


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
