"""What a plan has to read from the disk, because RAM has no room for it.

A mixture's experts are read if they are in no slot, which is whole experts at a time. What else RAM has no room for
comes through the system's page cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sharpi.machine.disk import bytes_in_ram
from sharpi.machine.hardware import free_ram_bytes, ram_bytes
from sharpi.planning.copies import kept
from sharpi.planning.placement import ExpertPool, Placed, Use
from sharpi.planning.prediction.decode import Speed, cached_experts, decode_from_disk, missed_bytes
from sharpi.planning.prediction.prefill import prefill_from_disk
from sharpi.planning.request import Request

__all__ = ["Read", "SlotsInRam", "all_ram", "copies_bytes", "decode_reading", "expert_bytes", "free_ram",
           "left_for_weights", "present_ram", "read_of_experts", "slotted", "speeds_reading"]

# What weights leave of the RAM to the page cache, which long prompts read experts by, and to other programs. No more
# than a part of a small RAM.
_MARGIN, _MARGIN_PART = 1 << 30, 8


class Read(NamedTuple):
    """Bytes that come from the disk: for a token, for a batch of many tokens, and for a drafted token beside a plain
    step."""

    token: float
    batch: float
    draft: float = 0.0


class SlotsInRam:
    """What slots for experts in RAM hold. The core lays them out alike whichever device a plan is for."""

    def __init__(self, request: Request, batch: int) -> None:
        self._request, self._batch = request, batch

    def fitting(self, room: int) -> int:
        """What slots may take of this much RAM: all of it, but 0 if that holds no expert."""
        return room if room > 0 and any(pool.slots for pool in self.pools(room)) else 0

    def pools(self, count: int) -> tuple[ExpertPool, ...]:
        """The pools of slots that `count` bytes give."""
        options = self._request.options("cpu", self._request.context, self._batch, (), count)
        return tuple(ExpertPool(*pool) for pool in self._request.spec.expert_pools(options))


def all_ram(request: Request) -> int:
    """The RAM of the machine that a plan is for."""
    return ram_bytes() if request.ram is None else request.ram


def free_ram(request: Request) -> int:
    """The RAM that a plan may take, weights included that are in it already. What a person plans for another machine,
    or a test sets, is all free."""
    if request.ram is not None:
        return request.ram
    return min(ram_bytes(), free_ram_bytes() + bytes_in_ram(request.file.paths))


def present_ram(request: Request) -> int:
    """The same without RAM that the machine does not have yet, whoever promises it: what is taken at once must be
    there."""
    if request.ram is not None:
        return request.ram
    from sharpi import _core  # late: `sharpi --help` needs no core

    return min(free_ram(request), _core.free_ram())


def left_for_weights(request: Request, free: int) -> int:
    """What weights have of the free RAM if not all of them have room there: schedulers keep copies in it, too."""
    return free - min(_MARGIN, free // _MARGIN_PART) - copies_bytes(request)


def copies_bytes(request: Request) -> int:
    """RAM for the copies of a scheduler."""
    return kept(all_ram(request), recurrent=request.spec.state_bytes > 0, spill_bytes=request.spill_bytes).total


def expert_bytes(request: Request, uses: Sequence[Use]) -> int:
    """What the experts take. A tensor may hold two of their matrices, and then has two uses."""
    return sum(request.file.tensors[tensor].nbytes for tensor in {use.tensor for use in uses if use.role == "experts"})


def slotted(placed: Placed, pools: Sequence[ExpertPool]) -> Placed:
    """`placed`, with the experts on the disk that are neither in VRAM nor in these slots in RAM."""
    if placed.kind != "experts":
        return placed
    held = sum(pool.slots for pool in pools) / max(1, sum(pool.experts for pool in pools))
    outside = placed.missed + placed.cpu
    inside = min(outside, round((placed.vram + outside) * held))
    missed, cpu = (inside, 0) if placed.missed else (0, inside)
    return placed._replace(missed=missed, cpu=cpu, disk=outside - inside)


def read_of_experts(request: Request, pools: Sequence[ExpertPool], warmed: bool = False) -> Read:
    """What is read of the model's experts, all slots together being `pools`. warmed: slots hold what saved statistics
    say."""
    found = cached_experts(request.inventory.uses, pools, request.warm if warmed else None)
    # Predictions are without drafts. A drafted token chooses experts of its own, in the prediction layer too.
    cached = {layer: known for layer, known in found.items() if layer < request.spec.layer_count}
    held = sum(layer.held for layer in cached.values()) / max(1, len(cached))
    batch = expert_bytes(request, request.inventory.model_uses) * (1 - held)
    return Read(missed_bytes(cached), batch, missed_bytes(found))


def decode_reading(request: Request, plain: Speed, read: Read) -> Speed:
    """The speed of decode, `plain` being that with all weights in RAM or VRAM."""
    return decode_from_disk(plain, read.token, request.disk_bytes_per_second)


def speeds_reading(request: Request, plain: Mapping[str, Any], batch: int, read: Read) -> dict[str, Any]:
    """The same for all speeds that a plan says."""
    rate = request.disk_bytes_per_second
    return {"disk_bytes_per_second": rate,
            **{name: decode_reading(request, plain[name], read) for name in ("decode", "decode_full")},
            "prefill": prefill_from_disk(plain["prefill"], batch, read.batch, rate)}
