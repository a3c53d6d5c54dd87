"""What this machine has: its processor, the memory that a model may fill, and the GPU. How fast they are: `profile`."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sharpi.errors import SharpiError

__all__ = ["Gpu", "busy_seconds", "core_count", "cpu_name", "free_ram_bytes", "gpu", "machine_core_count", "ram_bytes",
           "usable_threads"]

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Gpu:
    """A GPU. `index`: its number, as the driver counts them. `free_bytes` is what its driver said when it was asked."""

    name: str
    index: int
    compute_capability: str
    multiprocessors: int
    total_bytes: int
    free_bytes: int


def gpu(index: int = 0) -> Gpu | str:
    """The GPU with this number, or in one line why there is none: a build without CUDA, no driver, no device, one too
    old or broken."""
    from sharpi import _core  # late: planning and `sharpi --help` need no core

    try:
        return Gpu(**_core.find_cuda_device(index))
    except SharpiError as reason:  # a GPU that cannot even be asked is none, whatever class its failure has
        return " ".join(str(reason).split())


def cpu_name() -> str:
    """The processor's name as the system says it, or its kind if the system has no name for it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            names = (value for key, _, value in (line.partition(":") for line in lines) if key.strip() == "model name")
            name = next(names, "")
    except OSError:
        name = ""
    return " ".join((name or platform.processor() or platform.machine() or "unknown").split())


def core_count() -> int:
    """The number of logical processors that this process may use at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_threads(asked: int | None, notice: Callable[[str], None] | None = None, cores: int | None = None) -> int:
    """As many threads as `asked`, all by default, but no more than there are cores: threads that share one only get in
    each other's way. If the number is cut, `notice` is called with a line. cores: another machine's.
    """
    most = core_count() if cores is None else cores
    if asked is None or asked <= most:
        return int(most if asked is None else asked)
    if notice is not None:
        notice(f"{asked} threads are too many for {most} {'core' if most == 1 else 'cores'}: {most} will run")
    return most


def machine_core_count() -> int:
    """The number of logical processors that are online, whether or not this process may use them."""
    return max(os.cpu_count() or 1, core_count())


def busy_seconds() -> float | None:
    """Seconds for which the machine's processors have worked since it started, all of them together and whatever for;
    `None` if the system does not say. The time that a virtual machine had to wait for its processors counts as well."""
    try:
        with open("/proc/stat", encoding="ascii") as lines:
            name, *counts = next(lines).split()
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, counts[:8])
    except (OSError, ValueError, StopIteration):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") if name == "cpu" else None


def ram_bytes() -> int:
    """The machine's RAM in bytes, or a container's limit on it if that is smaller."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_container_limits()])


def free_ram_bytes() -> int:
    """What this process can still take of the RAM without swapping, the page cache included."""
    from sharpi import _core  # late: planning and `sharpi --help` need no core

    return _core.free_ram()


def _container_limits() -> list[int]:
    limits = []
    for path in _CGROUP_LIMITS:
        try:
            words = Path(path).read_text(encoding="ascii").split()
        except (OSError, UnicodeDecodeError):
            continue
        # "max" (cgroup v2) means no limit; v1 says so with a number beyond any machine.
        if words and words[0].isdigit() and int(words[0]) > 0:
            limits.append(int(words[0]))
    return limits
