"""The golden models in other types than float32: quantized matrices, narrow KV caches, cut anywhere.

float32 is held to the golden logits in test_reference.py. What rounds is held to numpy that rounds alike.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from golden_families import FAMILIES
from golden_models import LOGITS, write_golden
from numpy_model import NumpyModel, relative_error

from sharpi import Model

COUNT = 40  # more than two windows
CUTS = [1, 7, 2, 20, 1, 1]


def tokens_of(name: str) -> list[int]:
    return np.load(LOGITS / f"{name}.npz")["tokens"][:COUNT].tolist()


def load(path: Path, **options: str) -> Model:
    return Model.load(path, **{"device": "cpu", "batch": 32, "kv_dtype": "fp32", **options})


def median_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Of the rows: rounding may turn a choice of experts, which moves a row by as much as an expert is worth."""
    return float(np.median([relative_error(*rows) for rows in zip(found, expected, strict=True)]))


@pytest.mark.parametrize("name", FAMILIES)
def test_types_that_round(name: str, tmp_path: Path) -> None:
    """One test for both, which share a model's weights."""
    quantized_matrices(name, tmp_path)
    narrow_kv_cache(name, tmp_path)


def quantized_matrices(name: str, folder: Path) -> None:
    """Activations are rounded to int8, which makes 2 to 3 % in two layers (test_engine.py). These have up to ten, and
    routers that turn. A sequence of one token has few roundings that fall on the other side of a tie: so the median of
    such rows shows whether the arithmetic is right."""
    path, tokens = write_golden(name, folder, kind="Q8_0"), tokens_of(name)
    exact = NumpyModel(path)
    rounded = exact.rounded(int8_activations=True)
    with load(path) as model:
        found = model.logits(tokens)
        np.testing.assert_array_equal(model.logits(tokens, chunks=CUTS), found)
        alone = [relative_error(model.logits([token]), rounded.logits([token])) for token in tokens[:9]]
    assert median_error(found, exact.logits(tokens)) < 0.15
    assert np.median(alone) < 1e-5


def narrow_kv_cache(name: str, folder: Path) -> None:
    """bf16 keeps 8 bits: half an ulp is 0.2 % of each key and value, and the layers behind multiply it. numpy that
    rounds alike is far nearer; what is left are roundings that fall on the other side of a tie."""
    path, tokens = write_golden(name, folder), tokens_of(name)
    with load(path, kv_dtype="bf16") as model:
        found = model.logits(tokens)
        np.testing.assert_array_equal(model.logits(tokens, chunks=CUTS), found)
    exact = NumpyModel(path)
    distance = median_error(found, exact.logits(tokens))
    assert 1e-5 < distance < 0.06
    assert median_error(found, exact.rounded(kv_dtype="bf16").logits(tokens)) < distance / 5
