"""OpenAI's responses: requests as turns, answers as responses and events, and its own client."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import openai
import pytest
from fake_turns import CALLS, HELLO, THINKING, USAGE, FakeServer
from serving import app_of, running
from starlette.testclient import TestClient

from sharpi.serve.apis.responses import routes
from sharpi.serve.errors import ApiError
from sharpi.serve.turns import CallArguments, CallBegun, Ended, NamedTool, OutputFormat, Said, Score, Tool, Turn

WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "description": "Weather of a city", "strict": False,
                           "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}

# Codex's request, written from descriptions of what it sends, not recorded: developer messages, users' messages in a
# row, reasoning of which only the encrypted part comes back, calls and their outputs, and tools of types of its own.
CODEX: dict[str, Any] = {
    "model": "toy", "instructions": "You are Codex.", "stream": True, "store": False, "parallel_tool_calls": False,
    "tool_choice": "auto", "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0199-a",
    "reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "low"},
    "tools": [{"type": "function", "name": "shell", "description": "Runs a command", "strict": False, "parameters": {
        "type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}},
        "required": ["command"], "additionalProperties": False}},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "web_search", "external_web_access": False}, {"type": "local_shell"}],
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: read-only."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context/>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
        {"type": "reasoning", "summary": [], "content": None,
         "encrypted_content": base64.b64encode(b"I must list them.").decode()},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I list them."}]},
        {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
    ],
}


def post(server: FakeServer, body: Any) -> httpx.Response:
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    return TestClient(app_of(server, routes)).post("/v1/responses", **sent)


def turn(**fields: Any) -> Turn:
    """The turn of a request with these fields."""
    server = FakeServer()
    response = post(server, {"model": "toy", "input": "Hi", **fields})
    assert response.status_code == 200, response.text
    return server.runner.turn


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """A stream's events; each names its type twice, and they are numbered."""
    assert response.status_code == 200
    events = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


# --- requests ---------------------------------------------------------------------------------------------------------


def test_what_codex_sends() -> None:
    """See CODEX: one system message, the user's messages as one, and the parts of an answer as one."""
    made = turn(**CODEX)
    call = {"id": "call_1", "type": "function", "function": {"name": "shell", "arguments": '{"command": ["ls"]}'}}
    assert made.messages == [
        {"role": "system", "content": "You are Codex.\n\nSandbox: read-only."},
        {"role": "user", "content": "<environment_context/>\n\nList the files."},
        {"role": "assistant", "content": "I list them.", "reasoning_content": "I must list them.",
         "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a.py"}]
    assert [tool.name for tool in made.tools] == ["shell"]
    assert made.thinking is True and made.template == {"reasoning_effort": "medium"}
    assert not made.parallel_calls and not made.continues
    assert made.format is None and made.scores is None


def test_input_is_text_or_items() -> None:
    assert turn(input="Hi").messages == [{"role": "user", "content": "Hi"}]
    assert turn(input=[{"role": "user", "content": "Hi"}]).messages == [{"role": "user", "content": "Hi"}]
    assert turn(input=[], instructions="Begin.").messages == [{"role": "system", "content": "Begin."}]


def test_reasoning_that_comes_back() -> None:
    """As text, as sealed here, or encrypted by others, which is nothing to us."""
    for item, text in (({"content": [{"type": "reasoning_text", "text": "Hm"}]}, "Hm"),
                       ({"encrypted_content": base64.b64encode(b"Hm").decode()}, "Hm"),
                       ({"encrypted_content": "gAAAA_-x"}, None), ({"summary": []}, None)):
        made = turn(input=[{"type": "reasoning", "summary": [], **item}, {"role": "assistant", "content": "x"}])
        assert made.messages[0].get("reasoning_content") == text


def test_custom_calls_and_parts_of_outputs() -> None:
    made = turn(input=[{"type": "custom_tool_call", "name": "apply_patch", "input": "*** x", "call_id": "c"},
                       {"type": "custom_tool_call_output", "call_id": "c", "output": [
                           {"type": "input_text", "text": "done"}]}])
    assert made.messages[0]["tool_calls"][0]["function"] == {"name": "apply_patch", "arguments": '{"input": "*** x"}'}
    assert made.messages[1] == {"role": "tool", "tool_call_id": "c", "content": "done"}


