"""A conversation with a model: what it holds of the text so far, and the tokens that continue it.

The core chooses tokens. Here they become text, are counted and timed, and end at an end token or a stop text.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sharpi import _core
from sharpi.errors import InvalidRequestError, ModelFileError
from sharpi.generation import Generation, Meter, Timing, Token
from sharpi.loading.loaded_model import LoadedModel
from sharpi.planning.drafts import choose_drafts, missing_states
from sharpi.reply import Message, Reply, checked_messages, render_prompt, require_template
from sharpi.settings.arguments import flag, maybe, token_ids
from sharpi.settings.generation_options import GenerationOptions, checked_options, takes_generation_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sharpi.text.tokenizer import StreamDecoder

__all__ = ["Session"]

_log = logging.getLogger(__name__)

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class Session:
    """A conversation: what was evaluated stays in the KV cache, and the next prompt reuses what it shares with it."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._core = _core.Session(model.engine)
        self._lock = threading.RLock()  # from a look at the turn to what is done in it
        self._turn = 0  # which generation the core session is at

    def __repr__(self) -> str:
        return f"<Session of {self._model!r}>"

    @property
    def tokens(self) -> list[int]:
        """The tokens in the KV cache, in order."""
        return self._core.tokens

    def reset(self) -> None:
        """Forgets all tokens. A generation that has begun cannot continue."""
        with self._lock:
            self._turn += 1
            self._core.reset()

    @takes_generation_options
    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]) -> Generation:
        """Continues `prompt`: the whole conversation so far, as text or as token ids.

        The tokens end at `max_tokens`, at an end token of the model, before a `stop` text, or when the context is full.
        `GenerationOptions` says what the options mean. Raises `InvalidRequestError` at the call.
        """
        model, given = self._model, checked_options(options)
        _ = model.engine  # raises if the model is closed
        drafts = choose_drafts(given["draft"], given["draft_tokens"], mtp=model.plan.mtp, cost=model.plan.draft_cost)
        if given["draft_tokens"] is not None and (line := missing_states(drafts[1], model.plan)):
            model.tell(line)
        ids = (model.tokenize(prompt) if isinstance(prompt, str)
               else token_ids("prompt", prompt, what="text or token ids"))
        self._require_prompt(ids)
        try:
            decoder, ends = model.tokenizer.stream(after=ids), model.tokenizer.stop_ids
            suppressed = model.tokenizer.suppressed_ids
        except ModelFileError:
            if isinstance(prompt, str) or given["stop"]:
                raise
            # A file without a tokenizer still answers in token ids.
            decoder, ends, suppressed = None, frozenset(), frozenset()
        params = self._sampling(given, suppressed)
        meter = Meter(Timing())
        tokens = self._tokens(lambda: self._start(ids, params, drafts, meter), given["max_tokens"], ends, decoder,
                              meter)
        return Generation(_StopFilter(given["stop"]).through(tokens), meter)

    @takes_generation_options
    def chat(self, messages: Sequence[Message], *, system: str | None = None, thinking: bool | None = None,
             tools: Sequence[Mapping[str, Any]] | None = None, **options: Unpack[GenerationOptions]) -> Reply:
        """Answers `messages`, each {"role": ..., "content": ...}: the whole conversation so far.

        system: a system message to put before them. thinking: whether the chat template asks for reasoning; `None`
        leaves it to the template. tools: descriptions of functions for the template. options: see `GenerationOptions`.
        Append the reply's `message` to the messages to go on; this session then computes only what is new. Raises
        `InvalidRequestError` at the call.
        """
        conversation = checked_messages(messages, system)
        prompt = render_prompt(self._model, conversation, thinking=maybe(flag, "thinking", thinking), tools=tools)
        tokens = self._model.tokenize(prompt, add_special=False, parse_special=True)
        return Reply(self.generate(tokens, **options), prompt, require_template(self._model).markers)

    def _sampling(self, given: Mapping[str, Any], suppressed: frozenset[int]) -> _core.SamplingParams:
        """Raises `InvalidRequestError` for an option that is out of its range."""
        rows = self._model.spec.vocab_size
        bias = {**(given["logit_bias"] or {}), **{token: -math.inf for token in suppressed if token < rows}}
        params = _core.SamplingParams(**{name: given[name] for name in _SAMPLING}, logit_bias=bias,
                                      seed=secrets.randbits(63) if given["seed"] is None else given["seed"])
        params.validate(rows)
        return params

    def _require_prompt(self, ids: list[int]) -> None:
        """Raises `InvalidRequestError` for a prompt that no session of the model can take."""
        model = self._model
        if not ids:
            raise InvalidRequestError("the prompt is empty: give at least one token")
        if len(ids) > model.context:
            raise InvalidRequestError(f"the prompt has {len(ids)} tokens, the context holds {model.context}: shorten it"
                                      " or ask for a larger context")
        if max(ids) >= model.spec.vocab_size:
            raise InvalidRequestError(f"token {max(ids)} is outside the vocabulary of {model.spec.vocab_size}")

    def _start(self, ids: list[int], params: _core.SamplingParams, drafts: tuple[str, int], meter: Meter) -> int:
        """Evaluates the prompt; returns the turn that the core session is then at."""
        self._model.note_generation(meter)
        with self._lock:
            self._turn += 1
            turn = self._turn
            started = time.perf_counter()
            self._core.start(ids, params, *drafts)
            seconds, reused = time.perf_counter() - started, self._core.reused_tokens
        meter.timing = Timing(prompt_seconds=seconds, reused_tokens=reused, prompt_tokens=len(ids) - reused)
        return turn

    def _tokens(self, start: Callable[[], int], max_tokens: int | None, ends: frozenset[int],
                decoder: StreamDecoder | None, meter: Meter) -> Iterator[Token]:
        turn, last = start(), None
        try:
            while max_tokens is None or meter.timing.generated_tokens < max_tokens:
                with self._lock:
                    if turn != self._turn:
                        raise InvalidRequestError("the session was used for something else: this generation cannot go"
                                                  " on")
                    started = time.perf_counter()
                    token = self._core.next()
                    seconds, ended = time.perf_counter() - started, token is None or token in ends
                    meter.timing = meter.timing.after(token, seconds, ended, self._core.draft_counts)
                if token is None or ended:
                    break
                last = token
                yield Token(token, decoder.push(token) if decoder else "")
        finally:
            done = meter.timing
            _log.debug("%d tokens generated in %.3f s and %d steps, %d of %d drafted tokens accepted, after a prompt of"
                       " %d in %.3f s, %d more kept from before", done.generated_tokens, done.generation_seconds,
                       done.steps, done.accepted_tokens, done.drafted_tokens, done.prompt_tokens, done.prompt_seconds,
                       done.reused_tokens)
        rest = decoder.flush() if decoder else ""
        if rest and last is not None:
            yield Token(last, rest)


class _StopFilter:
    """Ends a stream where one of some texts begins, holding text back while it may still become one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop

    def through(self, tokens: Iterator[Token]) -> Generator[Token, None, None]:
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
