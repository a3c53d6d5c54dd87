"""What is under a model's file: how fast the disk is, for models that are larger than RAM, or RAM itself."""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = ["ASSUMED_BYTES_PER_SECOND", "bytes_in_ram", "disk_bytes_per_second"]

# Of an NVMe disk of the usual kind, for files that are not here.
ASSUMED_BYTES_PER_SECOND = 3e9
# As a step reads experts: it misses one or two at a time, of three matrices each. More requests are not faster
# everywhere: a virtual disk gave 1.9 GB/s to one reader and 1.1 to sixteen.
_READERS, _BLOCK = 4, 1 << 20
_SECONDS = 0.6
_MOUNTS, _IN_RAM = "/proc/self/mountinfo", ("tmpfs", "ramfs", "hugetlbfs")


def bytes_in_ram(paths: Iterable[Path]) -> int:
    """Bytes of these files that are in RAM for good, because their file system is (tmpfs): who maps them needs no RAM
    for them."""
    try:
        mounts = Path(_MOUNTS).read_text(encoding="utf-8", errors="replace").splitlines()
        halves = [line.split(" - ", 1) for line in mounts if " - " in line]
        devices = {own.split(" ")[2] for own, file_system in halves if file_system.split(" ")[0] in _IN_RAM}
        found = [os.stat(path) for path in paths]
    except OSError:
        return 0
    return sum(status.st_blocks * 512 for status in found
               if f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}" in devices)


def disk_bytes_per_second(path: Path, readers: int = _READERS) -> float | None:
    """Random blocks of the file, past the page cache, `readers` at a time. `None` if the file cannot be read like that.
    A virtual machine's disk may be served from its host's memory; nobody here can tell."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except (OSError, AttributeError):  # no such file, or a system or file system that cannot
        return None
    try:
        status = os.fstat(file)
        # A file with holes is the header of one that is not here yet.
        whole = status.st_blocks * 512 >= status.st_size * 0.9
        return _rate(file, status.st_size // _BLOCK, readers) if whole and status.st_size >= _BLOCK else None
    finally:
        os.close(file)


def _rate(file: int, blocks: int, readers: int) -> float | None:
    counts, failed = [0] * readers, threading.Event()
    begin = time.perf_counter()

    def read(reader: int) -> None:
        choose = random.Random(reader)
        with mmap.mmap(-1, _BLOCK) as block:  # at the start of a page, as O_DIRECT wants it
            while time.perf_counter() - begin < _SECONDS and not failed.is_set():
                try:
                    counts[reader] += os.preadv(file, [block], choose.randrange(blocks) * _BLOCK)
                except OSError:
                    failed.set()

    threads = [threading.Thread(target=read, args=(reader,), daemon=True) for reader in range(readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return None if failed.is_set() else sum(counts) / (time.perf_counter() - begin)
