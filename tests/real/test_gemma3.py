"""A checkpoint of an architecture that Sharpi does not know: Sharpi says so, and does not try to run it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from sharpi.cli import main


def test_inspect_shows_it_and_says_that_it_does_not_run_here(gemma3: Path) -> None:
    result = CliRunner().invoke(main, ["inspect", str(gemma3)])
    assert result.exit_code == 0
    line, = [line for line in result.stdout.splitlines() if "runs here" in line]
    assert " no" in line and "gemma3" in line
    assert "268,098,176" in result.stdout and "Q4_K" in result.stdout


@pytest.mark.parametrize("command", [["run", "-p", "Hello"], ["plan"]])
def test_it_is_refused_in_one_line(command: list[str], gemma3: Path) -> None:
    result = CliRunner().invoke(main, [*command, "-m", str(gemma3)])
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and "gemma3" in result.stderr
