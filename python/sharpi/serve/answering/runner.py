"""Turns are answered by one model, through its scheduler."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from sharpi.constraints.answers import AnswerRules
from sharpi.errors import BusyError, DeviceLostError, InvalidRequestError, SharpiError
from sharpi.loading.loaded_model import LoadedModel
from sharpi.scheduler import Answer, Scheduler
from sharpi.serve.answering.channels import reader_of
from sharpi.serve.answering.open_turn import Choice, ModelTurn
from sharpi.serve.answering.prompts import Prompt, PromptMaker, refused
from sharpi.serve.answering.rules import RuleBook
from sharpi.serve.answering.scoring import Scorer
from sharpi.serve.errors import ApiError
from sharpi.serve.turns import Turn
from sharpi.settings.generation_options import GenerationOptions, checked_options

__all__ = ["Limits", "ModelRunner", "RunnerLimits"]

T = TypeVar("T")

_SEEDS = 1 << 64


_THREADS = 2  # that make prompts
MOST_CHOICES = 8


class Limits(Protocol):
    """max_queue: how many requests may wait. request_seconds: after these an answer ends; `None`: never."""

    @property
    def max_queue(self) -> int: ...

    @property
    def request_seconds(self) -> float | None: ...


@dataclass(frozen=True)
class RunnerLimits:
    """`Limits` without a server's settings."""

    max_queue: int = 64
    request_seconds: float | None = None


class ModelRunner:
    """A `Runner` (see server.py). It belongs to the event loop in which `open` is called."""

    def __init__(self, model: LoadedModel, scheduler: Scheduler, limits: Limits | None = None) -> None:
        self._model = model
        self._scheduler = scheduler
        self._limits: Limits = limits or RunnerLimits()
        self._prompts = PromptMaker(model)
        self._rules = RuleBook(model.tokenizer)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="sharpi-prompts")
        self._preparing = 0  # choices whose prompts are being made

    async def open(self, turn: Turn) -> ModelTurn:
        self._check(turn)
        self._require_room(turn.choices)
        self._preparing += turn.choices
        try:
            prompt = await self._in_thread(self._prompts.make, turn)
            self._require_context(prompt)
            rules = await self._in_thread(self._rules_of, turn, prompt)
        finally:
            self._preparing -= turn.choices
        answers = self._submitted(turn, prompt, rules)
        return ModelTurn([self._choice(turn, prompt, index, answer) for index, answer in enumerate(answers)],
                         len(prompt.ids))

    def _choice(self, turn: Turn, prompt: Prompt, index: int, answer: Answer) -> Choice:
        scorer = None if turn.scores is None else Scorer(self._model.tokenizer, prompt.ids)
        return Choice(index, answer, reader_of(turn, prompt), scorer, prompt.text if turn.echo else None)

    async def count(self, turn: Turn) -> int:
        return len((await self._in_thread(self._prompts.make, turn)).ids)

    def close(self) -> None:
        """Ends the threads. The model and the scheduler are the caller's."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    def _rules_of(self, turn: Turn, prompt: Prompt) -> AnswerRules | None:
        try:
            return self._rules.rules_of(turn, prompt)
        except InvalidRequestError as error:
            field = "response_format" if turn.format is not None else "tools"
            raise _wrong(field, str(error)) from None

    def _check(self, turn: Turn) -> None:
        """All that can be known of a turn without its prompt."""
        if not 1 <= turn.choices <= MOST_CHOICES:
            raise _wrong("n", f"n must be 1 to {MOST_CHOICES}, not {turn.choices}")
        if turn.options.get("max_tokens") == 0 and not turn.echo:
            raise _wrong("max_tokens", "max_tokens must be 1 or more; only with echo may it be 0")
        try:
            checked_options(turn.options)
        except InvalidRequestError as error:
            raise refused(error) from None

    def _require_room(self, choices: int) -> None:
        """Refuses before a prompt is made, which takes time."""
        counts = self._scheduler.counts()
        waiting = counts["waiting"] + self._preparing
        if waiting and waiting + choices > self._limits.max_queue:
            raise self._busy(f"{waiting} requests are waiting already: try again later")

    def _busy(self, message: str) -> ApiError:
        """With the time after which a request will probably have ended."""
        counts = self._scheduler.counts()
        each = (counts["step_seconds"] + counts["piece_seconds"]) / max(1, counts["finished"])
        return ApiError(429, "rate_limit_error", message, code="queue_full",
                        headers={"Retry-After": str(min(60, max(1, math.ceil(each))))})

    def _require_context(self, prompt: Prompt) -> None:
        count, room = len(prompt.ids), self._model.context
        if count > room:
            raise ApiError(400, "invalid_request_error",
                           f"the prompt has {count} tokens, the context holds {room}: shorten it",
                           code="exceed_context_size_error", details={"n_prompt_tokens": count, "n_ctx": room})

    def _submitted(self, turn: Turn, prompt: Prompt, rules: AnswerRules | None) -> list[Answer]:
        seed = turn.options.get("seed")
        first = secrets.randbits(63) if seed is None else seed
        # The prompt is computed as a whole for its scores; its text alone costs nothing.
        echo = turn.echo and (turn.scores is not None or turn.options.get("max_tokens") == 0)
        answers: list[Answer] = []
        try:
            for index in range(turn.choices):
                options = GenerationOptions(**{**turn.options, "seed": (first + index) % _SEEDS})
                answers.append(self._scheduler.submit(
                    prompt.ids, key=turn.key, salt=turn.salt, timeout=self._limits.request_seconds,
                    ignore_end=turn.ignore_end, scores=turn.scores, echo=echo,
                    constraint=rules.begin() if rules else None, marks=prompt.marks, **options))
        except BaseException as error:
            for answer in answers:
                answer.cancel()
            if isinstance(error, BusyError):
                raise self._busy(str(error)) from None
            if isinstance(error, InvalidRequestError):
                raise refused(error) from None
            if isinstance(error, DeviceLostError):
                raise ApiError(503, "server_error", str(error), code="device_lost") from None
            if isinstance(error, SharpiError):
                raise ApiError(500, "server_error", str(error)) from None
            raise
        return answers


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, "invalid_request_error", message, param=param)
