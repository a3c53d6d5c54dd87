"""What a generation is asked for: a prompt and options, checked and in the core's terms, and how its tokens become
text."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sharpi import _core
from sharpi.errors import InvalidRequestError, ModelFileError
from sharpi.generation import Token
from sharpi.loading.loaded_model import LoadedModel
from sharpi.planning.drafts import choose_drafts, missing_states
from sharpi.settings.arguments import token_ids
from sharpi.settings.generation_options import GenerationOptions, checked_options

if TYPE_CHECKING:
    from sharpi.text.tokenizer import StreamDecoder

__all__ = ["Asked", "TextStream", "asked"]

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class Asked:
    """A prompt, and how to continue it. ends: the answer ends before one of these tokens. drafts: their source, and how
    many at once. decoder: makes text of tokens; `None` for a file without a tokenizer. marks: how many tokens come
    before places where other prompts are likely to differ."""

    ids: list[int]
    params: _core.SamplingParams
    drafts: tuple[str, int]
    max_tokens: int | None
    ends: frozenset[int]
    stop: Sequence[str]
    decoder: StreamDecoder | None
    marks: Sequence[int] = ()


def asked(model: LoadedModel, prompt: str | Sequence[int], options: GenerationOptions,
          marks: Sequence[int] = ()) -> Asked:
    """Raises `InvalidRequestError` for what no generation of the model can be asked."""
    given = checked_options(options)
    _ = model.engine  # raises if the model is closed
    drafts = choose_drafts(given["draft"], given["draft_tokens"], mtp=model.plan.mtp, cost=model.plan.draft_cost)
    if given["draft_tokens"] is not None and (line := missing_states(drafts[1], model.plan)):
        model.tell(line)
    ids = model.tokenize(prompt) if isinstance(prompt, str) else token_ids("prompt", prompt, what="text or token ids")
    _require_prompt(model, ids)
    try:
        decoder, ends = model.tokenizer.stream(after=ids), model.tokenizer.stop_ids
        suppressed = model.tokenizer.suppressed_ids
    except ModelFileError:
        if isinstance(prompt, str) or given["stop"]:
            raise
        # A file without a tokenizer still answers in token ids.
        decoder, ends, suppressed = None, frozenset(), frozenset()
    return Asked(ids, _sampling(model, given, suppressed), drafts, given["max_tokens"], ends, given["stop"], decoder,
                 token_ids("marks", marks, what="numbers of tokens"))


def _sampling(model: LoadedModel, given: Mapping[str, Any], suppressed: frozenset[int]) -> _core.SamplingParams:
    """Raises `InvalidRequestError` for an option that is out of its range."""
    rows = model.spec.vocab_size
    bias = {**(given["logit_bias"] or {}), **{token: -math.inf for token in suppressed if token < rows}}
    params = _core.SamplingParams(**{name: given[name] for name in _SAMPLING}, logit_bias=bias,
                                  seed=secrets.randbits(63) if given["seed"] is None else given["seed"])
    params.validate(rows)
    return params


def _require_prompt(model: LoadedModel, ids: list[int]) -> None:
    """Raises `InvalidRequestError` for a prompt that no session of the model can take."""
    if not ids:
        raise InvalidRequestError("the prompt is empty: give at least one token")
    if len(ids) > model.context:
        raise InvalidRequestError(f"the prompt has {len(ids)} tokens, the context holds {model.context}: shorten it"
                                  " or ask for a larger context")
    if max(ids) >= model.spec.vocab_size:
        raise InvalidRequestError(f"token {max(ids)} is outside the vocabulary of {model.spec.vocab_size}")


class TextStream:
    """Makes tokens with text of token ids. Ends where one of some texts begins, and holds text back while it may still
    become one."""

    def __init__(self, decoder: StreamDecoder | None, stop: Sequence[str]) -> None:
        self._decoder = decoder
        self._stop = stop
        self._held = ""
        self._last: int | None = None
        self.found: str | None = None  # the text that has begun

    @property
    def stopped(self) -> bool:
        """Whether one of the texts has begun: there are no further tokens."""
        return self.found is not None

    def push(self, id: int, logprob: float | None = None, top: tuple[tuple[int, float], ...] = ()) -> Token:
        """The next token with its score, and with the text that can be shown by then."""
        self._last = id
        return Token(id, self._shown(self._decoder.push(id) if self._decoder else ""), logprob, top)

    def flush(self) -> Iterator[Token]:
        """After the last token: the text that was still held, with that token's id and without a score."""
        if self._last is None or self.stopped:
            return
        shown = self._shown(self._decoder.flush() if self._decoder else "")
        rest = shown if self.stopped else shown + self._held
        self._held = ""
        if rest:
            yield Token(self._last, rest)

    def through(self, ids: Iterable[int]) -> Iterator[Token]:
        """Tokens of all these ids, as far as none of the texts begins."""
        for id in ids:
            yield self.push(id)
            if self.stopped:
                return
        yield from self.flush()

    def _shown(self, text: str) -> str:
        if not self._stop:
            return text
        held = self._held + text
        found = min(((at, stop) for stop in self._stop if (at := held.find(stop)) >= 0), default=None)
        if found is not None:
            at, self.found = found
            return held[:at]
        keep = max((self._overlap(held, stop) for stop in self._stop), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """How many of the last characters of `text` begin `stop`."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
