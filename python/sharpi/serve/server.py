"""What the APIs share: the models, the settings, and how a turn is run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sharpi.loading.loaded_model import LoadedModel
from sharpi.serve.turns import Event, Turn

__all__ = ["Card", "Lease", "OpenTurn", "Runner", "Server", "Store"]


class OpenTurn(Protocol):
    """A turn that is being answered. Close it to give up what is left; at its end it is closed.

    Whoever streams it calls `ready` and `more`, so that a token passes as few coroutines as possible."""

    prompt_tokens: int

    @property
    def cached_tokens(self) -> int:
        """The prompt's tokens that the cache had; 0 until that is known, which it is with the first event."""

    @property
    def computed_tokens(self) -> int:
        """How far the prompt has come."""

    @property
    def answer_tokens(self) -> int:
        """The tokens of its answers so far."""

    def ready(self) -> Event | None:
        """The next event, if it is there."""

    async def more(self) -> bool:
        """Waits until `ready` may have an event. Returns `False` if there are no further ones."""

    async def aclose(self) -> None: ...

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while (event := self.ready()) is None:
            if not await self.more():
                raise StopAsyncIteration
        return event


class Runner(Protocol):
    """Answers turns with one loaded model."""

    async def open(self, turn: Turn) -> OpenTurn:
        """Checks the turn and hands it to the scheduler. Raises `ApiError` for all that can be known before the first
        token: a prompt beyond the context, options out of range, a template that refuses, a full queue."""

    async def count(self, turn: Turn) -> int:
        """The tokens of the prompt that `open` would compute. Nothing is computed, and the prompt may be longer than
        the context."""


class Lease(Protocol):
    """A model that stays loaded while the lease lasts."""

    name: str
    model: LoadedModel
    runner: Runner


@dataclass(frozen=True)
class Card:
    """What is known of a model that need not be loaded. path: its file, the first of several. loaded: whether it is
    loaded now."""

    name: str
    path: Path
    loaded: bool


class Store(Protocol):
    """The models of a server by name."""

    def names(self) -> list[str]: ...

    def card(self, name: str) -> Card:
        """Of one of `names()`. The file may be gone."""

    def lease(self, name: str | None) -> AbstractAsyncContextManager[Lease]:
        """Loads the model first if it is not; `None` is the server's first. Raises `ApiError` 404 for a name that the
        server does not have, and 503 while it is ending."""


class Server(Protocol):
    store: Store
