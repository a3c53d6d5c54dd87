"""What this machine has: its processor, the memory that a model may fill, and the GPU. How fast they are: `profile`."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sharpi.errors import SharpiError

__all__ = ["Gpu", "busy_seconds", "core_count", "cpu_name", "free_ram_bytes", "gpu", "machine_core_count",
           "present_ram_bytes", "ram_bytes", "usable_threads"]

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
# All RAM in blocks of one size, also what a balloon holds; devices that add RAM while the machine runs, by name; and
# the ranges of addresses that those devices may fill, which only root sees.
_BLOCKS, _GROWING, _RANGES = "/sys/devices/system/memory", "/sys/bus/virtio/drivers/virtio_mem", "/proc/iomem"
# The kernel keeps a smaller part of the blocks for itself; what more is missing is in a balloon.
_KERNELS_PART = 8


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


def present_ram_bytes() -> int:
    """The RAM in bytes that the machine has now."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def ram_bytes() -> int:
    """The machine's RAM in bytes, or a container's limit on it if that is smaller. A virtual machine's counts as large
    as it may grow, as far as the system says so, or SHARPI_RAM_GB."""
    present = present_ram_bytes()
    return min([_promised() or max(present + _unplugged(), _with_balloon(present)), *_container_limits()])


def free_ram_bytes() -> int:
    """What this process can still take of the RAM without swapping, the page cache included. RAM that the machine does
    not have yet counts only if SHARPI_RAM_GB says that it will: what is taken before it comes ends processes."""
    from sharpi import _core  # late: planning and `sharpi --help` need no core

    return _core.free_ram() + max(0, _promised() - present_ram_bytes())


def _promised() -> int:
    return int(float(os.environ.get("SHARPI_RAM_GB") or 0) * (1 << 30))


def _unplugged() -> int:
    """Bytes that devices may still add."""
    devices, missing = {path.name for path in Path(_GROWING).glob("virtio*")}, 0
    if not devices:
        return 0
    for line in _read(_RANGES).splitlines():
        addresses, _, name = line.strip().partition(" : ")
        begin, _, end = addresses.partition("-")
        count = int(end, 16) - int(begin, 16) + 1 if int(end, 16) else 0
        missing += count if name in devices else -count if name == "System RAM (virtio_mem)" else 0
    return max(0, missing)


def _with_balloon(present: int) -> int:
    """What the machine has if a balloon gives back all that it holds."""
    size = int(_read(f"{_BLOCKS}/block_size_bytes") or "0", 16)
    whole = size * sum(1 for _ in Path(_BLOCKS).glob("memory[0-9]*"))
    return whole if whole - present > whole // _KERNELS_PART else present


def _read(path: str) -> str:
    """The text of a file of the system's; nothing if it cannot be read."""
    try:
        return Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""


def _container_limits() -> list[int]:
    limits = []
    for path in _CGROUP_LIMITS:
        words = _read(path).split()
        # "max" (cgroup v2) means no limit; v1 says so with a number beyond any machine.
        if words and words[0].isdigit() and int(words[0]) > 0:
            limits.append(int(words[0]))
    return limits
