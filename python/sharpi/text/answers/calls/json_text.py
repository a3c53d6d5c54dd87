"""JSON as it comes: where a value ends, and whether it is still one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Literal

from sharpi.text.answers.source import MisreadError, Parse, Source

__all__ = ["collected_value", "is_json", "read_string", "read_value", "string_part"]

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SPACE = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"[-+.\w]+")
_LITERAL = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


def string_part(text: str) -> str:
    """`text` inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(text: str) -> None:
    raise ValueError(text)  # NaN and infinities, which Python's parser takes


def read_value(source: Source, emit: Callable[[str], None]) -> Parse[None]:
    """Reads one value and emits its text, which is repaired where models often err: line breaks in strings, and
    backslashes that begin no escape. Raises `MisreadError` at the first character that no value has, and if the text
    ends before the value does."""
    value = _Value()
    while True:
        source.at, text = value.feed(source.text, source.at)
        if text:
            emit(text)
        if value.done:
            return
        if value.broken or not (yield from source.more()):
            raise MisreadError


def collected_value(source: Source) -> Parse[str]:
    """The text of the value that comes next."""
    parts: list[str] = []
    yield from read_value(source, parts.append)
    return "".join(parts)


def read_string(source: Source) -> Parse[str]:
    """The string that comes next, decoded. Raises `MisreadError` if none does."""
    if not (yield from source.next_of('"')):
        raise MisreadError
    return str(json.loads((yield from collected_value(source))))


class _Value:
    """A value of which some text has come."""

    def __init__(self) -> None:
        self.done = self.broken = False
        self._open: list[str] = []  # the closing brackets that are due
        self._expects: Literal["value", "key", "colon", "next", "string"] = "value"
        self._may_close = False  # directly behind an opening bracket
        self._is_key = False  # the string that is being read

    def feed(self, text: str, at: int) -> tuple[int, str]:
        """How far the value goes in `text[at:]`, and its text. What may still change its meaning, such as half a
        number, is left."""
        out: list[str] = []
        while at < len(text) and not self.done and not self.broken:
            step = self._in_string(text, at, out) if self._expects == "string" else self._between(text, at, out)
            if step is None:
                break
            at = step
        return at, "".join(out)

    def _in_string(self, text: str, at: int, out: list[str]) -> int | None:
        plain = _PLAIN.match(text, at)
        assert plain is not None
        if plain.end() > at:
            out.append(plain[0])
            return plain.end()
        if text[at] == '"':
            out.append('"')
            if self._is_key:
                self._expects = "colon"
            else:
                self._end_value()
        elif text[at] != "\\":
            out.append(string_part(text[at]))
        elif escape := _ESCAPE.match(text, at):
            out.append(escape[0])
            return escape.end()
        elif _CUT_ESCAPE.fullmatch(text, at):
            return None
        else:
            out.append("\\\\")
        return at + 1

    def _between(self, text: str, at: int, out: list[str]) -> int | None:
        """A step outside of strings."""
        space = _SPACE.match(text, at)
        assert space is not None
        if space.end() > at:
            out.append(space[0])
            return space.end()
        char = text[at]
        if self._expects in ("value", "key") and char not in "]}":
            return self._begin(text, at, out)
        if self._expects == "colon" and char == ":":
            self._expects = "value"
        elif self._expects == "next" and char == ",":
            self._expects = "key" if self._open[-1] == "}" else "value"
        elif self._open and char == self._open[-1] and (self._expects == "next" or self._may_close):
            self._open.pop()
            self._end_value()
        else:
            self.broken = True
            return None
        self._may_close = False
        out.append(char)
        return at + 1

    def _begin(self, text: str, at: int, out: list[str]) -> int | None:
        """The first character of a value or a key, or all of a value that is one word."""
        char = text[at]
        if char == '"':
            self._is_key = self._expects == "key"
            self._expects = "string"
        elif self._expects == "key":
            self.broken = True
            return None
        elif char in "[{":
            self._open.append("]" if char == "[" else "}")
            self._expects = "value" if char == "[" else "key"
        else:
            return self._word(text, at, out)
        self._may_close = char != '"'
        out.append(char)
        return at + 1

    def _word(self, text: str, at: int, out: list[str]) -> int | None:
        word = _WORD.match(text, at)
        if word is not None and word.end() == len(text):
            return None
        if word is None or not _LITERAL.fullmatch(word[0]):
            self.broken = True
            return None
        out.append(word[0])
        self._may_close = False
        self._end_value()
        return word.end()

    def _end_value(self) -> None:
        self._expects = "next"
        self.done = not self._open
