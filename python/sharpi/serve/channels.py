"""The channels of an answer: reasoning, text and tool calls, told apart as the text comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from sharpi.serve.prompts import Prompt
from sharpi.serve.turns import Turn
from sharpi.text.chat import Markers, Part, ThinkingSplitter

__all__ = ["CallBegins", "CallContinues", "Piece", "Reader", "Saying", "Thinking", "reader_of"]


@dataclass(frozen=True)
class Thinking:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True)
class Saying:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True)
class CallBegins:
    """A call of the tool `name`. id: the call's, if the model gives it one."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True)
class CallContinues:
    """More of the JSON text of a call's arguments."""

    index: int
    json: str


Piece: TypeAlias = "Thinking | Saying | CallBegins | CallContinues"


class Reader(Protocol):
    """Reads one answer. The pieces come as soon as it is sure what they are."""

    def push(self, text: str) -> list[Piece]: ...

    def flush(self) -> list[Piece]: ...


def reader_of(turn: Turn, prompt: Prompt) -> Reader:
    """What reads an answer to `turn`. An answer to a plain prompt is all text."""
    if prompt.template is None:
        return _Plain()
    markers = prompt.template.markers
    return _Thinking(markers, markers.opened_by(prompt.text))


class _Plain:
    def push(self, text: str) -> list[Piece]:
        return [Saying(text)] if text else []

    def flush(self) -> list[Piece]:
        return []


class _Thinking:
    def __init__(self, markers: Markers, opened: bool) -> None:
        self._splitter = ThinkingSplitter(opened, markers)

    def push(self, text: str) -> list[Piece]:
        return self._pieces(self._splitter.push(text)) if text else []

    def flush(self) -> list[Piece]:
        return self._pieces(self._splitter.flush())

    @staticmethod
    def _pieces(parts: list[Part]) -> list[Piece]:
        return [Thinking(part.text) if part.kind == "thinking" else Saying(part.text) for part in parts]
