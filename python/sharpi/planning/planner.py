"""Plans: what a model will take, where its weights will be, and how fast it will run, before a byte of it is loaded.

A plan is what `Model.load` carries out and what `sharpi plan` shows; both come from `make_plan`, so that the
prediction and the run cannot drift apart. Its lines are the core's own: the loading code run over a memory that only
counts. On the CPU the weights stay in the mapped file and fill RAM beside the lines; on the GPU the lines are all
there is. A model that does not fit into the GPU's memory has the most useful of its weights there and the others in
RAM, to be fetched across PCIe or computed by the CPU; what is left of the memory holds slots for experts. If RAM has no
room for the others either, slots there hold some, and the rest is read from the disk. Planning is arithmetic: a plan
for a GPU can be made on a machine without one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sharpi.errors import InvalidRequestError, SharpiError
from sharpi.files.gguf import GgufFile
from sharpi.files.rope import RopeScaling
from sharpi.machine.hardware import Gpu, gpu
from sharpi.machine.profile import ASSUMED, HardwareProfile
from sharpi.machine.profile_cache import current_profile, measuring_words
from sharpi.planning.gpu_plan import DEFAULT_GPU_BATCH, VRAM_MARGIN, OnGpu, fitting_batch, largest
from sharpi.planning.plan import DEFAULT_SEQUENCES, Plan, load_plan, size_words
from sharpi.planning.prediction.decode import after_on_cpu, completed, decode_on_cpu, draft_cost_on_cpu
from sharpi.planning.prediction.prefill import prefill_on_cpu
from sharpi.planning.prompt_modes import choose_prompt, least_batch, rounding_words
from sharpi.planning.ram_slots import RamSlots
from sharpi.planning.request import Request, Spec
from sharpi.settings import arguments
from sharpi.settings.choices import DEVICES, EXACT, KV_DTYPES
from sharpi.settings.switches import check_switches

if TYPE_CHECKING:
    from sharpi.planning.expert_stats import ExpertStats

__all__ = ["DEFAULT_BATCH", "DEFAULT_CONTEXT", "DEVICES", "KV_DTYPES", "MachineSpeeds", "Plan", "Spec",
           "VRAM_MARGIN", "choose_context", "choose_kv_dtype", "make_plan", "parse_amount",
           "parse_spill", "parse_vram", "saved_plan"]

DEFAULT_KV_DTYPE = "bf16"
# Models announce contexts whose KV cache would fill the machine; this much is taken unless a person asks for more.
DEFAULT_CONTEXT = 4096
DEFAULT_BATCH = {"cpu": 512, "cuda": DEFAULT_GPU_BATCH}

_MIB = 1 << 20
_SMALLEST_VRAM = _MIB  # less is a unit that was forgotten
_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30,
          "t": 1 << 40, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}

Notice = Callable[[str], None]


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
        # A large number without a unit more likely means MiB.
        hint = f"did you mean {meant}{'GiB' if float(meant) < 1000 else 'MiB'}?" if meant else "1MiB is the least"
        raise InvalidRequestError(f"a VRAM budget of {count} bytes: {hint}")
    return count


def parse_amount(name: str, value: Any) -> int:
    """Bytes of memory, said like a budget of VRAM. Raises `InvalidRequestError` with the setting's name."""
    try:
        count = parse_vram(value)
    except InvalidRequestError:
        count = None
    if count is None:
        raise InvalidRequestError(f"{name}: {arguments.shown(value)} is no amount of memory: say it as 24GiB or 800MiB")
    return count


def parse_spill(value: int | str | None) -> int | None:
    """The bytes of a scheduler's copies of pages: an amount or 0; `None` if nothing is said."""
    return value if value is None else 0 if value in (0, "0") else parse_amount("spill", value)


