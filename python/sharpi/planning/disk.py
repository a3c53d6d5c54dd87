"""What a plan has to read from the disk, because RAM has no room for it."""

from __future__ import annotations

from collections.abc import Sequence

from sharpi.machine.hardware import free_ram_bytes, ram_bytes
from sharpi.planning.copies import kept
from sharpi.planning.placement import Placed
from sharpi.planning.request import Request

__all__ = ["all_ram", "copies_bytes", "free_ram", "left_for_weights", "outside_vram", "part_on_disk"]

# What weights leave of the RAM to the page cache, which long prompts read experts by, and to other programs. No more
# than a part of a small RAM.
_MARGIN, _MARGIN_PART = 1 << 30, 8


def all_ram(request: Request) -> int:
    """The RAM of the machine that a plan is for."""
    return ram_bytes() if request.ram is None else request.ram


def free_ram(request: Request) -> int:
    """The RAM that a plan may take. What a person plans for another machine, or a test sets, is all free."""
    return min(ram_bytes(), free_ram_bytes()) if request.ram is None else request.ram


def left_for_weights(request: Request, free: int) -> int:
    """What weights have of the free RAM if not all of them have room there: schedulers keep copies in it, too."""
    return free - min(_MARGIN, free // _MARGIN_PART) - copies_bytes(request)


def copies_bytes(request: Request) -> int:
    """RAM for the copies of a scheduler."""
    return kept(all_ram(request), recurrent=request.spec.state_bytes > 0, spill_bytes=request.spill_bytes).total


def outside_vram(placement: Sequence[Placed]) -> int:
    """Bytes of the weights that a plan for the GPU uses from RAM."""
    return sum(placed.direct + placed.missed + placed.cpu for placed in placement)


def part_on_disk(request: Request, placement: Sequence[Placed]) -> float:
    """Of a plan for the GPU: the part of the weights outside of VRAM that RAM has no room for. All of them are used
    alike; the system's page cache is taken to hold what it has room for."""
    wanted, free = outside_vram(placement), free_ram(request)
    return 0.0 if wanted <= free else 1 - max(0, left_for_weights(request, free)) / wanted
