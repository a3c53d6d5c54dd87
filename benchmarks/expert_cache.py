"""What a cache of experts gains: tokens/s and hit rate of a mixture of experts against the VRAM that it may take.

    python benchmarks/expert_cache.py -m MODEL --vram 4 6 8 10 12 [--warm-up 256] [--decode 128] [--prefill 2048]
    python benchmarks/expert_cache.py --plot FILE.json --svg FILE.svg

For each budget (GiB) the model is loaded, answers some tokens so that the slots fill (or are filled by --warm STATS),
and is then measured: medians of three runs, in each of which other tokens are drawn; the hit rate is that of these
runs alone. As they come, files of random weights use the same few experts for every token: `skew_routing.py` mends
that. Prints a Markdown table with the predicted speeds beside the measured ones. The plot needs matplotlib.
"""

from __future__ import annotations

import json
from typing import Any

from partial_cache import against, arguments_of, loaded, speeds

from sharpi import Model
from sharpi.benchmark import Benchmark
from sharpi.planning.expert_stats import ExpertStats


def hit_rate(before: ExpertStats, after: ExpertStats) -> float | None:
    """The hit rate between the two counts; `None` without slots to look in."""
    choices = int(after.choices.sum()) - int(before.choices.sum())
    return (int(after.hits.sum()) - int(before.hits.sum())) / choices if choices and after.capacity else None


def counted(model: Model) -> ExpertStats:
    """What was counted so far. Raises `SystemExit` for a model without experts."""
    stats = ExpertStats.from_engine(model.engine, model.plan)
    if stats is None:
        raise SystemExit(f"{model.file.name} has no experts")
    return stats


def measure(path: str, gib: float, warm: str | None, warm_up: int, decode: int, prefill: int) -> dict[str, Any]:
    """One budget's row."""
    asked = {"vram": int(gib * 2**30), "warm": ExpertStats.load(warm) if warm else None}
    with loaded(path, max(decode, warm_up), prefill, **asked) as (model, plan):
        Benchmark(model).decode(1, warm_up)
        before = counted(model)
        # Prefill counts nothing among the choices, so it may stand between.
        row = speeds(model, plan, decode, prefill)
        after = counted(model)
        return {"model": model.spec.name, "device": model.device_name, "gib": gib, "slots": after.capacity,
                "experts": sum(after.present), "hit_rate": hit_rate(before, after),
                "hit_rate_predicted": plan.hit_rate, "resident": model.plan.resident, **row}


def table(rows: list[dict[str, Any]]) -> str:
    """The measurements as Markdown."""
    titles = ("budget", "VRAM taken", "experts in slots", "hit rate (predicted)", "decode (predicted)",
              "prefill (predicted)")
    lines = [f"| {' | '.join(titles)} |", "| ---: " * len(titles) + "|"]
    for row in rows:
        slots = "all resident" if row["resident"] else f"{row['slots']:,} ({row['slots'] / row['experts']:.0%})"
        hits = "-" if row["hit_rate"] is None else f"{row['hit_rate']:.1%} ({row['hit_rate_predicted']:.1%})"
        lines.append(f"| {row['gib']:g} GiB | {row['vram_taken'] / 2**30:.2f} GiB | {slots} | {hits}"
                     f" | {against(row, 'decode', '.1f')} | {against(row, 'prefill', ',.0f')} |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], file: str) -> None:
    """Tokens/s of decode, measured and predicted, over GiB, and the hit rate on an axis of its own."""
    from matplotlib import pyplot

    rows = sorted(rows, key=lambda row: row["gib"])
    taken = [row["vram_taken"] / 2**30 for row in rows]
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    decode, = axes.plot(taken, [row["decode"] for row in rows], marker="o", label="decode")
    axes.plot(taken, [row["decode_predicted"] for row in rows], color=decode.get_color(), linestyle="--", linewidth=0.8,
              label="decode, predicted")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("VRAM taken, GiB")
    axes.set_ylabel("decode, tokens/s")
    right = axes.twinx()
    # With all experts resident nothing is looked up: every use is a hit.
    hits = [100 * (1.0 if row["resident"] else row["hit_rate"] or 0.0) for row in rows]
    right.plot(taken, hits, marker="s", color="tab:orange", label="hit rate")
    right.set_ylim(0, 105)
    right.set_ylabel("hit rate, %")
    axes.set_title(f"{rows[0]['model']}, {rows[0]['device']}")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(handles=[*axes.get_lines(), *right.get_lines()], loc="upper left")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None} if file.endswith(".svg") else None)


def main() -> None:
    """See the top of the file."""
    parser = arguments_of(__doc__)
    parser.set_defaults(decode=128)
    parser.add_argument("--vram", type=float, nargs="+", default=[], metavar="GIB", help="budgets")
    parser.add_argument("--warm-up", type=int, default=256, help="tokens before anything is measured")
    parser.add_argument("--warm", metavar="FILE", help="statistics to fill the slots by, as --expert-stats writes them")
    parser.add_argument("--svg", default="expert_cache.svg", help="the plot; a name that ends in .png makes a PNG")
    arguments = parser.parse_args()
    if arguments.plot:
        plot(json.loads(arguments.plot.read_text()), arguments.svg)
        return
    if not arguments.vram:
        parser.error("--vram names the budgets")
    sizes = (arguments.warm_up, arguments.decode, arguments.prefill)
    rows = [measure(arguments.model, gib, arguments.warm, *sizes) for gib in arguments.vram]
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
