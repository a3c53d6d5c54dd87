"""Ollama's chats and completions, in lines of JSON. See `ollama_models` for what it says of the models."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Literal

from pydantic import Field
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from sharpi.serve.answering.conversations import Message, call, conversation, is_begun
from sharpi.serve.apis import fields
from sharpi.serve.apis.ollama_events import AnswerWording, Kind, empty_line
from sharpi.serve.apis.ollama_models import listed, running, shown
from sharpi.serve.document import ApiRoute
from sharpi.serve.errors import ApiError
from sharpi.serve.http.wording import ollama_error
from sharpi.serve.server import Server
from sharpi.serve.sse import NDJSON, answered, json_response
from sharpi.serve.turns import OutputFormat, Tool, Turn

__all__ = ["ChatRequest", "GenerateRequest", "chat_turn", "generate_turn", "routes"]


_Handle = Callable[[Server, Request], Awaitable[Response]]

_VERSION = "0.12.6"  # of the Ollama whose endpoints these are: clients ask it what they may use


class Options(fields.NullableBody, fields.SamplingFields):
    """What is set here and missing in another API is ignored: the server has one context for all requests, and refuses
    a prompt that is too long for it."""

    num_predict: int | None = Field(default=None, ge=-2, le=fields.MOST_INT)
    num_ctx: fields.Amount | None = None


class Asked(fields.NullableBody):
    """What chats and completions have in common. `keep_alive` is ignored: the server decides what stays loaded."""

    model: str
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] = ""
    options: Options = Options()
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=fields.MOST_TOP_LOGPROBS)


class Function(fields.NullableBody):
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    arguments: dict[str, Any] = {}


class Call(fields.NullableBody):
    id: str = ""
    function: Function


class OllamaTool(fields.NullableBody):
    type: str = "function"
    function: Function | None = None


class ChatMessage(fields.NullableBody):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str = ""
    images: list[Any] = []
    tool_calls: list[Call] = []
    tool_name: str = ""
    tool_call_id: str = ""


class ChatRequest(Asked):
    messages: list[ChatMessage] = []
    tools: list[OllamaTool] = []


class GenerateRequest(Asked):
    prompt: str = ""
    system: str = ""
    raw: bool = False
    # What no model here, or no server of this kind, can do.
    suffix: str = ""
    template: str = ""
    images: list[Any] = []
    context: list[fields.TokenLimit] = []


class ShowRequest(fields.NullableBody):
    model: str = ""
    name: str = ""  # what older clients call it


# --- a request's turn -------------------------------------------------------------------------------------------------


def chat_turn(ask: ChatRequest) -> Turn | None:
    """The turn that a chat asks for; nothing if it merely wants the model loaded."""
    if not ask.messages:
        return None
    messages = conversation(_messages(ask.messages))
    tools = [Tool(tool.function.name, tool.function.description, tool.function.parameters)
             for tool in ask.tools if tool.type == "function" and tool.function is not None]
    return _turn(ask, messages=messages, tools=tools, continues=is_begun(messages))


def generate_turn(ask: GenerateRequest) -> Turn | None:
    """The turn that a completion asks for; nothing if it merely wants the model loaded."""
    for field in ("suffix", "template", "images", "context"):
        if getattr(ask, field):
            raise ApiError(400, "invalid_request_error", f"{field} is not supported", param=field)
    if not ask.prompt:
        return None
    if ask.raw:
        return _turn(ask, prompt=ask.prompt)
    system = [{"role": "system", "content": ask.system}] if ask.system else []
    return _turn(ask, messages=[*system, {"role": "user", "content": ask.prompt}])


def _turn(ask: Asked, **what: Any) -> Turn:
    format = OutputFormat("json_object") if ask.format == "json" else None
    if isinstance(ask.format, dict):
        format = fields.schema_format("format", ask.format)
    limit = ask.options.num_predict
    options = fields.options_of(ask.options, None if limit is None or limit < 0 else limit)  # negative: no limit
    return Turn(options=options, format=format, scores=ask.top_logprobs if ask.logprobs else None,
                thinking=None if ask.think is None else bool(ask.think),
                template=fields.effort_variables(ask.think if isinstance(ask.think, str) else None), **what)


def _messages(messages: list[ChatMessage]) -> Iterator[Message]:
    """The messages in OpenAI's shape."""
    waiting = _Waiting()
    for index, message in enumerate(messages):
        if message.images:
            raise ApiError(400, "invalid_request_error", f"messages[{index}].images: no model here takes images",
                           param=f"messages[{index}].images")
        shaped: Message = {"role": message.role, "content": message.content}
        if message.role == "tool":
            shaped["tool_call_id"] = waiting.take(message)
        if message.role == "assistant" and message.thinking:
            shaped["reasoning_content"] = message.thinking
        if message.role == "assistant" and message.tool_calls:
            shaped["tool_calls"] = []
            for number, made in enumerate(message.tool_calls):
                id = made.id or f"call_{index}_{number}"
                shaped["tool_calls"].append(call(id, made.function.name, made.function.arguments))
                waiting.add(id, made.function.name)
        yield shaped


