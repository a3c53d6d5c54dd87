"""How a model serves many requests at once: tokens a second in all, times to the first token, gaps between tokens.

All requests come at the same moment, each with a prompt of its own of random tokens. A gap is the time between two
tokens of an answer, as its reader sees them.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sharpi.errors import ModelFileError

if TYPE_CHECKING:
    from sharpi.model import Model
    from sharpi.scheduler import Scheduler

__all__ = ["MeasuredStreams", "again_share", "measure_streams", "part"]


@dataclass(frozen=True)
class MeasuredStreams:
    """Seconds, but for the counts. tokens_per_second: of all answers, from the first request to the last token, so
    prompts are included. rows: the mean number of tokens that a step gave. host: the scheduler's own work for a step,
    without what it computes or waits for the GPU. hidden: the part of it that is done while the GPU is at work, 0 to 1.
    again: see again_share()."""

    streams: int
    prompt_tokens: int
    answer_tokens: int
    tokens_per_second: float
    first_token_median: float
    first_token_p99: float
    gap_median: float
    gap_p99: float
    gap_largest: float
    rows: float
    host: float
    hidden: float
    again: float


def measure_streams(model: Model, streams: int, prompt: int, answer: int, long: int = 0) -> MeasuredStreams:
    """Serves `streams` requests with prompts of `prompt` tokens, each answered by `answer` tokens, at least 2. long:
    the length of one more prompt, which comes while the answers are written; its own times do not count."""
    return asyncio.run(_measured(model, streams, prompt, answer, long))


async def _measured(model: Model, streams: int, prompt: int, answer: int, long: int) -> MeasuredStreams:
    draw, never = random.Random(streams), _never_ending(model)

    def ids(count: int) -> list[int]:
        return [draw.randrange(model.spec.vocab_size) for _ in range(count)]

    prompts, late = [ids(prompt) for _ in range(streams)], ids(long)
    with model.scheduler(queue=streams + 1) as scheduler:
        started = time.perf_counter()
        tasks = [asyncio.create_task(_times(scheduler, one, answer, never)) for one in prompts]
        if late:
            await asyncio.sleep(0)  # until all have asked
            while scheduler.counts()["waiting"] + scheduler.counts()["preparing"]:
                await asyncio.sleep(0.001)
            tasks.append(asyncio.create_task(_times(scheduler, late, 1, never)))
        times = (await asyncio.gather(*tasks))[:streams]
        seconds, counts = time.perf_counter() - started, scheduler.counts()
    first = [one[0] for one in times]
    gaps = [later - earlier for one in times for earlier, later in zip(one, one[1:], strict=False)]
    steps, host = max(counts["steps"], 1), counts["step_host_seconds"]
    hidden = counts["step_hidden_seconds"] / host if host else 0.0
    return MeasuredStreams(streams, prompt, answer, streams * answer / seconds, part(first, 0.5), part(first, 0.99),
                           part(gaps, 0.5), part(gaps, 0.99), max(gaps), counts["step_tokens"] / steps, host / steps,
                           hidden, again_share(counts))


async def _times(scheduler: Scheduler, prompt: list[int], answer: int, never: dict[int, float]) -> list[float]:
    """When each token came, in seconds since it was asked for."""
    started, times = time.perf_counter(), []
    async for _ in scheduler.submit(prompt, max_tokens=answer, temperature=0.0, logit_bias=never, draft="off"):
        times.append(time.perf_counter() - started)
    return times


def _never_ending(model: Model) -> dict[int, float]:
    """A logit bias with which no answer ends early."""
    try:
        return dict.fromkeys(model.tokenizer.stop_ids, -math.inf)
    except ModelFileError:  # a file without a tokenizer has no end tokens either
        return {}


def again_share(counts: Mapping[str, Any]) -> float:
    """The part of the time of all passes in which a scheduler computed tokens again, 0 to 1. counts:
    `Scheduler.counts()`."""
    passes = counts["step_seconds"] + counts["piece_seconds"]
    return float(counts["again_seconds"] / passes) if passes else 0.0


def part(values: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
