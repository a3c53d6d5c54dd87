"""Plans: what a model will take, computed from its metadata before a byte of it is loaded.

A plan is what `Model.load` carries out and what `sharpi plan` shows; both come from `make_plan`, so that the
prediction and the run cannot drift apart. Its lines are the core's own: the loading code run over a memory that only
counts. On the CPU the weights stay in the mapped file and fill RAM beside the lines; on the GPU the lines are all
there is. Planning is arithmetic: a plan for a GPU can be made where there is none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from sharpi.errors import InvalidRequestError, OutOfMemoryError
from sharpi.gguf import GgufFile
from sharpi.hardware import Gpu, gpu, ram_bytes

__all__ = ["DEFAULT_BATCH", "DEFAULT_CONTEXT", "DEVICES", "KV_DTYPES", "Plan", "Spec", "VRAM_MARGIN", "choose_context",
           "choose_kv_dtype", "make_plan", "parse_vram"]

DEVICES = ("auto", "cpu", "cuda")
KV_DTYPES = ("fp32", "bf16", "fp16")
DEFAULT_KV_DTYPE = "bf16"
# Models announce contexts whose KV cache would fill the machine; this much is taken unless a person asks for more.
DEFAULT_CONTEXT = 4096
# Prefill on a GPU reads all weights once a batch, and has to multiply for as long as that takes. Less is taken there
# where only less fits.
DEFAULT_BATCH = {"cpu": 512, "cuda": 2048}
# Of the free VRAM this much is left to the driver and to whoever draws on the screen, whatever the budget.
VRAM_MARGIN = 256 << 20

_SMALLEST_BATCH = 32  # a batch below it is not worth suggesting
_SMALLEST_CONTEXT = 512  # nor is a context below it, where more was asked for
_SMALLEST_VRAM = 1 << 20  # less is a unit that was forgotten
_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30,
          "t": 1 << 40, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


class Spec(Protocol):
    """What a plan needs to know of a model; the core's description of it has this."""

    @property
    def context_length(self) -> int:
        """The longest context the model was made for, in tokens."""

    def kv_bytes(self, kv_dtype: str, context: int) -> int:
        """Bytes of the KV cache for `context` tokens."""

    def memory_lines(self, device: str, kv_dtype: str, batch: int, context: int,
                     threads: int) -> list[tuple[str, int]]:
        """(what, bytes) in the order of allocation: "token embedding", "layer 0" and on, "output head", "KV cache",
        "scratch", "graphs". On the CPU, weights that stay in the mapped file count as nothing. Bytes are counted in
        the device's steps: a line that fits into what is left of the step before it takes nothing."""


