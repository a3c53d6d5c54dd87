"""``sharpi plan``: what a model will take on this machine, or on another one's GPU, before loading it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from sharpi.cli.options import (batch_option, context_option, device_option, kv_dtype_option, model_option,
                                threads_option, vram_option)
from sharpi.cli.text import printable, size

if TYPE_CHECKING:
    from sharpi.planner import Plan

_Row = tuple[str, int, str]


@click.command("plan")
@model_option
@context_option
@threads_option
@batch_option
@device_option
@vram_option
@kv_dtype_option
@click.option("-v", "--verbose", is_flag=True, help="Show every layer by itself.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, sizes in bytes.")
def plan_command(model: str | None, context: int | None, threads: int | None, batch: int | None, device: str,
                 vram: str | None, kv_dtype: str | None, verbose: bool, as_json: bool) -> None:
    """Show the memory a model takes, and whether it fits.

    A GPU can be planned for without having it: --device cuda --vram 12GiB.
    """
    from sharpi.model import default_threads, describe
    from sharpi.planner import make_plan

    file, spec = describe(model)
    plan = make_plan(file, spec, device=device, vram=vram, context=context, kv_dtype=kv_dtype, batch=batch,
                     threads=threads or default_threads())
    click.echo(json.dumps(plan.to_dict(), indent=2) if as_json else _table(plan, verbose))


def _table(plan: Plan, verbose: bool) -> str:
    where = "" if plan.device == "cpu" else " on the GPU"
    lines = [f"{printable(plan.model)} ({printable(plan.architecture)}){where}, context {plan.context:,}"
             f" of at most {plan.model_context:,} tokens"]
    rows = [*_weights(plan, verbose), *_the_rest(plan), *_room(plan)]
    lines += [f"  {name:<12}{size(count):>12}   {note}".rstrip() for name, count, note in rows]
    lines.append(_verdict(plan))
    if plan.why:
        lines.append(f"Device {plan.device} was chosen: {plan.why}.")
    elif plan.device == "cuda" and isinstance(plan.gpu, str):
        lines.append(f"It cannot run on this machine: {plan.gpu}.")
    return "\n".join(lines)


def _weights(plan: Plan, verbose: bool) -> list[_Row]:
    rows: list[_Row] = []
    layers = plan.layer_bytes
    if plan.device == "cpu":
        rows.append(("weights", plan.mapped_bytes, "mapped from the file"))
        if not verbose:
            tables = plan.embedding_bytes + sum(layers) + plan.head_bytes
            return [*rows, ("tables", tables, "norms and rotary angles")]
    rows.append(("embedding", plan.embedding_bytes, ""))
    if verbose:
        rows += [(f"layer {index}", count, "") for index, count in enumerate(layers)]
    else:
        rows.append(("layers", sum(layers), f"{len(layers)} of them"))
    return [*rows, ("output head", plan.head_bytes, "")]


def _the_rest(plan: Plan) -> list[_Row]:
    rows = [("KV cache", plan.kv_bytes, f"{plan.context:,} tokens, {plan.kv_dtype}"),
            ("scratch", plan.scratch_bytes, f"batches of {plan.batch:,} tokens")]
    if plan.device == "cuda":
        rows.append(("graphs", plan.graphs_bytes, "captured steps and kernels, about"))
    # The KV cache's row is what it holds, the total what the device gives out: the rows need not add up to it.
    return [*rows, ("total", plan.total_bytes, "in steps of 2 MiB" if plan.device == "cuda" else "")]


def _room(plan: Plan) -> list[_Row]:
    if plan.device == "cpu":
        return [("RAM", plan.available_bytes or 0, "this machine")]
    rows: list[_Row] = []
    if plan.gpu is not None and not isinstance(plan.gpu, str):
        rows.append(("free", plan.gpu.free_bytes, printable(plan.gpu.name)))
    if plan.vram is not None:
        rows.append(("budget", plan.vram, "--vram"))
    return rows


def _verdict(plan: Plan) -> str:
    if plan.available_bytes is None:
        return "Whether it fits depends on the GPU: --vram says how much there is."
    if plan.fits:
        return f"It fits, with {size(plan.available_bytes - plan.total_bytes)} to spare."
    missing = f"It does not fit: {size(plan.total_bytes - plan.available_bytes)} too much."
    offers = []
    if plan.fitting_batch:
        offers.append(f"a batch of {plan.fitting_batch:,} tokens: -b {plan.fitting_batch}")
    if plan.offered_context:
        offers.append(f"a context of {plan.offered_context:,} tokens: -c {plan.offered_context}")
    if offers:
        return f"{missing} It would with {', or '.join(offers)}"
    return f"{missing} No context worth having is short enough; take a smaller model or a smaller quantization of it."
