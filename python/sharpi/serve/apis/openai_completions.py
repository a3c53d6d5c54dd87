"""OpenAI's completions of a plain prompt: POST /v1/completions."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sharpi.serve.answering.joined_turns import JoinedTurns
from sharpi.serve.apis import fields
from sharpi.serve.apis.openai_shapes import OpenAiWording, ending, likelihood, timings, usage_body
from sharpi.serve.document import ApiRoute
from sharpi.serve.errors import ApiError
from sharpi.serve.server import Lease, OpenTurn, Server
from sharpi.serve.sse import EVENT_STREAM, answered
from sharpi.serve.turns import Ended, Event, PromptScores, Said, Score, Thought, Turn, Usage

__all__ = ["CompletionFields", "CompletionWording", "routes", "turns_of"]

_MOST_PROMPTS = 64
_DEFAULT_TOKENS = 16  # OpenAI's


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _prompts(value: Any) -> list[str | list[int]]:
    """A text, a list of texts, token ids, or a list of lists of token ids, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(map(_is_token, value)):
            return [value]
        if len(value) > _MOST_PROMPTS:
            raise ValueError(f"at most {_MOST_PROMPTS} prompts are answered at once")
        if all(isinstance(one, str) or (isinstance(one, list) and one and all(map(_is_token, one))) for one in value):
            return value
    raise ValueError("must be text, token ids, or a list of either")


_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": (1 << 31) - 1}, "minItems": 1}
_PROMPT = {"anyOf": [{"type": "string"}, _TOKENS, {"type": "array", "minItems": 1, "maxItems": _MOST_PROMPTS,
                                                   "items": {"anyOf": [{"type": "string"}, _TOKENS]}}]}


class CompletionFields(fields.SamplingFields):
    prompt: Annotated[Any, AfterValidator(_prompts), WithJsonSchema(_PROMPT)]
    model: str | None = None
    max_tokens: fields.TokenLimit | None = None
    n: fields.Count | None = None
    best_of: fields.Amount | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Field(ge=0, le=fields.MOST_TOP_LOGPROBS)] | bool | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: fields.StreamOptions | None = None
    response_format: fields.JsonObject | None = None
    grammar: str | fields.GrammarFields | None = None
    user: str | None = None


def turns_of(asked: CompletionFields) -> list[Turn]:
    """One for each prompt. Raises `ApiError` for what this server does not do."""
    if asked.suffix:
        raise ApiError(400, "invalid_request_error", "suffix: this server only continues a prompt", param="suffix")
    if asked.best_of not in (None, 1, asked.n or 1):
        raise ApiError(400, "invalid_request_error", "best_of: this server gives each answer that it computes: use n",
                       param="best_of")
    scores = int(asked.logprobs) if asked.logprobs is not None and asked.logprobs is not False else None
    choices = asked.n or 1
    if len(asked.prompt) * choices > _MOST_PROMPTS:
        raise ApiError(400, "invalid_request_error", f"at most {_MOST_PROMPTS} answers are given at once", param="n")
    limit = _DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens
    return [Turn(prompt=prompt, options=fields.options_of(asked, limit), choices=choices, scores=scores,
                 echo=bool(asked.echo), format=fields.wanted_format(asked.response_format, asked.grammar),
                 ignore_end=bool(asked.ignore_eos), least_tokens=asked.min_tokens or 0, key=asked.user or "")
            for prompt in asked.prompt]


