"""The application: what it answers about itself and its models, and how it words what it does not answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_loader import FakeLoader, model_files
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.routing import Route

from sharpi import InvalidRequestError, ModelFileError
from sharpi.serve.app import create_app, server_of
from sharpi.serve.http.watch import StepWatch
from sharpi.serve.models.measuring import MeasuredRunner
from sharpi.serve.settings import ServerSettings
from sharpi.serve.turns import Turn, Usage

Scenario = Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]


@contextlib.asynccontextmanager
async def running(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application, between the begin and the end of its lifespan."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (app.router.lifespan_context(app),
                httpx.AsyncClient(transport=transport, base_url="http://localhost") as client):
        yield client


def test_paths_and_methods_that_there_are_not_are_errors_in_the_shape_of_the_api(tmp_path: Path) -> None:
    async def scenario() -> None:
        app = create_app(ServerSettings(preload=False), model_files(tmp_path, "a"), loader=FakeLoader())
        async with running(app) as client:
            found = await client.get("/nothing")
            assert found.status_code == 404
            assert found.json() == {"error": {"message": "there is no '/nothing' here", "type": "not_found_error",
                                              "param": None, "code": None}}
            found = await client.delete("/v1/models")
            assert found.status_code == 405 and "GET" in found.headers["allow"]
            assert found.json()["error"]["message"] == "'/v1/models' does not take DELETE"
            assert (await client.get("/api/nothing")).json() == {"error": "there is no '/api/nothing' here"}
            assert (await client.get("/v1/messages/nothing")).json()["type"] == "error"
            assert (await client.get("/v1/models/none")).json()["error"]["code"] == "model_not_found"

    asyncio.run(scenario())


def test_a_cache_keeps_the_page_apart_from_the_greeting(tmp_path: Path) -> None:
    async def scenario() -> None:
        app = create_app(ServerSettings(preload=False), model_files(tmp_path, "a"), loader=FakeLoader())
        async with running(app) as client:
            page, greeting = [await client.get("/", headers={"Accept": wanted}) for wanted in ("text/html", "*/*")]
            assert page.content != greeting.content
            again = await client.get("/", headers={"Accept": "text/html", "If-None-Match": page.headers["etag"]})
            assert again.status_code == 304
            assert [answer.headers["vary"] for answer in (page, greeting, again)] == ["Accept"] * 3

    asyncio.run(scenario())


def test_a_bug_is_a_500_that_tells_nothing(tmp_path: Path) -> None:
    async def broken(request: object) -> None:
        raise RuntimeError("the prompt was: secret")

    async def scenario() -> None:
        app = create_app(ServerSettings(preload=False), model_files(tmp_path, "a"), loader=FakeLoader())
        app.router.routes.append(Route("/broken", broken))  # type: ignore[arg-type]
        async with running(app) as client:
            found = await client.get("/broken")
            assert found.status_code == 500 and found.json()["error"]["code"] == "internal_error"
            assert "secret" not in found.text
            assert 'status="500"' in (await client.get("/metrics")).text

    asyncio.run(scenario())


def test_a_client_that_goes_before_its_body_has_come_is_no_bug(tmp_path: Path) -> None:
    async def scenario() -> None:
        app = create_app(ServerSettings(preload=False), model_files(tmp_path, "a"), loader=FakeLoader())
        incoming = [{"type": "http.request", "body": b'{"mess', "more_body": True}, {"type": "http.disconnect"}]

        async def receive() -> Any:
            return incoming.pop(0)

        async def send(message: Any) -> None:
            pass

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
        async with running(app) as client:
            await app(scope, receive, send)
            assert samples((await client.get("/metrics")).text)["sharpi_requests_total", "/v1/chat/completions",
                                                                "499"] == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings", "/rerank", "/v1/rerank"])
def test_what_no_model_does_yet_is_a_501(tmp_path: Path, path: str) -> None:
    async def scenario() -> None:
        app = create_app(ServerSettings(preload=False), model_files(tmp_path, "a"), loader=FakeLoader())
        async with running(app) as client:
            found = await client.post(path, json={"input": "x"})
            assert found.status_code == 501 and found.json()["error"]["type"] == "not_supported_error"

    asyncio.run(scenario())


# --- health -----------------------------------------------------------------------------------------------------------


async def health(client: httpx.AsyncClient) -> tuple[int, str]:
    found = await client.get("/health")
    return found.status_code, found.json()["status"]


async def until(client: httpx.AsyncClient, wanted: tuple[int, str]) -> None:
    for _ in range(500):
        if (found := await health(client)) == wanted:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(found)


def test_health_is_bad_while_the_first_model_is_loaded_and_while_the_server_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        loader = FakeLoader()
        loader.hold.clear()
        app = create_app(ServerSettings(), model_files(tmp_path, "a"), loader=loader)
        async with running(app) as client:
            await until(client, (503, "loading model"))
            loader.hold.set()
            await until(client, (200, "ok"))
            server_of(app).traffic.ending = True
            assert await health(client) == (503, "ending")
            refused = await client.get("/v1/models")
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "server_ending"
            assert "retry-after" in refused.headers
        assert loader.events == ["open a", "close a"]

    asyncio.run(scenario())


def test_a_first_model_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        loader, failures = FakeLoader(), []
        loader.failures["a"] = ModelFileError("a.gguf: is damaged")
        app = create_app(ServerSettings(), model_files(tmp_path, "a"), loader=loader, failed=failures.append)
        async with running(app) as client:
            await until(client, (503, "failed"))
            while not failures:  # it is told just after
                await asyncio.sleep(0.01)
            assert failures == ["the model 'a' cannot be loaded: a.gguf: is damaged"]

    asyncio.run(scenario())


def test_health_sees_that_the_device_failed(tmp_path: Path) -> None:
    async def scenario() -> None:
        loader = FakeLoader()
        app = create_app(ServerSettings(), model_files(tmp_path, "a"), loader=loader)
        async with running(app) as client:
            await until(client, (200, "ok"))
            loader.counts["failure"] = "CUDA: a step: an illegal memory access was encountered"
            assert await health(client) == (503, "failed")
            assert "a: CUDA: a step: an illegal" in (await client.get("/health")).json()["error"]["message"]

    asyncio.run(scenario())


def test_health_does_without_a_model_that_is_being_closed(tmp_path: Path) -> None:
    def closed() -> None:
        raise InvalidRequestError("the scheduler is closed")

    async def scenario() -> None:
        app = create_app(ServerSettings(), model_files(tmp_path, "a"), loader=FakeLoader())
        async with running(app) as client:
            await until(client, (200, "ok"))
            for loaded in server_of(app).store.loaded():
                loaded.scheduler.counts = closed  # type: ignore[method-assign]
            assert await health(client) == (200, "ok")

    asyncio.run(scenario())


def test_health_sees_that_no_step_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        loader = FakeLoader()
        app = create_app(ServerSettings(stall_seconds=0.05), model_files(tmp_path, "a"), loader=loader)
        async with running(app) as client:
            await until(client, (200, "ok"))
            await asyncio.sleep(0.1)
            assert await health(client) == (200, "ok"), "nothing is to be done"
            loader.counts["writing"] = 1
            await until(client, (503, "stalled"))
            assert "a has finished no step" in (await client.get("/health")).json()["error"]["message"]
            loader.counts["steps"] += 1
            assert await health(client) == (200, "ok")

    asyncio.run(scenario())


def test_time_counts_only_while_there_is_work() -> None:
    counts, now = {"steps": 1, "writing": 0}, 0.0
    watch = StepWatch(lambda: [("a", counts)], 60, lambda: now)
    for now, writing, steps, stalled in ((0.0, 1, 1, []), (50.0, 0, 1, []), (200.0, 1, 1, []), (250.0, 1, 2, []),
                                         (305.0, 1, 2, []), (311.0, 1, 2, [("a", 61.0)]), (312.0, 1, 3, [])):
        counts.update(writing=writing, steps=steps)
        assert list(watch.stalled()) == stalled, now


# --- metrics ----------------------------------------------------------------------------------------------------------


def samples(text: str) -> dict[tuple[str, ...], float]:
    """By name and labels' values."""
    return {(sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text) for sample in family.samples}


