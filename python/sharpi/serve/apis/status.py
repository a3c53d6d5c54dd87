"""How the server is: /health, /metrics, /slots and /props, shaped like llama.cpp's where it has them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute

from sharpi import __version__
from sharpi.loading.loaded_model import LoadedModel
from sharpi.serve.document import ApiRoute
from sharpi.serve.http.metrics import CONTENT_TYPE
from sharpi.serve.http.state import ApiServer
from sharpi.serve.http.wording import http_error
from sharpi.serve.models.facts import facts_of
from sharpi.serve.models.loading import Loaded
from sharpi.settings.generation_options import DEFAULT_OPTIONS

__all__ = ["routes"]

# Where weights are: the names that the page shows, and how it colours them.
_HOMES = {"vram": ("in VRAM", "vram"), "direct": ("in RAM, fetched over PCIe", "ram"),
          "slots": ("in RAM, with slots in VRAM", "ram"), "cpu": ("in RAM, computed by the CPU", "cpu")}


def routes(server: ApiServer) -> list[BaseRoute]:
    """The endpoints."""
    health, slots, props = (functools.partial(handle, server) for handle in (_health, _slots, _props))
    return [*(ApiRoute(path, health, "GET", about="Tells whether requests are answered")
              for path in ("/health", "/v1/health")),
            ApiRoute("/metrics", functools.partial(_metrics, server), "GET", about="Counts for Prometheus",
                     answers=CONTENT_TYPE),
            ApiRoute("/slots", slots, "GET", about="Tells how many requests are answered", query=("model",)),
            ApiRoute("/props", props, "GET", about="Describes a model and the server", query=("model",))]


async def _health(server: ApiServer, request: Request) -> Response:
    """200 if requests can be answered. Whoever restarts servers asks this, so it must not say so if they are not."""
    if server.traffic.ending:
        return _unwell("ending", "the server is ending")
    lost = [f"{model}: {counts['failure']}" for model, counts in server.counts() if counts.get("failure")]
    if lost:
        return _unwell("failed", "; ".join(lost))
    stalled = [f"{model} has finished no step for {seconds:.0f} s" for model, seconds in server.watch.stalled()]
    if stalled:
        return _unwell("stalled", "; ".join(stalled))
    store = server.store
    if not store.loaded() and server.settings.preload:
        if store.failures:
            return _unwell("failed", "; ".join(store.failures.values()))
        return _unwell("loading model", "the model is being loaded")
    return JSONResponse({"status": "ok"})


def _unwell(status: str, message: str) -> Response:
    return JSONResponse({"status": status, "error": {"code": 503, "message": message, "type": "unavailable_error",
                                                    "param": None}},
                        503, {"Retry-After": "1"})


async def _metrics(server: ApiServer, request: Request) -> Response:
    return Response(server.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


async def _slots(server: ApiServer, request: Request) -> Response:
    """As many as requests can be answered at a time; which one is in which says nothing here."""
    asked = request.query_params.get("model")
    slots: list[dict[str, Any]] = []
    for loaded in server.store.loaded():
        if asked in (None, "", loaded.name):
            counts = loaded.scheduler.counts()
            busy = counts["preparing"] + counts["writing"]
            slots += [{"id": len(slots) + index, "model": loaded.name, "n_ctx": loaded.model.context,
                       "is_processing": index < busy} for index in range(max(server.settings.parallel, busy))]
    return JSONResponse(slots)


async def _props(server: ApiServer, request: Request) -> Response:
    """Of a model that need not be loaded; what only loading tells is null."""
    card = server.store.card(request.query_params.get("model") or server.store.names()[0])
    facts = await asyncio.to_thread(facts_of, card.path)
    if facts is None:
        raise http_error(500, f"the file of the model {card.name!r} cannot be read", code="model_file_error")
    loaded = next((one for one in server.store.loaded() if one.name == card.name), None)
    context = None if loaded is None else loaded.model.context
    body = {
        "model": card.name, "model_alias": card.name, "loaded": loaded is not None, "n_ctx": context,
        "total_slots": server.settings.parallel,
        "default_generation_settings": {"n_ctx": context, "params": _defaults()},
        "chat_template": facts.chat_template, "bos_token": facts.bos_token, "eos_token": facts.eos_token,
        "modalities": {"vision": False, "audio": False}, "build_info": f"sharpi-{__version__}",
        "is_sleeping": False, **({} if loaded is None else await asyncio.to_thread(_of_loaded, loaded))}
    return JSONResponse(body)


def _defaults() -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in DEFAULT_OPTIONS.items()}


def _of_loaded(loaded: Loaded) -> dict[str, Any]:
    model = loaded.model
    return {"device": model.device, "device_name": model.device_name, "prompt": model.plan.prompt,
            "plan": _plan(model), "experts": _experts(model),
            "cache_tokens": model.plan.most_cached}


def _plan(model: LoadedModel) -> list[dict[str, Any]]:
    """Where the weights are, as parts of a bar."""
    placement: Mapping[str, Any] = model.engine.placement()
    return [{"name": name, "bytes": placement[home], "role": role} for home, (name, role) in _HOMES.items()
            if placement[home]]


def _experts(model: LoadedModel) -> dict[str, Any] | None:
    """`None` if experts have no slots in VRAM."""
    from sharpi.planning.expert_stats import ExpertStats

    stats = ExpertStats.from_engine(model.engine, model.plan)
    return {"hit_rate": stats.hit_rate} if stats is not None and stats.capacity else None
