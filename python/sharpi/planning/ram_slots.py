"""Plans for the CPU of mixtures that are larger than RAM: slots in RAM hold the experts that are used most, and the
others are read from the disk when a token chooses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from sharpi.machine.disk import ASSUMED_BYTES_PER_SECOND, disk_bytes_per_second
from sharpi.machine.hardware import free_ram_bytes
from sharpi.machine.profile import HardwareProfile
from sharpi.planning.copies import kept
from sharpi.planning.placement import ExpertPool, Placed, Use
from sharpi.planning.plan import UNIFORM_ROUTING
from sharpi.planning.prediction import (
    Cached,
    cached_experts,
    decode_from_disk,
    hit_rate,
    prefill_from_disk,
)
from sharpi.planning.request import Request

__all__ = ["RamSlots"]

# What slots leave of the RAM: to the page cache, in which the other weights and long prompts' experts are, and to other
# programs. No more than a part of a small RAM.
_MARGIN, _MARGIN_PART = 1 << 30, 8


class RamSlots:
    """The slots of a plan for the CPU. `room`: the machine's RAM."""

    def __init__(self, request: Request, batch: int, room: int) -> None:
        self._request, self._batch = request, batch
        self.expert_bytes = self._bytes_of(request.inventory.uses)
        self._weights = weights = sum(tensor.nbytes for tensor in request.file.tensors)
        self._others = weights - self.expert_bytes
        # What a person plans for another machine, or a test sets, is all free.
        free = room if request.ram is not None else min(room, free_ram_bytes())
        self._taken = taken = request.total("cpu", request.context, batch, ())
        # Slots cannot be taken back when a scheduler's copies grow.
        copies = kept(room, recurrent=request.spec.state_bytes > 0, spill_bytes=request.spill_bytes).total
        self.bytes = 0
        # What all must fit into.
        self.room = room
        if not self.expert_bytes or weights + taken <= free:
            return
        margin = min(_MARGIN, free // _MARGIN_PART)
        # A budget without room for slots counts for nothing.
        for budget in (free if request.ram_budget is None else request.ram_budget, free):
            self.bytes = self._fitting(min(free - margin, budget) - copies)
            if self.bytes:
                self.room = min(free, budget) - copies
                return

    def fits(self, context: int, rows: int) -> bool:
        """Whether what must be in RAM is: everything, but for experts that slots are for."""
        away = self.expert_bytes if self.bytes else 0
        return self._weights - away + self._request.total("cpu", context, rows, ()) <= self.room

    @cached_property
    def pools(self) -> tuple[ExpertPool, ...]:
        """What the slots are."""
        return self._pools_of(self.bytes)

    def details(self) -> dict[str, Any]:
        """What the plan says of them, apart from speeds."""
        if not self.bytes:
            return {}
        # Saved statistics do not fill these slots.
        cached = cached_experts(self._request.inventory.uses, self.pools)
        return {"slots": self.bytes, "disk_bytes": self.expert_bytes, "expert_pools": self.pools,
                "hit_rate": hit_rate(cached), "hit_source": UNIFORM_ROUTING}

    def speeds(self, plain: Mapping[str, Any], profile: HardwareProfile) -> dict[str, Any]:
        """The speeds and the placement of a plan whose experts are all in RAM, `plain`, with the disk's part."""
        request = self._request
        # Predictions are without drafts.
        cached = {layer: known for layer, known in
                  cached_experts(request.inventory.on(profile).uses, self.pools).items()
                  if layer < request.spec.layer_count}
        rate = self._disk()
        used = self._bytes_of(request.inventory.model_uses)
        return {**plain, "disk_bytes_per_second": rate,
                "placement": tuple(self._placed(each) for each in plain["placement"]),
                "decode": decode_from_disk(plain["decode"], cached, rate),
                "decode_full": decode_from_disk(plain["decode_full"], cached, rate),
                "prefill": prefill_from_disk(plain["prefill"], self._batch, self._held(cached), used, rate),
                "draft_cost": None}

    def _fitting(self, room: int) -> int:
        """What slots may take of this RAM; 0 if there is none for a useful number."""
        left = max(0, room - self._others - self._taken)
        return left if left and any(pool.slots for pool in self._pools_of(left)) else 0

    def _pools_of(self, count: int) -> tuple[ExpertPool, ...]:
        """What slots of so many bytes are."""
        options = self._request.options("cpu", self._request.context, self._batch, (), count)
        return tuple(ExpertPool(*pool) for pool in self._request.spec.expert_pools(options))

    def _bytes_of(self, uses: Sequence[Use]) -> int:
        """What the experts take. A tensor may hold two of their matrices, and then has two uses."""
        return sum(self._request.file.tensors[tensor].nbytes
                   for tensor in {use.tensor for use in uses if use.role == "experts"})

    def _held(self, cached: Mapping[int, Cached]) -> float:
        return sum(layer.held for layer in cached.values()) / max(1, len(cached))

    def _disk(self) -> float:
        path = max(self._request.file.paths, key=lambda each: each.stat().st_size if each.exists() else 0, default=None)
        return (disk_bytes_per_second(path) if path is not None else None) or ASSUMED_BYTES_PER_SECOND

    def _placed(self, placed: Placed) -> Placed:
        if placed.kind != "experts":
            return placed
        held = sum(pool.slots for pool in self.pools) / max(1, sum(pool.experts for pool in self.pools))
        kept = round(placed.cpu * held)
        return placed._replace(cpu=kept, disk=placed.cpu - kept)


