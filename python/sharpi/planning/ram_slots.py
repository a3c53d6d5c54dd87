"""Plans for the CPU of mixtures that are larger than RAM: slots in RAM hold the experts that are used most, and the
others are read from the disk when a token chooses them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from sharpi.planning.disk import (
    Read,
    SlotsInRam,
    all_ram,
    copies_bytes,
    decode_reading,
    expert_bytes,
    free_ram,
    left_for_weights,
    read_of_experts,
    slotted,
    speeds_reading,
)
from sharpi.planning.placement import BY_ROW, ExpertPool
from sharpi.planning.plan import UNIFORM_ROUTING
from sharpi.planning.prediction.decode import Speed, cached_experts, hit_rate
from sharpi.planning.request import Request

__all__ = ["RamSlots"]


class RamSlots:
    """The slots of a plan for the CPU."""

    def __init__(self, request: Request, batch: int) -> None:
        self._request, self._batch, self._slots = request, batch, SlotsInRam(request, batch)
        self.expert_bytes = expert_bytes(request, request.inventory.uses)
        self._weights = weights = sum(tensor.nbytes for tensor in request.file.tensors)
        self._others = weights - self.expert_bytes
        free = free_ram(request)
        self._taken = taken = request.total("cpu", request.context, batch, ())
        self.bytes = 0
        # What all must fit into.
        self.room = all_ram(request)
        # The part of the weights that RAM has no room for; the system's page cache is taken to hold the others. Slots
        # hold what they say.
        self._on_disk = 0.0
        if weights + taken <= free:
            return
        # Slots cannot be taken back when a scheduler's copies grow. If there is no room for both, not even without a
        # budget, slots come first: without them each token would read most of the model.
        copies, left = copies_bytes(request), left_for_weights(request, free)
        budget = free if request.ram_budget is None else request.ram_budget
        for room, counted in ((min(left, budget - copies), min(free, budget) - copies), (left, free - copies),
                              (left + copies, free)):
            self.bytes = self._slots.fitting(room - self._others - taken) if self.expert_bytes else 0
            if self.bytes:
                self.room = counted
                return
        self._on_disk = 1 - max(0, left - taken) / weights

    def fits(self, context: int, rows: int) -> bool:
        """Whether what must be in RAM is: everything, but for experts that slots are for."""
        away = self.expert_bytes if self.bytes else 0
        return self._weights - away + self._request.total("cpu", context, rows, ()) <= self.room

    @cached_property
    def pools(self) -> tuple[ExpertPool, ...]:
        """What the slots are."""
        return self._slots.pools(self.bytes)

    def details(self) -> dict[str, Any]:
        """What the plan says of them, apart from speeds."""
        if not self.bytes:
            return {}
        # Saved statistics do not fill these slots.
        cached = cached_experts(self._request.inventory.uses, self.pools)
        return {"slots": self.bytes, "disk_bytes": self.expert_bytes, "expert_pools": self.pools,
                "hit_rate": hit_rate(cached), "hit_source": UNIFORM_ROUTING}

    def speeds(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        """The speeds and the placement of a plan whose weights are all in RAM, `plain`, with the disk's part."""
        if not self._reads:
            return dict(plain)
        made = {**plain, **speeds_reading(self._request, plain, self._batch, self._read)}
        if not self.bytes:
            return made
        return {**made, "placement": tuple(slotted(each, self.pools) for each in plain["placement"]),
                "draft_cost": None}

    def decode(self, plain: Speed) -> Speed:
        """The speed of decode, `plain` being that with all weights in RAM."""
        return decode_reading(self._request, plain, self._read) if self._reads else plain

    @property
    def _reads(self) -> bool:
        return self.bytes > 0 or self._on_disk > 0

    @cached_property
    def _read(self) -> Read:
        if self.bytes:
            return read_of_experts(self._request, self.pools)
        whole = sum(use.read_bytes for use in self._request.inventory.model_uses if use.role not in BY_ROW)
        return Read(self._on_disk * whole, self._on_disk * self._weights)
