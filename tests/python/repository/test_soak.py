"""`benchmarks/soak.py`: that it finds nothing left of some dozens of requests, and that it would say so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import soak  # noqa: E402


def test_nothing_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    soak.main(["--device", "cpu", "--requests", "60", "--streams", "8"])
    said = capsys.readouterr().out.splitlines()
    assert "of the time of passes for" in said[1]
    assert len(said) == 3 and said[-1].startswith("60 requests in ") and "'cancelled'" in said[-1]


def test_a_lost_request_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(*_: object) -> str:
        return "None"

    monkeypatch.setattr(soak, "one", lost)
    with pytest.raises(SystemExit, match="requests were lost"):
        soak.main(["--device", "cpu", "--requests", "12", "--streams", "8"])
