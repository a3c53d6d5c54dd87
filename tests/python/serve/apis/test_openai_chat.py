"""OpenAI's chat completions: shapes from written events, and the real client with the bundled model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest
from fake_turns import CALLS, HELLO, THINKING, USAGE, FakeServer, Step
from serving import NAME, OneModelServer, app_of, running, sse_data, story_server

from sharpi.serve.apis import openai_chat
from sharpi.serve.errors import ApiError
from sharpi.serve.turns import Ended, NamedTool, OutputFormat, Said, Score, Tool, Turn

USER = [{"role": "user", "content": "Hello"}]
WEATHER = {"type": "function", "function": {"name": "weather", "description": "of a city",
                                            "parameters": {"type": "object"}}}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}


async def posted(server: FakeServer, body: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app_of(server, openai_chat.routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await client.post("/v1/chat/completions", content=content)


def ask(steps: Sequence[Step] = HELLO, **fields: Any) -> tuple[httpx.Response, Turn | None]:
    """The response, and the turn that the runner was asked for."""
    server = FakeServer(steps)
    response = asyncio.run(posted(server, {"messages": USER, **fields}))
    return response, server.runner.turns[0] if server.runner.turns else None


def turn_for(**fields: Any) -> Turn:
    response, turn = ask(**fields)
    assert response.status_code == 200, response.text
    assert turn is not None
    return turn


def chunks(steps: Sequence[Step] = HELLO, **fields: Any) -> list[dict[str, Any]]:
    response, _ = ask(steps, stream=True, **fields)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    data = sse_data(response.text.splitlines())
    assert data[-1] == "[DONE]" and response.text.endswith("\n\n")
    return [json.loads(line) for line in data[:-1]]


# --- what is answered -------------------------------------------------------------------------------------------------


def test_a_whole_answer() -> None:
    response, _ = ask(THINKING)
    body = response.json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-") and body["model"] == "toy"
    assert body["choices"] == [{
        "index": 0, "finish_reason": "stop", "logprobs": None,
        "message": {"role": "assistant", "content": "Hello.", "refusal": None, "reasoning_content": "Hmm.",
                    "reasoning": "Hmm."}}]
    assert body["usage"] == {"prompt_tokens": 12, "completion_tokens": 5, "total_tokens": 17,
                             "prompt_tokens_details": {"cached_tokens": 8},
                             "completion_tokens_details": {"reasoning_tokens": 2}}
    timings = body["timings"]
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (8, 4, 5)
    assert (timings["queued_ms"], timings["prompt_ms"], timings["predicted_ms"]) == (250, 500, 1000)


def test_a_stream_begins_with_the_role_and_ends_with_the_reason() -> None:
    made = chunks(THINKING)
    assert len({(one["id"], one["created"], one["model"], one["system_fingerprint"]) for one in made}) == 1
    assert [one["object"] for one in made] == ["chat.completion.chunk"] * len(made)
    assert all("usage" not in one for one in made), "only if it is asked for"
    assert [one["choices"][0]["delta"] for one in made] == [
        {"role": "assistant", "content": ""}, {"reasoning_content": "Hm", "reasoning": "Hm"},
        {"reasoning_content": "m.", "reasoning": "m."}, {"content": "Hel"}, {"content": "lo."}, {}]
    assert [one["choices"][0]["finish_reason"] for one in made] == [None] * 5 + ["stop"]


ENDS = [(Ended(0, "stop"), {"finish_reason": "stop"}), (Ended(0, "length"), {"finish_reason": "length"}),
        (Ended(0, "stop", "END"), {"finish_reason": "stop", "stop_reason": "END"}),
        (Ended(0, "timeout"), {"finish_reason": "length", "stop_reason": "timeout"})]


@pytest.mark.parametrize(("ended", "told"), ENDS)
def test_why_an_answer_ended(ended: Ended, told: dict[str, str]) -> None:
    steps = [Said(0, "x"), ended, USAGE]
    response, _ = ask(steps)
    for choice in (response.json()["choices"][0], chunks(steps)[-1]["choices"][0]):
        assert {name: choice[name] for name in choice if name.endswith("_reason")} == told


def test_usage_is_one_last_chunk_without_choices() -> None:
    made = chunks(stream_options={"include_usage": True})
    assert [one["usage"] for one in made[:-1]] == [None] * (len(made) - 1)
    assert made[-1]["choices"] == [] and made[-1]["usage"]["total_tokens"] == 17 and made[-1]["timings"]


def test_calls_are_streamed_with_their_index() -> None:
    made = [one["choices"][0] for one in chunks(CALLS)]
    calls = [one["delta"]["tool_calls"] for one in made if "tool_calls" in one["delta"]]
    assert calls == [
        [{"index": 0, "id": "call_a", "type": "function", "function": {"name": "weather", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": '{"city": "Ber'}}], [{"index": 0, "function": {"arguments": 'lin"}'}}],
        [{"index": 1, "id": "call_b", "type": "function", "function": {"name": "now", "arguments": ""}}],
        [{"index": 1, "function": {"arguments": "{}"}}]]
    assert made[-1]["finish_reason"] == "tool_calls"


def test_calls_of_a_whole_answer() -> None:
    response, _ = ask(CALLS)
    [choice] = response.json()["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me look."
    assert choice["message"]["tool_calls"] == [
        {"id": "call_a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Berlin"}'}},
        {"id": "call_b", "type": "function", "function": {"name": "now", "arguments": "{}"}}]
    response, _ = ask(CALLS[1:])
    assert response.json()["choices"][0]["message"]["content"] is None


SCORED = (Said(0, "ä", (Score(1, "\ufffd", b"\xc3", -0.5, (Score(1, "\ufffd", b"\xc3", -0.5),)),
                        Score(2, "\ufffd", b"\xa4", float("-inf")))), Ended(0, "length"), USAGE)


def test_scores_carry_bytes_and_no_infinities() -> None:
    expected = {"content": [
        {"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3],
         "top_logprobs": [{"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]}]},
        {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xA4], "top_logprobs": []}], "refusal": None}
    response, turn = ask(SCORED, logprobs=True, top_logprobs=1)
    assert turn is not None and turn.scores == 1
    assert response.json()["choices"][0]["logprobs"] == expected
    made = chunks(SCORED, logprobs=True)
    assert [one["choices"][0]["logprobs"] for one in made] == [None, expected, None]


def test_several_choices_have_their_own_deltas() -> None:
    steps = (Said(1, "b"), Said(0, "a"), Ended(1, "stop"), Ended(0, "length"), USAGE)
    response, turn = ask(steps, n=2)
    assert turn is not None and turn.choices == 2
    assert [(one["index"], one["message"]["content"], one["finish_reason"]) for one in response.json()["choices"]] == [
        (0, "a", "length"), (1, "b", "stop")]
    made = [one["choices"][0] for one in chunks(steps, n=2)]
    assert [(one["index"], one["delta"].get("role"), one["delta"].get("content")) for one in made] == [
        (0, "assistant", ""), (1, "assistant", ""), (1, None, "b"), (0, None, "a"), (1, None, None), (0, None, None)]


def test_any_text_survives_the_stream() -> None:
    text = 'a "quoted" line\n\ndata: [DONE]\n\u2028 \x00 🦙 \\'
    assert chunks((Said(0, text), Ended(0, "stop"), USAGE))[1]["choices"][0]["delta"]["content"] == text


# --- errors -----------------------------------------------------------------------------------------------------------


def test_an_error_before_the_stream_is_a_status() -> None:
    server = FakeServer()
    server.runner.refusal = ApiError(400, "invalid_request_error", "too long", code="exceed_context_size_error",
                                     details={"n_prompt_tokens": 9, "n_ctx": 8})
    response = asyncio.run(posted(server, {"messages": USER, "stream": True}))
    assert response.status_code == 400
    assert response.json() == {"error": {"message": "too long", "type": "invalid_request_error", "param": None,
                                         "code": "exceed_context_size_error", "n_prompt_tokens": 9, "n_ctx": 8}}


@pytest.mark.parametrize("failure", [ApiError(503, "server_error", "the server is ending"), RuntimeError("a secret")])
def test_an_error_in_mid_stream_ends_the_stream(failure: Exception) -> None:
    response, _ = ask((Said(0, "Hel"), failure, Said(0, "lo")), stream=True)
    data = sse_data(response.text.splitlines())
    error = json.loads(data[-1])["error"]
    assert error["type"] == "server_error" and "secret" not in response.text and "[DONE]" not in data
    assert len(data) == 3


@pytest.mark.parametrize(("fields", "param"), [
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": None}, "messages"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_completion_tokens": 1 << 40}, "max_completion_tokens"),
    ({"n": 0}, "n"),
    ({"n": 1_000_000}, "n"),
    ({"seed": 1 << 70}, "seed"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": "a" * 257}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "maybe", "tools": [WEATHER]}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}, "tools": [WEATHER]},
     "tool_choice.function.name"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"title": "a" * (1 << 18)}}}},
     "response_format.json_schema.schema"),
    ({"grammar": "a" * (1 << 19)}, "grammar"),
    ({"grammar": 'start: "a"', "response_format": {"type": "json_object"}}, "grammar"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
])
def test_a_field_that_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    response, turn = ask(**fields)
    assert response.status_code == 400 and turn is None
    error = response.json()["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error" and param in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b"\xff", b"[" * 100_000, b'{"messages": NaN}'])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    response = asyncio.run(posted(FakeServer(), body))
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"


def test_an_unknown_model_is_named() -> None:
    response, _ = ask(model="other")
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_unknown_fields_and_nulls_are_ignored() -> None:
    nothing = dict.fromkeys(("temperature", "n", "stop", "tools", "tool_choice", "seed", "stream", "logprobs"))
    assert turn_for(**nothing, store=True, metadata={"a": 1}, service_tier="auto") == Turn(messages=USER)


def test_sampling_fields_become_options() -> None:
    turn = turn_for(temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
                    repeat_penalty=1.1, logit_bias={"5": -100, "6": 2.5}, seed=-1, stop="end", max_tokens=9)
    assert turn.options == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 0, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
        "repetition_penalty": 1.1, "logit_bias": {5: -float("inf"), 6: 2.5}, "stop": ["end"], "max_tokens": 9}
    turn = turn_for(seed=-5, max_tokens=9, max_completion_tokens=4, repetition_penalty=1.2, user="someone")
    assert turn.options == {"seed": (1 << 64) - 5, "max_tokens": 4, "repetition_penalty": 1.2}
    assert turn.key == "someone"


def test_tools_and_formats_become_the_turns() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    turn = turn_for(tools=[WEATHER, {"type": "web_search"}], tool_choice=named, parallel_tool_calls=False)
    assert turn.tools == (Tool("weather", "of a city", {"type": "object"}),), "tools of other types are skipped"
    assert turn.tool_choice == NamedTool("weather") and not turn.parallel_calls
    assert turn_for(tools=[WEATHER], tool_choice="required").tool_choice == "required"
    assert turn_for(response_format={"type": "text"}).format is None
    assert turn_for(response_format={"type": "json_object"}).format == OutputFormat("json_object")
    schema = {"type": "object"}
    wanted = OutputFormat("json_schema", schema)
    assert turn_for(response_format={"type": "json_schema", "json_schema": {"schema": schema}}).format == wanted
    assert turn_for(grammar='start: "a"').format == OutputFormat("lark", 'start: "a"')
    assert turn_for(grammar={"type": "regex", "value": "a+"}).format == OutputFormat("regex", "a+")
    assert turn_for(grammar="").format is None


@pytest.mark.parametrize(("fields", "thinking", "template"), [
    ({"reasoning_effort": "none"}, False, {}),
    ({"reasoning_effort": "high"}, True, {"reasoning_effort": "high"}),
    ({"reasoning_effort": "minimal"}, True, {"reasoning_effort": "low"}),
    ({"chat_template_kwargs": {"enable_thinking": False, "x": 1}}, False, {"x": 1}),
    ({"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "none"}, True, {}),
    ({"add_generation_prompt": False}, None, {"add_generation_prompt": False}),
])
def test_thinking_and_the_template(fields: dict[str, Any], thinking: bool | None, template: dict[str, Any]) -> None:
    turn = turn_for(**fields)
    assert (turn.thinking, dict(turn.template)) == (thinking, template)


def test_silence_before_the_answer_tells_how_far_the_prompt_has_come() -> None:
    told = [one["prompt_progress"] for one in chunks([1.3, *HELLO], return_progress=True) if "prompt_progress" in one]
    assert len(told) >= 2 and {(one["total"], one["processed"], one["cache"]) for one in told} == {(12, 12, 0)}
    assert 0 < told[0]["time_ms"] < told[1]["time_ms"]
    assert not any("prompt_progress" in one for one in chunks([0.8, *HELLO]))
    later = chunks([HELLO[0], 0.8, *HELLO[1:]], return_progress=True)
    assert not any("prompt_progress" in one for one in later)


def test_a_running_answer_tells_its_speed_now_and_then() -> None:
    steps = [Said(0, "a"), Said(0, "b"), 0.6, Said(0, "c"), Said(0, "d"), 0.6, Said(0, "e"), *HELLO]
    came = chunks(steps, timings_per_token=True)
    running = [(at, one["timings"]) for at, one in enumerate(came) if "timings" in one]
    assert running.pop()[0] == len(came) - 1, "the last chunk tells of the whole answer"
    assert [told["predicted_n"] for _, told in running] == [3, 5], "not with each piece, and not without waiting"
    for at, told in running:
        assert came[at]["choices"] == []
        assert told["predicted_per_second"] == pytest.approx(1000 * (told["predicted_n"] - 1) / told["predicted_ms"])
    assert not any("timings" in one for one in chunks(steps)[:-1])


def test_the_last_chunk_has_the_timings() -> None:
    steps = [Said(0, "a"), Said(1, "b"), Ended(0, "stop"), Said(1, "c"), Ended(1, "length"), USAGE]
    came = chunks(steps, n=2)
    assert ["timings" in one for one in came] == [False] * (len(came) - 1) + [True]
    assert [(one["choices"][0]["index"], one["choices"][0]["finish_reason"]) for one in came if one["choices"]][3:] == [
        (1, None), (0, "stop"), (1, None), (1, "length")][-4:]
    assert came[-1]["timings"] == ask(steps, n=2)[0].json()["timings"]


def test_owners_of_keys_share_nothing() -> None:
    async def asked(owner: str) -> Turn:
        server = FakeServer(HELLO)
        app = app_of(server, openai_chat.routes)

        async def known(scope: Any, receive: Any, send: Any) -> None:  # as the middleware of keys leaves it
            scope.setdefault("state", {})["client"] = owner
            await app(scope, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(known), base_url="http://here") as client:
            await client.post("/v1/chat/completions", json={"messages": USER, "user": "someone"})
        return server.runner.turns[0]

    turns = [asyncio.run(asked(owner)) for owner in ("a", "b", "")]
    assert [(turn.salt, turn.key) for turn in turns] == [("a", "a someone"), ("b", "b someone"), ("", "someone")]


def test_further_fields() -> None:
    turn = turn_for(continue_final_message=True, ignore_eos=True, min_tokens=3, thinking_token_budget=7)
    assert (turn.continues, turn.ignore_end, turn.least_tokens, turn.thinking_budget) == (True, True, 3, 7)


# --- the real client, the real model ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def story() -> Iterator[OneModelServer]:
    with story_server() as server:
        yield server


@pytest.fixture(scope="module")
def client(story: OneModelServer) -> Iterator[openai.OpenAI]:
    with (running(app_of(story, openai_chat.routes)) as url,
          openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made):
        yield made


def expected(server: OneModelServer, prompt: str, **options: Any) -> str:
    ids = server.model.tokenize(prompt, add_special=False, parse_special=True)
    return "".join(token.text for token in server.model.generate(ids, **options))


def test_the_answer_is_what_the_model_generates(story: OneModelServer, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=NAME, messages=USER, **GREEDY)
    said = expected(story, "<user>Hello\n<assistant>", **GREEDY)
    assert answer.choices[0].message.content == said != ""
    assert answer.choices[0].finish_reason == "length"
    usage = answer.usage
    assert usage.prompt_tokens == len(story.model.tokenize("<user>Hello\n<assistant>", add_special=False))
    assert (usage.completion_tokens, usage.total_tokens) == (12, usage.prompt_tokens + 12)


def test_a_streamed_answer_is_the_same(story: OneModelServer, client: openai.OpenAI) -> None:
    for options in (GREEDY, {"temperature": 0.8, "seed": 3, "max_tokens": 30}):
        whole = client.chat.completions.create(model=NAME, messages=USER, **options)
        stream = [*client.chat.completions.create(model=NAME, messages=USER, stream=True,
                                                  stream_options={"include_usage": True}, **options)]
        said = "".join(one.choices[0].delta.content or "" for one in stream if one.choices)
        assert said == whole.choices[0].message.content == expected(story, "<user>Hello\n<assistant>", **options)
        assert stream[-1].usage.total_tokens == whole.usage.total_tokens
        assert stream[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_choices_have_seeds_of_their_own(story: OneModelServer, client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 0.8, "max_tokens": 20}
    answer = client.chat.completions.create(model=NAME, messages=USER, n=3, seed=7, **options)
    assert [one.message.content for one in answer.choices] == [
        expected(story, "<user>Hello\n<assistant>", seed=7 + index, **options) for index in range(3)]
    assert answer.usage.completion_tokens == 60


def test_the_client_reads_the_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=USER, max_tokens=-1)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "word " * 600}], stream=True)
    assert caught.value.code == "exceed_context_size_error"
    assert caught.value.body["n_ctx"] == 512 and caught.value.body["n_prompt_tokens"] > 512
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=USER)
    part = {"type": "image_url", "image_url": {"url": "http://nowhere/a.png"}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": [part]}])
    assert caught.value.param == "messages[0].content[0]" and "image_url" in str(caught.value)
