"""``sharpi bench``: prefill and decode speed of a model on this machine.

Speed does not depend on which tokens are run, so it runs random ones and needs no tokenizer: a file of random weights
will do. Each size is run once to warm up (page cache, CPU clocks) and then timed; the median stands, with the spread
beside it. On a GPU, decode is timed twice: with the captured step replayed, and with every kernel launched. How often
drafted tokens are accepted depends on the text, and random tokens say nothing about it. So for drafts, the cost of a
step is timed, beside a plain step.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from sharpi.cli.help import Command, section
from sharpi.cli.options import ModelOptions, model_options
from sharpi.cli.text import printable, say
from sharpi.settings.choices import MOST_DRAFT_TOKENS
from sharpi.words import plural, seconds, speed

if TYPE_CHECKING:
    from sharpi.benchmark import Benchmark, MeasuredStreams
    from sharpi.model import Model
    from sharpi.planning.prediction.streams import Forecast


@click.command("bench", cls=Command, examples=(
    "sharpi bench -m model.gguf",
    "sharpi bench -m model.gguf --prefill 2048 --decode 128 --depth 8192",
    "sharpi bench -m model.gguf --streams 1 --streams 16 --tokens 512",
    "sharpi bench -m model.gguf --vram 8GiB --json"))
@section(
    "Measurement",
    click.option("--prefill", "prefills", type=click.IntRange(min=0), multiple=True, default=(512,), show_default=True,
                 metavar="N", help="Length of a prompt to time (repeatable); 0 for none."),
    click.option("--decode", "decodes", type=click.IntRange(min=0), multiple=True, default=(64,), show_default=True,
                 metavar="N", help="Number of generated tokens to time (repeatable); 0 for none."),
    click.option("--depth", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
                 help="Tokens in the context before decode is timed."),
    click.option("--draft", type=click.Choice(("mtp", "ngram")),
                 help="Also time steps with drafted tokens, from the prediction layer or looked up in the text."),
    click.option("--draft-tokens", type=click.IntRange(min=1, max=MOST_DRAFT_TOKENS), multiple=True, default=(1, 2),
                 show_default=True, metavar="N", help="Number of drafted tokens in a step to time (repeatable)."),
    click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True, metavar="N",
                 help="Timed runs of each size; the median is shown."),
    click.option("--warmup/--no-warmup", default=True, help="Run each size once before timing it.  [default: warmup]"),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."))
@section(
    "Many requests",
    click.option("--streams", type=click.IntRange(min=1, max=4096), multiple=True, metavar="N",
                 help="Serve N requests at once, and time them instead of single ones (repeatable)."),
    click.option("--tokens", type=click.IntRange(min=4), default=512, show_default=True, metavar="N",
                 help="Tokens of each request: half prompt, half answer."),
    click.option("--long-prompt", type=click.IntRange(min=1), metavar="N",
                 help="One more request, with a prompt of N tokens, comes while the others are answered."))
@model_options
def bench_command(options: ModelOptions, prefills: tuple[int, ...], decodes: tuple[int, ...], depth: int,
                  draft: str | None, draft_tokens: tuple[int, ...], repeat: int, warmup: bool, as_json: bool,
                  streams: tuple[int, ...], tokens: int, long_prompt: int | None) -> None:
    """Measure a model's speed: prefill (the prompt) and decode (the answer), or many requests at once."""
    _require_uses()
    if streams:
        return _bench_streams(options, streams, tokens, long_prompt or 0, warmup, as_json)
    prefills, decodes = tuple(filter(None, prefills)), tuple(filter(None, decodes))
    started = time.perf_counter()
    # With drafts, the last step may give more tokens than are asked for.
    beyond = 0 if draft is None else 1 + MOST_DRAFT_TOKENS
    with options.load(context=max((1, *prefills, *(max(1, depth) + n + beyond for n in decodes)))) as model:
        if draft is not None:
            from sharpi.planning.drafts import choose_drafts

            choose_drafts(draft, None, mtp=model.plan.mtp)  # raises before anything is timed
        from sharpi.benchmark import Benchmark

        benchmark = Benchmark(model)
        benchmark.prefill(1)
        first_token = time.perf_counter() - started
        results = [_measure("prefill", n, repeat, warmup, benchmark.prefill) for n in prefills]
        for n in decodes:
            results += _decode(model, benchmark, depth, n, repeat, warmup)
            if draft is not None:
                results += _drafts(benchmark, depth, n, draft, draft_tokens, repeat, warmup)
        stats = model.stats()
        report = {
            "model": model.spec.name,
            "device": model.device,
            "device_name": model.device_name,
            "prompt": model.plan.prompt,
            "threads": model.threads,
            "isa": model.isa,
            "results": results,
            "load_seconds": stats["load_seconds"],
            "experts": stats["experts"],
            "first_token_seconds": first_token,
        }
        if warmup:
            _compare(model, results, elsewhere=options.plan is not None or options.profile is not None)
    click.echo(json.dumps(report, indent=2) if as_json else _table(report))


