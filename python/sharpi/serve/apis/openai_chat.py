"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sharpi.serve.apis import fields
from sharpi.serve.apis.openai_shapes import OpenAiWording, ending, likelihood, timings, usage_body
from sharpi.serve.document import ApiRoute
from sharpi.serve.errors import ApiError
from sharpi.serve.server import Lease, OpenTurn, Server
from sharpi.serve.sse import EVENT_STREAM, answered
from sharpi.serve.turns import CallArguments, CallBegun, Ended, Event, Said, Score, Thought, Turn, Usage

__all__ = ["ChatFields", "ChatWording", "routes", "turn_of"]

_MOST_MESSAGES = 4096
_PROGRESS_EVERY = 0.5  # seconds
_SPEED_EVERY = 0.5  # seconds between two chunks that tell how fast an answer is written
_NOT_ENDED: Mapping[str, None] = {"finish_reason": None}


class ChatFields(fields.SamplingFields):
    messages: Annotated[list[fields.JsonObject], Field(min_length=1, max_length=_MOST_MESSAGES)]
    model: str | None = None
    max_tokens: fields.TokenLimit | None = None
    max_completion_tokens: fields.TokenLimit | None = None
    n: fields.Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=fields.MOST_TOP_LOGPROBS)] | None = None
    stream: bool | None = None
    stream_options: fields.StreamOptions | None = None
    response_format: fields.JsonObject | None = None
    tools: list[fields.ToolFields] | None = None
    tool_choice: str | fields.JsonObject | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking_token_budget: fields.TokenLimit | None = None
    chat_template_kwargs: fields.JsonObject | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    grammar: str | fields.GrammarFields | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    user: str | None = None


def turn_of(asked: ChatFields) -> Turn:
    """Raises `ApiError` for fields that contradict each other."""
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(400, "invalid_request_error", "top_logprobs needs logprobs: true", param="top_logprobs")
    if asked.continue_final_message and asked.add_generation_prompt:
        raise ApiError(400, "invalid_request_error", "continue_final_message and add_generation_prompt contradict each"
                       " other", param="continue_final_message")
    limit = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
    tools = fields.function_tools(asked.tools)
    template = dict(asked.chat_template_kwargs or {})
    if asked.add_generation_prompt is not None and not asked.continue_final_message:
        template["add_generation_prompt"] = asked.add_generation_prompt
    template = {**fields.effort_variables(asked.reasoning_effort), **template}
    return Turn(
        messages=asked.messages, tools=tools, tool_choice=fields.tool_choice_of(asked.tool_choice, tools),
        parallel_calls=asked.parallel_tool_calls is not False, options=fields.options_of(asked, limit),
        choices=asked.n or 1, scores=(asked.top_logprobs or 0) if asked.logprobs else None,
        format=fields.wanted_format(asked.response_format, asked.grammar),
        continues=bool(asked.continue_final_message), thinking=_thinking(asked, template),
        thinking_budget=asked.thinking_token_budget, template=template, ignore_end=bool(asked.ignore_eos),
        least_tokens=asked.min_tokens or 0, key=asked.user or "")


def _thinking(asked: ChatFields, template: dict[str, Any]) -> bool | None:
    """The template's own switch goes before the effort."""
    for name in ("enable_thinking", "thinking"):
        if isinstance(template.get(name), bool):
            return bool(template.pop(name))
    return None if asked.reasoning_effort is None else asked.reasoning_effort != "none"


class _Speed:
    """How fast a turn's answers are being written, told now and then."""

    def __init__(self, turn: OpenTurn) -> None:
        self._turn = turn
        self._first: tuple[float, int] | None = None  # when its first tokens came, and how many
        self._told = 0.0

    def timings(self) -> dict[str, Any] | None:
        """What `timings` says so far; `None` if it was told just before. Called with each piece of an answer."""
        now, tokens = time.monotonic(), self._turn.answer_tokens
        if self._first is None:
            self._first, self._told = (now, tokens), now
        seconds, written = now - self._first[0], tokens - self._first[1]
        if now - self._told < _SPEED_EVERY or not written:
            return None
        self._told = now
        return {"predicted_n": tokens, "predicted_ms": 1000 * seconds, "predicted_per_second": written / seconds}


