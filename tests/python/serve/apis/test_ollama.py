"""Ollama's endpoints: requests as turns, answers as lines, what is said of models, and its own client."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import ollama
import pytest
from fake_turns import CALLS, HELLO, THINKING, USAGE, FakeServer
from serving import app_of, running
from starlette.testclient import TestClient

from sharpi.serve.apis.ollama import routes
from sharpi.serve.errors import ApiError
from sharpi.serve.turns import CallArguments, CallBegun, Ended, OutputFormat, Said, Score, Tool, Turn

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Weather of a city",
                                            "parameters": {"type": "object"}}}


def client_of(server: FakeServer) -> TestClient:
    return TestClient(app_of(server, routes))


def chat(server: FakeServer, **fields: Any) -> httpx.Response:
    return client_of(server).post("/api/chat", json={"model": "toy", "messages": [USER], **fields})


def generate(server: FakeServer, **fields: Any) -> httpx.Response:
    return client_of(server).post("/api/generate", json={"model": "toy", "prompt": "Hi", **fields})


def turn(post: Any = chat, **fields: Any) -> Turn:
    """The turn of a request with these fields."""
    server = FakeServer()
    response = post(server, **fields)
    assert response.status_code == 200, response.text
    return server.runner.turn


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert {line["model"] for line in lines} == {"toy"}
    assert all(datetime.datetime.fromisoformat(line["created_at"].replace("Z", "+00:00")) for line in lines)
    return lines


# --- requests ---------------------------------------------------------------------------------------------------------


def test_options_of_a_request() -> None:
    options = {"num_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 4, "stop": "END",
               "repeat_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "num_ctx": 1 << 20,
               "num_gpu": 99, "mirostat": 1, "num_thread": None}
    assert turn(options=options).options == {
        "max_tokens": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 4, "stop": ["END"],
        "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    assert turn(options={"num_predict": -1, "seed": -1}).options == {}
    assert turn(options={"num_predict": 0}).options == {"max_tokens": 0}
    assert turn(options=None, tools=None, think=None, keep_alive="5m", format="") == turn(keep_alive=-1)


@pytest.mark.parametrize(("think", "thinking", "template"), [
    (None, None, {}), (True, True, {}), (False, False, {}), ("high", True, {"reasoning_effort": "high"})])
def test_think(think: Any, thinking: Any, template: Any) -> None:
    made = turn(think=think)
    assert (made.thinking, made.template) == (thinking, template)


def test_formats() -> None:
    assert turn(format="json").format == OutputFormat("json_object")
    assert turn(generate, format={"type": "object"}).format == OutputFormat("json_schema", {"type": "object"})
    assert turn().format is None


def test_a_conversation_with_tools() -> None:
    """Ollama's clients send no ids, and arguments as objects; a result names its tool, or nothing."""
    def call(name: str, **arguments: Any) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": arguments}}

    made = turn(tools=[WEATHER], messages=[
        {"role": "system", "content": "Be brief."}, USER,
        {"role": "assistant", "content": "", "thinking": "Hm", "tool_calls": [
            call("weather", city="Berlin"), call("now"), call("weather", city="Rome")]},
        {"role": "tool", "content": "noon", "tool_name": "now"},
        {"role": "tool", "content": "rain", "tool_name": "weather"},
        {"role": "tool", "content": "sun"},
        {"role": "system", "content": "Go on."}])
    assert made.tools == [Tool("weather", "Weather of a city", {"type": "object"})]
    answer = made.messages[2]
    assert answer["reasoning_content"] == "Hm"
    assert [made_call["function"] for made_call in answer["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Berlin"}'}, {"name": "now", "arguments": "{}"},
        {"name": "weather", "arguments": '{"city": "Rome"}'}]
    first, second, third = [made_call["id"] for made_call in answer["tool_calls"]]
    assert made.messages[3:] == [
        {"role": "tool", "tool_call_id": second, "content": "noon"},
        {"role": "tool", "tool_call_id": first, "content": "rain"},
        {"role": "tool", "tool_call_id": third, "content": "sun"},
        {"role": "user", "content": "Go on."}]
    assert not made.continues


