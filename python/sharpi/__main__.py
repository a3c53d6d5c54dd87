"""The program: `sharpi`, and `python -m sharpi`. It prepares the process and leaves the rest to `sharpi.cli`."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from sharpi.interrupts import leaving_at_once

# A descriptor that the shell closed (`>&-`) is opened again for the wrong direction, so that using it fails as it
# should; only what goes to a closed standard error is dropped. Left closed, the next file that is opened, such as the
# model, would take its place.
_STANDARD = ((0, "stdin", os.O_WRONLY), (1, "stdout", os.O_RDONLY), (2, "stderr", os.O_WRONLY))


def main() -> NoReturn:
    """Runs the command that the arguments name, and exits."""
    with leaving_at_once():
        _reopen_closed_streams()
        from sharpi.cli import main as command
    try:
        command(prog_name="sharpi")
    finally:
        # A second Ctrl-C must not interrupt the interpreter on its way out.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise AssertionError("a command ends the program")


def _reopen_closed_streams() -> None:
    for descriptor, name, flags in _STANDARD:
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, flags)  # takes the lowest number that is free
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
        if getattr(sys, name) is None:
            stream = open(descriptor, "r" if descriptor == 0 else "w", encoding="utf-8", closefd=False)
            setattr(sys, name, stream)


if __name__ == "__main__":
    main()
