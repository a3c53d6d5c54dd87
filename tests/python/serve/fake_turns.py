"""A server whose answers are written beforehand, for tests of what the APIs read and write."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

from sharpi.loading.description import BUNDLED_MODEL
from sharpi.serve.errors import ApiError
from sharpi.serve.server import Card, OpenTurn
from sharpi.serve.turns import CallArguments, CallBegun, Ended, Event, Said, Thought, Turn, Usage

FIGURES = {"queued_seconds": 0.25, "first_token_seconds": 0.75, "seconds": 1.75, "tokens": 5}
USAGE = Usage(prompt_tokens=12, cached_tokens=8, completion_tokens=5, thinking_tokens=2, figures=(FIGURES,))
HELLO: tuple[Event, ...] = (Said(0, "Hel"), Said(0, "lo."), Ended(0, "stop"), USAGE)
THINKING: tuple[Event, ...] = (Thought(0, "Hm"), Thought(0, "m."), *HELLO)
CALLS: tuple[Event, ...] = (
    Said(0, "Let me look."), CallBegun(0, 0, "call_a", "weather"), CallArguments(0, 0, '{"city": "Ber'),
    CallArguments(0, 0, 'lin"}'), CallBegun(0, 1, "call_b", "now"), CallArguments(0, 1, "{}"), Ended(0, "tool_calls"),
    USAGE)

Step: TypeAlias = "Event | Exception | float"
"""What a fake turn does next: gives the event, raises the error, or waits for that many seconds."""


class FakeTurn(OpenTurn):
    """Plays its steps."""

    computed_tokens = 0
    answer_tokens = 0  # one for each event
    cached_tokens = 0  # until the first event

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = list(steps)
        usage = next((step for step in steps if isinstance(step, Usage)), USAGE)
        self.prompt_tokens = usage.prompt_tokens
        self.computed_tokens = usage.prompt_tokens
        self._cached = usage.cached_tokens
        self.closed = False

    def ready(self) -> Event | None:
        if self.closed or not self._steps or isinstance(self._steps[0], (float, Exception)):
            return None
        self.cached_tokens = self._cached
        self.answer_tokens += 1
        step = self._steps.pop(0)
        assert not isinstance(step, (float, Exception))
        return step

    async def more(self) -> bool:
        if self.closed or not self._steps:
            return False
        step = self._steps[0]
        if isinstance(step, (float, Exception)):
            self._steps.pop(0)
        if isinstance(step, Exception):
            raise step
        if isinstance(step, float):
            await asyncio.sleep(step)
        return True

    async def aclose(self) -> None:
        self.closed = True


class FakeRunner:
    """Keeps the turns it is asked for in `turns`, and answers each with `steps`. `refusal`: what `open` raises."""

    def __init__(self, steps: Sequence[Step] = HELLO) -> None:
        self.steps = steps
        self.refusal: ApiError | None = None
        self.turns: list[Turn] = []
        self.opened: list[FakeTurn] = []

    async def open(self, turn: Turn) -> FakeTurn:
        self.turns.append(turn)
        if self.refusal is not None:
            raise self.refusal
        self.opened.append(FakeTurn(self.steps))
        return self.opened[-1]

    async def count(self, turn: Turn) -> int:
        self.turns.append(turn)
        return 42

    @property
    def turn(self) -> Turn:
        """The only turn that was asked for."""
        [turn] = self.turns
        return turn


class FakeServer:
    """A `Server` with one model, called "toy". It is its own store."""

    def __init__(self, steps: Sequence[Step] = HELLO, model: Any = None) -> None:
        self.runner = FakeRunner(steps)
        self.store = self
        self.path = BUNDLED_MODEL
        self._lease = SimpleNamespace(name="toy", model=model, runner=self.runner)

    def names(self) -> list[str]:
        return ["toy"]

    def card(self, name: str) -> Card:
        return Card(name, self.path, loaded=True)

    @contextlib.asynccontextmanager
    async def lease(self, name: str | None) -> AsyncIterator[Any]:
        if name not in (None, "toy"):
            raise ApiError(404, "not_found_error", f"there is no such name: {name}", param="model",
                           code="model_not_found")
        yield self._lease
