"""/v1/models: the models of the server, with the fields that OpenAI's and Anthropic's clients read and those of
llama.cpp and vLLM that say how long a context may be."""

from __future__ import annotations

import asyncio
import functools
from datetime import datetime, timezone
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute

from sharpi.serve.document import ApiRoute
from sharpi.serve.http.state import ApiServer
from sharpi.serve.models.facts import facts_of
from sharpi.serve.server import Card

__all__ = ["routes"]


def routes(server: ApiServer) -> list[BaseRoute]:
    """The endpoints. Names of models on the Hub have slashes."""
    return [*(ApiRoute(path, functools.partial(_all, server), "GET", about="Lists the models")
              for path in ("/v1/models", "/models")),
            ApiRoute("/v1/models/{name:path}", functools.partial(_one, server), "GET", about="Describes a model")]


async def _all(server: ApiServer, request: Request) -> Response:
    cards = [server.store.card(name) for name in server.store.names()]
    models = await asyncio.to_thread(lambda: [_shown(server, card) for card in cards])
    return JSONResponse({"object": "list", "data": models, "has_more": False, "first_id": models[0]["id"],
                         "last_id": models[-1]["id"]})


async def _one(server: ApiServer, request: Request) -> Response:
    card = server.store.card(request.path_params["name"])
    return JSONResponse(await asyncio.to_thread(_shown, server, card))


def _shown(server: ApiServer, card: Card) -> dict[str, Any]:
    """Runs in a thread, because it may read the file's header."""
    facts = facts_of(card.path)
    try:
        created = int(card.path.stat().st_mtime)
    except OSError:
        created = 0
    context = next((loaded.model.context for loaded in server.store.loaded() if loaded.name == card.name), None)
    meta = None if facts is None else {
        "n_ctx": context, "n_ctx_train": facts.context, "n_vocab": facts.vocabulary, "n_embd": facts.width,
        "n_params": facts.parameters, "size": facts.bytes, "architecture": facts.architecture}
    return {"id": card.name, "object": "model", "created": created, "owned_by": "sharpi", "type": "model",
            "display_name": card.name, "created_at": datetime.fromtimestamp(created, timezone.utc).isoformat(),
            "max_model_len": context, "status": {"value": "loaded" if card.loaded else "unloaded"}, "meta": meta}
