"""What this machine has: the memory that a model may fill, and the GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from sharpi.errors import SharpiError

__all__ = ["Gpu", "gpu", "ram_bytes"]

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Gpu:
    """The GPU that Sharpi would use. `free_bytes` is what its driver said when it was asked."""

    name: str
    index: int
    compute_capability: str
    multiprocessors: int
    total_bytes: int
    free_bytes: int


def gpu() -> Gpu | str:
    """The GPU, or in one line why there is none: a build without CUDA, no driver, no device, one too old or broken."""
    from sharpi import _core  # late: planning and `sharpi --help` need no core

    try:
        return Gpu(**_core.find_cuda_device())
    except SharpiError as reason:  # a GPU that cannot even be asked is none, whatever class its failure has
        return " ".join(str(reason).split())


def ram_bytes() -> int:
    """The machine's RAM in bytes, or a container's limit on it where that is smaller."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_container_limits()])


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
