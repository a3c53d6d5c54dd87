"""The shape of the partial weight cache's gain: tokens/s against how much of the weights is kept in VRAM.

Decodes with the cache at eleven sizes from nothing to all, once with what is not cached coming across PCIe alone, and
once with its rows shared between PCIe and the CPU. Beside each measured speed stands the one that the plan predicted.

    python benchmarks/partial_cache.py -m MODEL [--steps 10] [--decode 32] [--prefill 2048] [--json FILE]
    python benchmarks/partial_cache.py --plot FILE.json --svg FILE.svg

Everything is measured in one process; prints a Markdown table. The plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sharpi import Model
from sharpi.benchmark import Benchmark
from sharpi.loading.description import describe
from sharpi.machine.hardware import core_count
from sharpi.planning.planner import Plan, make_plan

MODES = {"direct + cache": "0", "direct + cache + CPU rows": "1"}


@contextmanager
def loaded(path: str, decode: int, prefill: int, **asked: Any) -> Iterator[tuple[Model, Plan]]:
    """The model on the GPU with room for what is to be measured, and its plan with predictions."""
    asked = {"device": "cuda", "context": max(prefill, decode) + 256, "threads": core_count(), **asked}
    # Before the model takes its memory, or there would be none to plan with.
    plan = make_plan(*describe(path), **asked, shown=True)
    with Model.load(path, **asked) as model:
        if model.plan.placement != plan.placement:
            print("the predictions are of another plan than was loaded: is the GPU in use?", file=sys.stderr)
        yield model, plan


def speeds(model: Model, plan: Plan, decode: int, prefill: int) -> dict[str, Any]:
    """Measured (medians of three) and predicted."""
    benchmark = Benchmark(model)
    return {
        "decode": decode / statistics.median(benchmark.decode(1, decode) for _ in range(3)),
        "decode_predicted": plan.decode.tokens_per_second,
        "prefill": prefill / statistics.median(benchmark.prefill(prefill) for _ in range(3)),
        "prefill_predicted": plan.prefill.tokens_per_second,
        "vram_taken": model.stats()["vram_bytes"],
        "vram_planned": model.plan.total_bytes,
    }


def against(row: dict[str, Any], name: str, form: str) -> str:
    """A measured speed, and the predicted one behind it, for a table."""
    return f"{row[name]:{form}} ({row[f'{name}_predicted']:{form}})"


def arguments_of(description: str) -> argparse.ArgumentParser:
    """What the sweeps have in common."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("-m", "--model")
    parser.add_argument("--decode", type=int, default=32, help="tokens")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens")
    parser.add_argument("--json", type=Path, help="where to keep the measurements, for --plot")
    parser.add_argument("--plot", type=Path, metavar="FILE.json", help="draw these, measure nothing")
    return parser


def measure(path: str, cached: float, split: str, decode: int, prefill: int) -> dict[str, Any]:
    """One load and its speeds; cached: GiB of weights to keep, split: whether the CPU takes rows."""
    os.environ["SHARPI_CUDA_PARTIAL_WEIGHT_CACHE_GB"] = f"{cached:.6f}"
    os.environ["SHARPI_CUDA_ROW_SPLIT"] = split
    with loaded(path, decode, prefill) as (model, plan):
        Benchmark(model).decode(1, 8)
        placement = model.stats()["placement"]
        return {"split": split == "1", "vram_weights": placement["vram"], "cpu_weights": placement["cpu"],
                **speeds(model, plan, decode, prefill)}


def table(rows: list[dict[str, Any]], weights: int) -> str:
    """The measurements as Markdown."""
    lines = ["| cached | CPU rows | decode (predicted) | prefill (predicted) | VRAM taken − planned |",
             "| ---: | --- | ---: | ---: | ---: |"]
    for row in rows:
        difference = (row["vram_taken"] - row["vram_planned"]) / 2**20
        lines.append(f"| {row['vram_weights'] / 2**30:.2f} GiB ({row['vram_weights'] / weights:.0%})"
                     f" | {row['cpu_weights'] / 2**30:.2f} GiB | {against(row, 'decode', '.1f')}"
                     f" | {against(row, 'prefill', ',.0f')} | {difference:+.0f} MiB |")
    return "\n".join(lines)


def plot(report: dict[str, Any], svg: str) -> None:
    """Tokens/s over cached GiB, one line a mode, logarithmic: speed grows as the inverse of what is left."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    direct = next(row for row in report["rows"] if not row["split"])
    axes.axhline(direct["decode"], color="gray", linestyle=":", label="direct only")
    for name, split in MODES.items():
        rows = [row for row in report["rows"] if row["split"] == (split == "1")]
        sizes = [row["vram_weights"] / 2**30 for row in rows]
        line, = axes.plot(sizes, [row["decode"] for row in rows], marker="o", label=name)
        axes.plot(
            sizes,
            [row["decode_predicted"] for row in rows],
            color=line.get_color(),
            linestyle="--",
            linewidth=0.8,
            label=f"{name}, predicted",
        )
    axes.set_yscale("log")
    axes.set_xlabel("weights in VRAM, GiB")
    axes.set_ylabel("decode, tokens/s")
    axes.set_title(f"{report['model']}, {report['device']}")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(svg, metadata={"Date": None})


def main() -> None:
    """See the top of the file."""
    parser = arguments_of(__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--svg", default="partial_cache.svg")
    arguments = parser.parse_args()
    if arguments.plot:
        plot(json.loads(arguments.plot.read_text()), arguments.svg)
        return
    with Model.load(arguments.model, device="cuda", context=512) as model:
        weights, name, device = model.plan.weights_bytes, model.spec.name, model.device_name
    rows = []
    for split in MODES.values():
        for step in range(arguments.steps + 1):
            # All, with something to spare: it is a limit.
            cached = weights * step / arguments.steps * (1.02 if step == arguments.steps else 1) / 2**30
            rows.append(measure(arguments.model, cached, split, arguments.decode, arguments.prefill))
    report = {"model": name, "device": device, "weights": weights, "rows": rows}
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))
    print(table(rows, weights))


if __name__ == "__main__":
    main()
