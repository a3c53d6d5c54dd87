"""How fast a machine is at what a model's steps are made of: what plans predict speed from and share work out by.

The core measures it in a few seconds; `profile_cache` keeps the result and says how long it holds. A profile is also a
small JSON file, so that a plan can be made for a machine one does not have.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from typing import Any

from sharpi.errors import InvalidRequestError
from sharpi.machine.type_costs import COST_TYPES, cost_of
from sharpi.storage import write_whole

__all__ = ["ASSUMED", "GPU_FIELDS", "PROFILE_VERSION", "HardwareProfile", "device_name", "load_profile"]

# The version of the format. Version 1 had one sample of each rate: no spread, and nothing on other programs. Version 2
# had the rate of one type of weights alone.
PROFILE_VERSION = 3
_SINCE_VERSION = {"spread": 2, "busy": 2, "cpu_type_costs": 3}

_LONGEST_FILE = 1 << 20
_LONGEST_NAME = 200


@dataclass(frozen=True)
class _Number:
    """What a number in a profile may be: from `least` to `most` of `unit`."""

    unit: str
    least: float
    most: float
    whole: bool = False

    def problem(self, value: Any) -> str | None:
        """What is wrong with `value`, or None."""
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            return f"is no {'whole number' if self.whole else 'number'}"
        if not self.least <= value <= self.most:  # as it is for what is no number or infinite
            shown = value if isinstance(value, float) else max(-10**300, min(value, 10**300))
            return f"is {shown:g}, where {self.least:g} to {self.most:g} {self.unit} can be"
        return None


# No machine's RAM is as slow as the least of these: a number below it was meant in another unit.
_BYTES_PER_SECOND = _Number("bytes per second", 1e6, 1e15)
_FLOPS = _Number("operations per second", 1e6, 1e17)
_PART = _Number("of the rate", 0, 1)
_COST = _Number("times that of Q4_K", 1e-3, 1e3)
_MEMORY = _Number("bytes", 1 << 20, 1 << 60, whole=True)

_NUMBERS = {
    "cores": _Number("processors", 1, 1 << 20, whole=True),
    "threads": _Number("threads", 1, 1024, whole=True),
    "ram_bytes": _MEMORY,
    "ram_bytes_per_second": _BYTES_PER_SECOND,
    "cpu_flops": _FLOPS,
    "vram_bytes": _MEMORY,
    "pcie_bytes_per_second": _BYTES_PER_SECOND,
    "ram_bytes_per_second_shared": _BYTES_PER_SECOND,
    "pcie_bytes_per_second_shared": _BYTES_PER_SECOND,
    "vram_bytes_per_second": _BYTES_PER_SECOND,
    "gpu_kernel_seconds": _Number("seconds", 1e-9, 1.0),
    "gpu_flops": _FLOPS,
}
GPU_FIELDS = ("gpu", "vram_bytes", "pcie_bytes_per_second", "ram_bytes_per_second_shared",
              "pcie_bytes_per_second_shared", "vram_bytes_per_second", "gpu_kernel_seconds", "gpu_flops")
_RATES = tuple(name for name in _NUMBERS if name.endswith(("_per_second", "_per_second_shared", "_seconds", "_flops")))


def _problem(name: str, value: Any, has_gpu: bool) -> str | None:
    """What is wrong with a field, worded to follow its name, or None."""
    if name in GPU_FIELDS and name != "gpu":
        if value is None:
            return "is missing, though a GPU is named" if has_gpu else None
        if not has_gpu:
            return "is given, though no GPU is named"
    if name in _NUMBERS:
        return _NUMBERS[name].problem(value)
    if name == "spread":
        return _spread_problem(value, has_gpu)
    if name == "cpu_type_costs":
        return _costs_problem(value)
    if name in ("assumed", "busy"):
        return None if isinstance(value, bool) else "is neither true nor false"
    if name == "version":
        return None if value == PROFILE_VERSION and not isinstance(value, bool) else f"is not {PROFILE_VERSION}"
    if name == "measured":
        return _date_problem(value)
    if name == "gpu" and value is None:
        return None
    return None if isinstance(value, str) and value == device_name(value) else "is no name"


def _spread_problem(value: Any, has_gpu: bool) -> str | None:
    if not isinstance(value, Mapping):
        return "is no table of rates"
    for name, part in value.items():
        if name not in _RATES or (name in GPU_FIELDS and not has_gpu):
            return f"has {_shown(name)}, which is no rate of this machine"
        if problem := _PART.problem(part):
            return f"of {name} {problem}"
    return None


def _costs_problem(value: Any) -> str | None:
    if not isinstance(value, Mapping):
        return "is no table of types"
    for name, cost in value.items():
        if name not in COST_TYPES:
            return f"has {_shown(name)}, which is not measured"
        if problem := _COST.problem(cost):
            return f"of {name} {problem}"
    return None


def _converted(name: str, value: Any) -> Any:
    """A field as the profile has it: JSON tells no 40e9 from 40000000000."""
    return float(value) if value is not None and name in _NUMBERS and not _NUMBERS[name].whole else value


def _date_problem(value: Any) -> str | None:
    try:
        if value != "":
            datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return "is no date"
    return None


def device_name(text: str) -> str:
    """A device's name as the system says it, made fit for a file and a terminal."""
    shown = "".join(c for c in text if c.isprintable()).strip()[:_LONGEST_NAME].strip()
    return shown or "unknown"


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """A machine and its measured rates: bytes, bytes per second, operations per second, seconds. Each is the best of
    several samples.

    Of the CPU, by `threads` threads: `ram_bytes_per_second`, weights read by products of Q4_K matrices with one row of
    activations; `cpu_flops`, products with 256 rows (a multiplication and an addition are two operations).

    Of the GPU, all None if there is none: `pcie_bytes_per_second`, copies of pinned memory to it;
    `ram_bytes_per_second_shared` and `pcie_bytes_per_second_shared`, both of these at once; `vram_bytes_per_second`,
    weights read by products with one row; `gpu_kernel_seconds`, a small kernel of a captured step; `gpu_flops`,
    products with 2,048 rows.

    `spread`: by the name of a rate, the part by which its slowest sample fell short of the best. `busy`: other programs
    were at work, so that the machine may do better. `cpu_type_costs`: by type, the time in which the CPU reads a byte
    of weights, as a multiple of that of Q4_K; `cost_of` has it for every type. `assumed`: (some of) the rates are not
    measured but typical ones. `measured`: when, as ISO 8601, or "".
    Raises `InvalidRequestError` for what no machine can have.
    """

    version: int = PROFILE_VERSION
    assumed: bool = False
    cpu: str
    cores: int
    threads: int
    ram_bytes: int
    ram_bytes_per_second: float
    cpu_flops: float
    gpu: str | None = None
    vram_bytes: int | None = None
    pcie_bytes_per_second: float | None = None
    ram_bytes_per_second_shared: float | None = None
    pcie_bytes_per_second_shared: float | None = None
    vram_bytes_per_second: float | None = None
    gpu_kernel_seconds: float | None = None
    gpu_flops: float | None = None
    measured: str = ""
    spread: Mapping[str, float] = field(default_factory=dict, hash=False)
    busy: bool = False
    cpu_type_costs: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for each in fields(self):
            problem = _problem(each.name, getattr(self, each.name), self.gpu is not None)
            if problem:
                raise InvalidRequestError(f"hardware profile: {each.name} {problem}")

    def __repr__(self) -> str:
        pcie = "" if self.pcie_bytes_per_second is None else f", PCIe {self.pcie_bytes_per_second / 1e9:.1f} GB/s"
        gpu = "" if self.gpu is None else f" and {self.gpu!r}"
        return (f"<HardwareProfile of {self.cpu!r}{gpu}: RAM {self.ram_bytes_per_second / 1e9:.1f} GB/s{pcie}"
                f"{', assumed' if self.assumed else ''}>")

    def cost_of(self, name: str) -> float:
        """The time in which the CPU reads a byte of weights of a type, as a multiple of that of Q4_K."""
        return cost_of(self.cpu_type_costs, name)

    def to_dict(self) -> dict[str, Any]:
        """Every field, as a profile's file has them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "hardware profile") -> HardwareProfile:
        """The profile that `to_dict` made `values` of, now or in an earlier version. Raises `InvalidRequestError`, in
        one line that begins with `source`, for anything that is no profile."""
        if not isinstance(values, Mapping):
            raise _refusal(source, "it is no table of fields")
        version = values.get("version", None)
        if version not in range(1, PROFILE_VERSION + 1) or isinstance(version, bool):
            said = "there is no version" if version is None else f"version is {_shown(version)}"
            raise _refusal(source, f"{said}, where 1 to {PROFILE_VERSION} are known")
        known = [each.name for each in fields(cls) if version >= _SINCE_VERSION.get(each.name, 1)]
        for name in known:
            if name not in values:
                raise _refusal(source, f"{name} is missing")
        for name in values:
            if name not in known:
                raise _refusal(source, f"{_shown(name)} is no field of a profile")
        values = {**values, "version": PROFILE_VERSION}
        for name in known:
            problem = _problem(name, values[name], values["gpu"] is not None)
            if problem:
                raise _refusal(source, f"{name} {problem}")
        return cls(**{name: _converted(name, values[name]) for name in known})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile's file; one that is there is replaced as a whole. Raises `InvalidRequestError` if that
        cannot be."""
        try:
            write_whole(path, (json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n").encode())
        except (OSError, ValueError) as error:
            raise InvalidRequestError(
                f"{_shown(os.fspath(path))}: the profile cannot be written there: {_reason(error)}") from error

    def with_assumed_gpu(self) -> HardwareProfile:
        """This machine with the GPU that `ASSUMED` has: for plans for a GPU that is not there."""
        spread = {name: part for name, part in self.spread.items() if name not in GPU_FIELDS}
        return replace(self, assumed=True, spread=spread, **{name: getattr(ASSUMED, name) for name in GPU_FIELDS})


# What a plan reckons with if nothing could be measured: a desktop of 2023 with 8 cores, two channels of DDR5-5600
# (of 90 GB/s on paper the products reach about half), a GPU of 12 GiB at 500 GB/s behind PCIe 4.0 with 16 lanes (of
# 31.5 GB/s on paper copies reach about 24). While both work, copies take from the RAM what the CPU would have had.
ASSUMED = HardwareProfile(
    assumed=True,
    cpu="a CPU of 8 cores (assumed)",
    cores=8,
    threads=8,
    ram_bytes=32 << 30,
    ram_bytes_per_second=40e9,
    cpu_flops=0.5e12,
    gpu="a GPU behind PCIe 4.0 x16 (assumed)",
    vram_bytes=12 << 30,
    pcie_bytes_per_second=24e9,
    ram_bytes_per_second_shared=26e9,
    pcie_bytes_per_second_shared=22e9,
    vram_bytes_per_second=350e9,
    gpu_kernel_seconds=2e-6,
    gpu_flops=40e12,
)


def load_profile(path: str | os.PathLike[str]) -> HardwareProfile:
    """The profile in a file. Raises `InvalidRequestError`, in one line that names the file, what is wrong with it and
    what to do, for anything else."""
    source = _shown(os.fspath(path))
    try:
        with open(path, "rb") as file:
            content = file.read(_LONGEST_FILE + 1)
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{source}: the profile cannot be read: {_reason(error)}") from error
    if len(content) > _LONGEST_FILE:
        raise _refusal(source, "it is too large for a profile")
    try:
        values = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _refusal(source, "it is no JSON") from error
    return HardwareProfile.from_dict(values, source)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}…"


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())


def _refusal(source: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{source}: {what}; `sharpi hardware --save FILE` makes a profile of the machine it runs on")