def _bytes_in(text: str) -> tuple[int | None, str]:
    """The bytes that a text means, `None` for no amount; and its number, if its unit is small or left out."""
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
              cpu_moe: bool | None = None, sequences: int | None = None, cache_tokens: int | None = None,
              prompt: str | None = None, ram_budget: int | None = None, spill_bytes: int | None = None,
              ram: int | None = None, profile: HardwareProfile | None = None, warm: ExpertStats | None = None,
              shown: bool = False, rope: RopeScaling | None = None, notice: Notice | None = None) -> Plan:
    """The plan for running `file`; `ram` stands in for the machine's memory in bytes.

    "auto" is the GPU if there is one and the model fits into its free memory, or into the budget `vram`; if only a part
    of it fits, the GPU or the CPU, whichever is predicted to decode faster. cpu_moe: whether all experts are left to
    the CPU even if they would fit; `None`: what SHARPI_CPU_MOE says. sequences, cache_tokens: see `Plan`. spill_bytes:
    what the model's schedulers are given of this name. A mixture that is larger than RAM leaves room for their
    copies; on the CPU it takes with them at most `ram_budget` bytes, unless it needs more than that. prompt:
    "exact" or "fast"; `None`: what the kind of GPU says. A batch that is too small for fast prompts is rounded up.
    profile: the machine's speeds; without it, they are measured if they are needed and not known. warm: how often each
    expert is used, to expect hits by; without it, all alike. shown: the plan is for a person to look at; it has
    predictions, and if a profile is given it is for that machine, not for this one. rope: the scaling that `spec` was
    read with. notice: is told, in a line, that the machine is measured, or that the batch was rounded up. Raises
    `InvalidRequestError` for what cannot be had.
    """
    check_switches()
    if device not in DEVICES:
        raise InvalidRequestError(f"unknown device {device!r}: known are auto, cpu and cuda")
    budget = parse_vram(vram)
    if device == "cpu" and budget is not None:
        raise InvalidRequestError("a VRAM budget means nothing on device cpu: leave it out, or use device cuda or auto")
    tokens = choose_context(spec, context)
    speeds = MachineSpeeds(profile, notice)
    if shown and profile is not None:
        ram = profile.ram_bytes if ram is None else ram
    found: Gpu | str | None = None
    if device != "cpu":
        found = _profiled_gpu(profile) if shown and profile is not None else gpu()
    request = Request(file, spec, tokens, choose_kv_dtype(kv_dtype), batch, threads, budget, cpu_moe, ram, speeds,
                       warm, shown, sequences or DEFAULT_SEQUENCES, cache_tokens or 0, rope,
                       choose_prompt(prompt, found), ram_budget, spill_bytes)
    plan = _on_device(request, device, found)
    if notice is not None and plan.device == "cuda" and batch is not None and plan.batch > batch:
        notice(rounding_words(batch, plan.batch))
    return plan


def _on_device(request: Request, device: str, found: Gpu | str | None) -> Plan:
    """The plan for the device that was asked for, or for the one that "auto" takes. found: see `Plan.gpu`."""
    if found is None:
        return _on_cpu(request, "", None)
    _require_below_card(request.vram, found)
    if device == "cuda" or (request.shown and isinstance(found, str) and request.vram is not None):
        return _on_gpu(request, "", found)
    if isinstance(found, str):
        return _on_cpu(request, found, found)
    return _faster(request, found)


def _on_cpu(request: Request, why: str, found: Gpu | str | None) -> Plan:
    """The plan for the CPU."""
    batch, slots = _in_ram(request)
    fits = slots.fits
    shown: dict[str, Any] = {}
    if request.shown and fits(request.context, batch):
        profile = request.speeds.of("cpu", found)
        known = request.inventory.on(profile)
        full = after_on_cpu(known.beside, request.spec, request.kv_dtype, request.context)
        shown = {"placement": known.placed_on_cpu(), "profile": profile,
                 "prefill": prefill_on_cpu(known.model_uses, profile, batch, request.threads),
                 "decode": decode_on_cpu(known.model_uses, profile, request.threads, known.beside),
                 "decode_full": decode_on_cpu(known.model_uses, profile, request.threads, full),
                 "draft_cost": draft_cost_on_cpu(known, profile, request.threads)}
        shown = slots.speeds(shown)
    return request.fill("cpu", why, found, batch, slots.room, (), **slots.details(), **shown,
                        fitting_batch=fitting_batch(batch, least_batch("cpu", EXACT),
                                                    lambda rows: fits(request.context, rows)),
                        fitting_context=largest(request.spec.context_length,
                                                lambda context: fits(context, request.most_rows(batch, context))))


def _in_ram(request: Request) -> tuple[int, RamSlots]:
    """The batch of a plan for the CPU, and its slots."""
    batch = request.most_rows(request.batch or DEFAULT_BATCH["cpu"])
    return batch, RamSlots(request, batch)


