"""What this machine has: for now, how much memory a model may fill."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


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
