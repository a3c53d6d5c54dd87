"""Anthropic's messages: requests as turns, answers as messages and events, and its own client."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest
from fake_turns import CALLS, HELLO, THINKING, USAGE, FakeServer
from serving import app_of, running
from starlette.testclient import TestClient

from sharpi.serve.apis.anthropic import routes
from sharpi.serve.errors import ApiError
from sharpi.serve.turns import CallArguments, CallBegun, Ended, NamedTool, OutputFormat, Said, Tool, Turn

WEATHER = {"name": "weather", "description": "Weather of a city", "input_schema": {"type": "object"}}

# Claude Code's request, written from descriptions of what it sends, not recorded: its changing header in the first
# system block, cache marks, a system message in the middle, tools of types that run at Anthropic, and fields that come
# and go.
CLAUDE_CODE: dict[str, Any] = {
    "model": "toy", "max_tokens": 32000, "stream": True, "temperature": 1,
    "metadata": {"user_id": "user_1_account__session_2"},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.36.c90; cc_entrypoint=cli; cch=4f1a2;"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [{"name": "Read", "description": "Reads a file", "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
        "properties": {"file_path": {"type": "string"}}, "required": ["file_path"]}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>Today.</system-reminder>"},
                                     {"type": "text", "text": "What is in a.py?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I must read it.", "signature": "sharpi"},
            {"type": "text", "text": "I read it."},
            {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "a.py"}},
            {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {"file_path": "b.py"}}]},
        {"role": "system", "content": "The user has opened b.py."},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "print(1)"}]},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such file", "is_error": True},
            {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}}]},
    ],
}


def post(server: FakeServer, body: Any, path: str = "/v1/messages") -> httpx.Response:
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    return TestClient(app_of(server, routes)).post(path, **sent)


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "toy", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], **fields}


def turn(**fields: Any) -> Turn:
    """The turn of a request with these fields."""
    server = FakeServer()
    response = post(server, asked(**fields))
    assert response.status_code == 200, response.text
    return server.runner.turn


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """A stream's events; each names its type twice."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        if block != ":":
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


# --- requests ---------------------------------------------------------------------------------------------------------


def test_what_claude_code_sends() -> None:
    """See CLAUDE_CODE: the header that changes is gone, and what came in the middle is part of a user's turn."""
    made = turn(**CLAUDE_CODE)

    def call(id: str, path: str) -> dict[str, Any]:
        return {"id": id, "type": "function",
                "function": {"name": "Read", "arguments": json.dumps({"file_path": path})}}

    assert made.messages == [
        {"role": "system", "content": "You are Claude Code.\n\nBe brief."},
        {"role": "user", "content": "<system-reminder>Today.</system-reminder>\n\nWhat is in a.py?"},
        {"role": "assistant", "content": "I read it.", "reasoning_content": "I must read it.",
         "tool_calls": [call("toolu_1", "a.py"), call("toolu_2", "b.py")]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "print(1)"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no such file"},
        {"role": "user", "content": "The user has opened b.py.\n\nGo on."},
    ]
    assert [tool.name for tool in made.tools] == ["Read"]
    assert (made.thinking, made.thinking_budget) == (True, 31999)
    assert made.options == {"max_tokens": 32000, "temperature": 1}
    assert made.key == "user_1_account__session_2"


def test_a_header_that_changes_changes_no_prompt() -> None:
    """As a block of its own, and as the first line of a text."""
    for system in ("x-anthropic-billing-header: cch=1;\nBe brief.",
                   [{"type": "text", "text": "x-anthropic-billing-header: cch=2;\nBe brief."}]):
        assert turn(system=system).messages[0] == {"role": "system", "content": "Be brief."}
    assert turn(system="x-anthropic-billing-header: cch=1;").messages[0]["role"] == "user"
    later = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "x-anthropic-billing-header: no"}]
    assert "x-anthropic-billing-header: no" in turn(system=later).messages[0]["content"]


def test_options_of_a_request() -> None:
    made = turn(stop_sequences=["END"], temperature=0, top_p=0.5, top_k=7)
    assert made.options == {"max_tokens": 9, "stop": ["END"], "temperature": 0, "top_p": 0.5, "top_k": 7}
    assert turn(temperature=None, metadata=None, system=None, tools=None) == turn()


@pytest.mark.parametrize(("choice", "expected", "parallel"), [
    ({"type": "auto"}, "auto", True),
    ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
    ({"type": "none"}, "none", True),
    ({"type": "tool", "name": "weather"}, NamedTool("weather"), True),
])
def test_choices_of_tools(choice: Any, expected: Any, parallel: bool) -> None:
    made = turn(tools=[WEATHER, {**WEATHER, "type": "custom"}], tool_choice=choice)
    assert made.tools == [Tool("weather", "Weather of a city", {"type": "object"})] * 2
    assert (made.tool_choice, made.parallel_calls) == (expected, parallel)


