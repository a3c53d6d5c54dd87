"""Calls whose arguments stand in tags of their own, which are turned into JSON by the tools' schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from sharpi.text.answers.calls.call_reader import CallReader
from sharpi.text.answers.calls.json_text import is_json, string_part
from sharpi.text.answers.schema_kinds import kinds_of, typed_value
from sharpi.text.answers.source import MisreadError, Parse
from sharpi.text.answers.tool_format import Parameter

__all__ = ["read_tags"]

_TAG = re.compile(r"<[^>]*>")
_BETWEEN_TAGS = re.compile(r"(?<=>)\n?(?=<)")


def read_tags(calls: CallReader) -> Parse[None]:
    source, form = calls.source, calls.form
    head = form.before_name[form.before_name.rindex("<"):]
    ends = _TAG.findall(form.end + form.closing)  # of a call, perhaps of all calls
    around = yield from source.take(*(trigger for trigger in form.triggers if trigger != head))
    if around:
        ends[-1] = around.replace("<", "</")
    while True:
        yield from source.skip_space()
        yield from source.expect(head)
        name, stop = yield from calls.header(*_name_stops(calls))
        if not around and head != form.triggers[0] and name not in calls.tools:
            raise MisreadError  # a tag that some models forget the marks of calls around
        source.at -= len(stop) if stop.startswith("<") else 0
        calls.begin(name)
        closed = yield from _read_arguments(calls, name, ends)
        yield from source.skip_space()
        if closed == ends[-1] or not (yield from source.next_of(head)):
            break
    if closed != ends[-1]:
        yield from source.take(ends[-1])


def _name_stops(calls: CallReader) -> tuple[str, ...]:
    form = calls.form
    assert form.parameter is not None
    if form.after_name.strip():
        return (form.after_name.rstrip("\n"),)
    return ("\n", form.parameter.before_name, form.end)


def _read_arguments(calls: CallReader, name: str, ends: list[str]) -> Parse[str]:
    """Reads the arguments and the tag that closes them, which it returns."""
    source, sink, parameter = calls.source, calls.sink, calls.form.parameter
    assert parameter is not None
    written = 0
    while True:
        yield from source.skip_space()
        found = yield from source.take(parameter.before_name, *ends)
        if found != parameter.before_name:
            break
        key = yield from _read_key(calls, parameter)
        sink.arguments(("{" if not written else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        yield from _read_value(calls, parameter, calls.tools.get(name, {}), key)
        written += 1
    rest = source.text[source.at:]
    if not found and any(tag.startswith(rest) for tag in (parameter.before_name, *ends)):
        raise MisreadError  # cut off: what is missing is not known
    sink.arguments("}" if written else "{}")
    calls.end()
    return found


def _read_key(calls: CallReader, parameter: Parameter) -> Parse[str]:
    first, *others = _BETWEEN_TAGS.split(parameter.after_name.rstrip("\n"))
    key, _ = yield from calls.header(first, name=False)
    for tag in others:
        yield from calls.source.skip_space()
        yield from calls.source.expect(tag)
    return key


def _read_value(calls: CallReader, parameter: Parameter, schema: Mapping[str, object], key: str) -> Parse[None]:
    source, sink = calls.source, calls.sink
    kinds = kinds_of(schema, key)
    said = ""
    if parameter.kinds:
        said = yield from source.expect(*parameter.kinds)
    if parameter.after_name.endswith("\n"):
        yield from source.take("\r\n", "\n")
    tag = parameter.end.strip("\n")
    tags = (tag, "\n" + tag) if parameter.end.startswith("\n") else (tag,)
    if said in parameter.kinds[:1] or (not said and kinds == {"string"}):
        sink.arguments('"')
        if not (yield from source.until(tags, lambda text: sink.arguments(string_part(text)))):
            raise MisreadError
        sink.arguments('"')
        return
    parts: list[str] = []
    closed = yield from source.until(tags, parts.append)
    text = "".join(parts)
    if not closed:
        sink.arguments(text)
        raise MisreadError
    if said:
        sink.arguments(text.strip() if is_json(text) else json.dumps(text, ensure_ascii=False))
    else:
        sink.arguments(typed_value(text, kinds))
