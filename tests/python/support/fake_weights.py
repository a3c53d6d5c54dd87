"""Models that are only sizes, for planning: their tensors, how a token meets them, and what they take of a device.

And machines that are only rates, with or without a GPU. Everything is known here in plain sums, so that plans can be
checked against them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sharpi import _core
from sharpi.files.gguf import fingerprint
from sharpi.machine.hardware import Gpu
from sharpi.machine.profile import ASSUMED, HardwareProfile
from sharpi.planning.expert_stats import ExpertStats
from sharpi.planning.placement import Inventory, TensorHome
from sharpi.planning.prediction.cpu_share import share_rows

MIB, GIB = 1 << 20, 1 << 30
# The slots for streamed weights: how many pieces, and the most bytes of each.
SLOTS, PIECE = 8, 384 << 10
STREAMING = SLOTS * PIECE
# Slots for experts: how many of each pool are for experts that are used once, and the bytes beside them.
LANDING, STAGING = 1, 12345

# Near enough to one H200 with 16 cores, all in round numbers.
MACHINE = replace(ASSUMED, assumed=False, cpu="Some CPU", cores=16, threads=16, ram_bytes=64 * GIB,
                  ram_bytes_per_second=100e9, cpu_flops=1e12, gpu="Some GPU", vram_bytes=80 * GIB,
                  pcie_bytes_per_second=50e9, ram_bytes_per_second_shared=75e9, pcie_bytes_per_second_shared=45e9,
                  vram_bytes_per_second=3e12, gpu_kernel_seconds=2e-6, gpu_flops=300e12)


NO_GPU = "there is no usable GPU: none was built into this test"


@pytest.fixture()
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU, `MACHINE`'s rates, and nothing said in the environment."""
    for name in ("SHARPI_KV_DTYPE", "SHARPI_CUDA_PARTIAL_WEIGHT_CACHE", "SHARPI_CUDA_PARTIAL_WEIGHT_CACHE_GB",
                 "SHARPI_CUDA_ROW_SPLIT", "SHARPI_CPU_MOE"):
        monkeypatch.delenv(name, raising=False)
    set_gpu(monkeypatch, NO_GPU)
    monkeypatch.setattr("sharpi.planning.planner.current_profile", lambda measure, announce=None, gpu_index=0: MACHINE)


def set_gpu(monkeypatch: pytest.MonkeyPatch, found: int | str) -> None:
    """A GPU with this many bytes free, or a reason why there is none."""
    device = found if isinstance(found, str) else Gpu("Some GPU", 0, "9.0", 132, 80 * GIB, found)
    monkeypatch.setattr("sharpi.planning.planner.gpu", lambda: device)


def random_machine(dice: random.Random) -> HardwareProfile:
    """A machine whose buses may be in any relation."""
    ram, pcie = 10 ** dice.uniform(9.5, 12), 10 ** dice.uniform(9.5, 12)
    return replace(MACHINE, ram_bytes_per_second=ram, pcie_bytes_per_second=pcie,
                   ram_bytes_per_second_shared=ram * dice.uniform(0.3, 1),
                   pcie_bytes_per_second_shared=pcie * dice.uniform(0.3, 1),
                   vram_bytes_per_second=10 ** dice.uniform(11, 12.7), gpu_kernel_seconds=10 ** dice.uniform(-7, -5))


