"""Answers that are streamed as objects, one after the other."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sharpi.serve.errors import ApiError
from sharpi.serve.server import OpenTurn
from sharpi.serve.sse import COMMENT
from sharpi.serve.turns import Event
from sharpi.serve.whole import Whole, gathered

__all__ = ["ObjectWording", "event_frame", "line_frame"]

Object = Mapping[str, Any]

# `json.dumps` would make an encoder for each object.
_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event_frame(value: Object) -> bytes:
    """A server-sent event that is named by the object's type."""
    return f"event: {value['type']}\ndata: {_json(value)}\n\n".encode("utf-8", "replace")


def line_frame(value: Object) -> bytes:
    """A line of JSON."""
    return f"{_json(value)}\n".encode("utf-8", "replace")


class ObjectWording(ABC):
    """The `Wording` of an API that says what its objects are."""

    def __init__(self, turn: OpenTurn, frame: Callable[[Object], bytes]) -> None:
        self._turn = turn
        self._frame = frame
        self._started = False

    @abstractmethod
    def body(self, answer: Whole) -> dict[str, Any]:
        """An answer that is not streamed."""

    @abstractmethod
    def start(self, turn: OpenTurn) -> Iterable[Object]:
        """What comes before all else. The turn's first event is there, and with it the count of cached tokens."""

    @abstractmethod
    def say(self, event: Event) -> Iterable[Object]:
        """What a client is sent for an event."""

    @abstractmethod
    def fail(self, error: ApiError) -> Object:
        """How an error ends the stream."""

    def begin(self) -> bytes:
        return b""

    def word(self, event: Event) -> bytes:
        return self._frames([*self._start(), *self.say(event)])

    def failed(self, error: ApiError) -> bytes:
        return self._frames([*self._start(), self.fail(error)])

    def end(self) -> bytes:
        return b""

    def idle(self) -> bytes:
        return COMMENT

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        return self.body(gathered(events))

    def _start(self) -> Iterable[Object]:
        if self._started:
            return ()
        self._started = True
        return self.start(self._turn)

    def _frames(self, objects: Iterable[Object]) -> bytes:
        return b"".join(map(self._frame, objects))
