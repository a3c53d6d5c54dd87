"""A short run of the fuzzer with a fixed seed, and the proof that it notices what it is there to notice.

Longer ones are made by hand: `python tests/fuzz/fuzz.py --count 100000`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[2] / "fuzz"
sys.path.append(str(FUZZ))

import fuzz  # noqa: E402
import inputs  # noqa: E402

SEED = 2026
COUNTS = {"header": 1500, "metadata": 500, "tokenizer": 250, "template": 250, "plan": 1500}


@pytest.mark.parametrize("target", inputs.TARGETS)
def test_nothing_gets_out_of_hand(target: str, tmp_path: Path) -> None:
    command = [sys.executable, FUZZ / "fuzz.py", "--seed", str(SEED), "--target", target,
               "--count", str(COUNTS[target]), "--save", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert f"{COUNTS[target]:,} inputs" in done.stdout
    assert not done.stderr  # warnings too


@pytest.mark.parametrize("target", inputs.TARGETS)
def test_an_input_is_made_from_its_number_alone(target: str) -> None:
    some = [inputs.make(target, SEED, index) for index in range(20)]
    assert some == [inputs.make(target, SEED, index) for index in reversed(range(20))][::-1]
    assert len({given.content for given in some}) > 10 and some[0] != inputs.make(target, SEED + 1, 0)


def test_most_kinds_of_ends_are_reached(tmp_path: Path) -> None:
    """Inputs that are all refused by the same check would try nothing behind it."""
    ends = {fuzz.judge(inputs.make("metadata", SEED, index), tmp_path) for index in range(150)}
    assert {"the model runs", "the model is refused", "the tokenizer is refused"} <= ends and len(ends) > 8


@pytest.mark.parametrize(("work", "how"), [
    (lambda _: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL"),
    (lambda _: (fuzz.set_clock(0.01), [0 for _ in iter(int, 1)]), "more than 20 seconds"),
    (lambda _: os._exit(7), "ended with 7"),
])
def test_a_child_that_ends_badly_is_a_failure(work: object, how: str) -> None:
    assert fuzz.in_child(work)[1] == how


@pytest.mark.parametrize("error", [RuntimeError("a bug"), MemoryError(), RecursionError(), ValueError("two\nlines")])
def test_an_exception_of_another_kind_is_a_failure(error: Exception, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> str:
        raise error

    monkeypatch.setitem(fuzz.USES, "plan", fail)
    with pytest.raises(fuzz.Failure, match=type(error).__name__):
        fuzz.judge(inputs.Input("plan", b""), tmp_path)


def test_a_failing_input_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "fails", lambda given: "it fails" if b"\xff" in given.content else "")
    content = bytes(300) + b"\xff" + bytes(200)
    assert fuzz.minimized(inputs.Input("plan", content)).content == b"\xff"


def test_a_bug_is_found_and_saved_with_its_seed(tmp_path: Path) -> None:
    """A reader that takes the type of a value for granted, as one is soon written."""
    program = ("import sys; sys.path.append(sys.argv.pop(1)); import fuzz, sharpi.planning.plan\n"
               "sharpi.planning.plan._READERS['device'] = lambda value: value.lower()\n"
               "sys.exit(fuzz.main())")
    command = [
        sys.executable,
        "-c",
        program,
        FUZZ,
        "--seed",
        str(SEED),
        "--target",
        "plan",
        "--count",
        "3000",
        "--save",
        tmp_path,
    ]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 1 and f"with seed {SEED} is out of hand" in done.stdout, done.stdout + done.stderr
    assert "AttributeError" in done.stdout and "'lower'" in done.stdout
    saved, = tmp_path.iterdir()
    assert saved.name.startswith(f"failing-plan-{SEED}-")
    # Without the bug it is an input like any other.
    again = subprocess.run([sys.executable, FUZZ / "fuzz.py", "--replay", saved], capture_output=True, check=False)
    assert again.returncode == 0
