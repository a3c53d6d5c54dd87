"""Tools for models whose template knows nothing of them: the conversation says how to call them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sharpi.text.answers.formats import HERMES

__all__ = ["instructed"]

_BEFORE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_AFTER = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def instructed(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *,
               system: bool = True) -> list[dict[str, Any]]:
    """`messages` with the tools (described as OpenAI's API does) in the system message, calls as text in the
    assistant's messages, and what tools answered in the user's. Roles that alternated before do so still.

    system: whether the template takes system messages; if not, the user's first says it all.
    """
    told = _BEFORE + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + _AFTER
    rest = list(messages)
    if rest and rest[0]["role"] in ("system", "developer"):
        told = f"{_text(rest.pop(0))}\n\n{told}"
    made: list[dict[str, Any]] = [{"role": "system" if system else "user", "content": told}]
    for message in rest:
        plain = _plain(message)
        if made[-1]["role"] == "user" == plain["role"] and (message["role"] == "tool" or _joins(made)):
            made[-1]["content"] += ("\n" if message["role"] == "tool" else "\n\n") + plain["content"]
        else:
            made.append(plain)
    return made


def _joins(made: list[dict[str, Any]]) -> bool:
    """Whether a user's message belongs to the one before, which the user did not write alone."""
    return len(made) == 1 or made[-1]["content"].endswith("</tool_response>")


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_text(message)}\n</tool_response>"}
    if not message.get("tool_calls"):
        return dict(message)
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    parts = [_text(message)] if message.get("content") else []
    return {**rest, "content": "\n".join([*parts, *map(_written, message["tool_calls"])])}


def _written(call: Mapping[str, Any]) -> str:
    function = call["function"]
    given = function.get("arguments") or {}
    return HERMES.begin(function["name"]) + (given if isinstance(given, str) else
                                             json.dumps(given, ensure_ascii=False)) + HERMES.end


def _text(message: Mapping[str, Any]) -> str:
    return message.get("content") or ""
