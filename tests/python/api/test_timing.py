"""The speeds that are told after a generation: which tokens, over which seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sharpi.cli.text import closing_line
from sharpi.generation import Timing
from sharpi.model import Model
from sharpi.session import Session

PROMPT_SECONDS, STEP_SECONDS = 2.0, 0.5


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model.load(device="cpu", threads=1, context=256) as loaded:
        yield loaded


class _Clocked:
    """The core's conversation, whose answers tell of a prompt and of steps that took given seconds."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def submit(self, *arguments: Any, **options: Any) -> _ClockedAnswer:
        return _ClockedAnswer(self._core.submit(*arguments, **options))


class _ClockedAnswer:
    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def take_one(self, seconds: float) -> Any:
        token, spent, ending = self._core.take_one(seconds)
        if spent is not None:
            assert spent[0] > 0 and (spent[1] > 0) == (spent[2] > 0)
            spent = (PROMPT_SECONDS, STEP_SECONDS * spent[2], *spent[2:])
        return token, spent, ending


def clocked(session: Session) -> Session:
    session._core = _Clocked(session._core)
    return session


def generated(model: Model, prompt: list[int], **options: Any) -> dict[str, Any]:
    """What is told of a generation on that clock."""
    count = sum(1 for _ in clocked(model.session()).generate(prompt, temperature=0.0, **options))
    stats = model.stats()
    assert stats["generated_tokens"] == count
    return stats


ENDLESS = {"logit_bias": {0: float("-inf")}}


@pytest.mark.parametrize("tokens", [2, 3, 40])
def test_speeds_are_of_a_prompt_and_of_steps(model: Model, tokens: int) -> None:
    stats = generated(model, [1, 2, 3, 4, 5], max_tokens=tokens, **ENDLESS)
    assert stats["prompt_tokens_per_second"] == 5 / PROMPT_SECONDS
    assert (stats["decoded_tokens"], stats["generation_seconds"]) == (tokens - 1, STEP_SECONDS * (tokens - 1))
    assert stats["generation_tokens_per_second"] == 1 / STEP_SECONDS
    assert not stats["context_full"]
    assert closing_line(stats) == f"prompt 5 tokens, 2.5 tokens/s; generated {tokens} tokens, 2.0 tokens/s"


@pytest.mark.parametrize("tokens, words", [(0, "generated 0 tokens"), (1, "generated 1 token")])
def test_what_took_no_step_has_no_speed(model: Model, tokens: int, words: str) -> None:
    stats = generated(model, [1], max_tokens=tokens, **ENDLESS)
    assert stats["generation_tokens_per_second"] is None
    assert closing_line(stats) == f"prompt 1 token, 0.5 tokens/s; {words}"


def test_an_end_token_took_a_step_too(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = model.session()
    said = [token.id for token in endless.generate([1, 2, 3], temperature=0.0, max_tokens=20, **ENDLESS)]
    end = next(token for token in said[3:] if token not in said[:3])
    monkeypatch.setattr(type(model.tokenizer), "stop_ids", frozenset([end]))
    stats = generated(model, [1, 2, 3], max_tokens=20, **ENDLESS)
    assert stats["generated_tokens"] == said.index(end) == stats["decoded_tokens"]
    assert stats["generation_tokens_per_second"] == 1 / STEP_SECONDS


def test_a_step_with_drafts_gives_several_tokens(model: Model) -> None:
    prompt = model.tokenize("one two three four five " * 4)
    stats = generated(model, prompt, max_tokens=40, draft="ngram", **ENDLESS)
    assert stats["accepted_tokens"] > 0, "the text repeats itself"
    assert stats["generation_seconds"] == STEP_SECONDS * stats["steps"]
    assert stats["generation_tokens_per_second"] == 39 / stats["generation_seconds"]


def test_what_was_kept_is_no_part_of_the_prompts_speed(model: Model) -> None:
    session = model.session()
    list(session.generate([1, 2, 3, 4, 5, 6], max_tokens=1))
    list(clocked(session).generate([1, 2, 3, 4, 7, 8], max_tokens=1))
    stats = model.stats()
    assert (stats["prompt_tokens"], stats["reused_tokens"], stats["prompt_tokens_per_second"]) == (2, 4, 1.0)
    assert closing_line(stats).startswith("prompt 2 tokens, 1.0 tokens/s (4 more kept from before); ")


def test_a_full_context_is_told_from_a_limit(model: Model) -> None:
    for limit, full in ((None, True), (7, True), (6, False)):
        stats = generated(model, [5] * 251, max_tokens=limit, **ENDLESS)
        assert (stats["generated_tokens"], stats["context_full"]) == (6, full), "the last token need not be held"
        assert stats["generation_tokens_per_second"] == 1 / STEP_SECONDS


def test_no_time_is_no_speed() -> None:
    rates = Timing(prompt_tokens=3, decoded_tokens=2).to_dict()
    assert rates["prompt_tokens_per_second"] is None and rates["generation_tokens_per_second"] is None
