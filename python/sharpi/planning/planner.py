"""Plans: what a model will take, where its weights will be, and how fast it will run, before a byte of it is loaded.

A plan is what `Model.load` carries out and what `sharpi plan` shows; both come from `make_plan`, so that the
prediction and the run cannot drift apart. Its lines are the core's own: the loading code run over a memory that only
counts. On the CPU the weights stay in the mapped file and fill RAM beside the lines; on the GPU the lines are all
there is. A model that does not fit into the GPU's memory has the most useful of its weights there and the others in
RAM, to be fetched across PCIe or computed by the CPU; what is left of the memory are slots for experts. Planning is
arithmetic: a plan for a GPU can be made where there is none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from sharpi.errors import InvalidRequestError, SharpiError
from sharpi.files.gguf import GgufFile, fingerprint
from sharpi.files.rope import RopeScaling
from sharpi.machine.hardware import Gpu, gpu, ram_bytes
from sharpi.machine.profile import ASSUMED, HardwareProfile
from sharpi.machine.profile_cache import current_profile, measuring_words
from sharpi.planning.placement import SLOTS, VRAM, ExpertPool, Inventory, Switches, TensorHome
from sharpi.planning.plan import (
    DEFAULT_SEQUENCES,
    SAVED_STATISTICS,
    UNIFORM_ROUTING,
    Plan,
    load_plan,
    size_words,
)
from sharpi.planning.prediction import (
    balanced,
    cached_experts,
    completed,
    decode_on_cpu,
    decode_on_gpu,
    draft_cost_on_cpu,
    draft_cost_on_gpu,
    expert_rates,
    hit_rate,
    prefill_on_cpu,
    prefill_on_gpu,
)
from sharpi.planning.prompt_modes import FAST_TILE, choose_prompt, least_batch, rounding_words
from sharpi.settings.choices import DEVICES, EXACT, FAST, KV_DTYPES
from sharpi.settings.switches import check_switches

if TYPE_CHECKING:
    from sharpi._core import EngineOptions
    from sharpi.planning.expert_stats import ExpertStats

__all__ = ["DEFAULT_BATCH", "DEFAULT_CONTEXT", "DEVICES", "KV_DTYPES", "Plan", "Spec", "VRAM_MARGIN", "choose_context",
           "choose_kv_dtype", "make_plan", "parse_vram", "saved_plan"]

DEFAULT_KV_DTYPE = "bf16"
# Models announce contexts whose KV cache would fill the machine; this much is taken unless a person asks for more.
DEFAULT_CONTEXT = 4096
# Prefill on a GPU reads all weights once a batch, and has to multiply for as long as that takes. Less is taken there
# where only less fits.
DEFAULT_BATCH = {"cpu": 512, "cuda": 2048}
# Of the free VRAM this much is left to the driver and to whoever draws on the screen, whatever the budget.
VRAM_MARGIN = 256 << 20

_MIB = 1 << 20
_SMALLEST_VRAM = _MIB  # less is a unit that was forgotten
_ROUNDING = 4 << 20  # by so much sums of bytes may be off that a device gives out in steps
_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30,
          "t": 1 << 40, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}

Notice = Callable[[str], None]


class Spec(Protocol):
    """What a plan needs to know of a model; the core's description of it has this."""

    @property
    def context_length(self) -> int:
        """The longest context the model was made for, in tokens."""
        ...

    @property
    def layer_count(self) -> int:
        """The model's layers, without its prediction layer."""
        ...

    @property
    def prediction_layers(self) -> int:
        """1 where a prediction layer is to be loaded, else 0."""
        ...

    @property
    def state_bytes(self) -> int:
        """What recurrent layers keep of one sequence."""
        ...

    @property
    def shared_experts(self) -> int:
        """Layers with an expert for every token."""
        ...

    def kv_bytes(self, kv_dtype: str, context: int) -> int:
        """Bytes of the KV cache for `context` tokens."""
        ...

    def memory_lines(self, options: EngineOptions) -> list[tuple[str, int]]:
        """(what, bytes) in the order of allocation: "token embedding", "layer 0" and on, "prediction layer" where there
        is one, "output head", "KV cache", "scratch", "graphs"; "streaming" where a weight is fetched, "expert slots"
        where experts are, and "recurrent state" for a model that keeps one for each of `sequences`. On the CPU, weights
        that stay in the mapped file count as nothing. Bytes are counted in the device's steps: a line that fits into
        what is left of the step before it takes nothing."""
        ...

    def expert_pools(self, options: EngineOptions) -> list[tuple[int, int, int, int]]:
        """What the slots are: by pool (layers, experts in all of them, bytes of a slot, slots)."""
        ...

    def tensor_uses(self) -> list[tuple[int, str, str, int, int, int, int]]:
        """(tensor, name, role, layer, bytes a token reads, rows, columns) in the order in which a token meets them; of
        the prediction layer, the layer is `layer_count`."""
        ...


