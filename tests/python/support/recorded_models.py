"""Real models' shapes as files without weights: a GGUF header, behind which the file is a hole of the right size.

`data/recorded_speeds.json` describes them, with the speeds that were measured of them: [name, shape with the outermost
dimension first, {type: layers}] for each kind of tensor, where a star in the name stands for the layer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

RECORDED = Path(__file__).parents[1] / "data" / "recorded_speeds.json"


@cache
def recorded() -> dict[str, Any]:
    return json.loads(RECORDED.read_text())


def tensors_of(model: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType]]:
    """(name, shape, type), kind by kind."""
    for name, shape, types in model["tensors"]:
        for kind, layers in types.items():
            for layer in _numbers(layers) if layers else ("",):
                yield name.replace("*", str(layer)), tuple(shape), gguf.GGMLQuantizationType[kind]


def _numbers(text: str) -> Iterator[int]:
    """Of "0-3,7": 0, 1, 2, 3, 7."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def write_without_weights(path: Path, name: str) -> None:
    """The file of a model of `recorded`; it takes next to nothing on a disk."""
    model = recorded()["models"][name]
    writer = gguf.GGUFWriter(path, model["architecture"])
    writer.add_name(name)
    for key, value in model["keys"].items():
        known = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add = known.get(type(value), writer.add_array)
        add(f"{model['architecture']}.{key}", value)
    whole = 0
    for tensor, shape, kind in tensors_of(model):
        block, size = gguf.GGML_QUANT_SIZES[kind]
        nbytes = math.prod(shape) // block * size
        dtype = np.dtype(np.float32 if kind == gguf.GGMLQuantizationType.F32 else np.uint8)
        stored = shape if dtype == np.float32 else (*shape[:-1], shape[-1] // block * size)
        writer.add_tensor_info(tensor, stored, dtype, nbytes, raw_dtype=None if dtype == np.float32 else kind)
        whole += -(-nbytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    file.truncate(file.tell() + whole)
    writer.close()
