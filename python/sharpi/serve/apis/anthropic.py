"""Anthropic's messages: what Claude Code and the `anthropic` package speak."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sharpi.serve.answering.conversations import Message, call, conversation, is_begun
from sharpi.serve.apis import fields
from sharpi.serve.apis.anthropic_events import MessageWording
from sharpi.serve.document import ApiRoute
from sharpi.serve.errors import ApiError
from sharpi.serve.http.wording import anthropic_error
from sharpi.serve.server import Server
from sharpi.serve.sse import EVENT_STREAM, answered, json_response
from sharpi.serve.turns import NamedTool, OutputFormat, ToolChoice, Turn
from sharpi.settings.generation_options import GenerationOptions

__all__ = ["CountRequest", "MessagesRequest", "routes", "turn_of"]

_BILLING = "x-anthropic-billing-header:"


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Block(fields.NullableBody):
    """A content block of any type; which fields it has depends on the type."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: Annotated[list[Block], BeforeValidator(_as_blocks, json_schema_input_type=list[Block] | str)] = []
    is_error: bool = False


Blocks = Annotated[list[Block], BeforeValidator(_as_blocks, json_schema_input_type=list[Block] | str)]


class InputMessage(fields.NullableBody):
    role: Literal["user", "assistant", "system"]
    content: Blocks


class AnthropicTool(fields.NullableBody):
    """A tool of the client's own has no type, or the type "custom"."""

    type: str | None = None
    name: str = ""
    description: str = ""
    input_schema: dict[str, Any] = {}


class Choice(fields.NullableBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(fields.NullableBody):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: fields.Amount | None = None


class Format(fields.NullableBody):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] | bool = Field(alias="schema")


class OutputConfig(fields.NullableBody):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Format | None = None


class Metadata(fields.NullableBody):
    user_id: str | None = None


class CountRequest(fields.NullableBody):
    """What decides a prompt."""

    model: str
    messages: list[InputMessage] = Field(min_length=1)
    system: Blocks | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest):
    max_tokens: fields.TokenLimit
    stream: bool = False
    stop_sequences: fields.Stop | None = None
    temperature: fields.Temperature | None = None
    top_p: fields.TopP | None = None
    top_k: fields.TopK | None = None
    metadata: Metadata | None = None


# --- a request's turn -------------------------------------------------------------------------------------------------


def turn_of(ask: CountRequest) -> Turn:
    """The turn that a request asks for. Raises `ApiError` that names a block which no model here takes."""
    tools = [fields.named_tool(f"tools[{index}]", tool.name, tool.description, tool.input_schema)
             for index, tool in enumerate(ask.tools or ()) if tool.type in (None, "custom")]
    choice, parallel = _choice(ask.tool_choice)
    messages = conversation(_messages(ask))
    thinking = ask.thinking
    config = ask.output_config or OutputConfig()
    return Turn(
        messages=messages,
        tools=tools,
        tool_choice=fields.possible_choice(choice, tools),
        parallel_calls=parallel,
        options=_options(ask) if isinstance(ask, MessagesRequest) else {},
        format=_format(config.format),
        continues=is_begun(messages),
        thinking=thinking is not None and thinking.type != "disabled",
        thinking_budget=thinking.budget_tokens if thinking else None,
        template=fields.effort_variables(config.effort),
        key=(ask.metadata.user_id or "") if isinstance(ask, MessagesRequest) and ask.metadata else "")


def _format(format: Format | None) -> OutputFormat | None:
    return None if format is None else fields.schema_format("output_config.format.schema", format.json_schema)


def _options(ask: MessagesRequest) -> GenerationOptions:
    sampling = fields.SamplingFields(temperature=ask.temperature, top_p=ask.top_p, top_k=ask.top_k,
                                     stop=ask.stop_sequences)
    return fields.options_of(sampling, ask.max_tokens)


def _choice(choice: Choice | None) -> tuple[ToolChoice, bool]:
    """The choice of tools, and whether several may be called."""
    if choice is None:
        return "auto", True
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        if choice.name is None:
            raise ApiError(400, "invalid_request_error", 'the choice of type "tool" names no tool',
                           param="tool_choice.name")
        return NamedTool(choice.name), parallel
    kinds: Mapping[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}
    return kinds[choice.type], parallel


