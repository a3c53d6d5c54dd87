"""Programs that people point at a server, unpatched, against `sharpi serve` with a real model.

They run in an environment of their own, without Sharpi: `python tests/run.py --clients` makes it, and says by
SHARPI_PYTHON which Python has Sharpi. The model is SmolLM2-135M, which tests/real/checkpoints.py fetches.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "real"))

from checkpoints import SMOLLM2, cached

STARTING_SECONDS = 120


@dataclass(frozen=True)
class Served:
    """A server: its address, the name of its model, the model's file, and the Python that has Sharpi."""

    url: str
    model: str
    file: Path
    python: str

    def ask_sharpi(self, code: str, *arguments: str) -> Any:
        """What `code` prints as JSON, run by the Python that has Sharpi, with the model's file as its first argument.
        """
        done = subprocess.run([self.python, "-c", code, str(self.file), *arguments], capture_output=True, text=True,
                              check=True)
        return json.loads(done.stdout)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = cached(SMOLLM2)
    if file is None:
        pytest.skip(f"{SMOLLM2.name} is not here: python tests/real/checkpoints.py fetches it")
    python, port = os.environ.get("SHARPI_PYTHON", sys.executable), free_port()
    log = tmp_path_factory.mktemp("server") / "log"
    url = f"http://127.0.0.1:{port}"
    with open(log, "w", encoding="utf-8") as output:
        server = subprocess.Popen([python, "-m", "sharpi", "serve", "-m", str(file), "--device", "cpu", "--port",
                                   str(port), "-c", "4096"], stdout=output, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + STARTING_SECONDS
        while True:
            assert server.poll() is None and time.monotonic() < end, log.read_text(encoding="utf-8")
            try:
                if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        name = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        yield Served(url, name, file, python)
    finally:
        server.terminate()
        assert server.wait(30) == 0, log.read_text(encoding="utf-8")
