"""Whether decode with experts in slots is as fast in every run: ten fresh processes, alone and beside a busy one.

    python benchmarks/expert_share.py -m MODEL --vram 12 [--runs 10] [--warm-up 256] [--decode 512] [--json FILE]

Each run is a process of its own that loads the model, generates --warm-up tokens, and then times --decode tokens. The
model's misses are shared between the CPU, which computes them, and PCIe, which fetches them; a run in which one of the
two does nothing is stuck. Three variants, each of --runs runs:

- alone: nothing else runs;
- beside, at first: for a second from the first token on, another process holds half of the cores. It is over before the
  timed tokens (if the warm-up takes longer than a second), which must be as fast as alone;
- beside, timed: the same second begins with the timed tokens.

Prints Markdown: of each run tokens/s and the uses of experts that were computed and fetched, of each variant the median
and the spread, (largest - smallest) / median. As files of random weights come, all tokens use the same few experts:
treat them with `skew_routing.py --skew 0` first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VARIANTS = {"alone": None, "beside, at first": "warm-up", "beside, timed": "timed"}
SECONDS = 1.0

# Holds one core.
_HOLD = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
print("holding", flush=True)
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end: pass
"""


@contextmanager
def held(wanted: bool) -> Iterator[None]:
    """Half of the cores are held for `SECONDS`, from now on."""
    cores = sorted(os.sched_getaffinity(0))
    holders = [subprocess.Popen([sys.executable, "-S", "-c", _HOLD, str(core), str(SECONDS)], stdout=subprocess.PIPE)
               for core in (cores[: len(cores) // 2] if wanted else ())]
    for holder in holders:
        holder.stdout.readline()
    try:
        yield
    finally:
        for holder in holders:
            holder.communicate()


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """One run, in this process."""
    from expert_cache import counted
    from partial_cache import loaded

    asked = {"vram": int(arguments.vram * 2**30)} if arguments.device == "cuda" else {}
    most = max(arguments.decode, arguments.warm_up)
    with loaded(arguments.model, most, 1, device=arguments.device, **asked) as (model, _):
        with held(arguments.beside == "warm-up"):
            model.bench_decode(1, arguments.warm_up)
        before = counted(model)
        with held(arguments.beside == "timed"):
            seconds = model.bench_decode(1, arguments.decode)
        after = counted(model)
        sums = {name: int(getattr(after, name).sum() - getattr(before, name).sum())
                for name in ("computed", "fetched", "hits")}
        return {"tokens_per_second": arguments.decode / seconds, **sums, "model": model.spec.name,
                "device": model.device_name}


def fresh(arguments: argparse.Namespace, beside: str | None) -> dict[str, Any]:
    """One run in a process of its own."""
    command = [sys.executable, __file__, "--one", "-m", arguments.model, "--vram", str(arguments.vram), "--device",
               arguments.device, "--warm-up", str(arguments.warm_up), "--decode", str(arguments.decode)]
    done = subprocess.run([*command, *(["--beside", beside] if beside else [])], stdout=subprocess.PIPE, text=True,
                          check=False)
    if done.returncode:
        sys.exit(f"a run failed with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """The measurements as Markdown."""
    lines = ["| | tokens/s, computed / fetched of each run | median | spread |", "| --- | --- | ---: | ---: |"]
    for variant, runs in found.items():
        speeds = [row["tokens_per_second"] for row in runs]
        cells = "; ".join(f"{row['tokens_per_second']:.0f}, {row['computed']:,} / {row['fetched']:,}" for row in runs)
        median = statistics.median(speeds)
        lines.append(f"| {variant} | {cells} | {median:.1f} | {(max(speeds) - min(speeds)) / median:.1%} |")
    return "\n".join(lines)


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--vram", type=float, default=12, metavar="GIB")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: to try this script")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=256, help="tokens")
    parser.add_argument("--decode", type=int, default=512, help="tokens")
    parser.add_argument("--json", type=Path, help="where to keep the measurements")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--beside", choices=["warm-up", "timed"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(run(arguments)))
        return
    found: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    for number in range(arguments.runs):  # in turns, so that a machine that changes changes all of them
        for variant, beside in VARIANTS.items():
            row = fresh(arguments, beside)
            found[variant].append(row)
            print(f"run {number + 1}, {variant}: {row['tokens_per_second']:.1f} tokens/s, {row['computed']:,} computed,"
                  f" {row['fetched']:,} fetched", file=sys.stderr)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    print(table(found))


if __name__ == "__main__":
    main()
