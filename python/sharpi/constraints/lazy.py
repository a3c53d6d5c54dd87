"""Calls that a model may make or not: nothing is forbidden until it begins one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sharpi.constraints.following import Crossings, Following, find_first
from sharpi.constraints.grammar import Grammar, Matcher
from sharpi.constraints.tokens import Tokens, Words

__all__ = ["Lazy"]


class _State(NamedTuple):
    text: bytes  # its end, which may be the beginning of a trigger
    start: bytes | None  # all of the text, while that may still be the beginning of a start
    region: Matcher | None = None
    done: bool = False


class Lazy(Following[_State]):
    """Holds the text to a grammar from a trigger on, until the grammar's end; then it is free again.

    triggers: where one of these appears, its grammar begins with it. starts: the same, but only at the start of the
    text. once: the answer ends with the grammar's end.
    """

    def __init__(self, tokens: Tokens, triggers: Mapping[str, Grammar], starts: Mapping[str, Grammar], *,
                 once: bool) -> None:
        super().__init__(_State(b"", b"" if starts else None))
        self._tokens = tokens
        self._triggers = {text.encode(): grammar for text, grammar in triggers.items()}
        self._starts = {text.encode(): grammar for text, grammar in starts.items()}
        self._once = once
        self._longest = max(map(len, self._triggers), default=1)
        self._crossings = self._crossings_of(self._triggers)
        self._start_crossings = self._crossings_of(self._starts)

    def _crossings_of(self, grammars: Mapping[bytes, Grammar]) -> dict[bytes, Crossings]:
        def crossings(marker: bytes, grammar: Grammar) -> Crossings:
            return Crossings(self._tokens, marker, lambda text: _begun(grammar, marker).accepts(text))

        return {marker: crossings(marker, grammar) for marker, grammar in grammars.items()}

    def fill(self, words: Words) -> bool:
        state = self._state
        if state.region is not None:
            return state.region.fill(words)
        filled = False
        for crossings in self._crossings.values():
            filled = crossings.forbid(words, state.text, filled=filled)
        if state.start is not None:
            for marker, crossings in self._start_crossings.items():
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
        if found := find_first(text, self._triggers, len(state.text)):
            marker, rest = found
            return self._begin(self._triggers[marker], marker, rest), None, 0
        start = None if state.start is None else (state.start + piece).lstrip()
        if start is not None:
            for marker in self._starts:
                if start.startswith(marker):
                    return self._begin(self._starts[marker], marker, start[len(marker):]), None, 0
            if not any(marker.startswith(start) for marker in self._starts):
                start = None
        return _State(text[-self._longest + 1:] if self._longest > 1 else b"", start), None, 0

    def _begin(self, grammar: Grammar, marker: bytes, rest: bytes) -> _State:
        region = _begun(grammar, marker)
        region.accept_text(rest)
        return self._in_region(region)

    def _in_region(self, region: Matcher) -> _State:
        if not region.ended():
            return _State(b"", None, region)
        return _State(b"", None, region if self._once else None, done=self._once)

    def ended(self) -> bool:
        return self._state.done


def _begun(grammar: Grammar, text: bytes) -> Matcher:
    matcher = grammar.start()
    matcher.accept_text(text)
    return matcher