@pytest.mark.parametrize(("thinking", "expected"), [
    (None, (False, None)),
    ({"type": "disabled"}, (False, None)),
    ({"type": "adaptive"}, (True, None)),
    ({"type": "enabled", "budget_tokens": 2000}, (True, 2000)),
])
def test_thinking(thinking: Any, expected: Any) -> None:
    made = turn(thinking=thinking)
    assert (made.thinking, made.thinking_budget) == expected


def test_effort_and_format() -> None:
    schema = {"type": "object"}
    made = turn(output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}})
    assert made.template == {"reasoning_effort": "low"}
    assert made.format == OutputFormat("json_schema", schema)


def test_the_last_message_may_be_the_answers_beginning() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}]
    assert turn(messages=messages).continues
    assert not turn().continues
    call = {"type": "tool_use", "id": "1", "name": "weather", "input": {}}
    for ended in (" ", [{"type": "text", "text": "Hel"}, call]):
        assert not turn(messages=[messages[0], {"role": "assistant", "content": ended}]).continues


def test_a_message_of_no_blocks_says_nothing() -> None:
    for content in ("", []):
        assert turn(messages=[{"role": "user", "content": content}]).messages == [{"role": "user", "content": ""}]


def test_messages_of_one_role_in_a_row_are_one() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"role": "system", "content": "c"}]
    assert turn(messages=messages).messages == [{"role": "user", "content": "a\n\nb\n\nc"}]


@pytest.mark.parametrize(("fields", "param"), [
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"temperature": -0.5}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [
        {"type": "text", "text": "x"}, {"type": "document"}]}]}]}, "messages[0].content[0].content[1]"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "tool", "name": "now"}, "tools": [WEATHER]}, "tool_choice"),
    ({"tool_choice": {"type": "any"}, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "tool_choice"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
])
def test_an_error_names_what_is_wrong(fields: Any, param: str) -> None:
    response = post(FakeServer(), asked(**fields))
    assert response.status_code == 400 and response.json()["error"]["message"].startswith(param)


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_whole_message() -> None:
    server = FakeServer(CALLS)
    message = post(server, asked()).json()
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message", "role": "assistant", "model": "toy", "stop_reason": "tool_use", "stop_sequence": None,
        "content": [{"type": "text", "text": "Let me look."},
                    {"type": "tool_use", "id": "call_a", "name": "weather", "input": {"city": "Berlin"}},
                    {"type": "tool_use", "id": "call_b", "name": "now", "input": {}}],
        "usage": {"input_tokens": 4, "cache_read_input_tokens": 8, "cache_creation_input_tokens": 0,
                  "output_tokens": 5}}
    assert server.runner.opened[0].closed


@pytest.mark.parametrize(("ended", "reason"), [
    (Ended(0, "stop"), "end_turn"), (Ended(0, "stop", "END"), "stop_sequence"), (Ended(0, "length"), "max_tokens"),
    (Ended(0, "timeout"), "max_tokens"), (Ended(0, "tool_calls"), "tool_use")])
@pytest.mark.parametrize("stream", [False, True])
def test_why_an_answer_ended(ended: Ended, reason: str, stream: bool) -> None:
    response = post(FakeServer([Said(0, "x"), ended, USAGE]), {**CLAUDE_CODE, "stream": stream})
    told = events_of(response)[-2]["delta"] if stream else response.json()
    assert (told["stop_reason"], told["stop_sequence"]) == (reason, ended.stop_text)


def test_the_events_of_a_stream() -> None:
    """Each block begins, continues and stops before the next; thinking is signed, which clients insist on."""
    events = events_of(post(FakeServer([*THINKING[:2], *CALLS]), CLAUDE_CODE))
    start = events[0]["message"]
    assert start["content"] == [] and start["stop_reason"] is None
    assert start["usage"] == {"input_tokens": 4, "cache_read_input_tokens": 8, "cache_creation_input_tokens": 0,
                              "output_tokens": 0}
    told = [(event["type"].removeprefix("content_block_"), event.get("index"),
             event.get("content_block") or event.get("delta")) for event in events[1:-2]]
    assert told == [
        ("start", 0, {"type": "thinking", "thinking": "", "signature": ""}),
        ("delta", 0, {"type": "thinking_delta", "thinking": "Hm"}),
        ("delta", 0, {"type": "thinking_delta", "thinking": "m."}),
        ("delta", 0, {"type": "signature_delta", "signature": "sharpi"}),
        ("stop", 0, None),
        ("start", 1, {"type": "text", "text": ""}),
        ("delta", 1, {"type": "text_delta", "text": "Let me look."}),
        ("stop", 1, None),
        ("start", 2, {"type": "tool_use", "id": "call_a", "name": "weather", "input": {}}),
        ("delta", 2, {"type": "input_json_delta", "partial_json": '{"city": "Ber'}),
        ("delta", 2, {"type": "input_json_delta", "partial_json": 'lin"}'}),
        ("stop", 2, None),
        ("start", 3, {"type": "tool_use", "id": "call_b", "name": "now", "input": {}}),
        ("delta", 3, {"type": "input_json_delta", "partial_json": "{}"}),
        ("stop", 3, None)]
    assert events[-2]["type"] == "message_delta" and events[-2]["usage"]["output_tokens"] == 5
    assert events[-1] == {"type": "message_stop"}


