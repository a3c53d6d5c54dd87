"""Requests that schemathesis makes up from the OpenAPI document, right ones and wrong ones: each is answered, in time
and as the document says, and no wrong one is taken for right."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import (
    content_type_conformance,
    negative_data_rejection,
    not_a_server_error,
    response_schema_conformance,
)
from schemathesis.generation import GenerationMode
from starlette.testclient import TestClient

from sharpi.serve.app import create_app
from sharpi.serve.settings import ServerSettings

EXAMPLES = 150 if os.environ.get("SHARPI_LONG_TESTS") == "1" else 8  # of each endpoint and kind
SECONDS = 60.0  # after which a request hangs; most take milliseconds
# Of these, all requests are refused with 501: no model here makes embeddings.
NOT_SUPPORTED = {"/v1/embeddings", "/embeddings", "/v1/rerank", "/rerank", "/api/embed", "/api/embeddings"}
CHAT = [{"role": "user", "content": "Hello"}]


@cache
def document() -> dict[str, Any]:
    """It is the same for all models."""
    app = create_app(ServerSettings(preload=False))
    made: dict[str, Any] = TestClient(app, base_url="http://localhost").get("/openapi.json").json()
    return made


@cache
def endpoints() -> dict[str, Any]:
    found = [one.ok() for one in schemathesis.openapi.from_dict(document()).get_all_operations()]
    return {endpoint.label: endpoint for endpoint in found}


def with_body() -> list[str]:
    return [f"{method.upper()} {path}" for path, methods in document()["paths"].items()
            for method, endpoint in methods.items() if "requestBody" in endpoint]


def send(server: str, label: str, kind: GenerationMode, checks: list[Any],
         change: Callable[[dict[str, Any]], None] = lambda body: None) -> None:
    """Sends the same requests of a kind to an endpoint each time. change: is given each body that is an object."""
    endpoint = endpoints()[label]

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))
    @given(case=endpoint.as_strategy(generation_mode=kind))
    def run(case: Any) -> None:
        if isinstance(case.body, dict):
            change(case.body)
        response = case.call(base_url=server, timeout=SECONDS)
        case.validate_response(response, checks=checks)

    run()


SHAPES = [content_type_conformance, response_schema_conformance]


@pytest.mark.parametrize("label", [label for label in endpoints() if label.split()[1] not in NOT_SUPPORTED])
def test_right_requests_are_answered_as_the_document_says(server: str, label: str) -> None:
    def chat(body: dict[str, Any]) -> None:
        """Most made-up names are none of a model, and most made-up messages no template takes."""
        body["model"] = "story"
        if "messages" in body and "chat" in label:
            body["messages"] = CHAT

    send(server, label, GenerationMode.POSITIVE, [not_a_server_error, *SHAPES])
    if label in with_body():
        send(server, label, GenerationMode.POSITIVE, [not_a_server_error, *SHAPES], chat)


@pytest.mark.parametrize("label", with_body())
def test_wrong_requests_are_refused_as_the_document_says(server: str, label: str) -> None:
    send(server, label, GenerationMode.NEGATIVE, [not_a_server_error, negative_data_rejection, *SHAPES])


def test_what_is_not_supported_says_so_in_its_apis_shape(server: str) -> None:
    for path in NOT_SUPPORTED:
        response = httpx.post(f"{server}{path}", json={})
        case = endpoints()[f"POST {path}"].Case()
        case.validate_response(response, checks=SHAPES)
        assert response.status_code == 501, path


def test_the_document_names_every_endpoint_with_what_it_takes() -> None:
    paths = document()["paths"]
    app = create_app(ServerSettings(preload=False))
    served = {route.path_format for route in app.routes}  # type: ignore[attr-defined]
    assert served - set(paths) == {"/", "/page/{name}", "/openapi.json"}
    posts = {path for path, methods in paths.items() if "post" in methods}
    without = {"/v1/responses/{id}/cancel", *NOT_SUPPORTED}
    assert {label.split()[1] for label in with_body()} == posts - without
    chat = document()["components"]["schemas"]["ChatFields"]["properties"]
    assert chat["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 8}
    assert chat["stop"]["anyOf"][0]["maxItems"] == 16