def parse_vram(vram: str | int | None) -> int | None:
    """A budget in bytes: a number of bytes, or text such as "12GiB", "12GB" (10^9) or "800M" (MiB).

    Raises `InvalidRequestError` for anything else, and for a budget below 1 MiB.
    """
    if vram is None:
        return None
    count, meant = _bytes_in(vram) if isinstance(vram, str) else (vram, str(vram))
    if not isinstance(count, int) or isinstance(count, bool):
        raise InvalidRequestError(f"{vram!r} is no amount of VRAM: say it as 12GiB, 12.5GB, 800MiB or in bytes")
    if not 0 < count < 1 << 60:
        raise InvalidRequestError(
            f"a VRAM budget of {vram} cannot be: leave it out for all that is free, or use device cpu")
    if count < _SMALLEST_VRAM:
        # Of large numbers without a unit MiB are the likelier ones.
        hint = f"did you mean {meant}{'GiB' if float(meant) < 1000 else 'MiB'}?" if meant else "1MiB is the least"
        raise InvalidRequestError(f"a VRAM budget of {count} bytes: {hint}")
    return count


def _bytes_in(text: str) -> tuple[int | None, str]:
    """The bytes that a text means, `None` for no amount; and its number, where its unit is small or left out."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) *([a-z]*)", text.strip().lower())
    unit = _BYTES.get(match[2]) if match else None
    if match is None or unit is None:
        return None, ""
    number = match[1]
    return int(float(number) * unit) if "." in number else int(number) * unit, number if unit < 10**6 else ""


def choose_context(spec: Spec, context: int | None) -> int:
    """The context to use if `context` is asked for; 0 is all that the model has. Raises `InvalidRequestError` for a
    longer one."""
    if context is None:
        return min(spec.context_length, DEFAULT_CONTEXT)
    if context == 0:
        return spec.context_length
    if context < 0:
        raise InvalidRequestError(f"a context of {context} tokens: it must be at least 1, or 0 for the model's own")
    if context > spec.context_length:
        raise InvalidRequestError(
            f"a context of {context:,} tokens is more than the model's {spec.context_length:,}; to stretch it, at some"
            " cost in quality: --rope-scaling yarn --rope-scale N")
    return context


def choose_kv_dtype(kv_dtype: str | None) -> str:
    """`kv_dtype`, else what SHARPI_KV_DTYPE says, else the default. Raises `InvalidRequestError` for an unknown one."""
    chosen = kv_dtype or os.environ.get("SHARPI_KV_DTYPE") or DEFAULT_KV_DTYPE
    if chosen not in KV_DTYPES:
        raise InvalidRequestError(f"KV element type {chosen!r} is unknown; there are {', '.join(KV_DTYPES)}")
    return chosen


def make_plan(file: GgufFile, spec: Spec, *, device: str = "auto", vram: str | int | None = None,
              context: int | None = None, kv_dtype: str | None = None, batch: int | None = None, threads: int = 1,
              cpu_moe: bool | None = None, sequences: int | None = None, prompt: str | None = None,
              ram: int | None = None, profile: HardwareProfile | None = None, warm: ExpertStats | None = None,
              shown: bool = False, rope: RopeScaling | None = None, notice: Notice | None = None) -> Plan:
    """The plan for running `file`; `ram` stands in for the machine's memory in bytes.

    "auto" is the GPU if there is one and the model fits into its free memory, or into the budget `vram`; if only a part
    of it fits, the GPU or the CPU, whichever is predicted to decode faster. cpu_moe: whether all experts are left to
    the CPU even if they would fit; `None`: what SHARPI_CPU_MOE says. sequences: see `Plan`. prompt: "exact" or "fast";
    `None`: what the kind of GPU says. A batch that is too small for fast prompts is rounded up. profile: the machine's
    speeds; without it, they are measured where they are needed and not known. warm: how often each expert is used, to
    expect hits by; without it, all alike. shown: the plan is for a person to look at; it has predictions, and where a
    profile is given it is for that machine, not for this one. rope: the scaling that `spec` was read with. notice: is
    told, in a line, that the machine is measured, or that the batch was rounded up. Raises `InvalidRequestError` for
    what cannot be had.
    """
    check_switches()
    if device not in DEVICES:
        raise InvalidRequestError(f"unknown device {device!r}: known are auto, cpu and cuda")
    budget = parse_vram(vram)
    if device == "cpu" and budget is not None:
        raise InvalidRequestError("a VRAM budget means nothing on device cpu: leave it out, or use device cuda or auto")
    tokens = choose_context(spec, context)
    speeds = _Speeds(profile, notice)
    if shown and profile is not None:
        ram = profile.ram_bytes if ram is None else ram
    found: Gpu | str | None = None
    if device != "cpu":
        found = _profiled_gpu(profile) if shown and profile is not None else gpu()
    request = _Request(file, spec, tokens, choose_kv_dtype(kv_dtype), batch, threads, budget, cpu_moe, ram, speeds,
                       warm, shown, sequences or DEFAULT_SEQUENCES, rope, choose_prompt(prompt, found))
    plan = _on_device(request, device, found)
    if notice is not None and plan.device == "cuda" and batch is not None and plan.batch > batch:
        notice(rounding_words(batch, plan.batch))
    return plan


def _on_device(request: _Request, device: str, found: Gpu | str | None) -> Plan:
    """The plan for the device that was asked for, or for the one that "auto" takes. found: see `Plan.gpu`."""
    if found is None:
        return request.on_cpu("", None)
    _require_below_card(request.vram, found)
    if device == "cuda" or (request.shown and isinstance(found, str) and request.vram is not None):
        return request.on_gpu("", found)
    if isinstance(found, str):
        return request.on_cpu(found, found)
    return _faster(request, found)


def saved_plan(path: str | os.PathLike[str], file: GgufFile, spec: Spec) -> Plan:
    """The plan that was saved at `path`, for running it on this machine's GPU or CPU. Raises `InvalidRequestError`
    for a file that is no plan for `file`."""
    plan = load_plan(path, file, spec)
    if plan.device == "cpu":
        return replace(plan, gpu=None)
    found = gpu()
    _require_below_card(plan.vram, found)
    return replace(plan, gpu=found)


def _faster(request: _Request, found: Gpu) -> Plan:
    """The GPU where the model fits, and else the device that decodes faster."""
    there = request.on_gpu("the model fits into its memory", found)
    if not there.fits:
        return request.on_cpu(there.shortage().removesuffix("; --device cpu runs it from RAM"), found)
    if there.resident:
        return there
    if there.decode is None or not request.inventory.streamed(there.homes):
        return replace(there, why="the model fits into its memory but for the embedding, which is read by rows")
    known = request.inventory
    here = decode_on_cpu(known.model_uses, request.speeds.of("cuda", found), request.threads, known.beside)
    because = "the model does not fit into the VRAM whole"
    if request.experts_on_cpu:
        because = "the experts are left to the CPU"
    said = because + ", and decode is predicted at {:.1f} tokens/s {}, {:.1f} {}"
    speeds = {"cuda": there.decode.tokens_per_second, "cpu": here.tokens_per_second}
    if speeds["cuda"] >= speeds["cpu"]:
        return replace(there, why=said.format(speeds["cuda"], "with the GPU", speeds["cpu"], "without it"))
    return request.on_cpu(said.format(speeds["cpu"], "on the CPU", speeds["cuda"], "with the GPU"), found)


def _profiled_gpu(profile: HardwareProfile) -> Gpu | str:
    """The GPU of the machine that a profile describes, with nothing else on it."""
    if profile.gpu is None or profile.vram_bytes is None:
        return "the profile is of a machine without a GPU"
    return Gpu(profile.gpu, 0, "", 0, profile.vram_bytes, profile.vram_bytes)


def _require_below_card(budget: int | None, found: Gpu | str) -> None:
    if budget is not None and isinstance(found, Gpu) and budget > found.total_bytes:
        raise InvalidRequestError(f"a VRAM budget of {size_words(budget)} is more than {found.name} has:"
                                  f" {size_words(found.total_bytes)}; leave --vram out for all that is free")


class _Speeds:
    """The machine's speeds, measured where somebody first needs them."""

    def __init__(self, given: HardwareProfile | None, notice: Notice | None) -> None:
        self._known = given
        self._notice = notice or (lambda line: None)

    def of(self, device: str, found: Gpu | str | None) -> HardwareProfile:
        """The profile for a plan on `device`. A GPU that is not here is not measured, but assumed."""
        if self._known is None:
            here = device == "cpu" or isinstance(found, Gpu)
            try:
                self._known = current_profile(here, lambda reason: self._notice(measuring_words(reason)))
            except SharpiError as reason:
                self._notice(f"this machine cannot be measured ({reason}): usual speeds are assumed")
                self._known = ASSUMED
        return completed(self._known) if device == "cuda" else self._known

    def at_hand(self) -> HardwareProfile | None:
        """What was measured, without measuring; a machine without a GPU's rates does not count."""
        known = current_profile(False) if self._known is None else self._known
        return known if known.gpu is not None and not known.assumed else None