def test_a_call_that_was_cut_off_cannot_be_run() -> None:
    cut = [Said(0, "x"), CallBegun(0, 0, "a", "weather"), CallArguments(0, 0, '{"ci'), Ended(0, "length"), USAGE]
    message = post(FakeServer(cut), {**CLAUDE_CODE, "stream": False}).json()
    assert message["content"] == [{"type": "text", "text": "x"}] and message["stop_reason"] == "max_tokens"


def test_an_answer_of_nothing() -> None:
    server = FakeServer([Ended(0, "stop"), USAGE])
    assert post(server, {**CLAUDE_CODE, "stream": False}).json()["content"] == []
    kinds = [event["type"] for event in events_of(post(server, CLAUDE_CODE))]
    assert kinds == ["message_start", "message_delta", "message_stop"]


def test_silence_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the message starts by a comment, since a client may expect its start first; then by a ping."""
    monkeypatch.setattr("sharpi.serve.sse.SILENCE", 0.05)
    text = post(FakeServer([0.2, HELLO[0], 0.2, *HELLO[1:]]), CLAUDE_CODE).text
    before, after = text.split("event: message_start")
    assert before.replace(":\n\n", "") == "" and before
    assert 'event: ping\ndata: {"type":"ping"}\n\n' in after and "\n:\n\n" not in after


def test_an_error_ends_a_stream() -> None:
    for error, kind in ((ApiError(503, "x", "ending"), "overloaded_error"), (RuntimeError("secret"), "api_error")):
        events = events_of(post(FakeServer([Said(0, "x"), error]), CLAUDE_CODE))
        assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == kind
        assert "secret" not in str(events[-1])


def test_errors_before_the_answer() -> None:
    server = FakeServer()
    response = post(server, {**CLAUDE_CODE, "model": "other"})
    assert response.status_code == 404
    assert response.json() == {"type": "error", "request_id": response.headers["request-id"],
                               "error": {"type": "not_found_error", "message": "model: there is no such name: other"}}
    server.runner.refusal = ApiError(400, "invalid_request_error", "too long", code="exceed_context_size_error",
                                     details={"n_prompt_tokens": 5000, "n_ctx": 4096})
    response = post(server, CLAUDE_CODE)
    assert response.json()["error"] == {"type": "invalid_request_error",
                                        "message": "prompt is too long: 5000 tokens > 4096 maximum"}
    server.runner.refusal = ApiError(429, "rate_limit_error", "full", headers={"Retry-After": "3"})
    response = post(server, CLAUDE_CODE)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": "toy"}', b"\xff", b"[" * 100_000])
def test_bodies_that_are_no_requests(body: bytes) -> None:
    response = post(FakeServer(), body)
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"


def test_counting_tokens() -> None:
    server = FakeServer()
    sent = {key: CLAUDE_CODE[key] for key in ("model", "system", "tools", "thinking", "messages")}
    assert post(server, sent, "/v1/messages/count_tokens").json() == {"input_tokens": 42}
    expected = turn(**CLAUDE_CODE)
    counted = server.runner.turn
    assert (counted.messages, counted.tools, counted.thinking) == (expected.messages, expected.tools, expected.thinking)


# --- Anthropic's own client -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [HELLO, THINKING, CALLS], ids=["text", "thinking", "calls"])
def test_the_client_reads_a_stream_as_it_reads_a_message(steps: Any) -> None:
    """Also from what Claude Code sends (see CLAUDE_CODE)."""
    more = ("temperature", "context_management")  # which not every version of the client knows
    sent = {key: value for key, value in CLAUDE_CODE.items() if key not in ("stream", *more)}
    sent["extra_body"] = {key: CLAUDE_CODE[key] for key in more}
    with running(app_of(FakeServer(steps), routes)) as address:
        client = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
        message = client.messages.create(**sent, timeout=60)
        with client.messages.stream(**sent) as stream:
            streamed = stream.get_final_message()
        counted = client.messages.count_tokens(model="toy", messages=[{"role": "user", "content": "Hi"}])
    for field in ("stop_reason", "stop_sequence", "usage"):
        assert getattr(streamed, field) == getattr(message, field)
    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in message.content]
    assert message.usage.input_tokens == 4 and message.usage.cache_read_input_tokens == 8
    texts = [block.text for block in message.content if block.type == "text"]
    assert texts == (["Let me look."] if steps is CALLS else ["Hello."])
    assert counted.input_tokens == 42


def test_the_client_raises_errors() -> None:
    server = FakeServer([Said(0, "x"), ApiError(500, "server_error", "broken")])
    with running(app_of(server, routes)) as address:
        client = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
        ask = asked()
        with pytest.raises(anthropic.APIStatusError, match="broken"), client.messages.stream(**ask) as stream:
            stream.until_done()
        with pytest.raises(anthropic.NotFoundError) as raised:
            client.messages.create(**{**ask, "model": "other"})
        assert raised.value.request_id and raised.value.request_id.startswith("req_")
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            client.messages.create(**{**ask, "max_tokens": -1})
