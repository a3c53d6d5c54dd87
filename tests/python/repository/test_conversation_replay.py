"""`benchmarks/traffic/conversation.py`: what turns find in the cache, and that it refuses other answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from traffic import conversation  # noqa: E402


def test_turns_find_all_but_the_last_partial_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    conversation.main(["--device", "cpu", "--threads", "1", "--turns", "4", "--tokens", "280", "--answer", "4",
                       "--json", str(path)])
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [turn["before"] for turn in found["turns"]] == [0, 70, 140, 210]
    for turn in found["turns"]:
        assert turn["reused"] == turn["after_restart"] == turn["before"] // 64 * 64
    assert [demand["requests"] for demand in found["demands"]] == [3, 6, 14]
    assert found["demands"][0]["spilled_pages"] == 0 < found["demands"][2]["spilled_pages"]
    # Of 66 tokens of prompt and 3 of answer, of 136 + 3 and of 206 + 3, all but whole pages.
    again = found["again"]
    assert (again["lost_tokens"], again["answers_again_tokens"], again["cuts_again_tokens"]) == (0, 3 * 3, 2 + 8 + 14)
    assert 0 < again["share"] < 1
    said = capsys.readouterr().out
    assert "9 tokens of answers, 24 of prompts after their last page, 0 lost" in said
    assert "| 4 | 276 | 210 | 192 | 192 |" in said and "x the rest alone" in said and "| 300% | 14 |" in said


def test_other_answers_end_it() -> None:
    conversation.require(True, "here")
    with pytest.raises(SystemExit, match="the answers differ after a restart"):
        conversation.require(False, "after a restart")


def test_turns_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SystemExit, match="20 turns with answers of 16 tokens do not fit into 200 tokens"):
        conversation.main(["--device", "cpu", "--threads", "1", "--tokens", "200"])
