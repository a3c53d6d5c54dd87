"""Gives a mixture of experts of random weights a routing to measure caches by: even, or skewed as much as one likes.

As such files come they are the best case for a cache, and show nothing: blocks of random codes decode to weights that
are positive on average, so what attention adds is one direction for all tokens, thousands of times as large as their
embeddings, and every token takes the same few experts. Three things are changed in a copy (or in place):

1. Matrices whose weights are not zero on average are centred, by the minima of their blocks.
2. `attn_norm` is scaled down, so that what tokens have in common through attention does not decide.
3. Rows of the routers (`ffn_gate_inp`) are scaled: that of the expert with the r-th place (drawn by the seed, anew in
   each layer) by r^-S, all then by one number so that the router's mean square stays. An expert whose logits vary more
   is among the largest more often. S = 0 leaves the routing about even.

    python benchmarks/experts/skew_routing.py MODEL.gguf COPY.gguf [--skew 0.25] [--seed 0]
    python benchmarks/experts/skew_routing.py MODEL.gguf --in-place [--skew 0.25] [--seed 0]

Prints how it was made, and what shares of the uses the most used experts of a layer should have by a simulation: random
activations of unit variance through the routers. What they do have, `--expert-stats` of `sharpi bench` tells.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from sharpi.files.gguf import GgufFile, TensorInfo

_PARTS = (0.10, 0.25, 0.50)
_SAMPLES = 2048  # activations
# Where a block of a quantized type has its half-precision scales, to which all its elements are proportional.
_SCALES = {Type.Q4_0: (0,), Type.Q5_0: (0,), Type.Q8_0: (0,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,)}

# Where a block of a type with minima has the number that these are proportional to.
_MINIMUM = {Type.Q4_K: 2, Type.Q5_K: 2}
_SAMPLE_BLOCKS = 4096
_OFF_CENTRE = 0.1  # mean over deviation: no trained matrix is as far off
_CHUNK = 1 << 26  # bytes


def centre(path: Path, tensor: TensorInfo) -> bool:
    """Makes a matrix's mean about 0, in place; false if it is already, or if the type has no minima to do it with."""
    kind = Type(tensor.type)
    if kind not in _MINIMUM:
        return False
    size, at = GGML_QUANT_SIZES[kind][1], _MINIMUM[kind]
    with path.open("r+b") as file:
        file.seek(tensor.offset)
        blocks = np.fromfile(file, np.uint8, min(_SAMPLE_BLOCKS * size, tensor.nbytes)).reshape(-1, size)
        decoded = dequantize(blocks, kind)
        blocks[:, at : at + 2] = 0
        without = float(dequantize(blocks, kind).mean())
        minima = without - float(decoded.mean())
        if abs(decoded.mean()) < _OFF_CENTRE * decoded.std() or minima <= 0:
            return False
        for begin in range(0, tensor.nbytes, _CHUNK // size * size):
            file.seek(tensor.offset + begin)
            blocks = np.fromfile(file, np.uint8, min(_CHUNK // size * size, tensor.nbytes - begin)).reshape(-1, size)
            numbers = np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)
            blocks[:, at : at + 2] = (numbers * (without / minima)).astype("<f2").view(np.uint8)
            file.seek(tensor.offset + begin)
            blocks.tofile(file)
    return True


def make_even(path: Path, attention: float) -> str:
    """Steps 1 and 2; says what was done."""
    tensors = GgufFile.open(path).tensors
    matrices = [tensor for tensor in tensors if len(tensor.shape) > 1]
    with ProcessPoolExecutor() as pool:
        centred = sum(pool.map(centre, repeat(path), matrices))
    for tensor in tensors:
        if tensor.name.endswith(".attn_norm.weight") and tensor.type == Type.F32:
            gains = np.memmap(path, "<f4", "r+", tensor.offset, tensor.shape)
            gains *= np.float32(attention)
            gains.flush()
    return f"{centred} matrices centred, attn_norm times {attention:g}."


def factors(router: np.ndarray, skew: float, random: np.random.Generator) -> np.ndarray:
    """What the rows of `router` [experts, width] are multiplied by: float32 [experts]."""
    found = random.permutation(np.arange(1.0, len(router) + 1) ** -skew)
    squares = np.square(router, dtype=np.float64).mean(axis=1)
    return (found * np.sqrt(squares.sum() / (squares * found**2).sum())).astype(np.float32)


def scale_rows(stored: np.ndarray, kind: Type, by: np.ndarray) -> None:
    """Multiplies rows as they are stored, uint8 [experts, bytes of a row], in place."""
    if kind == Type.F32:
        numbers = stored.view("<f4")
        numbers[:] = numbers * by[:, None]
        return
    blocks = stored.reshape(len(stored), -1, GGML_QUANT_SIZES[kind][1])
    for offset in _SCALES[kind]:
        scales = np.ascontiguousarray(blocks[..., offset : offset + 2]).view("<f2")[..., 0]
        scaled = (scales * by[:, None]).astype("<f2")
        blocks[..., offset : offset + 2] = scaled[..., None].view(np.uint8)


def expected_uses(router: np.ndarray, used: int, random: np.random.Generator) -> np.ndarray:
    """How often each expert is among the `used` with the largest logits, of random activations."""
    logits = random.standard_normal((_SAMPLES, router.shape[1]), dtype=np.float32) @ router.T
    chosen = np.argpartition(-logits, used - 1, axis=1)[:, :used]
    return np.bincount(chosen.ravel(), minlength=router.shape[0])


def top_shares(uses: np.ndarray) -> list[float]:
    """The shares of the uses that a layer's most used experts have, for each of `_PARTS` of them (at least one)."""
    falling = np.sort(uses)[::-1]
    return [falling[: max(1, round(part * len(uses)))].sum() / max(1, uses.sum()) for part in _PARTS]


def routers(path: Path) -> tuple[list[TensorInfo], int]:
    """The file's routers, and how many experts a token uses."""
    file = GgufFile.open(path)
    found = [tensor for tensor in file.tensors if tensor.name.endswith(".ffn_gate_inp.weight")]
    if len(file.paths) > 1 or not found or any(tensor.type not in (Type.F32, *_SCALES) for tensor in found):
        sys.exit(f"{path}: it must be one file with a mixture of experts whose routers are F32 or one of"
                 f" {', '.join(kind.name for kind in _SCALES)}")
    return found, int(file.metadata[f"{file.architecture}.expert_used_count"])


def skew_file(path: Path, skew: float, seed: int) -> str:
    """Step 3; says what was done, and what is to be expected."""
    found, used = routers(path)
    random = np.random.default_rng(seed)
    before, after = [], []
    for tensor in found:
        kind, experts = Type(tensor.type), tensor.shape[1]
        stored = np.memmap(path, np.uint8, "r+", tensor.offset, (experts, tensor.nbytes // experts))
        router = dequantize(stored, kind)
        before.append(top_shares(expected_uses(router, used, random)))
        scale_rows(stored, kind, factors(router, skew, random))
        after.append(top_shares(expected_uses(dequantize(stored, kind), used, random)))
        stored.flush()
    experts = found[0].shape[1]
    lines = [f"{len(found)} routers ({Type(found[0].type).name}) of {experts} experts, {used} used: rows scaled by"
             f" place^-{skew:g}, seed {seed}.", "",
             "| most used experts of a layer | share of uses, unscaled rows | scaled rows | even routing |",
             "| ---: | ---: | ---: | ---: |"]
    for index, part in enumerate(_PARTS):
        count = max(1, round(part * experts))
        lines.append(f"| {part:.0%} ({count}) | {np.mean(before, axis=0)[index]:.1%}"
                     f" | {np.mean(after, axis=0)[index]:.1%} | {count / experts:.1%} |")
    lines += ["", f"Expected of {_SAMPLES:,} random activations of unit variance; means over the layers."]
    return "\n".join(lines)


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("copy", type=Path, nargs="?")
    parser.add_argument("--in-place", action="store_true", help="change the file itself")
    parser.add_argument("--skew", type=float, default=0.25, help="0 is about even; the larger, the more skewed")
    parser.add_argument("--attention", type=float, default=0.05, help="what attn_norm is multiplied by")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if (arguments.copy is None) != arguments.in_place:
        parser.error("give the copy's path, or --in-place")
    routers(arguments.model)  # is it one? Before gigabytes are copied
    path = arguments.copy or arguments.model
    if arguments.copy:
        if path.exists():
            parser.error(f"{path}: is there already")
        shutil.copyfile(arguments.model, path)
    print(make_even(path, arguments.attention))
    print(skew_file(path, arguments.skew, arguments.seed))


if __name__ == "__main__":
    main()
