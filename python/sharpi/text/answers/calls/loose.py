"""Arguments in notations near JSON, which are turned into JSON: Gemma's objects, and Python's keyword arguments."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence

from sharpi.text.answers.calls.call_reader import CallReader
from sharpi.text.answers.calls.json_text import is_json, read_string, string_part
from sharpi.text.answers.source import MisreadError, Parse

__all__ = ["read_bare", "read_python"]

_DEEPEST = 64
_QUOTE = '<|"|>'
_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORD_ENDS = ",}])"


def read_bare(calls: CallReader) -> Parse[None]:
    """Calls such as `<|tool_call>call:name{city:<|"|>Oslo<|"|>,days:2}<tool_call|>`."""
    source, form = calls.source, calls.form
    yield from source.expect(*form.triggers)
    name, _ = yield from calls.header("{")
    calls.begin(name)
    yield from _items(calls, "}", ":", _DEEPEST)
    yield from source.skip_space()
    yield from source.take(form.end)
    calls.end()


def read_python(calls: CallReader) -> Parse[None]:
    """Calls such as `[weather(city="Oslo", days=2), now()]`."""
    source = calls.source
    yield from source.expect(*calls.form.triggers)
    yield from source.skip_space()
    yield from source.expect("[")
    while True:
        yield from source.skip_space()
        name, _ = yield from calls.header("(")
        calls.begin(name)
        yield from _items(calls, ")", "=", _DEEPEST)
        calls.end()
        yield from source.skip_space()
        if not (yield from source.take(",")):
            break
    yield from source.take("]")
    yield from source.skip_space()
    yield from source.take(calls.form.last_tag)


def _items(calls: CallReader, close: str, between: str, depth: int) -> Parse[None]:
    """Keys and values up to the bracket that closes them."""
    source, emit = calls.source, calls.sink.arguments
    if not depth:
        raise MisreadError
    emit("{")
    first = True
    yield from source.skip_space()
    while not (yield from source.take(close)):
        key = yield from _key(calls, between)
        emit(("" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        first = False
        yield from _value(calls, depth - 1)
        yield from source.skip_space()
        if not (yield from source.take(",")) and not (yield from source.next_of(close)):
            raise MisreadError
        yield from source.skip_space()
    emit("}")


def _key(calls: CallReader, between: str) -> Parse[str]:
    source = calls.source
    quote = yield from source.next_of(_QUOTE, '"', "'")
    if not quote:
        key, _ = yield from calls.header(between, name=False)
        return key.strip()
    if quote == _QUOTE:
        source.at += len(_QUOTE)
        key, _ = yield from calls.header(_QUOTE, name=False)
    else:
        key = yield from _string(calls)
    yield from source.skip_space()
    yield from source.expect(between)
    return key


def _value(calls: CallReader, depth: int) -> Parse[None]:
    source, emit = calls.source, calls.sink.arguments
    yield from source.skip_space()
    begin = yield from source.next_of(_QUOTE, '"', "'", "{", "[")
    if begin == _QUOTE:
        source.at += len(_QUOTE)
        emit('"')
        if not (yield from source.until((_QUOTE,), lambda text: emit(string_part(text)))):
            raise MisreadError
        emit('"')
    elif begin in ('"', "'"):
        emit(json.dumps((yield from _string(calls)), ensure_ascii=False))
    elif begin == "{":
        source.at += 1
        yield from _items(calls, "}", ":", depth)
    elif begin == "[":
        source.at += 1
        yield from _list(calls, depth)
    else:
        emit((yield from _word(calls, _WORD_ENDS)))


def _list(calls: CallReader, depth: int) -> Parse[None]:
    source, emit = calls.source, calls.sink.arguments
    if not depth:
        raise MisreadError
    emit("[")
    first = True
    yield from source.skip_space()
    while not (yield from source.take("]")):
        emit("" if first else ", ")
        first = False
        yield from _value(calls, depth - 1)
        yield from source.skip_space()
        if not (yield from source.take(",")) and not (yield from source.next_of("]")):
            raise MisreadError
        yield from source.skip_space()
    emit("]")


def _word(calls: CallReader, ends: Sequence[str]) -> Parse[str]:
    """A number, or one of the words for truth and nothing."""
    text, end = yield from calls.header(*ends, name=False)
    calls.source.at -= len(end)
    word = _WORDS.get(text.strip(), text.strip())
    if not is_json(word):
        raise MisreadError
    return word


def _string(calls: CallReader) -> Parse[str]:
    """A string in quotes, as Python or JSON writes it."""
    if calls.form.notation != "python":
        return (yield from read_string(calls.source))
    source = calls.source
    quote = yield from source.take('"', "'")
    parts: list[str] = []
    while mark := (yield from source.until((quote, "\\"), parts.append)):
        if mark == quote:
            break
        while source.at == len(source.text):
            if not (yield from source.more()):
                raise MisreadError
        parts.append("\\" + source.text[source.at])
        source.at += 1
    if not mark:
        raise MisreadError
    text = "".join(parts).replace("\r", "\\r").replace("\n", "\\n")
    try:
        return str(ast.literal_eval(f"{quote}{text}{quote}"))
    except (SyntaxError, ValueError):
        raise MisreadError from None
