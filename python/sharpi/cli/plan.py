"""``sharpi plan``: what a model will take on this machine, before loading it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from sharpi.cli.options import context_option, kv_dtype_option, model_option, threads_option
from sharpi.cli.text import printable, size

if TYPE_CHECKING:
    from sharpi.planner import Plan


@click.command("plan")
@model_option
@context_option
@threads_option
@kv_dtype_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, sizes in bytes.")
def plan_command(model: str | None, context: int | None, threads: int | None, kv_dtype: str | None,
                 as_json: bool) -> None:
    """Show the memory a model takes, and whether it fits."""
    from sharpi.model import default_threads, describe
    from sharpi.planner import make_plan

    file, spec = describe(model)
    plan = make_plan(file, spec, context=context, kv_dtype=kv_dtype, threads=threads or default_threads())
    click.echo(json.dumps(plan.to_dict(), indent=2) if as_json else _table(plan))


def _table(plan: Plan) -> str:
    rows = [
        ("weights", plan.weights_bytes, "mapped from the file"),
        ("KV cache", plan.kv_bytes, f"{plan.context:,} tokens, {plan.kv_dtype}"),
        ("scratch", plan.scratch_bytes, f"batches of {plan.batch} tokens"),
        ("total", plan.total_bytes, ""),
        ("RAM", plan.ram_bytes, "this machine"),
    ]
    lines = [f"{printable(plan.model)} ({printable(plan.architecture)}), context {plan.context:,}"
             f" of at most {plan.model_context:,} tokens"]
    lines += [f"  {name:<10}{size(count):>12}   {note}".rstrip() for name, count, note in rows]
    return "\n".join([*lines, _verdict(plan)])


def _verdict(plan: Plan) -> str:
    if plan.fits:
        return f"It fits, with {size(plan.ram_bytes - plan.total_bytes)} to spare."
    missing = f"It does not fit: {size(plan.total_bytes - plan.ram_bytes)} too much."
    if plan.fitting_context == 0:
        return f"{missing} No context is short enough; take a smaller model or a smaller quantization of it."
    return f"{missing} It would with a context of {plan.fitting_context:,} tokens: -c {plan.fitting_context}"
