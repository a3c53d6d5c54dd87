"""The profile that is kept for this machine: how it is measured, where it is, and how long it holds.

It is measured when it is first needed, and again if the machine has changed, if it is old, if the machine was busy at
the time, and if a model ran at another speed than was predicted from it (`agreement`). A profile that cannot be
replaced, as in a folder that is read-only, is used for as long as the machine is the same.
"""

from __future__ import annotations

import fcntl
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from sharpi.errors import InvalidRequestError, SharpiError
from sharpi.machine import hardware
from sharpi.machine.profile import ASSUMED, GPU_FIELDS, HardwareProfile, device_name, load_profile
from sharpi.storage import cache_folder, write_whole

__all__ = ["BUSY_AGE", "LONGEST_AGE", "age_of", "cache_path", "cached_profile", "current_profile", "doubt", "keep",
           "measure_profile", "measuring_words", "may_be_kept", "why_stale"]

# How long a profile holds, and one that was measured while other programs were at work.
LONGEST_AGE, BUSY_AGE = timedelta(days=30), timedelta(hours=1)
# A clock that was set back: by less than this it does not matter.
_CLOCK_SKEW = timedelta(hours=1)
# The machine is busy if other programs have this part of its processors, or if the median sample of what the CPU does
# is this much slower than the best.
_BUSY_SHARE, _BUSY_MEDIAN = 0.1, 0.2
_MOST_BYTES = 1 << 30  # to take of each memory while measuring: several times the size of any cache
# A driver's or a kernel's update changes what they say of the same memory a little.
_SAME_MEMORY = 0.02
_MOST_DOUBTS = 64  # models
_LONGEST_DOUBTS = 1 << 16  # bytes
_LONGEST_WAIT = 60.0  # seconds, for another process that measures


