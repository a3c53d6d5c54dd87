"""Messages as clients send them, made into what chat templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sharpi.serve.errors import ApiError

__all__ = ["joined_text", "normalized", "tool_descriptions"]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
          "function": "tool"}
_TEXT_PARTS = ("text", "input_text", "output_text")


def normalized(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`messages` with roles that templates know, contents that are text, reasoning as "reasoning_content", and tool
    calls whose arguments are objects. Raises `ApiError`, which names the message, for what cannot be made so."""
    if not messages:
        raise _wrong("messages", "messages is empty: give at least one message")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(name: str, message: Mapping[str, Any]) -> dict[str, Any]:
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        raise _wrong(f"{name}.role", f"{name}.role must be one of {', '.join(_ROLES)}")
    made: dict[str, Any] = {"role": role, "content": joined_text(f"{name}.content", message.get("content"))}
    if role == "assistant":
        thought = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(thought, str):
            made["reasoning_content"] = thought
        if calls := message.get("tool_calls"):
            made["tool_calls"] = [_call(f"{name}.tool_calls[{at}]", call) for at, call in enumerate(calls)]
    for field in ("name", "tool_call_id"):
        if isinstance(message.get(field), str):
            made[field] = message[field]
    return made


def joined_text(name: str, content: Any) -> str:
    """A content that is text, nothing, or a list of parts that are all text. Raises `ApiError`, which names the
    part."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise _wrong(name, f"{name} must be text or a list of parts")
    return "".join(_part(f"{name}[{at}]", part) for at, part in enumerate(content))


def _part(name: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    if kind not in _TEXT_PARTS:
        raise _wrong(name, f"{name} is a part of type {kind!r}: this server takes text only")
    if not isinstance(part.get("text"), str):
        raise _wrong(f"{name}.text", f"{name}.text must be text")
    return str(part["text"])


def _call(name: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong(f"{name}.function", f"{name} must be a call of a function with a name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise _wrong(f"{name}.function.arguments", f"{name}.function.arguments is no valid JSON") from None
    if not isinstance(arguments, Mapping):
        raise _wrong(f"{name}.function.arguments", f"{name}.function.arguments must be a JSON object")
    made = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
    return {"id": call["id"], **made} if isinstance(call.get("id"), str) else made


def tool_descriptions(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Tools (see `turns.Tool`) as chat templates take them."""
    return [{"type": "function", "function": {"name": tool.name, "description": tool.description,
                                              "parameters": dict(tool.parameters)}} for tool in tools]


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, "invalid_request_error", message, param=param)
