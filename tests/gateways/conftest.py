"""Several servers behind one address: processes with the bundled model, and what stands before them.

`python tests/run.py --gateways` makes an environment with the gateways, which also sees Sharpi.
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from traffic.chat_model import write_chat_model
from traffic.server_process import ServerProcess

STARTING_SECONDS = 180


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_until(true: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + STARTING_SECONDS
    while not true():
        text = log.read_text(encoding="utf-8", errors="replace")[-3000:]
        assert process.poll() is None and time.monotonic() < deadline, text
        time.sleep(0.2)


def answers(url: str, path: str) -> bool:
    """Whether this GET is answered with 200."""
    try:
        return httpx.get(f"{url}{path}", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


@contextlib.contextmanager
def gateway(command: list[str], log: Path, ready: Callable[[], bool]) -> Iterator[subprocess.Popen[bytes]]:
    """A gateway's process, from when it is ready."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_until(ready, process, log)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "story.gguf"
    write_chat_model(path)
    return path


@pytest.fixture
def servers(model: Path, tmp_path: Path) -> Iterator[list[ServerProcess]]:
    """Two servers of the same model."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(ServerProcess(
            ["-m", f"story={model}", "--device", "cpu", "-t", "1", "-c", "1024", "--cache-tokens", "4096"],
            tmp_path / f"server-{number}")) for number in range(2)]


class Asked:
    """What a client sees of a streamed answer. parts: in how many it was sent."""

    def __init__(self, url: str, path: str = "/v1/chat/completions", tokens: int = 200, session: str = "",
                 said: str = "Tell me of the sea.") -> None:
        body = {"model": "story", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
                "messages": [{"role": "user", "content": said}]}
        headers = {"x-session-id": session} if session else {}
        with httpx.stream("POST", f"{url}{path}", json=body, headers=headers, timeout=120) as response:
            response.raise_for_status()
            parts = list(response.iter_raw())
        self.text = "".join(re.findall(r'"delta": ?\{"content": ?"((?:[^"\\]|\\.)*)"', b"".join(parts).decode()))
        self.ended = b"".join(parts).endswith(b"data: [DONE]\n\n")
        self.parts = len(parts)
