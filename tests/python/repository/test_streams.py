"""`benchmarks/streams.py`: that it serves the streams together, and that its figures fit together."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sharpi.model import BUNDLED_MODEL

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import streams  # noqa: E402


def test_a_share_of_the_values_does_not_exceed_it() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert [streams.part(values, share) for share in (0.01, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert streams.part([7.0], 0.99) == 7.0


@pytest.mark.parametrize("long", [0, 200])
def test_streams_are_measured(long: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    streams.main(["-m", str(BUNDLED_MODEL), "--device", "cpu", "--threads", "1", "--streams", "1", "6", "--prompt", "9",
                  "--tokens", "20", "--long", str(long), "--json", str(file)])
    assert len(capsys.readouterr().out.splitlines()) == 4
    one, six = json.loads(file.read_text())
    assert (one["streams"], six["streams"]) == (1, 6)
    most = 2 if long else 1  # the long prompt has a token of answer too
    assert 1.0 <= one["rows"] <= most and 3.0 < six["rows"] <= 7.0
    for figures in (one, six):
        assert 0 < figures["first_token_median"] <= figures["first_token_p99"]
        assert 0 < figures["gap_median"] <= figures["gap_p99"] <= figures["gap_largest"]
        assert figures["tokens_per_second"] > 0
