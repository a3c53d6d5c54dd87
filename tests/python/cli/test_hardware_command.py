"""`sharpi hardware`: what it prints, and when it measures."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from fake_model import cli_runner
from profiled_machine import NO_CARD, Machine, a_profile, machine_fixture, sharpi_hardware  # noqa: F401

from sharpi.cli import main
from sharpi.errors import OutOfMemoryError
from sharpi.machine.profile import load_profile
from sharpi.machine.profile_cache import cache_path, cached_profile, keep


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


def test_the_command_shows_spreads_and_age(machine: Machine) -> None:
    machine.samples = {"ram_bytes_per_second": [47e9, 41e9, 44e9], "gpu_kernel_seconds": [2e-6, 4e-6]}
    lines = sharpi_hardware().stdout.splitlines()
    assert "best" in lines[3] and "spread" in lines[3]
    ram, kernel = (next(line for line in lines if name in line) for name in ("16 threads, one row", "a small kernel"))
    assert ram.split("   ")[-2].split() == ["13", "%"] and "47.0 GB/s" in ram
    assert "2.00 us" in kernel and "50 %" in kernel
    assert "UTC, kept in" in " ".join(lines) and "ago" not in " ".join(lines)
    for passed, words in ((timedelta(minutes=90), "1 hour ago"), (timedelta(hours=47), "47 hours ago"),
                          (timedelta(days=29), "29 days ago")):
        machine.now += passed
        assert f"Measured 2026-01-02 04:00 UTC, {words}, kept in" in sharpi_hardware().stdout
        machine.now -= passed
    assert len(machine.requests) == 1


def test_the_command_says_that_the_machine_was_busy(machine: Machine) -> None:
    assert "busy" not in sharpi_hardware().stdout
    machine.samples = {"cpu_flops": [1e12, 1.1e12, 2e12]}
    assert ("Other programs were busy while this was measured: the machine may be faster."
            in sharpi_hardware("--again").stdout)


def test_the_command_measures_what_no_longer_holds(machine: Machine) -> None:
    sharpi_hardware()
    machine.now += timedelta(days=31)
    assert sharpi_hardware().stderr == "sharpi: measuring this machine again, a few seconds: that was 31 days ago\n"
    assert sharpi_hardware().stderr == "" and len(machine.requests) == 2


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
        assert words in result.stdout and "Not kept, because it did not use all 16 processors." in result.stdout
        assert cached_profile() is None
    assert f"kept in {cache_path()}" in " ".join(sharpi_hardware().stdout.split())
    whole = cached_profile()
    assert whole is not None and whole.threads == 16
    sharpi_hardware("--threads", "4")
    assert "CPU, 16 threads," in sharpi_hardware("--threads", "16").stdout and cached_profile() == whole
    assert [threads for threads, *_ in machine.requests] == [1, 4, 16, 4]


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
