"""``sharpi plan``: what a model will take, where its weights will be and how fast it will be, before loading it."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from sharpi.cli.ending import EXIT_DOES_NOT_FIT
from sharpi.cli.help import Command, section
from sharpi.cli.logs import log_file_option
from sharpi.cli.model_names import described, named_as, not_here
from sharpi.cli.options import (
    RopeOptions,
    batch_option,
    cache_tokens_option,
    context_option,
    cpu_moe_option,
    device_option,
    kv_dtype_option,
    model_option,
    no_mtp_option,
    profile_option,
    prompt_option,
    rope_options,
    sequences_option,
    spill_option,
    threads_option,
    vram_option,
)
from sharpi.cli.text import printable, say
from sharpi.interrupts import leaving_at_once
from sharpi.settings.choices import EXACT, FAST
from sharpi.words import plural, seconds, size, speed

if TYPE_CHECKING:
    from sharpi.machine.profile import HardwareProfile
    from sharpi.planning.copies import Kept
    from sharpi.planning.placement import Placed
    from sharpi.planning.plan import Plan
    from sharpi.planning.prediction.streams import Forecast

_Row = tuple[str, int, str]

DEFAULT_TOKENS = 1024  # of each request
_BAR = 60  # characters
_MANY_PLACES = 5  # need narrower columns
# Decode at the end of the context is shown if it is slower than this part of decode at its beginning.
_MUCH_LESS = 0.97
# A place where weights are: its column, what the bar shows for it, and how the line below the bar explains that.
_PLACES = (("vram", "in VRAM", "#", "in VRAM"), ("direct", "over PCIe", "=", "in RAM, fetched over PCIe"),
           ("missed", "on a miss", "~", "in RAM, on a miss computed by the CPU or fetched"),
           ("cpu", "by the CPU", "-", "in RAM, computed by the CPU"),
           ("by_row", "by row", ":", "in the file, of which a token reads one row"),
           ("disk", "on disk", ".", "on the disk, read when a token chooses them"))


@click.command("plan", cls=Command, examples=(
    "sharpi plan model.gguf                       for this machine",
    "sharpi plan user/repo:Q4_K_M                 before it is downloaded",
    "sharpi plan model.gguf --vram 12GiB          for a GPU with 12 GiB to spare",
    "sharpi plan model.gguf --streams 8 --tokens 4096    for eight requests at once",
    "sharpi plan model.gguf --json > plan.json    for --plan plan.json"))
@click.argument("name", metavar="[MODEL]", required=False)
@section("Model", model_option, context_option, kv_dtype_option, sequences_option, cache_tokens_option, no_mtp_option)
@rope_options
@section("Device and memory", device_option, vram_option, threads_option, batch_option, prompt_option, cpu_moe_option,
         click.option("--warm", metavar="FILE", help="Expect experts to be used as in FILE, which --expert-stats of"
                                                     " `sharpi run` writes."),
         profile_option)
@section("Many requests",
         click.option("--streams", type=click.IntRange(min=1, max=4096), metavar="N",
                      help="Plan for N requests at once: room for all their tokens, and how fast they are served."),
         click.option("--tokens", type=click.IntRange(min=2), metavar="N",
                      help="Tokens of each request: half prompt, half answer.  [default: 1024]"),
         spill_option)
@section("Output",
         click.option("-v", "--verbose", is_flag=True, help="Show each layer."),
         log_file_option,
         click.option("--json", "as_json", is_flag=True,
                      help="Print JSON with sizes in bytes, which --plan of `sharpi run` reads."))
def plan_command(name: str | None, model: str | None, context: int | None, threads: int | None, batch: int | None,
                 device: str, vram: str | None, kv_dtype: str | None, cpu_moe: bool, sequences: int | None,
                 cache_tokens: int | None, prompt: str | None, no_mtp: bool, rope: RopeOptions, profile: str | None,
                 warm: str | None, streams: int | None, tokens: int | None, spill: str | None, verbose: bool,
                 as_json: bool) -> None:
    """Show the memory that a model takes, where its weights go, and its speed.

    MODEL is a file or a name such as user/repo:Q4_K_M, the same as -m; of a model that is not downloaded yet, only the
    header is read. The exit code is 1 if the model does not fit. --vram 12GiB plans for a GPU that need not be there;
    --profile FILE plans for another machine, where `sharpi hardware --save FILE` was run. With --streams N, the plan
    has room for N requests at once, also when it is saved and carried out.
    """
    if tokens is not None and streams is None:
        raise click.UsageError("--tokens needs --streams: how many requests are served at once")
    with leaving_at_once():
        from sharpi.files.rope import RopeScaling
        from sharpi.loading.description import describe
        from sharpi.machine.hardware import usable_threads
        from sharpi.machine.profile import load_profile
        from sharpi.planning.expert_stats import ExpertStats
        from sharpi.planning.planner import make_plan, parse_spill
        from sharpi.planning.prediction.streams import forecast, room_for

    spill_bytes = parse_spill(spill)
    found = described(name, model)
    known = None if profile is None else load_profile(profile)
    if known is not None and threads is None:
        count = known.threads
    else:
        count = usable_threads(threads, say, cores=None if known is None else known.cores)
    scaling = RopeScaling.asked(**rope.rope_arguments())
    with named_as(found):
        file, spec = describe(found.path if found else None, mtp=not no_mtp, rope=scaling)
    warmth = None if warm is None else ExpertStats.load(warm, file)
    if streams is not None:
        tokens = tokens or DEFAULT_TOKENS
        context, sequences, cache_tokens = room_for(streams, tokens, context, sequences, cache_tokens)
    plan = make_plan(file, spec, device=device, vram=vram, context=context, kv_dtype=kv_dtype, batch=batch,
                     threads=count, cpu_moe=cpu_moe or None, sequences=sequences, cache_tokens=cache_tokens,
                     prompt=prompt, spill_bytes=spill_bytes, profile=known, shown=True, rope=scaling, warm=warmth,
                     notice=say)
    expected = forecast(plan, file, spec, streams, tokens, warm=warmth,
                        spill_bytes=spill_bytes) if streams and tokens else None
    if as_json:
        click.echo(json.dumps({**plan.to_dict(), **({"streams": asdict(expected)} if expected else {})}, indent=2))
    else:
        click.echo(_table(plan, expected, verbose, elsewhere=known is not None))
    if found is not None and found.missing:
        if as_json:
            say(not_here(found))
        else:
            click.echo(f"\n{_wrapped(not_here(found))}")
    if not plan.fits:
        click.get_current_context().exit(EXIT_DOES_NOT_FIT)


def _table(plan: Plan, expected: Forecast | None, verbose: bool, elsewhere: bool) -> str:
    where = "" if plan.device == "cpu" else " on the GPU"
    lines = [_wrapped(f"{printable(plan.model)} ({printable(plan.architecture)}){where}, context {plan.context:,}"
                      f" of at most {plan.model_context:,} tokens")]
    rows = [*_weights(plan, verbose), *_the_rest(plan), *_room(plan, elsewhere)]
    lines += [f"  {name:<12}{size(count):>12}   {note}".rstrip() for name, count, note in rows]
    lines += _verdict(plan)
    if plan.why:
        lines.append(_wrapped(f"Device {plan.device} was chosen: {printable(plan.why)}."))
    elif plan.device == "cuda" and isinstance(plan.gpu, str):
        lines.append(_wrapped(f"It cannot run on this machine: {printable(plan.gpu)}."))
    if plan.fits:
        lines += [_wrapped(_prompts(plan)), *_placement(plan), *_speeds(plan, expected)]
    return "\n".join(lines)


def _prompts(plan: Plan) -> str:
    """How prompts are computed, and what their bits depend on."""
    if plan.prompt == FAST:
        return f"Prompts are {FAST}: computed on tensor cores, with bits that depend on the kind of GPU."
    return f"Prompts are {EXACT}: the bits are the same on every processor."


def _weights(plan: Plan, verbose: bool) -> list[_Row]:
    rows: list[_Row] = []
    layers = plan.layer_bytes
    if plan.device == "cpu":
        without = ", without the experts" if plan.disk_bytes else ""
        rows.append(("weights", plan.mapped_bytes, "mapped from the file" + without))
        if not verbose:
            tables = plan.embedding_bytes + sum(layers) + plan.prediction_bytes + plan.head_bytes
            return [*rows, ("tables", tables, "norms and rotary angles")]
    direct = {placed.kind for placed in plan.placement if _in_ram(placed)} if plan.device == "cuda" else ()
    head = "in RAM" if "output head" in direct else ""
    by_row = any(placed.by_row for placed in plan.placement if placed.kind == "embedding")
    table = "in the file, where a token reads one row" if by_row else ""
    if _is_tied(plan):
        table, head = head, "the same weights"
    rows.append(("embedding", plan.embedding_bytes, table))
    if verbose:
        rows += [(f"layer {index}", count, "") for index, count in enumerate(layers)]
    else:
        disk = " and on the disk" if any(placed.disk for placed in plan.placement) else ""
        some = f", some in RAM{disk}" if set(direct) - {"output head"} else ""
        rows.append(("layers", sum(layers), f"{len(layers)} of them{some}"))
    if plan.mtp:
        rows.append(("prediction", plan.prediction_bytes, "a layer that drafts tokens"))
    return [*rows, ("output head", plan.head_bytes, head)]


def _seen(plan: Plan) -> str:
    """What layers save that do not see all tokens."""
    if plan.kv_bytes == plan.kv_bytes_if_all_seen:
        return ""
    return f"; {size(plan.kv_bytes_if_all_seen)} if every layer saw all"


def _the_rest(plan: Plan) -> list[_Row]:
    tokens = plan.most_cached
    rows = [("KV cache", plan.kv_bytes, f"{tokens:,} tokens, {plan.kv_dtype}" + _seen(plan)),
            ("scratch", plan.scratch_bytes, f"batches of {plan.batch:,} tokens")]
    if plan.state_bytes:
        rows.insert(0, ("state", plan.state_bytes, f"of recurrent layers, for {plan.sequences:,} sequences"))
    if plan.streaming_bytes:
        rows.append(("streaming", plan.streaming_bytes, "slots for weights on their way over PCIe"))
    if plan.expert_slots:
        where = f"in RAM, of {size(plan.disk_bytes)} on the disk" if plan.disk_bytes else ""
        rows.append(("expert slots", plan.expert_slots, where or "a cache of single experts"))
    if plan.device == "cuda":
        rows.append(("graphs", plan.graphs_bytes, "captured steps and kernels, about"))
    # The rows of slots and KV cache are what these hold, the total what the device gives out: the rows need not add up
    # to it.
    return [*rows, ("total", plan.total_bytes, "in steps of 2 MiB" if plan.device == "cuda" else "")]


def _room(plan: Plan, elsewhere: bool) -> list[_Row]:
    if plan.device == "cpu":
        from sharpi.machine.hardware import present_ram_bytes, ram_bytes

        now = present_ram_bytes()
        grows = f", which has {size(now)} now" if now < ram_bytes() else ""
        where = "--profile" if elsewhere else f"this machine{grows}"
        # Slots are as large as what is free allows.
        return [("RAM", plan.available_bytes or 0, f"{where}, without --spill" if plan.disk_bytes else where)]
    rows: list[_Row] = []
    if plan.gpu is not None and not isinstance(plan.gpu, str):
        rows.append(("free", plan.gpu.free_bytes, printable(plan.gpu.name)))
    if plan.vram is not None:
        rows.append(("budget", plan.vram, "--vram"))
    if plan.ram_slots:
        rows.append(("RAM slots", plan.ram_slots, f"for experts, of {size(_outside_vram(plan))} outside VRAM"))
    return rows


def _outside_vram(plan: Plan) -> int:
    """Bytes of the experts that VRAM does not hold."""
    return sum(placed.missed + placed.cpu + placed.disk for placed in plan.placement if placed.kind == "experts")


def _placement(plan: Plan) -> list[str]:
    """A table of the weights by kind and by place, and a bar."""
    if not plan.placement:
        return []
    sums = {place: sum(getattr(placed, place) for placed in plan.placement) for place, *_ in _PLACES}
    places = [place for place in _PLACES if sums[place[0]]]

    width = 14 if len(places) < _MANY_PLACES else 12

    def row(name: str, cells: list[str]) -> str:
        return f"  {name:<14}" + "".join(f"{cell:>{width}}" for cell in cells)

    def cells(placed: Placed) -> list[str]:
        counts = [getattr(placed, place) for place, *_ in places]
        return [size(count) if count else "-" for count in counts]

    return ["", row("weights", [title for _, title, *_ in places]),
            *(row(_kind(plan, placed), cells(placed)) for placed in plan.placement),
            row("total", [size(sums[place]) for place, *_ in places]), *_bar(sums), *_slots(plan)]


def _slots(plan: Plan) -> list[str]:
    """How many experts are in slots, and how often one is expected there."""
    if plan.hit_rate is None:
        return []

    def part(slots: int) -> str:
        return f"({100 * slots / plan.experts:.0f} %)"

    in_vram, in_ram = plan.experts_in_slots, sum(pool.slots for pool in plan.ram_pools)
    rates = [f"{100 * rate:.0f} %" for rate in (plan.hit_rate, plan.ram_hit_rate or 0.0)]
    if in_vram and in_ram:
        told = (f"{in_vram:,} {part(in_vram)} in VRAM and {in_ram:,} {part(in_ram)} in RAM, of {plan.experts:,};"
                f" expected hit rates {' and '.join(rates)}")
    elif in_vram:
        told = (f"{in_vram:,} of {plan.experts:,} {part(in_vram)}, {plan.slots_per_layer:.1f} a layer;"
                f" expected hit rate {rates[0]}")
    elif in_ram:
        told = f"{in_ram:,} of {plan.experts:,} {part(in_ram)} in RAM; expected hit rate {rates[1]}"
    else:
        return []
    return [_wrapped(f"Experts in slots: {told} ({plan.hit_source}).", "  ")]


def _percent(part: float) -> str:
    return f"{max(1, round(100 * part))} %"


def _in_ram(placed: Placed) -> int:
    return placed.direct + placed.missed + placed.cpu


def _is_tied(plan: Plan) -> bool:
    """Whether one table is embedding and output head, its bytes the head's."""
    kinds = {placed.kind for placed in plan.placement}
    return bool(kinds) and "embedding" not in kinds


