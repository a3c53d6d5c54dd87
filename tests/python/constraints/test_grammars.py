"""Formats of answers: what they allow, and what of them is refused."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
from constrained import bundled, gpt2, mask_of, walk

from sharpi.constraints import trial
from sharpi.constraints.grammar import compile_format
from sharpi.constraints.trial import try_grammar
from sharpi.errors import InvalidRequestError
from sharpi.serve.turns import OutputFormat

_SECONDS = 5.0  # a refusal takes one, on a machine that does nothing else


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of keywords that llguidance documents. Numbers and texts are bounded, so that random answers end."""
    kinds = ["integer", "number", "string", "enum", "const", "boolean", "null", "pattern", "format"]
    kind = rng.choice([*kinds, *(["object"] * 6 + ["array"] * 3 + ["anyOf", "tuple"] if depth else []),
                       *(["ref"] if depth == 3 else [])])
    low = rng.randint(-50, 50)
    if kind == "integer":
        return {"type": kind, "minimum": low, "maximum": low + rng.randint(0, 300)}
    if kind == "number":
        return {"type": kind, rng.choice(["minimum", "exclusiveMinimum"]): low, "maximum": low + rng.randint(1, 300)}
    if kind == "string":
        least = rng.randint(0, 5)
        return {"type": kind, "minLength": least, "maxLength": least + rng.randint(0, 12)}
    if kind == "enum":
        return {"enum": rng.sample(["a", "ä\n", 1, 2.5, True, None, "x\"y", "", -7], rng.randint(1, 5))}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-z]{1,4}$", "^(foo|ba+r){1,2}$", r"^\d{3}-\d{4}$"])}
    if kind == "format":
        return {"type": "string", "format": rng.choice(["date", "time", "date-time", "uuid", "ipv4"])}
    return _nested_schema(kind, rng, depth)


def _nested_schema(kind: str, rng: random.Random, depth: int) -> dict[str, Any]:
    def inner() -> dict[str, Any]:
        return random_schema(rng, depth - 1)

    if kind == "const":
        return {"const": rng.choice(["x", 3, False, [1, "a"], {"k": 1}])}
    if kind == "object":
        names = rng.sample(["a", "b c", "ключ", "d\"", "e"], rng.randint(0, 4))
        extra = rng.choice([False, {"type": "integer", "minimum": 0, "maximum": 9}])
        return {"type": "object", "properties": {name: inner() for name in names}, "additionalProperties": extra,
                "required": rng.sample(names, rng.randint(0, len(names)))}
    if kind == "array":
        least = rng.randint(0, 2)
        return {"type": "array", "items": inner(), "minItems": least, "maxItems": least + rng.randint(0, 3)}
    if kind == "tuple":
        return {"type": "array", "prefixItems": [inner(), inner()], "items": False, "minItems": 2}
    if kind == "anyOf":
        return {"anyOf": [inner() for _ in range(rng.randint(1, 3))]}
    if kind == "ref":
        return {"$defs": {"part": inner()}, "type": "object", "properties": {"r": {"$ref": "#/$defs/part"}},
                "required": ["r"], "additionalProperties": False}
    return {"type": kind}


@pytest.mark.parametrize("vocabulary", [gpt2, bundled])
def test_random_answers_follow_random_schemas(vocabulary: Callable[[], Any]) -> None:
    tokenizer, tokens = vocabulary()
    texts = set()
    for seed in range(120):
        rng = random.Random(seed)
        schema = random_schema(rng)
        grammar = compile_format(OutputFormat("json_schema", schema), tokens)
        text = tokenizer.decode(walk(grammar.start(), tokens, rng))
        value = json.loads(text)
        jsonschema.Draft202012Validator(schema).validate(value)
        texts.add(text)
    assert len(texts) > 80


@pytest.mark.parametrize("vocabulary", [gpt2, bundled])
def test_json_objects_lark_gbnf_and_regular_expressions(vocabulary: Callable[[], Any]) -> None:
    tokenizer, tokens = vocabulary()
    rng = random.Random(1)
    for wanted, is_right in (
            (OutputFormat("json_object"), lambda text: isinstance(json.loads(text), dict)),
            (OutputFormat("regex", "(foo|ba+r){2,5}"), re.compile("(foo|ba+r){2,5}").fullmatch),
            (OutputFormat("lark", 'start: "<" n ("," n)* ">"\nn: /[0-9]{1,3}/'), re.compile("<[0-9,]+>").fullmatch),
            (OutputFormat("gbnf", 'root ::= "<" n ("," n){1,4} ">" # a list\nn ::= [0-9] [0-9]?'),
             re.compile("<[0-9]{1,2}(,[0-9]{1,2}){1,4}>").fullmatch)):
        grammar = compile_format(wanted, tokens)
        for _ in range(5):
            text = tokenizer.decode(walk(grammar.start(), tokens, rng))
            assert is_right(text), text