def test_options_of_a_request() -> None:
    made = turn(max_output_tokens=7, temperature=0, top_p=0.5, store=True, user="u", truncation="auto")
    assert made.options == {"max_tokens": 7, "temperature": 0, "top_p": 0.5}
    assert made.key == "u"
    assert turn(temperature=None, instructions=None, tools=None, reasoning=None, previous_response_id=None) == turn()
    assert turn(top_logprobs=2).scores == 2
    assert turn(include=["message.output_text.logprobs"]).scores == 0


@pytest.mark.parametrize(("effort", "thinking", "template"), [
    ("none", False, {}), ("minimal", True, {"reasoning_effort": "low"}), ("high", True, {"reasoning_effort": "high"}),
    (None, None, {})])
def test_effort(effort: Any, thinking: Any, template: Any) -> None:
    made = turn(reasoning={"effort": effort})
    assert (made.thinking, made.template) == (thinking, template)


@pytest.mark.parametrize(("choice", "expected", "names"), [
    ("none", "none", ["weather", "now"]),
    ("required", "required", ["weather", "now"]),
    ({"type": "function", "name": "now"}, NamedTool("now"), ["weather", "now"]),
    ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}, "required",
     ["now"])])
def test_choices_of_tools(choice: Any, expected: Any, names: Any) -> None:
    made = turn(tools=[WEATHER, {**WEATHER, "name": "now"}], tool_choice=choice)
    assert made.tool_choice == expected and [tool.name for tool in made.tools] == names
    assert made.tools[-1] == Tool("now", "Weather of a city", WEATHER["parameters"])


@pytest.mark.parametrize(("format", "expected"), [
    ({"type": "text"}, None), ({"type": "json_object"}, OutputFormat("json_object")),
    ({"type": "json_schema", "name": "n", "strict": True, "schema": {"type": "object"}},
     OutputFormat("json_schema", {"type": "object"}))])
def test_formats(format: Any, expected: Any) -> None:
    assert turn(text={"format": format}).format == expected


@pytest.mark.parametrize(("fields", "param"), [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"conversation": {"id": "conv_1"}}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"background": True}, "background"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ({"input": [{"role": "robot", "content": ""}]}, "input[0].role"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"max_output_tokens": -1}, "max_output_tokens"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "function", "name": "now"}, "tools": [WEATHER]}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"description": "x" * 300_000}}}},
     "text.format.schema"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
])
def test_an_error_names_what_is_wrong(fields: Any, param: str) -> None:
    server = FakeServer()
    response = post(server, {"model": "toy", "input": "Hi", **fields})
    assert response.status_code == 400 and not server.runner.turns
    assert response.json()["error"]["param"] == param and response.json()["error"]["type"] == "invalid_request_error"


def test_nothing_is_stored() -> None:
    client = TestClient(app_of(FakeServer(), routes))
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        response = client.request(method, f"/v1/responses/resp_1{path}")
        assert response.status_code == 404 and "stores none" in response.json()["error"]["message"]


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_whole_response() -> None:
    server = FakeServer([*THINKING[:2], *CALLS])
    response = post(server, {**CODEX, "stream": False}).json()
    assert response["id"].startswith("resp_") and response["status"] == "completed" and response["error"] is None
    id = response["id"].removeprefix("resp_")
    assert response["output"] == [
        {"id": f"rs_{id}_0", "status": "completed", "type": "reasoning", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Hmm."}],
         "encrypted_content": base64.b64encode(b"Hmm.").decode()},
        {"id": f"msg_{id}_1", "status": "completed", "type": "message", "role": "assistant",
         "content": [{"type": "output_text", "text": "Let me look.", "annotations": [], "logprobs": []}]},
        {"id": f"fc_{id}_2", "status": "completed", "type": "function_call", "call_id": "call_a", "name": "weather",
         "arguments": '{"city": "Berlin"}'},
        {"id": f"fc_{id}_3", "status": "completed", "type": "function_call", "call_id": "call_b", "name": "now",
         "arguments": "{}"}]
    assert response["usage"] == {
        "input_tokens": 12, "output_tokens": 5, "total_tokens": 17,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 2}}
    assert [tool["name"] for tool in response["tools"]] == ["shell"]
    assert server.runner.opened[0].closed


def test_reasoning_is_sealed_only_if_asked_for() -> None:
    output = post(FakeServer(THINKING), {**CODEX, "stream": False, "include": []}).json()["output"]
    assert output[0]["type"] == "reasoning" and "encrypted_content" not in output[0]


