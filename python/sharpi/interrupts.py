"""Ctrl-C while modules are imported. It imports next to nothing, because it is there for imports."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["EXIT_INTERRUPTED", "leaving_at_once"]

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Ctrl-C ends the program on the spot. It is for imports, which have nothing to clean up: a `KeyboardInterrupt`
    inside one may come out as another error, or be printed and swallowed by a callback."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # an ignored one stays ignored
        yield
        return
    try:
        signal.signal(signal.SIGINT, _leave)
    except ValueError:  # not the main thread, which is the one that is interrupted
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: object) -> None:
    os._exit(EXIT_INTERRUPTED)
