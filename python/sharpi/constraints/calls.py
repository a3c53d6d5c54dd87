"""Grammars of tool calls: the name is a tool's, and the arguments follow its schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from sharpi.constraints.grammar import Grammar, json_options
from sharpi.constraints.lazy import Lazy, Triggers
from sharpi.constraints.literals import BARE, PYTHON, Rules, literal, until
from sharpi.constraints.tokens import Tokens
from sharpi.errors import InvalidRequestError
from sharpi.text.answers.schema_kinds import kinds_of
from sharpi.text.answers.tool_format import Parameter, ToolFormat

__all__ = ["DescribedTool", "OptionalCalls", "compile_calls"]

_MOST_CALLS = 32
_LARGEST_SCHEMAS = 256 << 10


class DescribedTool(Protocol):
    """A tool, with the JSON schema of its arguments."""

    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, Any]: ...


def compile_calls(tools: Sequence[DescribedTool], form: ToolFormat, tokens: Tokens, *, parallel: bool,
                  prefix: str = "") -> Grammar:
    """The grammar of an answer that is one call, or with `parallel` several. It takes up to two seconds.

    prefix: Lark for what stands before the calls. Raises InvalidRequestError, whose one line says what is wrong with
    the tools.
    """
    calls = _Calls(tools, _without_end_token(form, tokens))
    calls.start(f"{prefix} {literal(form.opening)}", parallel=parallel and form.several, closed=True)
    return calls.compiled(tokens)


class OptionalCalls:
    """The grammars of calls that a model may make, each from a trigger on. Raises InvalidRequestError, as
    `compile_calls` does."""

    def __init__(self, tools: Sequence[DescribedTool], form: ToolFormat, tokens: Tokens, *, parallel: bool) -> None:
        form = _without_end_token(form, tokens)
        self._tokens = tokens
        self._once = not (parallel and form.several)
        triggers: dict[str, Grammar] = {}
        starts: dict[str, Grammar] = {}
        for trigger in form.triggers:
            calls = _Calls(tools, form)
            calls.start_at(trigger, parallel=not self._once)
            triggers[trigger] = calls.compiled(tokens)
        if form.starts:  # which begin any JSON object: a call is one that names a tool
            calls = _Calls(tools, form)
            calls.start("", parallel=False, closed=False)
            grammar = calls.compiled(tokens)
            starts = {form.begin(tool.name).rstrip(): grammar for tool in tools}
        self._triggers, self._starts = Triggers(tokens, triggers), Triggers(tokens, starts)

    def begin(self) -> Lazy:
        """The constraint of one answer."""
        return Lazy(self._triggers, self._starts, self._tokens, once=self._once)


def _without_end_token(form: ToolFormat, tokens: Tokens) -> ToolFormat:
    """A call that an end token closes ends the answer."""
    return replace(form, end="") if form.end in tokens.end_texts else form


class _Calls:
    """Writes one grammar."""

    def __init__(self, tools: Sequence[DescribedTool], form: ToolFormat) -> None:
        self._form = form
        self._rules = Rules()
        self._start = ""
        if not tools:
            raise InvalidRequestError("there are no tools to call")
        size = sum(len(json.dumps(dict(tool.parameters))) for tool in tools)
        if size > _LARGEST_SCHEMAS:
            raise InvalidRequestError(f"the tools' schemas are larger than {_LARGEST_SCHEMAS >> 10} KiB")
        self._named = self._rules.add(" | ".join(self._call(tool) for tool in tools))

    def compiled(self, tokens: Tokens) -> Grammar:
        grammar = "\n".join([f"start: {self._start}", *self._rules.lines])
        return Grammar(grammar, tokens, "grammar of the tools' calls")

    def start(self, opening: str, *, parallel: bool, closed: bool) -> None:
        """The answer is `opening`, one call or several, and with `closed` what closes them."""
        call = self._rules.add(f"{literal(self._form.before_name)} {self._named}")
        further = f"({literal(self._form.separator)} {call}){{0,{_MOST_CALLS - 1}}}" if parallel else ""
        self._start = f"{opening} {call} {further} {literal(self._form.closing) if closed else ''}"

    def start_at(self, trigger: str, *, parallel: bool) -> None:
        """The same from a trigger on. Calls that nothing encloses come one by one, each by its own trigger."""
        form = self._form
        if (at := form.opening.find(trigger)) >= 0:
            self.start(literal(form.opening[at:]), parallel=parallel, closed=True)
        elif (at := form.before_name.find(trigger)) >= 0:
            self._start = f"{literal(form.before_name[at:])} {self._named}"
        else:  # another way to open calls
            rest = form.opening.partition(">")[2] if form.opening else ""
            self.start(literal(trigger + rest), parallel=parallel and bool(form.closing), closed=True)

    def _call(self, tool: DescribedTool) -> str:
        before, counts, after = self._form.after_name.partition("{index}")
        index = f"/[0-9]{{1,4}}/ {literal(after)}" if counts else ""
        name = f"{literal(tool.name + before)} {index}"
        return self._rules.add(f"{name} {self._arguments(tool)} {literal(self._form.end)}")

    def _arguments(self, tool: DescribedTool) -> str:
        schema = dict(tool.parameters)
        if self._form.notation == "tags":
            return self._tags(schema)
        if self._form.notation == "python":
            return self._keywords(schema)
        schema.setdefault("type", "object")
        if schema.get("properties"):
            schema.setdefault("additionalProperties", False)  # else models may invent arguments
        if self._form.notation == "bare":
            return self._rules.value(schema, schema, BARE)
        return _json(schema)

    def _keywords(self, schema: Mapping[str, Any]) -> str:
        rules, required = self._rules, schema.get("required") or ()
        return rules.pairs([(rules.add(f"{literal(key + '=')} {rules.value(part, schema, PYTHON)}"),
                             key not in required) for key, part in (schema.get("properties") or {}).items()], ", ")

    def _tags(self, schema: Mapping[str, Any]) -> str:
        parameter, required = self._form.parameter, schema.get("required") or ()
        assert parameter is not None
        parts = [self._rules.add(self._tagged(parameter, schema, key, part)) + ("" if key in required else "?")
                 for key, part in (schema.get("properties") or {}).items()]
        return " ".join(parts)

    def _tagged(self, parameter: Parameter, schema: Mapping[str, Any], key: str, part: Any) -> str:
        kinds = kinds_of(schema, key)
        begin = literal(parameter.begin(key, "string" in kinds))
        values = part.get("enum") if isinstance(part, Mapping) else None
        if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            named = self._rules.add(" | ".join(map(literal, values)))
            return f"{begin} {named} {literal(parameter.end)}"
        if "string" in kinds:  # its text has no escapes, so the first tag ends it
            tag = parameter.end.strip("\n")
            rest = parameter.end.partition(tag)[2]
            return f"{begin} {self._rules.add(until(tag, part), '[lazy]')} {literal(rest)}"
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        return f"{begin} {_json({**part, **shared} if isinstance(part, Mapping) else {})} {literal(parameter.end)}"


def _json(schema: Mapping[str, Any]) -> str:
    """Tools' schemas come from programs that know nothing of grammars: what cannot be enforced is ignored."""
    return "%json " + json.dumps({**schema, "x-guidance": json_options(lenient=True)})
