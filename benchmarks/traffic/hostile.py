"""Requests that a server must refuse with a status of 4xx, each for a reason of its own."""

from __future__ import annotations

import json

from traffic.questions import MODEL
from traffic.wire import request_bytes

__all__ = ["HOSTILE"]

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def _completion(**fields: object) -> bytes:
    return request_bytes(_COMPLETIONS, {"model": MODEL, "prompt": "Once", "max_tokens": 4, **fields})


def _with_head(head: str, body: bytes = b"") -> bytes:
    return f"POST {_COMPLETIONS} HTTP/1.1\r\n{head}\r\n\r\n".encode() + body


HOSTILE: dict[str, bytes] = {
    "no JSON": request_bytes(_CHAT, b"{"),
    "JSON without end": request_bytes(_CHAT, b"[" * 100_000),
    "a list": request_bytes(_CHAT, []),
    "a negative count": _completion(max_tokens=-1),
    "a huge n": _completion(n=10**9),
    "no number": request_bytes(_COMPLETIONS, json.dumps({"prompt": "a", "temperature": float("nan")}).encode()),
    "a token outside the vocabulary": _completion(prompt=[10**9]),
    "a prompt beyond the context": _completion(prompt=[1] * 5000),
    "a path for a model": _completion(model="../../etc/passwd"),
    "a schema that cannot be enforced": request_bytes(_CHAT, {
        "model": MODEL, "messages": [{"role": "user", "content": "a"}], "response_format": {
            "type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}}),
    "an unknown path": request_bytes("/v1/../admin", {}),
    "a foreign host": _with_head("Host: attacker.example\r\nContent-Length: 2", b"{}"),
    "headers without end": _with_head("Host: localhost\r\nX-Long: " + "a" * 100_000),
    "a body of a terabyte": request_bytes(_CHAT, {}, length=10**12),
    "a negative length": _with_head("Host: localhost\r\nContent-Length: -1"),
    "a chunk without a size": _with_head("Host: localhost\r\nTransfer-Encoding: chunked", b"zz\r\n"),
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",
}
