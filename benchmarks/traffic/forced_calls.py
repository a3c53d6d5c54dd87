"""Tool calls that a client forces, with random tools: asked streamed and whole, and both checked by the tools' schemas.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema

__all__ = ["MOST_TOKENS", "Calls", "check_calls", "request_of"]

MOST_TOKENS = 3000  # of an answer
_AT_ONCE = 8

Schema = dict[str, Any]
Calls = list[tuple[str, str]]
"""Names and arguments."""


def request_of(seed: int, random_schema: Callable[[random.Random, int], Schema]) -> dict[str, Any]:
    """A chat that must call one of one to three tools, or a named one. random_schema: makes a schema of some depth."""
    draw = random.Random(seed)
    tools = [_tool(f"tool_{number}", draw, random_schema) for number in range(draw.randrange(1, 4))]
    named = {"type": "function", "function": {"name": draw.choice(tools)["function"]["name"]}}
    return {"messages": [{"role": "user", "content": f"Call number {seed}."}], "tools": tools,
            "tool_choice": draw.choice(["required", named]), "parallel_tool_calls": draw.random() < 0.3,
            "max_tokens": MOST_TOKENS, "temperature": draw.choice([0, 0.8, 1.2]), "seed": seed}


def _tool(name: str, draw: random.Random, random_schema: Callable[[random.Random, int], Schema]) -> dict[str, Any]:
    fields = draw.sample(["place", "when", "how many", "größe", "a\"b"], draw.randrange(1, 4))
    parameters = {"type": "object", "properties": {field: _bounded(random_schema(draw, 2)) for field in fields},
                  "required": draw.sample(fields, draw.randrange(len(fields) + 1)), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _bounded(schema: Any) -> Any:
    """The schema without what a bad model could write without end: further properties, fractions of any length, and
    patterns that repeat without a bound."""
    if isinstance(schema, list):
        return [_bounded(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "number":
        return {"type": "integer", "minimum": 0, "maximum": 99}
    if schema.get("format") in ("time", "date-time"):
        return {**schema, "format": "date"}
    if "+" in schema.get("pattern", ""):
        return {**schema, "pattern": schema["pattern"].replace("+", "{1,9}")}
    extra = {"additionalProperties": False} if schema.get("type") == "object" else {}
    return {**{name: _bounded(part) for name, part in schema.items()}, **extra}


async def check_calls(url: str, requests: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the answers of a server to these chats, in words."""
    limit, wrong = asyncio.Semaphore(_AT_ONCE), []

    async def check(client: httpx.AsyncClient, number: int, body: dict[str, Any]) -> None:
        async with limit:
            try:
                whole, streamed = await _whole(client, body), await _streamed(client, body)
            except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
                wrong.append(f"request {number}: {error!r}")
                return
            wrong.extend(f"request {number}: {what}" for what in faults(body, whole, streamed))

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        await asyncio.gather(*(check(client, number, body) for number, body in enumerate(requests)))
    return wrong


def faults(body: dict[str, Any], whole: tuple[Calls, str], streamed: tuple[Calls, str]) -> list[str]:
    """What is wrong with one request's two answers, each with its finish_reason."""
    found = [] if streamed == whole else [f"streamed {streamed}, whole {whole}"]
    calls, reason = whole
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body["tools"]}
    choice = body["tool_choice"]
    allowed = set(schemas) if choice == "required" else {choice["function"]["name"]}
    if reason != "tool_calls" or not calls or (len(calls) > 1 and not body["parallel_tool_calls"]):
        return [*found, f"{len(calls)} calls, and the answer ended by {reason}"]
    for name, arguments in calls:
        if name not in allowed:
            found.append(f"{name} was called, allowed is {sorted(allowed)}")
            continue
        try:
            jsonschema.Draft202012Validator(schemas[name]).validate(json.loads(arguments))
        except (ValueError, jsonschema.ValidationError) as error:
            found.append(f"the arguments {arguments!r} are wrong: {str(error).splitlines()[0]}")
    return found


async def _whole(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[Calls, str]:
    response = await client.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    choice = response.json()["choices"][0]
    calls = [(call["function"]["name"], call["function"]["arguments"])
             for call in choice["message"].get("tool_calls") or ()]
    return calls, choice["finish_reason"]


async def _streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[Calls, str]:
    """Put together as clients do: by each piece's index."""
    calls: list[list[str]] = []
    reason = ""
    async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            choice = json.loads(line[6:])["choices"][0]
            reason = choice["finish_reason"] or reason
            for piece in choice["delta"].get("tool_calls") or ():
                if piece["index"] == len(calls):
                    calls.append([piece["function"]["name"], ""])
                calls[piece["index"]][1] += piece["function"].get("arguments", "")
    return [(name, arguments) for name, arguments in calls], reason