# Options that mean something only beside another one.
_NEEDS = {"draft_tokens": ("draft", "--draft mtp or --draft ngram"), "tokens": ("streams", "--streams"),
          "long_prompt": ("streams", "--streams")}
_SINGLE = ("prefills", "decodes", "depth", "draft", "draft_tokens", "repeat")


def _require_uses() -> None:
    """Raises `UsageError` for an option that was given and would be ignored."""
    context = click.get_current_context()
    names = {option.name: option.opts[0] for option in context.command.params if option.name is not None}
    given = {name for name in names
             if context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE}
    for name, (other, said) in _NEEDS.items():
        if name in given and other not in given:
            raise click.UsageError(f"{names[name]} needs {said}", context)
    if "streams" in given and (single := given.intersection(_SINGLE)):
        raise click.UsageError(f"{names[min(single)]} times single requests: leave it out beside --streams", context)


def _bench_streams(options: ModelOptions, streams: Sequence[int], tokens: int, long_prompt: int, warmup: bool,
                   as_json: bool) -> None:
    from sharpi.planning.prediction.streams import forecast, room_for

    most = max(streams)
    context, sequences, cache_tokens = room_for(most, tokens, options.context or None, None, None)
    if long_prompt:
        if options.context and long_prompt >= options.context:
            raise click.UsageError(f"a prompt of {long_prompt:,} tokens and its answer do not fit into a context of "
                                   f"{options.context:,}: -c sets it")
        context, sequences = max(context, long_prompt + 1), sequences + 1
        cache_tokens += long_prompt + 64
    with options.load(context=context, sequences=sequences, cache_tokens=cache_tokens) as model:
        from sharpi.benchmark import measure_streams
        from sharpi.machine.hardware import Gpu
        from sharpi.machine.profile_cache import cached_profile

        prompt = tokens // 2
        if warmup:  # kernels are loaded, and steps captured
            measure_streams(model, min(most, 4), prompt, tokens - prompt)
        results = [measure_streams(model, count, prompt, tokens - prompt, long_prompt) for count in streams]
        known = cached_profile(model.plan.gpu.index if isinstance(model.plan.gpu, Gpu) else 0)
        expected = [forecast(model.plan, model.file, model.spec, count, tokens, profile=known) for count in streams]
        name = model.spec.name
    if as_json:
        entries = [{**asdict(result), "predicted": asdict(found) if found else None}
                   for result, found in zip(results, expected, strict=True)]
        return click.echo(json.dumps({"model": name, "streams": entries}, indent=2))
    click.echo(_streams_table(name, tokens, results, expected))


def _streams_table(name: str, tokens: int, results: Sequence[MeasuredStreams],
                   expected: Sequence[Forecast | None]) -> str:
    prompt = tokens // 2
    beside = any(expected)
    lines = [f"{printable(name)}: requests of {prompt:,} + {tokens - prompt:,} tokens, all at once",
             f"  {'streams':>7}{'tokens/s':>10}{'predicted' if beside else '':>11}{'first token':>14}{'(p99)':>10}"
             f"{'gap':>10}{'(p99)':>10}{'largest':>10}{'rows a step':>13}"
             f"{'host a step':>13}{'hidden':>8}{'again':>8}"]
    for result, found in zip(results, expected, strict=True):
        said = speed(found.answer_tokens_per_second) if found else ""
        times = (result.first_token_median, result.first_token_p99, result.gap_median, result.gap_p99,
                 result.gap_largest)
        columns = (14, 10, 10, 10, 10)
        lines.append(f"  {result.streams:>7}{speed(result.tokens_per_second):>10}{said:>11}"
                     + "".join(f"{seconds(time):>{width}}" for time, width in zip(times, columns, strict=True))
                     + f"{result.rows:>13.1f}{1e6 * result.host:>10.0f} µs{result.hidden:>8.0%}{result.again:>8.1%}")
    return "\n".join(lines)


def _compare(model: Model, results: list[dict[str, Any]], elsewhere: bool) -> None:
    """Says which of the speeds were not as predicted."""
    from sharpi.agreement import disagreement, seen_in_bench

    for seen in seen_in_bench(results):
        if line := disagreement(model, seen, elsewhere=elsewhere, known=True):
            say(line)


