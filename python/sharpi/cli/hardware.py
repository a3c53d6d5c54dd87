"""``sharpi hardware``: how fast this machine is at what models need, measured once and then remembered."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from sharpi.cli.options import threads_option
from sharpi.cli.text import printable, size

if TYPE_CHECKING:
    from sharpi.profile import HardwareProfile


@click.command("hardware")
@threads_option
@click.option("--again", is_flag=True, help="Measure anew, whatever is known already.")
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON, in bytes, operations and seconds.")
@click.option("--save", metavar="FILE", help="Also write the profile to FILE, for --profile here or elsewhere.")
def hardware_command(threads: int | None, again: bool, as_json: bool, save: str | None) -> None:
    """Measure how fast this machine is, in a few seconds; plans predict speeds from it.

    The result is kept, so that it is measured once; it is measured anew on another machine, or with --again. What is
    measured with fewer threads than the machine has processors is shown, but not kept.
    """
    from sharpi.hardware import usable_threads
    from sharpi.profile import cached_profile, keep, measure_profile

    if threads is not None:
        threads = usable_threads(threads, lambda line: click.echo(f"sharpi: {line}", err=True))
    profile = None if again else cached_profile()
    # Rates of other numbers of threads say nothing about the one that was asked for.
    if profile is not None and threads not in (None, profile.threads):
        profile = None
    kept = profile is not None
    if profile is None:
        click.echo("sharpi: measuring this machine, which takes a few seconds", err=True)
        profile = measure_profile(threads)
        kept = keep(profile)
    if save is not None:
        profile.save(save)
    click.echo(json.dumps(profile.to_dict(), indent=2) if as_json else _table(profile, kept))


def _table(profile: HardwareProfile, kept: bool) -> str:
    lines = [f"{printable(profile.cpu)}, {profile.cores} processors, {size(profile.ram_bytes)} of RAM"]
    if profile.gpu is None:
        lines.append(f"no GPU: {_why_no_gpu()}")
    else:
        lines.append(f"{printable(profile.gpu)}, {size(profile.vram_bytes or 0)} of VRAM")
    rows = [row for row in _rows(profile) if row[1] is not None]
    lines += ["", *(f"  {what:<30}{rate:>14}   {where}" for what, rate, where in rows), ""]
    return "\n".join([*lines, _origin(profile, kept)])


def _rows(profile: HardwareProfile) -> list[tuple[str, str | None, str]]:
    """(what, rate, where it was measured)"""
    cpu = f"CPU, {profile.threads} {'thread' if profile.threads == 1 else 'threads'}"
    both = "CPU and copies at once"
    kernel = profile.gpu_kernel_seconds
    return [
        ("weights read from RAM", _bytes_rate(profile.ram_bytes_per_second), f"{cpu}, one row"),
        ("products of large batches", _flops(profile.cpu_flops), f"{cpu}, 256 rows"),
        ("copies to the GPU", _bytes_rate(profile.pcie_bytes_per_second), "PCIe, pinned memory"),
        ("weights read from RAM", _bytes_rate(profile.ram_bytes_per_second_shared), both),
        ("copies to the GPU", _bytes_rate(profile.pcie_bytes_per_second_shared), both),
        ("weights read from VRAM", _bytes_rate(profile.vram_bytes_per_second), "GPU, one row"),
        ("a small kernel", None if kernel is None else f"{kernel * 1e6:.2f} us", "GPU, captured step"),
        ("products of large batches", _flops(profile.gpu_flops), "GPU, 2,048 rows"),
    ]


def _bytes_rate(rate: float | None) -> str | None:
    return None if rate is None else f"{_three_digits(rate / 1e9)} GB/s"


def _flops(rate: float | None) -> str | None:
    if rate is None:
        return None
    return f"{_three_digits(rate / 1e12)} TFLOP/s" if rate >= 1e12 else f"{_three_digits(rate / 1e9)} GFLOP/s"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _why_no_gpu() -> str:
    from sharpi.hardware import Gpu, gpu

    found = gpu()
    return "it was not there when this was measured" if isinstance(found, Gpu) else printable(found)


def _origin(profile: HardwareProfile, kept: bool) -> str:
    from sharpi.profile import cache_path, uses_all_cores

    when = profile.measured[:16].replace("T", " ")
    where = cache_path()
    if kept and where is not None:
        return f"Measured {when} UTC, kept in {printable(str(where))}."
    if not uses_all_cores(profile):
        return f"Measured {when} UTC. Not kept: only what all {profile.cores} processors reach is."
    return f"Measured {when} UTC. It could not be kept{'' if where is None else f' in {printable(str(where))}'}."
