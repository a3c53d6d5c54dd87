"""``sharpi experts``: what became of a model's experts while it ran, as a table and as a picture.

It shows what ``--expert-stats`` of the other commands has written; neither the model nor a GPU need be there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sharpi.cli.help import Command
from sharpi.cli.logs import log_options
from sharpi.cli.text import printable, takes_escapes
from sharpi.interrupts import leaving_at_once

if TYPE_CHECKING:
    from rich.table import Table

    from sharpi.planning.expert_stats import ExpertStats, Predictor

_TOP, _TOP_WORDS = 0.1, "top 10 %"  # the part of a layer's experts whose share of the uses is shown
_BAR = 12  # characters
_EIGHTHS = " ▏▎▍▌▋▊▉"

# What the core's predictors guess.
_GUESSES = {
    "next-token": "the next token uses this token's experts",
    "next-layer": "the next layer's router says the same of this layer's rows",
}


@click.command("experts", cls=Command, examples=(
    'sharpi run -m model.gguf --expert-stats use.json "Once upon a time"',
    "sharpi experts use.json"))
@click.argument("path", metavar="FILE")
@click.option("--png", metavar="FILE", help="Where to write the heat map.  [default: beside FILE, ending in .png]")
@log_options
def experts_command(path: str, png: str | None) -> None:
    """Show how a model's experts were used, and draw a heat map.

    FILE is what --expert-stats of `sharpi run` and `sharpi chat` writes.
    """
    with leaving_at_once():
        from rich.console import Console

        from sharpi.planning.expert_stats import ExpertStats

    stats = ExpertStats.load(path)
    picture = _picture_path(path, png)
    console = Console(highlight=False, markup=False, emoji=False,
                      color_system="auto" if takes_escapes(sys.stdout) else None)
    with console.capture() as shown:  # written below, because rich has an exit code of its own for a broken pipe
        console.print(_title(stats))
        console.print(_table(stats, plain=not _encodes_bars()))
        for line in _totals(stats):
            console.print(line)
    click.echo(shown.get(), nl=False)
    _write_picture(stats, picture)
    click.echo(f"Heat map: {printable(os.fspath(picture))}")


def _picture_path(path: str, png: str | None) -> Path:
    picture = Path(path).with_suffix(".png") if png is None else Path(png)
    if os.path.exists(picture) and os.path.samefile(path, picture):
        raise click.UsageError("the heat map would replace the statistics: --png names another file",
                               click.get_current_context())
    return picture


def _write_picture(stats: ExpertStats, path: Path) -> None:
    from sharpi.cli.heat_map import draw
    from sharpi.errors import InvalidRequestError
    from sharpi.storage import write_whole

    try:
        write_whole(path, draw(stats))
    except OSError as error:
        raise InvalidRequestError(
            f"{printable(os.fspath(path))}: the heat map cannot be written: {error.strerror or error}") from error


def _title(stats: ExpertStats) -> str:
    least, most, layers = min(stats.present), stats.experts, len(stats.layers)
    return (f"{printable(stats.model)} ({printable(stats.architecture)}): {layers} layer{'s' * (layers > 1)} of"
            f" {most if least == most else f'{least} to {most}'} experts")


def _table(stats: ExpertStats, plain: bool) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("layer", "uses", "hit rate"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, min_width=_BAR)
    for name in ("loads", "evictions", _TOP_WORDS):
        table.add_column(name, justify="right", no_wrap=True)
    for row, (layer, rate) in enumerate(zip(stats.layers, stats.hit_rates, strict=True)):
        loads, evictions = (int(counts[row].sum()) for counts in (stats.loads, stats.evictions))
        table.add_row(str(layer), f"{int(stats.uses[row].sum()):,}", _percent(rate), _bar(rate, plain), f"{loads:,}",
                      f"{evictions:,}", _percent(stats.top_share(row, _TOP)))
    return table


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.1f} %"


def _bar(part: float | None, plain: bool) -> str:
    if part is None:
        return ""
    if plain:
        return "#" * round(part * _BAR)
    whole, eighths = divmod(round(part * _BAR * 8), 8)
    return "█" * whole + _EIGHTHS[eighths].strip()


def _encodes_bars() -> bool:
    try:
        "█▏".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _totals(stats: ExpertStats) -> list[str]:
    hits, computed, fetched = (int(counts.sum()) for counts in (stats.hits, stats.computed, stats.fetched))
    choices = hits + computed + fetched
    lines = [f"Uses: {int(stats.uses.sum()):,}, in prompts and answers. {_TOP_WORDS.capitalize()}: the share of the"
             " uses that a layer's most used experts have."]
    if choices:
        lines.append(f"Steps of few tokens made {choices:,} choices: {hits:,} ({_percent(hits / choices)}) were found"
                     f" in slots, the CPU computed {computed:,}, and the GPU fetched {fetched:,}.")
    else:
        lines.append("There is no hit rate, because no step had slots to look in: only a GPU that does not hold all"
                     " experts has slots.")
    if stats.capacity:
        everything = sum(stats.present)
        lines.append(f"Slots: {stats.capacity:,} for {everything:,} experts ({_percent(stats.capacity / everything)}),"
                     f" {stats.resident:,} filled at the end; {int(stats.loads.sum()):,} loads,"
                     f" {int(stats.evictions.sum()):,} evictions.")
    return [*lines, *map(_prediction, stats.predictors)]


def _prediction(predictor: Predictor) -> str:
    name = printable(predictor.name)
    guess = f" ({_GUESSES[name]})" if name in _GUESSES else ""
    if predictor.accuracy is None or predictor.coverage is None:
        return f"Predictor {name}{guess} was never tested."
    return (f"Predictor {name}{guess} named {predictor.named:,} experts: {_percent(predictor.accuracy)} of them were"
            f" used, and they were {_percent(predictor.coverage)} of the experts used.")
