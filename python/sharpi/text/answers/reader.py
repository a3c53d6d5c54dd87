"""Tells an answer's reasoning, text and calls apart as its text comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from sharpi.text.answers.calls.call_reader import CallReader
from sharpi.text.answers.calls.harmony import read_harmony
from sharpi.text.answers.calls.loose import read_bare, read_python
from sharpi.text.answers.calls.named import read_mistral, read_named
from sharpi.text.answers.calls.objects import read_objects
from sharpi.text.answers.calls.tags import read_tags
from sharpi.text.answers.pieces import Piece
from sharpi.text.answers.sink import Sink
from sharpi.text.answers.source import MisreadError, Parse, Source
from sharpi.text.answers.tool_format import ToolFormat

__all__ = ["AnswerReader", "DescribedTool"]

_READERS: Mapping[str, Callable[[CallReader], Parse[None]]] = {
    "objects": read_objects, "named": read_named, "mistral": read_mistral, "tags": read_tags, "bare": read_bare,
    "python": read_python}


class DescribedTool(Protocol):
    """A tool, with the JSON schema of its arguments."""

    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, Any]: ...


class AnswerReader:
    """Reads one answer. The pieces do not depend on how its text is cut, but for where they are cut themselves.

    Marks are swallowed; all other text comes out once, in order, and as soon as it cannot be part of a mark. What looks
    like a call and is none comes out as text. A call of a tool that does not exist is a call all the same, so that its
    client can tell the model; only where nothing marks a call but its shape, the tool must exist.
    """

    def __init__(self, form: ToolFormat, tools: Iterable[DescribedTool] = (), *, opened: bool = False,
                 trim: bool = True) -> None:
        """tools: without any, calls are text. opened: the prompt opened the reasoning already (see
        `Markers.opened_by`). trim: white space around reasoning and around calls is dropped, which the format has put
        there."""
        self._form = form
        self._source = Source()
        self._sink = Sink(trim)
        self._calls = CallReader(self._source, self._sink, form, {tool.name: tool.parameters for tool in tools})
        self._parser = read_harmony(self._calls, opened) if form.reader == "harmony" else self._read(opened)
        self._advance()

    def push(self, text: str) -> list[Piece]:
        """The pieces that `text` completes."""
        self._source.push(text)
        self._advance()
        return self._sink.taken()

    def flush(self) -> list[Piece]:
        """What was held back; call it at the end."""
        self._source.ended = True
        self._advance()
        return self._sink.taken()

    def _advance(self) -> None:
        next(self._parser, None)

    def _read(self, opened: bool) -> Parse[None]:
        source, sink, form = self._source, self._sink, self._form
        thinking, fresh = opened, True
        if opened:
            sink.turn()
        triggers = form.triggers if self._calls.tools else ()
        openings, closing, dropped = form.thinking
        while True:
            if not thinking and fresh and triggers and form.starts:
                yield from self._bare_calls()
            fresh = False
            marks = (closing,) if thinking else (*openings, *dropped, *triggers)
            mark = yield from source.until(marks, sink.think if thinking else sink.say)
            if not mark:
                sink.end(thinking)
                return
            if not thinking and mark in triggers:
                source.at -= len(mark)
                yield from self._marked_calls()
                continue
            fresh = thinking or mark in dropped
            thinking = not thinking and mark in openings
            sink.turn()

    def _bare_calls(self) -> Parse[None]:
        """Calls that nothing marks but their shape and their place."""
        source = self._source
        source.hold()
        yield from source.skip_space()
        if (yield from source.next_of(*self._form.starts)) and (yield from self._read_calls()):
            return
        source.rewind()

    def _marked_calls(self) -> Parse[None]:
        source = self._source
        source.hold()
        if not (yield from self._read_calls()):
            source.rewind()
            self._sink.say(source.text[source.at])  # so that the trigger is not seen again
            source.at += 1

    def _read_calls(self) -> Parse[bool]:
        """Reads calls from the place that is held; false if what comes next is none, which is held still."""
        source, sink = self._source, self._sink
        before = sink.calls
        try:
            yield from _READERS[self._form.reader](self._calls)
        except MisreadError:
            if sink.in_call:
                yield from self._calls.rest()
            elif sink.calls == before:
                return False
            else:
                source.rewind()  # only what follows the last call is not one
        source.release()
        return True
