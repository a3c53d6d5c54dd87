"""Calls of tools, reasoning before the answer, budgets, and rolling back."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
from constrained import allowed, closing_ids, gpt2, mask_of, walk

from sharpi.constraints.answers import AnswerRules
from sharpi.errors import InvalidRequestError
from sharpi.serve.turns import NamedTool, OutputFormat, Tool
from sharpi.text.answers.formats import FORMATS, HERMES
from sharpi.text.answers.markers import Markers
from sharpi.text.answers.pieces import CallBegins, CallContinues, Saying
from sharpi.text.answers.reader import AnswerReader
from sharpi.text.answers.tool_format import ToolFormat

_SMALL = {"type": "integer", "minimum": 0, "maximum": 99}
TOOLS = [
    Tool("weather", "", {"type": "object", "required": ["city", "days"], "properties": {
        "city": {"type": "string", "maxLength": 9}, "days": _SMALL, "unit": {"type": "string", "enum": ["c", "f"]},
        "exact": {"type": "boolean"}}}),
    Tool("sum", "", {"type": "object", "required": ["xs"], "properties": {
        "xs": {"type": "array", "items": _SMALL, "maxItems": 3},
        "o": {"type": "object", "properties": {"a": _SMALL}, "required": ["a"], "additionalProperties": False}}}),
    Tool("now", "", {"type": "object", "properties": {}, "additionalProperties": False}),
]
_HARMONY_MARKS = Markers(("<|channel|>analysis<|message|>",), "<|end|>")
FORMS = [replace(form, thinking=_HARMONY_MARKS) if form.reader == "harmony" else form for form in FORMATS]


def rules(form: ToolFormat = HERMES, **options: Any) -> AnswerRules:
    return AnswerRules(gpt2()[1], form, **{"begins": "outside", **options})


def calls_of(text: str, form: ToolFormat, **options: Any) -> tuple[list[tuple[str, Any]], str]:
    """The calls in an answer, and its text, as the reader finds them."""
    reader = AnswerReader(form, TOOLS, **options)
    calls: list[list[str]] = []
    said = ""
    for piece in reader.push(text) + reader.flush():
        if isinstance(piece, CallBegins):
            calls.append([piece.name, ""])
        elif isinstance(piece, CallContinues):
            calls[-1][1] += piece.json
        elif isinstance(piece, Saying):
            said += piece.text
    return [(name, json.loads(arguments)) for name, arguments in calls], said


def check(calls: list[tuple[str, Any]], form: ToolFormat) -> None:
    schemas = {tool.name: dict(tool.parameters) for tool in TOOLS}
    for name, arguments in calls:
        schema = schemas[name]
        if form.notation != "json":  # there, the types and names alone are enforced
            schema = json.loads(json.dumps(schema).replace("maxLength", "title").replace("maxItems", "title")
                                .replace("maximum", "title").replace("minimum", "title"))
            schema.pop("title", None)
        jsonschema.Draft202012Validator({**schema, "additionalProperties": False}).validate(arguments)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_forced_calls_read_back(form: ToolFormat) -> None:
    tokenizer, tokens = gpt2()
    forced = rules(form, tools=TOOLS, choice="required")
    single = rules(form, tools=TOOLS, choice=NamedTool("sum"))
    names, most = set(), 0
    for seed in range(30):
        text = tokenizer.decode(walk(forced.begin(), tokens, random.Random(seed), hurry=0.6))
        calls, said = calls_of(text, form)
        assert calls and not said.strip(), text
        check(calls, form)
        names |= {name for name, _ in calls}
        most = max(most, len(calls))
        calls, said = calls_of(tokenizer.decode(walk(single.begin(), tokens, random.Random(seed))), form)
        assert [name for name, _ in calls] == ["sum"] and not said.strip()
    assert len(names) > 1
    assert (most > 1) == form.several


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_nothing_is_forbidden_until_a_call_begins_and_after_it(form: ToolFormat) -> None:
    tokenizer, tokens = gpt2()
    offered = rules(form, tools=TOOLS)
    for trigger in form.triggers:
        constraint = offered.begin()
        words = np.zeros(tokens.width, np.uint32)
        for token in tokenizer.encode("I look it up."):
            assert not constraint.fill(words)
            constraint.accept(token)
        begun = list(trigger.encode())
        for token in (next(t for t, piece in enumerate(tokens.pieces) if piece == bytes([byte])) for byte in begun):
            constraint.accept(token)
        assert constraint.fill(words) and len(allowed(words, tokens)) < 300
        text = tokenizer.decode(_walk_call(constraint, tokens, random.Random(3)))
        assert constraint.ended() if not form.several else not constraint.fill(words)
        calls, _ = calls_of(trigger + text, form)
        assert len(calls) >= 1, trigger + text
        check(calls, form)


def _walk_call(constraint: Any, tokens: Any, rng: random.Random) -> list[int]:
    """A walk up to where the answer is free again."""
    words = np.zeros(tokens.width, np.uint32)
    ids: list[int] = []
    while not constraint.ended() and constraint.fill(words):
        choices = allowed(words, tokens)
        if rng.random() < 0.8 and len(near := np.intersect1d(choices, closing_ids(tokens))):
            choices = near
        token = int(rng.choice(choices))
        if token in tokens.end_ids or len(choices) > tokens.count - 2000:
            break
        ids.append(token)
        constraint.accept(token)
    return ids


def test_a_token_that_goes_on_after_a_trigger_is_forbidden() -> None:
    tokenizer, tokens = gpt2()
    constraint = rules(tools=TOOLS).begin()
    for token in tokenizer.encode("<tool_call"):
        constraint.accept(token)
    ids = {tokens.piece(int(token)) for token in allowed(mask_of(constraint, tokens), tokens)}
    assert b">" in ids and b"er" in ids
    assert b"></" not in ids and b">{" not in ids


def test_an_object_without_a_tool_is_no_call() -> None:
    llama = next(form for form in FORMS if form.name == "llama")
    tokenizer, tokens = gpt2()
    constraint = rules(llama, tools=TOOLS).begin()
    for token in tokenizer.encode('{"name": "Bob", "parameters'):
        constraint.accept(token)
    assert len(allowed(mask_of(constraint, tokens), tokens)) > tokens.count - 100
    constraint.rollback(len(tokenizer.encode('{"name": "Bob", "parameters')))
    for token in tokenizer.encode('{"name": "sum", "parameters":'):
        constraint.accept(token)
    assert len(allowed(mask_of(constraint, tokens), tokens)) < 1000


@pytest.mark.parametrize("begins", ["inside", "either", "outside"])
@pytest.mark.parametrize("form", [HERMES, next(form for form in FORMS if form.reader == "harmony")],
                         ids=lambda form: form.name)
def test_formats_hold_after_the_reasoning(form: ToolFormat, begins: Any) -> None:
    tokenizer, tokens = gpt2()
    wanted = rules(form, wanted=OutputFormat("json_schema", {"type": "boolean"}), begins=begins, thinking_budget=6)
    thought = 0
    for seed in range(12):
        ids = walk(wanted.begin(), tokens, random.Random(seed), most=60)
        text = tokenizer.decode(ids)
        _, said = calls_of(text, form, opened=begins == "inside")
        assert json.loads(said) in (True, False), text
        thought += form.thinking.closing in text
    assert thought == 12 if begins == "inside" else thought < 12 if begins == "either" else thought == 0


def test_an_answer_is_the_format_or_calls() -> None:
    tokenizer, tokens = gpt2()
    both = rules(tools=TOOLS[2:], wanted=OutputFormat("regex", "<yes>|<no>"))
    found = {tokenizer.decode(walk(both.begin(), tokens, random.Random(seed)))[:6] for seed in range(30)}
    assert found == {"<yes>", "<no>", "<tool_"}


def test_least_tokens_and_what_asks_for_nothing() -> None:
    _, tokens = gpt2()
    assert rules().begin() is None
    constraint = rules(least_tokens=2).begin()
    assert constraint is not None
    for expected in (True, True, False):
        assert constraint.fill(np.zeros(tokens.width, np.uint32)) is expected
        assert not expected or not np.intersect1d(allowed(mask_of(constraint, tokens), tokens), tokens.end_ids).size
        constraint.accept(5)
    constraint.rollback(2)
    assert constraint.fill(np.zeros(tokens.width, np.uint32))


def test_choices_that_cannot_be() -> None:
    with pytest.raises(InvalidRequestError, match="'nope', which is none of the tools"):
        rules(tools=TOOLS, choice=NamedTool("nope"))
    with pytest.raises(InvalidRequestError, match="no tools"):
        rules(choice="required")


_SETTINGS: list[dict[str, Any]] = [
    {"wanted": OutputFormat("json_object"), "begins": "either", "thinking_budget": 8},
    {"tools": TOOLS, "choice": "required", "begins": "inside", "thinking_budget": 4, "least_tokens": 9},
    {"tools": TOOLS, "form": FORMS[0]},
    {"tools": TOOLS}, {"tools": TOOLS, "wanted": OutputFormat("regex", "<[a-z<]*>"), "begins": "either"},
    *({"tools": TOOLS, "choice": "required", "form": form} for form in FORMS)]


@pytest.mark.parametrize("setting", range(len(_SETTINGS)))
def test_rolling_back_is_exact(setting: int) -> None:
    """After random accepts and rollbacks, the masks are those of a fresh constraint that was given the tokens left."""
    tokenizer, tokens = gpt2()
    compiled = rules(**_SETTINGS[setting])
    for seed in range(3):
        rng = random.Random(seed)
        constraint = compiled.begin()
        assert constraint is not None
        ids: list[int] = []
        script = tokenizer.encode('Now: <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call> and')
        for _ in range(60):
            if ids and (rng.random() < 0.2 or constraint.ended()):
                count = rng.randint(1, min(len(ids), 12))
                constraint.rollback(count)
                del ids[-count:]
            choices = allowed(mask_of(constraint, tokens), tokens)
            near = np.intersect1d(choices, closing_ids(tokens))
            wanted = script[len(ids)] if len(ids) < len(script) else -1
            token = int(rng.choice(near if len(near) and rng.random() < 0.6 else choices))
            token = wanted if wanted in choices else token
            constraint.accept(token)
            ids.append(token)
            if token in tokens.end_ids:
                constraint.rollback(1)
                ids.pop()
        fresh = compiled.begin()
        assert fresh is not None
        for token in ids:
            assert token in allowed(mask_of(fresh, tokens), tokens)
            fresh.accept(token)
        assert fresh.ended() == constraint.ended()
        if not fresh.ended():
            assert (mask_of(fresh, tokens) == mask_of(constraint, tokens)).all()