def test_the_last_message_may_be_the_answers_beginning() -> None:
    assert turn(messages=[USER, {"role": "assistant", "content": "Hel"}]).continues


def test_prompts() -> None:
    assert turn(generate, system="Be brief.").messages == [{"role": "system", "content": "Be brief."}, USER]
    assert turn(generate, system="").messages == [USER]
    raw = turn(generate, raw=True, system="ignored")
    assert raw.prompt == "Hi" and not raw.messages


@pytest.mark.parametrize(("post", "fields", "param"), [
    (generate, {"suffix": "x"}, "suffix"),
    (generate, {"template": "x"}, "template"),
    (generate, {"images": ["aGk="]}, "images"),
    (generate, {"context": [1]}, "context"),
    (generate, {"prompt": 5}, "prompt"),
    (chat, {"messages": [{**USER, "images": ["aGk="]}]}, "messages[0].images"),
    (chat, {"messages": [{"role": "robot"}]}, "messages[0].role"),
    (chat, {"options": {"temperature": -1}}, "options.temperature"),
    (chat, {"options": {"num_predict": -3}}, "options.num_predict"),
    (chat, {"options": {"num_predict": "7"}}, "options.num_predict"),
    (chat, {"options": {"num_ctx": 0}}, "options.num_ctx"),
    (chat, {"options": {"stop": [""]}}, "options.stop[0]"),
    (chat, {"top_logprobs": 21}, "top_logprobs"),
    (chat, {"format": "yaml"}, "format"),
    (chat, {"think": "much"}, "think"),
    (chat, {"model": None}, "model"),
])
def test_an_error_names_what_is_wrong(post: Any, fields: Any, param: str) -> None:
    server = FakeServer()
    response = post(server, **fields)
    assert response.status_code == 400 and not server.runner.turns
    assert list(response.json()) == ["error"] and response.json()["error"].startswith(param)


def test_other_errors() -> None:
    server = FakeServer()
    response = chat(server, model="other")
    assert response.status_code == 404 and "other" in response.json()["error"]
    server.runner.refusal = ApiError(429, "rate_limit_error", "full", headers={"Retry-After": "3"})
    response = chat(server)
    assert (response.status_code, response.json(), response.headers["retry-after"]) == (429, {"error": "full"}, "3")
    assert client_of(server).post("/api/chat", content=b"{").status_code == 400


def test_embeddings_are_not_there_yet() -> None:
    for path in ("/api/embed", "/api/embeddings"):
        response = client_of(FakeServer()).post(path, json={"model": "toy", "input": "Hi"})
        assert response.status_code == 501 and "embeddings" in response.json()["error"]


def test_a_tag_that_clients_add() -> None:
    assert chat(FakeServer(), model="toy:latest").status_code == 200
    assert chat(FakeServer(), model="toy:7b").status_code == 404


# --- answers ----------------------------------------------------------------------------------------------------------

END = {"done": True, "prompt_eval_count": 12, "eval_count": 5, "prompt_eval_duration": 500_000_000,
       "eval_duration": 1_000_000_000}


def assert_end(line: dict[str, Any], reason: str) -> None:
    assert {**line, **END, "done_reason": reason} == line
    assert 0 <= line["load_duration"] <= line["total_duration"] < 60e9


def test_the_lines_of_a_chat() -> None:
    server = FakeServer(THINKING)
    lines = lines_of(chat(server))
    assert [line["message"] for line in lines] == [
        {"role": "assistant", "content": "", "thinking": "Hm"}, {"role": "assistant", "content": "", "thinking": "m."},
        {"role": "assistant", "content": "Hel"}, {"role": "assistant", "content": "lo."},
        {"role": "assistant", "content": ""}]
    assert_end(lines[-1], "stop")
    assert server.runner.opened[0].closed


