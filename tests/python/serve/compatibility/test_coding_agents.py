"""Sessions of Claude Code and of Codex, as they send them: each turn brings back what the last one was answered,
through the clients that they are built on. The template is that of Qwen3.5, the model the bundled one, which is made to
call a tool."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from serving import NAME, OneModelServer, app_of, running, with_template

from sharpi import Model
from sharpi.serve.apis import anthropic as messages_api
from sharpi.serve.apis import responses as responses_api

TEMPLATES = Path(__file__).parents[3] / "data" / "templates"
COMMAND = {"type": "object", "properties": {"command": {"type": "string", "maxLength": 8}}, "required": ["command"],
           "additionalProperties": False}
TELLS = {"type": "ephemeral"}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    template = (TEMPLATES / "Qwen3.5-4B.jinja").read_text(encoding="utf-8")
    loaded = Model.load(device="cpu", context=1024, cache_tokens=8192, sequences=4, threads=1)
    with with_template(loaded, template) as model, model.scheduler() as scheduler:
        story = OneModelServer(model, scheduler)
        with running(app_of(story, messages_api.routes, responses_api.routes)) as url:
            yield url
        story.runner.close()


# --- Claude Code ------------------------------------------------------------------------------------------------------

READ: Any = {"name": "Read", "description": "Reads a file", "input_schema": COMMAND, "cache_control": TELLS}
SEARCH: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
ASKED: Any = {"role": "user", "content": [
    {"type": "text", "text": "<system-reminder>\nThe date is in the environment.\n</system-reminder>"},
    {"type": "text", "text": "What does the program print?", "cache_control": TELLS}]}


def claude(number: int, messages: list[Any], **fields: Any) -> dict[str, Any]:
    """A request. The first block of the system differs each time."""
    return {"model": NAME, "max_tokens": 200, "temperature": 0.0, "messages": messages, "tools": [READ, SEARCH],
            "metadata": {"user_id": "user_1_account__session_2"},
            "thinking": {"type": "enabled", "budget_tokens": 8},
            "system": [{"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={number};"},
                       {"type": "text", "text": "You are Claude Code, a command line tool. " * 6,
                        "cache_control": TELLS}], **fields}


def ask_claude(address: str, number: int, messages: list[Any], **fields: Any) -> anthropic.types.Message:
    given = claude(number, messages, **fields)
    extra = {"temperature": given.pop("temperature")}
    client = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0, default_headers={
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14"})
    with client.messages.stream(**given, extra_body=extra) as stream:
        for _ in stream:
            pass
        return stream.get_final_message()


def test_a_session_of_claude_code(address: str) -> None:
    first = ask_claude(address, 1, [ASKED], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    *before, call = first.content
    assert first.stop_reason == "tool_use" and isinstance(call, anthropic.types.ToolUseBlock) and call.name == "Read"
    assert set(call.input) == {"command"}
    assert [block.type for block in before][:1] == ["thinking"] and first.usage.cache_read_input_tokens == 0

    answered = [block.model_dump(exclude_none=True) for block in first.content]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "print(5)"}],
              "cache_control": TELLS}
    later = [ASKED, {"role": "assistant", "content": answered}, {"role": "user", "content": [result]},
             {"role": "system", "content": "The plan mode is off."}]
    second = ask_claude(address, 2, later, max_tokens=24)
    assert second.content and second.stop_reason in ("end_turn", "max_tokens", "tool_use")
    cached = second.usage.cache_read_input_tokens or 0
    assert cached >= 64, "the system and the tools are not computed again"
    assert cached + second.usage.input_tokens == counted(address, 3, later) > first.usage.input_tokens


def counted(address: str, number: int, messages: list[Any], **fields: Any) -> int:
    given = {**claude(number, messages), **fields}
    wanted = {name: given[name] for name in ("model", "messages", "system", "tools", "thinking")}
    client = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
    return client.messages.count_tokens(**wanted).input_tokens


def test_what_claude_code_counts(address: str) -> None:
    count = functools.partial(counted, address)
    assert count(1, [ASKED]) == count(10**40, [ASKED]), "the changing header is no part of the prompt"
    assert count(1, [ASKED]) == count(1, [ASKED], tools=[READ]), "a tool that Anthropic runs is none here"
    plain = {name: part for name, part in READ.items() if name != "cache_control"}
    assert count(1, [ASKED]) == count(1, [ASKED], tools=[plain, SEARCH])
    assert count(1, [ASKED]) > count(1, [ASKED], tools=[])


# --- Codex ------------------------------------------------------------------------------------------------------------

TOOLS: Any = [
    {"type": "function", "name": "shell", "description": "Runs a command", "strict": False, "parameters": COMMAND},
    {"type": "custom", "name": "apply_patch", "description": "Edits files",
     "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
    {"type": "web_search", "external_web_access": False}, {"type": "local_shell"}]
PROMPT: Any = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "The sandbox is read-only."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>\n"
                                                     "  <cwd>/tmp</cwd>\n</environment_context>"}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]}]


def ask_codex(address: str, items: list[Any], effort: Any, **fields: Any) -> Any:
    """The response of a request, which is streamed. The items of the answer came one by one as well."""
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    done = []
    for event in client.responses.create(
            model=NAME, input=items, stream=True, store=False, instructions="You are Codex. " * 20,
            **{"tools": TOOLS, **fields}, parallel_tool_calls=False, include=["reasoning.encrypted_content"],
            prompt_cache_key="0199-a",
            reasoning={"effort": effort, "summary": "auto"}, temperature=0,
            extra_body={"text": {"verbosity": "low"}}):
        if event.type == "response.output_item.done":
            done.append(event.item)
    assert event.type in ("response.completed", "response.incomplete")
    assert [item.to_dict() for item in done] == [item.to_dict() for item in event.response.output]
    assert event.response.store is False and event.response.parallel_tool_calls is False
    return event.response


def replayed(item: Any) -> dict[str, Any]:
    """An item of an answer as Codex sends it back."""
    if item.type == "reasoning":
        return {"type": "reasoning", "summary": [], "content": None, "encrypted_content": item.encrypted_content}
    if item.type == "function_call":
        return {"type": "function_call", "name": item.name, "arguments": item.arguments, "call_id": item.call_id}
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": part.text}
                                                                for part in item.content]}


def test_a_session_of_codex(address: str) -> None:
    """The bundled model reasons without end, so that it reasons in one answer and calls in another."""
    thinking = ask_codex(address, PROMPT, effort="low", max_output_tokens=12)
    [reasoning] = thinking.output
    assert thinking.status == "incomplete" and reasoning.type == "reasoning" and reasoning.encrypted_content
    calling = ask_codex(address, PROMPT, effort="none", max_output_tokens=200,
                        tool_choice={"type": "function", "name": "shell"})
    [call] = calling.output
    assert calling.status == "completed" and call.type == "function_call" and call.name == "shell"
    assert set(json.loads(call.arguments)) == {"command"}

    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"output":"a.py","metadata":{}}'}
    last = ask_codex(address, [*PROMPT, replayed(reasoning), replayed(call), result], effort="low", max_output_tokens=8)
    without = ask_codex(address, [*PROMPT, replayed(call), result], effort="low", max_output_tokens=8)
    assert last.output and last.usage.input_tokens > without.usage.input_tokens > thinking.usage.input_tokens
    assert last.usage.input_tokens_details.cached_tokens >= 64, "the instructions and the tools are not computed again"


def test_what_codex_cannot_have_is_no_part_of_the_prompt(address: str) -> None:
    """Tools that only OpenAI runs, and the options of its store."""
    whole = ask_codex(address, PROMPT, effort="none", max_output_tokens=2)
    less = ask_codex(address, PROMPT, effort="none", max_output_tokens=2, tools=TOOLS[:1])
    assert [tool.name for tool in whole.tools] == [tool.name for tool in less.tools] == ["shell"]
    assert whole.usage.input_tokens == less.usage.input_tokens
