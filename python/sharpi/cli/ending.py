"""How a command ends: its exit code, and every error as one line on standard error.

What all commands share on their way out lives here, so that no command needs a `try` of its own: an error that a
person can act on is one line and exit code 2; Ctrl-C ends with 130 and says nothing; a reader that went away
(`sharpi run … | head`) ends the program quietly with 141. Output that cannot be written is an error too, also if
that shows only when the last of it is flushed.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from sharpi.cli.text import printable, say
from sharpi.errors import SharpiError
from sharpi.interrupts import EXIT_INTERRUPTED

__all__ = ["EXIT_DOES_NOT_FIT", "EXIT_ERROR", "exit_code"]

EXIT_DOES_NOT_FIT = 1  # of `sharpi plan`
EXIT_ERROR = 2
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE

# What writing may fail with.
_UNWRITABLE = (errno.ENOSPC, errno.EBADF, errno.EIO, errno.EFBIG, errno.EDQUOT, errno.EAGAIN, errno.ENXIO)


def exit_code(work: Callable[[], Any]) -> int:
    """Runs a command to its end and says what went wrong. A bug's exception goes on its way."""
    try:
        code, message = _result(work), None
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        ending = _ending(error)
        if ending is None:
            raise
        code, message = ending
    _drop_what_cannot_be_written(sys.stdout)  # first, so that the error comes last
    if message is not None:
        try:
            say(f"error: {' '.join(message.splitlines())}")
        except OSError:
            pass  # there is nowhere to say it
    _drop_what_cannot_be_written(sys.stderr)
    return code


def _result(work: Callable[[], Any]) -> int:
    try:
        code = work()
    except click.exceptions.Exit as end:
        code = end.exit_code
    return code if isinstance(code, int) else 0


def _ending(error: BaseException) -> tuple[int, str | None] | None:
    """The exit code and the message for what ended a command; `None` for a bug."""
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return EXIT_INTERRUPTED, None
    if isinstance(error, BrokenPipeError):
        return EXIT_BROKEN_PIPE, None
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "sharpi"
        return EXIT_ERROR, f"{error.format_message().rstrip('.')} (see {command} --help)"
    if isinstance(error, click.ClickException):
        return EXIT_ERROR, error.format_message()
    if isinstance(error, SharpiError):
        return EXIT_ERROR, str(error)
    if isinstance(error, MemoryError):
        return EXIT_ERROR, "out of memory; a smaller context (-c) needs less, and `sharpi plan` says how much"
    if isinstance(error, OSError):
        return EXIT_ERROR, f"{_place(error)}: {error.strerror or error}"
    return None


def _place(error: OSError) -> str:
    """The file that an error is about. What cannot be written and has no name is standard output: commands
    themselves say what they cannot read, and an error of standard error could not be shown."""
    if error.filename is not None:
        return printable(os.fsdecode(error.filename))
    return "standard output" if error.errno in _UNWRITABLE else "input or output"


def _drop_what_cannot_be_written(stream: Any) -> None:
    """What is still buffered would fail once more, aloud, when the interpreter flushes it on its way out."""
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