def test_the_lines_of_a_completion() -> None:
    lines = lines_of(generate(FakeServer(THINKING)))
    assert [(line["response"], line.get("thinking")) for line in lines] == [
        ("", "Hm"), ("", "m."), ("Hel", None), ("lo.", None), ("", None)]
    assert_end(lines[-1], "stop")


def test_calls_come_whole() -> None:
    calls = [{"id": "call_a", "function": {"index": 0, "name": "weather", "arguments": {"city": "Berlin"}}},
             {"id": "call_b", "function": {"index": 1, "name": "now", "arguments": {}}}]
    lines = lines_of(chat(FakeServer(CALLS)))
    assert [line["message"].get("tool_calls") for line in lines] == [None, [calls[0]], [calls[1]], None]
    whole = chat(FakeServer(CALLS), stream=False).json()
    assert whole["message"] == {"role": "assistant", "content": "Let me look.", "tool_calls": calls}
    assert_end(whole, "stop")


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_that_was_cut_off_cannot_be_run(stream: bool) -> None:
    cut = [Said(0, "x"), CallBegun(0, 0, "a", "weather"), CallArguments(0, 0, '{"ci'), Ended(0, "length"), USAGE]
    response = chat(FakeServer(cut), stream=stream)
    lines = lines_of(response) if stream else [response.json()]
    assert all("tool_calls" not in line["message"] for line in lines)
    assert lines[0]["message"]["content"] == "x"
    assert_end(lines[-1], "length")


def test_answers_that_are_not_streamed() -> None:
    whole = chat(FakeServer(THINKING), stream=False).json()
    assert whole["message"] == {"role": "assistant", "content": "Hello.", "thinking": "Hmm."}
    assert_end(whole, "stop")
    whole = generate(FakeServer(THINKING), stream=False).json()
    assert (whole["response"], whole["thinking"]) == ("Hello.", "Hmm.")
    assert_end(whole, "stop")