@dataclass(frozen=True)
class _Request:
    """What was asked for, checked; a plan for either device can be made of it."""

    file: GgufFile
    spec: Spec
    context: int
    kv_dtype: str
    batch: int | None
    threads: int
    vram: int | None
    cpu_moe: bool | None
    ram: int | None
    speeds: _Speeds
    warm: ExpertStats | None
    shown: bool
    sequences: int
    rope: RopeScaling | None
    prompt: str  # of a plan for the GPU

    @cached_property
    def inventory(self) -> Inventory:
        """The model's weights in units."""
        return Inventory.of(self.file, self.spec)

    @cached_property
    def experts_on_cpu(self) -> bool:
        """Whether there are experts that may not be in VRAM, not even in slots. Only a GPU's plan asks."""
        wanted = Switches.read().cpu_moe if self.cpu_moe is None else self.cpu_moe
        return wanted and self.inventory.has_experts

    def on_cpu(self, why: str, found: Gpu | str | None) -> Plan:
        """The plan for the CPU."""
        batch = min(self.batch or DEFAULT_BATCH["cpu"], self.context)
        room = ram_bytes() if self.ram is None else self.ram
        mapped = sum(tensor.nbytes for tensor in self.file.tensors)

        def fits(context: int, rows: int) -> bool:
            return mapped + self.total("cpu", context, rows, ()) <= room

        shown: dict[str, Any] = {}
        if self.shown and fits(self.context, batch):
            profile, known = self.speeds.of("cpu", found), self.inventory
            shown = {"placement": known.placed_on_cpu(), "profile": profile,
                     "prefill": prefill_on_cpu(known.model_uses, profile, batch, self.threads),
                     "decode": decode_on_cpu(known.model_uses, profile, self.threads, known.beside),
                     "draft_cost": draft_cost_on_cpu(known, profile, self.threads)}
        return self.fill("cpu", why, found, batch, room, (), **shown,
                         fitting_batch=_fitting_batch(batch, least_batch("cpu", EXACT),
                                                       lambda rows: fits(self.context, rows)),
                         fitting_context=_largest(self.spec.context_length,
                                                  lambda context: fits(context, min(batch, context))))

    def on_gpu(self, why: str, found: Gpu | str) -> Plan:
        """The plan for the GPU: all in VRAM if that fits, and else what of it does."""
        return _OnGpu(self, found).plan(why)

    def total(self, device: str, context: int, rows: int, homes: Sequence[TensorHome], slots: int = 0) -> int:
        """The sum of the lines."""
        return sum(count for _, count in self.lines(device, context, rows, homes, slots))

    def lines(self, device: str, context: int, rows: int, homes: Sequence[TensorHome],
              slots: int = 0) -> list[tuple[str, int]]:
        """What the core would take; on the CPU weights have no homes. slots: what experts' may take."""
        return self.spec.memory_lines(self.options(device, context, rows, homes, slots))

    def options(self, device: str, context: int, rows: int, homes: Sequence[TensorHome],
                slots: int = 0) -> EngineOptions:
        """What the core plans memory by. homes: by tensor in the file's order."""
        from sharpi import _core  # late: `sharpi --help` needs no core

        whole = all(home.home == VRAM for home in homes)
        return _core.EngineOptions(
            context=context,
            batch=rows,
            threads=self.threads,
            kv_dtype=self.kv_dtype,
            prompt=self.prompt_on(device),
            sequences=self.sequences,
            device=device,
            homes=() if whole else homes,
            expert_slot_bytes=0 if whole else slots,
        )

    def prompt_on(self, device: str) -> str:
        """How the device computes prompts."""
        return self.prompt if device == "cuda" else EXACT

    def fill(self, device: str, why: str, found: Gpu | str | None, batch: int, available: int | None,
             homes: tuple[TensorHome, ...], slots: int = 0, **more: Any) -> Plan:
        """The plan, with what is the same on every device filled in."""
        return Plan(
            model=self.file.name,
            architecture=self.file.architecture,
            fingerprint=fingerprint(self.file),
            device=device,
            why=why,
            gpu=found,
            vram=self.vram,
            context=self.context,
            model_context=self.spec.context_length,
            kv_dtype=self.kv_dtype,
            prompt=self.prompt_on(device),
            batch=batch,
            threads=self.threads,
            sequences=self.sequences,
            mtp=self.spec.prediction_layers > 0,
            rope=self.rope,
            weights_bytes=sum(tensor.nbytes for tensor in self.file.tensors),
            kv_bytes=self.spec.kv_bytes(self.kv_dtype, self.context),
            lines=tuple((name, count) for name, count in self.lines(device, self.context, batch, homes, slots)),
            available_bytes=available,
            homes=homes,
            expert_slots=slots,
            **more,
        )