class ChatWording(OpenAiWording):
    """Words one turn as OpenAI's chunks, or as one completion."""

    def __init__(self, model: str, choices: int, include_usage: bool = False, progress: OpenTurn | None = None,
                 live: OpenTurn | None = None) -> None:
        """progress: the turn, if silence before its first event tells how far its prompt has come. live: the turn, if
        its stream tells how fast it is written."""
        super().__init__("chatcmpl", "chat.completion.chunk", model, choices, include_usage)
        self._progress = progress
        self._speed = None if live is None else _Speed(live)
        self._started = time.monotonic()
        self._choices = choices
        head = json.dumps(self._head)[:-1]
        # A chunk is its choice's opening, the delta's JSON, and one of these.
        self._openings = [f'data: {head},"choices":[{{"index":{index},"delta":' for index in range(choices)]
        self._plain = f',"logprobs":null,"finish_reason":null}}]{self._tail}'

    def begin(self) -> bytes:
        role = '{"role":"assistant","content":""}'
        return "".join(f"{opening}{role}{self._plain}" for opening in self._openings).encode()

    def word(self, event: Event) -> bytes:
        self._progress = None
        worded = self._worded(event)
        speed = None if self._speed is None or isinstance(event, Ended | Usage) else self._speed.timings()
        return worded if speed is None else worded + self._data({**self._head, "choices": [], "timings": speed})

    def _worded(self, event: Event) -> bytes:
        if isinstance(event, Said):
            delta = f'{{"content":{json.dumps(event.text)}}}'
            if not event.scores:
                return f"{self._openings[event.choice]}{delta}{self._plain}".encode()
            return self._chunk(event.choice, delta, event.scores)
        if isinstance(event, Thought):
            text = json.dumps(event.text)
            return self._chunk(event.choice, f'{{"reasoning_content":{text},"reasoning":{text}}}', event.scores)
        if isinstance(event, CallBegun):
            call = {"index": event.index, "id": event.id, "type": "function",
                    "function": {"name": event.name, "arguments": ""}}
            return self._chunk(event.choice, json.dumps({"tool_calls": [call]}))
        if isinstance(event, CallArguments):
            more = {"index": event.index, "function": {"arguments": event.json}}
            return self._chunk(event.choice, json.dumps({"tool_calls": [more]}))
        if isinstance(event, Ended):
            return self._finished(self._chunk(event.choice, "{}", (), ending(event)))
        return self._usage(event) if isinstance(event, Usage) else b""

    def idle(self) -> bytes:
        turn = self._progress
        if turn is None:
            return super().idle()
        progress = {"total": turn.prompt_tokens, "cache": turn.cached_tokens, "processed": turn.computed_tokens,
                    "time_ms": round(1000 * (time.monotonic() - self._started))}
        return self._data({**self._head, "choices": [], "prompt_progress": progress})

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        choices = [_Choice() for _ in range(self._choices)]
        usage = Usage(0, 0, 0, 0)
        for event in events:
            if isinstance(event, Usage):
                usage = event
            else:
                choices[event.choice].add(event)
        return {**self._head, "object": "chat.completion",
                "choices": [choice.body(index) for index, choice in enumerate(choices)],
                "usage": usage_body(usage), "timings": timings(usage)}

    def _chunk(self, choice: int, delta: str, scores: Sequence[Score] = (),
               ended: Mapping[str, str | None] = _NOT_ENDED) -> bytes:
        rest = json.dumps({"logprobs": _logprobs(scores), **ended})[1:]
        return f'{self._openings[choice]}{delta},{rest}]{self._tail}'.encode()


class _Choice:
    """One choice of a completion that is not streamed."""

    def __init__(self) -> None:
        self._said: list[str] = []
        self._thought: list[str] = []
        self._scores: list[Score] = []
        self._calls: dict[int, tuple[CallBegun, list[str]]] = {}
        self._ended: Mapping[str, str | None] = _NOT_ENDED

    def add(self, event: Event) -> None:
        if isinstance(event, Said):
            self._said.append(event.text)
            self._scores += event.scores
        elif isinstance(event, Thought):
            self._thought.append(event.text)
            self._scores += event.scores
        elif isinstance(event, CallBegun):
            self._calls[event.index] = event, []
        elif isinstance(event, CallArguments):
            self._calls[event.index][1].append(event.json)
        elif isinstance(event, Ended):
            self._ended = ending(event)

    def body(self, index: int) -> dict[str, Any]:
        said, thought = "".join(self._said), "".join(self._thought)
        message: dict[str, Any] = {"role": "assistant", "content": said if said or not self._calls else None,
                                   "refusal": None}
        if thought:
            message |= {"reasoning_content": thought, "reasoning": thought}
        if self._calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function",
                 "function": {"name": call.name, "arguments": "".join(arguments) or "{}"}}
                for call, arguments in self._calls.values()]
        return {"index": index, "message": message, "logprobs": _logprobs(self._scores), **self._ended}


def _logprobs(scores: Sequence[Score]) -> dict[str, Any] | None:
    if not scores:
        return None

    def one(score: Score) -> dict[str, Any]:
        return {"token": score.text, "logprob": likelihood(score), "bytes": [*score.bytes]}

    return {"content": [{**one(score), "top_logprobs": [one(other) for other in score.top]} for score in scores],
            "refusal": None}


def routes(server: Server) -> list[BaseRoute]:
    async def complete(request: Request) -> Response:
        asked = await fields.read_body(request, ChatFields)
        turn = turn_of(asked)
        usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)

        def worded(lease: Lease, opened: OpenTurn) -> ChatWording:
            return ChatWording(lease.name, turn.choices, usage, opened if asked.return_progress else None,
                               opened if asked.timings_per_token else None)

        return await answered(request, server, asked.model, turn, worded, stream=bool(asked.stream),
                              silence=_PROGRESS_EVERY if asked.return_progress else None)

    return [ApiRoute(path, complete, "POST", about="Answers a chat", body=ChatFields, streams=EVENT_STREAM)
            for path in ("/v1/chat/completions", "/chat/completions")]
