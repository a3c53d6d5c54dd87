"""`sharpi serve` in a process of its own, and what can be seen of it from outside."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import httpx

__all__ = ["ServerProcess"]

_STARTING_SECONDS = 120
_NOT_CLOSED = ("01", "08")  # the kernel's numbers of the states ESTABLISHED and CLOSE_WAIT


class ServerProcess:
    """A server on a free port of this machine, ready when the `with` block begins.

    log: where its messages go. Raises `RuntimeError` with the log if it does not start.
    """

    def __init__(self, options: Sequence[str], log: Path) -> None:
        self._options = options
        self._log = log
        self.url = ""

    def __enter__(self) -> ServerProcess:
        with self._log.open("wb") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "sharpi", "serve", "--port", "0", *self._options],
                                            stdout=log, stderr=log)
        try:
            self._await(lambda: bool(self._address()))
            self.url = self._address()
            self._await(self._healthy)
        except BaseException:
            self.process.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def _address(self) -> str:
        found = re.search(r"listening at (http://\S+)", self.log())
        return found[1] if found else ""

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def _await(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _STARTING_SECONDS
        while not condition():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"the server does not start: {self.log()}")
            time.sleep(0.05)

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def resident_bytes(self) -> int:
        """The memory of the process that is in RAM, without files that it only maps."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return int(re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)[1]) << 10  # type: ignore[index]

    def connections(self) -> int:
        """The connections that it has not closed, whether or not the clients have."""
        rows = [row.split() for row in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
        return sum(row[1].endswith(f":{self.port:04X}") and row[3] in _NOT_CLOSED for row in rows)

    def gauges(self) -> dict[str, float]:
        """The values in /metrics that have no label but the model's, summed over models, by name."""
        found: dict[str, float] = {}
        for name, value in re.findall(r'^(sharpi_\w+)\{model="[^"]*"\} (\S+)$', httpx.get(f"{self.url}/metrics").text,
                                      re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def busy_slots(self) -> int:
        return sum(slot["is_processing"] for slot in httpx.get(f"{self.url}/slots").json())
