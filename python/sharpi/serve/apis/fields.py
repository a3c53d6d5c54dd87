"""What the schemas of the APIs share: bounded kinds of fields, and errors that name the field."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from starlette.requests import Request

from sharpi.serve.errors import ApiError
from sharpi.serve.turns import NamedTool, OutputFormat, Tool, ToolChoice
from sharpi.settings.generation_options import GenerationOptions

__all__ = ["Amount", "Body", "Count", "GrammarFields", "JsonObject", "LogitBias", "MinP", "NullableBody", "Penalty",
           "RepetitionPenalty", "Seed", "Stop", "StreamOptions", "Temperature", "TokenLimit", "TopK", "TopP",
           "effort_variables", "format_of", "function_tools", "named_tool", "options_of", "possible_choice",
           "read_body", "schema_format", "tool_choice_of", "wanted_format"]

B = TypeVar("B", bound=BaseModel)

MOST_STOPS, LONGEST_STOP = 16, 256
MOST_BIASES = 1024
MOST_TOP_LOGPROBS = 20
MOST_CHOICES = 8
MOST_SCHEMA_BYTES = 256 << 10
_LARGE_BODY = 256 << 10
_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}  # templates know low, medium and high
MOST_INT = (1 << 31) - 1


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _by_number(value: Any) -> Any:
    """Token ids, which are keys and therefore text in JSON, as numbers."""
    if not isinstance(value, dict):
        return value
    return {int(key) if isinstance(key, str) and key.isdecimal() and key.isascii() else key: bias
            for key, bias in value.items()}


Temperature = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, le=1)]
TopK = Annotated[int, Field(ge=-1, le=MOST_INT)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=-(1 << 63), le=(1 << 64) - 1)]
TokenLimit = Annotated[int, Field(ge=0, le=MOST_INT)]
Amount = Annotated[int, Field(ge=1, le=MOST_INT)]
Count = Annotated[int, Field(ge=1, le=MOST_CHOICES)]
_StopText = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
_Stops = Annotated[list[_StopText], Field(max_length=MOST_STOPS)]
Stop = Annotated[_Stops, BeforeValidator(_listed, json_schema_input_type=_Stops | _StopText)]
LogitBias = Annotated[dict[Annotated[int, Field(ge=0, le=MOST_INT)], Annotated[float, Field(ge=-100, le=100)]],
                      Field(max_length=MOST_BIASES), BeforeValidator(_by_number)]
JsonObject = dict[str, Any]


class Body(BaseModel):
    """A request's body. Unknown fields are ignored, and no text is taken for a number."""

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())


class NullableBody(Body):
    """A body in which null is the same as nothing."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        made = handler(core)
        shape = handler.resolve_ref_schema(made)
        for name, part in shape.get("properties", {}).items():
            if name not in shape.get("required", ()):
                shape["properties"][name] = {"anyOf": [part, {"type": "null"}]}
        return made

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict) and None in value.values():
            return {name: part for name, part in value.items() if part is not None}
        return value


async def read_body(request: Request, kind: type[B]) -> B:
    """The request's body. Raises `ApiError` 400, which names the first field that is wrong."""
    body = await request.body()
    # A body of megabytes takes seconds, in which others must be answered.
    return await asyncio.to_thread(_read, body, kind) if len(body) > _LARGE_BODY else _read(body, kind)


def _read(body: bytes, kind: type[B]) -> B:
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError):
        raise _wrong(None, "the body is no valid JSON") from None
    if not isinstance(raw, dict):
        raise _wrong(None, "the body must be a JSON object")
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        name = _path(first["loc"], raw)
        message = first["msg"].removeprefix("Value error, ")
        raise _wrong(name, f"{name}: {message}") from None
    except RecursionError:
        raise _wrong(None, "the body nests too deeply") from None


def _path(location: Sequence[str | int], raw: Any) -> str:
    """The field, such as messages[0].content. Parts of the location that are not in the body name alternatives of the
    schema, and are left out."""
    name, value = "", raw
    for at, part in enumerate(location):
        if isinstance(part, int) and isinstance(value, list):
            name += f"[{part}]"
            value = value[part] if part < len(value) else None
        elif isinstance(value, Mapping) and (part in value or at == len(location) - 1):
            name += f".{part}" if name else str(part)
            value = value.get(part)
    return name or str(location[0] if location else "body")