def test_a_mask_forbids_rows_behind_the_vocabulary_and_control_tokens() -> None:
    _, tokens = gpt2()
    matcher = compile_format(OutputFormat("regex", "(?s:.*)"), tokens).start()
    words = mask_of(matcher, tokens)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert bits[:tokens.count].sum() > tokens.count // 2
    assert not bits[tokens.count:].any()
    assert all(bits[token] for token in tokens.end_ids)
    limited = mask_of(compile_format(OutputFormat("regex", "[a-z<>|]{5}"), tokens).start(), tokens)
    assert not any(limited[token >> 5] >> (token & 31) & 1 for token in tokens.end_ids)


def test_json_may_be_printed_in_any_usual_way_but_not_be_white_space_without_end() -> None:
    _, tokens = gpt2()
    grammar = compile_format(OutputFormat("json_object"), tokens)
    value = {"a": [1, {"b": "x y"}, []], "c": {"d": {"e": None}}}
    for text in (json.dumps(value), json.dumps(value, indent=4), json.dumps(value, indent="\t"),
                 json.dumps(value, separators=(",", ":"))):
        assert grammar.start().accepts(text.encode()), text
    for text in ('{  "a": 1}', '{\n\n"a": 1}', '{"a":\t1}', '{"a": 1\n' + 17 * " " + "}"):
        assert not grammar.start().accepts(text.encode()), text


@pytest.mark.parametrize(("kind", "source", "told"), [
    ("regex", "(a", "the regular expression cannot be used: .*unclosed group"),
    ("regex", "(?=a)b", "look-around"),
    ("regex", "", "must be a text"),
    ("lark", "start: foo", "the Lark grammar cannot be used: .*unknown name: \"foo\""),
    ("gbnf", "root ::= foo", "the GBNF grammar cannot be used: Rule 'foo' not found"),
    ("gbnf", 'start: "a"', "Expected ::="),
    ("gbnf", 'root ::= "' + "a" * (32 << 10), "larger than 32 KiB"),
    ("json_schema", {"type": "strin"}, "the JSON schema cannot be used: .*strin"),
    ("json_schema", {"not": {}}, "not"),
    ("json_schema", {"type": "string", "pattern": "["}, "JSON schema"),
    ("json_schema", 7, "must be an object"),
    ("json_schema", "{", "is not JSON"),
    ("json_schema", {"enum": [{1}]}, "is not JSON"),
    ("regex", "a" * (257 << 10), "larger than 256 KiB"),
    ("xml", "", "unknown"),
])
def test_what_is_wrong_is_told_in_one_line(kind: Any, source: Any, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told) as raised:
        compile_format(OutputFormat(kind, source), gpt2()[1])
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE: dict[str, tuple[str, Any]] = {
    "a stack of rules": ("lark", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(10_000)) + 'r10000: "a"'),
    "doubling terminals": (
        "lark", "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(60)) + 'T60: "a"'),
    "intersections": ("lark", "start: A\nA: " + " & ".join(f"/(?s:.*)x{{{i}}}(?s:.*)/" for i in range(1, 60))),
    "parentheses": ("lark", "start: " + "(" * 100_000 + '"a"' + ")" * 100_000),
    "parentheses of a regex": ("regex", "(" * 100_000 + "a" + ")" * 100_000),
    "parentheses of GBNF": ("gbnf", "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000),
    "a stack of GBNF's rules": ("gbnf", "root ::= R0\n" + "".join(f"R{i} ::= R{i + 1} R{i + 1}\n" for i in range(900))
                                + 'R900 ::= "a"'),
    "an empty language": ("regex", r"[^\x00-\U0010FFFF]"),
    "depth": ("json_schema", _nested(500)),
    "a large divisor": ("json_schema", {"type": "integer", "multipleOf": 99_999_999}),
    "divisors": ("json_schema", {"allOf": [{"type": "integer", "multipleOf": n} for n in (7, 11, 13, 17, 19, 23)]}),
    "patterns at once": ("json_schema", {"allOf": [{"type": "string", "pattern": f"x{{{i}}}.*y{{{i}}}"}
                                                   for i in range(1, 100)]}),
    "properties": ("json_schema", {"type": "object", "properties": {f"p{i}": {} for i in range(10_000)}}),
    "itself": ("json_schema", {"$ref": "#"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_sources_are_refused_in_time(name: str) -> None:
    _, tokens = gpt2()
    tokens.prepare()
    began = time.monotonic()
    with pytest.raises(InvalidRequestError) as raised:
        compile_format(OutputFormat(*HOSTILE[name]), tokens)  # type: ignore[arg-type]
    assert time.monotonic() - began < _SECONDS
    assert "\n" not in str(raised.value)
    compile_format(OutputFormat("regex", "a"), tokens)  # others are not disturbed


def test_a_trial_that_died_is_replaced() -> None:
    try_grammar('start: "a"')
    process = trial._idle.get_nowait()
    process._process.kill()
    process._process.wait()
    trial._idle.put(process)
    with pytest.raises(InvalidRequestError):
        try_grammar('start: "a"')
    try_grammar('start: "a"')
