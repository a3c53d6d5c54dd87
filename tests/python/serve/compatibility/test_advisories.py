"""What has gone wrong in other servers, tried on this one. docs/serve/security.md is the list."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import OneModelServer, story_server
from starlette.testclient import TestClient

from sharpi.serve.answering.prompts import PromptMaker
from sharpi.serve.answering.rules import RuleBook
from sharpi.serve.app import create_app
from sharpi.serve.settings import ServerSettings
from sharpi.serve.turns import OutputFormat, Turn

USER = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"messages": USER, "max_tokens": 4}


@pytest.fixture
def client(server: str) -> httpx.Client:
    return httpx.Client(base_url=server, timeout=60)


def numbers(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """All numbers in a document, and where they are."""
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number"):
            yield path, schema
        for name, part in schema.items():
            yield from numbers(part, f"{path}/{name}")
    elif isinstance(schema, list):
        for index, part in enumerate(schema):
            yield from numbers(part, f"{path}/{index}")


def test_every_number_of_a_request_has_bounds() -> None:
    app = create_app(ServerSettings(preload=False))
    schemas = TestClient(app, base_url="http://localhost").get("/openapi.json").json()["components"]["schemas"]
    requests = {name: schema for name, schema in schemas.items() if not name.startswith("OpenAi")}
    found = dict(numbers(requests))
    assert len(found) > 50
    for path, number in found.items():
        assert "minimum" in number or "exclusiveMinimum" in number, path
        assert "maximum" in number or "exclusiveMaximum" in number, path


@pytest.mark.parametrize(("path", "fields"), [
    ("/v1/chat/completions", {"n": 1_000_000_000}), ("/v1/chat/completions", {"n": -1}),
    ("/v1/chat/completions", {"max_tokens": -32}), ("/v1/chat/completions", {"max_tokens": 1 << 63}),
    ("/v1/chat/completions", {"top_k": -(1 << 40)}), ("/v1/chat/completions", {"temperature": -1e308}),
    ("/v1/chat/completions", {"thinking_token_budget": -1}), ("/v1/chat/completions", {"min_tokens": -1}),
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 1 << 31}),
    ("/v1/chat/completions", {"logit_bias": {"-1": 1}}), ("/v1/chat/completions", {"logit_bias": {"1": 1e308}}),
    ("/v1/completions", {"prompt": [-1]}), ("/v1/completions", {"prompt": [1 << 40]}),
    ("/v1/completions", {"prompt": "x", "best_of": 1_000_000}), ("/v1/completions", {"prompt": "x", "logprobs": -1}),
    ("/v1/completions", {"prompt": ["x"] * 100_000}),
    ("/v1/messages", {"model": "story", "max_tokens": -1}),
    ("/v1/messages", {"model": "story", "max_tokens": 4, "thinking": {"type": "enabled", "budget_tokens": 1 << 70}}),
    ("/api/chat", {"model": "story", "options": {"num_ctx": -1}}),
    ("/api/generate", {"model": "story", "prompt": "x", "context": [-1]}),
    ("/detokenize", {"tokens": [-1]}),
])
def test_a_number_that_is_negative_or_huge_is_refused(client: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    response = client.post(path, json={**CHAT, **fields})
    assert response.status_code == 400, response.text
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200, "it lives"


@pytest.mark.parametrize("prompt", ["", [""], "\x00", "\ufffd"])
def test_a_prompt_of_nothing_harms_nobody(client: httpx.Client, prompt: Any) -> None:
    assert client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}).status_code in (200, 400)
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


# --- templates --------------------------------------------------------------------------------------------------------


def test_a_request_brings_no_template_and_changes_no_arguments_of_ours(client: httpx.Client) -> None:
    prompt = client.post("/apply-template", json=CHAT).json()["prompt"]
    harmless = {"chat_template_kwargs": {"tokenize": True, "return_tensors": "pt", "truncation": True}}
    for fields in ({"chat_template": "{{ 'mine' * 9 }}"}, harmless):
        assert client.post("/apply-template", json={**CHAT, **fields}).json()["prompt"] == prompt
    for name in ("messages", "tools", "self"):
        response = client.post("/v1/chat/completions", json={**CHAT, "chat_template_kwargs": {name: []}})
        assert response.status_code == 400 and name in response.json()["error"]["message"]


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", CHAT), ("/apply-template", CHAT), ("/v1/messages", {"model": "story", **CHAT}),
    ("/v1/messages/count_tokens", {"model": "story", "messages": USER})])
def test_prompts_are_made_beside_the_event_loop(client: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str,
                                                body: dict[str, Any]) -> None:
    made, loops = PromptMaker.make, []

    def make(self: PromptMaker, turn: Turn) -> Any:
        loops.append(asyncio._get_running_loop())
        return made(self, turn)

    monkeypatch.setattr(PromptMaker, "make", make)
    assert client.post(path, json=body).status_code == 200
    assert loops == [None]


# --- files, models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [
    "/api/create", "/api/pull", "/api/push", "/api/copy", "/api/delete", "/api/blobs/sha256:00", "/v1/files",
    "/v1/load_lora_adapter", "/models/load", "/slots/0", "/lora-adapters", "/sleep", "/collective_rpc", "/debug"])
def test_no_request_loads_makes_or_removes_a_file(client: httpx.Client, path: str) -> None:
    for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"):
        assert client.request(method, path, content=b"{}").status_code == 404, method


def test_a_models_name_is_no_path(client: httpx.Client, tmp_path: Path) -> None:
    """What is there and what is not are answered alike, so nobody learns which files there are."""
    there, missing = tmp_path / "there.gguf", tmp_path / "miss.gguf"
    there.write_bytes(b"GGUF")
    for path, fields in (("/v1/chat/completions", CHAT), ("/api/show", {}), ("/v1/messages", CHAT)):
        answers = []
        for file in (there, missing):
            response = client.post(path, json={**fields, "model": str(file)})
            answers.append((response.status_code, response.text.replace(file.name, "").split("request_id")[0]))
        assert answers[0] == answers[1] and answers[0][0] == 404
    assert client.get("/v1/models/..%2f..%2fetc%2fpasswd").status_code == 404


@pytest.mark.parametrize("fields", [{"prompt_embeds": "gASVAAAA"}, {"prompt": None, "prompt_embeds": ["gASVAAAA"]}])
def test_what_would_have_to_be_unpickled_is_no_prompt(client: httpx.Client, fields: dict[str, Any]) -> None:
    response = client.post("/v1/completions", json=fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"


# --- what is kept -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def story() -> Iterator[OneModelServer]:
    with story_server() as made:
        yield made


def test_grammars_are_kept_in_a_bounded_number(story: OneModelServer) -> None:
    book = RuleBook(story.model.tokenizer)
    prompt = PromptMaker(story.model).make(Turn(messages=USER))
    for index in range(40):
        book.rules_of(Turn(messages=USER, format=OutputFormat("regex", f"a{{{index + 1}}}")), prompt)
    assert len(book._made) == 32
