"""Plans for the GPU: the search for the homes of weights with which a model fits into its memory.

The search asks the core what each try takes. It is made for a new plan, and again for a plan for which there turns out
to be less memory when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sharpi.machine.hardware import Gpu
from sharpi.machine.profile import HardwareProfile
from sharpi.planning.gpu_ram import BesideVram
from sharpi.planning.placement import SLOTS, ExpertPool, Switches, TensorHome
from sharpi.planning.plan import SAVED_STATISTICS, UNIFORM_ROUTING, Plan
from sharpi.planning.prediction.cpu_share import balanced
from sharpi.planning.prediction.decode import (
    after_on_gpu,
    cached_experts,
    decode_on_gpu,
    draft_cost_on_gpu,
    expert_rates,
    hit_rate,
    read_outside_vram,
)
from sharpi.planning.prediction.prefill import prefill_on_gpu
from sharpi.planning.prompt_modes import least_batch, prompt_tile
from sharpi.planning.request import Request
from sharpi.settings.choices import FAST

__all__ = ["DEFAULT_GPU_BATCH", "OnGpu", "VRAM_MARGIN", "fitting_batch", "largest"]

# Prefill on a GPU reads all weights once a batch, so a batch should be large enough to multiply for as long as that
# takes. If it does not fit, a smaller one is taken.
DEFAULT_GPU_BATCH = 2048
# How much of the free VRAM is left, whatever the budget, to the driver and to programs that draw on the screen.
VRAM_MARGIN = 256 << 20

_MIB = 1 << 20
_SMALLEST_VRAM = _MIB  # a budget is a multiple of it
_ROUNDING = 4 << 20  # a device allocates in steps, so sums of bytes may be off by this much


class OnGpu:
    """The search for the homes with which a model fits into the VRAM."""

    def __init__(self, request: Request, found: Gpu | str, available: int | None = None) -> None:
        """available: bytes that are known to be there; they replace what the GPU had free when it was found."""
        self._request = request
        self._found = found
        self._free = max(0, found.free_bytes - VRAM_MARGIN) if isinstance(found, Gpu) else None
        if available is not None:
            self._free = available
        bounds = [bound for bound in (request.vram, self._free) if bound is not None]
        self._available = min(bounds) if bounds else None
        # Nobody asked for the default batch: slower prefill is better than another device.
        self._shrinks = request.batch is None
        self._wanted = DEFAULT_GPU_BATCH if request.batch is None else request.batch
        if request.prompt == FAST:
            self._wanted = max(self._wanted, prompt_tile())
        self._least = least_batch("cuda", request.prompt)
        self._switches = Switches.read()
        self._inventory = request.inventory
        self._before_experts = self._inventory.before_experts
        # How many of the movable units may be in VRAM.
        self._count = self._before_experts if request.experts_on_cpu else len(self._inventory.movable)
        # A plan that keeps nothing in VRAM beyond what must be there takes least. Small models are an exception:
        # fetching their matrices takes more room than the matrices themselves.
        counts = [0] + [self._count - 1] * (self._count > 1 and self._within_limit(self._count - 1))
        self._smallest_homes = [self._inventory.homes(count) for count in counts]
        # The homes with everything in VRAM that may be there, and those without the embedding, whose rows are read one
        # at a time.
        self._whole_homes = self._inventory.homes(self._count)
        self._may_be_whole = self._within_limit(self._count)
        self._lean_homes = self._inventory.homes(max(0, self._count - 1))
        self._has_lean = (self._count > 0 and self._within_limit(self._count - 1)
                          and self._inventory.movable[self._count - 1].kind == "embedding")

    def plan(self, why: str) -> Plan:
        """Everything in VRAM that may be there, or all but the embedding, if that fits, even if only with a smaller
        batch than the default. Otherwise as much as fits, and slots for experts in what is left."""
        request, most, slots = self._request, self._request.most_rows(self._wanted), 0
        batch = self._batch(most, self._nearly_whole_fits)
        if batch:
            homes = self._inventory.homes(self._count - (not self._whole_fits(request.context, batch)))
        else:
            batch = self._batch(most, self._part_fits)
            homes, slots = self._fullest(batch) if batch else (self._smallest(most)[1], 0)
        fits = batch > 0
        details = (self._details(homes, slots, batch, self._profile(homes)) if fits
                   else {"placement": self._inventory.placed(homes)})
        batch = batch or self._smallest(most)[0]
        return request.fill("cuda", why, self._found, batch, self._available, slots=slots,
                            **{"homes": homes, **details},
                            fitting_batch=batch if fits else fitting_batch(most, self._least, self._fits_with),
                            fitting_context=largest(request.spec.context_length, self._fits_at),
                            fitting_vram=0 if fits else self._fitting_vram(most))

    def shortened(self, plan: Plan, room: int) -> Plan:
        """`plan` with as much in VRAM as `room` bytes hold: with smaller slots for experts, or without the weights that
        gain least. If nothing fits, what takes least. Nothing is measured: the GPU's memory is short just now. Slots in
        RAM are worked out again, but never grow: what they left may be somebody's."""
        homes, slots = self._fitted(plan, room)
        profile = plan.profile or self._request.speeds.at_hand(self._found)
        details = self._details(homes, slots, plan.batch, profile, plan.ram_slots or None)
        lines = self._request.lines("cuda", plan.context, plan.batch, homes, slots)
        return replace(plan, **{"expert_pools": (), "expert_slots": slots, "hit_rate": None, "hit_source": "",
                                "ram_slots": 0, "ram_pools": (), "ram_hit_rate": None,
                                "prefill": None, "decode": None, "decode_full": None, "draft_cost": None,
                                "disk_bytes_per_second": None, "available_bytes": self._available,
                                "lines": tuple(lines), **details},
                       fitting_context=largest(self._request.spec.context_length, self._fits_at))

    def _fitted(self, plan: Plan, room: int) -> tuple[tuple[TensorHome, ...], int]:
        """The homes and the bytes for slots with which the plan takes no more than `room`."""
        choices: list[tuple[int, tuple[TensorHome, ...]]] = []
        for homes in self._ever_less(plan, room):
            if homes == plan.homes and self._total(plan.batch, homes, plan.expert_slots) <= room:
                return homes, plan.expert_slots
            least = self._total(plan.batch, homes)
            if least <= room:
                # What the slots may take is left by weights, or was theirs before.
                most = plan.expert_slots if _slotted(plan.homes) else room
                fits = partial(self._slots_fit, plan.batch, homes, room)
                slots = _MIB * largest(most // _MIB, fits) if _slotted(homes) else 0
                return homes, slots if any(pool.slots for pool in self._pools(plan.batch, homes, slots)) else 0
            choices.append((least, homes))
        return min(choices)[1], 0

    def _ever_less(self, plan: Plan, room: int) -> Iterator[tuple[TensorHome, ...]]:
        """The plan's homes, then with ever fewer units in VRAM. Those that are sure to exceed `room` are left out."""
        yield plan.homes
        lines = self._request.lines("cuda", plan.context, plan.batch, self._inventory.homes(0, plan.homes))
        others = sum(count for name, count in lines if name != "streaming") - _ROUNDING
        before = plan.homes
        for resident in range(len(self._inventory.movable) - 1, -1, -1):
            homes = self._inventory.homes(resident, plan.homes)
            # No unit takes less than its bytes.
            kept = self._inventory.kept_bytes(homes)
            if homes != before and (resident == 0 or others + kept <= room):
                yield homes
            before = homes

    def _slots_fit(self, batch: int, homes: tuple[TensorHome, ...], room: int, count: int) -> bool:
        return self._total(batch, homes, count * _MIB) <= room

    def _profile(self, homes: tuple[TensorHome, ...]) -> HardwareProfile | None:
        """The machine's speeds, measured if somebody needs them. Nothing is measured for rows and rates that matter
        only if there turns out to be less memory."""
        speeds = self._request.speeds
        return speeds.of("cuda", self._found) if self._needs_speeds(homes) else speeds.at_hand(self._found)

    def _needs_speeds(self, homes: tuple[TensorHome, ...]) -> bool:
        return self._request.shown or self._inventory.streamed(homes)

    def _details(self, homes: tuple[TensorHome, ...], slots: int, batch: int,
                 profile: HardwareProfile | None, most_in_ram: int | None = None) -> dict[str, Any]:
        """What else a plan with these homes says, once the CPU's rows are filled in: how misses are shared, what is
        expected of the slots, where everything is, and speeds if somebody needs them. most_in_ram: bytes of slots."""
        request = self._request
        known = self._inventory if profile is None else self._inventory.on(profile)
        if profile is not None and self._switches.rows:
            homes = balanced(known, homes, profile, request.threads)
        pools = self._pools(batch, homes, slots)
        cached = cached_experts(known.uses, pools, request.warm)
        beside = BesideVram(request, batch, self._inventory.placed(homes, pools), pools, most_in_ram)
        details: dict[str, Any] = {"homes": homes, **beside.details()}
        if profile is not None and self._inventory.has_experts:
            cpu, pcie = expert_rates(profile, request.threads, known.uses)
            details["expert_rates"] = (cpu, 0.0 if request.experts_on_cpu else pcie)
        if pools:
            details |= {"expert_pools": pools, "hit_rate": hit_rate(cached),
                        "hit_source": SAVED_STATISTICS if request.warm else UNIFORM_ROUTING}
        if self._needs_speeds(homes) and profile is not None:
            uses, threads = known.model_uses, request.threads
            full = after_on_gpu(known.beside, request.spec, request.kv_dtype, request.context)
            details |= {"profile": profile,
                        "decode": decode_on_gpu(uses, homes, profile, threads, cached, known.beside),
                        "decode_full": decode_on_gpu(uses, homes, profile, threads, cached, full),
                        "prefill": prefill_on_gpu(uses, homes, profile, batch, cached, request.prompt, known.beside),
                        "draft_cost": draft_cost_on_gpu(known, homes, profile, threads, cached)}
            details |= beside.speeds(details, read_outside_vram(uses, homes, cached))
        return details

    def _pools(self, batch: int, homes: Sequence[TensorHome], slots: int) -> tuple[ExpertPool, ...]:
        if not any(home.home == SLOTS for home in homes):
            return ()
        options = self._request.options("cuda", self._request.context, batch, homes, slots)
        return tuple(ExpertPool(*pool) for pool in self._request.spec.expert_pools(options))

    def _within_limit(self, resident: int) -> bool:
        limit = self._switches.limit
        return limit is None or self._inventory.movable_bytes(resident) <= limit

    def _has_room(self, context: int, rows: int, homes: Sequence[TensorHome], slots: int = 0) -> bool:
        return self._available is None or self._request.total("cuda", context, rows, homes, slots) <= self._available

    def _whole_fits(self, context: int, rows: int) -> bool:
        return self._may_be_whole and self._has_room(context, rows, self._whole_homes)

    def _nearly_whole_fits(self, context: int, rows: int) -> bool:
        return self._whole_fits(context, rows) or (
            self._has_lean and self._has_room(context, rows, self._lean_homes))

    def _part_fits(self, context: int, rows: int) -> bool:
        return self._count > 0 and any(self._has_room(context, rows, homes) for homes in self._smallest_homes)

    def _fits_with(self, rows: int) -> bool:
        return self._whole_fits(self._request.context, rows) or self._part_fits(self._request.context, rows)

    def _fits_at(self, context: int) -> bool:
        # A smaller batch takes less: if the smallest does not fit, none does.
        rows = self._smallest_batch(self._request.most_rows(self._wanted, context))
        return self._whole_fits(context, rows) or self._part_fits(context, rows)

    def _batch(self, most: int, fits: Callable[[int, int], bool]) -> int:
        """The batch with which it fits, 0 if none does; a batch that was asked for is not changed."""
        tokens = self._request.context
        if self._shrinks:
            return fitting_batch(most, self._least, lambda rows: fits(tokens, rows))
        return most if fits(tokens, most) else 0

    def _smallest_batch(self, most: int) -> int:
        """The last one that `_batch` would try."""
        while self._shrinks and most >= 2 * self._least:
            most //= 2
        return most

    def _fullest(self, batch: int) -> tuple[tuple[TensorHome, ...], int]:
        """The homes with as many units in VRAM as fit, and what slots for experts may take, if there are any."""
        # This is not a binary search: once the last weights that need staging buffers are in VRAM, these buffers go,
        # so more units in VRAM may take less. But no unit takes less than its bytes, which is a good start.
        lines = self._request.lines("cuda", self._request.context, batch, self._inventory.homes(0))
        others = sum(count for name, count in lines if name != "streaming") - _ROUNDING
        resident = largest(self._count - 1, lambda count: self._within_limit(count) and (
            self._available is None or others + self._inventory.movable_bytes(count) <= self._available))
        for count in range(resident, -1, -1):
            homes = self._inventory.homes(count)
            if self._has_room(self._request.context, batch, homes):
                return homes, self._slots(batch, homes) if count == self._before_experts else 0
        return min(self._smallest_homes, key=lambda homes: self._total(batch, homes)), 0

    def _slots(self, batch: int, homes: tuple[TensorHome, ...]) -> int:
        """Bytes for slots, in whole MiB: all that is left beside everything else; 0 if that holds no expert."""
        limit = self._switches.limit
        most = [] if limit is None else [limit - self._inventory.movable_bytes(self._before_experts)]
        most += [] if self._available is None else [self._available]
        slots = _MIB * largest(min(most) // _MIB, lambda count: self._has_room(
            self._request.context, batch, homes, count * _MIB))
        return slots if any(pool.slots for pool in self._pools(batch, homes, slots)) else 0

    def _smallest(self, most: int) -> tuple[int, tuple[TensorHome, ...]]:
        """The batch and the homes that take the least."""
        batch, choices = self._smallest_batch(most), list(self._smallest_homes if self._count else ())
        if self._may_be_whole or not choices:
            choices.append(self._whole_homes)
        return batch, min(choices, key=lambda homes: self._total(batch, homes))

    def _total(self, batch: int, homes: Sequence[TensorHome], slots: int = 0) -> int:
        return self._request.total("cuda", self._request.context, batch, homes, slots)

    def _fitting_vram(self, most: int) -> int:
        """The least budget that would do, in whole MiB; 0 if the budget is not in the way or cannot be had."""
        if self._request.vram is None or self._available != self._request.vram:
            return 0
        needed = self._total(*self._smallest(most))
        needed = -(-needed // _SMALLEST_VRAM) * _SMALLEST_VRAM
        return needed if self._free is None or needed <= self._free else 0


def _slotted(homes: Sequence[TensorHome]) -> bool:
    return any(home.home == SLOTS for home in homes)


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `limit` that fits, if all smaller ones fit too; 0 if not even 1 does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def fitting_batch(batch: int, least: int, fits: Callable[[int], bool]) -> int:
    """The first of `batch`, a half of it, a quarter, … down to `least` that fits; 0 if none does."""
    while batch >= 1 and not fits(batch):
        batch = batch // 2 if batch >= 2 * least else 0
    return batch

