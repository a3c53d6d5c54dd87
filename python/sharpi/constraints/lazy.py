"""Calls that a model may make or not: nothing is forbidden until it begins one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sharpi.constraints.following import Crossings, Following, find_first
from sharpi.constraints.grammar import Grammar, Matcher
from sharpi.constraints.tokens import Tokens, Words

__all__ = ["Lazy", "Triggers"]


class _State(NamedTuple):
    text: bytes  # its end, which may be the beginning of a trigger
    start: bytes | None  # all of the text, while that may still be the beginning of a start
    region: Matcher | None = None
    done: bool = False


class Triggers:
    """Texts with which calls begin, and the grammar from each on. Answers share it."""

    def __init__(self, tokens: Tokens, grammars: Mapping[str, Grammar]) -> None:
        self.grammars = {text.encode(): grammar for text, grammar in grammars.items()}
        self.longest = max(map(len, self.grammars), default=1)
        self.crossings = {marker: self._crossings(tokens, marker) for marker in self.grammars}

    def _crossings(self, tokens: Tokens, marker: bytes) -> Crossings:
        return Crossings(tokens, marker, lambda text: self.begin(marker).accepts(text))

    def begin(self, marker: bytes) -> Matcher:
        """The constraint after this text."""
        matcher = self.grammars[marker].start()
        matcher.accept_text(marker)
        return matcher


class Lazy(Following[_State]):
    """Holds the text to a grammar from a trigger on, until the grammar's end; then it is free again.

    triggers: where one of these appears, its grammar begins with it. starts: the same, but only at the start of the
    text. once: the answer ends with the grammar's end.
    """

    def __init__(self, triggers: Triggers, starts: Triggers, tokens: Tokens, *, once: bool) -> None:
        super().__init__(_State(b"", b"" if starts.grammars else None))
        self._triggers = triggers
        self._starts = starts
        self._tokens = tokens
        self._once = once

    def fill(self, words: Words) -> bool:
        state = self._state
        if state.region is not None:
            return state.region.fill(words)
        filled = False
        for crossings in self._triggers.crossings.values():
            filled = crossings.forbid(words, state.text, filled=filled)
        if state.start is not None:
            for marker, crossings in self._starts.crossings.items():
                if marker.startswith(state.start):
                    filled = crossings.forbid(words, state.start, filled=filled, at_start=True)
        return filled

    def _next(self, token: int) -> tuple[_State, Matcher | None, int]:
        state = self._state
        if state.region is not None:
            state.region.accept(token)
            return self._in_region(state.region), state.region, 1
        piece = self._tokens.piece(token)
        text = state.text + piece
        if found := find_first(text, self._triggers.grammars, len(state.text)):
            marker, rest = found
            return self._begin(self._triggers, marker, rest), None, 0
        start = None if state.start is None else (state.start + piece).lstrip()
        if start is not None:
            for marker in self._starts.grammars:
                if start.startswith(marker):
                    return self._begin(self._starts, marker, start[len(marker):]), None, 0
            if not any(marker.startswith(start) for marker in self._starts.grammars):
                start = None
        return _State(text[max(0, len(text) - self._triggers.longest + 1):], start), None, 0

    def _begin(self, triggers: Triggers, marker: bytes, rest: bytes) -> _State:
        region = triggers.begin(marker)
        region.accept_text(rest)
        return self._in_region(region)

    def _in_region(self, region: Matcher) -> _State:
        if not region.ended():
            return _State(b"", None, region)
        return _State(b"", None, region if self._once else None, done=self._once)

    def matcher(self) -> Matcher | None:
        """The region's, if the answer ends with it."""
        return self._state.region if self._once and not self._state.done else None

    def ended(self) -> bool:
        return self._state.done

