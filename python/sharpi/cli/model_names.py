"""Models named on the command line: a file's path, or the name of a model on the Hub."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from sharpi.cli.text import printable, say, takes_escapes
from sharpi.errors import ModelFileError
from sharpi.words import size

if TYPE_CHECKING:
    from sharpi.hub import Found

_DownloadProgress = Callable[[str, int, int], None]


def fetched(model: str | None) -> str | os.PathLike[str] | None:
    """The file of the model that a person named: a path as it is, or the file behind a name, downloaded if it must
    be."""
    from sharpi import hub

    if model is None:
        return None
    _require_name(model)
    with said_if_interrupted(), download_bar() as progress:
        return hub.locate(model, progress=progress, notice=say)


def described(argument: str | None, option: str | None) -> Found | None:
    """What a command describes that takes a model as an argument or with -m; `None` is the bundled model."""
    from sharpi import hub

    if argument is not None and option is not None:
        raise click.UsageError("give one model, not two", click.get_current_context())
    model = argument if argument is not None else option
    if model is None:
        return None
    _require_name(model)
    return hub.look(model, notice=say)


def _require_name(model: str) -> None:
    if not model:
        raise click.UsageError("the name of the model is empty", click.get_current_context())


@contextmanager
def named_as(found: Found | None) -> Iterator[None]:
    """Lets an error name the model's file on the Hub, not the one that its header is kept in."""
    try:
        yield
    except ModelFileError as error:
        if found is None:
            raise
        raise ModelFileError(found.told(str(error))) from error


def not_here(found: Found) -> str:
    """That a model was described by its header alone."""
    return f"Not downloaded yet: {size(found.missing)}; `sharpi pull {printable(found.name)}` downloads it."


@contextmanager
def said_if_interrupted() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted; the same command resumes the download")
        raise


@contextmanager
def download_bar() -> Iterator[_DownloadProgress | None]:
    """A progress bar on standard error that cleans up after itself; `None` where nothing may move."""
    if not takes_escapes(sys.stderr):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
               TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("downloading", total=None, visible=False)
        yield lambda verb, done, total: bar.update(task, description=verb, completed=done, total=total, visible=True)
