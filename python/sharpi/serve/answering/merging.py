"""Several streams read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Generic, TypeVar

__all__ = ["Merged"]

T = TypeVar("T")


class Merged(Generic[T]):
    """Takes from several iterators what is there: one item of each at a time, so that none waits for another."""

    def __init__(self, sources: Sequence[AsyncIterator[T]]) -> None:
        self._sources = dict(enumerate(sources))
        self._waiting: dict[asyncio.Task[T | None], int] = {}

    async def next(self) -> list[tuple[int, T | None]]:
        """(which source, its item), at least one; `None` says that this source has ended. Empty after all have."""
        if not self._sources:
            return []
        if len(self._sources) == 1 and not self._waiting:
            [(index, source)] = self._sources.items()
            return [self._noted(index, await _next(source))]
        busy = set(self._waiting.values())
        for index, source in self._sources.items():
            if index not in busy:
                self._waiting[asyncio.ensure_future(_next(source))] = index
        await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
        done = [task for task in self._waiting if task.done()]
        return [self._noted(self._waiting.pop(task), task.result()) for task in done]

    def _noted(self, index: int, item: T | None) -> tuple[int, T | None]:
        if item is None:
            del self._sources[index]
        return index, item

    async def aclose(self) -> None:
        """Stops waiting. The sources are the caller's to close."""
        waiting, self._waiting = [*self._waiting], {}
        self._sources = {}
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(source: AsyncIterator[T]) -> T | None:
    return await anext(source, None)