def _on_gpu(request: Request, why: str, found: Gpu | str) -> Plan:
    """The plan for the GPU: everything in VRAM if that fits, else as much as fits."""
    return OnGpu(request, found).plan(why)


def saved_plan(path: str | os.PathLike[str], file: GgufFile, spec: Spec) -> Plan:
    """The plan that was saved at `path`, for running it on this machine's GPU or CPU. Raises `InvalidRequestError`
    for a file that is no plan for `file`."""
    plan = load_plan(path, file, spec)
    if plan.device == "cpu":
        return replace(plan, gpu=None)
    found = gpu()
    _require_below_card(plan.vram, found)
    return replace(plan, gpu=found)


def _faster(request: Request, found: Gpu) -> Plan:
    """The GPU if the model fits, else the device that decodes faster; the CPU if the GPU cannot run the model."""
    refusal = request.spec.refusal("cuda")
    if refusal:
        return _on_cpu(request, refusal.removesuffix("; device cpu can"), found)
    there = _on_gpu(request, "the model fits into its memory", found)
    if not there.fits:
        return _on_cpu(request, there.shortage().removesuffix("; --device cpu runs it from RAM"), found)
    if there.resident:
        return there
    if there.decode is None or not request.inventory.streamed(there.homes):
        return replace(there, why="the model fits into its memory but for the embedding, which is read by rows")
    profile = request.speeds.of("cuda", found)
    known = request.inventory.on(profile)
    because = "the model does not fit into the VRAM whole"
    if request.experts_on_cpu:
        because = "the experts are left to the CPU"
    batch, slots = _in_ram(request)
    if not slots.fits(request.context, batch):
        return replace(there, why=because + ", and not into RAM either, which the CPU needs")
    here = slots.decode(decode_on_cpu(known.model_uses, profile, request.threads, known.beside))
    said = because + ", and decode is predicted at {:.1f} tokens/s {}, {:.1f} {}"
    speeds = {"cuda": there.decode.tokens_per_second, "cpu": here.tokens_per_second}
    if speeds["cuda"] >= speeds["cpu"]:
        return replace(there, why=said.format(speeds["cuda"], "with the GPU", speeds["cpu"], "without it"))
    return _on_cpu(request, said.format(speeds["cpu"], "on the CPU", speeds["cuda"], "with the GPU"), found)


def _profiled_gpu(profile: HardwareProfile) -> Gpu | str:
    """The GPU of the machine that a profile describes, with nothing else on it."""
    if profile.gpu is None or profile.vram_bytes is None:
        return "the profile is of a machine without a GPU"
    return Gpu(profile.gpu, 0, "", 0, profile.vram_bytes, profile.vram_bytes)


def _require_below_card(budget: int | None, found: Gpu | str) -> None:
    if budget is not None and isinstance(found, Gpu) and budget > found.total_bytes:
        raise InvalidRequestError(f"a VRAM budget of {size_words(budget)} is more than {found.name} has:"
                                  f" {size_words(found.total_bytes)}; leave --vram out for all that is free")


def _index(found: Gpu | str | None) -> int:
    return found.index if isinstance(found, Gpu) else 0


class MachineSpeeds:
    """The machine's speeds, measured when somebody first needs them."""

    def __init__(self, given: HardwareProfile | None, notice: Notice | None) -> None:
        self._known = given
        self._notice = notice or (lambda line: None)

    def of(self, device: str, found: Gpu | str | None) -> HardwareProfile:
        """The profile for a plan on `device`. A GPU that is not here is not measured, but assumed."""
        if self._known is None:
            here = device == "cpu" or isinstance(found, Gpu)
            try:
                self._known = current_profile(here, lambda reason: self._notice(measuring_words(reason)), _index(found))
            except SharpiError as reason:
                self._notice(f"this machine cannot be measured ({reason}): usual speeds are assumed")
                self._known = ASSUMED
        return completed(self._known) if device == "cuda" else self._known

    def at_hand(self, found: Gpu | str | None) -> HardwareProfile | None:
        """What was measured with this GPU, without measuring; a machine without a GPU's rates does not count."""
        known = current_profile(False, gpu_index=_index(found)) if self._known is None else self._known
        return known if known.gpu is not None and not known.assumed else None