class CompletionWording(OpenAiWording):
    """Words a request's turns as OpenAI's completions."""

    def __init__(self, model: str, choices: int, scored: bool = False, include_usage: bool = False) -> None:
        super().__init__("cmpl", "text_completion", model, choices, include_usage)
        self._scored = scored
        self._choices = [_Choice(scored) for _ in range(choices)]
        self._opening = f'data: {json.dumps(self._head)[:-1]},"choices":[{{"index":'
        self._plain = f',"logprobs":null,"finish_reason":null}}]{self._tail}'

    def begin(self) -> bytes:
        return b""

    def word(self, event: Event) -> bytes:
        if isinstance(event, (Said, Thought, PromptScores)):
            if not self._scored:
                return f'{self._opening}{event.choice},"text":{json.dumps(event.text)}{self._plain}'.encode()
            logprobs = json.dumps(self._choices[event.choice].logprobs(event.scores))
            return self._chunk(event.choice, json.dumps(event.text), logprobs, {"finish_reason": None})
        if isinstance(event, Ended):
            return self._finished(self._chunk(event.choice, '""', "null", ending(event)))
        return self._usage(event) if isinstance(event, Usage) else b""

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        usage = Usage(0, 0, 0, 0)
        for event in events:
            if isinstance(event, Usage):
                usage = event
            else:
                self._choices[event.choice].add(event)
        return {**self._head, "choices": [choice.body(index) for index, choice in enumerate(self._choices)],
                "usage": usage_body(usage), "timings": timings(usage)}

    def _chunk(self, choice: int, text: str, logprobs: str, ended: Mapping[str, str | None]) -> bytes:
        return (f'{self._opening}{choice},"text":{text},"logprobs":{logprobs},{json.dumps(ended)[1:]}]'
                f'{self._tail}').encode()


class _Choice:
    """One choice: where its next token begins, and what it said if it is not streamed. scored: scores were asked
    for."""

    def __init__(self, scored: bool) -> None:
        self._scored = scored
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._texts: list[str] = []
        self._scores: list[Score] = []
        self._ended: Mapping[str, str] = {}

    def add(self, event: Event) -> None:
        if isinstance(event, (Said, Thought, PromptScores)):
            self._texts.append(event.text)
            self._scores += event.scores
        elif isinstance(event, Ended):
            self._ended = ending(event)

    def body(self, index: int) -> dict[str, Any]:
        return {"index": index, "text": "".join(self._texts), "logprobs": self.logprobs(self._scores),
                **self._ended}

    def logprobs(self, scores: Sequence[Score]) -> dict[str, Any] | None:
        """The scores in OpenAI's older shape. text_offset: where in the text each token begins, in characters."""
        if not self._scored:
            return None
        return {"tokens": [_named(score) for score in scores],
                "token_logprobs": [None if score.logprob is None else likelihood(score) for score in scores],
                "top_logprobs": [None if score.logprob is None else self._top(score) for score in scores],
                "text_offset": [self._next_offset(score) for score in scores]}

    @staticmethod
    def _top(score: Score) -> dict[str, float]:
        """The likeliest tokens and the chosen one. Of two that read the same, the likelier stands."""
        named: dict[str, float] = {}
        for other in (*score.top, score):
            named.setdefault(_named(other), likelihood(other))
        return named

    def _next_offset(self, score: Score) -> int:
        offset = self._offset
        self._offset += len(self._utf8.decode(score.bytes))
        return offset


def _named(score: Score) -> str:
    """A token's text; OpenAI spells the bytes of one that is not whole characters."""
    try:
        return score.bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in score.bytes)


def routes(server: Server) -> list[BaseRoute]:
    async def complete(request: Request) -> Response:
        asked = await fields.read_body(request, CompletionFields)
        turns = turns_of(asked)
        each = turns[0].choices
        usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)

        def worded(lease: Lease, opened: OpenTurn) -> CompletionWording:
            return CompletionWording(lease.name, each * len(turns), turns[0].scores is not None, usage)

        return await answered(request, server, asked.model, turns, worded, stream=bool(asked.stream),
                              joined=partial(JoinedTurns, choices=each) if len(turns) > 1 else None)

    return [ApiRoute(path, complete, "POST", about="Continues prompts", body=CompletionFields, streams=EVENT_STREAM)
            for path in ("/v1/completions", "/completions")]
