"""Answers of several messages, each with a header that names its channel and whom it is for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sharpi.text.answers.calls.call_reader import CallReader
from sharpi.text.answers.source import MisreadError, Parse

__all__ = ["read_harmony"]

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?(?: ?to=(?P<first>[\w.:/+-]+))?(?:<\|channel\|>(?P<channel>analysis|commentary|final))?"
    r"(?: ?to=(?P<second>[\w.:/+-]+))?(?: ?<\|constrain\|>\w+| \w+)?<\|message\|>")
_PART_OF_HEADER = re.compile(r"(?:<\|(?:start|channel|constrain)\|>|[\w .:=/+-])*(?:<(?:\|[a-z]*\|?)?)?")
_LONGEST_HEADER = 320


@dataclass(frozen=True)
class _Header:
    thinking: bool
    tool: str  # "" if the message calls none


def read_harmony(calls: CallReader, opened: bool) -> Parse[None]:
    """Reads a whole answer. opened: it begins in reasoning, not with a header."""
    source, sink = calls.source, calls.sink
    header = _Header(opened, "")
    begins = (_START, _CHANNEL)
    fresh = not opened  # a header need not begin with a token here
    while True:
        if fresh and (yield from source.next_of(" to=", "to=")):
            found = yield from _header(calls)
            if found is not None:
                header = found
                sink.turn()
        fresh = False
        if header.tool:
            yield from _call(calls, header.tool)
            header = _Header(False, "")
        emit = sink.think if header.thinking else sink.say
        mark = yield from source.until((*begins, *_ENDS), emit)
        if not mark:
            sink.end(header.thinking)
            return
        if mark in _ENDS:
            sink.turn()
            header, fresh = _Header(False, ""), True
            continue
        source.at -= len(mark)
        found = yield from _header(calls)
        if found is None:
            emit(mark)
            source.at += len(mark)
        else:
            header = found
            sink.turn()


def _header(calls: CallReader) -> Parse[_Header | None]:
    """Reads the header that begins here; `None`, and nothing is read, if none does, or if it calls a tool and there
    are none."""
    source = calls.source
    while True:
        limit = source.at + _LONGEST_HEADER
        found = _HEADER.match(source.text, source.at, limit)
        if found:
            break
        part = _PART_OF_HEADER.match(source.text, source.at, limit)
        assert part is not None
        if part.end() < len(source.text) or not (yield from source.more()):
            return None
    tool = (found["first"] or found["second"] or "").removeprefix("functions.")
    if tool and not calls.tools:
        return None
    source.at = found.end()
    return _Header(found["channel"] == "analysis" and not tool, tool)


def _call(calls: CallReader, tool: str) -> Parse[None]:
    source = calls.source
    calls.begin(tool)
    try:
        yield from calls.arguments(*_ENDS)
        yield from source.skip_space()
        yield from source.take(*_ENDS)
    except MisreadError:
        yield from source.until(_ENDS, calls.sink.arguments)
    calls.end()
    source.release()
