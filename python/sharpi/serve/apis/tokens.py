"""Texts to tokens and back, and prompts from messages. /tokenize and its like take the fields of llama.cpp and those
that lm-eval sends."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute

from sharpi.errors import InvalidRequestError, ModelFileError
from sharpi.loading.loaded_model import LoadedModel
from sharpi.serve.answering.prompts import PromptMaker
from sharpi.serve.apis.fields import NullableBody, read_body
from sharpi.serve.apis.openai_chat import ChatFields, turn_of
from sharpi.serve.document import ApiRoute
from sharpi.serve.errors import ApiError
from sharpi.serve.http.state import ApiServer
from sharpi.serve.http.wording import http_error

__all__ = ["routes"]

_Token = Annotated[int, Field(ge=0, lt=1 << 31)]


class TokenizeFields(NullableBody):
    """`prompt` with `add_special_tokens`, which is true, as lm-eval and vLLM have it; or `content` with `add_special`,
    which is false, as llama.cpp has it."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    content: str | None = None
    add_special: bool | None = None
    parse_special: bool = True
    with_pieces: bool = False
    return_token_strs: bool = False

    @property
    def text(self) -> str:
        """Raises `ApiError` if there is none."""
        text = self.content if self.prompt is None else self.prompt
        if text is None:
            raise ApiError(400, "invalid_request_error", "content must be a text", param="content")
        return text

    @property
    def special(self) -> bool:
        """Whether special tokens are added to the text."""
        asked = self.add_special if self.add_special_tokens is None else self.add_special_tokens
        return self.prompt is not None if asked is None else asked


class DetokenizeFields(NullableBody):
    model: str | None = None
    tokens: list[_Token]


A = TypeVar("A", TokenizeFields, DetokenizeFields)
# Names of what there is no model for yet.
_EMBEDDINGS = ("/v1/embeddings", "/embeddings", "/v1/rerank", "/rerank")


def routes(server: ApiServer) -> list[BaseRoute]:
    """The endpoints."""
    return [ApiRoute("/tokenize", functools.partial(_post, server, TokenizeFields, _tokenize), "POST",
                     about="The tokens of a text", body=TokenizeFields),
            ApiRoute("/detokenize", functools.partial(_post, server, DetokenizeFields, _detokenize), "POST",
                     about="The text of tokens", body=DetokenizeFields),
            ApiRoute("/apply-template", functools.partial(_apply_template, server), "POST",
                     about="The prompt of a chat", body=ChatFields),
            ApiRoute("/tokenizer_info", functools.partial(_info, server), "GET", about="Describes a tokenizer",
                     query=("model",)),
            *(ApiRoute(path, _no_embeddings, "POST", about="Refuses: no model makes embeddings")
              for path in _EMBEDDINGS)]


async def _no_embeddings(request: Request) -> Response:
    what = "reranking" if request.url.path.endswith("rerank") else "embeddings"
    raise http_error(501, f"{what} is not supported: no model here makes embeddings", kind="not_supported_error",
                     code="not_supported")


async def _post(server: ApiServer, kind: type[A], work: Callable[[LoadedModel, A], dict[str, Any]],
                request: Request) -> Response:
    asked = await read_body(request, kind)
    async with server.store.lease(asked.model) as lease:
        try:
            return JSONResponse(await asyncio.to_thread(work, lease.model, asked))
        except (InvalidRequestError, ModelFileError) as error:
            raise ApiError(400, "invalid_request_error", str(error)) from None


def _tokenize(model: LoadedModel, asked: TokenizeFields) -> dict[str, Any]:
    ids = model.tokenize(asked.text, add_special=asked.special, parse_special=asked.parse_special)
    found: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": model.context}
    if asked.with_pieces:
        found["tokens"] = [{"id": id, "piece": model.tokenizer.decode([id], skip_special=False)} for id in ids]
    if asked.return_token_strs:
        found["token_strs"] = [model.tokenizer.token_text(id) for id in ids]
    return found


def _detokenize(model: LoadedModel, asked: DetokenizeFields) -> dict[str, Any]:
    """The text under both of its names."""
    text = model.tokenizer.decode(asked.tokens, skip_special=False)
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
