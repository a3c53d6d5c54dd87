"""Calls that are a name between control tokens, then JSON."""

from __future__ import annotations

import re

from sharpi.text.answers.calls.call_reader import CallReader
from sharpi.text.answers.calls.objects import read_objects
from sharpi.text.answers.source import Parse

__all__ = ["read_mistral", "read_named"]

_COUNTED = re.compile(r"(.+):[0-9]+")  # Kimi's ids name the function
_ID = "[CALL_ID]"


def read_named(calls: CallReader) -> Parse[None]:
    source, form = calls.source, calls.form
    head = form.triggers[-1]
    if form.opening:
        yield from source.take(form.opening)
        yield from source.skip_space()
    while True:
        yield from source.expect(head)
        yield from source.skip_space()
        yield from _read_call(calls)
        yield from source.skip_space()
        if not (yield from source.next_of(head)):
            break
    yield from source.take(form.closing)


def _read_call(calls: CallReader) -> Parse[None]:
    source, form = calls.source, calls.form
    before_arguments = form.after_name.replace(":{index}", "")
    stops = (before_arguments, "{", _ID) if _ID in form.tokens else (before_arguments,)
    before_name = yield from source.take(form.before_name.removeprefix(form.triggers[-1]))
    name, stop = yield from calls.header(*stops)
    call_id = None
    if stop == _ID:
        call_id, stop = yield from calls.header(before_arguments)
    if stop == "{":
        source.at -= 1
    if "{index}" in form.after_name and (counted := _COUNTED.fullmatch(name)):
        call_id, name = before_name + name, counted[1]
    calls.begin(name, call_id)
    yield from calls.arguments(form.end.strip())
    yield from source.skip_space()
    yield from source.take(form.end.strip())
    calls.end()


def read_mistral(calls: CallReader) -> Parse[None]:
    """The same control token begins a name, or an array of objects."""
    source = calls.source
    trigger = calls.form.triggers[0]
    yield from source.expect(trigger)
    yield from source.skip_space()
    array = yield from source.next_of("[", "{")
    source.rewind()
    source.hold()
    yield from read_objects(calls) if array else read_named(calls)
