"""Anthropic's, Ollama's and OpenAI's clients against the bundled model: its greedy text, and its counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest
from serving import NAME, OneModelServer, app_of, running, story_server

from sharpi.serve.apis import anthropic as messages_api
from sharpi.serve.apis import ollama as ollama_api
from sharpi.serve.apis import responses as responses_api

SYSTEM, HELLO, BEGINNING = "Be brief.", "Hello", "Once upon"
TOKENS = 12
LONG = "word " * 2000


@pytest.fixture(scope="module")
def story() -> Iterator[OneModelServer]:
    with story_server() as server:
        yield server


@pytest.fixture(scope="module")
def address(story: OneModelServer) -> Iterator[str]:
    with running(app_of(story, messages_api.routes, ollama_api.routes, responses_api.routes)) as url:
        yield url


def generated(story: OneModelServer, prompt: str, **options: Any) -> tuple[str, int]:
    """What the model itself says after a prompt, and how many tokens the prompt has."""
    ids = story.model.tokenize(prompt, add_special=False, parse_special=True)
    options = {"temperature": 0.0, "max_tokens": TOKENS, **options}
    return "".join(token.text for token in story.model.generate(ids, **options)), len(ids)


def test_anthropics_client(story: OneModelServer, address: str) -> None:
    client = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
    user: Any = {"role": "user", "content": HELLO}
    ask: Any = {"model": NAME, "max_tokens": TOKENS, "system": SYSTEM, "extra_body": {"temperature": 0}}
    for begun in ("", BEGINNING):
        messages = [user, {"role": "assistant", "content": begun}] if begun else [user]
        text, count = generated(story, f"<system>{SYSTEM}\n<user>{HELLO}\n<assistant>{begun}")
        message = client.messages.create(**ask, messages=messages)
        with client.messages.stream(**ask, messages=messages) as stream:
            assert "".join(stream.text_stream) == text
            streamed = stream.get_final_message()
        for answer in (message, streamed):
            assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": text}]
            assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == TOKENS
            assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == count
        counted = client.messages.count_tokens(model=NAME, system=SYSTEM, messages=messages)
        assert counted.input_tokens == count
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 512 maximum"):
        client.messages.create(**ask, messages=[{"role": "user", "content": LONG}])
    assert client.messages.count_tokens(model=NAME, messages=[{"role": "user", "content": LONG}]).input_tokens > 512


def test_anthropics_stop_texts(story: OneModelServer, address: str) -> None:
    client = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
    text, _ = generated(story, f"<user>{HELLO}\n<assistant>")
    stop = text[len(text) // 2:][:4]
    message = client.messages.create(model=NAME, max_tokens=TOKENS, stop_sequences=[stop],
                                     messages=[{"role": "user", "content": HELLO}], extra_body={"temperature": 0})
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert [block.to_dict()["text"] for block in message.content] == [text[:text.index(stop)]]


def test_ollamas_client(story: OneModelServer, address: str) -> None:
    client = ollama.Client(host=address)
    options: Any = {"temperature": 0, "num_predict": TOKENS}
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": HELLO}]
    text, count = generated(story, f"<system>{SYSTEM}\n<user>{HELLO}\n<assistant>")
    whole = client.chat(NAME, messages, options=options)
    assert whole.message.content == text
    assert (whole.prompt_eval_count, whole.eval_count, whole.done_reason) == (count, TOKENS, "length")
    assert whole.eval_duration and whole.total_duration and whole.total_duration >= whole.eval_duration
    parts = list(client.chat(NAME, messages, options=options, stream=True))
    assert "".join(part.message.content or "" for part in parts) == text
    assert client.generate(NAME, HELLO, system=SYSTEM, options=options).response == text
    raw = story.model.tokenize(HELLO, parse_special=True)
    expected = "".join(token.text for token in story.model.generate(raw, temperature=0.0, max_tokens=TOKENS))
    parts = list(client.generate(NAME, HELLO, raw=True, options=options, stream=True))
    assert "".join(part.response or "" for part in parts) == expected
    assert [model.model for model in client.list().models] == [NAME]
    assert [model.context_length for model in client.ps().models] == [512]
    with pytest.raises(ollama.ResponseError) as raised:
        client.chat(NAME, [{"role": "user", "content": LONG}])
    assert raised.value.status_code == 400


def test_openais_responses(story: OneModelServer, address: str) -> None:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    ask: Any = {"model": NAME, "instructions": SYSTEM, "input": HELLO, "temperature": 0, "max_output_tokens": TOKENS}
    text, count = generated(story, f"<system>{SYSTEM}\n<user>{HELLO}\n<assistant>")
    whole = client.responses.create(**ask)
    events = list(client.responses.create(**ask, stream=True))
    last = events[-1]
    assert last.type == "response.incomplete"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    for response in (whole, last.response):
        assert response.output_text == text and response.status == "incomplete"
        assert response.usage and response.usage.input_tokens == count and response.usage.output_tokens == TOKENS
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(**{**ask, "input": LONG})
    assert raised.value.code == "exceed_context_size_error"
