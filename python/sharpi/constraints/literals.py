"""Arguments that are written neither as JSON nor as bare text in tags: rules of a Lark grammar, from a JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["BARE", "PYTHON", "Literals", "Rules", "literal", "until"]

_DEEPEST = 12
_LONGEST = 2_000  # a larger bound on a string is not enforced: each of its lengths is a state


def literal(text: str) -> str:
    """A text in a Lark grammar."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def until(text: str, schema: Any = None) -> str:
    """A lazy rule's body: everything up to the first `text`, and that. schema: may say how long it can be."""
    escaped = "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{ord(c):02x}" for c in text)
    return f"/(?s:.{_repeated(schema)}){escaped}/"


def _repeated(schema: Any) -> str:
    most = schema.get("maxLength") if isinstance(schema, Mapping) else None
    return f"{{0,{most}}}" if isinstance(most, int) and 0 <= most <= _LONGEST else "*"


@dataclass(frozen=True)
class Literals:
    """How a language writes values. quote: around strings, which have no escapes then; "" for JSON's strings."""

    words: tuple[str, str, str]  # true, false, null
    quote: str = ""
    bare_keys: bool = False
    colon: str = ":"
    comma: str = ","

    def string(self, text: str) -> str:
        return f"{self.quote}{text}{self.quote}" if self.quote else json.dumps(text, ensure_ascii=False)

    def value(self, value: Any) -> str:
        """How a value is written."""
        if isinstance(value, str):
            return self.string(value)
        if value is None or isinstance(value, bool):
            return self.words[2 if value is None else 0 if value else 1]
        if isinstance(value, list):
            return f"[{self.comma.join(map(self.value, value))}]"
        if isinstance(value, Mapping):
            return f"{{{self.comma.join(self.key(key) + self.value(part) for key, part in value.items())}}}"
        return json.dumps(value)

    def key(self, name: str) -> str:
        return (name if self.bare_keys else self.string(name)) + self.colon


BARE = Literals(("true", "false", "null"), quote='<|"|>', bare_keys=True)
PYTHON = Literals(("True", "False", "None"), colon=": ", comma=", ")


@dataclass
class Rules:
    """Collects a grammar's rules."""

    lines: list[str] = field(default_factory=list)

    def add(self, body: str, attributes: str = "") -> str:
        """The name of a new rule."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def pairs(self, pairs: list[tuple[str, bool]], comma: str) -> str:
        """A rule of these parts in their order, with commas between them. Each: its rule, whether it may be missing."""
        after = first = self.add('""')
        for rule, optional in reversed(pairs):
            further = self.add(f"{literal(comma)} {rule} {after}" + (f" | {after}" if optional else ""))
            first = self.add(f"{rule} {after}" + (f" | {first}" if optional else ""))
            after = further
        return first

    def value(self, schema: Any, root: Mapping[str, Any], language: Literals, depth: int = _DEEPEST) -> str:
        """A rule of the values that a schema allows. It knows types, properties, items, enumerations and choices; what
        else the schema says is not enforced."""
        if not isinstance(schema, Mapping) or depth == 0:
            schema = {}
        if isinstance(reference := schema.get("$ref"), str):
            return self.value(_resolved(reference, root), root, language, depth - 1)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            return self.add(" | ".join(literal(language.value(value)) for value in values))
        for name in ("anyOf", "oneOf"):
            if isinstance(choices := schema.get(name), list) and choices:
                return self.add(" | ".join(self.value(choice, root, language, depth - 1) for choice in choices))
        types = schema.get("type", _inferred(schema))
        names = [types] if isinstance(types, str) else [name for name in types if isinstance(name, str)]
        if depth <= 1:  # deeper values are scalars
            names = [name for name in names if name not in ("array", "object")] or ["null"]
        return self.add(" | ".join(self._typed(name, schema, root, language, depth) for name in names) or '""')

    def _typed(self, name: str, schema: Mapping[str, Any], root: Mapping[str, Any], language: Literals,
               depth: int) -> str:
        if name == "string":
            if language.quote:
                return f"{literal(language.quote)} {self.add(until(language.quote, schema), '[lazy]')}"
            return self.add(f'/"([^"\\\\\\x00-\\x1f]|\\\\["\\\\nrt]){_repeated(schema)}"/')
        if name in ("integer", "number"):
            return "/-?(0|[1-9][0-9]{0,17})" + (r"(\.[0-9]{1,17})?/" if name == "number" else "/")
        if name in ("boolean", "null"):
            return " | ".join(map(literal, language.words[:2] if name == "boolean" else language.words[2:]))
        inside = "items" if name == "array" else "properties"
        if name == "array":
            item = self.value(schema.get(inside), root, language, depth - 1 if inside in schema else 1)
            least = "" if schema.get("minItems") else "?"
            return f'"[" ({item} ({literal(language.comma)} {item})*){least} "]"'
        if not schema.get(inside) and schema.get("additionalProperties") is False:
            return '"{}"'
        if not schema.get(inside):
            key = f"/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ {literal(language.colon)}" if language.bare_keys else (
                f"/\"[A-Za-z_][A-Za-z0-9_]{{0,63}}\"/ {literal(language.colon)}")
            pair = f"{key} {self.value({}, root, language, 1)}"
            return f'"{{" ({pair} ({literal(language.comma)} {pair})*)? "}}"'
        return f'"{{" {self.properties(schema, root, language, depth)} "}}"'

    def properties(self, schema: Mapping[str, Any], root: Mapping[str, Any], language: Literals,
                   depth: int = _DEEPEST) -> str:
        """A rule of an object's pairs, without its braces."""
        required = schema.get("required") or ()
        return self.pairs([(self.add(f"{literal(language.key(key))} {self.value(part, root, language, depth - 1)}"),
                            key not in required) for key, part in schema.get("properties", {}).items()],
                          language.comma)


def _inferred(schema: Mapping[str, Any]) -> list[str]:
    if "properties" in schema:
        return ["object"]
    return ["array"] if "items" in schema else ["string", "number", "boolean", "null", "array", "object"]


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for name in reference.removeprefix("#/").split("/"):
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
