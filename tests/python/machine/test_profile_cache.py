"""The profile that is kept: how it comes from samples, when a kept one is used, and what makes it be measured again."""

from __future__ import annotations

import fcntl
import json
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from profiled_machine import (  # noqa: F401
    CARD,
    CPU_RATES,
    GIB,
    GPU_RATES,
    NO_CARD,
    Machine,
    a_profile,
    machine_fixture,
    sharpi_hardware,
    without_gpu,
)

from sharpi.errors import InvalidRequestError, OutOfMemoryError
from sharpi.machine import hardware, profile_cache
from sharpi.machine.profile import ASSUMED, PROFILE_VERSION, HardwareProfile, load_profile
from sharpi.machine.profile_cache import cache_path, cached_profile, current_profile, doubt, keep, measure_profile
from sharpi.machine.type_costs import COST_TYPES
from sharpi.planning.planner import MachineSpeeds

# --- measuring and keeping -----------------------------------------------------------------------------------------


def test_a_machine_is_measured_once(machine: Machine) -> None:
    first = current_profile()
    assert current_profile() == first and cached_profile() == first
    assert machine.requests == [(16, GIB, 0)]
    assert (first.cpu, first.cores, first.threads, first.ram_bytes) == (machine.cpu, 16, 16, machine.ram)
    assert (first.gpu, first.vram_bytes) == (CARD.name, CARD.total_bytes)
    assert {name: getattr(first, name) for name in {**CPU_RATES, **GPU_RATES}} == {**CPU_RATES, **GPU_RATES}
    assert first.measured and not first.assumed and first.version == PROFILE_VERSION


def test_a_machine_without_a_gpu_has_the_cpus_rates(machine: Machine) -> None:
    machine.gpu = NO_CARD
    profile = current_profile()
    assert profile.gpu is None and profile.vram_bytes is None
    assert all(getattr(profile, name) is None for name in GPU_RATES)
    assert profile.cpu_flops == CPU_RATES["cpu_flops"]
    assert cached_profile() == profile


