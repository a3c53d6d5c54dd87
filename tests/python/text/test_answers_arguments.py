"""Arguments that are bare text get the types that their tool's schema allows."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharpi.text.answers.schema_kinds import kinds_of, typed_value

PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"}, "whole": {"type": "integer"}, "number": {"type": "number"},
    "truth": {"type": "boolean"}, "list": {"type": "array"}, "object": {"type": "object"}, "nothing": {"type": "null"},
    "anything": {},
    "text or null": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "either": {"type": ["integer", "string"]},
    "words": {"enum": ["a", "b"]}, "mixed": {"enum": ["a", 1, None]}, "one": {"const": 2.5},
    "by reference": {"$ref": "#/$defs/Point"}, "all": {"allOf": [{"type": ["object", "string"]}, {"type": "object"}]},
    "nullable": {"type": "integer", "nullable": True}, "circle": {"$ref": "#/$defs/Circle"}, "broken": {"type": 5},
    "nowhere": {"$ref": "#/$defs/Nowhere"}, "never": {"allOf": [{"type": "string"}, {"type": "object"}]}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "$defs": {
    "Point": {"type": "object", "properties": {"x": {"type": "number"}}}, "Circle": {"$ref": "#/$defs/Circle"}}}


@pytest.mark.parametrize(("key", "text", "value"), [
    ("text", "5", "5"), ("text", "null", "null"), ("text", "", ""), ("text", ' "a"\n', ' "a"\n'),
    ("whole", "5", 5), ("whole", " 5\n", 5), ("whole", "5.0", 5.0), ("whole", "5.5", "5.5"), ("whole", "five", "five"),
    ("whole", "9" * 40, int("9" * 40)), ("number", "-1.5e3", -1500.0), ("number", "7", 7), ("number", "NaN", "NaN"),
    ("truth", "true", True), ("truth", "True", True), ("truth", "1", "1"), ("list", '["a", 1]', ["a", 1]),
    ("list", "a, b", "a, b"), ("object", '{"a": {"b": null}}', {"a": {"b": None}}), ("object", "[" * 9999, "[" * 9999),
    ("nothing", "None", None), ("anything", "5", 5), ("anything", "abc", "abc"), ("anything", '"abc"', '"abc"'),
    ("text or null", "null", None), ("text or null", "5", "5"), ("either", "5", 5), ("either", "x", "x"),
    ("words", "a", "a"), ("mixed", "1", 1), ("mixed", "a", "a"), ("mixed", "null", None), ("one", "2.5", 2.5),
    ("by reference", '{"x": 1}', {"x": 1}), ("all", '{"x": 1}', {"x": 1}), ("nullable", "null", None),
    ("nullable", "3", 3), ("circle", "3", 3), ("broken", "3", 3), ("nowhere", "3", 3), ("never", "{}", {}),
    ("unknown", "3", "3"), ("whole", '"3"', "3"),
])
def test_an_argument_gets_the_type_that_its_schema_allows(key: str, text: str, value: Any) -> None:
    found = json.loads(typed_value(text, kinds_of(SCHEMA, key)))
    assert found == value and type(found) is type(value)


def test_arguments_that_no_property_names() -> None:
    assert kinds_of({"additionalProperties": {"type": "integer"}}, "x") == {"integer"}
    for schema in ({}, {"additionalProperties": True}, {"properties": None}, {"properties": {"x": {}}}):
        assert kinds_of(schema, "y") == {"string"}


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
                    max_leaves=6)


@given(st.sampled_from(sorted(PROPERTIES)), JSON | st.text())
def test_a_value_that_its_schema_allows_is_allowed_as_it_is_read(key: str, value: Any) -> None:
    schema = {**PROPERTIES[key], "$defs": SCHEMA["$defs"]}
    try:
        if key in ("circle", "broken", "nowhere") or not jsonschema.Draft202012Validator(schema).is_valid(value):
            return
    except jsonschema.exceptions.SchemaError:
        return
    text = value if isinstance(value, str) else json.dumps(value)
    jsonschema.validate(json.loads(typed_value(text, kinds_of(SCHEMA, key))), schema)
