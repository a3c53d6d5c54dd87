"""What llama.cpp's server is tested for in chats and in formats. docs/serve/compatibility.md is the list."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest

from sharpi import __version__

BOOK = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}]
PROMPT = "<system>Book\n<user>What is the best book\n<assistant>"
GREEDY = {"temperature": 0, "max_tokens": 8}
TOOL = {"type": "function", "function": {"name": "test", "description": "", "parameters": {
    "type": "object", "properties": {"success": {"type": "boolean", "const": True}}, "required": ["success"]}}}


@pytest.fixture
def client(server: str) -> httpx.Client:
    return httpx.Client(base_url=server, timeout=120)


@pytest.fixture
def library(server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)


def chat(client: httpx.Client, messages: Any = BOOK, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    response = client.post(path, json={"messages": messages, **GREEDY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def content_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def streamed(client: httpx.Client, messages: Any = BOOK, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": messages, **GREEDY, "stream": True, **fields}
    data = [line.removeprefix("data: ") for line in client.post("/v1/chat/completions", json=body).text.splitlines()
            if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(one) for one in data]


# --- chats ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions"])
def test_a_chat_is_its_templates_prompt_completed(client: httpx.Client, path: str) -> None:
    answer = chat(client, path=path)
    assert answer["id"].startswith("chatcmpl-") and answer["system_fingerprint"] == f"sharpi-{__version__}"
    completed = client.post("/v1/completions", json={"prompt": PROMPT, **GREEDY}).json()
    assert answer["usage"]["prompt_tokens"] == completed["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 8 and answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert content_of(answer) == completed["choices"][0]["text"]
    assert client.post("/apply-template", json={"messages": BOOK}).json()["prompt"] == PROMPT


def test_parts_of_text_are_joined(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": " the best book"}]
    assert content_of(chat(client, [BOOK[0], {"role": "user", "content": parts}])) == content_of(chat(client))


def test_a_prompt_that_begins_like_another_is_computed_from_where_they_differ(client: httpx.Client) -> None:
    system = {"role": "system", "content": "Nobody else says this before a test of the cache. " * 12}

    def cached(said: str) -> tuple[int, int]:
        usage = chat(client, [system, {"role": "user", "content": said}])["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    whole, first = cached("1 2 3 4 5 6")
    again, other = cached("1 2 3 4 5 6")[1], cached("9 8 7")[1]
    assert first == 0 < other <= again < whole and other % 64 == 0, "pages of 64 tokens are shared"


def test_a_stream_names_its_role_once_and_its_end_alone(client: httpx.Client) -> None:
    chunks = streamed(client, stream_options={"include_usage": True})
    *_, last, usage = chunks
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0]["role"] == "assistant" and all("role" not in delta for delta in deltas[1:])
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert last["choices"][0]["finish_reason"] == "length" and "content" not in last["choices"][0]["delta"]
    assert "".join(delta.get("content") or "" for delta in deltas) == content_of(chat(client))
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 8
    assert usage["timings"]["predicted_n"] == 8 and usage["timings"]["predicted_per_second"] > 0
    assert all("timings" not in chunk for chunk in chunks[:-1])


def test_openais_library_chats(library: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "story", "messages": BOOK, "max_tokens": 8, "seed": 42, "temperature": 0.8}
    whole = library.chat.completions.create(**ask)
    assert (whole.system_fingerprint or "").startswith("sharpi-") and whole.choices[0].finish_reason == "length"
    stream = library.chat.completions.create(**ask, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content != ""


@pytest.mark.parametrize("begun", ["Whill", [{"type": "text", "text": "Wh"}, {"type": "text", "text": "ill"}]])
def test_an_answer_that_was_begun_is_continued_if_asked(client: httpx.Client, begun: Any) -> None:
    body = {"messages": [*BOOK, {"role": "assistant", "content": begun}], "continue_final_message": True}
    for fields in ({}, {"add_generation_prompt": False}):
        assert client.post("/apply-template", json={**body, **fields}).json()["prompt"] == f"{PROMPT}Whill"
    both = client.post("/v1/chat/completions", json={**body, "add_generation_prompt": True})
    assert both.status_code == 400 and both.json()["error"]["param"] == "continue_final_message"


@pytest.mark.parametrize("asks", [True, False])
def test_the_answers_opening_is_asked_for_or_not(client: httpx.Client, asks: bool) -> None:
    found = client.post("/apply-template", json={"messages": BOOK, "add_generation_prompt": asks}).json()["prompt"]
    assert found == (PROMPT if asks else PROMPT.removesuffix("<assistant>"))


def test_several_answers_use_one_prompt(client: httpx.Client) -> None:
    for _ in range(2):
        answer = chat(client, n=2, id_slot=0, seed=1)
        assert [choice["message"]["role"] for choice in answer["choices"]] == ["assistant"] * 2
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
        assert answer["usage"]["completion_tokens"] == 16
        assert answer["usage"]["prompt_tokens"] == chat(client)["usage"]["prompt_tokens"]


@pytest.mark.parametrize("messages", [
    None, "text", [], [123], [{}], [{"role": 123}], [{"role": "system", "content": 123}], [*BOOK, {}],
    [{"content": "no role"}]])
def test_messages_that_are_none_are_refused(client: httpx.Client, messages: Any) -> None:
    response = client.post("/v1/chat/completions", json={"messages": messages})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"].startswith("messages") and error["param"] in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_beyond_the_context_is_refused_before_a_stream(client: httpx.Client, stream: bool) -> None:
    response = client.post("/v1/chat/completions", json={"messages": BOOK * 100, "stream": stream})
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] == "exceed_context_size_error"
    assert error["n_prompt_tokens"] > error["n_ctx"] == 512


# --- log-probabilities, biases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_scored_tokens_make_up_the_text(library: openai.OpenAI, stream: bool) -> None:
    ask: dict[str, Any] = {"model": "story", "messages": BOOK, "temperature": 0, "max_tokens": 5, "logprobs": True,
                           "top_logprobs": 10}
    if stream:
        choices = [chunk.choices[0] for chunk in library.chat.completions.create(**ask, stream=True)]
        text = "".join(choice.delta.content or "" for choice in choices)
        assert choices[0].delta.role == "assistant" and not any(choice.delta.role for choice in choices[1:])
    else:
        choices = list(library.chat.completions.create(**ask).choices)
        text = choices[0].message.content
    scores = [score for choice in choices if choice.logprobs for score in choice.logprobs.content]
    assert "".join(score.token for score in scores) == text
    assert b"".join(bytes(score.bytes) for score in scores) == text.encode()
    for score in scores:
        assert score.logprob <= 0 and len(score.top_logprobs) == 10


def test_forbidden_tokens_do_not_come_in_chats(client: httpx.Client, library: openai.OpenAI) -> None:
    usual = content_of(chat(client, max_tokens=32))
    forbidden = client.post("/tokenize", json={"content": usual}).json()["tokens"]
    ask: dict[str, Any] = {"model": "story", "messages": BOOK, "temperature": 0, "max_tokens": 32}
    answer = library.chat.completions.create(**ask, logit_bias={str(token): -100 for token in forbidden})
    text = answer.choices[0].message.content
    assert text and not set(client.post("/tokenize", json={"content": text}).json()["tokens"]) & set(forbidden)


# --- formats and calls ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("format", "expected"), [
    ({"type": "json_object", "schema": {"const": "42"}}, r'\s*"42"\s*'),
    # With bounds, since the toy model would write digits until it is stopped.
    ({"type": "json_object", "schema": {"type": "array", "maxItems": 1, "items": {
        "type": "integer", "minimum": -999, "maximum": 999}}}, r"\s*\[\s*(-?\d{1,3}\s*)?\]\s*"),
    ({"type": "json_schema", "json_schema": {"schema": {"const": "foooooo"}}}, r'\s*"foooooo"\s*'),
    ({"type": "json_object"}, r"\s*\{.*"),
    ({"type": "text"}, r".+"),
])
def test_an_answer_has_the_format_that_was_asked_for(client: httpx.Client, format: Any, expected: str) -> None:
    answer = chat(client, response_format=format, max_tokens=40)
    assert re.fullmatch(expected, content_of(answer), re.DOTALL), content_of(answer)


@pytest.mark.parametrize("format", [
    {"type": "sound"}, {}, {"type": "json_object", "schema": 123}, {"type": "json_object", "schema": {"type": 123}},
    {"type": "json_object", "schema": {"type": "hiccup"}}, {"type": "json_schema"}])
def test_a_format_that_there_is_not_is_refused(client: httpx.Client, format: Any) -> None:
    response = client.post("/v1/chat/completions", json={"messages": BOOK, "response_format": format})
    assert response.status_code == 400 and response.json()["error"]["param"].startswith("response_format")


def test_an_answer_follows_a_grammar(client: httpx.Client) -> None:
    for grammar in ('start: "a"{5}', {"type": "regex", "value": "a{5}"}, 'root ::= "a"{5,5}',
                    {"type": "gbnf", "value": 'root ::= "a" rest\nrest ::= "a"{4}'}):
        assert content_of(chat(client, grammar=grammar)) == "aaaaa"


@pytest.mark.parametrize("grammar", ["start: this is (not valid", "root ::= missing", {"type": "regex", "value": "("},
                                     {"type": "gbnf", "value": 'start: "a"'}, {"type": "bnf", "value": "a"}])
def test_a_grammar_that_is_none_is_refused(client: httpx.Client, grammar: Any) -> None:
    response = client.post("/v1/chat/completions", json={"messages": BOOK, "grammar": grammar})
    error = response.json()["error"]
    assert response.status_code == 400 and "\n" not in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_required_is_made(client: httpx.Client, stream: bool) -> None:
    ask: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    if stream:
        chunks = streamed(client, **ask)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
        assert {part["index"] for part in parts} == {0} and parts[0]["type"] == "function"
        assert all(set(part) == {"index", "function"} for part in parts[1:])
        name, reason = parts[0]["function"]["name"], chunks[-1]["choices"][0]["finish_reason"]
        arguments = "".join(part["function"]["arguments"] for part in parts)
        content = "".join(delta.get("content") or "" for delta in deltas)
    else:
        [choice] = chat(client, **ask)["choices"]
        [call] = choice["message"]["tool_calls"]
        name, arguments, reason = call["function"]["name"], call["function"]["arguments"], choice["finish_reason"]
        content = choice["message"]["content"] or ""
    assert (name, json.loads(arguments), reason) == ("test", {"success": True}, "tool_calls") and not content.strip()


@pytest.mark.parametrize("fields", [{"tools": []}, {"tools": None}, {"tools": [TOOL], "tool_choice": "none"}])
def test_no_call_is_made_without_tools(client: httpx.Client, fields: dict[str, Any]) -> None:
    [choice] = chat(client, max_tokens=32, **fields)["choices"]
    assert "tool_calls" not in choice["message"] and choice["message"]["content"]
