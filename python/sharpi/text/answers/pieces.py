"""What an answer is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["CallBegins", "CallContinues", "Piece", "Saying", "Thinking"]


@dataclass(frozen=True)
class Thinking:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True)
class Saying:
    """More of the text."""

    text: str


@dataclass(frozen=True)
class CallBegins:
    """The model calls a tool. index: 0, 1, ... in the answer. id: if the model gives the call one of its own."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True)
class CallContinues:
    """More of the JSON text of a call's arguments."""

    index: int
    json: str


Piece: TypeAlias = "Thinking | Saying | CallBegins | CallContinues"
