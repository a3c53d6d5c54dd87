"""What llama.cpp's server is tested for in keys, metrics and what it says of itself. docs/serve/compatibility.md is
the list."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import running, wait_until, with_template

from sharpi import Scheduler
from sharpi.serve.app import create_app
from sharpi.serve.models.loading import default_runner
from sharpi.serve.server import Runner
from sharpi.serve.settings import ServerSettings

KEY = "sk-this-is-the-secret-key"
PAGE = "http://page.example"
PROMPT = "the quick brown fox jumps over the lazy dog"


@pytest.fixture
def client(server: str) -> httpx.Client:
    return httpx.Client(base_url=server, timeout=120)


def complete(client: httpx.Client, prompt: str, count: int) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    answer: dict[str, Any] = client.post("/v1/completions", json=body).json()
    return answer


def chatting(model: Any, scheduler: Scheduler, settings: ServerSettings) -> Runner:
    """The usual runner of a model that has a chat template now."""
    return default_runner(with_template(model), scheduler, settings)


# --- keys and origins -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed() -> Iterator[str]:
    """A server that asks for a key and lets one page use it."""
    settings = ServerSettings(device="cpu", threads=1, context=256, api_keys=(KEY,), cors_origins=(PAGE,),
                              preload=False, port=0)
    with running(create_app(settings, make_runner=chatting)) as address:
        yield address


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/", "/page/main.js", "/page/page.css"])
def test_health_and_the_page_need_no_key(keyed: str, path: str) -> None:
    assert httpx.get(keyed + path).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer invalid-key"}, {"X-Api-Key": "invalid-key"}])
@pytest.mark.parametrize("path", ["/v1/completions", "/completions", "/v1/chat/completions", "/v1/messages",
                                  "/api/chat", "/tokenize", "/openapi.json", "/metrics", "/props", "/nothing"])
def test_without_the_key_there_is_nothing(keyed: str, headers: dict[str, str], path: str) -> None:
    response = httpx.post(keyed + path, json={"prompt": "Hello"}, headers=headers)
    error = response.json()["error"]
    assert response.status_code == 401 and (path == "/api/chat" or error["type"] == "authentication_error")


@pytest.mark.parametrize("headers", [{"Authorization": f"Bearer {KEY}"}, {"X-Api-Key": KEY}])
def test_the_key_opens_it_in_either_header(keyed: str, headers: dict[str, str]) -> None:
    body = {"prompt": "Hello", "max_tokens": 2}
    assert httpx.post(f"{keyed}/v1/completions", json=body, headers=headers, timeout=60).status_code == 200


def test_openais_library_gives_its_key(keyed: str) -> None:
    ask: dict[str, Any] = {"model": "story", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    for base in (keyed, f"{keyed}/v1"):
        with_key = openai.OpenAI(base_url=base, api_key=KEY, max_retries=0)
        assert len(with_key.chat.completions.create(**ask).choices) == 1
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=base, api_key="wrong", max_retries=0).chat.completions.create(**ask)


@pytest.mark.parametrize(("origin", "allowed"), [
    (PAGE, True), ("http://localhost", False), ("http://127.0.0.1:3000", False), ("http://evil.com", False),
    ("http://page.example.evil.com", False), ("http://notpage.example", False), ("null", False)])
def test_only_named_origins_are_let_in_and_never_with_cookies(keyed: str, origin: str, allowed: bool) -> None:
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers":
             "Authorization"}
    found = httpx.options(f"{keyed}/v1/chat/completions", headers=asked)
    assert (found.headers.get("access-control-allow-origin") == origin) is allowed
    assert "access-control-allow-credentials" not in found.headers


@pytest.mark.parametrize("url", ["file://mtmd/test-1.jpeg", "file:///etc/passwd", "http://127.0.0.1:9/x.png"])
def test_no_address_in_a_message_is_opened(client: httpx.Client, url: str) -> None:
    parts = [{"type": "text", "text": "test"}, {"type": "image_url", "image_url": {"url": url}}]
    response = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]})
    error = response.json()["error"]
    assert response.status_code == 400 and "text only" in error["message"]
    assert error["param"] == "messages[0].content[1]"


@pytest.mark.parametrize("path", [
    "/completion", "/infill", "/lora-adapters", "/slots/0?action=save", "/models/load", "/models/unload", "/tools",
    "/cors-proxy?url=http://127.0.0.1", "/predict", "/v1/stream?conv_id=x", "/v1/audio/transcriptions"])
def test_what_is_not_served_is_a_404(client: httpx.Client, path: str) -> None:
    for response in (client.post(path, json={}), client.get(path)):
        assert response.status_code == 404 and response.json()["error"]["type"] == "not_found_error"


# --- what it says of itself -------------------------------------------------------------------------------------------


def test_models_and_props_and_slots(client: httpx.Client) -> None:
    for path in ("/models", "/v1/models"):
        [model] = client.get(path).json()["data"]
        assert model["id"] == "story" and model["meta"]["n_ctx_train"] == 1024
    props = client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert set(props["default_generation_settings"]["params"]) >= {"temperature", "top_p", "seed"}
    complete(client, "Hello", 4)
    wait_until(lambda: not any(slot["is_processing"] for slot in client.get("/slots").json()))
    slots = client.get("/slots").json()
    assert len(slots) == props["total_slots"] and all(slot["n_ctx"] == 512 for slot in slots)
    assert "params" not in slots[0], "what others ask for is nobody's business"


def test_tokens_make_up_the_text_again(client: httpx.Client) -> None:
    for content in ("What is the capital of France ?", "unicode 媽 and emoji 🤗", ""):
        found = client.post("/tokenize", json={"content": content}).json()["tokens"]
        assert client.post("/detokenize", json={"tokens": found}).json()["content"] == content
        pieces = client.post("/tokenize", json={"content": content, "with_pieces": True}).json()["tokens"]
        assert [piece["id"] for piece in pieces] == found and all(piece["piece"] for piece in pieces)


# --- metrics ----------------------------------------------------------------------------------------------------------


def metrics_of(client: httpx.Client) -> dict[str, Any]:
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(response.text)}


def value_of(client: httpx.Client, name: str) -> float:
    family = metrics_of(client)[name]
    return sum(sample.value for sample in family.samples if not sample.name.endswith("_created"))


def test_metrics_have_types_and_help(client: httpx.Client) -> None:
    complete(client, "I believe", 8)
    found = metrics_of(client)
    for name, kind in (("sharpi_prompt_tokens", "counter"), ("sharpi_cached_tokens", "counter"),
                       ("sharpi_completion_tokens", "counter"), ("sharpi_steps", "counter"),
                       ("sharpi_step_seconds", "counter"), ("sharpi_requests_running", "gauge"),
                       ("sharpi_requests_waiting", "gauge"), ("sharpi_kv_cache_usage", "gauge")):
        assert found[name].type == kind and found[name].documentation
    wait_until(lambda: value_of(client, "sharpi_requests_running") == 0)
    assert value_of(client, "sharpi_steps") > 0


def test_metrics_add_up_to_what_requests_were_told(client: httpx.Client) -> None:
    names = ("sharpi_prompt_tokens", "sharpi_cached_tokens", "sharpi_completion_tokens")
    before = [value_of(client, name) for name in names]
    usages = [complete(client, f"{PROMPT} " * 12, count)["usage"] for count in (4, 4, 1, 16)]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[1] > 0
    told = [sum(usage["prompt_tokens"] for usage in usages), sum(cached), 4 + 4 + 1 + 16]
    assert [value_of(client, name) - old for name, old in zip(names, before, strict=True)] == told


@pytest.mark.parametrize("count", [1, 8])
def test_timings_are_finite(client: httpx.Client, count: int) -> None:
    timings = complete(client, "I believe", count)["timings"]
    assert all(value is None or 0 <= value < 1e9 for value in timings.values()), timings
    assert timings["prompt_ms"] > 0 and timings["predicted_n"] == count
