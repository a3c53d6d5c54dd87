"""What a plan is asked for with: the model, the settings, and what the core says that they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from sharpi.files.gguf import GgufFile, fingerprint
from sharpi.files.rope import RopeScaling
from sharpi.machine.disk import ASSUMED_BYTES_PER_SECOND, disk_bytes_per_second
from sharpi.machine.hardware import Gpu
from sharpi.machine.profile import HardwareProfile
from sharpi.planning.placement import VRAM, Inventory, Switches, TensorHome
from sharpi.planning.plan import Plan
from sharpi.settings.choices import EXACT

if TYPE_CHECKING:
    from sharpi._core import EngineOptions
    from sharpi.planning.expert_stats import ExpertStats

__all__ = ["Request", "Spec", "Speeds"]


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
        """1 if a prediction layer is to be loaded, else 0."""
        ...

    @property
    def state_bytes(self) -> int:
        """What recurrent layers keep of one sequence."""
        ...

    @property
    def shared_experts(self) -> int:
        """Layers with experts and, beside them, products that every token takes."""
        ...

    @property
    def row_kernels(self) -> int:
        """Small kernels of a step beyond those of plain layers: of parts side by side, of per-layer embeddings."""
        ...

    def kv_bytes(self, options: EngineOptions) -> int:
        """Bytes of the KV cache."""
        ...

    def kv_bytes_if_all_seen(self, options: EngineOptions) -> int:
        """Bytes that it would have if every layer saw all tokens."""
        ...

    def kv_bytes_read(self, kv_dtype: str, tokens: int) -> int:
        """Bytes that the last of `tokens` tokens reads of the KV cache."""
        ...

    def attention_products(self, tokens: int) -> int:
        """Multiplications of queries with keys for the last of `tokens` tokens."""
        ...

    @property
    def long_attention(self) -> bool:
        """Whether the GPU has kernels for long texts for all of the model's attention."""
        ...

    def refusal(self, device: str) -> str:
        """Why this kind of device cannot run the model; empty if it can."""
        ...

    def memory_lines(self, options: EngineOptions) -> list[tuple[str, int]]:
        """(what, bytes) in the order of allocation: "token embedding", "layer 0" and on, "prediction layer" if there
        is one, "output head", "KV cache", "scratch", "graphs"; "streaming" if a weight is fetched, "expert slots"
        if experts are, and "recurrent state" for a model that keeps one for each of `sequences`. On the CPU, weights
        that stay in the mapped file count as nothing. Bytes are counted in the device's steps: a line that fits into
        what is left of the step before it takes nothing."""
        ...

    def expert_pools(self, options: EngineOptions) -> list[tuple[int, int, int, int]]:
        """What the slots are: by pool (layers, experts in all of them, bytes of a slot, slots)."""
        ...

    def tensor_uses(self) -> list[tuple[int, str, str, int, int, int, int]]:
        """(tensor, name, role, layer, bytes a token reads, rows, columns) in the order in which a token meets them; the
        layer of the prediction layer is `layer_count`."""
        ...


class Speeds(Protocol):
    """The machine's speeds."""

    def of(self, device: str, found: Gpu | str | None) -> HardwareProfile:
        """The profile for a plan on `device`; it may be measured for that."""
        ...

    def at_hand(self, found: Gpu | str | None) -> HardwareProfile | None:
        """What is known of the machine with this GPU, without measuring."""
        ...


@dataclass(frozen=True)
class Request:
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
    speeds: Speeds
    warm: ExpertStats | None
    shown: bool
    sequences: int
    cache_tokens: int
    rope: RopeScaling | None
    prompt: str  # of a plan for the GPU
    # See `make_plan`.
    ram_budget: int | None = None  # of a plan for the CPU
    spill_bytes: int | None = None

    def most_rows(self, batch: int, context: int | None = None) -> int:
        """The rows of a batch with this context, or the one that was asked for: no more than tokens can be cached."""
        return min(batch, max(self.context if context is None else context, self.cache_tokens))

    @cached_property
    def inventory(self) -> Inventory:
        """The model's weights in units."""
        return Inventory.of(self.file, self.spec)

    @cached_property
    def disk_bytes_per_second(self) -> float:
        """The rate of the disk under the model's largest file, measured once."""
        path = max(self.file.paths, key=lambda each: each.stat().st_size if each.exists() else 0, default=None)
        return (disk_bytes_per_second(path) if path is not None else None) or ASSUMED_BYTES_PER_SECOND

    @cached_property
    def experts_on_cpu(self) -> bool:
        """Whether there are experts that may not be in VRAM, not even in slots. Only a GPU's plan asks."""
        wanted = Switches.read().cpu_moe if self.cpu_moe is None else self.cpu_moe
        return wanted and self.inventory.has_experts

    def total(self, device: str, context: int, rows: int, homes: Sequence[TensorHome], slots: int = 0) -> int:
        """The sum of the lines."""
        return sum(count for _, count in self.lines(device, context, rows, homes, slots))

    def lines(self, device: str, context: int, rows: int, homes: Sequence[TensorHome],
              slots: int = 0) -> list[tuple[str, int]]:
        """What the core would take; on the CPU weights have no homes. slots: what slots for experts may take."""
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
            cache_tokens=self.cache_tokens,
            device=device,
            homes=() if whole else homes,
            expert_slot_bytes=0 if whole and device == "cuda" else slots,
        )

    def prompt_on(self, device: str) -> str:
        """How the device computes prompts."""
        return self.prompt if device == "cuda" else EXACT

    def fill(self, device: str, why: str, found: Gpu | str | None, batch: int, available: int | None,
             homes: tuple[TensorHome, ...], slots: int = 0, **more: Any) -> Plan:
        """The plan, with what is the same on every device filled in."""
        options = self.options(device, self.context, batch, homes, slots)
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
            cache_tokens=self.cache_tokens,
            mtp=self.spec.prediction_layers > 0,
            rope=self.rope,
            weights_bytes=sum(tensor.nbytes for tensor in self.file.tensors),
            kv_bytes=self.spec.kv_bytes(options),
            kv_bytes_if_all_seen=self.spec.kv_bytes_if_all_seen(options),
            lines=tuple((name, count) for name, count in self.spec.memory_lines(options)),
            available_bytes=available,
            homes=homes,
            expert_slots=slots,
            **more,
        )