def test_metrics_count_requests_by_endpoint_and_schedulers_by_model(tmp_path: Path) -> None:
    async def scenario() -> None:
        loader = FakeLoader()
        app = create_app(ServerSettings(), model_files(tmp_path, "a"), loader=loader)
        async with running(app) as client:
            await until(client, (200, "ok"))
            loader.counts.update(waiting=3, writing=2, steps=7, step_seconds=0.5, answers_again_tokens=6)
            for path in ("/v1/models", "/v1/models/a", "/v1/models/b", "/made-up/1", "/made-up/2"):
                await client.get(path)
            found = samples((await client.get("/metrics")).text)
            assert found["sharpi_requests_total", "/v1/models", "200"] == 1
            assert found["sharpi_requests_total", "/v1/models/{name:path}", "404"] == 1
            assert found["sharpi_requests_total", "other", "404"] == 2, "clients must not make counters"
            assert found["sharpi_requests_waiting", "a"] == 3 and found["sharpi_requests_running", "a"] == 2
            assert found["sharpi_steps_total", "a"] == 7 and found["sharpi_step_seconds_total", "a"] == 0.5
            assert found["sharpi_answers_again_tokens_total", "a"] == 6
            assert found["sharpi_model_loaded", "a"] == 1

    asyncio.run(scenario())


def test_turns_are_counted_when_they_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        loader, kept = FakeLoader(), []
        app = create_app(ServerSettings(preload=False), model_files(tmp_path, "a"), loader=loader)
        metrics = server_of(app).metrics

        def record(usage: Usage) -> None:
            kept.append(usage)
            metrics.turn("a", usage)

        runner = MeasuredRunner(loader.runner, record)
        opened = await runner.open(Turn(prompt="x"))
        events = [event async for event in opened]
        assert isinstance(events[-1], Usage) and kept == [events[-1]]
        assert opened.cached_tokens == events[-1].cached_tokens and await runner.count(Turn(prompt="x")) == 42
        found = samples(metrics.text().decode())
        assert found["sharpi_prompt_tokens_total", "a"] == 12 and found["sharpi_cached_tokens_total", "a"] == 8
        assert found["sharpi_completion_tokens_total", "a"] == 5
        assert found["sharpi_queue_seconds_sum", "a"] == 0.25
        assert found["sharpi_first_token_seconds_count", "a"] == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("wanted", [False, True])
