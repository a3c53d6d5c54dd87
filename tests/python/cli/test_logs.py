"""The log: what the library says under the name `sharpi`, and where the commands put it."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from fake_model import cli_runner
from tiny_models import MODELS, write

from sharpi import Model
from sharpi.cli import main

RUN = ["run", "--device", "cpu", "-t", "1", "--temp", "0", "-n", "6"]
PROMPT = "Once upon a time"


def sharpi(*arguments: str) -> Result:
    return cli_runner().invoke(main, arguments, catch_exceptions=False, prog_name="sharpi")


@pytest.fixture(scope="module")
def answer() -> str:
    return sharpi(*RUN, "--no-echo", "-p", PROMPT).stdout.strip()


def test_the_library_logs_and_says_nothing_by_itself() -> None:
    program = ("from sharpi import Model\n"
               "with Model.load(device='cpu', threads=1) as model: list(model.generate('Once', max_tokens=2))\n")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert (done.stdout, done.stderr) == ("", "")


def test_levels(caplog: pytest.LogCaptureFixture, answer: str) -> None:
    caplog.set_level(logging.DEBUG, "sharpi")
    with Model.load(device="cpu", threads=1) as model:
        list(model.generate(PROMPT, max_tokens=6, temperature=0.0))
    said = {level: [r.getMessage() for r in caplog.records if r.levelno == level] for level in (10, 20)}
    assert any("Plan for" in line for line in said[logging.INFO])
    assert any("is loaded after" in line for line in said[logging.INFO])
    assert any("6 tokens generated" in line for line in said[logging.DEBUG])
    assert all(record.name.startswith("sharpi") for record in caplog.records)
    assert PROMPT not in caplog.text and answer not in caplog.text and len(answer) > 5


def test_verbose_goes_to_standard_error(answer: str) -> None:
    plain, verbose, very = (sharpi(*RUN, "--no-echo", "-p", PROMPT, *more) for more in ([], ["-v"], ["-vv"]))
    assert plain.stdout == verbose.stdout == very.stdout
    assert "is loaded after" not in plain.stderr
    assert "is loaded after" in verbose.stderr and "tokens generated in" not in verbose.stderr
    assert "is loaded after" in very.stderr and "6 tokens generated in" in very.stderr
    assert all(line.startswith(("sharpi: ", "prompt ")) for line in very.stderr.splitlines())


def test_a_log_file_is_appended_to_and_has_all_but_texts(answer: str, tmp_path: Path) -> None:
    log = tmp_path / "sharpi.log"
    for count in (1, 2):
        result = sharpi(*RUN, "-p", PROMPT, "--log-file", str(log))
        assert result.exit_code == 0 and "is loaded after" not in result.stderr
        text = log.read_text(encoding="utf-8")
        assert text.count("is loaded after") == text.count("6 tokens generated in") == count
    assert PROMPT not in text and answer not in text
    assert logging.getLogger("sharpi").handlers == [handler for handler in logging.getLogger("sharpi").handlers
                                                    if isinstance(handler, logging.NullHandler)], "none may stay"


def test_a_line_that_people_have_seen_is_in_the_file_only(tmp_path: Path) -> None:
    log, model = tmp_path / "sharpi.log", write(tmp_path / "m.gguf", MODELS["llama"])
    result = sharpi("bench", "-m", str(model), "--device", "cpu", "--prefill", "0", "--decode", "0", "-v", "--log-file",
                    str(log), "--expert-stats", str(tmp_path / "stats.json"))
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("no expert statistics are written") == 1
    assert log.read_text(encoding="utf-8").count("no expert statistics are written") == 1


@pytest.mark.parametrize("command", [["run", "-p", "a"], ["plan"], ["inspect"], ["bench"], ["hardware"], ["list"],
                                     ["experts", "x.json"], ["pull", "a/b"], ["rm", "a/b"], ["chat"]])
def test_a_log_file_that_cannot_be_written_is_one_line(command: list[str], tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "x.log", tmp_path, "a\0b"):
        result = sharpi(*command, "--log-file", str(path))
        assert result.exit_code == 2 and result.stdout == ""
        assert result.stderr.count("\n") == 1 and "the log cannot be written there" in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_disk_that_gets_full_ends_the_log_and_not_the_work(answer: str) -> None:
    result = sharpi(*RUN, "--no-echo", "--no-stats", "-p", PROMPT, "--log-file", "/dev/full")
    assert result.exit_code == 0 and result.stdout.strip() == answer
    assert result.stderr.count("\n") == 1 and "/dev/full: the log ends here" in result.stderr


def test_plan_keeps_its_own_verbose(tmp_path: Path) -> None:
    log = tmp_path / "sharpi.log"
    result = sharpi("plan", "--device", "cpu", "-v", "--log-file", str(log))
    assert result.exit_code == 0 and "layer 0" in result.stdout
    assert "tensors" in log.read_text(encoding="utf-8")
