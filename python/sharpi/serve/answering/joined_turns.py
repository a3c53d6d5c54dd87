"""Several prompts of one request: their turns, answered at once, read as one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from sharpi.serve.answering.merging import Merged
from sharpi.serve.server import OpenTurn
from sharpi.serve.turns import Event, Usage

__all__ = ["JoinedTurns"]


class JoinedTurns(OpenTurn):
    """An `OpenTurn` of several. The choices of the first come first, and all have the same number of them."""

    def __init__(self, turns: Sequence[OpenTurn], choices: int) -> None:
        self.prompt_tokens = sum(turn.prompt_tokens for turn in turns)
        self._turns = turns
        self._choices = choices
        self._merged: Merged[Event] = Merged(turns)
        self._usages: dict[int, Usage] = {}
        self._ready: deque[Event] = deque()

    @property
    def cached_tokens(self) -> int:
        return sum(turn.cached_tokens for turn in self._turns)

    @property
    def computed_tokens(self) -> int:
        return sum(turn.computed_tokens for turn in self._turns)

    @property
    def answer_tokens(self) -> int:
        return sum(turn.answer_tokens for turn in self._turns)

    def ready(self) -> Event | None:
        return self._ready.popleft() if self._ready else None

    async def more(self) -> bool:
        arrived = await self._merged.next()
        for index, event in arrived:
            self._take(index, event)
        return bool(arrived)

    def _take(self, index: int, event: Event | None) -> None:
        if isinstance(event, Usage):
            self._usages[index] = event
            if len(self._usages) == len(self._turns):
                self._ready.append(self._usage())
        elif event is not None:
            self._ready.append(replace(event, choice=event.choice + index * self._choices))

    def _usage(self) -> Usage:
        every = [self._usages[index] for index in range(len(self._turns))]
        return Usage(sum(one.prompt_tokens for one in every), sum(one.cached_tokens for one in every),
                     sum(one.completion_tokens for one in every), sum(one.thinking_tokens for one in every),
                     tuple(figures for one in every for figures in one.figures))

    async def aclose(self) -> None:
        self._ready.clear()
        await self._merged.aclose()
        await asyncio.gather(*(turn.aclose() for turn in self._turns))
