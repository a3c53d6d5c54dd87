"""`sharpi chat` with SmolLM2 at a pseudo-terminal, used as a person would."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pexpect
import pytest
from asking import ANSWER, QUESTION

PROGRAM = "import sys; from sharpi.cli import main; sys.argv[0] = 'sharpi'; main()"
ROME = "The capital of Italy is Rome."


@pytest.fixture
def terminal(smollm2: Path, tmp_path: Path) -> pexpect.spawn:
    """A chat that is waiting for its first question."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "TERM": "dumb", "COLUMNS": "200"}
    child = pexpect.spawn(sys.executable, ["-c", PROGRAM, "chat", "-m", str(smollm2), "--device", "cpu", "-c", "512",
                                           "--temp", "0"], env=environment, encoding="utf-8", timeout=120)
    child.expect_exact("> ")
    yield child
    child.close(force=True)


def turn(terminal: pexpect.spawn, question: str) -> str:
    """The output between a question and the next prompt."""
    terminal.sendline(question)
    terminal.expect_exact(question)
    terminal.expect_exact("\n> ")
    return terminal.before


def test_several_turns(terminal: pexpect.spawn) -> None:
    first = turn(terminal, QUESTION)
    assert ANSWER in first and "generated" in first and "<|im" not in first
    second = turn(terminal, "What about Italy?")
    assert ROME in second, "it knows what was asked before"
    assert "kept from before" in second, "what was said before is not computed again"
    turn(terminal, "/reset")
    fresh = turn(terminal, QUESTION)
    assert ANSWER in fresh
    third = turn(terminal, "What about Italy?")
    assert ROME in third
    terminal.sendline("/exit")
    terminal.expect(pexpect.EOF)
    terminal.wait()
    assert terminal.exitstatus == 0


def test_a_reset_forgets(terminal: pexpect.spawn) -> None:
    turn(terminal, QUESTION)
    turn(terminal, "/reset")
    assert ROME not in turn(terminal, "What about Italy?")
    terminal.sendeof()
    terminal.expect(pexpect.EOF)
    terminal.wait()
    assert terminal.exitstatus == 0


def test_an_interrupted_answer_leaves_the_chat_usable(terminal: pexpect.spawn) -> None:
    terminal.sendline("Tell me a very long story about a fox.")
    terminal.expect("fox")  # the question's echo
    terminal.expect("[A-Za-z]{3}")
    terminal.sendintr()
    terminal.expect_exact("\n> ")
    turn(terminal, "/reset")
    assert ANSWER in turn(terminal, QUESTION)