@dataclass(frozen=True)
class Plan:
    """What a model takes on its device, all in bytes but the context and the batch (tokens).

    device: "cpu" or "cuda"; `why` says in one line how it was chosen where it was left to the plan. gpu: the GPU, or
    why there is none; a plan for the CPU that nobody asked the GPU about has neither. vram: the budget that was set.
    weights_bytes: of the file. kv_bytes: what the KV cache holds. lines: what the core allocates, in order, counted in
    the device's steps. available_bytes: what all must fit into, RAM or VRAM; `None` for a GPU that is not there and no
    budget. fitting_context and fitting_batch: the longest context up to the model's own, and the largest batch up to
    this one, with which the model would fit, all else as it is; 0 where none does.
    """

    model: str
    architecture: str
    device: str
    why: str
    gpu: Gpu | str | None
    vram: int | None
    context: int
    model_context: int
    kv_dtype: str
    batch: int
    weights_bytes: int
    kv_bytes: int
    lines: tuple[tuple[str, int], ...]
    available_bytes: int | None
    fitting_context: int
    fitting_batch: int

    @property
    def embedding_bytes(self) -> int:
        """The token embedding's line."""
        return self._line("token embedding")

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """The layers' lines, first to last."""
        return tuple(count for name, count in self.lines if name.startswith("layer "))

    @property
    def head_bytes(self) -> int:
        """The output head's line; a head that is the embedding costs nothing."""
        return self._line("output head")

    @property
    def scratch_bytes(self) -> int:
        """The working memory's line."""
        return self._line("scratch")

    @property
    def graphs_bytes(self) -> int:
        """The line of the captured steps, and of what the driver keeps for them."""
        return self._line("graphs")

    @property
    def mapped_bytes(self) -> int:
        """Weights that are read where the file is mapped: all of them on the CPU, none on the GPU."""
        return self.weights_bytes if self.device == "cpu" else 0

    @property
    def total_bytes(self) -> int:
        """Mapped weights and all lines together."""
        return self.mapped_bytes + sum(count for _, count in self.lines)

    @property
    def fits(self) -> bool:
        """Whether the total is within what is available; true where nobody knows what is."""
        return self.available_bytes is None or self.total_bytes <= self.available_bytes

    @property
    def offered_context(self) -> int:
        """For a plan that does not fit: the fitting context, or 0 where it is too short to be worth the offer."""
        return self.fitting_context if self.fitting_context >= min(_SMALLEST_CONTEXT, self.context) else 0

    def to_dict(self) -> dict[str, Any]:
        """Every field and every sum, as `sharpi plan --json` prints them."""
        sums = ("embedding_bytes", "head_bytes", "scratch_bytes", "graphs_bytes", "mapped_bytes", "total_bytes",
                "fits")
        lines = [{"name": name, "bytes": count} for name, count in self.lines]
        return {**asdict(self), "lines": lines, **{name: getattr(self, name) for name in sums}}

    def require(self) -> None:
        """Raises where the plan cannot be carried out: `InvalidRequestError` for a GPU that is not there,
        `OutOfMemoryError` for a model that does not fit into the VRAM. RAM is not checked: the weights are mapped, and
        what does not fit is read again."""
        if self.device != "cuda":
            return
        if not isinstance(self.gpu, Gpu):
            raise InvalidRequestError(f"device cuda: {self.gpu}")
        if not self.fits:
            raise OutOfMemoryError(self.shortage())

    def shortage(self) -> str:
        """For a plan that does not fit: how much is missing, and what would fit, in one line."""
        available = self.available_bytes or 0
        needs, room = "RAM", f"there are {_size(available)}"
        if self.device == "cuda":
            # A budget beyond what the GPU has free is not what is in the way.
            needs = "VRAM"
            room = f"the VRAM budget is {_size(available)}" if self.vram == available else f"{room} free"
        said = [f"{self.model} needs {_size(self.total_bytes)} of {needs} and {room}:"
                f" {_size(self.total_bytes - available)} are missing"]
        if self.fitting_batch:
            said.append(f"a batch of {self.fitting_batch} would fit (-b {self.fitting_batch})")
        if self.offered_context:
            said.append(f"a context of {self.offered_context} tokens would fit (-c {self.offered_context})")
        if self.device == "cuda":
            said.append("--device cpu runs it from RAM")
        return "; ".join(said)

    def _line(self, name: str) -> int:
        return sum(count for line, count in self.lines if line == name)


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
    """The context to use where `context` was asked for. Raises `InvalidRequestError` for one the model lacks."""
    if context is None:
        return min(spec.context_length, DEFAULT_CONTEXT)
    if context < 1:
        raise InvalidRequestError(f"a context of {context} tokens: it must be at least 1")
    if context > spec.context_length:
        raise InvalidRequestError(
            f"a context of {context:,} tokens is more than the model's {spec.context_length:,}")
    return context


def choose_kv_dtype(kv_dtype: str | None) -> str:
    """`kv_dtype`, else what SHARPI_KV_DTYPE says, else the default. Raises `InvalidRequestError` for an unknown one."""
    chosen = kv_dtype or os.environ.get("SHARPI_KV_DTYPE") or DEFAULT_KV_DTYPE
    if chosen not in KV_DTYPES:
        raise InvalidRequestError(f"KV element type {chosen!r} is unknown; there are {', '.join(KV_DTYPES)}")
    return chosen