def _messages(ask: CountRequest) -> Iterator[Message]:
    system = _system(ask.system) if ask.system else ""
    if system:
        yield {"role": "system", "content": system}
    for index, message in enumerate(ask.messages):
        where = f"messages[{index}].content"
        if message.role == "assistant":
            yield _assistant(message.content, where)
        elif message.role == "system":
            yield {"role": "system", "content": _text(message.content, where)}
        else:
            yield from _user(message.content, where)


def _system(blocks: list[Block]) -> str:
    """The system's text without Claude Code's header, which differs from request to request, so that no two prompts
    would begin alike."""
    first = blocks[0]
    if first.type == "text" and first.text.startswith(_BILLING):
        blocks = [Block(type="text", text=first.text.partition("\n")[2]), *blocks[1:]]
    return _text(blocks, "system")


def _text(blocks: list[Block], where: str) -> str:
    for index, block in enumerate(blocks):
        if block.type != "text":
            raise _refused(block, f"{where}[{index}]")
    return "\n\n".join(block.text for block in blocks if block.text)


def _user(blocks: list[Block], where: str) -> Iterator[Message]:
    """Tools' results, which have messages of their own, and the text between them."""
    if not blocks:
        yield {"role": "user", "content": ""}
    for index, block in enumerate(blocks):
        if block.type == "tool_result":
            text = _text(block.content, f"{where}[{index}].content")
            yield {"role": "tool", "tool_call_id": block.tool_use_id,
                   "content": f"Error: {text}" if block.is_error else text}
        elif block.type == "text":
            yield {"role": "user", "content": block.text}
        else:
            raise _refused(block, f"{where}[{index}]")


def _assistant(blocks: list[Block], where: str) -> Message:
    text, thinking, calls = [], [], []
    for index, block in enumerate(blocks):
        if block.type == "text":
            text.append(block.text)
        elif block.type == "thinking":
            thinking.append(block.thinking)
        elif block.type == "tool_use":
            calls.append(call(block.id, block.name, block.input))
        elif block.type != "redacted_thinking":
            raise _refused(block, f"{where}[{index}]")
    message: Message = {"role": "assistant", "content": "".join(text)}
    if thinking:
        message["reasoning_content"] = "\n\n".join(thinking)
    if calls:
        message["tool_calls"] = calls
    return message


def _refused(block: Block, where: str) -> ApiError:
    return ApiError(400, "invalid_request_error",
                    f"{where}: no model here takes a block of type {block.type!r}; text is what they read",
                    param=where)


# --- the endpoints ----------------------------------------------------------------------------------------------------


def routes(server: Server) -> list[BaseRoute]:
    """POST /v1/messages and /v1/messages/count_tokens."""
    return [ApiRoute("/v1/messages", _identified(functools.partial(_answer, server)), "POST",
                     about="Answers a conversation", body=MessagesRequest, streams=EVENT_STREAM),
            ApiRoute("/v1/messages/count_tokens", _identified(functools.partial(_count, server)), "POST",
                     about="Counts a prompt's tokens", body=CountRequest)]


async def _answer(server: Server, request: Request, id: str) -> Response:
    ask = await fields.read_body(request, MessagesRequest)
    return await answered(request, server, ask.model, turn_of(ask),
                          lambda lease, turn: MessageWording(turn, lease.name, id), stream=ask.stream)


async def _count(server: Server, request: Request, id: str) -> Response:
    ask = await fields.read_body(request, CountRequest)
    async with server.store.lease(ask.model) as lease:
        return json_response({"input_tokens": await lease.runner.count(turn_of(ask))})


def _identified(handle: Callable[[Request, str], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint that gives each request an id, which Anthropic's clients show with errors."""

    async def endpoint(request: Request) -> Response:
        id = f"req_{secrets.token_hex(12)}"
        try:
            response = await handle(request, id)
        except ApiError as error:
            response = json_response(anthropic_error(error, id), error.status)
            response.headers.update(error.headers)
        response.headers["request-id"] = id
        return response

    return endpoint
