"""`benchmarks/http_streams.py`: that both servers are asked the same, and that one that fails does not end the run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sharpi.model import BUNDLED_MODEL

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import http_streams  # noqa: E402

# Understands the options that the benchmark gives `llama-server`, and fails for two streams.
_OTHER_SERVER = f"""#!/bin/sh
while [ $# -gt 0 ]; do
    case $1 in -m) model=$2;; --port) port=$2;; -np) streams=$2;; -c) context=$2;; esac
    shift
done
[ "$streams" = 2 ] && echo "no room" && exit 3
exec {sys.executable} -m sharpi serve -m "$model" --port "$port" -np "$streams" -c $((context / streams)) \\
    --cache-tokens "$context" --device cpu
"""


def test_both_servers_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, file = tmp_path / "other-server", tmp_path / "figures.json"
    other.write_text(_OTHER_SERVER, encoding="utf-8")
    other.chmod(0o755)
    http_streams.main(["-m", str(BUNDLED_MODEL), "--device", "cpu", "--tokens", "32", "--streams", "1", "2",
                       "--llama-server", str(other), "--json", str(file)])
    told = capsys.readouterr()
    assert len(told.out.splitlines()) == 2 + 5 and "llama-server, 2 streams: llama-server does not start" in told.err
    rows = json.loads(file.read_text(encoding="utf-8"))
    assert [(row["engine"], row["streams"]) for row in rows] == [
        ("scheduler", 1), ("scheduler", 2), ("sharpi serve", 1), ("sharpi serve", 2), ("llama-server", 1)]
    assert all(row["all_streams"] > 0 and row["first_p99"] >= row["first_median"] > 0 for row in rows)
    assert [row["main_thread"] is not None for row in rows] == [False, False, True, True, False]
