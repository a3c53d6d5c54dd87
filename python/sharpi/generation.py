"""`Generation`: the tokens of one answer as they come, and what they cost."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

__all__ = ["Generation", "Meter", "Stream", "Timing", "Token"]

T = TypeVar("T")
S = TypeVar("S", bound="Stream[Any]")


@dataclass(frozen=True)
class Token:
    """A generated token. `text` has whole characters only, and is empty while a character is incomplete.

    With scores, `logprob` is the natural logarithm of the probability that the model itself gives the token, before
    constraint, biases, penalties and temperature, and `top` has the likeliest tokens with theirs, the likeliest first.
    """

    id: int
    text: str
    logprob: float | None = field(default=None, repr=False)
    top: tuple[tuple[int, float], ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Timing:
    """What a generation has cost so far. steps: passes of the model after the prompt's. drafted_tokens: tokens guessed
    for these steps. accepted_tokens: those that the model would have chosen anyway.

    The seconds are those of the passes in which the text had part, alone or with others. The prompt's pass also gives
    the first token, whose time counts as the prompt's. generation_seconds is the time of the later steps, and
    decoded_tokens counts the tokens that came from them, including an end token, which takes a step like any other.
    context_full: a full context ended the answer, and not the model or a limit.
    """

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    generated_tokens: int = 0
    generation_seconds: float = 0.0
    reused_tokens: int = 0
    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    decoded_tokens: int = 0
    context_full: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As `Model.stats` has it. A rate is `None` if there is nothing to take it of."""
        def rate(tokens: int, seconds: float) -> float | None:
            return tokens / seconds if tokens and seconds > 0 else None

        return {
            "prompt_tokens": self.prompt_tokens,
            "prompt_seconds": self.prompt_seconds,
            "prompt_tokens_per_second": rate(self.prompt_tokens, self.prompt_seconds),
            "generated_tokens": self.generated_tokens,
            "generation_seconds": self.generation_seconds,
            "generation_tokens_per_second": rate(self.decoded_tokens, self.generation_seconds),
            "reused_tokens": self.reused_tokens,
            "steps": self.steps,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "acceptance_rate": self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None,
            "decoded_tokens": self.decoded_tokens,
            "context_full": self.context_full,
        }


class Meter:
    """Holds what a generation has cost so far. The figures are replaced as a whole, so any thread may read them."""

    __slots__ = ("timing",)

    def __init__(self, timing: Timing) -> None:
        self.timing = timing


class Stream(Iterator[T]):
    """What a generator makes, until its reader closes it.

    The work stops when `close` is called, from any thread, at the end of a `with` block, and when the object is
    dropped.
    """

    def __init__(self, items: Generator[T, None, None]) -> None:
        self._items = items
        self._closed = False

    def __iter__(self: S) -> S:
        return self

    def __next__(self) -> T:
        if self._closed:
            self.close()
            raise StopIteration
        return next(self._items)

    def close(self) -> None:
        """Stops the work; asking for more then ends at once. A thread that is just asking for an item still gets it."""
        self._closed = True
        try:
            self._items.close()
        except ValueError:
            pass  # another thread runs the generator: it is closed when that thread asks again

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


class Generation(Stream[Token]):
    """An answer that is being generated: iterate over its tokens.

    The prompt is evaluated when the first token is asked for. `Stream` says what stops the work.
    """

    def __init__(self, tokens: Generator[Token, None, None], meter: Meter) -> None:
        super().__init__(tokens)
        self._meter = meter

    @property
    def timing(self) -> Timing:
        """What this generation has cost so far, whatever other sessions do; any thread may ask."""
        return self._meter.timing

    def __repr__(self) -> str:
        return f"<Generation, {self.timing.generated_tokens:,} tokens so far>"

    def stats(self) -> dict[str, Any]:
        """Counts and speeds so far, under the names that `Model.stats` has for them."""
        return self.timing.to_dict()
