"""What a tool's schema says of an argument that is written as bare text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sharpi.text.answers.calls.json_text import is_json

__all__ = ["kinds_of", "typed_value"]

_ANY = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_STRING = frozenset({"string"})
_DEEPEST = 16
# How Python, in which templates are written, spells JSON's words.
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def kinds_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The JSON types that an argument may have; a string if the schema does not know it."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    if found is None:
        found = schema.get("additionalProperties")
    return _STRING if found is None or isinstance(found, bool) else _kinds(found, schema, _DEEPEST)


def _kinds(part: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(part, Mapping) or not depth:
        return _ANY
    kinds = _ANY
    if isinstance(reference := part.get("$ref"), str):
        kinds &= _kinds(_resolved(reference, root), root, depth - 1)
    declared = part.get("type")
    if isinstance(declared, (str, list)):
        names = {declared} if isinstance(declared, str) else {name for name in declared if isinstance(name, str)}
        kinds &= names | ({"integer"} if "number" in names else set())
    values = part["enum"] if isinstance(part.get("enum"), list) else [part["const"]] if "const" in part else None
    if values is not None:
        kinds &= frozenset().union(*map(_kinds_of_value, values))
    for name in ("anyOf", "oneOf"):
        if isinstance(choices := part.get(name), list):
            kinds &= frozenset().union(*(_kinds(choice, root, depth - 1) for choice in choices))
    for further in part["allOf"] if isinstance(part.get("allOf"), list) else ():
        kinds &= _kinds(further, root, depth - 1)
    if part.get("nullable") is True:
        kinds |= {"null"}
    return kinds or _ANY


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for name in reference.removeprefix("#/").split("/"):
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _kinds_of_value(value: Any) -> frozenset[str]:
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, (int, float)):
        return frozenset({"integer", "number"} if isinstance(value, int) or value.is_integer() else {"number"})
    if isinstance(value, str):
        return _STRING
    return frozenset({"null"} if value is None else {"array"} if isinstance(value, list) else {"object"})


def typed_value(text: str, kinds: frozenset[str]) -> str:
    """The JSON of an argument: what its text says as JSON if that may stand there, else a string."""
    word = _PYTHON_WORDS.get(text.strip(), text.strip())
    if is_json(word):
        value = json.loads(word)
        if not isinstance(value, str) and kinds & _kinds_of_value(value):
            return word
        # A string in quotes is one only if it cannot be meant to have them.
        if isinstance(value, str) and "string" not in kinds:
            return word
    return json.dumps(text, ensure_ascii=False)