def measure_profile(threads: int | None = None, gpu_index: int = 0) -> HardwareProfile:
    """Measures this machine now, with this GPU, which takes a few seconds; `threads`: the CPU's, all by default.

    Raises `OutOfMemoryError` if too little memory is free to measure in.
    """
    from sharpi import _core  # late: planning and `sharpi --help` need no core

    count = hardware.core_count() if threads is None else threads
    others = _Others()
    # A quarter of what a container may have: the core itself only knows what the machine has free.
    most_bytes = max(1 << 20, min(_MOST_BYTES, hardware.ram_bytes() // 4))
    samples = _core.measure_hardware(count, most_bytes, gpu_index)
    others_share = others.share()
    machine = _this_machine(gpu_index)
    if samples.pop("gpu_missing", None) is not None or machine["gpu"] is None:  # it may have gone in between
        machine.update(dict.fromkeys(GPU_FIELDS))
        samples = {name: values for name, values in samples.items() if name not in GPU_FIELDS}
    costs = {name: round(cost, 4) for name, cost in samples.pop("cpu_type_costs").items()}
    best, spread = _judged(samples)
    busy = others_share > _BUSY_SHARE or any(
        statistics.median(samples[name]) < (1 - _BUSY_MEDIAN) * best[name]
        for name in ("ram_bytes_per_second", "cpu_flops"))
    return HardwareProfile(threads=count, measured=_now().isoformat(timespec="seconds"), spread=spread, busy=busy,
                           cpu_type_costs=costs, **{**machine, **best})


def _judged(samples: Mapping[str, Sequence[float]]) -> tuple[dict[str, float], dict[str, float]]:
    """The best sample of each rate, and how far the slowest falls short of it. For rates that were measured
    together, it is the sample whose sum is best."""
    together = [name for name in samples if name.endswith("_shared")]
    sums = [sum(rates) for rates in zip(*(samples[name] for name in together), strict=True)]
    best, spread = {}, {}
    for name, values in samples.items():
        if name.endswith("_seconds"):  # less is better
            best[name], slowest = min(values), max(values)
            spread[name] = 1 - best[name] / slowest
        else:
            best[name] = values[sums.index(max(sums))] if name in together else max(values)
            spread[name] = max(0.0, 1 - min(values) / best[name])
    return best, {name: round(part, 4) for name, part in spread.items()}


class _Others:
    """What other programs take of the processors, from when this is made."""

    def __init__(self) -> None:
        self._before = self._clocks()

    def share(self) -> float:
        """The part of all processors, 0 if the system does not say."""
        (began, all_before, own_before), (ended, all_after, own_after) = self._before, self._clocks()
        if all_before is None or all_after is None or ended <= began:
            return 0.0
        others = (all_after - all_before) - (own_after - own_before)
        return max(0.0, others) / ((ended - began) * hardware.machine_core_count())

    @staticmethod
    def _clocks() -> tuple[float, float | None, float]:
        return time.monotonic(), hardware.busy_seconds(), time.process_time()


def current_profile(measure: bool = True, announce: Callable[[str], None] | None = None,
                    gpu_index: int = 0) -> HardwareProfile:
    """The profile of this machine with this GPU: the one kept from before while it holds, else measured now and kept.

    With measure=False nothing is measured: a profile that no longer holds is better than none, and without one there is
    `ASSUMED`. `announce` is called before a measurement begins, with the reason why one that was kept no longer holds,
    else with "". Raises as `measure_profile` does if there is nothing to fall back on.
    """
    kept = cached_profile(gpu_index)
    if kept is not None and (not measure or why_stale(kept) is None or not _may_keep()):
        return kept
    if not measure:
        return ASSUMED
    with _turn(_LONGEST_WAIT):
        kept = cached_profile(gpu_index)  # perhaps another process has just measured
        reason = None if kept is None else why_stale(kept)
        if kept is not None and reason is None:
            return kept
        if announce is not None:
            announce(reason or "")
        try:
            profile = measure_profile(gpu_index=gpu_index)
        except SharpiError:
            if kept is None:
                raise
            return kept
        keep(profile)
        return profile


def measuring_words(reason: str) -> str:
    """The line that says that a measurement begins; reason: see `current_profile`."""
    return f"measuring this machine {f'again, a few seconds: {reason}' if reason else 'once, a few seconds'}"


def cached_profile(gpu_index: int = 0) -> HardwareProfile | None:
    """The profile kept from an earlier measurement of this machine, with all of its processors and this GPU, however
    old. None if there is none, if it is damaged, or if the machine has changed or the GPU is of another kind."""
    path = cache_path()
    if path is None:
        return None
    try:
        profile = load_profile(path)
    except InvalidRequestError:
        return None
    whole = profile.threads == profile.cores and not profile.assumed
    return profile if whole and _is_this_machine(profile, gpu_index) else None


def why_stale(profile: HardwareProfile) -> str | None:
    """Why the profile of this machine should be measured again, worded to follow a colon, or None if it holds."""
    age = age_of(profile)
    if age is None or not profile.spread or not profile.cpu_type_costs:
        return "an earlier version of Sharpi measured it"
    if age < -_CLOCK_SKEW:
        return "its date is in the future"
    if age > LONGEST_AGE:
        return f"that was {age.days} days ago"
    if profile.busy and age > BUSY_AGE:
        return "other programs were busy the last time"
    if _Doubts.read().profile == profile.measured:
        return "a model did not run at the predicted speed"
    return None


def age_of(profile: HardwareProfile) -> timedelta | None:
    """How long ago it was measured; None for a profile without a date."""
    if not profile.measured:
        return None
    measured = datetime.fromisoformat(profile.measured)
    return _now() - (measured if measured.tzinfo else measured.replace(tzinfo=timezone.utc))


def may_be_kept(profile: HardwareProfile) -> bool:
    """Whether a profile that this process measured has the rates of the whole machine: as many threads as it has
    processors, this process may use them all, and the fastest instructions too."""
    return profile.threads == profile.cores and _measures_all()


def keep(profile: HardwareProfile) -> bool:
    """Puts a profile that this process measured into the cache; False for one that is not to be kept, and if there can
    be no cache, which costs only the next measurement."""
    path = cache_path()
    if path is None or not may_be_kept(profile):
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.save(path)
    except (OSError, InvalidRequestError):
        return False
    doubts = _Doubts.read()
    if doubts.profile:
        _Doubts("", doubts.models).write()  # they were of the one before
    return True


def doubt(profile: HardwareProfile, key: str) -> bool:
    """Notes that the speeds predicted from the kept profile did not hold for what `key` names, so that the machine is
    measured again at the next start. False if that was tried for `key` within the time for which a profile holds: then
    it is the prediction that is off, not the profile. False too if nothing can be noted."""
    path = cache_path()
    if path is None or not _may_keep():
        return False
    with _turn(1.0):
        doubts = _Doubts.read()
        if key in doubts.models:
            return False
        return _Doubts(profile.measured, {**doubts.models, key: _now().isoformat(timespec="seconds")}).write()


@dataclass(frozen=True)
class _Doubts:
    """profile: the date of the profile that is doubted, or "". models: for what it has been measured again, and
    when."""

    profile: str = ""
    models: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls) -> _Doubts:
        """What was noted on this machine, without notes on models that are too old. Nothing if the file makes no
        sense."""
        path = cls._path()
        try:
            content = b"" if path is None else path.read_bytes()[:_LONGEST_DOUBTS]
            values = json.loads(content)
            if values["machine"] != _machine_words():
                return cls()
            now = _now()
            models = {str(key): date for key, date in values["models"].items()
                      if abs(now - datetime.fromisoformat(date)) <= LONGEST_AGE}
            return cls(str(values["profile"]), models)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return cls()

    def write(self) -> bool:
        """Whether it could be."""
        path = self._path()
        if path is None:
            return False
        last = dict(sorted(self.models.items(), key=lambda item: item[1])[-_MOST_DOUBTS:])
        try:
            write_whole(path, json.dumps({"machine": _machine_words(), "profile": self.profile, "models": last},
                                         indent=2).encode())
        except OSError:
            return False
        return True

    @staticmethod
    def _path() -> Path | None:
        path = cache_path()
        return None if path is None else path.with_name("doubts.json")


def cache_path() -> Path | None:
    """Where this user's profile is kept; None for a user without a home."""
    folder = cache_folder()
    return None if folder is None else folder / "hardware.json"


def _measures_all() -> bool:
    """Whether this process measures what the whole machine can do."""
    return hardware.core_count() == hardware.machine_core_count() and not os.environ.get("SHARPI_CPU_ISA")


def _may_keep() -> bool:
    """Whether what this process measures would replace what is kept."""
    path = cache_path()
    return path is not None and _measures_all() and os.access(path.parent, os.W_OK)


@contextmanager
def _turn(seconds: float) -> Iterator[None]:
    """Lets one process measure at a time, so that none disturbs another. Waits for at most `seconds`, and not at all if
    the folder cannot be locked."""
    path = cache_path()
    handle = None
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path.parent, os.O_RDONLY)
            _lock(handle, seconds)
    except OSError:
        pass
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)  # which unlocks it


