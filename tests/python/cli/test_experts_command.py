"""`sharpi experts`, and what the other commands do with expert statistics."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from fake_model import Script, cli_runner, install
from PIL import Image
from saved_files import random_stats, table

from sharpi.benchmark import Benchmark
from sharpi.cli import main
from sharpi.planning.expert_stats import ExpertStats, Predictor

HITS = {"hit_rate": 0.7423, "slots": 24, "resident": 24}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return install(monkeypatch)


def sharpi(*arguments: str | Path, **options: Any) -> Result:
    return cli_runner().invoke(main, list(map(str, arguments)), catch_exceptions=False, prog_name="sharpi", **options)


def saved(tmp_path: Path, **changes: Any) -> Path:
    """A file of layers 1, 2 and 7, with numbers that are easy to see again."""
    stats = random_stats(
        uses=table([100, 20, 30, 40, 60], [10] * 8, [900, 90, 10]), hits=table([30, 20], [4] * 8, [0]),
        computed=table([10], [1] * 8, [0]), fetched=table([0, 20], [3] * 8, [0]), loads=table([5, 6], [0] * 8, [7, 1]),
        evictions=table([0, 3], [0] * 8, [1, 1]))
    path = tmp_path / "stats.json"
    replace(stats, **changes).save(path)
    return path


def rows(text: str) -> list[list[str]]:
    return [line.replace(" %", "%").split() for line in text.splitlines() if line[:5].strip().isdigit()]


def sentences(text: str) -> str:
    """What follows the table, unwrapped."""
    return " ".join(text[text.index("Uses:") :].split())


# --- experts ------------------------------------------------------------------------------------------------------


def test_the_table_has_a_line_for_each_layer(tmp_path: Path) -> None:
    result = sharpi("experts", saved(tmp_path))
    assert result.exit_code == 0 and result.stderr == ""
    assert result.stdout.startswith("tiny (qwen3moe): 3 layers of 3 to 8 experts\n")
    one, two, seven = rows(result.stdout)
    assert (one[:3], one[-3:]) == (["1", "250", "62.5%"], ["11", "3", "40.0%"])
    assert (two[:3], two[-3:]) == (["2", "80", "50.0%"], ["0", "0", "12.5%"])
    assert seven == ["7", "1,000", "-", "8", "2", "90.0%"]  # nothing to draw a bar of
    assert len(one[3]) == 8 and len(two[3]) == 6  # of 12
    assert max(map(len, result.stdout.splitlines())) <= max(80, len(str(tmp_path)) + 40)


def test_totals_are_said_in_sentences(tmp_path: Path) -> None:
    said = sentences(sharpi("experts", saved(tmp_path)).stdout)
    assert "Uses: 1,330," in said
    assert (
        "Steps of few tokens made 144 choices: 82 (56.9 %) were found in slots, the CPU computed 18, and the GPU"
        " fetched 44."
    ) in said
    assert "Slots: 7 for 16 experts (43.8 %), 6 filled at the end; 19 loads, 5 evictions." in said
    assert ("Predictor next-token (the next token uses this token's experts) named 1,000 experts: 37.0 % of"
            " them were used, and they were 74.0 % of the experts used.") in said
    assert "Predictor next-layer" in said and said.count("never tested") == 1


def test_without_slots_there_is_no_hit_rate(tmp_path: Path) -> None:
    nothing = np.zeros((3, 8), np.uint64)
    result = sharpi("experts", saved(tmp_path, hits=nothing, computed=nothing, fetched=nothing, capacity=0, resident=0,
                                     predictors=(Predictor("my own", 4, 1, 2),)))
    assert [row[2] for row in rows(result.stdout)] == ["-"] * 3
    said = sentences(result.stdout)
    assert "no step had slots to look in" in said and "Slots:" not in said
    assert (
        "Predictor my own named 4 experts: 25.0 % of them were used, and they were 50.0 % of the experts used." in said
    )


def test_the_picture_is_beside_the_file_or_where_it_is_asked_for(tmp_path: Path) -> None:
    path = saved(tmp_path)
    for arguments, picture in (((), tmp_path / "stats.png"), (("--png", tmp_path / "map"), tmp_path / "map")):
        result = sharpi("experts", path, *arguments)
        assert result.stdout.endswith(f"\nHeat map: {picture}\n")
        assert Image.open(io.BytesIO(picture.read_bytes())).format == "PNG"
    assert sorted(os.listdir(tmp_path)) == ["map", "stats.json", "stats.png"]


def test_the_statistics_are_never_replaced_by_the_picture(tmp_path: Path) -> None:
    path = saved(tmp_path)
    named = path.rename(tmp_path / "stats.png")
    content = named.read_bytes()
    for arguments in ((), ("--png", named), ("--png", tmp_path / "." / "stats.png")):
        result = sharpi("experts", named, *arguments)
        assert result.exit_code == 2 and "replace" in result.stderr and result.stderr.count("\n") == 1
        assert named.read_bytes() == content


def test_what_cannot_be_read_or_written_is_one_line(tmp_path: Path) -> None:
    path = saved(tmp_path)
    result = sharpi("experts", path, "--png", tmp_path / "no" / "map.png")
    assert result.exit_code == 2 and rows(result.stdout)
    assert result.stderr.startswith("sharpi: error: ") and "map.png" in result.stderr and result.stderr.count("\n") == 1
    path.write_text("{}")
    for bad in (path, tmp_path / "none.json", tmp_path):
        result = sharpi("experts", bad)
        assert result.exit_code == 2 and result.stdout == "" and result.stderr.count("\n") == 1
        assert str(bad) in result.stderr


def test_names_from_the_file_are_shown_as_they_are(tmp_path: Path) -> None:
    name = "\x1b[31m[red]:smile:[/red]"
    result = sharpi("experts", saved(tmp_path, model=name, predictors=(Predictor(name, 1, 1, 1),)))
    assert "\x1b" not in result.stdout
    assert result.stdout.startswith("\\x1b[31m[red]:smile:[/red] (qwen3moe)")
    assert "Predictor \\x1b[31m[red]:smile:[/red] named" in sentences(result.stdout)


def test_a_terminal_of_ascii_gets_bars_of_ascii(tmp_path: Path) -> None:
    path = saved(tmp_path)
    done = subprocess.run([sys.executable, "-c", "from sharpi.cli import main; main()", "experts", path],
                          env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=True)
    text = done.stdout.decode("ascii")
    assert [row[3] for row in rows(text.replace("|", " "))[:2]] == ["########", "######"]
    assert "?" not in text


# --- the other commands -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["run", "-p", "x"], ["chat"], ["bench", "--prefill", "0", "--decode", "0"]])
def test_commands_hand_the_files_on(command: list[str], script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Benchmark, "prefill", lambda self, tokens: 1.0)
    assert sharpi(*command, "--expert-stats", "to.json", "--warm", "from.json", input="").exit_code == 0
    assert sharpi(*command, "--plan", "plan.json", "--warm", "from.json", input="").exit_code == 0, "a plan has none"
    assert sharpi(*command, input="").exit_code == 0
    assert [(load["expert_stats"], load["warm"]) for load in script.loads] == [
        ("to.json", "from.json"), (None, "from.json"), (None, None)]


@pytest.mark.parametrize(("experts", "said"), [
    (HITS, "; 74.2 % of experts from slots\n"), (None, "67.9 tokens/s\n"), ({**HITS, "slots": 0}, "67.9 tokens/s\n"),
    ({**HITS, "hit_rate": None}, "67.9 tokens/s\n"), ({**HITS, "hit_rate": 0.0}, "; 0.0 % of experts from slots\n"),
    ({**HITS, "disk": {"bytes": 3_210_000_000, "waited": 2.14}},
     "; 74.2 % of experts from slots; 3.2 GB read from the disk, waited for 2.1 s\n")])
def test_the_closing_line_has_the_hit_rate_where_there_are_slots(experts: Any, said: str, script: Script) -> None:
    script.experts = experts
    assert sharpi("run", "-p", "Once").stderr.endswith(said)


def test_bench_shows_the_hit_rate(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Benchmark, "prefill", lambda self, tokens: 1.0)
    script.experts = HITS
    command = ("bench", "--prefill", "0", "--decode", "0")
    assert "slots for 24 experts, hit rate 74.2 %" in sharpi(*command).stdout
    assert json.loads(sharpi(*command, "--json").stdout)["experts"] == HITS
    script.experts = {**HITS, "slots": 0}
    assert "slots" not in sharpi(*command).stdout


def test_a_run_of_the_bundled_model_leaves_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stats.json"
    monkeypatch.setenv("SHARPI_EXPERT_STATS", str(path))
    result = sharpi("run", "-p", "Once upon a time", "-n", "12", "--device", "cpu", "--no-stats")
    assert (result.exit_code, result.stderr) == (0, "")
    stats = ExpertStats.load(path)
    assert stats.uses.sum() > 0 and len(set(stats.uses.sum(axis=1).tolist())) == 1
    assert f"Uses: {int(stats.uses.sum()):,}," in sharpi("experts", path).stdout
    again = sharpi("run", "-p", "Once", "-n", "1", "--device", "cpu", "--no-stats", "--warm", path, "--expert-stats",
                   tmp_path / "other.json")
    assert (again.exit_code, again.stderr) == (0, "sharpi: nothing is warmed: no experts are in slots\n")


def test_ctrl_c_loses_no_statistics(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    # Without its end token it goes on until it is told to stop.
    process = subprocess.Popen(
        [sys.executable, "-c", "from sharpi.cli import main; main()", "run", "-p", "Once", "-n", "-1", "-t", "1",
         "--device", "cpu", "--logit-bias", "0=-inf", "--expert-stats", path], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert process.stdout.read(12)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, process.stderr.read()
    assert ExpertStats.load(path).uses.sum() > 0
