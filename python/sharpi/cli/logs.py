"""Where the commands' log goes: to standard error with ``-v``, to a file with ``--log-file``.

The library logs under the name `sharpi` and holds no prompts and no answers. Standard output is never written to.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import IO, Any

import click

from sharpi.cli.text import printable, say

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def verbose_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Only `-v`, which works by itself: the command is handed nothing."""
    return click.option("-v", "--verbose", count=True, expose_value=False, callback=_log_to_stderr,
                        help="Say on standard error what happens; -vv with details.")(function)


def log_file_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Only `--log-file`, which works by itself: the command is handed nothing."""
    return click.option("--log-file", metavar="FILE", expose_value=False, callback=_log_to_file,
                        help="Append a log with all details to this file.")(function)


def log_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Both."""
    return verbose_option(log_file_option(function))


def _log_to_file(context: click.Context, _parameter: click.Parameter, file: str | None) -> None:
    if not context.resilient_parsing:
        start_logging(context, file=file)


def _log_to_stderr(context: click.Context, _parameter: click.Parameter, verbose: int) -> None:
    if not context.resilient_parsing:
        start_logging(context, verbose=verbose)


def start_logging(context: click.Context, *, verbose: int = 0, file: str | None = None) -> None:
    """Sends the log where it was asked for, until `context` closes. verbose: 1 shows what happens on standard error, 2
    also shows details; a file has them always. Raises `click.ClickException` for a file that cannot be written."""
    if verbose:
        _attach(context, _ErrorHandler(), logging.INFO if verbose == 1 else logging.DEBUG)
    if file is not None:
        try:
            _attach(context, _FileHandler(open(file, "a", encoding="utf-8", errors="replace"), file), logging.DEBUG)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise click.ClickException(f"{printable(file)}: the log cannot be written there: {reason}") from error


def show_warnings(context: click.Context) -> None:
    """Warnings and errors appear on standard error even without `-v`: for commands that run where nobody watches."""
    if not any(isinstance(handler, _ErrorHandler) for handler in logging.getLogger("sharpi").handlers):
        _attach(context, _ErrorHandler(), logging.WARNING)


def _attach(context: click.Context, handler: logging.Handler, level: int) -> None:
    logger = logging.getLogger("sharpi")
    before = logger.level
    handler.setLevel(level)
    logger.addHandler(handler)
    logger.setLevel(min(level, before or level))

    def detach() -> None:
        logger.removeHandler(handler)
        logger.setLevel(before)
        handler.close()

    context.call_on_close(detach)


class _ErrorHandler(logging.Handler):
    """Lines on standard error, but for those that people have been told already."""

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "told", False):
            say(record.getMessage())


class _FileHandler(logging.StreamHandler[IO[str]]):
    """Lines in a file. One that cannot be written any more, because the disk is full, ends the log, not the work."""

    def __init__(self, stream: IO[str], name: str) -> None:
        super().__init__(stream)
        self._file = name
        self.setFormatter(logging.Formatter(_FORMAT))

    def handleError(self, record: logging.LogRecord) -> None:
        reason = sys.exc_info()[1]
        logging.getLogger("sharpi").removeHandler(self)
        say(f"{self._file}: the log ends here, it cannot be written: {getattr(reason, 'strerror', None) or reason}")

    def close(self) -> None:
        try:
            self.stream.close()
        except OSError:
            pass  # said already, when a line could not be written
        super().close()
