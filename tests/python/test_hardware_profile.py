"""The machine's profile: what a file may say, when a kept one is used, and what `sharpi hardware` prints."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result

import sharpi
from fake_model import cli_runner
from sharpi import hardware, profile as profiles
from sharpi.cli import main
from sharpi.errors import InvalidRequestError, OutOfMemoryError
from sharpi.hardware import Gpu
from sharpi.profile import (ASSUMED, PROFILE_VERSION, HardwareProfile, cache_path, cached_profile, current_profile,
                            keep, load_profile, measure_profile)

GIB = 1 << 30
CPU_RATES = {"ram_bytes_per_second": 91e9, "cpu_flops": 2.5e12}
GPU_RATES = {"pcie_bytes_per_second": 55.4e9, "ram_bytes_per_second_shared": 75e9, "pcie_bytes_per_second_shared": 54e9,
             "vram_bytes_per_second": 2.9e12, "gpu_kernel_seconds": 0.92e-6, "gpu_flops": 460e12}
CARD = Gpu(name="NVIDIA Test", index=0, compute_capability="9.0", multiprocessors=132, total_bytes=80 * GIB,
           free_bytes=79 * GIB)
NO_CARD = "there is no usable GPU: no NVIDIA driver is installed"


class Machine:
    """The machine that the tests pretend to be on, and how often it was measured."""

    def __init__(self) -> None:
        self.cpu = "Test CPU @ 3 GHz"
        self.cores = 16
        self.allowed: int | None = None  # processors that this process may use, where not all
        self.ram = 64 * GIB
        self.gpu: Gpu | str = CARD
        self.failure: Exception | None = None
        self.requests: list[tuple[int, int]] = []

    def measure_hardware(self, threads: int, most_bytes: int) -> dict[str, Any]:
        self.requests.append((threads, most_bytes))
        if self.failure is not None:
            raise self.failure
        gpu = GPU_RATES if isinstance(self.gpu, Gpu) else {"gpu_missing": self.gpu}
        return {**CPU_RATES, **gpu}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    it = Machine()
    monkeypatch.setattr(sharpi, "_core", SimpleNamespace(measure_hardware=it.measure_hardware), raising=False)
    monkeypatch.setattr(hardware, "cpu_name", lambda: it.cpu)
    monkeypatch.setattr(hardware, "core_count", lambda: it.allowed or it.cores)
    monkeypatch.setattr(hardware, "machine_core_count", lambda: it.cores)
    monkeypatch.setattr(hardware, "ram_bytes", lambda: it.ram)
    monkeypatch.setattr(hardware, "gpu", lambda: it.gpu)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return it


def a_profile(**changes: Any) -> HardwareProfile:
    values = {"cpu": "Test CPU", "cores": 16, "threads": 16, "ram_bytes": 64 * GIB, "gpu": "NVIDIA Test",
              "vram_bytes": 80 * GIB, "measured": "2026-01-02T03:04:05+00:00", **CPU_RATES, **GPU_RATES}
    return HardwareProfile(**{**values, **changes})


def without_gpu(**changes: Any) -> HardwareProfile:
    return a_profile(**{**dict.fromkeys(GPU_RATES), "gpu": None, "vram_bytes": None, **changes})


def refusal(path: Path) -> str:
    """What `load_profile` says of a file that it refuses: one line that names the file first."""
    with pytest.raises(InvalidRequestError) as caught:
        load_profile(path)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def sharpi_hardware(*arguments: str) -> Result:
    return cli_runner().invoke(main, ["hardware", *arguments], catch_exceptions=False, prog_name="sharpi")


# --- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", [a_profile(), without_gpu(), ASSUMED, a_profile(threads=3, measured="")])
def test_a_profile_comes_back_from_its_file(profile: HardwareProfile, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    profile.save(path)
    assert load_profile(path) == profile
    assert HardwareProfile.from_dict(profile.to_dict()) == profile
    assert set(json.loads(path.read_text())) == {field.name for field in fields(HardwareProfile)}


def test_whole_numbers_stand_for_rates_too(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({**a_profile().to_dict(), "ram_bytes_per_second": 91 * 10**9}))
    rate = load_profile(path).ram_bytes_per_second
    assert rate == 91e9 and isinstance(rate, float)


@pytest.mark.parametrize("name", [field.name for field in fields(HardwareProfile)])
def test_a_field_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    values = a_profile().to_dict()
    del values[name]
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(values))
    message = refusal(path)
    assert name in message and "sharpi hardware --save" in message


NUMBERS = ["cores", "threads", "ram_bytes", "vram_bytes", *CPU_RATES, *GPU_RATES]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [0, -1, -2.5e10, math.nan, math.inf, -math.inf, 1e300, 10**400, -10**400, True,
                                   "91e9", [1], {}], ids=lambda value: repr(value)[:12])
def test_a_number_that_cannot_be_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({**a_profile().to_dict(), name: value}))
    message = refusal(path)
    assert message.startswith(f"{name} ") and "sharpi hardware --save" in message


@pytest.mark.parametrize(("name", "value"), [
    ("ram_bytes_per_second", 91.0), ("pcie_bytes_per_second", 2e15), ("vram_bytes_per_second", 4.5e3),
    ("gpu_flops", 460.0), ("gpu_flops", 2e17), ("gpu_kernel_seconds", 920.0), ("vram_bytes", 80),
    ("ram_bytes", 1 << 61), ("cores", 1.5), ("ram_bytes", 64e9), ("threads", 1025), ("assumed", 1),
    ("assumed", None), ("cpu", ""), ("cpu", None),
    ("cpu", "two\nlines"), ("cpu", 7), ("cpu", "x" * 201), ("gpu", ""), ("gpu", 5), ("gpu", "\x1b[2J"),
    ("measured", "yesterday"), ("measured", None), ("measured", 5), ("version", "1"), ("version", True),
    ("version", PROFILE_VERSION + 1), ("version", None), ("cores", None), ("cpu_flops", None),
])
def test_nonsense_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({**a_profile().to_dict(), name: value}))
    assert name in refusal(path)


@pytest.mark.parametrize("name", ["vram_bytes", *GPU_RATES])
def test_a_gpu_has_all_its_rates_and_no_gpu_has_none(name: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({**a_profile().to_dict(), name: None}))
    assert refusal(path).startswith(f"{name} is missing")
    path.write_text(json.dumps({**without_gpu().to_dict(), name: getattr(a_profile(), name)}))
    assert refusal(path).startswith(f"{name} is given")


@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b"3", b"null", b'"text"', b"\xff\xfe{}", b"[" * 100_000, b"{}", b'{"version": 1}',
    b"GGUF\x03\x00\x00\x00",
], ids=lambda content: repr(content[:12]))
def test_a_file_that_is_no_profile_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(content)
    assert "sharpi hardware --save" in refusal(path)


def test_another_version_is_named_whatever_its_fields(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"version": PROFILE_VERSION + 1, "nodes": []}))
    assert refusal(path).startswith(f"version is {PROFILE_VERSION + 1}, where {PROFILE_VERSION} is known")


def test_a_file_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(a_profile().to_dict()) + " " * (2 << 20))
    assert "too large" in refusal(path)


def test_an_unknown_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({**a_profile().to_dict(), "pci_bytes\x1b": 1}))
    message = refusal(path)
    assert "pci_bytes" in message and "\x1b" not in message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent.json")
    assert "directory" in refusal(tmp_path)
    with pytest.raises(InvalidRequestError, match="null byte"):
        load_profile("a\0b")


@pytest.mark.parametrize("values", [None, [], "text", 5])
def test_a_profile_is_a_table(values: Any) -> None:
    with pytest.raises(InvalidRequestError, match="^somewhere: it is no table of fields"):
        HardwareProfile.from_dict(values, "somewhere")


@pytest.mark.parametrize("change", [{"ram_bytes_per_second": -1.0}, {"threads": 0}, {"gpu": None}, {"cpu": ""},
                                    {"pcie_bytes_per_second": math.nan}])
def test_a_profile_made_by_hand_is_checked(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="^hardware profile: "):
        replace(a_profile(), **change)


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "machine.json"
    a_profile().save(path)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(InvalidRequestError, match="No space left") as caught:
        without_gpu().save(path)
    assert str(path) in str(caught.value)
    assert load_profile(path) == a_profile()
    assert os.listdir(tmp_path) == ["machine.json"], "no draft is left behind"


def test_what_is_no_file_is_written_to_and_stays(tmp_path: Path) -> None:
    target = tmp_path / "real.json"
    link = tmp_path / "link.json"
    link.symlink_to(target)
    a_profile().save(link)
    assert link.is_symlink() and load_profile(target) == a_profile()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        a_profile().save(pipe)
        assert json.loads(os.read(reader, 1 << 16)) == a_profile().to_dict()
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)


def test_what_is_assumed_says_so() -> None:
    assert ASSUMED.assumed and ASSUMED.gpu is not None
    assert not a_profile().assumed
    mixed = without_gpu().with_assumed_gpu()
    assert mixed.assumed and mixed.gpu == ASSUMED.gpu and mixed.pcie_bytes_per_second == ASSUMED.pcie_bytes_per_second
    assert mixed.cpu == "Test CPU" and mixed.ram_bytes_per_second == CPU_RATES["ram_bytes_per_second"]


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
    said: list[int] = []
    current_profile(announce=lambda: said.append(len(machine.requests)))
    current_profile(announce=lambda: said.append(-1))
    assert said == [0]


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
    core = pytest.importorskip("sharpi._core")
    rates = core.measure_hardware(2, 32 << 20)
    missing = rates.pop("gpu_missing", None)
    assert set(rates) == set(CPU_RATES) | (set() if missing else set(GPU_RATES))
    assert all(isinstance(rate, float) and math.isfinite(rate) and rate > 0 for rate in rates.values())
    assert missing is None or missing.strip()
    for threads, most in ((0, 32 << 20), (-1, 32 << 20), (1025, 32 << 20), (2, 0), (2, 1000)):
        with pytest.raises(InvalidRequestError):
            core.measure_hardware(threads, most)
    monkeypatch.setattr(profiles, "_MOST_BYTES", 32 << 20)
    profile = measure_profile(2)
    assert profile.threads == 2 and (profile.gpu is None) == (missing is not None)
    assert HardwareProfile.from_dict(profile.to_dict()) == profile


# --- the command ---------------------------------------------------------------------------------------------------


def test_the_command_is_listed_and_has_help() -> None:
    assert "hardware" in cli_runner().invoke(main, []).output
    result = sharpi_hardware("--help")
    assert result.exit_code == 0 and result.stdout.startswith("Usage: sharpi hardware")
    assert all(switch in result.stdout for switch in ("--threads", "--again", "--json", "--save"))


def test_the_command_shows_what_was_measured(machine: Machine) -> None:
    result = sharpi_hardware()
    assert result.exit_code == 0
    assert "measuring" in result.stderr
    for text in ("Test CPU @ 3 GHz, 16 processors, 64.00 GiB of RAM", "NVIDIA Test, 80.00 GiB of VRAM", "91.0 GB/s",
                 "2.50 TFLOP/s", "55.4 GB/s", "75.0 GB/s", "54.0 GB/s", "2,900 GB/s", "0.92 us", "460 TFLOP/s",
                 "16 threads", str(cache_path())):
        assert text in result.stdout, text
    assert all(len(line) <= 80 for line in result.stdout.splitlines() if str(cache_path()) not in line)


def test_the_command_measures_once_and_again_on_demand(machine: Machine) -> None:
    first = sharpi_hardware()
    second = sharpi_hardware()
    assert second.stdout == first.stdout and second.stderr == ""
    assert len(machine.requests) == 1
    assert "measuring" in sharpi_hardware("--again").stderr
    assert len(machine.requests) == 2


def test_the_command_measures_with_as_many_threads_as_it_is_told(machine: Machine) -> None:
    for threads, words in (("1", "CPU, 1 thread,"), ("4", "CPU, 4 threads,")):
        result = sharpi_hardware("--threads", threads)
        assert words in result.stdout and "Not kept: only what all 16 processors reach is." in result.stdout
        assert cached_profile() is None
    assert f"kept in {cache_path()}" in " ".join(sharpi_hardware().stdout.split())
    whole = cached_profile()
    assert whole is not None and whole.threads == 16
    sharpi_hardware("--threads", "4")
    assert "CPU, 16 threads," in sharpi_hardware("--threads", "16").stdout and cached_profile() == whole
    assert [threads for threads, _ in machine.requests] == [1, 4, 16, 4]


def test_the_command_says_why_there_is_no_gpu(machine: Machine) -> None:
    machine.gpu = NO_CARD
    result = sharpi_hardware()
    assert f"no GPU: {NO_CARD}" in result.stdout
    assert "GPU, " not in result.stdout and "None" not in result.stdout


def test_a_slow_machines_arithmetic_has_digits(machine: Machine) -> None:
    keep(a_profile(cpu=machine.cpu, cpu_flops=98.7e9))
    assert "98.7 GFLOP/s" in sharpi_hardware().stdout and machine.requests == []


def test_the_commands_json_is_a_profile(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "printed.json"
    path.write_text(sharpi_hardware("--json").stdout)
    assert load_profile(path) == cached_profile()


def test_the_command_saves(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    assert sharpi_hardware("--save", str(path)).exit_code == 0
    assert load_profile(path) == cached_profile()
    result = sharpi_hardware("--save", str(tmp_path / "absent" / "saved.json"))
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("sharpi: error: ") and result.stderr.count("\n") == 1
    assert "No such file" in result.stderr


def test_the_command_says_when_it_cannot_keep_what_it_measured(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    result = sharpi_hardware()
    assert result.exit_code == 0 and "could not be kept" in result.stdout


def test_the_command_does_not_invent_what_it_cannot_measure(machine: Machine) -> None:
    machine.failure = OutOfMemoryError("weights to measure with: 28.1 MiB asked, 3.0 MiB free")
    result = sharpi_hardware()
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.endswith("sharpi: error: weights to measure with: 28.1 MiB asked, 3.0 MiB free\n")


@pytest.mark.parametrize("threads", ["0", "-1", "1025", "many"])
def test_the_command_refuses_numbers_of_threads_that_cannot_be(machine: Machine, threads: str) -> None:
    result = sharpi_hardware("--threads", threads)
    assert result.exit_code == 2 and machine.requests == []