def make_plan(file: GgufFile, spec: Spec, *, device: str = "auto", vram: str | int | None = None,
              context: int | None = None, kv_dtype: str | None = None, batch: int | None = None, threads: int = 1,
              ram: int | None = None) -> Plan:
    """The plan for running `file`; `ram` stands in for the machine's memory in bytes.

    "auto" is the GPU where there is one and the model fits into its free memory, or into the budget `vram`, and else
    the CPU. Raises `InvalidRequestError` for what cannot be had.
    """
    if device not in DEVICES:
        raise InvalidRequestError(f"unknown device {device!r}: known are auto, cpu and cuda")
    budget = parse_vram(vram)
    if device == "cpu" and budget is not None:
        raise InvalidRequestError("a VRAM budget means nothing on device cpu: leave it out, or use device cuda or auto")
    tokens = choose_context(spec, context)
    request = _Request(file, spec, tokens, choose_kv_dtype(kv_dtype), batch, threads, budget)
    if device == "cpu":
        return request.plan("cpu", "", None, ram)
    found = gpu()
    if device == "cuda":
        return request.plan("cuda", "", found, ram)
    if isinstance(found, str):
        return request.plan("cpu", found, found, ram)
    plan = request.plan("cuda", "the model fits into its memory", found, ram)
    return plan if plan.fits else request.plan("cpu", plan.shortage().removesuffix("; --device cpu runs it from RAM"),
                                               found, ram)


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

    def plan(self, device: str, why: str, found: Gpu | str | None, ram: int | None) -> Plan:
        wanted = DEFAULT_BATCH[device] if self.batch is None else self.batch
        batch = min(wanted, self.context)
        weights = sum(tensor.nbytes for tensor in self.file.tensors)
        mapped = weights if device == "cpu" else 0
        available = self._available(device, found, ram)

        def lines(context: int, rows: int) -> list[tuple[str, int]]:
            return self.spec.memory_lines(device, self.kv_dtype, rows, context, self.threads)

        def fits(context: int, rows: int) -> bool:
            return available is None or mapped + sum(count for _, count in lines(context, rows)) <= available

        def fits_at(context: int) -> bool:
            most = min(wanted, context)
            return _fitting_batch(most, lambda rows: fits(context, rows)) > 0 if shrinks else fits(context, most)

        # Nobody asked for the default: slower prefill is better than another device.
        shrinks = device == "cuda" and self.batch is None
        fitting_batch = _fitting_batch(batch, lambda rows: fits(self.context, rows))
        if shrinks and fitting_batch:
            batch = fitting_batch
        return Plan(
            model=self.file.name,
            architecture=self.file.architecture,
            device=device,
            why=why,
            gpu=found,
            vram=self.vram,
            context=self.context,
            model_context=self.spec.context_length,
            kv_dtype=self.kv_dtype,
            batch=batch,
            weights_bytes=weights,
            kv_bytes=self.spec.kv_bytes(self.kv_dtype, self.context),
            lines=tuple((name, count) for name, count in lines(self.context, batch)),
            available_bytes=available,
            fitting_context=_largest(self.spec.context_length, fits_at),
            fitting_batch=fitting_batch,
        )

    def _available(self, device: str, found: Gpu | str | None, ram: int | None) -> int | None:
        if device == "cpu":
            return ram_bytes() if ram is None else ram
        if not isinstance(found, Gpu):
            return self.vram
        free = max(0, found.free_bytes - VRAM_MARGIN)
        return free if self.vram is None else min(self.vram, free)


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `limit` that fits, where all smaller ones do too; 0 if not even 1 does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _fitting_batch(batch: int, fits: Callable[[int], bool]) -> int:
    """The first of `batch`, a half of it, a quarter, … that fits."""
    while batch >= 1 and not fits(batch):
        batch = batch // 2 if batch >= 2 * _SMALLEST_BATCH else 0
    return batch


def _size(count: int) -> str:
    return f"{count / 2**30:,.2f} GiB" if count >= 1 << 28 else f"{count / 2**20:,.2f} MiB"