def _kind(plan: Plan, placed: Placed) -> str:
    return "embedding/head" if placed.kind == "output head" and _is_tied(plan) else placed.kind


def _bar(sums: dict[str, int]) -> list[str]:
    """The places as parts of a line, to scale, and what they mean."""
    whole, begin, bar, legend = max(1, sum(sums.values())), 0, "", []
    for place, _, mark, meaning in _PLACES:
        if sums[place]:
            begin += sums[place]
            # Rounded where parts end, so that the line is as long as it should be.
            bar = bar.ljust(round(_BAR * begin / whole), mark)
            legend.append(f"    {mark}  {100 * sums[place] / whole:3.0f} % {meaning}")
    return [f"  [{bar}]", *legend]


def _speeds(plan: Plan, expected: Forecast | None) -> list[str]:
    """The predictions, what bounds them, and which machine they are for. expected: for many requests."""
    if plan.prefill is None or plan.decode is None or plan.profile is None:
        return []
    rows = [(f"prefill of {plan.batch:,}", plan.prefill), ("decode", plan.decode)]
    full = plan.decode_full
    if full is not None and full.tokens_per_second < _MUCH_LESS * plan.decode.tokens_per_second:
        rows.append((f"decode after {plan.context:,}", full))
    lines = [f"  {name:<21}{speed(found.tokens_per_second):>10} tokens/s   bound by {found.bound}"
             for name, found in rows]
    return ["", "Predicted:", *lines, *_drafting(plan), *_many(expected),
            *_origin(plan.profile, plan.device, plan.disk_bytes_per_second)]


