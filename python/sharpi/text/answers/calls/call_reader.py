"""What the readers of all formats share."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from sharpi.text.answers.calls.json_text import collected_value, is_json, read_value
from sharpi.text.answers.sink import Sink
from sharpi.text.answers.source import MisreadError, Parse, Source
from sharpi.text.answers.tool_format import ToolFormat

__all__ = ["CallReader", "unwrapped"]

_LONGEST_NAME = 256
_NOT_IN_NAMES = re.compile(r"""[\s<>{}\[\]()"'`,=]""")
_LINE_BREAK = re.compile(r"[\r\n]")


class CallReader:
    """Reads one format's calls from a source into a sink. tools: the schemas of their arguments.

    Until a call has begun, `MisreadError` says that the text is none, and the text can be read again as text. Once the
    call has begun, its text stays with the call.
    """

    def __init__(self, source: Source, sink: Sink, form: ToolFormat, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self.source = source
        self.sink = sink
        self.form = form
        self.tools = tools

    def begin(self, name: str, call_id: str | None = None) -> None:
        self.sink.begin_call(name, call_id)
        self.source.release()

    def end(self) -> None:
        """Ends a call. What follows may be another."""
        self.sink.end_call()
        self.source.hold()

    def header(self, *stops: str, name: bool = True) -> Parse[tuple[str, str]]:
        """The text before the first of `stops`, and that stop. Raises `MisreadError` as soon as the text cannot be a
        tool's name (or, unless it is to be one, a short line); nothing is read then."""
        wrong = _NOT_IN_NAMES if name else _LINE_BREAK
        parts: list[str] = []

        def add(text: str) -> None:
            parts.append(text)
            if wrong.search(text) or sum(map(len, parts)) > _LONGEST_NAME:
                raise MisreadError

        begun = self.sink.in_call  # else the text is held already
        if begun:
            self.source.hold()
        try:
            stop = yield from self.source.until(stops, add)
            if not stop or not parts:
                raise MisreadError
        except MisreadError:
            if begun:
                self.source.rewind()
            raise
        if begun:
            self.source.release()
        return "".join(parts), stop

    def arguments(self, *ends: str) -> Parse[None]:
        """The JSON of a call's arguments. It may be missing before one of `ends`, be null, or stand in a string."""
        source = self.source
        yield from source.skip_space()
        found = yield from source.next_of("null", '"', *filter(None, ends))
        if found == '"':
            self.sink.arguments(unwrapped((yield from collected_value(source))))
        elif found:
            source.at += len("null") if found == "null" else 0
            self.sink.arguments("{}")
        else:
            yield from read_value(source, self.sink.arguments)

    def rest(self) -> Parse[None]:
        """The rest of a call whose JSON is broken, up to the tag behind it: a client that cannot parse it tells the
        model so."""
        tag = self.form.last_tag
        yield from self.source.until((tag,) if tag else (), self.sink.arguments)
        self.end()


def unwrapped(value: str) -> str:
    """Arguments as an object, which some models write as a string that holds it."""
    inner = json.loads(value) if value.startswith('"') else value
    if inner.strip() == "null":
        return "{}"
    return str(inner) if is_json(inner) else value
