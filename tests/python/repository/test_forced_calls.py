"""`benchmarks/constraints.py --calls`: that forced tool calls are valid, and that faults in them would be told."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import constraints  # noqa: E402
from traffic.forced_calls import faults, request_of  # noqa: E402

PLACE = {"type": "object", "required": ["place"], "properties": {"place": {"enum": ["sea", "house"]}}}
BODY: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": name, "parameters": PLACE}} for name in ("find", "leave")],
    "tool_choice": {"type": "function", "function": {"name": "find"}}, "parallel_tool_calls": False}
GOOD = ([("find", '{"place": "sea"}')], "tool_calls")


def test_forced_calls_are_valid(capsys: pytest.CaptureFixture[str]) -> None:
    constraints.main(["--calls", "6", "--device", "cpu"])
    assert capsys.readouterr().out.startswith("6 forced calls in ")


@pytest.mark.parametrize(("whole", "streamed", "said"), [
    (GOOD, ([("find", '{"place": "house"}')], "tool_calls"), "streamed "),
    (([("find", '{"place": "land"}')], "tool_calls"), None, "the arguments .* are wrong: 'land' is not one of"),
    (([("find", '{"place": ')], "tool_calls"), None, "the arguments .* are wrong: Expecting value"),
    (([("leave", '{"place": "sea"}')], "tool_calls"), None, "leave was called, allowed is"),
    ((GOOD[0], "length"), None, "1 calls, and the answer ended by length"),
    ((GOOD[0] * 2, "tool_calls"), None, "2 calls"),
    (([], "tool_calls"), None, "0 calls"),
])
def test_faults_are_told(whole: Any, streamed: Any, said: str) -> None:
    assert faults(BODY, GOOD, GOOD) == []
    [fault] = faults(BODY, whole, streamed or whole)
    assert re.search(said, fault), fault


def test_requests_are_those_of_their_seeds_and_differ() -> None:
    requests = [request_of(seed, constraints.random_schema) for seed in range(20)]
    assert requests[3] == request_of(3, constraints.random_schema)
    assert len({json.dumps(body) for body in requests}) == 20
    assert {body["tool_choice"] == "required" for body in requests} == {True, False}
