"""Plans for the GPU of models that are larger than VRAM and RAM together: what is in RAM, and what is on the disk.

VRAM's slots hold the experts that are used most, slots in RAM those that are used most of the others, and the rest is
read from the disk. A model without slots in RAM comes through the system's page cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sharpi.planning.disk import (
    Read,
    SlotsInRam,
    free_ram,
    left_for_weights,
    present_ram,
    read_of_experts,
    slotted,
    speeds_reading,
)
from sharpi.planning.placement import ExpertPool, Placed
from sharpi.planning.prediction.decode import cached_experts, hit_rate
from sharpi.planning.request import Request

__all__ = ["BesideVram"]

# Slots are locked, so the system can neither swap them out nor drop them: a part of the RAM stays for all else.
_UNLOCKED = 16


class BesideVram:
    """What a plan for the GPU has outside of VRAM."""

    def __init__(self, request: Request, batch: int, placement: Sequence[Placed], pools: Sequence[ExpertPool],
                 most: int | None = None) -> None:
        """placement: with all that is outside of VRAM in RAM. pools: of the slots in VRAM. most: bytes that slots in
        RAM may take, if somebody has said."""
        self._request, self._batch, self._placement, self._in_vram = request, batch, placement, pools
        self._wanted = sum(_outside(placed) for placed in placement)
        self._bytes, self._pools = 0, tuple[ExpertPool, ...]()
        # The part of what is outside of VRAM that RAM has no room for. All of it is used alike; the page cache is taken
        # to hold what it has room for. Slots hold what they say.
        self._on_disk = 0.0
        free = free_ram(request)
        # Which experts VRAM holds changes, so without slots in RAM their file is needed whole.
        whole = self._wanted + sum(placed.vram for placed in placement if placed.kind == "experts" and _outside(placed))
        if whole <= free:
            return
        # Experts, those in VRAM included, and the other weights outside of VRAM exceed RAM: there is never room for all
        # experts.
        present = present_ram(request)
        room = min(left_for_weights(request, present), present - present // _UNLOCKED) - sum(
            _outside(placed) + placed.by_row for placed in placement if placed.kind != "experts")
        slots = SlotsInRam(request, batch)
        self._bytes = slots.fitting(room if most is None else min(room, most))
        if self._bytes:
            self._pools = slots.pools(self._bytes)
        else:
            self._on_disk = max(0.0, 1 - max(0, left_for_weights(request, free)) / max(1, self._wanted))

    def details(self) -> dict[str, Any]:
        """What the plan says of it, apart from speeds."""
        if not self._bytes:
            return {"placement": tuple(self._placement)}
        uses, warm = self._request.inventory.uses, self._request.warm
        both, first = (hit_rate(cached_experts(uses, pools, warm)) for pools in (self._all_slots(), self._in_vram))
        return {"placement": tuple(slotted(placed, self._pools) for placed in self._placement),
                "ram_slots": self._bytes, "ram_pools": self._pools, "ram_hit_rate": max(0.0, both - first)}

    def speeds(self, plain: Mapping[str, Any], read_outside: float) -> dict[str, Any]:
        """The speeds with the disk's part, those of `plain` being with all of it in RAM. read_outside: bytes that a
        token reads outside of VRAM; a batch reads all of it. Slots in RAM are taken to hold what is used most, as they
        do after a while."""
        request, batch = self._request, self._batch
        if not self._bytes:
            read = Read(self._on_disk * read_outside, self._on_disk * self._wanted)
            return speeds_reading(request, plain, batch, read) if self._on_disk else {}
        read = read_of_experts(request, self._all_slots(), warmed=True)
        if not read.batch:  # once it has been read, all is in VRAM or in RAM
            return {}
        speeds = speeds_reading(request, plain, batch, read)
        if (cost := plain["draft_cost"]) is not None:
            added = cost / plain["decode"].tokens_per_second + read.draft / request.disk_bytes_per_second
            speeds["draft_cost"] = added * speeds["decode"].tokens_per_second
        return speeds

    def _all_slots(self) -> tuple[ExpertPool, ...]:
        """The slots of VRAM and RAM as one pool: no expert is in both."""
        layers, experts = (sum(getattr(pool, name) for pool in self._pools) for name in ("layers", "experts"))
        slots = sum(pool.slots for pool in (*self._in_vram, *self._pools))
        return (ExpertPool(layers, experts, 0, min(experts, slots)),)


def _outside(placed: Placed) -> int:
    """Bytes that are used from RAM."""
    return placed.direct + placed.missed + placed.cpu
