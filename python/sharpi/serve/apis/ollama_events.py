"""An answer as Ollama's clients read it: objects, of which the last has the counts."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from sharpi.serve.apis.objects import ObjectWording, line_frame
from sharpi.serve.apis.openai_shapes import likelihood
from sharpi.serve.errors import ApiError
from sharpi.serve.http.wording import ollama_error
from sharpi.serve.server import OpenTurn
from sharpi.serve.turns import Event, Said, Score, Thought, Usage
from sharpi.serve.whole import Part, Whole

__all__ = ["AnswerWording", "Kind", "empty_line", "time_text"]

Kind = Literal["chat", "generate"]

_REASONS = {"stop": "stop", "length": "length", "timeout": "length", "tool_calls": "stop"}


def time_text(seconds: float) -> str:
    """Seconds since 1970 as Ollama writes a time."""
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat().replace("+00:00", "Z")


def empty_line(model: str, kind: Kind) -> dict[str, Any]:
    """An object that says nothing yet."""
    said = {"message": {"role": "assistant", "content": ""}} if kind == "chat" else {"response": ""}
    return {"model": model, "created_at": time_text(time.time()), **said, "done": False}


class AnswerWording(ObjectWording):
    """The words of one answer. kind: of the endpoint. began: when its request came, on the clock
    `time.perf_counter`; from then until now the model was loaded."""

    def __init__(self, turn: OpenTurn, model: str, kind: Kind, began: float) -> None:
        super().__init__(turn, line_frame)
        self._model = model
        self._kind = kind
        self._began = began
        self._load_seconds = time.perf_counter() - began
        self._answer = Whole()
        self._sent = 0  # parts whose calls have been sent

    def start(self, turn: OpenTurn) -> Iterable[dict[str, Any]]:
        return ()

    def fail(self, error: ApiError) -> dict[str, Any]:
        return ollama_error(error)

    def say(self, event: Event) -> Iterator[dict[str, Any]]:
        answer = self._answer
        answer.add(event)
        yield from self._calls(complete=isinstance(event, Usage))
        if isinstance(event, Thought) and event.text:
            yield self._line(thinking=event.text)
        elif isinstance(event, Said) and (event.text or event.scores):
            yield self._line(event.text, scores=event.scores)
        elif isinstance(event, Usage):
            yield {**self._line(), **self._end()}

    def body(self, answer: Whole) -> dict[str, Any]:
        self._answer = answer
        calls = [shape for part in answer.parts if (shape := self._call(part)) is not None]
        scores = [score for part in answer.parts if part.kind == "text" for score in part.scores]
        return {**self._line(answer.texts("text"), answer.texts("thinking"), calls, scores), **self._end()}

    def _calls(self, complete: bool) -> Iterator[dict[str, Any]]:
        """The calls that are complete and not sent: their clients take each as a whole. The last part may still go on,
        unless the answer is `complete`."""
        parts = self._answer.parts if complete else self._answer.parts[:-1]
        for part in parts[self._sent:]:
            shape = self._call(part)
            if shape is not None:
                yield self._line(calls=[shape])
        self._sent = max(self._sent, len(parts))

    def _call(self, part: Part) -> dict[str, Any] | None:
        arguments = part.arguments() if part.kind == "call" else None
        if arguments is None:
            return None
        index = sum(other.kind == "call" for other in self._answer.parts[:self._answer.parts.index(part)])
        return {"id": part.id, "function": {"index": index, "name": part.name, "arguments": arguments}}

    def _line(self, text: str = "", thinking: str = "", calls: list[dict[str, Any]] | None = None,
              scores: list[Score] | tuple[Score, ...] = ()) -> dict[str, Any]:
        line = empty_line(self._model, self._kind)
        holder = line["message"] if self._kind == "chat" else line
        holder["content" if self._kind == "chat" else "response"] = text
        if thinking:
            holder["thinking"] = thinking
        if calls:
            holder["tool_calls"] = calls
        if scores:
            line["logprobs"] = [{**_logprob(score), "top_logprobs": [_logprob(top) for top in score.top]}
                                for score in scores]
        return line

    def _end(self) -> dict[str, Any]:
        usage = self._answer.usage
        figures = usage.figures[0]
        first = figures["first_token_seconds"]
        return {"done": True, "done_reason": _REASONS[self._answer.ended.reason],
                "total_duration": _nanoseconds(time.perf_counter() - self._began),
                "load_duration": _nanoseconds(self._load_seconds),
                "prompt_eval_count": usage.prompt_tokens,
                "prompt_eval_duration": _nanoseconds(first - figures["queued_seconds"]),
                "eval_count": usage.completion_tokens,
                "eval_duration": _nanoseconds(figures["seconds"] - first)}


def _logprob(score: Score) -> dict[str, Any]:
    return {"token": score.text, "logprob": likelihood(score), "bytes": list(score.bytes)}


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
