"""A pass that stands still until a test lets it go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_PATIENCE = 20.0  # seconds after which a pass goes on whatever the test waits for


class Stop:
    """A constraint that holds up the first pass that asks it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.may_go_on = threading.Event()
        self.is_late = False  # the test waited for the pass

    def fill(self, words: Any) -> bool:
        self.reached.set()
        self.is_late = self.is_late or not self.may_go_on.wait(_PATIENCE)
        return False

    def accept(self, token: int) -> None:
        pass

    def rollback(self, tokens: int) -> None:
        pass

    def ended(self) -> bool:
        return False


@contextmanager
def standing() -> Iterator[Stop]:
    """A constraint whose pass goes on at the end of the block."""
    stop = Stop()
    try:
        yield stop
    finally:
        stop.may_go_on.set()
