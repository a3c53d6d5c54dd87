"""Log-probabilities of an answer's tokens, given out with the text that the tokens made."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sharpi.generation import Token
from sharpi.scheduler import PromptScores
from sharpi.serve.turns import Score
from sharpi.text.tokenizer import StreamDecoder, Tokenizer

__all__ = ["ScoreQueue", "Scorer", "score"]


def score(tokenizer: Tokenizer, token: int, logprob: float | None, top: Sequence[tuple[int, float]]) -> Score:
    """The score of a token, and those of the likeliest ones."""
    def named(id: int, value: float | None) -> Score:
        raw = tokenizer.token_bytes(id)
        return Score(id, raw.decode("utf-8", "replace"), raw, value)

    one = named(token, logprob)
    return Score(one.id, one.text, one.bytes, logprob, tuple(named(id, value) for id, value in top))


class ScoreQueue:
    """Holds scores back until the texts of their tokens are shown. Those that a stop text cut off never are.

    A token without a text of its own counts as shown when the next character is: most only begin one.
    """

    def __init__(self, decoder: StreamDecoder) -> None:
        """decoder: one of the answer's own, which is used up."""
        self._decoder = decoder
        self._held: deque[tuple[int, Score]] = deque()  # how much text must be shown, and the score
        self._unfinished: list[Score] = []  # without a text so far
        self._written = 0
        self._shown = 0

    def push(self, made: Score) -> None:
        """The next token's."""
        text = self._decoder.push(made.id)
        if not text:
            self._unfinished.append(made)
            return
        self._held.extend((self._written + 1, earlier) for earlier in self._unfinished)
        self._unfinished.clear()
        self._written += len(text)
        self._held.append((self._written, made))

    def shown(self, text: str) -> tuple[Score, ...]:
        """What belongs to the next text that is shown."""
        self._shown += len(text)
        ready: list[Score] = []
        while self._held and self._held[0][0] <= self._shown:
            ready.append(self._held.popleft()[1])
        return tuple(ready)

    def rest(self) -> tuple[Score, ...]:
        """At the end of an answer that no stop text cut: all that are left."""
        left = (*(made for _, made in self._held), *self._unfinished)
        self._held.clear()
        self._unfinished.clear()
        return left


class Scorer:
    """Makes the scores of one answer."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._queue = ScoreQueue(tokenizer.stream(after=prompt))

    def of_prompt(self, scores: PromptScores | None) -> tuple[Score, ...]:
        """Those of the prompt's tokens, if the answer has them."""
        return tuple(score(self._tokenizer, token, logprob, top)
                     for token, (logprob, top) in zip(self._prompt, scores or (), strict=False))

    def shown(self, token: Token) -> tuple[Score, ...]:
        """What belongs to the text of the answer's next token."""
        if token.logprob is not None:
            self._queue.push(score(self._tokenizer, token.id, token.logprob, token.top))
        return self._queue.shown(token.text)

    def rest(self) -> tuple[Score, ...]:
        """At the end of an answer that no stop text cut."""
        return self._queue.rest()
