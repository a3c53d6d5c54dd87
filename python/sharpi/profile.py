"""How fast a machine is at what a model's steps are made of: what plans predict speed from and share work out by.

The core measures it in a few seconds, once per machine; the result is kept in the user's cache folder. A profile is
also a small JSON file, so that a plan can be made for a machine one does not have.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from collections.abc import Callable, Mapping

from sharpi import hardware
from sharpi.errors import InvalidRequestError

__all__ = ["ASSUMED", "PROFILE_VERSION", "HardwareProfile", "cache_path", "cached_profile", "current_profile", "keep",
           "load_profile", "measure_profile", "uses_all_cores"]

# Of the format: what a field means changes with it, so that a profile of another version is measured anew.
PROFILE_VERSION = 1

_MOST_BYTES = 1 << 30  # to take of each memory while measuring; the core's own default
_LONGEST_FILE = 1 << 20
_LONGEST_NAME = 200
# A driver's or a kernel's update changes what they say of the same memory a little.
_SAME_MEMORY = 0.02


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
_GPU_FIELDS = ("gpu", "vram_bytes", "pcie_bytes_per_second", "ram_bytes_per_second_shared",
               "pcie_bytes_per_second_shared", "vram_bytes_per_second", "gpu_kernel_seconds", "gpu_flops")


def _problem(name: str, value: Any, has_gpu: bool) -> str | None:
    """What is wrong with a field, worded to follow its name, or None."""
    if name in _GPU_FIELDS and name != "gpu":
        if value is None:
            return "is missing, though a GPU is named" if has_gpu else None
        if not has_gpu:
            return "is given, though no GPU is named"
    if name in _NUMBERS:
        return _NUMBERS[name].problem(value)
    if name == "assumed":
        return None if isinstance(value, bool) else "is neither true nor false"
    if name == "version":
        return None if value == PROFILE_VERSION and not isinstance(value, bool) else f"is not {PROFILE_VERSION}"
    if name == "measured":
        return _date_problem(value)
    if name == "gpu" and value is None:
        return None
    return None if isinstance(value, str) and value == _name(value) else "is no name"


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


def _name(text: str) -> str:
    """A device's name, fit for a file and a terminal."""
    shown = "".join(c for c in text if c.isprintable()).strip()[:_LONGEST_NAME].strip()
    return shown or "unknown"


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """A machine and its measured rates: bytes, bytes per second, operations per second, seconds.

    Of the CPU, by `threads` threads: `ram_bytes_per_second`, weights read by products of Q4_K matrices with one row of
    activations; `cpu_flops`, products with 256 rows (a multiplication and an addition are two operations).

    Of the GPU, all None where there is none: `pcie_bytes_per_second`, copies of pinned memory to it;
    `ram_bytes_per_second_shared` and `pcie_bytes_per_second_shared`, both of these at once; `vram_bytes_per_second`,
    weights read by products with one row; `gpu_kernel_seconds`, a small kernel of a captured step; `gpu_flops`,
    products with 2,048 rows.

    `assumed`: (some of) the rates are not measured but typical ones. `measured`: when, as ISO 8601, or "".
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

    def __post_init__(self) -> None:
        for field in fields(self):
            problem = _problem(field.name, getattr(self, field.name), self.gpu is not None)
            if problem:
                raise InvalidRequestError(f"hardware profile: {field.name} {problem}")

    def to_dict(self) -> dict[str, Any]:
        """Every field, as a profile's file has them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "hardware profile") -> HardwareProfile:
        """The profile that `to_dict` made `values` of. Raises `InvalidRequestError`, in one line that begins with
        `source`, for anything that is no profile."""
        if not isinstance(values, Mapping):
            raise _refusal(source, "it is no table of fields")
        version = values.get("version", None)
        if version != PROFILE_VERSION or isinstance(version, bool):
            said = "there is no version" if version is None else f"version is {_shown(version)}"
            raise _refusal(source, f"{said}, where {PROFILE_VERSION} is known")
        known = [field.name for field in fields(cls)]
        for name in known:
            if name not in values:
                raise _refusal(source, f"{name} is missing")
        for name in values:
            if name not in known:
                raise _refusal(source, f"{_shown(name)} is no field of a profile")
        for name in known:
            problem = _problem(name, values[name], values["gpu"] is not None)
            if problem:
                raise _refusal(source, f"{name} {problem}")
        return cls(**{name: _converted(name, values[name]) for name in known})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile's file; one that is there is replaced as a whole. Raises `InvalidRequestError` where that
        cannot be."""
        try:
            self._write(Path(path))
        except (OSError, ValueError) as error:
            raise InvalidRequestError(
                f"{_shown(os.fspath(path))}: the profile cannot be written there: {_reason(error)}") from error

    def with_assumed_gpu(self) -> HardwareProfile:
        """This machine with the GPU that `ASSUMED` has: for plans for a GPU that is not there."""
        return replace(self, assumed=True, **{name: getattr(ASSUMED, name) for name in _GPU_FIELDS})

    def _write(self, path: Path) -> None:
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")  # a pipe, a terminal: nothing that could be replaced
            return
        target = Path(os.path.realpath(path))
        draft = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, target)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


# What a plan reckons with where nothing could be measured: a desktop of 2023 with 8 cores, two channels of DDR5-5600
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


def measure_profile(threads: int | None = None) -> HardwareProfile:
    """Measures this machine now, which takes a few seconds; `threads`: the CPU's, all by default.

    Raises `OutOfMemoryError` where too little memory is free to measure in.
    """
    from sharpi import _core  # late: planning and `sharpi --help` need no core

    count = hardware.core_count() if threads is None else threads
    # A quarter of what a container may have: the core itself only knows what the machine has free.
    rates = _core.measure_hardware(count, max(1 << 20, min(_MOST_BYTES, hardware.ram_bytes() // 4)))
    values = {**_this_machine(), **rates}
    if values.pop("gpu_missing", None) is not None or values["gpu"] is None:  # it may have gone in between
        values.update(dict.fromkeys(_GPU_FIELDS))
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return HardwareProfile(threads=count, measured=now, **values)


def current_profile(measure: bool = True, announce: Callable[[], None] | None = None) -> HardwareProfile:
    """This machine's profile: the one kept from before, else measured now and kept.

    With measure=False nothing is measured, and `ASSUMED` is what there is where none was kept. `announce` is called
    before a measurement begins. Raises as `measure_profile` does: who asks says so, and goes on with `ASSUMED`.
    """
    kept = cached_profile()
    if kept is not None:
        return kept
    if not measure:
        return ASSUMED
    if announce is not None:
        announce()
    profile = measure_profile()
    keep(profile)
    return profile


def cached_profile() -> HardwareProfile | None:
    """The profile kept from an earlier measurement of this machine with all of its processors, or None: there is none,
    it is damaged, of another version, or of a machine that was another one then."""
    path = cache_path()
    if path is None:
        return None
    try:
        profile = load_profile(path)
    except InvalidRequestError:
        return None
    whole = profile.threads == profile.cores and not profile.assumed
    return profile if whole and _is_this_machine(profile) else None


def uses_all_cores(profile: HardwareProfile) -> bool:
    """Whether a profile that this process measured has the rates of the whole machine: as many threads as it has
    processors, and this process may use them all."""
    return profile.threads == profile.cores == hardware.core_count()


def keep(profile: HardwareProfile) -> bool:
    """Puts a profile that this process measured into the cache; False where it was not measured with all processors,
    and where there can be no cache, which costs only the next measurement."""
    path = cache_path()
    if path is None or not uses_all_cores(profile):
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.save(path)
    except (OSError, InvalidRequestError):
        return False
    return True


def cache_path() -> Path | None:
    """Where this user's profile is kept; None for a user without a home."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):  # the specification of that variable: relative paths are to be ignored
        try:
            folder = os.path.join(Path.home(), ".cache")
        except RuntimeError:
            return None
    return Path(folder) / "sharpi" / "hardware.json"


def _this_machine() -> dict[str, Any]:
    """What tells one machine from another, by the profile's fields."""
    found = hardware.gpu()
    has_gpu = isinstance(found, hardware.Gpu)
    return {
        "cpu": _name(hardware.cpu_name()),
        "cores": hardware.machine_core_count(),
        "ram_bytes": hardware.ram_bytes(),
        "gpu": _name(found.name) if has_gpu else None,
        "vram_bytes": found.total_bytes if has_gpu else None,
    }


def _is_this_machine(profile: HardwareProfile) -> bool:
    here = _this_machine()
    return (all(getattr(profile, name) == here[name] for name in ("cpu", "cores", "gpu"))
            and _same_memory(profile.ram_bytes, here["ram_bytes"])
            and _same_memory(profile.vram_bytes, here["vram_bytes"]))


def _same_memory(one: int | None, other: int | None) -> bool:
    if one is None or other is None:
        return one == other
    return abs(one - other) <= _SAME_MEMORY * max(one, other)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}…"


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())


def _refusal(source: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{source}: {what}; `sharpi hardware --save FILE` makes a profile of the machine it runs on")
