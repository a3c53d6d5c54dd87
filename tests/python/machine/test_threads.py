"""How many threads run: as many as were asked for, but no more than there are cores, and a line says so.

The core itself takes any number (tests/cpp/cpu/test_thread_pool.cpp)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from sharpi.cli import main
from sharpi.machine import hardware
from sharpi.machine.hardware import core_count, usable_threads
from sharpi.machine.profile import ASSUMED
from sharpi.model import Model

CUT = "1000 threads are too many for 3 cores: 3 will run"


@pytest.fixture
def three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "core_count", lambda: 3)


def sharpi(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, [str(each) for each in arguments])
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.usefixtures("three_cores")
@pytest.mark.parametrize(("asked", "used", "lines"), [
    (None, 3, []), (1, 1, []), (2, 2, []), (3, 3, []), (np.int64(2), 2, []),
    (4, 3, ["4 threads are too many for 3 cores: 3 will run"]), (1000, 3, [CUT])])
def test_more_threads_than_cores_are_cut(asked: int | None, used: int, lines: list[str]) -> None:
    said: list[str] = []
    threads = usable_threads(asked, said.append)
    assert (threads, said) == (used, lines) and type(threads) is int
    assert usable_threads(asked) == used


def test_one_core_and_another_machines_cores() -> None:
    said: list[str] = []
    assert usable_threads(5, said.append, cores=1) == 1
    assert said == ["5 threads are too many for 1 core: 1 will run"]
    assert usable_threads(5, cores=64) == 5


def test_a_process_bound_to_one_core_runs_one_thread() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert core_count() == 1 and usable_threads(None) == 1 and usable_threads(1000) == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("three_cores")
def test_a_model_says_how_many_threads_run(tmp_path: Path) -> None:
    said: list[str] = []
    with Model.load(device="cpu", context=64, threads=1000, notice=said.append) as model:
        assert said == [CUT] and model.threads == model.plan.threads == 3
        whole = model.plan.to_dict()
        assert model.logits([1, 2, 3]).shape[0] == 3
    # A plan from a machine with more cores.
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({**whole, "threads": 1000}))
    said.clear()
    with Model.load(plan=plan, notice=said.append) as model:
        assert said == [CUT] and model.threads == model.plan.threads == 3


@pytest.mark.usefixtures("three_cores")
def test_commands_cut_threads_and_say_so(tmp_path: Path) -> None:
    bench = sharpi("bench", "-t", "1000", "--device", "cpu", "--prefill", "8", "--decode", "2", "--repeat", "1",
                   "--json")
    assert bench.stderr.splitlines() == [f"sharpi: {CUT}"] and json.loads(bench.stdout)["threads"] == 3
    run = sharpi("run", "-t", "1000", "--device", "cpu", "-p", "Once", "-n", "2")
    assert run.stderr.splitlines()[0] == f"sharpi: {CUT}"
    assert run.stderr.count("threads") == 1


@pytest.mark.usefixtures("three_cores")
def test_a_plan_has_the_cores_of_the_machine_that_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sharpi.planning.planner.current_profile", lambda *_, **__: ASSUMED
    )  # it would be measured, for some seconds
    plan = sharpi("plan", "-t", "1000", "--device", "cpu", "--json")
    assert plan.stderr.splitlines() == [f"sharpi: {CUT}"] and json.loads(plan.stdout)["threads"] == 3
    assert not sharpi("plan", "-t", "3", "--device", "cpu", "--json").stderr
    elsewhere = tmp_path / "profile.json"
    ASSUMED.save(elsewhere)
    plan = sharpi("plan", "-t", "1000", "--device", "cpu", "--profile", elsewhere, "--json")
    count = json.loads(plan.stdout)["threads"]
    assert count == ASSUMED.cores and f"{count} will run" in plan.stderr
