"""Ray Serve with two replicas on this machine."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import Asked, answers, free_port, gateway

ray = pytest.importorskip("ray")

from sharpi import InvalidRequestError  # noqa: E402
from sharpi.serve.ray_serve import application, require_well  # noqa: E402

# `serve run` with an address of its own, so that tests on one machine do not meet.
RUN = """
import sys, time
import ray
from ray import serve
from sharpi.serve.ray_serve import application
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(application({"config": sys.argv[2], "min_replicas": "2", "max_replicas": "2"}))
print("deployed", flush=True)
time.sleep(3600)
"""


@pytest.fixture(scope="module")
def deployed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("ray"), free_port()
    config, log, url = folder / "serve.toml", folder / "log", f"http://127.0.0.1:{port}"
    config.write_text(f'models = ["story={model}"]\ndevice = "cpu"\nthreads = 1\ncontext = 1024\n'
                      'cache_tokens = 4096\n', encoding="utf-8")
    command = [sys.executable, "-c", RUN, str(port), str(config)]
    with gateway(command, log, lambda: "deployed" in log.read_text(encoding="utf-8", errors="replace")
                 and answers(url, "/health") and answers(url, "/health")) as process:
        yield url
        process.send_signal(signal.SIGINT)


def test_streams_are_the_same_and_come_as_they_are_written(deployed: str) -> None:
    first, again = Asked(deployed, session="a"), Asked(deployed, session="b")
    assert first.ended and first.text and first.text == again.text
    assert first.parts > 40, "200 tokens that came in few parts were collected"


def test_a_conversation_stays_with_its_replica(deployed: str) -> None:
    """Of a prompt asked before, the replica's cache has the first page; another replica's has not."""
    prompt = [7, 8, 9] * 50

    def cached(session: str) -> int:
        body = {"model": "story", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        found = httpx.post(f"{deployed}/v1/completions", json=body, headers={"x-session-id": session}, timeout=60)
        return int(found.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("one") == 0
    assert {cached("one") for _ in range(8)} == {128}
    assert 0 in [cached(f"other {number}") for number in range(24)], "all sessions go to one replica"


def test_a_client_that_leaves_ends_its_request(deployed: str) -> None:
    session = {"x-session-id": "leaver"}  # also asks for the gauges of its own replica

    def gauge(name: str) -> float:
        text = httpx.get(f"{deployed}/metrics", headers=session, timeout=60).text
        found = re.search(rf'^{name}{{model="story"}} (\S+)$', text, re.MULTILINE)
        assert found is not None
        return float(found[1])

    before = gauge("sharpi_step_tokens_total")
    body = {"model": "story", "prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True, "n": 8}
    with httpx.stream("POST", f"{deployed}/v1/completions", json=body, headers=session, timeout=60) as response:
        assert next(response.iter_lines()).startswith("data: ")
    for _ in range(600):
        if not gauge("sharpi_requests_running"):
            break
        time.sleep(0.1)
    assert 0 < gauge("sharpi_step_tokens_total") - before < 7000, "its answers were written to their end"


def test_errors_are_those_of_the_server(deployed: str) -> None:
    found = httpx.post(f"{deployed}/v1/messages", json={})
    assert found.status_code == 400 and found.json()["type"] == "error"


@pytest.mark.parametrize(("arguments", "said"), [
    ({"replicas": 2}, "unknown argument 'replicas'"),
    ({"min_replicas": "3", "max_replicas": "2"}, "min_replicas must be 1 to max_replicas, which is 2, not 3"),
    ({"max_replicas": "many"}, "max_replicas must be a whole number, not 'many'"),
])
def test_what_cannot_be_deployed_is_one_line(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        application(arguments)


class Server:
    """As much of a server as health asks for."""

    def __init__(self, loaded: bool, loading: bool, failures: dict[str, str], stalled: list[tuple[str, float]]) -> None:
        self.store = self.watch = self
        self.loaded = lambda: loaded
        self.stalled = lambda: stalled
        self.loading, self.failures = loading, failures


def test_a_replica_that_answers_no_more_is_replaced() -> None:
    def check(*state: Any) -> None:
        require_well(Server(*state))  # type: ignore[arg-type]

    check(True, False, {}, [])
    check(False, True, {"a": "tried before"}, [])
    with pytest.raises(RuntimeError, match="no such file"):
        check(False, False, {"a": "no such file"}, [])
    with pytest.raises(RuntimeError, match="a has finished no step for 61 s"):
        check(True, False, {}, [("a", 61.0)])
