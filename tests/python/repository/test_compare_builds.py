"""`benchmarks/compare_builds.py`: what it asks for, and that what it says of two builds follows from the readings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sharpi
from sharpi.model import BUNDLED_MODEL

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
BUILD = Path(sharpi.__file__).resolve().parent.parent
sys.path.insert(0, str(BENCHMARKS))

import compare_builds  # noqa: E402


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A comparison on the CPU, as short as it can be."""
    command = [sys.executable, BENCHMARKS / "compare_builds.py", BUNDLED_MODEL, "--device", "cpu", "--rounds", "2",
               "--repeat", "1", "--prefill", "16", "--decode", "4", "--turns", "2", *arguments]
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False,
                          env={**os.environ, "COLUMNS": "200"})


def test_a_model_is_measured_with_each_amount_of_vram(tmp_path):
    asked = [(job.model, job.vram) for job in compare_builds.jobs(["a.gguf", "b.gguf@all,12GiB"])]
    assert asked == [("a.gguf", None), ("b.gguf", None), ("b.gguf", "12GiB")]
    odd = tmp_path / "model@home.gguf"
    odd.touch()
    assert [(job.model, job.vram) for job in compare_builds.jobs([str(odd)])] == [(str(odd), None)]


def test_a_measurement_can_be_made_in_the_first_rounds_only():
    assert compare_builds.rounds_of(["load", "turns:2", "first:9"], 5) == {"load": 5, "turns": 2, "first": 5}
    for wrong in ("speed", "turns:", "turns:x"):
        with pytest.raises(SystemExit, match="--measure takes load, decode"):
            compare_builds.rounds_of([wrong], 5)


@pytest.mark.parametrize(("name", "old", "new", "said"), [
    ("decode of 128, tokens/s", [100, 102, 101], [99, 99.5, 100], ""),  # 1.5 % down
    ("decode of 128, tokens/s", [90, 102, 101], [95, 95, 95], "slower, within old's range"),
    ("decode of 128, tokens/s", [100, 102, 101], [95, 95, 95], "slower"),
    ("decode of 128, tokens/s", [100, 102, 101], [200, 200, 200], ""),
    ("load, s", [1.0, 1.0, 1.4], [1.3, 1.3, 1.3], "slower, within old's range"),
    ("first token after 8, ms", [5, 5, 5], [6, 6, 6], "slower"),
    ("first token after 8, ms", [5, 5, 5], [2, 2, 2], ""),
    ("step, ngram 1, of a plain one", [1.2], [1.5], ""),  # a plain step may have become faster
    ("VRAM taken, GiB", [5.0], [6.0], ""),
])
def test_slower_is_what_is_worse_by_more_than_the_tolerance(name, old, new, said):
    assert compare_builds.judgement(name, old, new, 0.02) == said


def test_a_build_compared_with_itself(tmp_path):
    kept = tmp_path / "readings.json"
    done = run("--old", BUILD, "--new", BUILD, "--measure", "load", "first", "rest:1", "turns:1", "--json", kept)
    assert done.returncode == 0, done.stderr
    job, = json.loads(kept.read_text())["jobs"]
    for side in compare_builds.BUILDS:
        first, second = (reading["readings"] for reading in job[side])
        assert {name for name in first if name.startswith("turn ")} == {"turn 1, first token, ms",
                                                                        "turn 2, first token, ms"}
        assert not any(name.startswith("turn ") for name in second)
        assert all(second[f"first token after {tokens}, ms"] > 0 for tokens in compare_builds.FIRST)
        assert all(first[f"first token after {tokens} more, ms"] > 0 for tokens in compare_builds.REST)
        assert 0 < second["load, s"] < second["load to first token, s"]
    # The answer's last token and the 64 new ones; the CPU has one arithmetic, so nothing is evaluated again.
    assert "| later turns, tokens evaluated | 65.0 | 65.0 | 1.000 |" in done.stdout
    assert "| 1 more, tokens evaluated | 1.00 | 1.00 | 1.000 |" in done.stdout
    shown = subprocess.run([sys.executable, BENCHMARKS / "compare_builds.py", "--show", kept], capture_output=True,
                           text=True, check=True)
    assert shown.stdout == done.stdout


def test_a_folder_without_a_build_is_said_and_nothing_else_is_measured_in_its_place(tmp_path):
    done = run("--old", tmp_path, "--new", BUILD, "--measure", "load")
    assert done.returncode == 1
    assert f"the old build failed: exit code 1: {tmp_path.resolve()} has no sharpi package" in done.stdout
