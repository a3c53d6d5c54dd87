"""Who may use the server, by which name, and how much they may send."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fake_loader import FakeLoader, model_files
from starlette.applications import Starlette

from sharpi import InvalidRequestError
from sharpi.serve.app import create_app, server_of
from sharpi.serve.http import limits
from sharpi.serve.http.keys import Keys
from sharpi.serve.http.middleware import Bounded, Hosts
from sharpi.serve.http.process import listen
from sharpi.serve.http.protocol import BoundedProtocol
from sharpi.serve.settings import ServerSettings


def ask(settings: ServerSettings, folder: Path, method: str, path: str, *, host: str = "localhost:8080",
        **request: Any) -> httpx.Response:
    """One request to an application with a model that takes no memory."""
    async def scenario() -> httpx.Response:
        app = create_app(settings, model_files(folder, "a"), loader=FakeLoader())
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            return await client.request(method, path, **request)

    return asyncio.run(scenario())


KEYED = ServerSettings(api_keys=("right", "other"), preload=False)


@pytest.mark.parametrize("headers", [
    {}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}, {"Authorization": "Bearer "},
    {"Authorization": "Basic right"}, {"x-api-key": "righ"}, {"x-api-key": "rightt"}, {"x-api-key": ""},
    {"Authorization": "Bearer wrong", "x-api-key": "right"}])
def test_a_wrong_key_is_a_401(tmp_path: Path, headers: dict[str, str]) -> None:
    found = ask(KEYED, tmp_path, "GET", "/v1/models", headers=headers)
    assert found.status_code == 401 and found.headers["www-authenticate"] == "Bearer"
    assert found.json()["error"]["code"] == "invalid_api_key"
    assert "right" not in found.text


@pytest.mark.parametrize("headers", [
    {"Authorization": "Bearer right"}, {"Authorization": "bearer right"}, {"x-api-key": "other"}])
def test_each_key_is_taken_as_either_header(tmp_path: Path, headers: dict[str, str]) -> None:
    assert ask(KEYED, tmp_path, "GET", "/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/metrics", "/slots", "/props", "/v1/models", "/tokenizer_info", "/nothing",
                                  "/api/tags", "/health/../v1/models", "/health/"])
def test_all_but_the_page_and_health_need_a_key(tmp_path: Path, path: str) -> None:
    assert ask(KEYED, tmp_path, "GET", path).status_code == 401
    assert ask(KEYED, tmp_path, "GET", "/health").status_code == 200


def test_apis_word_refusals_as_their_clients_expect(tmp_path: Path) -> None:
    message = ask(KEYED, tmp_path, "POST", "/v1/messages").json()
    assert message["type"] == "error" and message["error"]["type"] == "authentication_error"
    assert isinstance(ask(KEYED, tmp_path, "POST", "/api/chat").json()["error"], str)
    assert ask(KEYED, tmp_path, "POST", "/v1/completions").json()["error"]["type"] == "authentication_error"


def test_each_key_is_compared_whole_and_with_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    keys = Keys(ServerSettings(api_keys=("first", "second", "a-much-longer-key-than-the-others")))
    assert keys.owner(b"first") and keys.owner(b"x") is None
    assert len(compared) == 6
    assert {len(part) for pair in compared for part in pair} == {32}, "hashes of one length, never the keys"


def test_owners_of_keys_have_names_that_do_not_tell_them() -> None:
    keys = Keys(KEYED)
    names = {keys.owner(b"right"), keys.owner(b"other")}
    assert len(names) == 2 and not names & {None, "right", "other"}


def test_the_key_file_is_read_again_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# keys\none\n\n two \n")
    keys = Keys(ServerSettings(api_key_file=str(file)))
    assert keys.owner(b"one") and keys.owner(b"two") and not keys.owner(b"# keys")
    file.write_text("three\n")
    assert not keys.owner(b"three")
    keys.reload()
    assert keys.owner(b"three") and not keys.owner(b"one")
    for broken in ("", "# none\n", "a b\n"):
        file.write_text(broken)
        keys.reload()
        assert keys.owner(b"three") and keys.needed
    file.unlink()
    keys.reload()
    assert keys.owner(b"three")


@pytest.mark.parametrize(("text", "said"), [("", "holds no key"), ("a b", "key 1 has characters"), (None, "No such")])
def test_a_key_file_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InvalidRequestError, match=said):
        Keys(ServerSettings(api_key_file=str(file)))


# --- names and origins ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "allowed", "refused"), [
    (ServerSettings(), ["localhost", "localhost:1", "127.0.0.1:80", "[::1]:80", "a.localhost", "LOCALHOST"],
     ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8080", "192.168.0.7", "", "[::2]"]),
    (ServerSettings(hosts=("box.lan",)), ["box.lan:8080", "localhost"], ["other.lan"]),
    (ServerSettings(host="0.0.0.0", insecure=True), ["192.168.0.7:8080", "[fe80::1]", socket.gethostname()],
     ["evil.example"]),
    (ServerSettings(host="0.0.0.0", api_keys=("k",)), ["any.example"], []),
    (ServerSettings(hosts=("*",)), ["any.example"], []),
])
def test_the_server_answers_to_its_own_names(settings: ServerSettings, allowed: list[str], refused: list[str]) -> None:
    hosts = Hosts(settings)
    assert [name for name in allowed if not hosts.allows(name.encode())] == []
    assert [name for name in refused if hosts.allows(name.encode())] == []


def test_a_foreign_name_is_a_403(tmp_path: Path) -> None:
    found = ask(ServerSettings(preload=False), tmp_path, "GET", "/v1/models", host="evil.example")
    assert found.status_code == 403 and found.json()["error"]["code"] == "host_not_allowed"


def test_cors_is_off_unless_it_is_asked_for(tmp_path: Path) -> None:
    headers = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    for method in ("GET", "OPTIONS"):
        found = ask(ServerSettings(preload=False), tmp_path, method, "/v1/models", headers=headers)
        assert not [name for name in found.headers if name.startswith("access-control")]
    keyed = ServerSettings(preload=False, cors_origins=("https://page.example",), api_keys=("k",))
    found = ask(keyed, tmp_path, "OPTIONS", "/v1/models", headers=headers)
    assert found.status_code == 200, "a preflight has no key"
    assert found.headers["access-control-allow-origin"] == "https://page.example"
    found = ask(keyed, tmp_path, "GET", "/v1/models", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in found.headers


@pytest.mark.parametrize("origins", [("https://page.example",), ("*",)])
def test_credentials_are_never_offered_to_other_origins(tmp_path: Path, origins: tuple[str, ...]) -> None:
    settings = ServerSettings(preload=False, cors_origins=origins)
    headers = {"Origin": "https://page.example", "Cookie": "a=b", "Access-Control-Request-Method": "POST"}
    for method in ("GET", "OPTIONS"):
        found = ask(settings, tmp_path, method, "/v1/models", headers=headers)
        assert "access-control-allow-credentials" not in found.headers


@pytest.mark.parametrize(("site", "origin", "status"), [
    ("cross-site", "https://evil.example", 403), ("same-site", "http://localhost:99", 403), ("cross-site", None, 403),
    ("cross-site", "https://page.example", 400), ("same-origin", "http://localhost:8080", 400), ("none", None, 400),
    (None, None, 400)])
def test_a_foreign_page_cannot_even_send(tmp_path: Path, site: str | None, origin: str | None, status: int) -> None:
    headers = {name: value for name, value in (("Sec-Fetch-Site", site), ("Origin", origin)) if value}
    settings = ServerSettings(preload=False, cors_origins=("https://page.example",))
    found = ask(settings, tmp_path, "POST", "/tokenize", headers=headers, content=b"no json")
    assert found.status_code == status
    assert ask(settings, tmp_path, "GET", "/v1/models", headers=headers).status_code == 200


# --- sizes and times --------------------------------------------------------------------------------------------------


def test_a_body_that_is_announced_too_large_is_refused_unread(tmp_path: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        raise AssertionError("it is read")
        yield b""

    for length in (limits.BODY_BYTES + 1, 10**30):
        found = ask(ServerSettings(preload=False), tmp_path, "POST", "/tokenize", content=endless(),
                    headers={"Content-Length": str(length)})
        assert found.status_code == 413 and found.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses"])
def test_a_body_that_becomes_too_large_is_cut_off(tmp_path: Path, path: str) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 100 << 20:
            sent += 1 << 20
            yield b" " * (1 << 20)

    found = ask(ServerSettings(preload=False), tmp_path, "POST", path, content=endless())
    assert found.status_code == 413
    assert sent <= limits.BODY_BYTES + (2 << 20)


def test_a_body_that_does_not_come_ends_the_request() -> None:
    async def silent(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    async def never() -> Any:
        await asyncio.Event().wait()

    async def scenario() -> None:
        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        await Bounded(silent, body_seconds=0.02)(scope, never, never)

    with pytest.raises(Exception, match="the body did not come in time") as caught:
        asyncio.run(scenario())
    assert getattr(caught.value, "status", None) == 408


@contextlib.contextmanager
def listening(app: Starlette) -> Iterator[int]:
    with listen("127.0.0.1", 0) as place:
        server = uvicorn.Server(uvicorn.Config(app, http=BoundedProtocol, log_level="critical"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [place]})
        thread.start()
        try:
            yield place.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def talk(port: int, *pieces: bytes) -> bytes:
    """All that comes back until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        with contextlib.suppress(OSError):
            for piece in pieces:
                client.sendall(piece)
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := client.recv(1 << 16):
                found += piece
        return found


def test_headers_are_bounded_however_they_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(ServerSettings(preload=False), model_files(tmp_path, "a"), loader=FakeLoader())
    begin = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    line = b"a" * 1000
    with listening(app) as port:
        assert talk(port, begin + b"x: y\r\n\r\n").startswith(b"HTTP/1.1 200")
        many = b"".join(b"x%d: %s\r\n" % (index, line) for index in range(70))
        assert talk(port, begin + many + b"\r\n").startswith(b"HTTP/1.1 431")
        assert talk(port, begin + many[:50_000] + b"\r\n\r\n").startswith(b"HTTP/1.1 200")
        assert b"431" in talk(port, begin + b"x: ", *[line * 20] * 2000)[:40], "one header without an end"
        assert b"431" in talk(port, b"GET /" + line * 70 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")[:40]
        body = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000\r\nConnection: close\r\n\r\n"
        assert talk(port, body, b" " * 100_000, b" " * 100_000).startswith(b"HTTP/1.1 400"), "a body is no header"
        monkeypatch.setattr(limits, "HEADER_SECONDS", 0.1)
        assert talk(port) == b"", "a connection that says nothing is closed"
        assert talk(port, begin) == b"", "and one that does not finish"
        assert server_of(app).traffic.active == 0