def _lock(handle: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return None
            time.sleep(0.05)


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _this_machine(gpu_index: int = 0) -> dict[str, Any]:
    """What tells one machine from another, by the profile's fields. GPUs with the same name and memory are
    alike."""
    found = hardware.gpu(gpu_index)
    gpu = found if isinstance(found, hardware.Gpu) else None
    return {
        "cpu": device_name(hardware.cpu_name()),
        "cores": hardware.machine_core_count(),
        "ram_bytes": hardware.ram_bytes(),
        "gpu": device_name(gpu.name) if gpu else None,
        "vram_bytes": gpu.total_bytes if gpu else None,
    }


def _machine_words() -> str:
    here = _this_machine()
    return f"{here['cpu']}, {here['cores']} processors, {here['gpu']}"


def _is_this_machine(profile: HardwareProfile, gpu_index: int) -> bool:
    here = _this_machine(gpu_index)
    return (all(getattr(profile, name) == here[name] for name in ("cpu", "cores", "gpu"))
            and _same_memory(profile.ram_bytes, here["ram_bytes"])
            and _same_memory(profile.vram_bytes, here["vram_bytes"]))


def _same_memory(one: int | None, other: int | None) -> bool:
    if one is None or other is None:
        return one == other
    return abs(one - other) <= _SAME_MEMORY * max(one, other)
