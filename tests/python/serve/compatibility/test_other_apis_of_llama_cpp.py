"""What llama.cpp's server is tested for in Anthropic's API and OpenAI's responses. docs/serve/compatibility.md is the
list."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import OneModelServer, app_of, running, story_server

from sharpi.serve.apis import anthropic as messages_api

TEMPLATES = Path(__file__).parents[3] / "data" / "templates"
HELLO = [{"role": "user", "content": "Say hello"}]
BOOK: list[Any] = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}]
TOOL = {"name": "get_weather", "description": "The weather", "input_schema": {
    "type": "object", "properties": {"location": {"type": "string", "maxLength": 4}}, "required": ["location"]}}
CALL = {"type": "tool_use", "id": "test123", "name": "get_weather", "input": {"location": "Paris"}}
PIXEL = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "test123", "content": content, **more}


def called(*answered: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "What's the weather?"}, {"role": "assistant", "content": [CALL]},
            {"role": "user", "content": list(answered)}]


@pytest.fixture
def client(server: str) -> httpx.Client:
    return httpx.Client(base_url=server, timeout=120)


def post(client: httpx.Client, messages: Any = HELLO, path: str = "/v1/messages", **fields: Any) -> httpx.Response:
    body = {"model": "story", "max_tokens": 24, "messages": messages, "temperature": 0, **fields}
    return client.post(path, json=body)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line.startswith("data: ")]


# --- Anthropic's messages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [
    {}, {"system": "You are a helpful assistant."}, {"stop_sequences": ["\n", "END"]}, {"temperature": 0.5},
    {"top_p": 0.9}, {"top_k": 40}, {"metadata": {"user_id": "test_user_123"}},
    {"thinking": {"type": "enabled", "budget_tokens": 50}}, {"tools": [TOOL]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is"},
                                               {"type": "text", "text": " the answer?"}]}]},
    {"messages": [*HELLO, {"role": "assistant", "content": "Hi there!"}, {"role": "user", "content": "How are you?"}]},
    {"messages": called(result("Sunny, 25°C"))},
    {"messages": called({"type": "text", "text": "Here are the results:"}, result("Sunny, 25°C"))},
    {"messages": called(result([{"type": "text", "text": "City not found"}], is_error=True))},
], ids=lambda fields: next(iter(fields), "alone"))
def test_a_message_is_answered(client: httpx.Client, fields: dict[str, Any]) -> None:
    response = post(client, **fields)
    message = response.json()
    assert response.status_code == 200, message
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert message["content"] and all(block["type"] == "text" and block["text"] for block in message["content"])
    assert message["stop_reason"] in ("end_turn", "max_tokens", "stop_sequence")
    assert {"input_tokens", "output_tokens", "cache_read_input_tokens"} <= set(message["usage"])
    assert 0 < message["usage"]["output_tokens"] <= 24 and "timings" not in message and "object" not in message


def test_a_stream_of_a_message_has_all_its_events_in_order(client: httpx.Client) -> None:
    events = events_of(post(client, stream=True))
    kinds = [event["type"] for event in events]
    middle = kinds[2:-3]
    assert kinds[:2] == ["message_start", "content_block_start"] and set(middle) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    begun, block = events[0]["message"], events[1]
    assert (begun["type"], begun["role"], begun["content"]) == ("message", "assistant", [])
    usage = begun["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] > 0
    assert block["index"] == 0 and block["content_block"]["type"] == "text"
    deltas = [event["delta"] for event in events[2:-3]]
    assert {delta["type"] for delta in deltas} == {"text_delta"} and events[-3]["index"] == 0
    assert events[-2]["delta"]["stop_reason"] == "max_tokens" and events[-2]["usage"]["output_tokens"] == 24
    assert "timings" not in events[-1]
    assert "".join(delta["text"] for delta in deltas) == post(client).json()["content"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_must_be_used_is_used(client: httpx.Client, stream: bool) -> None:
    response = post(client, tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True},
                    max_tokens=200, stream=stream)
    if stream:
        events = events_of(response)
        begun = [event for event in events if event["type"] == "content_block_start"]
        ended = [event["index"] for event in events if event["type"] == "content_block_stop"]
        assert [event["index"] for event in begun] == ended == list(range(len(begun)))
        block = begun[-1]["content_block"]
        block["input"] = json.loads("".join(event["delta"].get("partial_json", "") for event in events
                                            if event["type"] == "content_block_delta"))
        reason = events[-2]["delta"]["stop_reason"]
    else:
        message = response.json()
        block, reason = message["content"][-1], message["stop_reason"]
    assert reason == "tool_use" and block["type"] == "tool_use" and block["id"] and block["name"] == "get_weather"
    assert set(block["input"]) == {"location"} and isinstance(block["input"]["location"], str)


@pytest.mark.parametrize(("messages", "where"), [
    ([{"role": "user", "content": [PIXEL, {"type": "text", "text": "What is this?"}]}], "messages[0].content[0]"),
    (called(result([{"type": "text", "text": "File: test.png"}, PIXEL])), "messages[2].content[0].content[1]")])
def test_a_picture_is_refused_and_not_dropped(client: httpx.Client, messages: Any, where: str) -> None:
    response = post(client, messages)
    assert response.status_code == 400 and where in response.json()["error"]["message"]


@pytest.mark.parametrize("missing", ["messages", "max_tokens", "model"])
def test_a_message_needs_these(client: httpx.Client, missing: str) -> None:
    body = {"model": "story", "max_tokens": 4, "messages": HELLO}
    del body[missing]
    response = client.post("/v1/messages", json=body)
    assert response.status_code == 400 and missing in response.json()["error"]["message"]
    assert client.post("/v1/messages", json={**body, missing: []}).status_code == 400


def test_tokens_are_counted_without_an_answer(client: httpx.Client) -> None:
    def count(**fields: Any) -> int:
        body = {"model": "story", "messages": HELLO, **fields}
        counted = client.post("/v1/messages/count_tokens", json=body).json()
        assert set(counted) == {"input_tokens"}
        return int(counted["input_tokens"])

    usage = post(client).json()["usage"]
    assert count() == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert count(system="You are a helpful assistant.") > count()


def test_the_apis_keep_their_shapes(client: httpx.Client) -> None:
    message = post(client).json()
    chat = client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 24, "temperature": 0}).json()
    assert chat["object"] == "chat.completion" and message["type"] == "message"
    assert chat["choices"][0]["message"]["content"] == message["content"][0]["text"]
    assert chat["usage"]["prompt_tokens"] == sum(message["usage"][name] for name in message["usage"] if "input" in name)
    assert chat["usage"]["completion_tokens"] == message["usage"]["output_tokens"]


@pytest.fixture(scope="module")
def qwen() -> Iterator[OneModelServer]:
    with story_server(template=(TEMPLATES / "Qwen-Qwen3-0.6B.jinja").read_text(encoding="utf-8")) as story:
        yield story


def test_reasoning_between_calls_stays_in_the_prompt(qwen: OneModelServer) -> None:
    thinking = {"type": "thinking", "thinking": "First I look at the structure.", "signature": "sharpi"}
    replayed = called(result("main.py"))
    with running(app_of(qwen, messages_api.routes)) as address, httpx.Client(base_url=address) as client:
        def count(content: list[Any]) -> int:
            messages = [replayed[0], {"role": "assistant", "content": content}, replayed[2]]
            body = {"model": "story", "messages": messages, "tools": [TOOL]}
            return int(client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"])

        assert count([thinking, CALL]) > count([CALL]) + 5


# --- OpenAI's responses -----------------------------------------------------------------------------------------------


def test_a_response_and_its_stream(server: str) -> None:
    library = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
    ask: dict[str, Any] = {"model": "story", "input": BOOK, "max_output_tokens": 8, "temperature": 0}
    whole = library.responses.create(**ask)
    assert whole.id.startswith("resp_") and whole.output[0].id.startswith("msg_") and whole.output_text
    text, ids, items = "", set(), set()
    for event in library.responses.create(**ask, stream=True):
        if event.type in ("response.created", "response.in_progress", "response.incomplete"):
            ids.add(event.response.id)
        elif event.type in ("response.output_item.added", "response.output_item.done"):
            items.add(event.item.id)
        else:
            items.add(event.item_id)
            text += event.delta if event.type == "response.output_text.delta" else ""
    assert len(ids) == len(items) == 1 and text == event.response.output_text == whole.output_text
    assert event.type == "response.incomplete" and event.response.usage.output_tokens == 8