class FunctionFields(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: JsonObject | None = None


class ToolFields(Body):
    type: str = "function"
    function: FunctionFields | None = None


class _NamedFunction(Body):
    name: str


class _NamedChoice(Body):
    type: str = "function"
    function: _NamedFunction


def function_tools(tools: Sequence[ToolFields] | None) -> tuple[Tool, ...]:
    """The functions among a request's tools; clients also name tools that only another server has."""
    return tuple(Tool(tool.function.name, tool.function.description or "", tool.function.parameters or {})
                 for tool in tools or () if tool.type == "function" and tool.function is not None)


def tool_choice_of(choice: str | Mapping[str, Any] | None, tools: Sequence[Tool]) -> ToolChoice:
    """Raises `ApiError` for a choice that there is not."""
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise _wrong("tool_choice", "tool_choice must be none, auto, required or a function's name")
        if choice == "required" and not tools:
            raise _wrong("tool_choice", "tool_choice is required, but there are no tools")
        return "none" if choice == "none" else "required" if choice == "required" else "auto"
    try:
        name = _NamedChoice.model_validate(choice).function.name
    except ValidationError:
        raise _wrong("tool_choice", 'tool_choice must read {"type": "function", "function": {"name": ...}}') from None
    if all(tool.name != name for tool in tools):
        raise _wrong("tool_choice.function.name", f"tool_choice.function.name: {name!r} is none of the tools")
    return NamedTool(name)


def named_tool(where: str, name: str, description: str, parameters: Mapping[str, Any]) -> Tool:
    """A tool of a request. Raises `ApiError`, which names the place, for one without a name."""
    if not name:
        raise _wrong(f"{where}.name", f"{where}.name: a tool must have a name")
    return Tool(name, description, parameters)


def possible_choice(choice: ToolChoice, tools: Sequence[Tool]) -> ToolChoice:
    """The choice. Raises `ApiError` if the tools do not allow it."""
    if isinstance(choice, NamedTool) and all(tool.name != choice.name for tool in tools):
        raise _wrong("tool_choice", f"tool_choice names {choice.name!r}, which is none of the tools")
    if choice == "required" and not tools:
        raise _wrong("tool_choice", "tool_choice demands a call, but there are no tools")
    return choice


def effort_variables(effort: str | None) -> dict[str, str]:
    """What a template is told of the effort that a request asks for."""
    return {} if effort in (None, "none") else {"reasoning_effort": _EFFORTS.get(str(effort), str(effort))}


def format_of(name: str, given: Mapping[str, Any] | None) -> OutputFormat | None:
    """OpenAI's response_format. Raises `ApiError` for one that there is not."""
    kind = None if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        schema = given.get("schema")  # llama.cpp's way
        return OutputFormat("json_object") if schema is None else schema_format(f"{name}.schema", schema)
    if kind == "json_schema":
        holder = given.get("json_schema")
        if not isinstance(holder, Mapping) or "schema" not in holder:
            raise _wrong(f"{name}.json_schema", f"{name}.json_schema must have a schema")
        return schema_format(f"{name}.json_schema.schema", holder["schema"])
    raise _wrong(f"{name}.type", f"{name}.type must be text, json_object or json_schema")


def schema_format(name: str, schema: Any) -> OutputFormat:
    """An answer of this schema. name: of the field. Raises `ApiError` for what is no schema, or too large."""
    if not isinstance(schema, (dict, bool)):
        raise _wrong(name, f"{name} must be a JSON schema")
    if len(json.dumps(schema)) > MOST_SCHEMA_BYTES:
        raise _wrong(name, f"{name} is larger than {MOST_SCHEMA_BYTES >> 10} KiB")
    return OutputFormat("json_schema", schema)


class StreamOptions(Body):
    include_usage: bool | None = None


_GBNF = re.compile(r"^[ \t]*root\s*::=", re.MULTILINE)


class GrammarFields(Body):
    type: Literal["lark", "gbnf", "regex"]
    value: str


def wanted_format(response_format: Mapping[str, Any] | None,
                  grammar: str | GrammarFields | None) -> OutputFormat | None:
    """What these fields ask of an answer's text; a grammar that is a text is GBNF if it has a
    rule "root", as clients of llama.cpp write it, and Lark if not. Raises `ApiError`."""
    wanted = format_of("response_format", response_format)
    if not grammar:
        return wanted
    if wanted is not None:
        raise _wrong("grammar", "grammar and response_format contradict each other")
    if isinstance(grammar, str):
        given = GrammarFields(type="gbnf" if _GBNF.search(grammar) else "lark", value=grammar)
    else:
        given = grammar
    if len(given.value) > MOST_SCHEMA_BYTES:
        raise _wrong("grammar", f"grammar is larger than {MOST_SCHEMA_BYTES >> 10} KiB")
    return OutputFormat(given.type, given.value)


class SamplingFields(Body):
    """How tokens are drawn, as OpenAI's fields and other servers' say it."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    repeat_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    ignore_eos: bool | None = None
    min_tokens: TokenLimit | None = None


def options_of(fields: SamplingFields, max_tokens: int | None) -> GenerationOptions:
    """What the fields say; the engine's defaults stand for what they leave out."""
    repetition = fields.repetition_penalty if fields.repetition_penalty is not None else fields.repeat_penalty
    # OpenAI's bias of -100 forbids a token.
    bias = {token: -float("inf") if value <= -100 else value for token, value in (fields.logit_bias or {}).items()}
    given: dict[str, Any] = {
        "max_tokens": max_tokens, "temperature": fields.temperature, "top_p": fields.top_p, "min_p": fields.min_p,
        "top_k": None if fields.top_k is None else max(0, fields.top_k),  # -1: all, as vLLM has it
        "presence_penalty": fields.presence_penalty, "frequency_penalty": fields.frequency_penalty,
        "repetition_penalty": repetition, "logit_bias": bias or None, "stop": fields.stop or None,
        "seed": None if fields.seed in (None, -1) else fields.seed % (1 << 64),  # -1: any, as llama.cpp has it
    }
    return cast(GenerationOptions, {name: value for name, value in given.items() if value is not None})


def _wrong(param: str | None, message: str) -> ApiError:
    return ApiError(400, "invalid_request_error", message, param=param)
