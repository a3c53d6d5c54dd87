"""A runner that counts what turns cost, around the one that runs them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sharpi.serve.server import OpenTurn, Runner
from sharpi.serve.turns import Event, Turn, Usage

__all__ = ["MeasuredRunner"]

_log = logging.getLogger(__name__)


class MeasuredRunner:
    """A `Runner` (see server.py)."""

    def __init__(self, runner: Runner, record: Callable[[Usage], None], log_prompts: bool = False) -> None:
        """record: is given what each turn has cost. log_prompts: the log holds what is asked and answered."""
        self._runner = runner
        self._record = record
        self._log_prompts = log_prompts

    async def open(self, turn: Turn) -> OpenTurn:
        if self._log_prompts:
            _log.info("asked: %r", turn.messages if turn.prompt is None else turn.prompt)
        opened = await self._runner.open(turn)
        return _MeasuredTurn(opened, self._record, self._log_prompts)

    async def count(self, turn: Turn) -> int:
        return await self._runner.count(turn)

    def close(self) -> None:
        """Closes the runner, if it can be closed."""
        end = getattr(self._runner, "close", None)
        if end is not None:
            end()


class _MeasuredTurn(OpenTurn):
    """An `OpenTurn` whose events are looked at on their way."""

    def __init__(self, turn: OpenTurn, record: Callable[[Usage], None], log_events: bool) -> None:
        self._turn = turn
        self.prompt_tokens = turn.prompt_tokens
        self._record = record
        self._log_events = log_events

    def ready(self) -> Event | None:
        event = self._turn.ready()
        if isinstance(event, Usage):
            self._record(event)
        if self._log_events and event is not None:
            _log.info("answered: %r", event)
        return event

    async def more(self) -> bool:
        return await self._turn.more()

    async def aclose(self) -> None:
        await self._turn.aclose()

    @property
    def cached_tokens(self) -> int:
        return self._turn.cached_tokens

    @property
    def computed_tokens(self) -> int:
        return self._turn.computed_tokens

    @property
    def answer_tokens(self) -> int:
        return self._turn.answer_tokens
