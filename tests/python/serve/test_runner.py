"""The runner with the bundled model and a real scheduler: what turns are answered, counted and refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from serving import OneModelServer, story_server, with_template

from sharpi.errors import DeviceLostError
from sharpi.serve.answering.channels import reader_of
from sharpi.serve.answering.messages import normalized
from sharpi.serve.answering.open_turn import Choice, ModelTurn
from sharpi.serve.answering.prompts import PromptMaker
from sharpi.serve.answering.runner import ModelRunner, RunnerLimits
from sharpi.serve.errors import ApiError
from sharpi.serve.turns import (
    CallArguments,
    CallBegun,
    Ended,
    Event,
    NamedTool,
    OutputFormat,
    Said,
    Thought,
    Tool,
    Turn,
    Usage,
)
from sharpi.text.answers.pieces import CallBegins, CallContinues, Piece, Saying, Thinking

USER = ({"role": "user", "content": "Hello"},)
PROMPT = "<user>Hello\n<assistant>"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}


@pytest.fixture(scope="module")
def story() -> Iterator[OneModelServer]:
    with story_server() as server:
        yield server


async def events_of(runner: ModelRunner, turn: Turn) -> list[Event]:
    return [event async for event in await runner.open(turn)]


def ask(server: OneModelServer, turn: Turn) -> list[Event]:
    return asyncio.run(events_of(server.runner, turn))


def refusal(server: OneModelServer, turn: Turn) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ask(server, turn)
    return caught.value


def said(events: Sequence[Event], choice: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, Said) and event.choice == choice)


def usage_of(events: Sequence[Event]) -> Usage:
    assert isinstance(events[-1], Usage)
    return events[-1]


def generated(server: OneModelServer, prompt: str, **options: Any) -> str:
    ids = server.model.tokenize(prompt, add_special=False, parse_special=True)
    return "".join(token.text for token in server.model.generate(ids, **options))


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_chat_is_answered_as_the_model_answers(story: OneModelServer) -> None:
    events = ask(story, Turn(messages=USER, options=GREEDY))
    assert said(events) == generated(story, PROMPT, **GREEDY) != ""
    assert events[-2] == Ended(0, "length")
    usage = usage_of(events)
    prompt = len(story.model.tokenize(PROMPT, add_special=False))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.thinking_tokens) == (prompt, 12, 0)
    assert usage.figures[0]["tokens"] == 12 and usage.figures[0]["seconds"] >= usage.figures[0]["first_token_seconds"]


def test_a_prompt_is_text_or_tokens(story: OneModelServer) -> None:
    text = "Once upon a time"
    expected = "".join(token.text for token in story.model.generate(text, **GREEDY))
    assert said(ask(story, Turn(prompt=text, options=GREEDY))) == expected
    assert said(ask(story, Turn(prompt=story.model.tokenize(text), options=GREEDY))) == expected


def test_choices_have_consecutive_seeds(story: OneModelServer) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "max_tokens": 20}
    last = (1 << 64) - 1
    events = ask(story, Turn(messages=USER, options={**options, "seed": last}, choices=3))
    assert [said(events, choice) for choice in range(3)] == [
        generated(story, PROMPT, seed=seed, **options) for seed in (last, 0, 1)]
    assert {event for event in events if isinstance(event, Ended)} == {Ended(choice, "length") for choice in range(3)}
    assert usage_of(events).completion_tokens == 60 and len(usage_of(events).figures) == 3


def test_choices_come_side_by_side(story: OneModelServer) -> None:
    events = ask(story, Turn(messages=USER, options={"temperature": 0.9, "max_tokens": 40, "seed": 1}, choices=2))
    order = [event.choice for event in events if isinstance(event, Said)]
    assert order.index(1) < len(order) / 2, "the second does not wait for the first"


def test_a_missing_seed_is_drawn_for_each_request(story: OneModelServer) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "max_tokens": 30}
    assert len({said(ask(story, Turn(messages=USER, options=options))) for _ in range(4)}) > 1


def test_a_stop_text_ends_an_answer_and_is_named(story: OneModelServer) -> None:
    whole = generated(story, PROMPT, temperature=0.0, max_tokens=30)
    stop = whole[20:24]
    events = ask(story, Turn(messages=USER, options={"temperature": 0.0, "max_tokens": 30, "stop": ["\x00", stop]}))
    assert said(events) == whole[:whole.index(stop)]
    assert events[-2] == Ended(0, "stop", stop)
    ids = story.model.tokenize(PROMPT, add_special=False)
    tokens = [token.id for token in story.model.generate(ids, temperature=0.0, max_tokens=30)]
    needed = next(count for count in range(1, 31) if stop in story.model.detokenize(tokens[:count]))
    assert usage_of(events).completion_tokens == needed, "those of the stop text were computed too"


def biased_to_end(server: OneModelServer, **more: Any) -> Turn:
    [end] = server.model.tokenizer.stop_ids
    return Turn(messages=USER, options={"temperature": 0.0, "max_tokens": 5, "logit_bias": {end: 1000.0}}, **more)


def test_an_end_token_is_counted(story: OneModelServer) -> None:
    events = ask(story, biased_to_end(story))
    assert [*events[:-1]] == [Ended(0, "stop")]
    assert usage_of(events).completion_tokens == 1


def test_end_tokens_can_be_ignored(story: OneModelServer) -> None:
    events = ask(story, biased_to_end(story, ignore_end=True))
    assert events[-2] == Ended(0, "length") and usage_of(events).completion_tokens == 5


def test_the_next_turn_finds_the_prompt_in_the_cache(story: OneModelServer) -> None:
    story_text = "Once there were seven brave ships that sailed to the north. " * 8
    first = usage_of(ask(story, Turn(prompt=story_text, options=GREEDY)))
    again = usage_of(ask(story, Turn(prompt=story_text, options=GREEDY)))
    assert first.prompt_tokens == again.prompt_tokens > again.cached_tokens > first.cached_tokens


def test_many_turns_at_once_are_answered_as_alone(story: OneModelServer) -> None:
    turns = [Turn(prompt=f"There were {count} ships", options={"temperature": 0.8, "seed": count, "max_tokens": 20})
             for count in range(12)]

    async def together() -> list[str]:
        return [said(events) for events in await asyncio.gather(*(events_of(story.runner, one) for one in turns))]

    assert asyncio.run(together()) == [said(ask(story, turn)) for turn in turns]


ENDLESS = Turn(messages=USER, options={"temperature": 0.8, "seed": 1}, choices=3, ignore_end=True)


async def idle(server: OneModelServer) -> None:
    for _ in range(1000):
        if not any(server.scheduler.counts()[state] for state in ("waiting", "preparing", "writing")):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("answers that nobody wants go on")


def test_a_closed_turn_is_cancelled(story: OneModelServer) -> None:
    async def leave() -> int:
        before = story.scheduler.counts()["step_tokens"]
        opened = await story.runner.open(ENDLESS)
        await anext(opened)
        await opened.aclose()
        assert [event async for event in opened] == []
        await idle(story)
        return int(story.scheduler.counts()["step_tokens"] - before)

    assert asyncio.run(leave()) < 900, "each of the three could have had nearly 500"


def test_a_turn_that_is_cancelled_ends_its_answers(story: OneModelServer) -> None:
    async def leave() -> int:
        before = story.scheduler.counts()["step_tokens"]
        task = asyncio.ensure_future(events_of(story.runner, ENDLESS))
        while story.scheduler.counts()["step_tokens"] == before:
            await asyncio.sleep(0.001)
        task.cancel()
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
        await idle(story)
        return int(story.scheduler.counts()["step_tokens"] - before)

    assert asyncio.run(leave()) < 900


def test_a_wall_clock_ends_an_answer(story: OneModelServer) -> None:
    runner = ModelRunner(story.model, story.scheduler, RunnerLimits(request_seconds=0.05))
    events = asyncio.run(events_of(runner, Turn(messages=USER, options={"temperature": 0.0}, ignore_end=True)))
    assert isinstance(events[-2], Ended) and events[-2].reason in ("timeout", "length")


def test_a_scheduler_that_ends_is_an_error_in_mid_answer() -> None:
    async def end(server: OneModelServer) -> None:
        opened = await server.runner.open(Turn(messages=USER, options={"temperature": 0.0}, ignore_end=True))
        await anext(opened)
        server.scheduler.close()
        async for _ in opened:
            pass

    with story_server() as server, pytest.raises(ApiError) as caught:
        asyncio.run(end(server))
    assert caught.value.status == 503


# --- prompts ----------------------------------------------------------------------------------------------------------


def rendered(server: OneModelServer, **turn: Any) -> str:
    return PromptMaker(server.model).make(Turn(**{"messages": USER, **turn})).text


def test_what_is_asked_reaches_the_template(story: OneModelServer) -> None:
    assert rendered(story) == PROMPT
    assert rendered(story, thinking=True) == PROMPT + "<think>"
    assert rendered(story, template={"add_generation_prompt": False}) == "<user>Hello\n"
    tool = Tool("add", "two numbers", {"type": "object"})
    assert rendered(story, tools=[tool]) == (
        '<tools>[{"type": "function", "function": {"name": "add", "description": "two numbers", "parameters":'
        ' {"type": "object"}}}]\n' + PROMPT)
    assert rendered(story, tools=[tool], tool_choice="none") == PROMPT


def test_reasoning_that_the_prompt_opens_is_a_thought(story: OneModelServer) -> None:
    events = ask(story, Turn(messages=USER, thinking=True, options=GREEDY))
    assert said(events) == ""
    thought = "".join(event.text for event in events if isinstance(event, Thought))
    assert thought == generated(story, PROMPT + "<think>", **GREEDY)
    assert usage_of(events).thinking_tokens == 12


@pytest.mark.parametrize(("content", "kept"), [("Once upon", "Once upon"), (" Once upon ", " Once upon ")])
def test_the_last_message_is_continued(story: OneModelServer, content: str, kept: str) -> None:
    messages = [*USER, {"role": "assistant", "content": content}]
    assert rendered(story, messages=messages, continues=True) == f"<user>Hello\n<assistant>{kept}"


def test_a_template_that_strips_is_continued_where_the_text_ends() -> None:
    with story_server() as server:
        with_template(server.model, "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}")
        messages = [*USER, {"role": "assistant", "content": " Once upon "}]
        assert rendered(server, messages=messages, continues=True) == "[user]Hello[end][assistant]Once upon"


@pytest.mark.parametrize(("messages", "param"), [
    ([], "messages"),
    ([{"content": "Hello"}], "messages[0].role"),
    ([{"role": "user<assistant>", "content": "Hello"}], "messages[0].role"),
    ([*USER, {"role": "user", "content": 5}], "messages[1].content"),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}],
     "messages[0].content[1]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": "a<|endoftext|>b"}], "messages[0].content"),
    ([{"role": "tool", "content": "a", "tool_call_id": "<|endoftext|>"}], "messages[0].tool_call_id"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}],
     "messages[0].tool_calls[0].function.arguments"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[]"}}]}],
     "messages[0].tool_calls[0].function.arguments"),
    ([{"role": "assistant", "tool_calls": [5]}], "messages[0].tool_calls[0].function"),
])
def test_messages_that_are_wrong_are_named(story: OneModelServer, messages: Any, param: str) -> None:
    error = refusal(story, Turn(messages=messages))
    assert (error.status, error.kind, error.param) == (400, "invalid_request_error", param)


def test_messages_become_what_templates_know() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert normalized([
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call], "audio": None},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("turn", "param"), [
    (Turn(messages=USER, options={"temperature": -1.0}), "temperature"),
    (Turn(messages=USER, options={"top_p": 7.0}), "top_p"),
    (Turn(messages=USER, options={"stop": ["a", ""]}), None),
    (Turn(messages=USER, options={"logit_bias": {1 << 30: 1.0}}), "logit_bias"),
    (Turn(messages=USER, options={"max_tokens": 0}), "max_tokens"),
    (Turn(messages=USER, choices=9), "n"),
    (Turn(messages=USER, choices=-1), "n"),
    (Turn(prompt=""), "prompt"),
    (Turn(prompt=[1 << 20]), "prompt"),
    (Turn(messages=USER, template={"messages": []}), "chat_template_kwargs.messages"),
    (Turn(messages=USER, template={"x": "<|endoftext|>"}), "chat_template_kwargs"),
    (Turn(messages=USER, tools=[Tool("a<|endoftext|>")]), "tools"),
    (Turn(messages=USER, continues=True), "messages"),
    (Turn(messages=[*USER, {"role": "assistant", "content": " "}], continues=True), "messages"),
])
def test_what_cannot_be_answered_is_refused(story: OneModelServer, turn: Turn, param: str | None) -> None:
    error = refusal(story, turn)
    assert (error.status, error.kind, error.param) == (400, "invalid_request_error", param)


def test_a_prompt_beyond_the_context_is_counted(story: OneModelServer) -> None:
    tokens = len(story.model.tokenize("word " * 600))
    turn = Turn(prompt="word " * 600)
    error = refusal(story, turn)
    assert (error.status, error.code) == (400, "exceed_context_size_error")
    assert error.details == {"n_prompt_tokens": tokens, "n_ctx": 512}
    assert asyncio.run(story.runner.count(turn)) == tokens, "it can be counted all the same"


def test_a_model_without_a_template_cannot_chat(story: OneModelServer) -> None:
    with story_server() as server:
        file = server.model.file
        plain = {key: value for key, value in file.metadata.items() if key != "tokenizer.chat_template"}
        server.model.file = dataclasses.replace(file, metadata=type(file.metadata)(file.paths[0], plain))
        assert "chat template" in refusal(server, Turn(messages=USER)).message


def test_a_lost_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise DeviceLostError("the GPU has failed")

    with story_server() as server:
        monkeypatch.setattr(server.scheduler, "submit", lost)
        error = refusal(server, Turn(messages=USER))
    assert (error.status, error.kind, error.code) == (503, "server_error", "device_lost")
    assert error.message == "the GPU has failed"


def test_a_full_queue_is_refused_before_the_prompt_is_made() -> None:
    limits = RunnerLimits(max_queue=2)

    async def crowd(server: OneModelServer) -> ApiError:
        long = Turn(messages=USER, options={"temperature": 0.0}, ignore_end=True)
        opened = [await server.runner.open(long)]
        try:
            await anext(opened[0])  # it is being written, the next ones wait
            opened += [await server.runner.open(long) for _ in range(2)]
            with pytest.raises(ApiError) as refused:
                await server.runner.open(Turn(prompt="word " * 10_000_000))
            return refused.value
        finally:
            for one in opened:
                await one.aclose()

    with story_server(limits, queue=2, running=1) as server:
        error = asyncio.run(crowd(server))
    assert (error.status, error.kind, error.code) == (429, "rate_limit_error", "queue_full")
    assert 1 <= int(error.headers["Retry-After"]) <= 60


# --- channels ---------------------------------------------------------------------------------------------------------


class Scripted:
    """A reader that gives one list of pieces for each token."""

    def __init__(self, *pieces: list[Piece]) -> None:
        self._pieces = [*pieces]

    def push(self, text: str) -> list[Piece]:
        return self._pieces.pop(0) if self._pieces else []

    def flush(self) -> list[Piece]:
        return []


def test_pieces_become_events(story: OneModelServer) -> None:
    async def read(make: Callable[[], Scripted]) -> list[Event]:
        answer = story.scheduler.submit("Once", temperature=0.0, max_tokens=4)
        return [event async for event in ModelTurn([Choice(0, answer, make())], 1)]

    events = asyncio.run(read(lambda: Scripted(
        [Thinking("Hm")], [Saying("So"), CallBegins(0, "add", "id7"), CallContinues(0, "{")], [CallContinues(0, "}")],
        [CallBegins(1, "sub")])))
    assert events[:5] == [Thought(0, "Hm"), Said(0, "So"), CallBegun(0, 0, "id7", "add"), CallArguments(0, 0, "{"),
                          CallArguments(0, 0, "}")]
    begun = events[5]
    assert isinstance(begun, CallBegun) and begun.id.startswith("call_") and len(begun.id) > 20
    assert events[6] == Ended(0, "length"), "a call that was cut off is no call"
    assert usage_of(events).thinking_tokens == 1


def test_calls_are_read_if_there_are_tools(story: OneModelServer) -> None:
    text = 'So:\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

    def pieces(**more: Any) -> list[Piece]:
        turn = Turn(messages=USER, **more)
        reader = reader_of(turn, PromptMaker(story.model).make(turn))
        return [*reader.push(text), *reader.flush()]

    assert pieces(tools=[Tool("add")]) == [Saying("So:"), CallBegins(0, "add"), CallContinues(0, '{"a": 1}')]
    assert pieces(tools=[Tool("add")], tool_choice="none") == pieces() == [Saying(text)]


def test_tools_are_described_where_the_template_knows_none() -> None:
    with story_server() as server:
        plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        with_template(server.model, plain)
        told = rendered(server, tools=[Tool("add", "two numbers")])
        assert told.startswith("<system># Tools") and '"two numbers"' in told and told.endswith("<user>Hello\n")
        refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        with_template(server.model, refusing + plain)
        told = rendered(server, tools=[Tool("add", "two numbers")])
        assert told.startswith("<user># Tools") and "<system>" not in told


ADD = Tool("add", "two numbers", {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
                                  "additionalProperties": False})


SUB = dataclasses.replace(ADD, name="sub")
# The bundled model knows no JSON: it would write white space as long as it may, and think without end.
QUICK: dict[str, Any] = {"temperature": 0.0, "max_tokens": 450, "frequency_penalty": 2.0}


@pytest.mark.parametrize("choice", ["required", NamedTool("add")])
def test_a_call_can_be_forced(story: OneModelServer, choice: Any) -> None:
    turn = Turn(messages=USER, tools=[ADD, SUB], tool_choice=choice, parallel_calls=False,
                thinking_budget=3, options=QUICK)
    events = ask(story, turn)
    [call] = [event for event in events if isinstance(event, CallBegun)]
    arguments = json.loads("".join(event.json for event in events if isinstance(event, CallArguments)))
    assert isinstance(arguments, dict) and said(events) == ""
    if choice != "required":
        assert call.name == "add" and isinstance(arguments["a"], int)
    assert events[-2] == Ended(0, "tool_calls")


def test_a_format_is_kept(story: OneModelServer) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}, "ok": {"type": "boolean"}},
              "required": ["n", "ok"], "additionalProperties": False}
    wanted = OutputFormat("json_schema", schema)
    for turn in (Turn(messages=USER, format=wanted, thinking_budget=3, options=QUICK),
                 Turn(prompt="Once", format=wanted, options=QUICK)):
        found = json.loads(said(ask(story, turn)))
        assert isinstance(found["n"], int) and isinstance(found["ok"], bool)


@pytest.mark.parametrize(("marks", "thinks"), [("", False), ("{# <think> #}", True), ("<think>\n</think>\n", False)])
def test_a_model_that_does_not_reason_cannot_flee_into_reasoning(marks: str, thinks: bool) -> None:
    """Where the template knows no marks of reasoning, or has closed it, none may come before a format's first
    character."""
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    with story_server(template=template + marks) as server:
        mark = {server.model.tokenize("<think>", add_special=False)[0]: 100.0}
        turn = Turn(messages=USER, format=OutputFormat("regex", "[a-z]{3}"), options={**GREEDY, "logit_bias": mark})
        events = ask(server, turn)
    assert bool([event for event in events if isinstance(event, Thought)]) == thinks
    assert (len(said(events)) == 3) != thinks


def test_a_format_that_cannot_be_kept_is_named(story: OneModelServer) -> None:
    error = refusal(story, Turn(messages=USER, format=OutputFormat("json_schema", {"type": "nonsense"})))
    assert (error.status, error.param) == (400, "response_format")


def test_end_tokens_wait_for_the_least(story: OneModelServer) -> None:
    turn = dataclasses.replace(biased_to_end(story), least_tokens=3)
    assert usage_of(ask(story, turn)).completion_tokens == 4, "three and the end token"


def test_reasoning_has_a_budget(story: OneModelServer) -> None:
    events = ask(story, Turn(messages=USER, thinking=True, thinking_budget=4, options={"temperature": 0.0,
                                                                                     "max_tokens": 30}))
    assert any(isinstance(event, Thought) for event in events) and said(events) != ""
    assert 4 <= usage_of(events).thinking_tokens < 20
