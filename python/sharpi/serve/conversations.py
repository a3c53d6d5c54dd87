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
    merged: list[Message] = []
    late: list[str] = []  # texts of system messages that wait for a user's turn
    for message in messages:
        role = message["role"]
        begun = any(earlier["role"] != "system" for earlier in merged)
        if role == "system" and begun:
            late.append(message["content"])
            continue
        if role == "user":
            message = {**message, "content": _BETWEEN.join([*late, message["content"]])}
            late.clear()
        elif role == "assistant":
            _say(merged, late)
        _add(merged, message)
    _say(merged, late)
    return merged


def is_begun(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is the beginning of an answer, which the answer then continues. Anthropic's and
    Ollama's clients have no other way to say so."""
    last = messages[-1]
    return last["role"] == "assistant" and bool(last["content"].strip()) and not last.get("tool_calls")


def _say(merged: list[Message], late: list[str]) -> None:
    """Adds what waits as the user's words."""
    if late:
        _add(merged, {"role": "user", "content": _BETWEEN.join(late)})
        late.clear()


def _add(merged: list[Message], message: Mapping[str, Any]) -> None:
    last = merged[-1] if merged else None
    if last is None or last["role"] != message["role"] or message["role"] == "tool":
        merged.append(dict(message))
        return
    for field in ("reasoning_content", "content"):
        texts = [text for text in (last.get(field), message.get(field)) if text]
        if texts:
            last[field] = _BETWEEN.join(texts)
    calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
    if calls:
        last["tool_calls"] = calls
