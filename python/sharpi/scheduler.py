"""Many requests at once: a `Scheduler` serves them with one model, and each `Answer` is what that request would be
answered alone."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from sharpi import _core
from sharpi.constraints import Constraint
from sharpi.errors import InvalidRequestError
from sharpi.files.identity import weights_identity
from sharpi.generation import Token
from sharpi.loading.loaded_model import LoadedModel
from sharpi.machine.hardware import ram_bytes
from sharpi.planning.copies import kept
from sharpi.request import Asked, TextStream, asked
from sharpi.settings import arguments
from sharpi.settings.choices import DEFAULT_CACHE_DIR_BYTES
from sharpi.settings.generation_options import GenerationOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Answer", "FinishReason", "PromptScores", "Scheduler", "SubmitOptions"]

FinishReason = Literal["end", "stop", "length", "context", "cancelled", "timeout"]
PromptScores: TypeAlias = "list[tuple[float | None, tuple[tuple[int, float], ...]]]"

_log = logging.getLogger(__name__)

# Seconds after which a thread that waits for tokens looks whether it was interrupted.
LOOK_SECONDS = 0.1
_MOST_SCORES = 20


class Answer(Iterator[Token], AsyncIterator[Token]):
    """An answer that a `Scheduler` is writing: iterate over its tokens, with `for` or with `async for`.

    The answer is written whether anybody reads it or not. It ends early if it is cancelled, at the end of a `with`
    block, or when the object is dropped. An answer has one reader at a time.
    """

    def __init__(self, core: _core.Answer, request: Asked, watcher: _Watcher | None, scored: bool) -> None:
        self._core = core
        self._text = TextStream(request.decoder, request.stop)
        self._scored = scored
        self._prompt_scores: PromptScores | None = None
        self._watcher = watcher
        self._ready: deque[Token] = deque()
        self._reason: FinishReason | None = None
        self._error: Exception | None = None
        self._figures: dict[str, Any] = {}
        self._count = 0
        self._ended = False

    def __repr__(self) -> str:
        return f"<Answer {self._core.number}, {self._reason or 'being written'}>"

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer ended: at an end token of the model ("end"), before a stop text ("stop"), after `max_tokens`
        ("length"), because the context is full ("context"), because it was cancelled or its time was over ("timeout").
        `None` while tokens are still to be read."""
        return self._reason if not self._ready else None

    @property
    def stop_text(self) -> str | None:
        """The stop text before which the answer ended, if one ended it."""
        return self._text.found

    @property
    def token_count(self) -> int:
        """The tokens that have come so far: those of a stop text are counted, an end token is not."""
        return self._count

    @property
    def figures(self) -> dict[str, Any]:
        """What the answer has cost, once it has ended: `queued_seconds` until its prompt's turn, `first_token_seconds`
        and `seconds` since it was submitted, `prompt_tokens`, of these `reused_tokens`, `tokens`, `steps`,
        `drafted_tokens`, `accepted_tokens`, `prompt_seconds` and `generation_seconds` of the passes in which it had
        part, and `pauses`: how often it gave its memory to others."""
        return dict(self._figures)

    @property
    def prompt_scores(self) -> PromptScores | None:
        """With `echo`: of each token of the prompt its log-probability and the likeliest tokens in its place, as
        `Token` has them. The first token follows nothing and has `None`. `None` until they have been read, which they
        are before the first token."""
        return self._prompt_scores

    @property
    def reused_tokens(self) -> int:
        """The prompt's tokens that the cache had; 0 until that is known, which it is with the first token."""
        return self._core.reused_tokens

    @property
    def computed_tokens(self) -> int:
        """How far the prompt has come, with the tokens that the cache had."""
        return self._core.computed_tokens

    def cancel(self) -> None:
        """Ends the answer soon. Tokens that are already there can still be read."""
        self._core.cancel()

    def text(self) -> str:
        """The whole text that is still to be read. Waits for it."""
        return "".join(token.text for token in self)

    def __iter__(self) -> Answer:
        return self

    def __next__(self) -> Token:
        while not self._ready and not self._ended:
            self._take(LOOK_SECONDS)
        return self._first(StopIteration)

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Token:
        await self.more()
        return self._first(StopAsyncIteration)

    async def more(self) -> bool:
        """Waits until `ready` has a token. Returns `False` if there are no further ones. Raises `SharpiError` if the
        answer failed, once all its tokens have been read."""
        while not self._ready and not self._ended:
            if self._watcher is not None and self._watcher.belongs_here():
                await self._watcher.news(self._core.number)
                self._take(0.0)
            else:
                await asyncio.to_thread(self._take, LOOK_SECONDS)
        if not self._ready and self._error is not None:
            raise self._error
        return bool(self._ready)

    def ready(self) -> Token | None:
        """The next token, if it has come."""
        return self._ready.popleft() if self._ready else None

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.cancel()

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is not None and not self._ended:
            core.cancel()

    def _first(self, at_end: type[Exception]) -> Token:
        if self._ready:
            return self._ready.popleft()
        if self._error is not None:
            raise self._error
        raise at_end

    def _take(self, seconds: float) -> None:
        """Takes what the scheduler has written, and waits for it up to `seconds`."""
        ids, scores, prompt_scores, ending = self._core.take(seconds)
        if prompt_scores is not None:
            self._prompt_scores = [(None, ()), *prompt_scores[1:]]
        for id, score in zip(ids, scores, strict=True):
            self._count += 1
            self._ready.append(self._text.push(id, *score) if self._scored else self._text.push(id))
            if self._text.stopped:
                self._core.cancel()
                return self._end("stop", {})
        if ending is not None:
            reason, error, figures = ending
            self._ready.extend(self._text.flush())
            self._error = error
            self._end("stop" if self._text.stopped else reason, figures)

    def _end(self, reason: Any, figures: dict[str, Any]) -> None:
        self._ended, self._reason, self._figures = True, None if self._error else reason, figures
        if self._watcher is not None:
            self._watcher.forget(self._core.number)


