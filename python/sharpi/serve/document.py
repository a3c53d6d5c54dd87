"""The OpenAPI document: what each endpoint takes, from the models that check it, and how it refuses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from sharpi import __version__
from sharpi.serve.http.wording import shape_of

__all__ = ["ApiRoute", "document", "document_route"]

_REF = "#/components/schemas/{model}"
_KEYS = {"bearer": {"type": "http", "scheme": "bearer"},
         "header": {"type": "apiKey", "in": "header", "name": "x-api-key"}}


class ApiRoute(Route):
    """An endpoint with what the document says of it."""

    def __init__(self, path: str, endpoint: Callable[[Request], Awaitable[Response]], *methods: str, about: str,
                 body: type[BaseModel] | None = None, query: Sequence[str] = (), answers: str = "application/json",
                 streams: str | None = None) -> None:
        """about: a line. body: of the request. query: names of parameters, each a text that may be missing. answers,
        streams: the media type of an answer, and of one that is streamed."""
        super().__init__(path, endpoint, methods=list(methods))
        self.about = about
        self.body = body
        self.query = query
        self.media_types = [answers] if streams is None else [answers, streams]
        self.documented = [method.lower() for method in methods]


class OpenAiProblem(BaseModel):
    """param: the field that is wrong. code: a short name for programs."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class OpenAiError(BaseModel):
    error: OpenAiProblem


class AnthropicProblem(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    type: str
    error: AnthropicProblem
    request_id: str


class OllamaError(BaseModel):
    error: str


_ERRORS: dict[str, type[BaseModel]] = {"openai": OpenAiError, "anthropic": AnthropicError, "ollama": OllamaError}


def document(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """An OpenAPI 3.1 document of the routes that are `ApiRoute`s."""
    described = [route for route in routes if isinstance(route, ApiRoute)]
    bodies = {route.body for route in described if route.body is not None}
    models = sorted({*bodies, *_ERRORS.values()}, key=lambda model: f"{model.__module__}.{model.__name__}")
    places, shared = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    schemas = {model: places[model, "validation"] for model in models}
    paths: dict[str, Any] = {}
    for route in described:
        for method in route.documented:
            paths.setdefault(route.path_format, {})[method] = _operation(route, method, schemas)
    return {"openapi": "3.1.0", "info": {"title": "Sharpi", "version": __version__}, "paths": paths,
            "security": [{}, *({name: []} for name in _KEYS)],
            "components": {"schemas": shared.get("$defs", {}), "securitySchemes": _KEYS}}


def _operation(route: ApiRoute, method: str, schemas: dict[type[BaseModel], Any]) -> dict[str, Any]:
    refusal = {"application/json": {"schema": schemas[_ERRORS[shape_of(route.path)]]}}
    answer: dict[str, Any] = {kind: {} for kind in route.media_types}
    made: dict[str, Any] = {
        "operationId": f"{method} {route.path_format}", "summary": route.about,
        "parameters": [*({"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                         for name in route.param_convertors),
                       *({"name": name, "in": "query", "schema": {"type": "string"}} for name in route.query)],
        "responses": {"200": {"description": "the answer", "content": answer},
                      "default": {"description": "why there is no answer", "content": refusal}}}
    if route.body is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": schemas[route.body]}}}
    return made


def document_route(routes: Sequence[BaseRoute]) -> Route:
    """GET /openapi.json: the document of these routes, which is made when it is first asked for."""
    made: list[dict[str, Any]] = []

    async def answer(request: Request) -> Response:
        if not made:
            made.append(document(routes))
        return JSONResponse(made[0])

    return Route("/openapi.json", answer, methods=["GET"])
