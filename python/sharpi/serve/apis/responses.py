"""OpenAI's responses: what Codex speaks. Nothing is stored: each request brings its whole conversation."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sharpi.serve.answering.conversations import Message, call, conversation
from sharpi.serve.apis import fields
from sharpi.serve.apis.responses_events import ResponseWording, unsealed
from sharpi.serve.document import ApiRoute
from sharpi.serve.errors import ApiError
from sharpi.serve.server import Server
from sharpi.serve.sse import EVENT_STREAM, answered
from sharpi.serve.turns import NamedTool, OutputFormat, Tool, ToolChoice, Turn

__all__ = ["ResponsesRequest", "routes", "turn_of"]

_LOGPROBS, _SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"  # in `include`


def _as_parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


def _as_items(value: Any) -> Any:
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


class TextPart(fields.NullableBody):
    type: str
    text: str = ""
    refusal: str = ""


Parts = Annotated[list[TextPart], BeforeValidator(_as_parts, json_schema_input_type=list[TextPart] | str)]


class Item(fields.NullableBody):
    """An item of a conversation; which fields it has depends on the type."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: Parts = []
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    input: str = ""
    output: Parts = []
    encrypted_content: str = ""


class ResponsesTool(fields.NullableBody):
    type: str
    name: str = ""
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class Allowed(fields.NullableBody):
    """A choice among the tools. name: for a function. mode, tools: for allowed_tools."""

    type: str
    name: str = ""
    mode: Literal["auto", "required"] = "auto"
    tools: list[ResponsesTool] = []


class Reasoning(fields.NullableBody):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class Format(fields.NullableBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | bool | None = Field(default=None, alias="schema")


class Text(fields.NullableBody):
    format: Format | None = None


class ResponsesRequest(fields.NullableBody):
    model: str | None = None
    input: Annotated[list[Item], BeforeValidator(_as_items, json_schema_input_type=list[Item] | str)] = []
    instructions: str | None = None
    tools: list[ResponsesTool] = []
    tool_choice: Literal["none", "auto", "required"] | Allowed = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Reasoning()
    text: Text = Text()
    max_output_tokens: fields.TokenLimit | None = None
    temperature: fields.Temperature | None = None
    top_p: fields.TopP | None = None
    top_logprobs: int = Field(default=0, ge=0, le=fields.MOST_TOP_LOGPROBS)
    include: list[str] = []
    stream: bool = False
    metadata: dict[str, Any] = {}
    user: str = ""
    prompt_cache_key: str = ""
    safety_identifier: str = ""
    # What needs a store, or is done elsewhere.
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool = False


# --- a request's turn -------------------------------------------------------------------------------------------------


def turn_of(ask: ResponsesRequest) -> Turn:
    """The turn that a request asks for. Raises `ApiError` that names what cannot be done."""
    for field in ("previous_response_id", "conversation", "prompt", "background"):
        if getattr(ask, field):
            raise ApiError(400, "invalid_request_error",
                           f"{field} is not supported: this server stores nothing, so that each request must bring its "
                           "whole conversation in input", param=field, code="unsupported_parameter")
    choice, tools = _choice(ask)
    effort = ask.reasoning.effort
    messages = conversation(_messages(ask))
    if not messages:
        raise ApiError(400, "invalid_request_error", "input is empty", param="input")
    return Turn(
        messages=messages,
        tools=tools,
        tool_choice=fields.possible_choice(choice, tools),
        parallel_calls=ask.parallel_tool_calls,
        options=fields.options_of(fields.SamplingFields(temperature=ask.temperature, top_p=ask.top_p),
                                  ask.max_output_tokens),
        scores=ask.top_logprobs if ask.top_logprobs or _LOGPROBS in ask.include else None,
        format=_format(ask.text.format),
        thinking=None if effort is None else effort != "none",
        template=fields.effort_variables(effort),
        key=ask.safety_identifier or ask.user)


def _format(format: Format | None) -> OutputFormat | None:
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return OutputFormat("json_object")
    return fields.schema_format("text.format.schema", format.json_schema)


def _choice(ask: ResponsesRequest) -> tuple[ToolChoice, list[Tool]]:
    """The choice, and the tools that it leaves. Codex also sends types of tools that only OpenAI runs: they are no
    part of the prompt, so that the model cannot call them."""
    tools = [fields.named_tool(f"tools[{index}]", tool.name, tool.description, tool.parameters)
             for index, tool in enumerate(ask.tools) if tool.type == "function"]
    choice = ask.tool_choice
    if isinstance(choice, str):
        return choice, tools
    if choice.type == "function" and choice.name:
        return NamedTool(choice.name), tools
    if choice.type == "allowed_tools":
        names = {tool.name for tool in choice.tools if tool.type == "function"}
        return choice.mode, [tool for tool in tools if tool.name in names]
    raise ApiError(400, "invalid_request_error", f"a choice of type {choice.type!r} is not supported",
                   param="tool_choice.type")


def _messages(ask: ResponsesRequest) -> Iterator[Message]:
    if ask.instructions:
        yield {"role": "system", "content": ask.instructions}
    for index, item in enumerate(ask.input):
        where = f"input[{index}]"
        if item.type == "message":
            role = "system" if item.role == "developer" else item.role
            yield {"role": role, "content": _text(item.content, f"{where}.content")}
        elif item.type in ("function_call", "custom_tool_call"):
            arguments = item.arguments if item.type == "function_call" else {"input": item.input}
            yield {"role": "assistant", "content": "", "tool_calls": [call(item.call_id, item.name, arguments)]}
        elif item.type in ("function_call_output", "custom_tool_call_output"):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output, f"{where}.output")}
        elif item.type == "reasoning":
            reasoning = _reasoning(item, where)
            if reasoning:
                yield {"role": "assistant", "content": "", "reasoning_content": reasoning}
        else:
            raise _refused(f"an item of type {item.type!r}", where)


