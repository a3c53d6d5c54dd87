"""A machine that tests of profiles pretend to be on: what it is, how fast it is measured to be, and what time it is."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from fake_model import cli_runner

from sharpi import _core
from sharpi.cli import main
from sharpi.machine import hardware, profile_cache
from sharpi.machine.hardware import Gpu
from sharpi.machine.profile import HardwareProfile

GIB = 1 << 30
CPU_RATES = {"ram_bytes_per_second": 91e9, "cpu_flops": 2.5e12}
GPU_RATES = {"pcie_bytes_per_second": 55.4e9, "ram_bytes_per_second_shared": 75e9, "pcie_bytes_per_second_shared": 54e9,
             "vram_bytes_per_second": 2.9e12, "gpu_kernel_seconds": 0.92e-6, "gpu_flops": 460e12}
COSTS = {"Q6_K": 1.1, "Q8_0": 0.9, "MXFP4": 1.2, "IQ3_S": 5.0}
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
        self.others: list[Gpu] = []  # GPUs with the numbers after the first
        self.failure: Exception | None = None
        self.requests: list[tuple[int, int, int]] = []
        self.now = datetime(2026, 1, 2, 4, tzinfo=timezone.utc)
        self.samples: dict[str, list[float]] = {}  # of rates that do not have those of `sampled`

    def gpu_at(self, index: int = 0) -> Gpu | str:
        return self.others[index - 1] if index else self.gpu

    def measure_hardware(self, threads: int, most_bytes: int, ordinal: int) -> dict[str, Any]:
        self.requests.append((threads, most_bytes, ordinal))
        if self.failure is not None:
            raise self.failure
        rates = {**CPU_RATES, **(GPU_RATES if isinstance(self.gpu, Gpu) else {})}
        missing = {} if isinstance(self.gpu, Gpu) else {"gpu_missing": self.gpu}
        return {**{name: sampled(name, rate) for name, rate in rates.items()}, **self.samples, **missing,
                "cpu_type_costs": dict(COSTS)}


def sampled(name: str, best: float) -> list[float]:
    """Samples with this best one, the slowest of which falls short of it by a tenth."""
    return [best / part for part in (0.95, 1, 0.9)] if name.endswith("_seconds") else [0.95 * best, best, 0.9 * best]


@pytest.fixture(name="machine")
def machine_fixture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    it = Machine()
    monkeypatch.setattr(_core, "measure_hardware", it.measure_hardware)
    monkeypatch.setattr(hardware, "cpu_name", lambda: it.cpu)
    monkeypatch.setattr(hardware, "core_count", lambda: it.allowed or it.cores)
    monkeypatch.setattr(hardware, "machine_core_count", lambda: it.cores)
    monkeypatch.setattr(hardware, "ram_bytes", lambda: it.ram)
    monkeypatch.setattr(hardware, "gpu", it.gpu_at)
    monkeypatch.setattr(hardware, "busy_seconds", lambda: None)
    monkeypatch.setattr(profile_cache, "_now", lambda: it.now)
    monkeypatch.delenv("SHARPI_CPU_ISA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return it


def a_profile(**changes: Any) -> HardwareProfile:
    values = {"cpu": "Test CPU", "cores": 16, "threads": 16, "ram_bytes": 64 * GIB, "gpu": "NVIDIA Test",
              "vram_bytes": 80 * GIB, "measured": "2026-01-02T03:04:05+00:00", "cpu_type_costs": COSTS,
              **CPU_RATES, **GPU_RATES}
    values["spread"] = dict.fromkeys([*CPU_RATES, *(GPU_RATES if changes.get("gpu", "") is not None else ())], 0.1)
    return HardwareProfile(**{**values, **changes})


def without_gpu(**changes: Any) -> HardwareProfile:
    return a_profile(**{**dict.fromkeys(GPU_RATES), "gpu": None, "vram_bytes": None, **changes})


def sharpi_hardware(*arguments: str) -> Result:
    return cli_runner().invoke(main, ["hardware", *arguments], catch_exceptions=False, prog_name="sharpi")
