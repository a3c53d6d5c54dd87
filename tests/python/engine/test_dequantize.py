"""Every element type, dequantized bit for bit as the published reference (gguf.quants) does it."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from tiny_models import dequantized

from sharpi import _core

# Byte offsets of the f16 scales of a block. All other bytes may be anything.
SCALES: dict[str, tuple[int, ...]] = {
    "F32": (),
    "F16": (0,),
    "BF16": (),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ1_S": (0,),
    "IQ1_M": (),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "NVFP4": (),
    "Q1_0": (0,),
}


def random_rows(name: str, rows: int, cols: int, seed: int) -> np.ndarray:
    """Rows of random blocks, uint8 [rows, bytes], with every scale a finite f16 of any size, subnormal ones too."""
    random = np.random.default_rng(seed)
    if name == "F32":
        return random.standard_normal((rows, cols)).astype(np.float32).view(np.uint8)
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    blocks = random.integers(0, 256, (rows * cols // elements, size), dtype=np.uint8)
    for at in SCALES[name]:
        bits = random.integers(0, 0x7C00, len(blocks), dtype=np.uint16)
        bits |= random.integers(0, 2, len(blocks), dtype=np.uint16) << np.uint16(15)
        blocks[:, at : at + 2] = bits.view(np.uint8).reshape(-1, 2)
    if name == "BF16":
        blocks[:, 1] &= 0xBF  # keeps exponents away from infinity and NaN
    if name == "IQ1_M":
        blocks[:, 55] &= 0xBF  # the highest nibble of its scattered scale
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("cols", [256, 1536, 4096 + 96])
def test_dequantize_matches_the_reference(name: str, cols: int) -> None:
    qtype = gguf.GGMLQuantizationType[name]
    if cols % gguf.GGML_QUANT_SIZES[qtype][0] != 0:
        cols -= 96
    if gguf.GGML_QUANT_SIZES[qtype][0] in {64, 128}:
        cols += 128  # no whole group of 256
    rows = random_rows(name, 33, cols, seed=cols)
    expected = dequantized(rows, name).reshape(33, cols)
    actual = np.asarray(_core.dequantize(int(qtype), rows.tobytes(), cols))
    assert actual.dtype == np.float32
    assert actual.size == expected.size
    different = actual.reshape(33, cols).view(np.uint32) != expected.view(np.uint32)
    assert not different.any(), f"{different.sum()} elements differ, the first at {np.argwhere(different)[0]}"