def _text(parts: list[TextPart], where: str) -> str:
    for index, part in enumerate(parts):
        if part.type not in ("input_text", "output_text", "text", "refusal", "reasoning_text"):
            raise _refused(f"a part of type {part.type!r}", f"{where}[{index}]")
    return "\n\n".join(text for part in parts if (text := part.text or part.refusal))


def _refused(what: str, where: str) -> ApiError:
    return ApiError(400, "invalid_request_error", f"{where}: no model here takes {what}; text is what they read",
                    param=where)


def _reasoning(item: Item, where: str) -> str:
    """The reasoning of an earlier answer: its text, or what was sealed here."""
    return _text(item.content, f"{where}.content") or unsealed(item.encrypted_content)


# --- the endpoints ----------------------------------------------------------------------------------------------------


def routes(server: Server) -> list[BaseRoute]:
    """POST /v1/responses, and what a server with a store would answer, each refused."""
    none = "Refuses: nothing is stored"
    return [ApiRoute("/v1/responses", functools.partial(_answer, server), "POST", about="Answers a conversation",
                     body=ResponsesRequest, streams=EVENT_STREAM),
            ApiRoute("/v1/responses/{id}", _no_store, "GET", "DELETE", about=none),
            ApiRoute("/v1/responses/{id}/cancel", _no_store, "POST", about=none),
            ApiRoute("/v1/responses/{id}/input_items", _no_store, "GET", about=none)]


async def _answer(server: Server, request: Request) -> Response:
    ask = await fields.read_body(request, ResponsesRequest)
    repeated, seals = _repeated(ask), _SEALED in ask.include
    return await answered(request, server, ask.model, turn_of(ask),
                          lambda lease, turn: ResponseWording(turn, lease.name, repeated, seals), stream=ask.stream)


async def _no_store(request: Request) -> Response:
    raise ApiError(404, "invalid_request_error", f"there is no response {request.path_params['id']!r}: this server "
                   "stores none", param="response_id", code="not_found")


def _repeated(ask: ResponsesRequest) -> dict[str, Any]:
    """What a response says of its request."""
    choice = ask.tool_choice if isinstance(ask.tool_choice, str) else ask.tool_choice.model_dump(exclude_unset=True)
    tools = [tool.model_dump() for tool in ask.tools if tool.type == "function"]
    form = ask.text.format or Format.model_validate({"type": "text"})
    return {"instructions": ask.instructions, "tools": tools, "tool_choice": choice,
            "parallel_tool_calls": ask.parallel_tool_calls, "max_output_tokens": ask.max_output_tokens,
            "temperature": ask.temperature, "top_p": ask.top_p, "top_logprobs": ask.top_logprobs,
            "reasoning": {"effort": ask.reasoning.effort, "summary": None},
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True)}, "metadata": ask.metadata,
            "previous_response_id": None, "background": False, "store": False, "truncation": "disabled"}