def _many(expected: Forecast | None) -> list[str]:
    """What many requests at once can expect."""
    if expected is None:
        return []
    prompt = max(1, expected.tokens // 2)
    each = expected.decode.tokens_per_second / expected.streams
    return ["", f"  {plural(expected.streams, 'request')} at once, each a prompt of {prompt:,} and an answer of"
            f" {expected.tokens - prompt:,} tokens:",
            f"  {'decode, all':<21}{speed(expected.decode.tokens_per_second):>10} tokens/s   bound by"
            f" {expected.decode.bound}",
            f"  {'decode, each':<21}{speed(each):>10} tokens/s",
            f"  {'first token':<21}{seconds(expected.first_token_seconds):>10}            beside the other answers",
            f"  {'':<21}{seconds(expected.last_first_token_seconds):>10}            the last, if all come at once",
            f"  {'with their prompts':<21}{speed(expected.answer_tokens_per_second):>10} tokens/s",
            *_kept(expected.kept)]


def _kept(kept: Kept) -> list[str]:
    """RAM that the scheduler's copies take beside the plan's memory."""
    rows = [(kept.spill_bytes, "at most, for what the KV cache gives up"),
            (kept.states_bytes, "at most, for copies of recurrent states")]
    return [f"  {'RAM beside':<21}{size(count):>10}            {note}" for count, note in rows if count]


def _drafting(plan: Plan) -> list[str]:
    """What a drafted token costs, and so how often it has to be right."""
    from sharpi.planning.drafts import MOST_COST

    if plan.draft_cost is None:
        return []
    part = f"{100 * plan.draft_cost:.0f} %"
    pays = f"drafts pay if more than {part} of them are accepted"
    if plan.draft_cost >= MOST_COST:
        pays = "it drafts only with --draft mtp"
    said = f"Decode is without drafts. A token from the prediction layer adds about {part} to a step: {pays}."
    return [_wrapped(said, "  ")]


def _origin(profile: HardwareProfile, device: str, disk: float | None) -> list[str]:
    """The machine that predictions are for."""
    names, rates = [printable(profile.cpu)], [("RAM", profile.ram_bytes_per_second)]
    if device == "cuda" and profile.gpu is not None:
        names.append(printable(profile.gpu))
        rates += [("PCIe", profile.pcie_bytes_per_second or 0.0), ("VRAM", profile.vram_bytes_per_second or 0.0)]
    said = f"For {' and '.join(names)}: {', '.join(f'{name} {rate / 1e9:,.0f} GB/s' for name, rate in rates)}"
    if disk is not None:
        said += f", disk {disk / 1e9:,.1f} GB/s"
    if not profile.assumed:
        return [_wrapped(f"{said}, {_measured(profile, device)}.", "  ")]
    return [_wrapped(f"{said}. For measured speeds, run `sharpi hardware --save FILE` on that machine and give"
                     " --profile FILE here.", "  ")]


def _measured(profile: HardwareProfile, device: str) -> str:
    """When these rates were measured, and how far their samples are apart."""
    if not profile.measured:
        return "as measured"
    shown = ("ram_bytes_per_second", *(("pcie_bytes_per_second", "vram_bytes_per_second") if device == "cuda" else ()))
    parts = [profile.spread[name] for name in shown if name in profile.spread]
    spread = f", spread {100 * max(parts):.0f} %" if parts else ""
    return f"measured {profile.measured[:10]}{' while other programs were busy' if profile.busy else ''}{spread}"


def _wrapped(text: str, margin: str = "") -> str:
    return textwrap.fill(text, 80, initial_indent=margin, subsequent_indent=margin or "  ", break_long_words=False,
                         break_on_hyphens=False)


def _verdict(plan: Plan) -> list[str]:
    if plan.available_bytes is None:
        return ["Whether it fits depends on the GPU: --vram says how much memory it has."]
    if plan.fits:
        spare = size(plan.available_bytes - plan.total_bytes)
        if plan.resident:
            return [f"It fits, with {spare} to spare."]
        # Not of the file, which may have a prediction layer that is left there.
        weights = max(1, sum(sum(placed[1:]) for placed in plan.placement))
        beside, by_row = sum(map(_in_ram, plan.placement)), sum(placed.by_row for placed in plan.placement)
        if not beside:
            return [f"It fits, with {spare} to spare; {_percent(by_row / weights)} of the weights are read by row."]
        on_disk = sum(placed.disk for placed in plan.placement)
        disk = f", {_percent(on_disk / weights)} on the disk" if on_disk else ""
        said = f"It fits with {_percent(beside / weights)} of the weights in RAM{disk}, and {spare} to spare."
        return [_wrapped(said)]
    from sharpi.planning.plan import vram_words

    even = "" if plan.resident else ", even with its weights in RAM"
    missing = f"It does not fit{even}: {size(plan.total_bytes - plan.available_bytes)} too much."
    offers = []
    if plan.fitting_vram:
        offers.append(f"  a larger budget: --vram {vram_words(plan.fitting_vram)}")
    if plan.fitting_batch:
        offers.append(f"  a batch of {plan.fitting_batch:,} tokens: -b {plan.fitting_batch}")
    if plan.offered_context:
        offers.append(f"  a context of {plan.offered_context:,} tokens: -c {plan.offered_context}")
    if offers:
        return [missing, f"It would with{' one of' if len(offers) > 1 else ''}", *offers]
    if plan.device == "cuda":
        return [missing, "No useful context is short enough; --device cpu runs it from RAM."]
    return [missing, "No useful context is short enough: take a smaller model, or a smaller",
            "quantization of it."]