@dataclass
class FakeWeights:
    """A model of `layers` layers. It is the file of it, and the core's description too.

    On the GPU a resident tensor takes its bytes, a direct one nothing, all in steps of `granule`; and the slots for
    streaming STREAMING, or less where little is left to stream; rows of a direct embedding need none. Experts in slots
    take STAGING, and what is said for slots, or less if they are fewer. experts: layers with eight experts, of which a
    token uses two, instead of a dense feed-forward. The last layer is the prediction layer, if there is one.
    gated: otherwise a feed-forward part has no gate.
    """

    layers: int = 4
    tied: bool = False
    experts: tuple[int, ...] = ()
    granule: int = 1
    context_length: int = 32768
    per_token: int = 1000
    per_row: int = 2000
    mixed: random.Random | None = None  # chooses sizes, as files mix types
    name: str = "fake"
    architecture: str = "llama"
    prediction_layers: int = 0
    state_bytes: int = 0
    shared_experts: int = 0
    fused: bool = False  # gate and up are the halves of one tensor
    gated: bool = True
    row_kernels: int = 0
    layer_table: int = 0  # the width of a table with rows for all layers
    paths: tuple[Path, ...] = ()
    tensors: list[SimpleNamespace] = field(default_factory=list)
    uses: list[tuple[int, str, str, int, int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._add("token_embd", "embedding", -1, 8192, 1024, share=1 / 8192)
        if self.layer_table:
            self._add("per_layer_token_embd", "layer_embedding", -1, 8192, self.layer_table, share=1 / 8192)
        for layer in range(self.layers + self.prediction_layers):
            self._add(f"blk.{layer}.attn_norm", "vector", layer, 1, 1024)
            for name, rows in (("q", 1024), ("k", 256), ("output", 1024)):
                self._add(f"blk.{layer}.attn_{name}", "attention", layer, rows, 1024)
            if layer in self.experts:
                self._add(f"blk.{layer}.ffn_gate_inp", "router", layer, 8, 1024)
                for name in ("gate", "up", "down"):
                    self._add(f"blk.{layer}.ffn_{name}_exps", "experts", layer, 1024, 1024, share=0.25, experts=8)
                continue
            parts = (("gate", 4096, 1024), ("up", 4096, 1024), ("down", 1024, 4096))
            for name, rows, cols in parts if self.gated else parts[1:]:
                if self.fused and name == "gate":
                    continue
                self._add(f"blk.{layer}.ffn_{name}", f"ffn_{name}", layer, rows, cols)
                if self.fused and name == "up":
                    self._add_half()
        self._add("output_norm", "vector", -1, 1, 1024)
        if self.tied:
            self.uses.append((0, "token_embd", "head", -1, self.tensors[0].nbytes, 8192, 1024))
        else:
            self._add("output", "head", -1, 8192, 1024)

    def _add(self, name: str, role: str, layer: int, rows: int, cols: int, share: float = 1.0,
             experts: int = 1) -> None:
        """rows: of one expert, as the core tells them too."""
        bits = self.mixed.choice((4, 5, 6, 8)) if self.mixed else 4
        nbytes = experts * rows * cols * bits // 8
        self.uses.append((len(self.tensors), name, role, layer, int(nbytes * share), rows, cols))
        self.tensors.append(SimpleNamespace(name=name, type=12, shape=(cols, rows, experts), nbytes=nbytes))

    def _add_half(self) -> None:
        """Makes the last tensor, which is up, one of gate and up."""
        tensor, up = self.tensors[-1], self.uses.pop()
        cols, rows, experts = tensor.shape
        tensor.shape, tensor.nbytes = (cols, 2 * rows, experts), 2 * tensor.nbytes
        self.uses += [(*up[:2], role, *up[3:]) for role in ("ffn_gate", "ffn_up")]

    @property
    def layer_count(self) -> int:
        return self.layers

    @property
    def sizes(self) -> list[int]:
        return [tensor.nbytes for tensor in self.tensors]

    def resize(self, index: int, nbytes: int) -> None:
        """Makes a tensor, and what a token reads of it, as large as `nbytes`."""
        self.tensors[index].nbytes = nbytes
        self.uses = [(*use[:4], nbytes, *use[5:]) if use[0] == index else use for use in self.uses]

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def index(self, name: str) -> int:
        return [tensor.name for tensor in self.tensors].index(name)

    def tensor_uses(self) -> list[tuple[int, str, str, int, int, int, int]]:
        return self.uses

    def kv_bytes(self, options: _core.EngineOptions) -> int:
        return self.per_token * options.context

    def kv_bytes_if_all_seen(self, options: _core.EngineOptions) -> int:
        return self.kv_bytes(options)

    def kv_bytes_read(self, kv_dtype: str, tokens: int) -> int:
        return self.per_token * tokens

    long_attention = True

    def attention_products(self, tokens: int) -> int:
        return self.per_token * tokens // 2

    def layer_expert_bytes(self, layer: int) -> int:
        """The bytes of one expert."""
        return sum(tensor.nbytes for tensor in self.tensors
                   if tensor.name.startswith(f"blk.{layer}.") and "_exps" in tensor.name) // 8

    def expert_pools(self, options: _core.EngineOptions) -> list[tuple[int, int, int, int]]:
        homes = options.homes if options.device == "cuda" else [("slots", 0)] * len(self.tensors)
        return self.pools(homes, options.expert_slot_bytes)

    def pools(self, homes: Sequence[Any], expert_slot_bytes: int) -> list[tuple[int, int, int, int]]:
        """Layers whose experts are of one size share slots, and have a part of the room by what all experts take."""
        by_size: dict[int, int] = {}
        for layer in self.experts:
            assert {home[0] for home, tensor in zip(homes, self.tensors, strict=True)
                    if tensor.name.startswith(f"blk.{layer}.") and "_exps" in tensor.name} == {"slots"}
            size = self.layer_expert_bytes(layer)
            by_size[size] = by_size.get(size, 0) + 1
        whole = sum(8 * size * layers for size, layers in by_size.items())
        return [(layers, 8 * layers, size, min(8 * layers, max(0, expert_slot_bytes * 8 * layers // whole - LANDING)))
                for size, layers in by_size.items()]

    def _slots_bytes(self, homes: Sequence[Any], expert_slot_bytes: int) -> int:
        pools = self.pools(homes, expert_slot_bytes)
        return STAGING + sum((slots + LANDING) * size for _, _, size, slots in pools if slots)

    def refusal(self, device: str) -> str:
        return ""

    def memory_lines(self, options: _core.EngineOptions) -> list[tuple[str, int]]:
        device, batch, context, homes = options.device, options.batch, options.context, options.homes
        assert options.prompt == "exact" or (device == "cuda" and batch >= min(64, context))
        assert 1 <= batch <= context and (not homes or (device == "cuda" and len(homes) == len(self.tensors)))
        lines: dict[str, int] = {}
        pieces, slotted = 0, False
        for index, tensor in enumerate(self.tensors):
            home = homes[index][0] if homes else "vram"
            assert home in ("vram", "slots" if "_exps" in tensor.name else "direct")
            slotted |= home == "slots"
            if home != "vram" and tensor.name != "per_layer_token_embd" and (tensor.name != "token_embd" or self.tied):
                pieces += -(-tensor.nbytes // PIECE)
            where = "token embedding" if tensor.name.endswith("token_embd") else "output head"
            line = "layer " + tensor.name.split(".")[1] if tensor.name.startswith("blk.") else where
            line = "prediction layer" if line == f"layer {self.layers}" else line
            lines[line] = lines.get(line, 0) + (tensor.nbytes if device == "cuda" and home == "vram" else 0)
        lines |= {"KV cache": self.kv_bytes(options), "scratch": self.per_row * batch}
        lines |= {"streaming": PIECE * min(SLOTS, pieces)} if pieces else {}
        lines |= {"expert slots": self._slots_bytes(homes, options.expert_slot_bytes)} if slotted else {}
        lines |= {"graphs": 1000 if device == "cuda" else 0}
        asked, taken, steps = 0, 0, []
        for name, count in lines.items():
            asked += count
            steps.append((name, -(-(asked - taken) // self.granule) * self.granule))
            taken += steps[-1][1]
        return steps

    def taken(self, batch: int, context: int, homes: Any = None, expert_slot_bytes: int = 0) -> int:
        """All that it takes on the GPU."""
        options = _core.EngineOptions(device="cuda", context=context, batch=batch, homes=homes or (),
                                      expert_slot_bytes=expert_slot_bytes)
        return sum(count for _, count in self.memory_lines(options))


def fields_of(options: _core.EngineOptions) -> dict[str, Any]:
    """What the core is told, by name."""
    return {name: getattr(options, name) for name in dir(options) if not name.startswith("_")}


def stats_of(model: FakeWeights, uses: np.ndarray) -> ExpertStats:
    """Statistics that say how often each expert was used, by layer with experts, and nothing else."""
    none = np.zeros_like(uses)
    return ExpertStats(model.name, model.architecture, fingerprint(model), tuple(model.experts),
                       (uses.shape[1],) * len(uses), uses, none, none, none, none, none)


def inventory_of(**options: Any) -> tuple[FakeWeights, Inventory]:
    """A model with these options of `FakeWeights`, and its inventory."""
    model = FakeWeights(**options)
    return model, Inventory.of(model, model)


def with_rows(inventory: Inventory, homes: tuple[TensorHome, ...], share: float) -> tuple[TensorHome, ...]:
    """`homes` with this fraction of the rows of every matrix that can be shared on the CPU."""
    rows = {use.tensor: share_rows(use.rows, share) for use in inventory.shareable(homes)}
    return tuple(home._replace(cpu_rows=rows.get(tensor, 0)) for tensor, home in enumerate(homes))