class _Waiting:
    """The calls that wait for a result. Ollama's clients name a result's tool, not the call, so ids are made up."""

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}  # in order
        self._by_tool: dict[str, deque[str]] = {}

    def add(self, id: str, tool: str) -> None:
        self._ids[id] = None
        self._by_tool.setdefault(tool, deque()).append(id)

    def take(self, message: ChatMessage) -> str:
        """The id of the call whose result a message brings: its own, that of the first call of its tool, or of the
        first."""
        id = message.tool_call_id or self._first_of(message.tool_name) or next(iter(self._ids), "")
        self._ids.pop(id, None)
        return id

    def _first_of(self, tool: str) -> str | None:
        ids = self._by_tool.get(tool, deque())
        while ids and ids[0] not in self._ids:
            ids.popleft()
        return ids[0] if ids else None


# --- the endpoints ----------------------------------------------------------------------------------------------------


def routes(server: Server) -> list[BaseRoute]:
    """Ollama's endpoints, without those that load, make or upload models."""
    def route(path: str, handle: _Handle, method: str, **described: Any) -> ApiRoute:
        return ApiRoute(f"/api/{path}", _worded(handle, server), method, **described)

    return [_Greeting("/", _greet, methods=["GET"]),
            route("chat", _chat, "POST", about="Answers a chat", body=ChatRequest, streams=NDJSON),
            route("generate", _generate, "POST", about="Answers a prompt", body=GenerateRequest, streams=NDJSON),
            route("show", _show, "POST", about="Describes a model", body=ShowRequest),
            *(route(path, _embed, "POST", about="Refuses: no model makes embeddings")
              for path in ("embed", "embeddings")),
            route("tags", _tags, "GET", about="Lists the models"),
            route("ps", _ps, "GET", about="Lists the loaded models"),
            route("version", _version, "GET", about="The version of Ollama whose endpoints these are")]


def _worded(handle: _Handle, server: Server) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint whose errors are in Ollama's shape."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handle(server, request)
        except ApiError as error:
            response = json_response(ollama_error(error), error.status)
            response.headers.update(error.headers)
            return response

    return endpoint


class _Greeting(Route):
    """Shares its path with the page: browsers ask for HTML, Ollama's clients for anything."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] == "http" and "text/html" in Headers(scope=scope).get("accept", ""):
            return Match.NONE, {}
        return super().matches(scope)


async def _greet(request: Request) -> Response:
    return PlainTextResponse("Ollama is running", headers={"Vary": "Accept"})  # words that clients look for


async def _version(server: Server, request: Request) -> Response:
    return json_response({"version": _VERSION})


async def _tags(server: Server, request: Request) -> Response:
    cards = [server.store.card(name) for name in server.store.names()]
    return json_response({"models": await asyncio.to_thread(lambda: [listed(card) for card in cards])})


async def _ps(server: Server, request: Request) -> Response:
    models = []
    for name in server.store.names():
        card = server.store.card(name)
        if card.loaded:
            async with server.store.lease(name) as lease:
                models.append(running(card, lease.model.context, lease.model.device == "cuda"))
    return json_response({"models": models})


async def _show(server: Server, request: Request) -> Response:
    ask = await fields.read_body(request, ShowRequest)
    name = _name(server, ask.model or ask.name)
    if name not in server.store.names():
        raise ApiError(404, "not_found_error", f"model {name!r} not found", param="model", code="model_not_found")
    answer = await asyncio.to_thread(shown, server.store.card(name))
    if answer is None:
        raise ApiError(404, "not_found_error", f"the file of model {name!r} cannot be read")
    return json_response(answer)


async def _embed(server: Server, request: Request) -> Response:
    raise ApiError(501, "not_implemented", "no model here makes embeddings")


async def _chat(server: Server, request: Request) -> Response:
    ask = await fields.read_body(request, ChatRequest)
    return await _answer(server, request, ask, chat_turn(ask), "chat")


async def _generate(server: Server, request: Request) -> Response:
    ask = await fields.read_body(request, GenerateRequest)
    return await _answer(server, request, ask, generate_turn(ask), "generate")


async def _answer(server: Server, request: Request, ask: Asked, turn: Turn | None,
                  kind: Kind) -> Response:
    name, began = _name(server, ask.model), time.perf_counter()
    if turn is None:
        async with server.store.lease(name) as lease:
            return json_response({**empty_line(lease.name, kind), "done": True, "done_reason": "load"})
    return await answered(request, server, name, turn,
                          lambda lease, opened: AnswerWording(opened, lease.name, kind, began),
                          stream=ask.stream, media_type=NDJSON)


def _name(server: Server, asked: str) -> str:
    """The name of a model. Ollama's clients add a tag to names without one."""
    names = server.store.names()
    return asked if asked in names else asked.removesuffix(":latest")
