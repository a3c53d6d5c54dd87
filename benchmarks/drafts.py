"""What it costs to verify drafted tokens: steps with 1 and 2 of them next to plain ones, at several placements.

    python benchmarks/drafts.py -m MODEL [--vram 8 12 16] [--tokens 128] [--runs 5] [--depth 512] [--json FILE]
    python benchmarks/drafts.py -m MODEL --prompt "Once upon a time"

For each budget (GiB; none: all that is free) the model is loaded once. Each run measures plain decode and then every
way of drafting; what is compared is always of one run, and medians of the runs are given. Drafts are looked up in the
text (ngram), and made by the prediction layer where the file has one (mtp).

With random weights acceptance says nothing, so the text is made of a few tokens, drawn (`Benchmark.drafts`): there is
always something to look up. --prompt continues a text instead, greedily, which shows the acceptance of a trained model.
A step with drafts pays when it accepts more tokens than the last column says.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sharpi import Model
from sharpi.benchmark import Benchmark
from sharpi.machine.hardware import core_count
from sharpi.planning.drafts import DraftedRun

MOST_DRAFTS = 2


@dataclass
class Cost:
    """Steps with a number of tokens drafted at once (0: plain steps): milliseconds, those against a plain
    step of the same run, and what was drafted and accepted a step."""

    draft: str
    tokens: int
    milliseconds: float
    ratio: float
    drafted: float
    accepted: float
    tokens_per_second: float


def kinds_of(model: Model) -> list[tuple[str, int]]:
    """What there is to measure; plain decode comes first."""
    sources = ["mtp", "ngram"] if model.plan.mtp else ["ngram"]
    return [("off", 0), *((source, count) for source in sources for count in range(1, MOST_DRAFTS + 1))]


def timed(benchmark: Benchmark, model: Model, kind: tuple[str, int], arguments: argparse.Namespace) -> DraftedRun:
    """One run of one kind."""
    source, count = kind[0], kind[1] or None
    if arguments.prompt is None:
        return benchmark.drafts(arguments.depth, arguments.tokens, source, count)
    generation = model.generate(arguments.prompt, max_tokens=arguments.tokens, temperature=0.0, draft=source,
                                draft_tokens=count)
    for _ in generation:
        pass
    cost = generation.timing
    return DraftedRun(cost.generation_seconds, cost.decoded_tokens, cost.steps, cost.drafted_tokens,
                      cost.accepted_tokens)


def costs(model: Model, arguments: argparse.Namespace) -> list[Cost]:
    """Every kind's medians."""
    kinds, benchmark = kinds_of(model), Benchmark(model)
    measured: dict[tuple[str, int], list[Cost]] = {kind: [] for kind in kinds}
    for index in range(arguments.runs + 1):
        plain = 0.0
        for kind in kinds:
            run = timed(benchmark, model, kind, arguments)
            if run.steps == 0:
                raise SystemExit("the text ended before there was a step to measure")
            plain = plain or run.seconds_per_step
            if index:  # the first loads kernels and captures steps
                measured[kind].append(Cost(*kind, 1e3 * run.seconds_per_step, run.seconds_per_step / plain,
                                           run.drafted / run.steps, run.accepted / run.steps, run.tokens / run.seconds))
    names = ("milliseconds", "ratio", "drafted", "accepted", "tokens_per_second")
    return [Cost(*kind, *(statistics.median(getattr(cost, name) for cost in found) for name in names))
            for kind, found in measured.items()]


def measure(path: str | None, gib: float | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """One placement's costs."""
    context = arguments.depth + arguments.tokens + 64
    vram = None if gib is None else int(gib * 2**30)
    with Model.load(path, device=arguments.device, vram=vram, context=context, threads=core_count()) as model:
        found = costs(model, arguments)
        stats = model.stats()
        return {"model": model.spec.name, "device": model.device_name, "gib": gib, "vram_taken": stats["vram_bytes"],
                "placement": stats["placement"], "costs": [asdict(cost) for cost in found]}


def table(rows: list[dict[str, Any]]) -> str:
    """The measurements as Markdown."""
    titles = ("VRAM taken", "drafts", "ms a step", "of a plain one", "drafted a step", "accepted a step", "tokens/s",
              "pays from")
    lines = [f"| {' | '.join(titles)} |", "| ---: | --- |" + " ---: |" * (len(titles) - 2)]
    for row in rows:
        for cost in row["costs"]:
            plain = cost["draft"] == "off"
            drafts = "none" if plain else f"{cost['draft']} {cost['tokens']}"
            pays = "-" if plain else f"{max(0.0, cost['ratio'] - 1):.2f}"
            lines.append(f"| {row['vram_taken'] / 2**30:.2f} GiB | {drafts} | {cost['milliseconds']:.3f}"
                         f" | {cost['ratio']:.2f} | {cost['drafted']:.2f} | {cost['accepted']:.2f}"
                         f" | {cost['tokens_per_second']:.1f} | {pays} |")
    return "\n".join(lines)


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", help="left out: the bundled one")
    parser.add_argument("--vram", type=float, nargs="+", default=[None], metavar="GIB", help="budgets")
    parser.add_argument("--tokens", type=int, default=128, help="of a run")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--depth", type=int, default=512, help="tokens before those that are measured")
    parser.add_argument("--prompt", help="a text to continue")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path, help="where to keep the measurements")
    arguments = parser.parse_args()
    rows = [measure(arguments.model, gib, arguments) for gib in arguments.vram]
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
