"""An answer as Anthropic's clients read it: a message, or the events of a stream."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from sharpi.serve.apis.objects import ObjectWording, event_frame
from sharpi.serve.errors import ApiError
from sharpi.serve.http.wording import anthropic_error
from sharpi.serve.server import OpenTurn
from sharpi.serve.turns import CallArguments, Ended, Event, Said, Thought, Usage
from sharpi.serve.whole import Part, Whole

__all__ = ["MessageWording"]

_SIGNATURE = "sharpi"  # Clients send thinking back only if it is signed. Nobody checks the signature.

_REASONS = {"stop": "end_turn", "length": "max_tokens", "timeout": "max_tokens", "tool_calls": "tool_use"}


class MessageWording(ObjectWording):
    """The words of one message."""

    def __init__(self, turn: OpenTurn, model: str, request_id: str) -> None:
        super().__init__(turn, event_frame)
        self._id = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._request_id = request_id
        self._answer = Whole()
        self._open: Part | None = None

    def body(self, answer: Whole) -> dict[str, Any]:
        parts = [part for part in answer.parts if part.kind != "call" or part.arguments() is not None]
        return {**self._message(), "content": [_block(part) for part in parts], **_end(answer.ended),
                "usage": _usage(answer.usage)}

    def start(self, turn: OpenTurn) -> Iterator[dict[str, Any]]:
        cached = turn.cached_tokens
        usage = Usage(prompt_tokens=turn.prompt_tokens, cached_tokens=cached, completion_tokens=0, thinking_tokens=0)
        yield {"type": "message_start", "message": {**self._message(), "usage": _usage(usage)}}

    def say(self, event: Event) -> Iterator[dict[str, Any]]:
        answer = self._answer
        answer.add(event)
        if isinstance(event, Usage):
            yield from self._switch(None)
            yield {"type": "message_delta", "delta": _end(answer.ended), "usage": _usage(event)}
            yield {"type": "message_stop"}
            return
        part = answer.parts[-1] if answer.parts else None
        if part is not self._open:
            yield from self._switch(part)
        if isinstance(event, Said) and event.text:
            yield self._delta({"type": "text_delta", "text": event.text})
        elif isinstance(event, Thought) and event.text:
            yield self._delta({"type": "thinking_delta", "thinking": event.text})
        elif isinstance(event, CallArguments):
            yield self._delta({"type": "input_json_delta", "partial_json": event.json})

    def idle(self) -> bytes:
        """A ping, except before the message's start, which some clients expect to be first."""
        return event_frame({"type": "ping"}) if self._started else super().idle()

    def fail(self, error: ApiError) -> dict[str, Any]:
        return anthropic_error(error, self._request_id)

    def _message(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": [],
                "stop_reason": None, "stop_sequence": None}

    def _switch(self, part: Part | None) -> Iterator[dict[str, Any]]:
        """Ends the block that is open, and begins the one of `part`, which is the last."""
        if self._open is not None:
            index = len(self._answer.parts) - (1 if part is None else 2)
            if self._open.kind == "thinking":
                signature = {"type": "signature_delta", "signature": _SIGNATURE}
                yield {"type": "content_block_delta", "index": index, "delta": signature}
            yield {"type": "content_block_stop", "index": index}
        if part is not None:
            block = _block(Part(part.kind, part.id, part.name), signature="")
            yield {"type": "content_block_start", "index": len(self._answer.parts) - 1, "content_block": block}
        self._open = part

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._answer.parts) - 1, "delta": delta}


def _block(part: Part, signature: str = _SIGNATURE) -> dict[str, Any]:
    if part.kind == "thinking":
        return {"type": "thinking", "thinking": part.text, "signature": signature}
    if part.kind == "call":
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": part.arguments()}
    return {"type": "text", "text": part.text}


def _end(ended: Ended) -> dict[str, Any]:
    reason = "stop_sequence" if ended.stop_text is not None else _REASONS[ended.reason]
    return {"stop_reason": reason, "stop_sequence": ended.stop_text}


def _usage(usage: Usage) -> dict[str, Any]:
    return {"input_tokens": usage.prompt_tokens - usage.cached_tokens, "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0, "output_tokens": usage.completion_tokens}
