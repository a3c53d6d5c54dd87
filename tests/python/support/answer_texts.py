"""Texts of answers: written, cut as tokens might cut them, and read back."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sharpi.text.answers.pieces import CallBegins, Saying, Thinking
from sharpi.text.answers.reader import AnswerReader
from sharpi.text.answers.tool_format import ToolFormat

__all__ = ["Heard", "Tool", "cut_anywhere", "read_whole", "written_arguments", "written_calls"]


@dataclass(frozen=True)
class Tool:
    name: str
    parameters: Mapping[str, Any]


def cut_anywhere(text: str, times: int = 50) -> list[list[str]]:
    """The text whole, by characters, and cut at random sets of places."""
    rng = random.Random(text)
    found = [[text], list(text)]
    for _ in range(times):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 6)))
        found.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    return found


def written_calls(form: ToolFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """An answer's calls as a format writes them, by its data alone."""
    bodies = [form.begin(name, index) + written_arguments(form, given) + form.end
              for index, (name, given) in enumerate(calls)]
    return form.opening + form.separator.join(bodies) + form.closing


def written_arguments(form: ToolFormat, given: Mapping[str, Any]) -> str:
    if form.notation == "json":
        return json.dumps(given, ensure_ascii=False)
    if form.notation == "python":
        return ", ".join(f"{key}={value!r}" for key, value in given.items())
    if form.notation == "bare":
        return _gemma(given)
    assert form.parameter is not None
    return "".join(form.parameter.begin(key, isinstance(value, str))
                   + (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) + form.parameter.end
                   for key, value in given.items())


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_gemma(value[key])}" for key in sorted(value, key=str.lower)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return json.dumps(value)


def read_whole(reader: AnswerReader, pieces: Iterable[str]) -> Heard:
    """All that the reader makes of an answer. Its calls must have begun in order, one after the other."""
    heard = Heard()
    for piece in [found for text in pieces for found in reader.push(text)] + reader.flush():
        if isinstance(piece, Thinking):
            heard.thinking += piece.text
        elif isinstance(piece, Saying):
            heard.text += piece.text
        elif isinstance(piece, CallBegins):
            assert piece.index == len(heard.calls)
            heard.calls.append((piece.name, ""))
            heard.ids.append(piece.id)
        else:
            assert piece.index == len(heard.calls) - 1 and piece.json
            name, before = heard.calls[-1]
            heard.calls[-1] = (name, before + piece.json)
    return heard


@dataclass
class Heard:
    """thinking and text: joined. calls: name and the JSON text of the arguments."""

    thinking: str = ""
    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str | None] = field(default_factory=list)

    def parsed(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(text)) for name, text in self.calls]
