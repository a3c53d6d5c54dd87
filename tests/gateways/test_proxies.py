"""nginx with the configuration in docs/serve, and smg, before two servers."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
import pytest
from conftest import Asked, answers, free_port, gateway
from traffic.server_process import ServerProcess

NGINX = os.environ.get("SHARPI_NGINX") or shutil.which("nginx")
CONFIGURATION = Path(__file__).resolve().parents[2] / "docs" / "serve" / "nginx.conf"
_TOKENS = 200


def finished(server: ServerProcess) -> float:
    return server.gauges()["sharpi_requests_finished_total"]


@pytest.fixture(params=["nginx", "smg"])
def proxied(request: pytest.FixtureRequest, servers: list[ServerProcess], tmp_path: Path) -> Iterator[str]:
    """The gateway's address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    if request.param == "nginx":
        if NGINX is None:
            pytest.skip("nginx is not here")
        command = [NGINX, "-e", str(tmp_path / "errors"), "-p", str(tmp_path), "-c", str(nginx_files(servers, port,
                                                                                                       tmp_path))]
    else:
        pytest.importorskip("smg")
        command = [sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port), "--policy",
                   "cache_aware", "--prometheus-port", str(free_port()), "--worker-urls",
                   *(server.url for server in servers)]
    with gateway(command, tmp_path / "gateway", lambda: answers(url, "/health") and answers(url, "/v1/models")):
        yield url


def nginx_files(servers: list[ServerProcess], port: int, folder: Path) -> Path:
    """The example with this test's ports, and a main configuration that includes it."""
    text = CONFIGURATION.read_text(encoding="utf-8")
    for number, server in zip((8080, 8081), servers, strict=True):
        assert f"server 127.0.0.1:{number} " in text
        text = text.replace(f"server 127.0.0.1:{number} ", f"server 127.0.0.1:{server.port} ")
    assert "listen 8000;" in text
    (folder / "sharpi.conf").write_text(text.replace("listen 8000;", f"listen 127.0.0.1:{port};"), encoding="utf-8")
    temporary = "".join(f"{name}_temp_path {folder};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    main = folder / "nginx.conf"
    main.write_text(f"daemon off; master_process off; pid {folder}/pid; events {{}} http {{ access_log off; {temporary}"
                    f" include {folder}/sharpi.conf; }}", encoding="utf-8")
    return main


def test_streams_come_through_as_they_are_written(proxied: str, servers: list[ServerProcess]) -> None:
    direct, through = Asked(servers[0].url, tokens=_TOKENS), Asked(proxied, tokens=_TOKENS)
    assert direct.text and through.ended and through.text == direct.text
    # A proxy that collects sends a dozen parts of some kilobytes each.
    assert through.parts > max(40, direct.parts / 3)


def test_conversations_are_spread_and_each_stays(proxied: str, servers: list[ServerProcess]) -> None:
    """nginx knows a conversation by its header, smg by how its prompt begins."""
    def shares(conversations: Iterable[str]) -> list[float]:
        before = [finished(server) for server in servers]
        for name in conversations:
            Asked(proxied, tokens=2, session=name, said=f"{name} " * 40)
        return sorted(finished(server) - was for server, was in zip(servers, before, strict=True))

    assert shares(f"{number} of many" for number in range(24))[0] > 0
    assert shares(["always the same"] * 6) == [0, 6]


def test_a_server_that_ends_is_not_missed(proxied: str, servers: list[ServerProcess]) -> None:
    expected = Asked(proxied, tokens=8).text
    servers[0].process.terminate()
    assert servers[0].process.wait(60) == 0
    assert [Asked(proxied, tokens=8, session=str(number)).text for number in range(12)] == [expected] * 12


def test_a_client_that_leaves_ends_its_request(proxied: str, servers: list[ServerProcess]) -> None:
    body = {"model": "story", "prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True, "n": 8}
    with httpx.stream("POST", f"{proxied}/v1/completions", json=body, timeout=60) as response:
        assert re.match(r"data: ", next(response.iter_lines()))
    for _ in range(600):
        if not any(server.gauges()["sharpi_requests_running"] for server in servers):
            break
        time.sleep(0.1)
    # 8 answers of 1,000 tokens are not finished in a moment: most of them were not written.
    assert sum(server.gauges()["sharpi_step_tokens_total"] for server in servers) < 7000
