"""A conversation with a model: what it holds of the text so far, and the tokens that continue it.

The core chooses tokens. Here they become text, are counted and timed, and end at an end token or a stop text.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sharpi import _core
from sharpi.errors import InvalidRequestError
from sharpi.generation import Generation, Meter, Timing, Token
from sharpi.loading.loaded_model import LoadedModel
from sharpi.reply import ChatPrompt, Message, Reply, chat_prompt, checked_messages
from sharpi.request import Asked, TextStream, asked
from sharpi.scheduler import LOOK_SECONDS, Scheduler
from sharpi.settings.arguments import flag, maybe
from sharpi.settings.generation_options import GenerationOptions, takes_generation_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Session"]

_log = logging.getLogger(__name__)


# Tokens that may be written before they are read: one for the reader to take while the model's step writes the next.
# With fewer, the model waits for each reader after each step, and sessions in several threads do not share steps.
_AHEAD = 2


class Session:
    """A conversation: what was evaluated stays in the KV cache, and the next prompt reuses what it shares with it.

    Its requests are served by the model's own scheduler, together with those of all other sessions and of
    `Model.submit`. A session that is not generating keeps nobody from memory: if another request needs it, the text is
    remembered, and computed again when the session goes on. A generation that nobody reads does no further work.
    """

    def __init__(self, model: LoadedModel, scheduler: Scheduler) -> None:
        """`Model.session` makes sessions."""
        self._model = model
        self._scheduler = scheduler
        self._core = scheduler.serve(self)
        self._lock = threading.Lock()
        self._answer: _core.Answer | None = None  # of the generation whose turn it is; the lock guards it

    def __repr__(self) -> str:
        return f"<Session of {self._model!r}>"

    @property
    def tokens(self) -> list[int]:
        """The tokens of the text so far, in order: the last prompt's, and those of its answer that were read, but for
        the last, which need not have been evaluated."""
        _ = self._scheduler.core  # raises in a forked process
        return self._core.tokens

    def reset(self) -> None:
        """Forgets all tokens. A generation that has begun cannot continue."""
        _ = self._scheduler.core
        with self._lock:
            self._answer = None
            self._core.reset()

    @takes_generation_options
    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]) -> Generation:
        """Continues `prompt`: the whole conversation so far, as text or as token ids.

        The tokens end at `max_tokens`, at an end token of the model, before a `stop` text, or when the context is full.
        `GenerationOptions` says what the options mean. Raises `InvalidRequestError` at the call.
        """
        return self._generate(asked(self._model, prompt, options))

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
        return self.reply(chat_prompt(self._model, conversation, thinking=maybe(flag, "thinking", thinking),
                                      tools=tools), options)

    def reply(self, prompt: ChatPrompt, options: GenerationOptions) -> Reply:
        """Answers a chat that has been rendered."""
        return Reply(self._generate(asked(self._model, prompt.ids, options, prompt.marks)), prompt)

    def _generate(self, request: Asked) -> Generation:
        meter = Meter(Timing())
        return Generation(_closing(self._tokens(request, meter), TextStream(request.decoder, request.stop)), meter)

    def _start(self, request: Asked, meter: Meter) -> _core.Answer:
        _ = self._scheduler.core
        self._model.note_generation(meter)
        with self._lock:
            self._answer = self._core.submit(
                request.ids, request.params, draft=request.drafts[0], draft_tokens=request.drafts[1],
                ends=sorted(request.ends), max_tokens=request.max_tokens, marks=request.marks, ahead=_AHEAD)
            return self._answer

    def _tokens(self, request: Asked, meter: Meter) -> Generator[int, None, None]:
        answer = self._start(request, meter)
        try:
            while True:
                self._scheduler.require_process()
                token, spent, ending = answer.take_one(LOOK_SECONDS)
                with self._lock:  # a request that has just ended this answer is noted once the lock is free
                    is_its_turn = self._answer is answer
                if not is_its_turn:
                    raise InvalidRequestError("the session was used for something else: this generation cannot go on")
                if spent is not None:
                    meter.timing = _timing(meter.timing, request, answer, token, spent, ending)
                if ending is not None and ending[1] is not None:
                    raise ending[1]
                if ending is not None:
                    break
                if token is not None:
                    yield token
        finally:
            answer.cancel()
            done = meter.timing
            _log.debug("%d tokens generated in %.3f s and %d steps, %d of %d drafted tokens accepted, after a prompt of"
                       " %d in %.3f s, %d more kept from before", done.generated_tokens, done.generation_seconds,
                       done.steps, done.accepted_tokens, done.drafted_tokens, done.prompt_tokens, done.prompt_seconds,
                       done.reused_tokens)


def _timing(before: Timing, request: Asked, answer: _core.Answer, token: int | None,
            spent: tuple[float, float, int, int, int], ending: tuple[str, Exception | None, Any] | None) -> Timing:
    """What the answer has cost with this token, or with its ending. An end token took a step like any other."""
    reused, reason = answer.reused_tokens, ending[0] if ending else None
    stepped = before.generated_tokens > 0 and (token is not None or reason == "end")
    return Timing(prompt_tokens=len(request.ids) - reused, prompt_seconds=spent[0],
                  generated_tokens=before.generated_tokens + (token is not None), generation_seconds=spent[1],
                  reused_tokens=reused, steps=spent[2], drafted_tokens=spent[3], accepted_tokens=spent[4],
                  decoded_tokens=before.decoded_tokens + stepped, context_full=reason == "context")


def _closing(ids: Generator[int, None, None], text: TextStream) -> Generator[Token, None, None]:
    """The tokens of these ids; closes their generator however it ends."""
    with contextlib.closing(ids):
        yield from text.through(ids)
