"""Plans for the CPU of mixtures that are larger than RAM: slots in RAM hold the experts that are used most, and the
others are read from the disk when a token chooses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from sharpi.machine.profile import HardwareProfile
from sharpi.planning.disk import all_ram, copies_bytes, free_ram, left_for_weights
from sharpi.planning.placement import BY_ROW, ExpertPool, Placed, Use
from sharpi.planning.plan import UNIFORM_ROUTING
from sharpi.planning.prediction import (
    Cached,
    Speed,
    cached_experts,
    decode_from_disk,
    hit_rate,
    missed_bytes,
    prefill_from_disk,
)
from sharpi.planning.request import Request

__all__ = ["RamSlots"]


class RamSlots:
    """The slots of a plan for the CPU."""

    def __init__(self, request: Request, batch: int) -> None:
        self._request, self._batch = request, batch
        self.expert_bytes = self._bytes_of(request.inventory.uses)
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
            self.bytes = self._fitting(room) if self.expert_bytes else 0
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
        """The speeds and the placement of a plan whose weights are all in RAM, `plain`, with the disk's part."""
        if not self.bytes:
            return dict(plain) if not self._on_disk else {
                **plain, "disk_bytes_per_second": self._rate,
                "decode": self.decode(plain["decode"], profile),
                "decode_full": self.decode(plain["decode_full"], profile),
                "prefill": prefill_from_disk(plain["prefill"], self._batch, self._on_disk * self._weights, self._rate)}
        cached, used = self._cached(profile), self._bytes_of(self._request.inventory.model_uses)
        held = sum(layer.held for layer in cached.values()) / max(1, len(cached))
        return {**plain, "disk_bytes_per_second": self._rate,
                "placement": tuple(self._placed(each) for each in plain["placement"]),
                "decode": self.decode(plain["decode"], profile),
                "decode_full": self.decode(plain["decode_full"], profile),
                "prefill": prefill_from_disk(plain["prefill"], self._batch, used * (1 - held), self._rate),
                "draft_cost": None}

    def decode(self, plain: Speed, profile: HardwareProfile) -> Speed:
        """The speed of decode, `plain` being that with all weights in RAM."""
        if self.bytes:
            return decode_from_disk(plain, missed_bytes(self._cached(profile)), self._rate)
        if not self._on_disk:
            return plain
        read = sum(use.read_bytes for use in self._request.inventory.model_uses if use.role not in BY_ROW)
        return decode_from_disk(plain, self._on_disk * read, self._rate)

    def _cached(self, profile: HardwareProfile) -> dict[int, Cached]:
        """The layers with slots. Predictions are without drafts."""
        found = cached_experts(self._request.inventory.on(profile).uses, self.pools)
        return {layer: known for layer, known in found.items() if layer < self._request.spec.layer_count}

    @cached_property
    def _rate(self) -> float:
        return self._request.disk_bytes_per_second

    def _fitting(self, room: int) -> int:
        """What slots may take of this RAM; 0 if there is none for a useful number."""
        left = max(0, room - self._others - self._taken)
        return left if left and any(pool.slots for pool in self._pools_of(left)) else 0

    def _pools_of(self, count: int) -> tuple[ExpertPool, ...]:
        """The pools of slots that `count` bytes give."""
        options = self._request.options("cpu", self._request.context, self._batch, (), count)
        return tuple(ExpertPool(*pool) for pool in self._request.spec.expert_pools(options))

    def _bytes_of(self, uses: Sequence[Use]) -> int:
        """What the experts take. A tensor may hold two of their matrices, and then has two uses."""
        return sum(self._request.file.tensors[tensor].nbytes
                   for tensor in {use.tensor for use in uses if use.role == "experts"})

    def _placed(self, placed: Placed) -> Placed:
        if placed.kind != "experts":
            return placed
        held = sum(pool.slots for pool in self.pools) / max(1, sum(pool.experts for pool in self.pools))
        kept = round(placed.cpu * held)
        return placed._replace(cpu=kept, disk=placed.cpu - kept)


