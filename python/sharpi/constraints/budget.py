"""Constraints that count tokens, and several constraints as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sharpi.constraints import Constraint
from sharpi.constraints.following import Following, allow_all, find_first, matcher_of, partly_at_end
from sharpi.constraints.grammar import Matcher
from sharpi.constraints.tokens import Tokens, Words, allows, empty
from sharpi.errors import InvalidRequestError

__all__ = ["All", "Either", "LeastTokens", "ThinkingBudget"]


class All:
    """What every one of the constraints allows. The answer is complete as soon as one of them says so."""

    def __init__(self, constraints: Sequence[Constraint]) -> None:
        self._constraints = tuple(constraints)
        self._scratch: Words = np.zeros(0, np.uint32)

    def fill(self, words: Words) -> bool:
        if len(self._scratch) != len(words):
            self._scratch = np.zeros(len(words), np.uint32)
        filled = False
        for constraint in self._constraints:
            if not filled:
                filled = constraint.fill(words)
            elif constraint.fill(self._scratch):
                words &= self._scratch
        if filled and empty(words):
            raise InvalidRequestError("the answer's constraints contradict each other: no token may come next")
        return filled

    def accept(self, token: int) -> None:
        for constraint in self._constraints:
            constraint.accept(token)

    def rollback(self, tokens: int) -> None:
        for constraint in self._constraints:
            constraint.rollback(tokens)

    def ended(self) -> bool:
        return any(constraint.ended() for constraint in self._constraints)


class LeastTokens:
    """No end token comes before the answer has this number of tokens."""

    def __init__(self, tokens: Tokens, least: int) -> None:
        self._tokens = tokens
        self._missing = least

    def fill(self, words: Words) -> bool:
        if self._missing <= 0:
            return False
        allow_all(words, self._tokens)
        words[:self._tokens.width] &= ~self._tokens.ends
        return True

    def accept(self, token: int) -> None:
        self._missing -= 1

    def rollback(self, tokens: int) -> None:
        self._missing += tokens

    def ended(self) -> bool:
        return False


class _Thinking(NamedTuple):
    inside: bool
    tail: bytes
    used: int


class ThinkingBudget(Following[_Thinking]):
    """After this number of tokens of reasoning its closing mark must come.

    openings, closing: the marks around reasoning. inside: the answer begins inside of it.
    """

    def __init__(self, tokens: Tokens, budget: int, openings: Sequence[str], closing: str, *, inside: bool) -> None:
        super().__init__(_Thinking(inside, b"", 0))
        self._tokens = tokens
        self._budget = budget
        self._openings = tuple(opening.encode() for opening in openings)
        self._closing = closing.encode()
        self._longest = max(map(len, (self._closing, *self._openings)))

    def fill(self, words: Words) -> bool:
        inside, tail, used = self._state
        if not inside or used < self._budget:
            return False
        begun = next(iter(partly_at_end(tail, self._closing)), 0)
        ids = self._tokens.encode(self._closing[begun:])
        if not ids:
            return False
        words[:] = 0
        words[ids[0] >> 5] = np.uint32(1 << (ids[0] & 31))
        return True

    def _next(self, token: int) -> tuple[_Thinking, None, int]:
        inside, tail, used = self._state
        text = tail + self._tokens.piece(token)
        known = len(tail)
        used += inside
        while found := find_first(text, (self._closing,) if inside else self._openings, known):
            inside, text, known = not inside, found[1], 0
        return _Thinking(inside, text[-self._longest + 1:], used), None, 0


class Either:
    """What one of two constraints allows, until the answer tells which of them it follows."""

    def __init__(self, tokens: Tokens, first: Constraint, second: Constraint) -> None:
        self._both = (first, second)
        self._lives = (True, True)
        self._past: list[tuple[bool, bool]] = []
        self._own: Words = np.zeros(tokens.width, np.uint32)

    def _living(self) -> list[Constraint]:
        return [constraint for constraint, lives in zip(self._both, self._lives, strict=True) if lives]

    def fill(self, words: Words) -> bool:
        first, *others = self._living()
        if not first.fill(words):
            return False
        if others:
            if not others[0].fill(self._own):
                return False
            words[:len(self._own)] |= self._own
        return True

    def accept(self, token: int) -> None:
        self._past.append(self._lives)
        if all(self._lives):
            first, second = (not constraint.fill(self._own) or allows(self._own, token) for constraint in self._both)
            self._lives = (first, second)
        for constraint in self._living():
            constraint.accept(token)

    def rollback(self, tokens: int) -> None:
        for _ in range(tokens):
            for constraint in self._living():
                constraint.rollback(1)
            self._lives = self._past.pop()

    def ended(self) -> bool:
        return any(constraint.ended() for constraint in self._living())

    def matcher(self) -> Matcher | None:
        """That of the constraint which the answer follows."""
        living = self._living()
        return matcher_of(living[0]) if len(living) == 1 else None