def test_a_gpu_that_went_while_it_was_measured_is_none(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpu", lambda index: NO_CARD)
    assert replace(measure_profile(), measured="") == without_gpu(cpu=machine.cpu, measured="")


def test_a_small_container_is_not_filled(machine: Machine) -> None:
    machine.ram = 512 << 20
    measure_profile(3)
    machine.ram = 1 << 20
    measure_profile(3)
    assert machine.requests == [(3, 128 << 20, 0), (3, 1 << 20, 0)]


def test_each_kind_of_gpu_is_measured(machine: Machine) -> None:
    machine.others = [replace(CARD, name="Another", index=1), replace(CARD, index=2)]
    current_profile()
    assert cached_profile(1) is None, "it is of the first"
    assert current_profile(gpu_index=1).gpu == "Another" and cached_profile(1) is not None
    assert [ordinal for _, _, ordinal in machine.requests] == [0, 1]
    first = current_profile()
    assert current_profile(gpu_index=2) == first and len(machine.requests) == 3, "the third is like the first"


def test_the_gpu_of_a_plan_is_measured(machine: Machine) -> None:
    machine.others = [replace(CARD, name="Another", index=1)]
    speeds = MachineSpeeds(None, None)
    assert speeds.of("cuda", machine.others[0]).gpu == "Another"
    assert [ordinal for _, _, ordinal in machine.requests] == [1]
    assert MachineSpeeds(None, None).at_hand(machine.others[0]) == cached_profile(1)
    assert MachineSpeeds(None, None).at_hand(CARD) is None, "it is of the other one"


def test_nothing_is_measured_if_that_is_not_allowed(machine: Machine) -> None:
    assert current_profile(measure=False) is ASSUMED
    measured = current_profile()
    assert current_profile(measure=False) == measured
    assert len(machine.requests) == 1


def test_a_measurement_is_announced(machine: Machine) -> None:
    said: list[tuple[int, str]] = []
    current_profile(announce=lambda reason: said.append((len(machine.requests), reason)))
    current_profile(announce=lambda reason: said.append((-1, reason)))
    assert said == [(0, "")]


def other_driver(machine: Machine) -> None:
    machine.gpu = replace(CARD, total_bytes=CARD.total_bytes - (300 << 20), free_bytes=1)
    machine.ram -= 100 << 20


def test_another_driver_or_kernel_is_no_other_machine(machine: Machine) -> None:
    current_profile()
    other_driver(machine)
    current_profile()
    assert len(machine.requests) == 1


@pytest.mark.parametrize("change", [
    {"cpu": "Another CPU"}, {"cores": 8}, {"ram": 32 * GIB}, {"gpu": NO_CARD}, {"gpu": replace(CARD, name="Another")},
    {"gpu": replace(CARD, total_bytes=40 * GIB)},
], ids=str)
def test_another_machine_is_measured_anew(machine: Machine, change: dict[str, Any]) -> None:
    current_profile()
    for name, value in change.items():
        setattr(machine, name, value)
    assert cached_profile() is None
    again = current_profile()
    assert len(machine.requests) == 2 and cached_profile() == again


def test_a_gpu_that_was_added_is_measured(machine: Machine) -> None:
    machine.gpu = NO_CARD
    current_profile()
    machine.gpu = CARD
    assert current_profile().gpu == CARD.name


def spoil(how: str) -> Callable[[Path], None]:
    def do(path: Path) -> None:
        content = path.read_text()
        path.write_text({"empty": "", "cut": content[:-20], "noise": "\0" * 50,
                         "version": content.replace(f'"version": {PROFILE_VERSION}', '"version": 0'),
                         "field": content.replace('"cpu_flops"', '"cpu_flaps"'),
                         "assumed": content.replace('"assumed": false', '"assumed": true')}[how])
        assert path.read_text() != content

    return do


@pytest.mark.parametrize("how", ["empty", "cut", "noise", "version", "field", "assumed"])
def test_a_damaged_cache_is_measured_anew(machine: Machine, how: str) -> None:
    current_profile()
    path = cache_path()
    assert path is not None
    spoil(how)(path)
    again = current_profile()
    assert len(machine.requests) == 2
    assert load_profile(path) == again


def test_a_cache_that_cannot_be_written_is_no_error(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    first = current_profile()
    assert first.cpu_flops == CPU_RATES["cpu_flops"] and keep(first) is False
    current_profile()
    assert len(machine.requests) == 2


def test_a_folder_in_the_files_place_is_no_error(machine: Machine, tmp_path: Path) -> None:
    path = cache_path()
    assert path is not None
    path.mkdir(parents=True)
    assert current_profile().gpu == CARD.name
    assert os.listdir(path.parent) == [path.name]


def test_the_cache_is_where_the_system_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_path() == tmp_path / ".cache" / "sharpi" / "hardware.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/folder")
    assert cache_path() == tmp_path / ".cache" / "sharpi" / "hardware.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert cache_path() == tmp_path / "elsewhere" / "sharpi" / "hardware.json"


def test_a_user_without_a_home_has_no_cache(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", fail)
    assert cache_path() is None and cached_profile() is None
    assert current_profile().gpu == CARD.name and keep(current_profile()) is False


@pytest.mark.parametrize("failure", [
    OutOfMemoryError("weights to measure with: 28.1 MiB asked, 3.0 MiB free"), InvalidRequestError("something else")])
def test_who_asks_hears_why_nothing_could_be_measured(machine: Machine, failure: Exception) -> None:
    machine.failure = failure
    with pytest.raises(type(failure), match=str(failure)):
        current_profile()
    assert cached_profile() is None
    machine.failure = None
    assert current_profile() == cached_profile()


def test_a_process_with_few_processors_leaves_the_kept_profile_alone(machine: Machine) -> None:
    whole = current_profile()
    machine.allowed = 4
    assert current_profile() == whole and len(machine.requests) == 1, "plans reckon with the threads there are"
    result = sharpi_hardware("--again")
    assert "CPU, 4 threads," in result.stdout and "16 processors" in result.stdout
    assert "Not kept, because it did not use all 16 processors." in result.stdout
    # As many threads as the machine has processors are not all of them where they share four.
    assert "Not kept" in sharpi_hardware("--threads", "16", "--again").stdout
    assert cached_profile() == whole
    machine.allowed = None
    assert current_profile() == whole
    assert [threads for threads, *_ in machine.requests] == [16, 4, 4]


def test_a_process_with_few_processors_keeps_nothing(machine: Machine) -> None:
    machine.allowed = 4
    assert current_profile().threads == 4 and current_profile().cores == 16
    path = cache_path()
    assert cached_profile() is None and path is not None and not path.exists()


def test_a_profile_of_fewer_threads_is_none_of_the_machine(machine: Machine) -> None:
    """Whoever put it there: its rates are not what plans for all processors reckon with."""
    path = cache_path()
    assert path is not None
    path.parent.mkdir(parents=True)
    a_profile(cpu=machine.cpu, threads=1).save(path)
    assert cached_profile() is None
    a_profile(cpu=machine.cpu).save(path)
    assert cached_profile() is not None


# --- samples -------------------------------------------------------------------------------------------------------


def test_the_best_sample_stands_and_the_spread_is_kept(machine: Machine) -> None:
    machine.samples = {"ram_bytes_per_second": [40e9, 47e9, 44e9, 46e9], "gpu_kernel_seconds": [3e-6, 2e-6, 2.5e-6],
                       "gpu_flops": [460e12]}
    profile = measure_profile()
    assert (profile.ram_bytes_per_second, profile.gpu_kernel_seconds, profile.gpu_flops) == (47e9, 2e-6, 460e12)
    spread = profile.spread
    assert (spread["ram_bytes_per_second"], spread["gpu_kernel_seconds"], spread["gpu_flops"]) == (0.1489, 0.3333, 0)
    assert set(spread) == {*CPU_RATES, *GPU_RATES} and spread["cpu_flops"] == 0.1 and not profile.busy


def test_rates_that_were_measured_together_stay_together(machine: Machine) -> None:
    """The best of each by itself is more than both have together."""
    machine.samples = {"ram_bytes_per_second_shared": [90e9, 75e9, 80e9],
                       "pcie_bytes_per_second_shared": [30e9, 50e9, 44e9]}
    profile = measure_profile()
    assert (profile.ram_bytes_per_second_shared, profile.pcie_bytes_per_second_shared) == (75e9, 50e9)
    assert profile.spread["ram_bytes_per_second_shared"] == 0 and profile.spread["pcie_bytes_per_second_shared"] == 0.4


@pytest.mark.parametrize(("others", "busy"), [(0.0, False), (0.05, False), (0.2, True), (3.0, True), (None, False),
                                              (-1.0, False)])
def test_a_machine_with_other_programs_at_work_is_busy(machine: Machine, monkeypatch: pytest.MonkeyPatch,
                                                       others: float | None, busy: bool) -> None:
    """others: the part of all processors that they take while it is measured; this process takes half of one."""
    clock = {"now": 100.0, "own": 7.0, "all": 1000.0}
    monkeypatch.setattr(profile_cache.time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(profile_cache.time, "process_time", lambda: clock["own"])
    monkeypatch.setattr(hardware, "busy_seconds", lambda: None if others is None else clock["all"])
    measure = machine.measure_hardware

    def for_three_seconds(threads: int, most_bytes: int, ordinal: int) -> dict[str, Any]:
        clock.update(now=103.0, own=8.5, all=1001.5 + 3.0 * machine.cores * (others or 0.0))
        return measure(threads, most_bytes, ordinal)

    monkeypatch.setattr("sharpi._core.measure_hardware", for_three_seconds)
    assert measure_profile().busy is busy


def test_a_machine_that_is_mostly_slower_than_its_best_is_busy(machine: Machine) -> None:
    for name in ("ram_bytes_per_second", "cpu_flops"):
        for samples, busy in (([50.0, 82.0, 100.0], False), ([78.0, 100.0, 70.0], True), ([100.0], False)):
            machine.samples = {name: [1e9 * sample for sample in samples]}
            assert measure_profile().busy is busy


def test_the_processors_work_is_counted() -> None:
    before = hardware.busy_seconds()
    if before is None:
        pytest.skip("this system does not say")
    sum(range(3_000_000))
    after = hardware.busy_seconds()
    assert after is not None and 0 < before <= after


@pytest.mark.parametrize("content", [None, "", "cpu", "cpu 1 2 x 4 5 6 7 8", "intr 1 2 3 4 5 6 7 8"])
def test_a_system_that_counts_otherwise_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                     content: str | None) -> None:
    path = tmp_path / "stat"
    if content is not None:
        path.write_text(content)
    real = open
    monkeypatch.setattr("builtins.open",
                        lambda name, **options: real(path if name == "/proc/stat" else name, **options))
    assert hardware.busy_seconds() is None
    path.write_text("cpu  100 20 3 4000 50 6 7 8 9 10\ncpu0 1\n")
    assert hardware.busy_seconds() == (100 + 20 + 3 + 6 + 7 + 8) / os.sysconf("SC_CLK_TCK")


# --- how long it holds ----------------------------------------------------------------------------------------------


def announced() -> list[str]:
    """The reasons with which the machine is measured at a start, of one or no measurement."""
    said: list[str] = []
    current_profile(announce=said.append)
    return said


@pytest.mark.parametrize(("passed", "reason"), [
    (timedelta(days=29, hours=23), None), (timedelta(days=30, minutes=1), "that was 30 days ago"),
    (timedelta(days=400), "that was 400 days ago"), (-timedelta(minutes=50), None),
    (-timedelta(hours=2), "its date is in the future"), (-timedelta(days=5000), "its date is in the future")], ids=str)
def test_an_old_profile_is_measured_again(machine: Machine, passed: timedelta, reason: str | None) -> None:
    before = current_profile()
    machine.now += passed
    assert current_profile(measure=False) == before, "an old one is better than none"
    assert announced() == ([] if reason is None else [reason])
    assert announced() == [] and len(machine.requests) == 1 + (reason is not None)


def test_what_was_measured_on_a_busy_machine_holds_for_an_hour(machine: Machine) -> None:
    machine.samples = {"ram_bytes_per_second": [10e9, 11e9, 47e9]}
    assert current_profile().busy
    machine.now += timedelta(minutes=59)
    assert announced() == []
    machine.now += timedelta(minutes=2)
    assert announced() == ["other programs were busy the last time"]
    machine.samples = {}
    machine.now += timedelta(minutes=61)
    assert len(announced()) == 1 and not current_profile().busy
    machine.now += timedelta(days=3)
    assert announced() == []


@pytest.mark.parametrize("change", [{"version": 1, "spread": None, "busy": None, "cpu_type_costs": None},
                                    {"version": 2, "cpu_type_costs": None}, {"measured": ""}], ids=str)
def test_a_profile_of_an_earlier_version_is_measured_again(machine: Machine, change: dict[str, Any]) -> None:
    current_profile()
    path = cache_path()
    assert path is not None
    values = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    assert cached_profile() is not None
    assert announced() == ["an earlier version of Sharpi measured it"] and announced() == []


def test_a_date_without_a_zone_is_read(machine: Machine) -> None:
    path = cache_path()
    assert path is not None
    path.parent.mkdir(parents=True)
    a_profile(cpu=machine.cpu, measured="2026-01-02T03:04:05").save(path)
    assert announced() == []
    machine.now += timedelta(days=31)
    assert announced() == ["that was 31 days ago"]


def test_an_old_profile_that_cannot_be_measured_again_stays(machine: Machine) -> None:
    before = current_profile()
    machine.now += timedelta(days=40)
    machine.failure = OutOfMemoryError("weights to measure with: 28.1 MiB asked, 3.0 MiB free")
    assert current_profile() == before
    machine.failure = None
    assert current_profile().measured == machine.now.isoformat()


def test_an_old_profile_that_cannot_be_replaced_stays(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or every start would measure."""
    before = current_profile()
    path = cache_path()
    assert path is not None
    machine.now += timedelta(days=40)
    if os.geteuid():
        path.parent.chmod(0o500)
    else:  # a user that may write everywhere
        monkeypatch.setattr(os, "access", lambda folder, mode: folder != path.parent)
    assert current_profile() == before and len(machine.requests) == 1
    shown = " ".join(sharpi_hardware().stdout.split())
    assert f"It should be measured again (that was 40 days ago), but {path.parent} cannot be written to." in shown
    assert not doubt(before, "model")
    path.parent.chmod(0o700)


def test_slower_instructions_are_not_kept(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARPI_CPU_ISA", "scalar")
    current_profile()
    assert cached_profile() is None
    monkeypatch.delenv("SHARPI_CPU_ISA")
    whole = current_profile()
    machine.now += timedelta(days=40)
    monkeypatch.setenv("SHARPI_CPU_ISA", "scalar")
    assert current_profile() == whole == cached_profile()


# --- several processes ----------------------------------------------------------------------------------------------


def test_processes_that_start_together_measure_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand for them here: each opens the folder for itself, as processes do."""
    everyone, measuring = threading.Barrier(4), threading.Event()
    measure = machine.measure_hardware

    def slow(threads: int, most_bytes: int, ordinal: int) -> dict[str, Any]:
        assert not measuring.is_set(), "two at once disturb each other"
        measuring.set()
        time.sleep(0.2)
        measuring.clear()
        return measure(threads, most_bytes, ordinal)

    def start() -> HardwareProfile:
        everyone.wait()
        return current_profile()

    monkeypatch.setattr("sharpi._core.measure_hardware", slow)
    with ThreadPoolExecutor(4) as pool:
        found = [future.result() for future in [pool.submit(start) for _ in range(4)]]
    assert len(machine.requests) == 1 and len(set(found)) == 1


def test_no_wait_is_endless(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cache_path()
    assert path is not None
    path.parent.mkdir(parents=True)
    monkeypatch.setattr(profile_cache, "_LONGEST_WAIT", 0.1)
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert current_profile() == cached_profile()
    finally:
        os.close(handle)


# --- doubts ---------------------------------------------------------------------------------------------------------


def test_a_doubted_profile_is_measured_again_once(machine: Machine) -> None:
    first = current_profile()
    machine.now += timedelta(days=1)
    assert doubt(first, "a") is True
    assert announced() == ["a model did not run at the predicted speed"] and announced() == []
    second = current_profile()
    assert second.measured != first.measured
    assert doubt(second, "a") is False and announced() == [], "it was tried for this model"
    assert doubt(second, "b") is True and doubt(second, "c") is True
    machine.now += timedelta(minutes=1)
    assert len(announced()) == 1 and announced() == [] and len(machine.requests) == 3
    machine.now += timedelta(days=29)
    assert doubt(current_profile(), "b") is False
    machine.now += timedelta(days=2)
    assert doubt(current_profile(), "a") is True, "what was tried long ago may be tried again"


def test_doubts_are_of_one_machine_and_not_without_number(machine: Machine) -> None:
    profile = current_profile()
    for index in range(100):
        machine.now += timedelta(seconds=1)
        assert doubt(profile, f"model {index}")
    path = cache_path()
    assert path is not None
    kept = json.loads(path.with_name("doubts.json").read_text())["models"]
    assert list(kept) == [f"model {index}" for index in range(36, 100)]
    machine.cpu = "Another CPU"
    assert announced() == [""]
    assert doubt(current_profile(), "model 99") is True


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000, b'{"machine": 1}',
                                     b'{"machine": "%s", "profile": [1], "models": {"a": "yesterday"}}',
                                     b'{"machine": "%s", "profile": "x", "models": {"a": "2026-01-02"}}',
                                     b'{"machine": "%s", "profile": "x", "models": 5}', b" " * (1 << 20)],
                         ids=lambda content: repr(content[:40]))
def test_damaged_doubts_are_none(machine: Machine, content: bytes) -> None:
    profile = current_profile()
    path = cache_path()
    assert path is not None
    words = f"{machine.cpu}, {machine.cores} processors, {CARD.name}".encode()
    path.with_name("doubts.json").write_bytes(content.replace(b"%s", words))
    assert announced() == []
    assert doubt(profile, "a") is True
    assert len(announced()) == 1 and announced() == []


def test_doubts_that_cannot_be_noted_are_no_error(machine: Machine) -> None:
    profile = current_profile()
    path = cache_path()
    assert path is not None
    path.with_name("doubts.json").mkdir()
    assert doubt(profile, "a") is False and announced() == []


# --- the machine itself --------------------------------------------------------------------------------------------


def test_the_processor_has_a_name_on_one_line() -> None:
    name = hardware.cpu_name()
    assert name and name == " ".join(name.split())
    assert 1 <= hardware.core_count() <= hardware.machine_core_count() == (os.cpu_count() or 1)


def test_a_nameless_processor_has_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", fail)
    monkeypatch.setattr(hardware.platform, "processor", lambda: "")
    monkeypatch.setattr(hardware.platform, "machine", lambda: "aarch64")
    assert hardware.cpu_name() == "aarch64"


def test_the_core_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    from sharpi import _core as core
    rates = core.measure_hardware(2, 32 << 20, 0)
    missing, costs = rates.pop("gpu_missing", None), rates.pop("cpu_type_costs")
    assert tuple(costs) == COST_TYPES and all(math.isfinite(cost) and cost > 0 for cost in costs.values())
    assert set(rates) == set(CPU_RATES) | (set() if missing else set(GPU_RATES))
    for samples in rates.values():
        assert len(samples) >= 5
        assert all(isinstance(rate, float) and math.isfinite(rate) and rate > 0 for rate in samples)
    assert missing is None or missing.strip()
    for threads, most in ((0, 32 << 20), (-1, 32 << 20), (1025, 32 << 20), (2, 0), (2, 1000)):
        with pytest.raises(InvalidRequestError):
            core.measure_hardware(threads, most, 0)
    monkeypatch.setattr(profile_cache, "_MOST_BYTES", 32 << 20)
    profile = measure_profile(2)
    assert profile.threads == 2 and (profile.gpu is None) == (missing is not None)
    assert HardwareProfile.from_dict(profile.to_dict()) == profile and set(profile.spread) == set(rates)
    assert tuple(profile.cpu_type_costs) == COST_TYPES
