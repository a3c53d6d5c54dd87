"""What clients ask a server, by each of its APIs, and how an answer's text is read from what comes back."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["MODEL", "Api", "Question", "questions"]

MODEL = "story"
_WORDS = "the old house by the sea had a door that nobody opened since the winter when she came home".split()
_TOOL = {"name": "look_up", "description": "Looks a place up.", "parameters": {
    "type": "object", "required": ["place", "floor"], "additionalProperties": False,
    "properties": {"place": {"enum": ["sea", "house", "garden"]}, "floor": {"type": "integer", "minimum": 0,
                                                                            "maximum": 9}}}}


@dataclass(frozen=True)
class Api:
    """One way to ask. piece: what is in each event of a stream that brings a part of the answer. last: what is in the
    last event of a stream that ended as it should: one of these."""

    name: str
    path: str
    piece: bytes  # a regular expression
    last: tuple[bytes, ...]

    def text_of_whole(self, body: bytes) -> str:
        """The text, or the arguments of calls, of an answer that is not streamed. Raises `ValueError`, `KeyError`,
        `IndexError` or `TypeError` for what is no answer."""
        return "".join(_texts_of_whole(self.name, json.loads(body)))

    def text_of_stream(self, body: bytes) -> str:
        """The same of a stream, which must have an end."""
        lines = body.decode().splitlines()
        if not self.name.startswith("ollama"):
            lines = [line[6:] for line in lines if line.startswith("data: ") and line != "data: [DONE]"]
        if not any(last in body for last in self.last):
            raise ValueError("the stream has no end")
        return "".join(text for line in lines if line for text in _texts_of_event(self.name, json.loads(line)))


CHAT = Api("chat", "/v1/chat/completions", rb'"delta":{"(content|tool_calls)', (b"data: [DONE]",))
COMPLETIONS = Api("completions", "/v1/completions", b'"text":', (b"data: [DONE]",))
RESPONSES = Api("responses", "/v1/responses", b"event: response.output_text.delta",
                (b"event: response.completed", b"event: response.incomplete"))
MESSAGES = Api("messages", "/v1/messages", b"event: content_block_delta", (b"event: message_stop",))
OLLAMA_CHAT = Api("ollama chat", "/api/chat", b'"done":false', (b'"done":true',))
OLLAMA_GENERATE = Api("ollama generate", "/api/generate", b'"done":false', (b'"done":true',))


@dataclass(frozen=True)
class Question:
    """One request. Its body says everything that decides the answer, so each time it must be answered the same."""

    number: int
    api: Api
    body: dict[str, Any]

    def asked(self, stream: bool) -> dict[str, Any]:
        return {**self.body, "stream": stream}


def questions(count: int, seed: int) -> list[Question]:
    """Random questions, half of which begin alike. Answers have 1 to 64 tokens."""
    draw = random.Random(seed)
    begin = " ".join(draw.choices(_WORDS, k=90))
    return [_question(number, draw, begin) for number in range(count)]


def _question(number: int, draw: random.Random, begin: str) -> Question:
    said = " ".join(draw.choices(_WORDS, k=draw.randrange(1, 30)))
    text = f"{begin} {said}" if draw.random() < 0.5 else said
    most, api = draw.randrange(1, 65), draw.choice([CHAT, CHAT, COMPLETIONS, RESPONSES, MESSAGES, OLLAMA_CHAT,
                                                    OLLAMA_GENERATE])
    sampled = {"temperature": draw.choice([0, 0.9]), "seed": draw.randrange(1000)}
    chat = [{"role": "user", "content": text}]
    if api is CHAT:
        body = {"messages": chat, "max_tokens": most, **sampled, **_shape(draw)}
    elif api is COMPLETIONS:
        body = {"prompt": text, "max_tokens": most, **sampled, **({"logprobs": 3} if draw.random() < 0.2 else {})}
    elif api is RESPONSES:
        body = {"input": text, "max_output_tokens": most, "temperature": 0}
    elif api is MESSAGES:
        body = {"messages": chat, "max_tokens": most, "temperature": 0}
    else:
        asked = {"messages": chat} if api is OLLAMA_CHAT else {"prompt": text}
        body = {**asked, "options": {"num_predict": most, **sampled}}
    return Question(number, api, {"model": MODEL, **body})


def _shape(draw: random.Random) -> dict[str, Any]:
    """Of some chats, what the answer must look like."""
    kind = draw.random()
    if kind < 0.15:
        schema = {"name": "answer", "schema": _TOOL["parameters"]}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if kind < 0.3:
        return {"tools": [{"type": "function", "function": _TOOL}], "tool_choice": "required"}
    return {}


def _texts_of_whole(api: str, body: Any) -> Iterator[str]:
    if api == "chat":
        message = body["choices"][0]["message"]
        yield message["content"] or ""
        yield from (call["function"]["arguments"] for call in message.get("tool_calls") or ())
    elif api == "completions":
        yield body["choices"][0]["text"]
    elif api == "responses":
        yield from (part["text"] for item in body["output"] for part in item["content"])
    elif api == "messages":
        yield from (part["text"] for part in body["content"])
    else:
        yield body["message"]["content"] if api == "ollama chat" else body["response"]


def _texts_of_event(api: str, event: Any) -> Iterator[str]:
    if "error" in event and event["error"]:
        raise ValueError(f"the stream failed: {event['error']}")
    if api == "chat":
        for choice in event["choices"]:
            yield choice["delta"].get("content") or ""
            yield from (call["function"].get("arguments", "") for call in choice["delta"].get("tool_calls") or ())
    elif api == "completions":
        yield from (choice["text"] for choice in event["choices"])
    elif api == "responses":
        if event["type"] == "response.output_text.delta":
            yield event["delta"]
    elif api == "messages":
        if event["type"] == "content_block_delta":
            yield event["delta"]["text"]
    else:
        yield event["message"]["content"] if api == "ollama chat" else event["response"]
