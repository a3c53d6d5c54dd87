"""Conversations as chat templates take them: one system message at the start, then turns that alternate."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["call", "conversation", "is_begun"]

Message = dict[str, Any]

_BETWEEN = "\n\n"


def call(id: str, name: str, arguments: str | Mapping[str, Any]) -> Message:
    """A tool call of an assistant's message."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def conversation(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """The messages with those merged that one role sends in a row, tools' results excepted.

    Many templates refuse a system message after the first message. Such a message becomes part of the user's turn next
    to it, the one that follows if there are two. It never comes between a call and its result.
    """
    merged: list[_Merged] = []
    late: list[Message] = []  # system messages that wait for a user's turn
    begun = False
    for message in messages:
        role = message["role"]
        if role == "system" and begun:
            late.append({"role": "user", "content": message["content"]})
            continue
        begun = begun or role != "system"
        if role != "tool":
            for waiting in late:
                _add(merged, waiting)
            late.clear()
        _add(merged, message)
    for waiting in late:
        _add(merged, waiting)
    return [one.message() for one in merged]


def is_begun(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is the beginning of an answer, which the answer then continues. Anthropic's and
    Ollama's clients have no other way to say so."""
    last = messages[-1]
    return last["role"] == "assistant" and bool(last["content"].strip()) and not last.get("tool_calls")


class _Merged:
    """Messages that become one. They are joined once: a client may send a hundred thousand."""

    def __init__(self, role: str) -> None:
        self.role = role
        self._texts: dict[str, list[str]] = {"reasoning_content": [], "content": []}
        self._more: Message = {}

    def add(self, message: Mapping[str, Any]) -> None:
        for field, value in message.items():
            if field in self._texts:
                self._texts[field].append(value)
            elif field == "tool_calls":
                self._more.setdefault(field, []).extend(value)
            else:
                self._more[field] = value

    def message(self) -> Message:
        texts = {field: _BETWEEN.join(filter(None, parts)) for field, parts in self._texts.items() if parts}
        return {**self._more, **texts}


def _add(merged: list[_Merged], message: Mapping[str, Any]) -> None:
    role = message["role"]
    if not merged or merged[-1].role != role or role == "tool":
        merged.append(_Merged(role))
    merged[-1].add(message)
