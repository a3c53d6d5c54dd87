"""How far two builds of Sharpi are from a model's dequantized weights in float: does rounding cost one of them more?

Each build is a folder that holds an importable `sharpi` with its native module. The models are the tests' small ones
with random weights, in every quantized type. What is right says numpy in float64, which rounds nothing.

    python benchmarks/fidelity.py --old OLD/python --new python [--seeds 4] [--tokens 80]
    python benchmarks/fidelity.py --old OLD/python --new python --text BOOK.txt MODEL.gguf ...

A row of logits has a distance: the norm of the difference, relative to that of numpy's row. A build's distance with a
type is the median of all rows of all models of the type, which a router's choice that flips does not move. The tables
have it for both builds, and their ratio; below them are the ratios' geometric mean and the largest one.

With --text, the models are files instead, and both builds' perplexity of the text's beginning is printed, as
`llama-perplexity` computes it: chunks are independent, and the second half of each counts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

SUPPORT = Path(__file__).resolve().parents[1] / "tests/python/support"
BUILDS = ("old", "new")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--old", required=True, metavar="DIR")
    parser.add_argument("--new", required=True, metavar="DIR")
    parser.add_argument("--seeds", type=int, default=4, help="models of each kind and type (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=80, help="rows of logits of a model (default: %(default)s)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="measure the perplexity of this text")
    parser.add_argument("--length", type=int, default=13_000, help="bytes of the text to read (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a chunk (default: %(default)s)")
    parser.add_argument("model", nargs="*", type=Path)
    arguments = parser.parse_args()
    builds = dict(zip(BUILDS, (arguments.old, arguments.new), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        if arguments.text:
            compare_perplexities(builds, arguments)
        else:
            compare_distances(builds, arguments, Path(folder))


# --- In the process of one build -----------------------------------------------------------------------------------

def save_logits(folder: Path) -> None:
    """Writes beside each file of models the logits of tokens.npy."""
    from sharpi import Model

    tokens = np.load(folder / "tokens.npy").tolist()
    for path in sorted(folder.glob("*.gguf")):
        with Model.load(path, device="cpu", kv_dtype="fp32", threads=1) as model:
            np.save(path.with_suffix(".npy"), model.logits(tokens))


def print_perplexity(path: Path, text: Path, length: int, chunk: int) -> None:
    from sharpi import Model

    with Model.load(path, device="cpu", context=chunk) as model:
        ids = model.tokenize(text.read_bytes()[:length].decode("utf-8", errors="ignore"))
        losses = [loss for begin in range(0, len(ids) - chunk + 1, chunk)
                  for loss in losses_of(model.logits(ids[begin:begin + chunk]), ids[begin:begin + chunk])]
    print(f"{np.exp(np.mean(losses)):.4f} {len(losses)} {len(ids)}")


def losses_of(rows: np.ndarray, ids: list[int]) -> list[float]:
    """-log p of each token in the second half."""
    losses = []
    for at in range(len(ids) // 2, len(ids) - 1):
        row = rows[at].astype(np.float64)
        losses.append(row.max() + np.log(np.exp(row - row.max()).sum()) - row[ids[at + 1]])
    return losses


def in_build(folder: str, *arguments: object) -> str:
    """What this program prints in a process that imports the build's `sharpi`."""
    environment = os.environ | {"PYTHONPATH": str(Path(folder).resolve())}
    command = [sys.executable, __file__, *map(str, arguments)]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, env=environment).stdout


# --- Comparing -----------------------------------------------------------------------------------------------------

def compare_distances(builds: dict[str, str], arguments: argparse.Namespace, folder: Path) -> None:
    sys.path.insert(0, str(SUPPORT))
    from tiny_models import QUANTIZED_TYPES

    tokens = np.random.default_rng(0).integers(0, 96, arguments.tokens)
    np.save(folder / "tokens.npy", tokens)
    print("| type | old | new | new : old |\n| --- | ---: | ---: | ---: |")
    ratios = {}
    for kind in QUANTIZED_TYPES:
        distances = distances_of(kind, builds, arguments.seeds, tokens.tolist(), folder)
        old, new = (float(np.median(distances[build])) for build in BUILDS)
        ratios[kind] = new / old
        print(f"| {kind} | {old:.6f} | {new:.6f} | {ratios[kind]:.4f} |", flush=True)
    worst = max(ratios, key=lambda kind: ratios[kind])
    mean = np.exp(np.mean(np.log(list(ratios.values()))))
    print(f"\ngeometric mean of the ratios {mean:.4f}, largest {ratios[worst]:.4f} ({worst})")


def distances_of(kind: str, builds: dict[str, str], seeds: int, tokens: list[int],
                 folder: Path) -> dict[str, np.ndarray]:
    """Of each build: the distances of all rows of all models of a type."""
    from numpy_model import NumpyModel
    from tiny_models import write

    expected = {}
    for name, model in models_of(kind).items():
        for seed in range(seeds):
            path = write(folder / f"{name}-{seed}.gguf", model, seed=seed)
            expected[path] = NumpyModel(path).logits(tokens)
    found = {}
    for build, importable in builds.items():
        in_build(importable, "--logits-of", folder)
        rows = []
        for path, right in expected.items():
            off = np.load(path.with_suffix(".npy")) - right
            rows.append(np.linalg.norm(off, axis=1) / np.linalg.norm(right, axis=1))
        found[build] = np.concatenate(rows)
    return found


def models_of(kind: str) -> dict[str, object]:
    """One of each kind of layers, wide enough for rows of every type."""
    from tiny_models import Delta, TinyModel

    wide = {"width": 256, "hidden": 256, "heads": 4, "head_dim": 64, "type": kind}
    delta = {"qk_norm": "head", "delta": Delta(value_heads=8, head_dim=32, interval=2)}
    experts = {"experts": 4, "experts_used": 2}
    return {
        "dense": TinyModel("llama", **wide),
        "experts": TinyModel("qwen3moe", qk_norm="head", **experts, **wide),
        "hybrid": TinyModel("qwen35", **delta, **wide),
        "hybrid with experts": TinyModel("qwen35moe", shared=256, **experts, **delta, **wide),
    }


def compare_perplexities(builds: dict[str, str], arguments: argparse.Namespace) -> None:
    print("| model | old | new | tokens | that count |\n| --- | ---: | ---: | ---: | ---: |")
    for path in arguments.model:
        options = (arguments.text, arguments.length, arguments.chunk)
        (old, scored, tokens), (new, _, _) = (in_build(builds[build], "--perplexity-of", path, *options).split()
                                              for build in BUILDS)
        print(f"| {path.name} | {old} | {new} | {tokens} | {scored} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--logits-of"]:
        save_logits(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["--perplexity-of"]:
        print_perplexity(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
