"""An answer as readers of OpenAI's responses expect it: a response, or the events of a stream."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from sharpi.serve.apis.objects import ObjectWording, event_frame
from sharpi.serve.apis.openai_shapes import likelihood
from sharpi.serve.errors import ApiError
from sharpi.serve.server import OpenTurn
from sharpi.serve.turns import CallArguments, Event, Said, Score, Thought, Usage
from sharpi.serve.whole import Part, Whole

__all__ = ["ResponseWording", "sealed", "unsealed"]

_ITEMS = {"thinking": "rs", "text": "msg", "call": "fc"}


class _Shape:
    """One response's own form: its id, what it repeats of the request, and whether reasoning comes sealed as well."""

    def __init__(self, model: str, asked: Mapping[str, Any], seals: bool) -> None:
        self._id = secrets.token_hex(12)
        self._seals = seals
        self._common = {"id": f"resp_{self._id}", "object": "response", "created_at": int(time.time()), "model": model,
                        **asked}

    def ended(self, answer: Whole) -> dict[str, Any]:
        """The response at its end."""
        status = self.status(answer)
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        last = len(answer.parts) - 1
        output = [self.item(part, index, status if index == last else "completed")
                  for index, part in enumerate(answer.parts)]
        return self._body(status, output, usage=_usage(answer.usage), incomplete_details=reason)

    def begun(self) -> dict[str, Any]:
        """The response before there is anything of it."""
        return self._body("in_progress", [])

    def failed(self, answer: Whole, error: ApiError) -> dict[str, Any]:
        """The response that an error ended."""
        codes = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
        output = [self.item(part, index, "incomplete") for index, part in enumerate(answer.parts)]
        return self._body("failed", output,
                          error={"code": codes.get(error.status, "server_error"), "message": error.message})

    def _body(self, status: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._common, "status": status, "output": output, "error": None, "incomplete_details": None,
                "usage": None, **more}

    @staticmethod
    def status(answer: Whole) -> str:
        return "incomplete" if answer.ended.reason in ("length", "timeout") else "completed"

    def item_id(self, part: Part, index: int) -> str:
        return f"{_ITEMS[part.kind]}_{self._id}_{index}"

    def item(self, part: Part, index: int, status: str) -> dict[str, Any]:
        """An item of the output. While it is in progress, it has no content."""
        item: dict[str, Any] = {"id": self.item_id(part, index), "status": status}
        begun = status == "in_progress"
        if part.kind == "call":
            return {**item, "type": "function_call", "call_id": part.id, "name": part.name,
                    "arguments": "" if begun else part.text}
        content = [] if begun else [self.content(part)]
        if part.kind == "text":
            return {**item, "type": "message", "role": "assistant", "content": content}
        seal = {"encrypted_content": sealed(part.text)} if self._seals and not begun else {}
        return {**item, "type": "reasoning", "summary": [], "content": content, **seal}

    @staticmethod
    def content(part: Part) -> dict[str, Any]:
        """The content of a message or of reasoning."""
        if part.kind == "thinking":
            return {"type": "reasoning_text", "text": part.text}
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": _logprobs(part.scores)}


class ResponseWording(ObjectWording):
    """The words of one response. asked: what it repeats of the request. seals: whether reasoning comes sealed too."""

    def __init__(self, turn: OpenTurn, model: str, asked: Mapping[str, Any], seals: bool) -> None:
        super().__init__(turn, event_frame)
        self._shape = _Shape(model, asked, seals)
        self._answer = Whole()
        self._open: Part | None = None
        self._index = -1  # of the item that is open
        self._number = -1

    def body(self, answer: Whole) -> dict[str, Any]:
        return self._shape.ended(answer)

    def start(self, turn: OpenTurn) -> Iterator[dict[str, Any]]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._shape.begun())

    def say(self, event: Event) -> Iterator[dict[str, Any]]:
        answer = self._answer
        answer.add(event)
        if isinstance(event, Usage):
            status = self._shape.status(answer)
            yield from self._end(status)
            yield self._event(f"response.{status}", response=self._shape.ended(answer))
            return
        part = answer.parts[-1] if answer.parts else None
        if part is not None and part is not self._open:
            yield from self._end("completed")
            yield from self._begin(part)
        if isinstance(event, Said) and (event.text or event.scores):
            yield self._of_content("output_text.delta", delta=event.text, logprobs=_logprobs(event.scores))
        elif isinstance(event, Thought) and event.text:
            yield self._of_content("reasoning_text.delta", delta=event.text)
        elif isinstance(event, CallArguments):
            yield self._of_item("function_call_arguments.delta", delta=event.json)

    def fail(self, error: ApiError) -> dict[str, Any]:
        return self._event("response.failed", response=self._shape.failed(self._answer, error))

    def _begin(self, part: Part) -> Iterator[dict[str, Any]]:
        self._open = part
        self._index += 1
        empty = Part(part.kind, part.id, part.name)
        yield self._event("response.output_item.added", output_index=self._index,
                          item=self._shape.item(empty, self._index, "in_progress"))
        if part.kind != "call":
            yield self._of_content("content_part.added", part=self._shape.content(empty))

    def _end(self, status: str) -> Iterator[dict[str, Any]]:
        """Ends the item that is open."""
        part = self._open
        if part is None:
            return
        if part.kind == "call":
            yield self._of_item("function_call_arguments.done", name=part.name, arguments=part.text)
        else:
            if part.kind == "text":
                yield self._of_content("output_text.done", text=part.text, logprobs=_logprobs(part.scores))
            else:
                yield self._of_content("reasoning_text.done", text=part.text)
            yield self._of_content("content_part.done", part=self._shape.content(part))
        yield self._event("response.output_item.done", output_index=self._index,
                          item=self._shape.item(part, self._index, status))
        self._open = None

    def _of_content(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._of_item(kind, content_index=0, **fields)

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._open is not None
        return self._event(f"response.{kind}", item_id=self._shape.item_id(self._open, self._index),
                           output_index=self._index, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}


def _logprobs(scores: list[Score] | tuple[Score, ...]) -> list[dict[str, Any]]:
    return [{**_logprob(score), "top_logprobs": [_logprob(top) for top in score.top]} for score in scores]


def _logprob(score: Score) -> dict[str, Any]:
    return {"token": score.text, "logprob": likelihood(score), "bytes": list(score.bytes)}


def _usage(usage: Usage) -> dict[str, Any]:
    return {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": usage.thinking_tokens}}


# --- reasoning that a client keeps ------------------------------------------------------------------------------------


def sealed(text: str) -> str:
    """Reasoning as `encrypted_content`, of which Codex sends back nothing else. There is nothing to hide from a client
    that has read the reasoning, so it is merely encoded."""
    return base64.b64encode(text.encode()).decode()


def unsealed(content: str) -> str:
    """What was sealed here; nothing for what another server has encrypted."""
    try:
        return base64.b64decode(content, validate=True).decode()
    except ValueError:
        return ""