class _News:
    """Whether something of an answer has come that nobody has read, and its reader if it waits."""

    __slots__ = ("came", "reader")

    def __init__(self) -> None:
        self.came = False
        self.reader: asyncio.Future[None] | None = None

    def tell(self) -> None:
        self.came = True
        if self.reader is not None and not self.reader.done():
            self.reader.set_result(None)


class _Watcher:
    """Wakes the readers of answers in one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.arrivals = _core.Arrivals()
        self._loop = weakref.ref(loop)
        self._waiting: dict[int, _News] = {}
        loop.add_reader(self.arrivals.fileno(), self._wake)

    def belongs_here(self) -> bool:
        return asyncio.get_running_loop() is self._loop()

    async def news(self, number: int) -> None:
        """Returns when this answer has something new."""
        news = self._waiting.get(number)
        if news is None:
            news = self._waiting[number] = _News()
        if not news.came:
            news.reader = asyncio.get_running_loop().create_future()
            await news.reader
        news.came = False

    def watch(self, number: int) -> None:
        self._waiting.setdefault(number, _News())

    def forget(self, number: int) -> None:
        self._waiting.pop(number, None)

    def close(self) -> None:
        """After the last news. Any thread may call it."""
        loop = self._loop()
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._end, loop)

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self.arrivals.fileno())
        for news in self._waiting.values():
            news.tell()

    def _wake(self) -> None:
        for number in self.arrivals.drain():
            if news := self._waiting.get(number):
                news.tell()


def _best(scores: Any) -> int:
    """In the core's terms: -1 for no scores."""
    count = arguments.maybe(arguments.whole, "scores", scores)
    if count is None:
        return -1
    if not 0 <= count <= _MOST_SCORES:
        raise InvalidRequestError(f"scores must be 0 to {_MOST_SCORES}, not {count}")
    return count


def _require_methods(constraint: Any) -> None:
    missing = [name for name in ("fill", "accept", "rollback", "ended")
               if constraint is not None and not callable(getattr(constraint, name, None))]
    if missing:
        raise InvalidRequestError(f"a constraint needs a method {missing[0]}(): {arguments.shown(constraint)} has none")


def _identity(model: LoadedModel) -> str:
    """Of all that decides the bits of the cache and is Python's to know."""
    plan = model.plan
    try:
        parts = [weights_identity(model.file), repr(plan.rope), repr(plan.mtp)]
    except OSError as error:
        raise InvalidRequestError(f"{error.filename}: {error.strerror}") from error
    if plan.prompt == "fast":  # its bits may change from version to version
        parts += [_core.version, os.environ.get("SHARPI_CUDA_WGMMA", "")]
    return "\n".join(parts)


# A scheduler's thread calls constraints, which it cannot once the interpreter is being taken apart.
_open: weakref.WeakSet[Scheduler] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for scheduler in list(_open):
        scheduler.close_in(os.getpid())


