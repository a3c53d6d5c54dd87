"""Texts to tokens and back, and prompts from messages. /tokenize and its like take the fields of llama.cpp and those
that lm-eval sends."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from sharpi.errors import InvalidRequestError, ModelFileError
from sharpi.loading.loaded_model import LoadedModel
from sharpi.serve.answering.prompts import PromptMaker
from sharpi.serve.apis.fields import Body, read_body
from sharpi.serve.apis.openai_chat import ChatFields, turn_of
from sharpi.serve.errors import ApiError
from sharpi.serve.http.state import ApiServer
from sharpi.serve.http.wording import http_error
from sharpi.settings import arguments

__all__ = ["routes"]

class _Asked(Body):
    """The other fields have several names, so that they are looked at one by one."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None


_Work = Callable[[LoadedModel, Mapping[str, Any]], dict[str, Any]]
# Names of what there is no model for yet.
_EMBEDDINGS = ("/v1/embeddings", "/embeddings", "/v1/rerank", "/rerank")


def routes(server: ApiServer) -> list[BaseRoute]:
    """The endpoints."""
    works: dict[str, _Work] = {"/tokenize": _tokenize, "/detokenize": _detokenize}
    posts = [Route(path, functools.partial(_post, server, work), methods=["POST"]) for path, work in works.items()]
    return [*posts, Route("/apply-template", functools.partial(_apply_template, server), methods=["POST"]),
            Route("/tokenizer_info", functools.partial(_info, server), methods=["GET"]),
            *(Route(path, _no_embeddings, methods=["POST"]) for path in _EMBEDDINGS)]


async def _no_embeddings(request: Request) -> Response:
    what = "reranking" if request.url.path.endswith("rerank") else "embeddings"
    raise http_error(501, f"{what} is not supported: no model here makes embeddings", kind="not_supported_error",
                     code="not_supported")


async def _post(server: ApiServer, work: _Work, request: Request) -> Response:
    asked = await read_body(request, _Asked)
    body = asked.model_extra or {}
    async with server.store.lease(asked.model) as lease:
        try:
            return JSONResponse(await asyncio.to_thread(work, lease.model, body))
        except (InvalidRequestError, ModelFileError) as error:
            raise ApiError(400, "invalid_request_error", str(error)) from None


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, "invalid_request_error", message, param=param)


def _tokenize(model: LoadedModel, body: Mapping[str, Any]) -> dict[str, Any]:
    """{"prompt", "add_special_tokens": true} as lm-eval and vLLM have it, or {"content", "add_special": false} as
    llama.cpp."""
    field = "prompt" if "prompt" in body else "content"
    text = body.get(field)
    if not isinstance(text, str):
        raise _wrong(field, f"{field} must be a text")
    special = body.get("add_special_tokens", body.get("add_special", field == "prompt"))
    ids = model.tokenize(text, add_special=arguments.flag("add_special_tokens", special),
                         parse_special=arguments.flag("parse_special", body.get("parse_special", True)))
    found: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": model.context}
    if body.get("with_pieces"):
        found["tokens"] = [{"id": id, "piece": model.tokenizer.decode([id], skip_special=False)} for id in ids]
    if body.get("return_token_strs"):
        found["token_strs"] = [model.tokenizer.token_text(id) for id in ids]
    return found


def _detokenize(model: LoadedModel, body: Mapping[str, Any]) -> dict[str, Any]:
    """The text under both of its names."""
    ids = arguments.token_ids("tokens", body.get("tokens"))
    text = model.tokenizer.decode(ids, skip_special=False)
    return {"content": text, "prompt": text}


async def _apply_template(server: ApiServer, request: Request) -> Response:
    """The prompt of a chat, which is not answered."""
    asked = await read_body(request, ChatFields)
    turn = turn_of(asked)
    async with server.store.lease(asked.model) as lease:
        return JSONResponse({"prompt": (await asyncio.to_thread(PromptMaker(lease.model).make, turn)).text})


async def _info(server: ApiServer, request: Request) -> Response:
    """What lm-eval asks a tokenizer for."""
    async with server.store.lease(request.query_params.get("model")) as lease:
        return JSONResponse(await asyncio.to_thread(_tokenizer_info, lease.model))


def _tokenizer_info(model: LoadedModel) -> dict[str, Any]:
    tokenizer = model.tokenizer

    def text(token: int | None) -> str | None:
        return None if token is None else tokenizer.token_text(token)

    eos = text(tokenizer.eos_id)
    pad = model.file.metadata.get("tokenizer.ggml.padding_token_id")
    return {"eos_token": eos, "bos_token": text(tokenizer.bos_id),
            "pad_token": text(pad) if isinstance(pad, int) and 0 <= pad < tokenizer.vocab_size else eos,
            "chat_template": model.file.metadata.get_str("tokenizer.chat_template", None),
            "add_bos_token": tokenizer.add_bos, "add_eos_token": tokenizer.add_eos,
            "vocab_size": tokenizer.vocab_size, "model_max_length": model.context}
