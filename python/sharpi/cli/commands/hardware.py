"""``sharpi hardware``: how fast this machine is at what models need, measured and then remembered."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from sharpi.cli.help import Command
from sharpi.cli.logs import log_options
from sharpi.cli.options import threads_option
from sharpi.cli.text import printable, say
from sharpi.interrupts import leaving_at_once
from sharpi.words import plural, size

if TYPE_CHECKING:
    from sharpi.machine.profile import HardwareProfile


@click.command("hardware", cls=Command, examples=(
    "sharpi hardware",
    "sharpi hardware --save machine.json       and, on another machine:",
    "sharpi plan -m model.gguf --profile machine.json"))
@threads_option
@click.option("--again", is_flag=True, help="Measure again, even if the speeds are known.")
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON, in bytes, operations and seconds.")
@click.option("--save", metavar="FILE", help="Also write the profile to FILE, for --profile.")
@log_options
def hardware_command(threads: int | None, again: bool, as_json: bool, save: str | None) -> None:
    """Show how fast this machine is at what models need.

    `sharpi plan` predicts speeds from it. Each rate is the best of several short samples, and its spread says by how
    much the slowest fell short. The result is kept for 30 days. The machine is measured again sooner if it has changed,
    if other programs were busy the last time, if a model ran at another speed than predicted, or with --again. Speeds
    with fewer threads than the machine has processors are shown, but not kept.
    """
    with leaving_at_once():
        from sharpi.machine.hardware import usable_threads
        from sharpi.machine.profile_cache import cached_profile, current_profile, keep, measure_profile, measuring_words

    if threads is not None:
        threads = usable_threads(threads, say)
    known = None if again else cached_profile()
    # Rates of other numbers of threads say nothing about the one that was asked for.
    if not again and threads in (None, known.threads if known is not None else None):
        profile = current_profile(announce=lambda reason: say(measuring_words(reason)))
        kept = profile == cached_profile()
    else:
        say("measuring this machine, a few seconds")
        profile = measure_profile(threads)
        kept = keep(profile)
    if save is not None:
        profile.save(save)
    click.echo(json.dumps(profile.to_dict(), indent=2) if as_json else _table(profile, kept))


def _table(profile: HardwareProfile, kept: bool) -> str:
    lines = [f"{printable(profile.cpu)}, {plural(profile.cores, 'processor')}, {size(profile.ram_bytes)} of RAM"]
    if profile.gpu is None:
        lines.append(f"no GPU: {_why_no_gpu()}")
    else:
        lines.append(f"{printable(profile.gpu)}, {size(profile.vram_bytes or 0)} of VRAM")
    lines += ["", f"  {'':<26}{'best':>13}{'spread':>9}",
              *(f"  {what:<26}{rate:>13}{spread:>9}   {where}" for what, rate, spread, where in _rows(profile)), ""]
    if profile.busy:
        lines.append("Other programs were busy while this was measured: the machine may be faster.")
    return "\n".join([*lines, _origin(profile, kept)])


def _rows(profile: HardwareProfile) -> list[tuple[str, str, str, str]]:
    """(what, rate, spread, where it was measured)"""
    cpu = f"CPU, {plural(profile.threads, 'thread')}"
    both = "CPU and copies at once"
    rows = [
        ("weights read from RAM", "ram_bytes_per_second", f"{cpu}, one row"),
        ("products of large batches", "cpu_flops", f"{cpu}, 256 rows"),
        ("copies to the GPU", "pcie_bytes_per_second", "PCIe, pinned memory"),
        ("weights read from RAM", "ram_bytes_per_second_shared", both),
        ("copies to the GPU", "pcie_bytes_per_second_shared", both),
        ("weights read from VRAM", "vram_bytes_per_second", "GPU, one row"),
        ("a small kernel", "gpu_kernel_seconds", "GPU, captured step"),
        ("products of large batches", "gpu_flops", "GPU, 2,048 rows"),
    ]
    return [(what, _rate(name, getattr(profile, name)), _part(profile.spread.get(name)), where)
            for what, name, where in rows if getattr(profile, name) is not None]


def _part(spread: float | None) -> str:
    return "" if spread is None else f"{100 * spread:.0f} %"


def _rate(name: str, rate: float) -> str:
    if name.endswith("_seconds"):
        return f"{rate * 1e6:.2f} us"
    if name.endswith("_flops"):
        return f"{_three_digits(rate / 1e12)} TFLOP/s" if rate >= 1e12 else f"{_three_digits(rate / 1e9)} GFLOP/s"
    return f"{_three_digits(rate / 1e9)} GB/s"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _why_no_gpu() -> str:
    from sharpi.machine.hardware import Gpu, gpu

    found = gpu()
    return "it was not there when this was measured" if isinstance(found, Gpu) else printable(found)


def _origin(profile: HardwareProfile, kept: bool) -> str:
    from sharpi.machine.profile_cache import cache_path, may_be_kept, why_stale

    when = f"Measured {profile.measured[:16].replace('T', ' ')} UTC{_age(profile)}"
    where = cache_path()
    if kept and where is not None:
        stale = why_stale(profile)
        wanted = "" if stale is None else (f"\nIt should be measured again ({stale}), but"
                                           f" {printable(str(where.parent))} cannot be written to.")
        return f"{when}, kept in {printable(str(where))}.{wanted}"
    if not may_be_kept(profile):
        return f"{when}. Not kept, because it did not use all {profile.cores} processors."
    return f"{when}. It could not be kept{'' if where is None else f' in {printable(str(where))}'}."


def _age(profile: HardwareProfile) -> str:
    from sharpi.machine.profile_cache import age_of

    age = age_of(profile)
    hours = 0 if age is None else int(age.total_seconds() // 3600)
    if hours < 1:
        return ""
    return f", {plural(hours, 'hour') if hours < 48 else plural(hours // 24, 'day')} ago"
