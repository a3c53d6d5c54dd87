"""Matchers that the core asks itself: the answers are the same as if each call went through Python."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from constrained import bundled

from sharpi import Model, Scheduler
from sharpi.constraints.answers import AnswerRules
from sharpi.constraints.budget import Either
from sharpi.constraints.grammar import Matcher, compile_format
from sharpi.constraints.tokens import Tokens
from sharpi.errors import SharpiError
from sharpi.serve.turns import OutputFormat, Tool
from sharpi.text.answers.formats import HERMES

_SCHEMA = {"type": "array", "minItems": 3, "maxItems": 5, "items": {
    "type": "object", "required": ["colour", "colour_again"], "additionalProperties": False,
    "properties": {"colour": {"enum": ["red", "green"]}, "colour_again": {"enum": ["red", "green"]}}}}


@pytest.fixture(scope="module")
def scheduler() -> Iterator[Scheduler]:
    with Model.load(device="cpu", context=256, cache_tokens=512, sequences=4) as model, model.scheduler() as opened:
        yield opened


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return bundled()[1]


class Watched:
    """Passes all on, and counts what it is told. direct: it says which matcher decides. after: tokens before that."""

    def __init__(self, inner: Any, direct: bool, after: int = 0) -> None:
        self._inner, self._after = inner, after
        self.accepted = self.filled = self.rolled = 0
        if direct:
            self.matcher = lambda: inner.matcher() if self.accepted - self.rolled >= after else None

    def fill(self, words: Any) -> bool:
        self.filled += 1
        return bool(self._inner.fill(words))

    def accept(self, token: int) -> None:
        self.accepted += 1
        self._inner.accept(token)

    def rollback(self, count: int) -> None:
        self.rolled += count
        self._inner.rollback(count)

    def ended(self) -> bool:
        return bool(self._inner.ended())


def written(scheduler: Scheduler, constraint: Any, **options: Any) -> list[int]:
    return [token.id for token in scheduler.submit("a b a b", max_tokens=150, constraint=constraint, **options)]


@pytest.mark.parametrize("draft", ["off", "ngram"])
@pytest.mark.parametrize("sampled", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}])
@pytest.mark.parametrize("after", [0, 9])
def test_answers_are_the_same(scheduler: Scheduler, tokens: Tokens, draft: str, sampled: dict[str, Any],
                              after: int) -> None:
    grammar = compile_format(OutputFormat("json_schema", _SCHEMA), tokens)
    slow, direct = Watched(grammar.start(), False), Watched(grammar.start(), True, after)
    ids = written(scheduler, slow, draft=draft, **sampled)
    assert written(scheduler, direct, draft=draft, **sampled) == ids and len(ids) > 30
    assert direct.accepted - direct.rolled == after and direct.filled <= 2 * after + 1
    assert slow.accepted - slow.rolled >= len(ids)
    if draft == "ngram":
        assert slow.rolled > 0, "no guess was wrong, so no rollback was tried"


def test_who_hands_over(tokens: Tokens) -> None:
    text, tools = OutputFormat("json_object"), [Tool("look_up", "", {"type": "object"})]
    plain = AnswerRules(tokens, HERMES, begins="outside", wanted=text).begin()
    assert isinstance(plain.matcher(), Matcher)  # type: ignore[union-attr]
    thinking = AnswerRules(tokens, HERMES, begins="inside", wanted=text).begin()
    assert thinking.matcher() is None  # type: ignore[union-attr]
    for token in tokens.encode(b"hm</think>{"):
        thinking.accept(token)  # type: ignore[union-attr]
    assert isinstance(thinking.matcher(), Matcher)  # type: ignore[union-attr]
    lazy = AnswerRules(tokens, HERMES, begins="outside", tools=tools, parallel=False).begin()
    assert lazy.matcher() is None  # type: ignore[union-attr]
    both = Either(tokens, compile_format(text, tokens).start(),
                  compile_format(OutputFormat("regex", "x+"), tokens).start())
    assert both.matcher() is None
    both.accept(tokens.encode(b"x")[0])
    assert isinstance(both.matcher(), Matcher)


class Library:
    """A grammar library that fails in one way."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {"unsafe_compute_mask_ptr": None, "is_error": False, "consume_token": True, "is_stopped": False,
                        "rollback": True, "get_error": "", **answers}

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.answers[name]


@pytest.mark.parametrize(("answers", "told"), [
    ({}, "leaves no token that the model's vocabulary can write"),  # a mask that it has not filled
    ({"is_error": True, "get_error": "too many states\n1 | x"}, "cannot be followed any further: too many states")])
def test_what_fails_ends_its_own_answer(scheduler: Scheduler, tokens: Tokens, answers: dict[str, Any],
                                        told: str) -> None:
    grammar: Any = SimpleNamespace(tokens=tokens, error=lambda text: SharpiError(f"the grammar {text}"))
    with pytest.raises(SharpiError, match=told):
        written(scheduler, Matcher(grammar, Library(**answers)))
    good = compile_format(OutputFormat("json_schema", _SCHEMA), tokens).start()
    assert written(scheduler, good, temperature=0.0)