class SubmitOptions(GenerationOptions, total=False):
    """What `Scheduler.submit` takes beside the prompt."""

    priority: int
    key: str
    salt: str
    timeout: float | None
    ignore_end: bool
    scores: int | None
    echo: bool
    constraint: Constraint | None
    marks: Sequence[int]


class Scheduler:
    """Serves many requests with one model: all answers that are being written share the steps of the model.

    What a request is answered does not depend on the others. If memory ends, the request that came last is paused and
    goes on later, with the same text. A prompt that begins like an earlier request's text reuses what the cache still
    holds of it. Threads and event loops may share a scheduler.

    The model should be loaded with `sequences` as large as the number of answers to be written at once, and a `context`
    with room for their tokens together.
    """

    def __init__(self, model: LoadedModel, *, max_gap: float = 0.2, queue: int = 64,
                 running: int | None = None, states_bytes: int | None = None, spill_bytes: int | None = None,
                 cache_dir: str | os.PathLike[str] | None = None,
                 cache_dir_bytes: int = DEFAULT_CACHE_DIR_BYTES) -> None:
        """max_gap: the seconds that an answer should at most wait for prompts of others. queue: how many requests may
        wait; further ones are refused with `BusyError`. running: how many may hold memory at a time; `None`: as many as
        the model has room for. states_bytes: RAM for copies of the states of recurrent layers, from which prompts that
        begin alike continue. spill_bytes: RAM for what the KV cache had to give up of prompts, which comes back if a
        prompt needs it; `None`: what the model was loaded for. Each is 1 GiB by default, or a sixteenth of a RAM that
        is smaller than 16 GiB.

        cache_dir: a directory for what has no room in RAM, and for all of it when the scheduler is closed: later
        schedulers of the same model find it, in this process or another. cache_dir_bytes: what the directory may hold;
        what was used longest ago goes first. If it cannot be written any more, the log says so once, and requests are
        served without it. Raises `InvalidRequestError`."""
        self._model = model
        states = None if states_bytes is None else arguments.whole("states_bytes", states_bytes)
        spill = model.spill_bytes if spill_bytes is None else arguments.whole("spill_bytes", spill_bytes)
        copies = kept(ram_bytes(), recurrent=True, states_bytes=states, spill_bytes=spill)
        folder = "" if cache_dir is None else os.path.abspath(arguments.path("cache_dir", cache_dir))
        self._core: _core.Scheduler | None = _core.Scheduler(
            model.engine, max_gap=arguments.number("max_gap", max_gap), queue=arguments.whole("queue", queue),
            running=0 if running is None else arguments.whole("running", running),
            states_bytes=copies.states_bytes, spill_bytes=copies.spill_bytes, cache_dir=folder,
            cache_dir_bytes=arguments.whole("cache_dir_bytes", cache_dir_bytes),
            file=_identity(model) if folder else "", notice=_log.warning)
        self._watchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Watcher] = weakref.WeakKeyDictionary()
        self._answers: weakref.WeakSet[Answer] = weakref.WeakSet()
        self._sessions: weakref.WeakSet[object] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._retired = False
        self._process = os.getpid()
        _open.add(self)

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def submit(self, prompt: str | Sequence[int], *, priority: int = 0, key: str = "", salt: str = "",
               timeout: float | None = None, ignore_end: bool = False, scores: int | None = None, echo: bool = False,
               constraint: Constraint | None = None, marks: Sequence[int] = (),
               **options: Unpack[GenerationOptions]) -> Answer:
        """Continues `prompt`, text or token ids, as `Session.generate` does; `GenerationOptions` says what the options
        mean. Returns at once.

        priority: requests with higher ones go first, and are paused last. key: requests with the same key are one
        client's, and clients take turns. salt: what was computed of a prompt serves later prompts that begin alike,
        but not requests with another salt. timeout: seconds after which the answer ends. ignore_end: the answer goes on
        after an end token.

        scores: each `Token` has its log-probability, and those of this many of the likeliest tokens (0 to 20). echo:
        the prompt's tokens have theirs too, in `Answer.prompt_scores`; the whole prompt is computed, whatever the cache
        has of it, and `max_tokens` may be 0. constraint: what the answer may consist of. If it raises an exception, the
        answer ends with that error.

        marks: how many of the prompt's tokens come before places where other prompts are likely to differ, such as the
        end of a system prompt. Models with recurrent layers, or with windows, keep there what a prompt needs to
        continue, if there is room; the answer is the same. Raises `InvalidRequestError` for a request that can never
        be served, and `BusyError` if too many are waiting.
        """
        request = asked(self._model, prompt, options, marks)
        best, echo = _best(scores), arguments.flag("echo", echo)
        _require_methods(constraint)
        with self._lock:
            if self._retired:
                raise InvalidRequestError("the scheduler is closed")
            core = self.core
            watcher = self._watcher()
            answer = core.submit(request.ids, request.params, draft=request.drafts[0], draft_tokens=request.drafts[1],
                                 ends=[] if ignore_end else sorted(request.ends), max_tokens=request.max_tokens,
                                 priority=arguments.whole("priority", priority), key=arguments.text("key", key),
                                 salt=arguments.text("salt", salt),
                                 seconds=None if timeout is None else arguments.number("timeout", timeout),
                                 arrivals=None if watcher is None else watcher.arrivals,
                                 best=best, echo=echo, constraint=constraint, marks=request.marks)
            if watcher is not None:
                watcher.watch(answer.number)
            made = Answer(answer, request, watcher, scored=best >= 0)
            self._answers.add(made)
        return made

    def counts(self) -> dict[str, Any]:
        """What is going on: requests that are `waiting`, `preparing` (their prompts are computed) and `writing`. And
        since the scheduler began: `finished`, `refused`, `pauses`; `steps` and the `step_tokens` that they gave in
        `step_seconds`; `pieces` of prompts in `piece_seconds`; `adopted_tokens` that other requests had computed, or
        earlier ones. Of all these seconds `again_seconds` went into `again_tokens` that had been computed before, by
        the number of tokens if a pass had others too: `lost_*` by a pause or to others who needed the memory,
        `answers_again_*` as an earlier answer, whose rows are not a prompt's or fill no page, `cuts_again_*` as an
        earlier prompt after its last shared page. The scheduler's own work took `step_host_seconds` for steps, with the
        queue and handing tokens out, and `piece_host_seconds` for pieces; `step_hidden_seconds` and
        `piece_hidden_seconds` of them while the GPU was at work. The cache now holds `shared_pages` that
        later requests may find, and requests hold the part `kv_usage` of it, 0 to 1. RAM holds `states_bytes` of copied
        states and `spill_bytes` of copied pages. `spilled_pages` were copied from the cache, and `restored_pages` came
        back; `written_copies` of pages and states went to the directory, and `loaded_copies` came from there. `failure`
        says why nothing is answered any more, if the device has failed, and is empty otherwise."""
        return self.core.counts()

    @property
    def core(self) -> _core.Scheduler:
        """The core's scheduler. Raises `InvalidRequestError` if it is closed, or in a process that was forked after it
        was made."""
        core = self._core
        if core is None:
            raise InvalidRequestError("the scheduler is closed")
        self.require_process()
        return core

    def require_process(self) -> None:
        """Raises `InvalidRequestError` in a process that was forked after the scheduler was made."""
        if os.getpid() != self._process:
            raise InvalidRequestError("a model cannot be used in a process that was forked after it was loaded: load it"
                                      " in that process")

    def serve(self, session: object) -> _core.Conversation:
        """A new conversation for a session. While the session exists, `retire` leaves the scheduler at work."""
        conversation = _core.Conversation(self.core, "")
        self._sessions.add(session)
        return conversation

    def retire(self) -> None:
        """Closes it, unless there are sessions: then it cancels what was submitted, and ends with the last session."""
        if not self._sessions:
            return self.close()
        with self._lock:
            self._retired = True
            answers = list(self._answers)
        for answer in answers:
            answer.cancel()

    def close(self) -> None:
        """Cancels all requests and gives their memory back. If there is a `cache_dir`, returns once what the cache and
        RAM hold of prompts is written to it."""
        with self._lock:
            core, self._core = self._core, None
            if core is not None and os.getpid() == self._process:
                core.close()
            for watcher in self._watchers.values():
                watcher.close()

    def close_in(self, process: int) -> None:
        """Closes it if it was made in this process: a forked one has the object without its thread."""
        if process == self._process:
            self.close()

    def _watcher(self) -> _Watcher | None:
        """That of the running event loop, `None` outside of one."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return None
        watcher = self._watchers.get(loop)
        if watcher is None:
            watcher = self._watchers[loop] = _Watcher(loop)
        return watcher
