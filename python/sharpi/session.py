"""A conversation with a model: what it holds of the text so far, and the tokens that continue it.

The core chooses tokens. Here they become text, are counted and timed, and end at an end token or a stop text.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sharpi import _core
from sharpi.errors import InvalidRequestError
from sharpi.generation import Generation, Meter, Timing, Token
from sharpi.loading.loaded_model import LoadedModel
from sharpi.reply import Message, Reply, checked_messages, render_prompt, require_template
from sharpi.request import Asked, TextStream, asked
from sharpi.settings.arguments import flag, maybe
from sharpi.settings.generation_options import GenerationOptions, takes_generation_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Session"]

_log = logging.getLogger(__name__)


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
        request, meter = asked(self._model, prompt, options), Meter(Timing())
        ids = self._tokens(lambda: self._start(request, meter), request, meter)
        return Generation(_closing(ids, TextStream(request.decoder, request.stop)), meter)

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
        return Reply(self.generate(tokens, **options), prompt, require_template(self._model).format)

    def _start(self, request: Asked, meter: Meter) -> int:
        """Evaluates the prompt; returns the turn that the core session is then at."""
        self._model.note_generation(meter)
        with self._lock:
            self._turn += 1
            turn = self._turn
            started = time.perf_counter()
            self._core.start(request.ids, request.params, *request.drafts)
            seconds, reused = time.perf_counter() - started, self._core.reused_tokens
        meter.timing = Timing(prompt_seconds=seconds, reused_tokens=reused, prompt_tokens=len(request.ids) - reused)
        return turn

    def _tokens(self, start: Callable[[], int], request: Asked, meter: Meter) -> Generator[int, None, None]:
        turn = start()
        try:
            while request.max_tokens is None or meter.timing.generated_tokens < request.max_tokens:
                with self._lock:
                    if turn != self._turn:
                        raise InvalidRequestError("the session was used for something else: this generation cannot go"
                                                  " on")
                    started = time.perf_counter()
                    token = self._core.next()
                    seconds, ended = time.perf_counter() - started, token is None or token in request.ends
                    meter.timing = meter.timing.after(token, seconds, ended, self._core.draft_counts)
                if token is None or ended:
                    break
                yield token
        finally:
            done = meter.timing
            _log.debug("%d tokens generated in %.3f s and %d steps, %d of %d drafted tokens accepted, after a prompt of"
                       " %d in %.3f s, %d more kept from before", done.generated_tokens, done.generation_seconds,
                       done.steps, done.accepted_tokens, done.drafted_tokens, done.prompt_tokens, done.prompt_seconds,
                       done.reused_tokens)


def _closing(ids: Generator[int, None, None], text: TextStream) -> Generator[Token, None, None]:
    """The tokens of these ids; closes their generator however it ends."""
    with contextlib.closing(ids):
        yield from text.through(ids)
