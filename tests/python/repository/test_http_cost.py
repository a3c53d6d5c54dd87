"""`benchmarks/http_cost.py`: that both ways answer all that is asked, and that its figures fit together."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import http_cost  # noqa: E402


def test_both_ways_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    http_cost.main(["--device", "cpu", "--tokens", "16", "--requests", "3", "--streams", "1", "3", "--json", str(file)])
    assert len(capsys.readouterr().out.splitlines()) == 6
    rows = json.loads(file.read_text(encoding="utf-8"))
    assert [(row["where"], row["streams"]) for row in rows] == [("scheduler", 1), ("scheduler", 3), ("HTTP", 1),
                                                                ("HTTP", 3)]
    assert all(row["first_token"] > 0 and row["tokens_per_second"] > 0 and row["processor"] >= 0 for row in rows)
    assert all(row["main_thread"] > 0 for row in rows)
