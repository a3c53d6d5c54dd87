"""Decode steps of many rows, each its own text: milliseconds a step and tokens a second, by the number of rows.

    python benchmarks/decode_rows.py -m MODEL [--vram SIZE] [--rows 1 2 3 4 8 ...] [--depth 256] [--json FILE]
    python benchmarks/decode_rows.py -m MODEL --llama-batched-bench llama.cpp/build/bin/llama-batched-bench

Every text has --depth random tokens before the first step that is timed. The model is loaded once, with a context for
the largest number of rows. A step takes up to 64 rows; for more texts, the time is that of all their steps. The column
"x first" says how many steps of the first number of rows it takes.

With --llama-batched-bench, llama.cpp runs the same numbers of rows at the same depth beside it, with flash attention
and all layers on the GPU, or none with --device cpu. Its time of a step is that of its whole generation, divided by the
tokens of a text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sharpi import Model
from sharpi.benchmark import Benchmark

ROWS = (1, 2, 3, 4, 8, 9, 16, 17, 32, 64, 128)
PAGE = 64  # tokens of a page of the KV cache
WARM_UP = 4  # steps: kernels are loaded, and a step is recorded when its number of rows comes again


@dataclass(frozen=True)
class Steps:
    """Steps of a number of rows: milliseconds a step, and tokens a second of all rows together."""

    rows: int
    milliseconds: float
    tokens_per_second: float


def tokens_needed(rows: int, arguments: argparse.Namespace) -> int:
    """The tokens for which the KV cache needs room if it holds `rows` texts, each in whole pages."""
    each = arguments.depth + 1 + WARM_UP + arguments.steps
    return rows * ((each + PAGE - 1) // PAGE * PAGE)


def measured(arguments: argparse.Namespace) -> list[Steps]:
    """Sharpi's steps for each number of rows."""
    most = max(arguments.rows)
    # A prompt begins while all the texts before it hold a state, and its own end is kept.
    with Model.load(arguments.model, vram=arguments.vram, device=arguments.device, threads=arguments.threads,
                    context=tokens_needed(most, arguments), sequences=max(4, most + 2)) as model:
        benchmark = Benchmark(model)
        result = []
        for rows in arguments.rows:
            seconds = statistics.mean(benchmark.shared_steps(rows, arguments.depth, arguments.steps, WARM_UP))
            result.append(Steps(rows, 1e3 * seconds, rows / seconds))
        return result


def llama_command(arguments: argparse.Namespace) -> list[str]:
    """The call of llama-batched-bench that measures the same."""
    most = max(arguments.rows)
    layers = "0" if arguments.device == "cpu" else "99"
    threads = ["-t", str(arguments.threads), "-tb", str(arguments.threads)] if arguments.threads else []
    return [arguments.llama_batched_bench, "-m", str(arguments.model), "-npp", str(arguments.depth), "-ntg",
            str(arguments.steps), "-npl", ",".join(map(str, arguments.rows)), "-ngl", layers, "-fa", "1", *threads,
            "-c", str(most * (arguments.depth + arguments.steps))]


def llama_steps(output: str, steps: int) -> list[Steps]:
    """What llama-batched-bench's table says; its columns are found by their names."""
    names: list[str] | None = None
    result = []
    for line in output.splitlines():
        if not line.lstrip().startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if "T_TG s" in cells:
            names = cells
        elif names and len(cells) == len(names) and cells[names.index("B")].isdigit():
            rows, seconds = int(cells[names.index("B")]), float(cells[names.index("T_TG s")])
            result.append(Steps(rows, 1e3 * seconds / steps, rows * steps / seconds))
    if not result:
        raise SystemExit(f"llama-batched-bench gave no table:\n{output[-2000:]}")
    return result


def run_llama(arguments: argparse.Namespace) -> list[Steps]:
    """llama.cpp's steps for each number of rows."""
    done = subprocess.run(llama_command(arguments), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"llama-batched-bench failed ({done.returncode}):\n{done.stderr[-2000:]}")
    return llama_steps(done.stdout, arguments.steps)


def table(ours: list[Steps], theirs: list[Steps]) -> str:
    """A markdown table of both, with a line for each number of rows."""
    other = {steps.rows: steps for steps in theirs}
    lines = ["| rows | ms a step | x first | tokens/s |" + (" llama.cpp ms | tokens/s | ratio |" if theirs else ""),
             "| ---: | ---: | ---: | ---: |" + (" ---: | ---: | ---: |" if theirs else "")]
    for steps in ours:
        line = (f"| {steps.rows} | {steps.milliseconds:.2f} | {steps.milliseconds / ours[0].milliseconds:.2f} | "
                f"{steps.tokens_per_second:.0f} |")
        beside = other.get(steps.rows)
        if theirs:
            line += (f" {beside.milliseconds:.2f} | {beside.tokens_per_second:.0f} | "
                     f"{steps.tokens_per_second / beside.tokens_per_second:.2f} |" if beside else " | | |")
        lines.append(line)
    return "\n".join(lines)


def arguments_of(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--model", type=Path, required=True, help="the GGUF file")
    parser.add_argument("--vram", help="the most GPU memory to take, such as 12GiB")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="numbers of rows, in ascending order")
    parser.add_argument("--depth", type=int, default=256, help="tokens of each text before its steps")
    parser.add_argument("--steps", type=int, default=32, help="steps that are timed for each number of rows")
    parser.add_argument("--llama-batched-bench", metavar="PATH", help="llama.cpp's program, to be run beside it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    return parser.parse_args(words)


def main(words: list[str]) -> None:
    """Measures, prints the table and writes the file."""
    arguments = arguments_of(words)
    ours = measured(arguments)
    theirs = run_llama(arguments) if arguments.llama_batched_bench else []
    print(table(ours, theirs))
    if arguments.json:
        figures: dict[str, Any] = {"model": arguments.model.name, "vram": arguments.vram, "depth": arguments.depth,
                                   "sharpi": [asdict(s) for s in ours], "llama_cpp": [asdict(s) for s in theirs]}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