def test_prompts_are_logged_only_if_that_is_asked_for(wanted: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        runner = MeasuredRunner(FakeLoader().runner, lambda usage: None, wanted)
        [_ async for _ in await runner.open(Turn(messages=[{"role": "user", "content": "a secret"}]))]

    with caplog.at_level("DEBUG", "sharpi"):
        asyncio.run(scenario())
    assert ("a secret" in caplog.text) is wanted and ("Hel" in caplog.text) is wanted


# --- with the bundled model -------------------------------------------------------------------------------------------


@pytest.fixture
def client(server: str) -> httpx.Client:
    return httpx.Client(base_url=server)


def test_models_tell_how_long_a_context_may_be(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list" and listed["first_id"] == listed["last_id"] == "story"
    [model] = listed["data"]
    assert model == client.get("/v1/models/story").json()
    assert model["id"] == "story" and model["object"] == model["type"] == "model"
    assert model["max_model_len"] == model["meta"]["n_ctx"] == 512
    assert model["meta"]["n_ctx_train"] == 1024 and model["meta"]["n_vocab"] == 4096


def test_props_and_slots_tell_what_the_page_shows(client: httpx.Client) -> None:
    props = client.get("/props", params={"model": "story"}).json()
    assert props["model"] == "story" and props["loaded"] and props["n_ctx"] == 512
    assert props["default_generation_settings"]["n_ctx"] == 512 and props["total_slots"] == 8
    assert props["plan"] == [{"name": "in RAM, computed by the CPU", "bytes": 14874112, "role": "cpu"}]
    assert props["experts"] is None, "the CPU computes them, so no slot can have one"
    assert props["eos_token"] == "<|endoftext|>"
    assert client.get("/props", params={"model": "none"}).status_code == 404
    slots = client.get("/slots", params={"model": "story"}).json()
    assert [slot["is_processing"] for slot in slots] == [False] * 8
    assert client.get("/slots", params={"model": "none"}).json() == []


def test_tokens_and_texts_in_both_shapes(client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"prompt": "Once upon", "add_special_tokens": False}).json()["tokens"]
    assert ids == client.post("/tokenize", json={"content": "Once upon"}).json()["tokens"] and len(ids) > 1
    both = client.post("/detokenize", json={"tokens": ids}).json()
    assert both == {"prompt": "Once upon", "content": "Once upon"}
    pieces = client.post("/tokenize", json={"content": "Once upon", "with_pieces": True}).json()["tokens"]
    assert "".join(piece["piece"] for piece in pieces) == "Once upon" and [piece["id"] for piece in pieces] == ids
    info = client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|endoftext|>" and info["chat_template"].startswith("{% for m")


@pytest.mark.parametrize(("path", "body", "said"), [
    ("/tokenize", {"prompt": 1}, "prompt: Input should be a valid string"),
    ("/tokenize", {}, "content must be a text"),
    ("/tokenize", {"content": "x", "add_special": "yes"}, "add_special: Input should be a valid boolean"),
    ("/tokenize", {"content": "x", "model": 3}, "model"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]: Input should be greater than or equal to 0"),
    ("/detokenize", {"tokens": [1 << 30]}, "outside the vocabulary"),
    ("/detokenize", {}, "tokens: Field required"),
    ("/apply-template", {"messages": "x"}, "messages"),
])
def test_what_is_wrong_with_a_request_is_named(client: httpx.Client, path: str, body: object, said: str) -> None:
    found = client.post(path, json=body)
    assert found.status_code == 400 and said in found.json()["error"]["message"], found.text


@pytest.mark.parametrize("body", ["", "[]", "{", "[" * 100_000, '"x"', "\xff"])
def test_a_body_that_is_no_object_is_a_400(client: httpx.Client, body: str) -> None:
    for path in ("/tokenize", "/detokenize", "/apply-template"):
        assert client.post(path, content=body.encode("latin-1")).status_code == 400


def test_a_template_gives_the_prompt_that_a_chat_would_have(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    prompt = client.post("/apply-template", json={"messages": messages}).json()["prompt"]
    assert prompt == "<user>Hello\n<assistant>"
    options = {"max_tokens": 8, "temperature": 0}
    said = client.post("/v1/chat/completions", json={"model": "story", "messages": messages, **options}).json()
    text = client.post("/v1/completions", json={"model": "story", "prompt": prompt, **options}).json()
    assert said["choices"][0]["message"]["content"].strip() == text["choices"][0]["text"].strip() != ""
    before = {**messages[0], "role": "assistant"}
    ended = client.post("/apply-template", json={"messages": [before], "add_generation_prompt": False}).json()
    assert ended["prompt"] == "<assistant>Hello\n"