def test_log_probabilities() -> None:
    top = (Score(1, "a", b"a", -0.5),)
    steps = [Said(0, "a", (Score(1, "a", b"a", -0.5, top),)), Ended(0, "stop"), USAGE]
    expected = [{"token": "a", "logprob": -0.5, "bytes": [97],
                 "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}]}]
    server = FakeServer(steps)
    assert lines_of(chat(server, logprobs=True, top_logprobs=1))[0]["logprobs"] == expected
    assert server.runner.turn.scores == 1
    assert generate(FakeServer(steps), logprobs=True, stream=False).json()["logprobs"] == expected
    assert turn(top_logprobs=1).scores is None


def test_nothing_breaks_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comment is no line of JSON."""
    monkeypatch.setattr("sharpi.serve.sse.SILENCE", 0.02)
    assert len(lines_of(chat(FakeServer([0.1, *HELLO])))) == 3


def test_an_error_ends_a_stream() -> None:
    text = chat(FakeServer([Said(0, "x"), RuntimeError("secret")])).text
    *_, last = text.splitlines()
    assert list(json.loads(last)) == ["error"] and "secret" not in text


@pytest.mark.parametrize("post", [chat, generate])
def test_a_request_without_a_prompt_loads_the_model(post: Any) -> None:
    server = FakeServer()
    answer = post(server, messages=[], prompt="", keep_alive=0).json()
    assert answer["done"] and answer["done_reason"] == "load" and not server.runner.turns


# --- models -----------------------------------------------------------------------------------------------------------


def loaded_server() -> FakeServer:
    return FakeServer(model=SimpleNamespace(context=512, device="cpu"))


def test_what_is_said_of_models() -> None:
    server = loaded_server()
    client = client_of(server)
    [tag] = client.get("/api/tags").json()["models"]
    assert (tag["name"], tag["model"], tag["details"]["format"]) == ("toy", "toy", "gguf")
    assert 0.9 < tag["size"] / Path(server.path).stat().st_size <= 1 and len(tag["digest"]) == 64
    assert tag["details"]["family"] and tag["details"]["parameter_size"] and tag["details"]["quantization_level"]
    [running_one] = client.get("/api/ps").json()["models"]
    assert running_one["context_length"] == 512 and running_one["size_vram"] == 0
    shown = client.post("/api/show", json={"model": "toy:latest", "verbose": True}).json()
    assert shown["details"] == tag["details"] and "completion" in shown["capabilities"]
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] > 0
    assert client.post("/api/show", json={"name": "toy"}).json() == shown
    assert client.post("/api/show", json={"model": "other"}).status_code == 404
    assert client.get("/api/version").json()["version"].count(".") == 2


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    server = loaded_server()
    server.path = tmp_path / "gone.gguf"
    [tag] = client_of(server).get("/api/tags").json()["models"]
    assert tag["name"] == "toy" and tag["size"] == 0
    response = client_of(server).post("/api/show", json={"model": "toy"})
    assert response.status_code == 404 and "cannot be read" in response.json()["error"]


def test_the_greeting_leaves_browsers_to_the_page() -> None:
    client = client_of(FakeServer())
    for accept in ("*/*", "application/json"):
        assert client.get("/", headers={"accept": accept}).text == "Ollama is running"
        assert client.head("/", headers={"accept": accept}).status_code == 200
    assert client.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}).status_code == 404


# --- Ollama's own client ----------------------------------------------------------------------------------------------


def test_the_client_chats() -> None:
    with running(app_of(FakeServer(CALLS), routes)) as address:
        client = ollama.Client(host=address)
        whole = client.chat("toy", [USER], tools=[WEATHER], think=True)
        assert whole.message.content == "Let me look." and whole.message.tool_calls
        calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
        assert calls == [("weather", {"city": "Berlin"}), ("now", {})]
        parts = list(client.chat("toy", [USER], tools=[WEATHER], stream=True))
        streamed = [call for part in parts for call in part.message.tool_calls or ()]
        assert streamed == list(whole.message.tool_calls)
        assert "".join(part.message.content or "" for part in parts) == whole.message.content
        assert parts[-1].done and parts[-1].eval_count == whole.eval_count == 5
        client.chat("toy", [USER, whole.message, {"role": "tool", "content": "rain", "tool_name": "weather"}])


def test_the_client_generates() -> None:
    with running(app_of(FakeServer(THINKING), routes)) as address:
        client = ollama.Client(host=address)
        whole = client.generate("toy", "Hi", options={"temperature": 0, "seed": 1}, keep_alive="5m")
        assert (whole.response, whole.thinking, whole.done_reason) == ("Hello.", "Hmm.", "stop")
        parts = list(client.generate("toy", "Hi", stream=True))
        assert "".join(part.response or "" for part in parts) == "Hello."
        with pytest.raises(ollama.ResponseError, match="suffix"):
            client.generate("toy", "Hi", suffix="x")


def test_the_client_lists_models() -> None:
    with running(app_of(loaded_server(), routes)) as address:
        client = ollama.Client(host=address)
        [listed] = client.list().models
        assert listed.model == "toy" and listed.modified_at and listed.size
        assert client.show("toy").modelinfo
        [loaded] = client.ps().models
        assert loaded.context_length == 512 and loaded.expires_at


def test_the_client_raises_errors() -> None:
    with running(app_of(FakeServer([Said(0, "x"), ApiError(500, "server_error", "broken")]), routes)) as address:
        client = ollama.Client(host=address)
        with pytest.raises(ollama.ResponseError, match="broken"):
            list(client.chat("toy", [USER], stream=True))
        with pytest.raises(ollama.ResponseError) as raised:
            client.chat("other", [USER])
        assert raised.value.status_code == 404
