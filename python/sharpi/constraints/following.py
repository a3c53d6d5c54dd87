"""What constraints that watch an answer's text have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from sharpi.constraints import Constraint
from sharpi.constraints.grammar import Matcher
from sharpi.constraints.tokens import Tokens, Words

__all__ = ["Crossings", "Following", "allow_all", "find_first", "matcher_of", "partly_at_end"]

State = TypeVar("State")


class Following(ABC, Generic[State]):
    """Keeps the state before each token, so that a rollback is exact. A state is immutable; what is not (another
    constraint that accepted tokens) is rolled back in its turn."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._past: list[tuple[State, Constraint | None, int]] = []

    @abstractmethod
    def _next(self, token: int) -> tuple[State, Constraint | None, int]:
        """The state after `token`, and which constraint accepted how many tokens for it."""

    def accept(self, token: int) -> None:
        state, touched, accepted = self._next(token)
        self._past.append((self._state, touched, accepted))
        self._state = state

    def rollback(self, tokens: int) -> None:
        for _ in range(tokens):
            self._state, touched, accepted = self._past.pop()
            if touched is not None:
                touched.rollback(accepted)

    def ended(self) -> bool:
        return False


def matcher_of(constraint: Constraint) -> Matcher | None:
    """The matcher that alone decides from here on, if there is one."""
    find = getattr(constraint, "matcher", None)
    return None if find is None else find()


def find_first(text: bytes, markers: Iterable[bytes], known: int) -> tuple[bytes, bytes] | None:
    """The marker that ends first in `text`, behind its first `known` bytes, and the text after it."""
    found = [(end, marker) for marker in markers
             if (end := text.find(marker, max(0, known - len(marker) + 1)) + len(marker)) >= len(marker)]
    if not found:
        return None
    end, marker = min(found)
    return marker, text[end:]


def partly_at_end(text: bytes, marker: bytes) -> list[int]:
    """How much of the marker the text may end with: every number of bytes that is possible, the largest first."""
    return [size for size in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:size])]


def allow_all(words: Words, tokens: Tokens) -> None:
    words[:tokens.width] = 0xFFFFFFFF
    words[tokens.width:] = 0


class Crossings:
    """Tokens that complete a marker and go on with text that may not follow it. They are forbidden where they would do
    so: the constraint begins behind the marker, and could not take back such text."""

    def __init__(self, tokens: Tokens, marker: bytes, may_follow: Callable[[bytes], bool]) -> None:
        self._tokens = tokens
        self._marker = marker
        self._may_follow = may_follow
        self._allowed: dict[int, Words | None] = {}
        tokens.going_on_after(marker)  # which is slow: not while a step waits for a mask

    def forbid(self, words: Words, text: bytes, *, filled: bool, at_start: bool = False) -> bool:
        """Forbids them after `text`. filled: the words count already. at_start: only the whole text may begin the
        marker. Returns whether the words count now."""
        sizes = [len(text)] if at_start and len(text) < len(self._marker) else partly_at_end(text, self._marker)
        for size in sizes if at_start else [*sizes, 0]:
            if size not in self._allowed:
                self._allowed[size] = self._find(size, at_start)
            allowed = self._allowed[size]
            if allowed is None:
                continue
            if not filled:
                allow_all(words, self._tokens)
                filled = True
            words[:self._tokens.width] &= allowed
        return filled

    def _find(self, size: int, at_start: bool) -> Words | None:
        """The tokens that may follow the marker's first `size` bytes; `None`: all."""
        rest = self._marker[size:]
        if size or at_start:
            found = [(token, self._tokens.piece(token)[len(rest):]) for token in self._tokens.beginning_with(rest)]
        else:
            found = self._tokens.going_on_after(rest)
        verdicts = {text: self._may_follow(text) for text in {text for _, text in found}}
        bad = [token for token, text in found if not verdicts[text]]
        return ~self._tokens.mask(bad) if bad else None