def test_the_events_of_a_stream() -> None:
    """Each item is added, continued and done before the next; the last event holds what a whole response would."""
    events = events_of(post(FakeServer([*THINKING[:2], *CALLS]), CODEX))
    text, reasoning, call = "output_text", "reasoning_text", "function_call_arguments"

    def kinds(index: int) -> list[str]:
        return [event["type"].removeprefix("response.") for event in events if event.get("output_index") == index]

    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    framed = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    assert kinds(0) == [*framed[0], *[f"{reasoning}.delta"] * 2, f"{reasoning}.done", *framed[1]]
    assert kinds(1) == [*framed[0], f"{text}.delta", f"{text}.done", *framed[1]]
    assert kinds(2) == ["output_item.added", *[f"{call}.delta"] * 2, f"{call}.done", "output_item.done"]
    assert [event["output_index"] for event in events[2:-1]] == sorted(
        event["output_index"] for event in events[2:-1])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    last = events[-1]
    assert last["type"] == "response.completed" and last["response"]["output"] == done
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == done[event["output_index"]]["id"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert all(item["status"] == "in_progress" and not item.get("content") and not item.get("arguments")
               for item in added)
    assert events[0]["response"]["output"] == [] and events[0]["response"]["usage"] is None


@pytest.mark.parametrize("reason", ["length", "timeout"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_cut_off(reason: Any, stream: bool) -> None:
    cut = [Said(0, "x"), CallBegun(0, 0, "a", "weather"), CallArguments(0, 0, '{"ci'), Ended(0, reason), USAGE]
    response = post(FakeServer(cut), {**CODEX, "stream": stream})
    told = events_of(response)[-1] if stream else {"type": "response.incomplete", "response": response.json()}
    assert told["type"] == "response.incomplete"
    assert told["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in told["response"]["output"]] == ["completed", "incomplete"]


def test_log_probabilities() -> None:
    top = (Score(1, "a", b"a", -0.5), Score(2, "b", b"b", float("-inf")))
    said = Said(0, "a", (Score(1, "a", b"a", -0.5, top),))
    events = events_of(post(FakeServer([said, Ended(0, "stop"), USAGE]), {**CODEX, "top_logprobs": 2}))
    expected = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [
        {"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "b", "logprob": -9999.0, "bytes": [98]}]}]
    told = [event["logprobs"] for event in events if event["type"].startswith("response.output_text")]
    assert told == [expected, expected]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == expected


def test_an_error_ends_a_stream() -> None:
    """Also one that comes before all else, of which a client hears after the beginning that it expects."""
    for steps in ([Said(0, "x"), RuntimeError("secret")], [RuntimeError("secret")]):
        events = events_of(post(FakeServer(steps), CODEX))
        assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.failed"
        response = events[-1]["response"]
        assert response["status"] == "failed" and response["error"]["code"] == "server_error"
        assert "secret" not in str(events)


# --- OpenAI's own client ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [HELLO, THINKING, CALLS], ids=["text", "thinking", "calls"])
def test_the_client_reads_a_stream_as_it_reads_a_response(steps: Any) -> None:
    """Also from what Codex sends (see CODEX)."""
    sent = {key: value for key, value in CODEX.items() if key != "stream"}
    with running(app_of(FakeServer(steps), routes)) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        whole = client.responses.create(**sent)
        with client.responses.stream(**sent) as stream:
            texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
            streamed = stream.get_final_response()
    ids = {"id", "parsed", "parsed_arguments"}
    assert whole.output_text == streamed.output_text == "".join(texts)
    assert [item.model_dump(exclude=ids) for item in whole.output] == [
        item.model_dump(exclude=ids) | _unparsed(item) for item in streamed.output]
    assert whole.usage == streamed.usage
    kinds = ["message", "function_call", "function_call"] if steps is CALLS else ["message"]
    assert [item.type for item in whole.output if item.type != "reasoning"] == kinds


def _unparsed(item: Any) -> dict[str, Any]:
    """The content of a message without what the client adds to a streamed one."""
    if item.type != "message":
        return {}
    return {"content": [part.model_dump(exclude={"parsed"}) for part in item.content]}


def test_the_client_raises_errors() -> None:
    server = FakeServer()
    with running(app_of(server, routes)) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            client.responses.create(model="toy", input="Hi", previous_response_id="resp_1")
        with pytest.raises(openai.NotFoundError, match="stores none"):
            client.responses.retrieve("resp_1")
        server.runner.refusal = ApiError(400, "invalid_request_error", "too long", code="exceed_context_size_error",
                                         details={"n_prompt_tokens": 5000, "n_ctx": 4096})
        with pytest.raises(openai.BadRequestError) as raised:
            client.responses.create(model="toy", input="Hi", stream=True)
        assert raised.value.code == "exceed_context_size_error"
