"""The profile that is kept: how it comes from samples, when a kept one is used, and what makes it be measured again."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from profiled_machine import (CARD, CPU_RATES, GIB, GPU_RATES, NO_CARD, Machine, a_profile, machine,  # noqa: F401
                              sharpi_hardware, without_gpu)

from sharpi import hardware, profile_cache
from sharpi.errors import InvalidRequestError, OutOfMemoryError
from sharpi.profile import ASSUMED, PROFILE_VERSION, HardwareProfile, load_profile
from sharpi.profile_cache import cache_path, cached_profile, current_profile, keep, measure_profile


# --- measuring and keeping -----------------------------------------------------------------------------------------


def test_a_machine_is_measured_once(machine: Machine) -> None:
    first = current_profile()
    assert current_profile() == first and cached_profile() == first
    assert machine.requests == [(16, GIB)]
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
    monkeypatch.setattr(hardware, "gpu", lambda: NO_CARD)
    assert replace(measure_profile(), measured="") == without_gpu(cpu=machine.cpu, measured="")


def test_a_small_container_is_not_filled(machine: Machine) -> None:
    machine.ram = 512 << 20
    measure_profile(3)
    machine.ram = 1 << 20
    measure_profile(3)
    assert machine.requests == [(3, 128 << 20), (3, 1 << 20)]


def test_nothing_is_measured_where_nobody_may(machine: Machine) -> None:
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
    assert "Not kept: only what all 16 processors reach is." in result.stdout
    # As many threads as the machine has processors are not all of them where they share four.
    assert "Not kept" in sharpi_hardware("--threads", "16", "--again").stdout
    assert cached_profile() == whole
    machine.allowed = None
    assert current_profile() == whole
    assert [threads for threads, _ in machine.requests] == [16, 4, 4]


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
    rates = core.measure_hardware(2, 32 << 20)
    missing = rates.pop("gpu_missing", None)
    assert set(rates) == set(CPU_RATES) | (set() if missing else set(GPU_RATES))
    for samples in rates.values():
        assert len(samples) >= 5 and all(isinstance(rate, float) and math.isfinite(rate) and rate > 0 for rate in samples)
    assert missing is None or missing.strip()
    for threads, most in ((0, 32 << 20), (-1, 32 << 20), (1025, 32 << 20), (2, 0), (2, 1000)):
        with pytest.raises(InvalidRequestError):
            core.measure_hardware(threads, most)
    monkeypatch.setattr(profile_cache, "_MOST_BYTES", 32 << 20)
    profile = measure_profile(2)
    assert profile.threads == 2 and (profile.gpu is None) == (missing is not None)
    assert HardwareProfile.from_dict(profile.to_dict()) == profile and set(profile.spread) == set(rates)
