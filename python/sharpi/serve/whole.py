"""An answer's events put together."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from sharpi.serve.turns import CallArguments, CallBegun, Ended, Event, PromptScores, Said, Score, Thought, Usage

__all__ = ["Part", "Whole", "gathered"]


@dataclass(eq=False)
class Part:
    """Reasoning, text, or a tool call, whose text is the JSON of its arguments. pieces: of the text."""

    kind: Literal["thinking", "text", "call"]
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def arguments(self) -> dict[str, Any] | None:
        """A call's arguments; `None` if the answer ended before they were complete."""
        try:
            arguments = json.loads(self.text or "{}")
        except ValueError:
            return None
        return arguments if isinstance(arguments, dict) else None


class Whole:
    """One answer, as far as it has come: its parts in order, and how it ended."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._ended: Ended | None = None
        self._usage: Usage | None = None

    def add(self, event: Event) -> None:
        """Takes the next event of a turn with one choice."""
        if isinstance(event, Thought | Said):
            self._say("thinking" if isinstance(event, Thought) else "text", event)
        elif isinstance(event, CallBegun):
            self.parts.append(Part("call", event.id, event.name))
        elif isinstance(event, CallArguments):
            self.parts[-1].pieces.append(event.json)
        elif isinstance(event, Ended):
            self._ended = event
        elif isinstance(event, Usage):
            self._usage = event
        else:
            assert isinstance(event, PromptScores)

    def _say(self, kind: Literal["thinking", "text"], event: Thought | Said) -> None:
        if self.parts and self.parts[-1].kind == kind:
            part = self.parts[-1]
        elif event.text or event.scores:
            part = Part(kind)
            self.parts.append(part)
        else:
            return
        part.pieces.append(event.text)
        part.scores.extend(event.scores)

    def texts(self, kind: str) -> str:
        """The text of all parts of a kind."""
        return "".join(part.text for part in self.parts if part.kind == kind)

    @property
    def ended(self) -> Ended:
        assert self._ended is not None, "the turn has not ended"
        return self._ended

    @property
    def usage(self) -> Usage:
        assert self._usage is not None, "the turn has not ended"
        return self._usage


def gathered(events: Iterable[Event]) -> Whole:
    """The answer at its end."""
    answer = Whole()
    for event in events:
        answer.add(event)
    return answer
