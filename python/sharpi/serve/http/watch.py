"""Watches whether schedulers make progress. A server that answers /health although no step ends is worse than one that
is down: nobody restarts it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

from sharpi.serve.http.metrics import Counts

__all__ = ["StepWatch"]

_INTERVAL = 0.5  # seconds
_PROGRESS = ("steps", "pieces", "finished")
_WORK = ("preparing", "writing")


class StepWatch:
    """Knows since when a model has had work and made no progress."""

    def __init__(self, counts: Counts, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """seconds: so long may a step take."""
        self._counts = counts
        self._seconds = seconds
        self._clock = clock
        self._seen: dict[str, tuple[tuple[Any, ...] | None, float]] = {}

    def look(self) -> None:
        """Notes how far each model is."""
        now, seen = self._clock(), {}
        for model, counts in self._counts():
            # Without work nothing is late, so idle looks have no progress that a later one could equal.
            busy = any(counts.get(field) for field in _WORK)
            progress = tuple(counts.get(field) for field in _PROGRESS) if busy else None
            before = self._seen.get(model)
            seen[model] = before if before is not None and busy and before[0] == progress else (progress, now)
        self._seen = seen

    def stalled(self) -> Iterable[tuple[str, float]]:
        """The models that have made no progress for too long, and for how many seconds."""
        self.look()
        now = self._clock()
        return [(model, now - since) for model, (progress, since) in self._seen.items()
                if progress is not None and now - since > self._seconds]

    async def keep_looking(self) -> None:
        """Looks until it is cancelled."""
        while True:
            self.look()
            await asyncio.sleep(_INTERVAL)
