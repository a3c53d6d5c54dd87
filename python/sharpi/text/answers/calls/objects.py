"""Calls that are JSON objects with a name and arguments: alone, or several in an array."""

from __future__ import annotations

from sharpi.text.answers.calls.call_reader import CallReader, unwrapped
from sharpi.text.answers.calls.json_text import collected_value, read_string
from sharpi.text.answers.source import MisreadError, Parse

__all__ = ["read_objects"]


def read_objects(calls: CallReader) -> Parse[None]:
    source = calls.source
    tagged = yield from source.take(*calls.form.triggers)
    yield from source.skip_space()
    yield from source.take("[")
    while True:
        yield from source.skip_space()
        yield from _read_object(calls, bare=not tagged)
        yield from source.skip_space()
        if not (yield from source.take(",", ";")) and not (yield from source.next_of("{")):
            break
    yield from source.take("]")
    yield from source.skip_space()
    yield from source.take(calls.form.last_tag)


def _read_object(calls: CallReader, bare: bool) -> Parse[None]:
    """bare: nothing but its keys and the name of a tool tells the object from an answer in JSON."""
    source, form = calls.source, calls.form
    name, early = "", ""  # arguments may come before the name
    yield from source.expect("{")
    while True:
        yield from source.skip_space()
        key = yield from read_string(source)
        yield from source.skip_space()
        yield from source.expect(":")
        yield from source.skip_space()
        if key in form.names and not name:
            name = yield from read_string(source)
            if not name or (bare and name not in calls.tools):
                raise MisreadError
        elif key in form.arguments_names and not early and not calls.sink.in_call:
            if name:
                calls.begin(name)
                yield from calls.arguments()
            else:
                early = yield from collected_value(source)
        elif bare and key != "type":
            raise MisreadError
        else:
            yield from collected_value(source)
        yield from source.skip_space()
        if (yield from source.expect(",", "}")) == "}":
            break
    if not calls.sink.in_call:
        if not name:
            raise MisreadError
        calls.begin(name)
        calls.sink.arguments(unwrapped(early) if early else "{}")
    calls.end()
