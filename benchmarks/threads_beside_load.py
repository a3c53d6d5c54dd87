"""What threads cost when other programs want the cores: decode with all and with one, alone and beside busy processes.

    python benchmarks/threads_beside_load.py [-m MODEL] [--busy 0 1 2] [--rounds 5] [--tokens 48] [--against DIR]

A process loads the model twice, for one thread and for all, and lets them generate `--tokens` tokens in turn, so that
what else the machine does meets both. What counts is the ratio of such a pair. `--against` is the `python` folder of
another build of Sharpi, measured in alternating rounds. Busy processes are endless loops at ordinary priority.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent / "python"
PAIRS = 5  # a process
GENERATE = """
import sys, time
from sharpi.model import Model
path, tokens, pairs = sys.argv[1] or None, int(sys.argv[2]), int(sys.argv[3])
counts = [1, int(sys.argv[4])]
models = [Model.load(path, device="cpu", threads=threads) for threads in counts]
def speed(model):
    started = time.perf_counter()
    count = sum(1 for _ in model.generate("Once upon a time", max_tokens=tokens, temperature=0))
    return count / (time.perf_counter() - started)
for pair in range(pairs + 1):
    speeds = [speed(model) for model in models]
    if pair:  # the first one reads the file
        print(*speeds)
"""


def measure(package: Path, options: argparse.Namespace, cores: int) -> list[tuple[float, float]]:
    """Pairs of tokens/s with one thread and with `cores`, prefill of a few tokens included."""
    command = [sys.executable, "-c", GENERATE, options.model, str(options.tokens), str(PAIRS), str(cores)]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return [(float(one), float(all_cores)) for one, all_cores in (line.split() for line in said.stdout.splitlines())]


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """While inside, `count` processes want a core each."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="", help="GGUF file; the bundled model by default")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2], help="numbers of busy processes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--against", type=Path, help="the python folder of another build")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        sys.exit("one core: there is nothing to compare")
    builds = {"this build": HERE} | ({"the other": options.against} if options.against else {})
    pairs: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for _ in range(options.rounds):
        for busy in options.busy:
            for name, package in builds.items():
                with busy_processes(busy):
                    pairs.setdefault((busy, name), []).extend(measure(package, options, cores))
    print(f"{cores} cores; medians of {PAIRS * options.rounds} pairs (lowest to highest)")
    print(f"| busy processes | build | tokens/s, -t 1 | -t {cores} | ratio |\n| --- | --- | --- | --- | --- |")
    for (busy, name), measured in sorted(pairs.items()):
        one, all_cores = (statistics.median(each) for each in zip(*measured, strict=True))
        ratios = [b / a for a, b in measured]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {busy} | {name} | {one:.0f} | {all_cores:.0f} | {spread} |")


if __name__ == "__main__":
    main()
