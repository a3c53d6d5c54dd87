"""How long a model's steps take on this machine.

Speed does not depend on which tokens are run, so random ones will do, and no tokenizer is needed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from sharpi import _core
from sharpi.planning.drafts import DraftedRun, choose_drafts

if TYPE_CHECKING:
    from sharpi.model import Model

__all__ = ["Benchmark"]

# Drafts are timed with this many tokens, and no other token is likely beside them.
_FEW, _SURELY = 4, 1000.0


class Benchmark:
    """Times single runs of a model. Each run has a session of its own."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._runs = 0

    def prefill(self, tokens: int) -> float:
        """Seconds from a prompt of `tokens` random tokens to the token that follows it."""
        session, ids = _core.Session(self._model.engine), self._random_ids(tokens)
        started = time.perf_counter()
        session.start(ids, _likeliest())
        return time.perf_counter() - started

    def decode(self, depth: int, tokens: int) -> float:
        """Seconds for `tokens` decode steps, each with the choice of a token, after `depth` (at least 1) tokens.

        With experts, tokens are drawn, different ones in each run: the likeliest tokens soon repeat themselves with
        random weights, and with them the experts, which would make any cache look good."""
        engine = self._model.engine
        session = _core.Session(engine)
        self._runs += 1
        params = _likeliest() if engine.expert_stats() is None else _drawn(seed=self._runs)
        session.start(self._random_ids(max(1, depth)), params)
        session.next()  # was chosen with the prompt
        started = time.perf_counter()
        for _ in range(tokens):
            session.next()
        return time.perf_counter() - started

    def shared_steps(self, rows: int, depth: int, steps: int, warm_up: int = 4) -> list[float]:
        """Seconds of each of `steps` steps that `rows` texts share, after `depth` (at least 1) tokens of each and
        `warm_up` steps. More texts than one step takes are several. The model needs room for all tokens at once."""
        engine = self._model.engine
        drawn = engine.expert_stats() is not None  # see decode()
        sessions = []
        for row in range(rows):
            self._runs += 1
            sessions.append(_core.Session(engine))
            sessions[row].start(self._random_ids(max(1, depth), seed=self._runs),
                                _drawn(seed=self._runs) if drawn else _likeliest())
        _core.Session.next_of(sessions)  # were chosen with the prompts
        seconds = []
        for _ in range(warm_up + steps):
            started = time.perf_counter()
            _core.Session.next_of(sessions)
            seconds.append(time.perf_counter() - started)
        return seconds[warm_up:]

    def drafts(self, depth: int, tokens: int, draft: str, draft_tokens: int | None = None) -> DraftedRun:
        """What it takes to generate at least `tokens` tokens with drafts (see `GenerationOptions`) after `depth` (at
        least 1) tokens.

        What a step costs counts here, not how often a guess is right, which random tokens cannot tell. All tokens are
        drawn from a few, alike for every way of drafting, so that there is always something to look up for "ngram"."""
        drafts = choose_drafts(draft, draft_tokens, mtp=self._model.plan.mtp)
        self._runs += 1
        vocabulary = self._model.spec.vocab_size
        few = np.random.default_rng(0).choice(vocabulary, min(_FEW, vocabulary), replace=False)
        prompt = np.random.default_rng(self._runs).choice(few, max(1, depth)).tolist()
        session = _core.Session(self._model.engine)
        session.start(prompt, _drawn(self._runs, {int(token): _SURELY for token in few}), *drafts)
        session.next()  # was chosen with the prompt
        before = np.array(session.draft_counts)
        started = time.perf_counter()
        for _ in range(tokens):
            session.next()
        seconds = time.perf_counter() - started
        steps, drafted, accepted = (np.array(session.draft_counts) - before).tolist()
        return DraftedRun(seconds, steps + accepted, steps, drafted, accepted)

    def _random_ids(self, count: int, seed: int = 0) -> list[int]:
        ids: list[int] = np.random.default_rng(seed).integers(0, self._model.spec.vocab_size, count).tolist()
        return ids


def _likeliest() -> _core.SamplingParams:
    return _core.SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
                                presence_penalty=0.0, frequency_penalty=0.0, logit_bias={}, seed=0)


def _drawn(seed: int, bias: Mapping[int, float] | None = None) -> _core.SamplingParams:
    return _core.SamplingParams(temperature=1.0, top_k=40, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
                                presence_penalty=0.0, frequency_penalty=0.0, logit_bias=dict(bias or {}), seed=seed)
