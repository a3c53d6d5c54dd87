"""A conversation with a model: what it holds of the text so far, and the tokens that continue it.

The core chooses tokens; here they become text, end where a text or a token ends them, and are timed and counted.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from sharpi import _core
from sharpi.drafts import choose_drafts, missing_states
from sharpi.errors import InvalidRequestError, ModelFileError

if TYPE_CHECKING:
    from sharpi.model import Model

__all__ = ["Session", "Timing", "Token", "as_ids"]


@dataclass(frozen=True)
class Token:
    """A generated token. `text` holds whole characters only: it is empty while a character is incomplete."""

    id: int
    text: str


class Session:
    """A conversation: what was evaluated stays in the KV cache, and the next prompt reuses what it shares with it."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._core = _core.Session(model.engine)
        self._turn = 0  # which generation the core session is at

    @property
    def tokens(self) -> list[int]:
        """The tokens in the KV cache, in order."""
        return self._core.tokens

    def reset(self) -> None:
        """Forgets all tokens; a generation that is under way cannot go on."""
        self._turn += 1
        self._core.reset()

    def generate(self, prompt: str | Sequence[int], *, max_tokens: int | None = None, temperature: float = 0.8,
                 top_k: int = 40, top_p: float = 0.95, min_p: float = 0.05, repetition_penalty: float = 1.0,
                 presence_penalty: float = 0.0, frequency_penalty: float = 0.0,
                 logit_bias: Mapping[int, float] | None = None, seed: int | None = None,
                 stop: str | Sequence[str] = (), draft: str | None = None,
                 draft_tokens: int | None = None) -> Iterator[Token]:
        """Yields tokens that continue `prompt` (the whole conversation so far, as text or token ids).

        Ends at `max_tokens` (`None`: no limit), at an end token of the model, where one of the `stop` texts begins,
        or when the context is full. temperature 0 always takes the most likely token; the same seed gives the same
        text. Closing the iterator stops the work. Raises `InvalidRequestError` before the first token.

        draft: who guesses tokens for the model to judge several in one step: "mtp", the model's prediction layer;
        "ngram", what followed the last few tokens earlier in the text; "off". `None` is "mtp" where a prediction layer
        is loaded and the plan expects it to pay, else "off". draft_tokens: how many are guessed at once at most, 1 to 7 (1 for "mtp", 4 for "ngram");
        with recurrent layers no more than there is room for states, which `Model.load`'s `sequences` says, less two.
        The text is the same with each.
        """
        model = self._model
        if max_tokens is not None and max_tokens < 0:
            raise InvalidRequestError(f"max_tokens must be 0 or more, not {max_tokens}")
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if any(not text for text in stop):
            raise InvalidRequestError("a stop text is empty")
        if seed is not None and not 0 <= seed < 2**64:
            raise InvalidRequestError(f"the seed must be 0 to 2^64 - 1, not {seed}")
        drafts = choose_drafts(draft, draft_tokens, mtp=model.plan.mtp, cost=model.plan.draft_cost)
        if draft_tokens is not None and (line := missing_states(drafts[1], model.plan)):
            model.tell(line)
        ids = model.tokenize(prompt) if isinstance(prompt, str) else as_ids(prompt)
        if not ids:
            raise InvalidRequestError("the prompt is empty: give at least one token")
        try:
            params = _core.SamplingParams(
                temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
                presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
                logit_bias=dict(logit_bias or {}),
                seed=secrets.randbits(63) if seed is None else seed)
        except TypeError:
            raise InvalidRequestError("a sampling option has the wrong type or is too large") from None
        try:
            decoder, ends = model.tokenizer.stream(after=ids), model.tokenizer.stop_ids
        except ModelFileError:
            if isinstance(prompt, str) or stop:
                raise
            decoder, ends = None, frozenset()  # a file without a tokenizer still answers in token ids
        timing = model.timing = Timing()
        started = time.perf_counter()
        self._turn += 1
        turn = self._turn
        self._core.start(ids, params, *drafts)
        timing.prompt_seconds = time.perf_counter() - started
        timing.reused_tokens = self._core.reused_tokens
        timing.prompt_tokens = len(ids) - timing.reused_tokens
        yield from _StopFilter(stop).through(self._tokens(turn, max_tokens, ends, decoder, timing))

    def _tokens(self, turn: int, max_tokens: int | None, ends: frozenset[int], decoder: Any,
                timing: Timing) -> Iterator[Token]:
        last = None
        while max_tokens is None or timing.generated_tokens < max_tokens:
            if turn != self._turn:
                raise InvalidRequestError("the session was used for something else: this generation cannot go on")
            started = time.perf_counter()
            token = self._core.next()
            timing.generation_seconds += time.perf_counter() - started
            timing.steps, timing.drafted_tokens, timing.accepted_tokens = self._core.draft_counts
            if token is None or token in ends:
                break
            timing.generated_tokens += 1
            last = token
            yield Token(token, decoder.push(token) if decoder else "")
        rest = decoder.flush() if decoder else ""
        if rest and last is not None:
            yield Token(last, rest)


@dataclass
class Timing:
    """Of the last generation. steps: passes of the model after the prompt's; drafted_tokens and accepted_tokens: what
    was guessed for them, and what of it the model would have chosen anyway."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    generated_tokens: int = 0
    generation_seconds: float = 0.0
    reused_tokens: int = 0
    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As `Model.stats` has it; acceptance_rate is `None` where nothing was drafted."""
        def rate(tokens: int, seconds: float) -> float:
            return tokens / seconds if seconds > 0 else 0.0

        return {
            "prompt_tokens": self.prompt_tokens,
            "prompt_seconds": self.prompt_seconds,
            "prompt_tokens_per_second": rate(self.prompt_tokens, self.prompt_seconds),
            "generated_tokens": self.generated_tokens,
            "generation_seconds": self.generation_seconds,
            "generation_tokens_per_second": rate(self.generated_tokens, self.generation_seconds),
            "reused_tokens": self.reused_tokens,
            "steps": self.steps,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "acceptance_rate": self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None,
        }


class _StopFilter:
    """Ends a stream where one of some texts begins, holding text back while it may still become one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop

    def through(self, tokens: Iterator[Token]) -> Iterator[Token]:
        held, last = "", None
        for token in tokens:
            held, last = held + token.text, token.id
            found = min((at for text in self._stop if (at := held.find(text)) >= 0), default=-1)
            if found >= 0:
                yield Token(token.id, held[:found])
                return
            keep = max((self._overlap(held, text) for text in self._stop), default=0)
            yield Token(token.id, held[: len(held) - keep])
            held = held[len(held) - keep :]
        if held and last is not None:
            yield Token(last, held)

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """How many of the last characters of `text` begin `stop`."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)


def as_ids(tokens: Sequence[int]) -> list[int]:
    """Token ids as the core takes them. Raises `InvalidRequestError` for anything else."""
    try:
        ids = np.asarray(tokens)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < 2**31:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequestError("tokens must be a sequence of token ids, 0 to 2^31 - 1") from None
    return [int(i) for i in ids]
