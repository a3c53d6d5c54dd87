"""Plans: what a model will take, computed from its metadata before a byte of it is loaded.

A plan is what `Model.load` carries out and what `sharpi plan` shows; both come from `make_plan`, so that the
prediction and the run cannot drift apart. On the CPU every weight stays in the mapped file, and the plan is a
sum: weights, KV cache and scratch against the machine's RAM.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from sharpi.errors import InvalidRequestError
from sharpi.gguf import GgufFile
from sharpi.hardware import ram_bytes

__all__ = ["DEFAULT_BATCH", "DEFAULT_CONTEXT", "KV_DTYPES", "Plan", "Spec", "choose_context", "choose_kv_dtype",
           "make_plan"]

KV_DTYPES = ("fp32", "bf16", "fp16")
DEFAULT_KV_DTYPE = "bf16"
# Models announce contexts whose KV cache would fill the machine; this much is taken unless a person asks for more.
DEFAULT_CONTEXT = 4096
DEFAULT_BATCH = 512


class Spec(Protocol):
    """What a plan needs to know of a model; the core's description of it has this."""

    @property
    def context_length(self) -> int:
        """The longest context the model was made for, in tokens."""

    def kv_bytes(self, kv_dtype: str, context: int) -> int:
        """Bytes of the KV cache for `context` tokens over all layers, in whole pages."""

    def scratch_bytes(self, batch: int, context: int, threads: int) -> int:
        """Bytes of working memory for batches of up to `batch` tokens in a context of `context`."""


@dataclass(frozen=True)
class Plan:
    """What a model takes in RAM, all in bytes but the context (tokens).

    `fitting_context` is the longest context, up to the model's own, with which the model would fit; 0 where not
    even a context of one token does.
    """

    model: str
    architecture: str
    context: int
    model_context: int
    kv_dtype: str
    batch: int
    weights_bytes: int
    kv_bytes: int
    scratch_bytes: int
    ram_bytes: int
    fitting_context: int

    @property
    def total_bytes(self) -> int:
        """Weights, KV cache and scratch together."""
        return self.weights_bytes + self.kv_bytes + self.scratch_bytes

    @property
    def fits(self) -> bool:
        """Whether the total is within the machine's RAM."""
        return self.total_bytes <= self.ram_bytes

    def to_dict(self) -> dict[str, Any]:
        """Every field, `total_bytes` and `fits`, as `sharpi plan --json` prints them."""
        return {**asdict(self), "total_bytes": self.total_bytes, "fits": self.fits}


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


def make_plan(file: GgufFile, spec: Spec, *, context: int | None = None, kv_dtype: str | None = None,
              batch: int = DEFAULT_BATCH, threads: int = 1, ram: int | None = None) -> Plan:
    """The plan for running `file` on the CPU; `ram` stands in for the machine's memory in bytes.

    Raises `InvalidRequestError` for a context or KV element type that cannot be had.
    """
    tokens = choose_context(spec, context)
    kind = choose_kv_dtype(kv_dtype)
    memory = ram_bytes() if ram is None else ram
    weights = sum(tensor.nbytes for tensor in file.tensors)
    return Plan(
        model=file.name,
        architecture=file.architecture,
        context=tokens,
        model_context=spec.context_length,
        kv_dtype=kind,
        batch=batch,
        weights_bytes=weights,
        kv_bytes=spec.kv_bytes(kind, tokens),
        scratch_bytes=spec.scratch_bytes(batch, tokens, threads),
        ram_bytes=memory,
        fitting_context=_fitting_context(spec, kind, batch, threads, memory - weights),
    )


def _fitting_context(spec: Spec, kv_dtype: str, batch: int, threads: int, room: int) -> int:
    """The longest context whose KV cache and scratch fit in `room` bytes; both grow with the context."""

    def fits(context: int) -> bool:
        return spec.kv_bytes(kv_dtype, context) + spec.scratch_bytes(batch, context, threads) <= room

    low, high = 0, spec.context_length
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