def _decode(model: Model, benchmark: Benchmark, depth: int, tokens: int, repeat: int,
            warmup: bool) -> list[dict[str, Any]]:
    """The entries for one number of tokens: on the GPU with graphs, unless they are switched off, and without."""
    at_depth = {"depth": depth} if depth else {}

    def run(count: int) -> float:
        return benchmark.decode(depth, count)

    if model.device == "cpu":
        return [_measure("decode", tokens, repeat, warmup, run) | at_depth]
    entries = []
    replays = model.graphs
    try:
        for graphs in (True, False) if replays else (False,):
            model.graphs = graphs
            entry = _measure("decode", tokens, repeat, warmup, run) | at_depth
            entries.append(entry | {"graphs": graphs, "kernels_per_token": model.kernels_per_step})
    finally:
        model.graphs = replays
    return entries


def _measure(kind: str, tokens: int, repeat: int, warmup: bool, run: Callable[[int], float]) -> dict[str, Any]:
    """One entry of the results; `run` takes a number of tokens and returns the seconds they took."""
    if warmup:
        run(tokens)
    return {"kind": kind, "tokens": tokens,
            "tokens_per_second": _spread([tokens / run(tokens) for _ in range(repeat)])}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _drafts(benchmark: Benchmark, depth: int, tokens: int, draft: str, counts: Sequence[int], repeat: int,
            warmup: bool) -> list[dict[str, Any]]:
    """The entries for steps without drafts and with these numbers of drafted tokens, timed in turn."""
    ways = [("off", None), *((draft, count) for count in counts)]
    rounds = [[benchmark.drafts(depth, tokens, *way) for way in ways] for _ in range(repeat + warmup)]
    entries: list[dict[str, Any]] = []
    for (kind, count), *runs in zip(ways, *rounds[warmup:], strict=True):
        entry = {"kind": "drafts", "draft": kind, "draft_tokens": count or 0, "tokens": tokens,
                 **{name: sum(getattr(run, name) for run in runs) for name in ("steps", "drafted", "accepted")},
                 "seconds_per_step": _spread([run.seconds_per_step for run in runs])}
        plain = entries[0] if entries else entry
        entry["plain_steps"] = entry["seconds_per_step"]["median"] / plain["seconds_per_step"]["median"]
        entries.append(entry | ({"depth": depth} if depth else {}))
    return entries


def _table(report: dict[str, Any]) -> str:
    where = f"{report['device_name']}, {report['prompt']} prompts"
    if report["device"] == "cpu":
        where = f"{plural(report['threads'], 'thread')}, {report['isa']}"
    lines = [
        f"{printable(report['model'])}: {printable(where)},"
        f" loaded in {report['load_seconds']:.3f} s, first token after {report['first_token_seconds']:.3f} s",
        f"  {'':<9}{'tokens':>8}{'tokens/s':>12}{'min':>10}{'max':>10}",
    ]
    for result in report["results"]:
        if result["kind"] == "drafts":
            lines += _draft_rows(result)
            continue
        spread = result["tokens_per_second"]
        lines.append(f"  {result['kind']:<9}{result['tokens']:>8}{speed(spread['median']):>12}"
                     f"{speed(spread['min']):>10}{speed(spread['max']):>10}{_remark(result)}")
    experts = report["experts"]
    if experts and experts["slots"] and experts["hit_rate"] is not None:
        lines.append(f"  slots for {experts['slots']:,} experts, hit rate {100 * experts['hit_rate']:.1f} %")
    return "\n".join(lines)


def _draft_rows(result: dict[str, Any]) -> list[str]:
    """A row on steps with drafts; the first of them, on plain steps, below what its columns mean."""
    spread = {name: 1000 * value for name, value in result["seconds_per_step"].items()}
    name = "plain" if result["draft"] == "off" else f"{result['draft']} {result['draft_tokens']}"
    row = (f"  {name:<9}{result['tokens']:>8}{spread['median']:>12.3f}{spread['min']:>10.3f}{spread['max']:>10.3f}")
    if result["draft"] == "off":
        at = f"   after {result['depth']:,} tokens" if "depth" in result else ""
        return [f"  {'drafts':<9}{'tokens':>8}{'ms a step':>12}{'min':>10}{'max':>10}", row + at]
    if not result["drafted"]:
        return [f"{row}   {result['plain_steps']:.2f} plain steps, and nothing was drafted"]
    each, accepted = result["drafted"] / result["steps"], result["accepted"] / result["drafted"]
    # A step costs `plain_steps` plain steps, and gives one token and those that are accepted.
    needed = max(0.0, (result["plain_steps"] - 1) / each)
    pays = f"pays from {100 * needed:.0f} % accepted" if needed < 1 else "does not pay"
    return [f"{row}   {result['plain_steps']:.2f} plain steps, {pays}; here {100 * accepted:.0f} % of {each:.1f}"
            " a step"]


def _remark(result: dict[str, Any]) -> str:
    said = []
    if "depth" in result:
        said.append(f"after {result['depth']:,} tokens")
    if "graphs" in result:
        said.append("with graphs" if result["graphs"] else "without graphs")
        said.append(f"{result['kernels_per_token']} kernels a token")
    return "   " + ", ".join(said) if said else ""
