"""The grids of the IQ formats in `cpp/core/formats/grids.h` are those of the gguf package."""

from __future__ import annotations

import re
from pathlib import Path

import gguf.quants
import numpy as np
import pytest

HEADER = Path(__file__).resolve().parents[3] / "cpp" / "core" / "formats" / "grids.h"


def constants(name: str) -> list[int]:
    """The numbers of the array of this name."""
    found = re.search(rf"\b{name}\[\d+\] = \{{(.*?)\}};", HEADER.read_text(), re.DOTALL)
    assert found, f"{HEADER.name} has no {name}"
    return [int(number, 0) for number in re.findall(r"0x[0-9a-f]+|\d+", found[1])]


@pytest.mark.parametrize(("name", "levels", "kind", "bits"), [
    ("kGridIQ2XXS", "kIQ2Levels", gguf.quants.IQ2_XXS, 2),
    ("kGridIQ2XS", "kIQ2Levels", gguf.quants.IQ2_XS, 2),
    ("kGridIQ2S", "kIQ2Levels", gguf.quants.IQ2_S, 2),
    ("kGridIQ3XXS", "kIQ3XXSLevels", gguf.quants.IQ3_XXS, 4),
    ("kGridIQ3S", "kIQ3SLevels", gguf.quants.IQ3_S, 4),
    ("kGridIQ1", None, gguf.quants.IQ1_S, 2),
])
def test_grids_are_those_of_the_gguf_package(name, levels, kind, bits):
    kind.init_grid()
    expected = kind.grid.reshape(kind.grid_shape)
    entries = np.array(constants(name))
    assert len(entries) == len(expected)
    codes = entries[:, None] >> bits * np.arange(expected.shape[1]) & (1 << bits) - 1
    values = np.array(constants(levels))[codes] if levels else codes - 1
    assert (values == expected).all()