class _OnGpu:
    """The search for the homes with which a model fits into the VRAM."""

    def __init__(self, request: _Request, found: Gpu | str) -> None:
        self._request = request
        self._found = found
        self._free = max(0, found.free_bytes - VRAM_MARGIN) if isinstance(found, Gpu) else None
        bounds = [bound for bound in (request.vram, self._free) if bound is not None]
        self._available = min(bounds) if bounds else None
        # Nobody asked for the default batch: slower prefill is better than another device.
        self._shrinks = request.batch is None
        self._wanted = DEFAULT_BATCH["cuda"] if request.batch is None else request.batch
        if request.prompt == FAST:
            self._wanted = max(self._wanted, FAST_TILE)
        self._least = least_batch("cuda", request.prompt)
        self._switches = Switches.read()
        self._inventory = request.inventory
        self._before_experts = self._inventory.before_experts
        # Of the movable units so many may be in VRAM.
        self._count = self._before_experts if request.experts_on_cpu else len(self._inventory.movable)
        # Nothing in VRAM that need not be there takes least, but for small models: fetching their matrices takes more
        # room than the matrices would.
        counts = [0] + [self._count - 1] * (self._count > 1 and self._within_limit(self._count - 1))
        self._smallest_homes = [self._inventory.homes(count) for count in counts]
        # All that may be in VRAM, and that without what only single rows are read of.
        self._whole_homes = self._inventory.homes(self._count)
        self._may_be_whole = self._within_limit(self._count)
        self._lean_homes = self._inventory.homes(max(0, self._count - 1))
        self._has_lean = (self._count > 0 and self._within_limit(self._count - 1)
                          and self._inventory.movable[self._count - 1].kind == "embedding")

    def plan(self, why: str) -> Plan:
        """All in VRAM that may be, or all but the embedding, where that fits, even with a smaller batch than the
        default; and else as much as does, and slots for experts in what is left."""
        request, most, slots = self._request, min(self._wanted, self._request.context), 0
        batch = self._batch(most, self._nearly_whole_fits)
        if batch:
            homes = self._inventory.homes(self._count - (not self._whole_fits(request.context, batch)))
        else:
            batch = self._batch(most, self._part_fits)
            homes, slots = self._fullest(batch) if batch else (self._smallest(most)[1], 0)
        fits = batch > 0
        details = self._details(homes, slots, batch) if fits else {"placement": self._inventory.placed(homes)}
        batch = batch or self._smallest(most)[0]
        return request.fill("cuda", why, self._found, batch, self._available, slots=slots,
                            **{"homes": homes, **details},
                            fitting_batch=batch if fits else _fitting_batch(most, self._least, self._fits_with),
                            fitting_context=_largest(request.spec.context_length, self._fits_at),
                            fitting_vram=0 if fits else self._fitting_vram(most))

    def _details(self, homes: tuple[TensorHome, ...], slots: int, batch: int) -> dict[str, Any]:
        """What a plan with these homes, the CPU's rows filled in, says besides: how misses are shared out, what is
        expected of the slots, where everything is, and speeds where somebody needs them."""
        request, known = self._request, self._inventory
        needed = request.shown or self._inventory.streamed(homes)
        # Rows and rates that matter only where memory turns out to be shorter are nothing to measure for.
        profile = request.speeds.of("cuda", self._found) if needed else request.speeds.at_hand()
        if profile is not None and self._switches.rows:
            homes = balanced(self._inventory, homes, profile, request.threads)
        pools = self._pools(batch, homes, slots)
        cached = cached_experts(known.uses, pools, request.warm)
        details: dict[str, Any] = {"homes": homes, "placement": self._inventory.placed(homes, pools)}
        if profile is not None and self._inventory.has_experts:
            cpu, pcie = expert_rates(profile, request.threads)
            details["expert_rates"] = (cpu, 0.0 if request.experts_on_cpu else pcie)
        if pools:
            details |= {"expert_pools": pools, "hit_rate": hit_rate(cached),
                        "hit_source": SAVED_STATISTICS if request.warm else UNIFORM_ROUTING}
        if needed and profile is not None:
            uses, threads = known.model_uses, request.threads
            details |= {"profile": profile,
                        "decode": decode_on_gpu(uses, homes, profile, threads, cached, known.beside),
                        "prefill": prefill_on_gpu(uses, homes, profile, batch, cached, request.prompt),
                        "draft_cost": draft_cost_on_gpu(known, homes, profile, threads, cached)}
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
        # A smaller batch takes less: where the smallest does not fit, none does.
        rows = self._smallest_batch(min(self._wanted, context))
        return self._whole_fits(context, rows) or self._part_fits(context, rows)

    def _batch(self, most: int, fits: Callable[[int, int], bool]) -> int:
        """The batch with which it fits, 0 if none does; a batch that was asked for is not changed."""
        tokens = self._request.context
        if self._shrinks:
            return _fitting_batch(most, self._least, lambda rows: fits(tokens, rows))
        return most if fits(tokens, most) else 0

    def _smallest_batch(self, most: int) -> int:
        """The last one that `_batch` would try."""
        while self._shrinks and most >= 2 * self._least:
            most //= 2
        return most

    def _fullest(self, batch: int) -> tuple[tuple[TensorHome, ...], int]:
        """The homes with as many units in VRAM as fit, where experts are in slots, and what these may take."""
        # Not a binary search: the slots become fewer with the last weights that need them, so that more units in VRAM
        # may take less. But no unit takes less than its bytes, which is near enough to begin from.
        lines = self._request.lines("cuda", self._request.context, batch, self._inventory.homes(0))
        others = sum(count for name, count in lines if name != "streaming") - _ROUNDING
        resident = _largest(self._count - 1, lambda count: self._within_limit(count) and (
            self._available is None or others + self._inventory.movable_bytes(count) <= self._available))
        for count in range(resident, -1, -1):
            homes = self._inventory.homes(count)
            if self._has_room(self._request.context, batch, homes):
                return homes, self._slots(batch, homes) if count == self._before_experts else 0
        return min(self._smallest_homes, key=lambda homes: self._total(batch, homes)), 0

    def _slots(self, batch: int, homes: tuple[TensorHome, ...]) -> int:
        """Bytes for slots, in whole MiB: all that is left beside everything else; 0 where that holds no expert."""
        limit = self._switches.limit
        most = [] if limit is None else [limit - self._inventory.movable_bytes(self._before_experts)]
        most += [] if self._available is None else [self._available]
        slots = _MIB * _largest(min(most) // _MIB, lambda count: self._has_room(
            self._request.context, batch, homes, count * _MIB))
        return slots if any(pool.slots for pool in self._pools(batch, homes, slots)) else 0

    def _smallest(self, most: int) -> tuple[int, tuple[TensorHome, ...]]:
        """The batch and the homes that take the least."""
        batch, choices = self._smallest_batch(most), list(self._smallest_homes if self._count else ())
        if self._may_be_whole or not choices:
            choices.append(self._whole_homes)
        return batch, min(choices, key=lambda homes: self._total(batch, homes))

    def _total(self, batch: int, homes: Sequence[TensorHome]) -> int:
        return self._request.total("cuda", self._request.context, batch, homes)

    def _fitting_vram(self, most: int) -> int:
        """The least budget that would do, in whole MiB; 0 where the budget is not in the way or cannot be had."""
        if self._request.vram is None or self._available != self._request.vram:
            return 0
        needed = self._total(*self._smallest(most))
        needed = -(-needed // _SMALLEST_VRAM) * _SMALLEST_VRAM
        return needed if self._free is None or needed <= self._free else 0


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `limit` that fits, where all smaller ones do too; 0 if not even 1 does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _fitting_batch(batch: int, least: int, fits: Callable[[int], bool]) -> int:
    """The first of `batch`, a half of it, a quarter, … down to `least` that fits; 0 if none does."""
    while batch >= 1 and not fits(batch):
        batch = batch // 2 if batch >= 2 * least else 0
    return batch

