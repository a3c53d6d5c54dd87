"""The channels of an answer: reasoning, text and tool calls, told apart as the text comes."""

from __future__ import annotations

from typing import Protocol

from sharpi.serve.answering.prompts import Prompt
from sharpi.serve.turns import Turn
from sharpi.text.answers.pieces import Piece, Saying
from sharpi.text.answers.reader import AnswerReader

__all__ = ["Reader", "reader_of"]


class Reader(Protocol):
    """Reads one answer. The pieces come as soon as it is sure what they are."""

    def push(self, text: str) -> list[Piece]: ...

    def flush(self) -> list[Piece]: ...


def reader_of(turn: Turn, prompt: Prompt) -> Reader:
    """What reads an answer to `turn`. An answer to a plain prompt is all text."""
    if prompt.template is None:
        return _Plain()
    form = prompt.template.format
    return AnswerReader(form, turn.tools if turn.tool_choice != "none" else (),
                        opened=form.thinking.opened_by(prompt.text))


class _Plain:
    def push(self, text: str) -> list[Piece]:
        return [Saying(text)] if text else []

    def flush(self) -> list[Piece]:
        return []
