"""Constraints that hold for an answer, and not for the reasoning before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from sharpi.constraints import Constraint
from sharpi.constraints.following import Crossings, Following, allow_all, find_first, matcher_of
from sharpi.constraints.grammar import Matcher
from sharpi.constraints.tokens import Tokens, Words, allows

__all__ = ["AfterThinking", "Begins"]

# Whether an answer begins inside reasoning (which the prompt opened), outside of it, or either may be.
Begins = Literal["inside", "outside", "either"]

_SPACES = 4  # tokens of white space between reasoning and answer
_Phase = Literal["start", "thinking", "between", "answer"]


class _State(NamedTuple):
    phase: _Phase
    text: bytes  # at the start: all of it; when thinking: its end
    inner: Constraint
    inner_lives: bool
    spaces: int


class AfterThinking(Following[_State]):
    """Holds an answer to a constraint from the first token after the reasoning and the white space behind it.

    make: a constraint for the answer alone. openings, closing: the marks around reasoning. compulsory: no end token may
    come in the reasoning, since an answer must follow.
    """

    def __init__(self, tokens: Tokens, make: Callable[[], Constraint], openings: Sequence[str], closing: str, *,
                 begins: Begins, compulsory: bool) -> None:
        phases: dict[Begins, _Phase] = {"inside": "thinking", "outside": "answer", "either": "start"}
        super().__init__(_State(phases[begins], b"", make(), True, 0))
        self._tokens = tokens
        self._make = make
        self._openings = tuple(opening.encode() for opening in openings)
        self._closing = closing.encode()
        self._compulsory = compulsory
        self._crossings = Crossings(tokens, self._closing, lambda text: not text.strip())
        self._scratch: Words = np.zeros(tokens.width, np.uint32)
        self._opening_masks: dict[bytes, Words] = {}

    def fill(self, words: Words) -> bool:
        state = self._state
        if state.phase == "answer":
            return state.inner.fill(words)
        if state.phase == "thinking":
            if self._compulsory:
                allow_all(words, self._tokens)
                words[:self._tokens.width] &= ~self._tokens.ends
            return self._crossings.forbid(words, state.text, filled=self._compulsory)
        words[:] = 0
        if state.inner_lives and not state.inner.fill(words):
            return False
        if state.phase == "start":
            words[:self._tokens.width] |= self._opening_mask(state.text)
        elif state.spaces < _SPACES:
            words[:self._tokens.width] |= self._tokens.spaces
        return True

    def _opening_mask(self, text: bytes) -> Words:
        """The tokens with which a mark that begins with `text` goes on."""
        if text not in self._opening_masks:
            rests = [opening[len(text):] for opening in self._openings if opening.startswith(text)]
            ids = [token for rest in rests for token in self._tokens.beginning_with(rest)]
            ids += [token for rest in rests for token in self._tokens.begun_by(rest)]
            self._opening_masks[text] = self._tokens.mask(ids)
        return self._opening_masks[text]

    def _next(self, token: int) -> tuple[_State, Constraint | None, int]:
        state = self._state
        if state.phase == "answer":
            state.inner.accept(token)
            return state, state.inner, 1
        piece = self._tokens.piece(token)
        if state.phase == "thinking":
            return self._think(state, state.text, piece), None, 0
        if state.phase == "start":
            return self._start(state, token, piece)
        if state.spaces < _SPACES and piece and not piece.strip():
            return state._replace(spaces=state.spaces + 1), None, 0
        state.inner.accept(token)
        return state._replace(phase="answer", text=b""), state.inner, 1

    def _think(self, state: _State, tail: bytes, piece: bytes) -> _State:
        text = tail + piece
        if find_first(text, (self._closing,), len(tail)):
            return state._replace(phase="between", text=b"")
        return state._replace(phase="thinking", text=text[-len(self._closing) + 1:])

    def _start(self, state: _State, token: int, piece: bytes) -> tuple[_State, Constraint | None, int]:
        text = state.text + piece
        opened = next((opening for opening in self._openings if text.startswith(opening)), None)
        if piece and opened is not None:
            fresh = _State("thinking", b"", self._make(), True, 0)
            return self._think(fresh, b"", text[len(opened):]), None, 0
        lives = state.inner_lives and self._allowed(state.inner, token)
        may_open = bool(piece) and any(opening.startswith(text) for opening in self._openings)
        if lives or not may_open:
            state.inner.accept(token)
        accepted = state.inner if lives or not may_open else None
        return (state._replace(phase="start" if may_open else "answer", text=text if may_open else b"",
                               inner_lives=lives or not may_open), accepted, int(accepted is not None))

    def _allowed(self, inner: Constraint, token: int) -> bool:
        return not inner.fill(self._scratch) or allows(self._scratch, token)

    def matcher(self) -> Matcher | None:
        """The answer's, once it has begun."""
        return matcher_of(self._state.inner) if self._state.phase == "answer" else None

    def ended(self) -> bool:
        return self._state.phase == "answer" and self._state.inner.ended()
