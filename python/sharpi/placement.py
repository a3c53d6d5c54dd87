"""Homes: which weights are in VRAM, which are fetched across PCIe each time, and in which order VRAM is filled.

What a token reads in full comes first, because a byte of VRAM saves it a byte of the slow way with every token:
norms, then attention, routers and the output head, then the feed-forward matrices layer by layer. The embedding comes
last, of which a token reads one row. Tensors that must change together are a unit, and units have ranks: VRAM holds
the lowest ones, so that more of it never drives a unit out. Layers take turns in an order of which every beginning is
spread over the whole model: while a layer in VRAM is computed, the weights of the next that is not are on their way.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sharpi.errors import InvalidRequestError

__all__ = ["CPU_ROW_STEP", "DIRECT", "Inventory", "KINDS", "Placed", "Switches", "TensorHome", "Unit", "Use", "VRAM"]

VRAM, DIRECT = "vram", "direct"
# The CPU takes whole groups of rows of a matrix.
CPU_ROW_STEP = 32

# Place in the order of benefit, and the kind of weight that people are told. Experts cannot be fetched one by one
# yet, so they stay in VRAM as norms do.
_ROLES = {"vector": (0, "norms"), "experts": (1, "experts"), "attention": (2, "attention"), "router": (3, "routers"),
          "head": (4, "output head"), "ffn_gate": (5, "feed-forward"), "ffn_up": (5, "feed-forward"),
          "ffn_down": (5, "feed-forward"), "embedding": (6, "embedding")}
_FIXED = ("vector", "experts")
_SHARED = ("ffn_gate", "ffn_up", "ffn_down", "head")
_PAIRED = ("ffn_gate", "ffn_up")
# In the order in which a table shows them.
KINDS = tuple(dict.fromkeys(kind for _, kind in sorted(_ROLES.values())))


class Use(NamedTuple):
    """A tensor as a token meets it, in the words of the core; `parameters` are those that one token multiplies.

    tensor: its index in the file's table. layer: -1 outside of layers. read_bytes: what one token reads of it.
    """

    tensor: int
    name: str
    role: str
    layer: int
    read_bytes: int
    rows: int
    cols: int
    parameters: float


class TensorHome(NamedTuple):
    """Where a tensor's bytes are, as the core wants to be told: `VRAM`, or `DIRECT`, whose last `cpu_rows` rows the
    CPU computes in small batches. Where VRAM turns out shorter than planned, the highest ranks leave it first; what
    has rank 0 cannot."""

    home: str = VRAM
    cpu_rows: int = 0
    rank: int = 0


class Placed(NamedTuple):
    """Bytes of the weights of one kind by where they are used from: each byte is in one of the three."""

    kind: str
    vram: int
    direct: int
    cpu: int


@dataclass(frozen=True)
class Unit:
    """Tensors that change their home together. rank: its place in the order of benefit; 0 never leaves VRAM."""

    rank: int
    kind: str
    layer: int
    tensors: tuple[int, ...]
    nbytes: int


class Inventory:
    """A model's weights in units, ordered by what VRAM gains with them."""

    def __init__(self, uses: Sequence[Use], sizes: Sequence[int]) -> None:
        """sizes: bytes of every tensor of the file, in its order."""
        self.uses = tuple(uses)
        self.sizes = tuple(sizes)
        self._dearest = _dearest_uses(self.uses)
        self.units = _units(self._dearest, self.sizes)
        self.movable = tuple(unit for unit in self.units if unit.rank)
        self._ranks = {tensor: unit.rank for unit in self.units for tensor in unit.tensors}

    @classmethod
    def of(cls, file: Any, spec: Any) -> Inventory:
        """What the core says of the model `spec`, whose tensors `file` lists."""
        tensors = file.tensors
        uses = [Use(index, *rest, parameters=math.prod(tensors[index].shape) * rest[3] / max(1, tensors[index].nbytes))
                for index, *rest in spec.tensor_uses()]
        return cls(uses, [tensor.nbytes for tensor in tensors])

    def homes(self, resident: int) -> tuple[TensorHome, ...]:
        """The homes where the first `resident` movable units are in VRAM, and no row is the CPU's."""
        last = self.movable[resident - 1].rank if resident else 0
        ranks = (self._ranks.get(tensor, 0) for tensor in range(len(self.sizes)))
        return tuple(TensorHome(VRAM if rank <= last else DIRECT, 0, rank) for rank in ranks)

    def movable_bytes(self, resident: int) -> int:
        """Bytes of the first `resident` movable units."""
        return sum(unit.nbytes for unit in self.movable[:resident])

    def streamed(self, homes: Sequence[TensorHome]) -> bool:
        """Whether some weight comes across PCIe whole; single rows of an embedding do not count."""
        return any(use.role != "embedding" and homes[use.tensor].home == DIRECT for use in self.uses)

    def shareable(self, homes: Sequence[TensorHome]) -> list[Use]:
        """The direct matrices whose rows the CPU may take some of: feed-forward, gate and up only as a pair, and the
        output head."""
        times = Counter(use.tensor for use in self.uses if use.role != "embedding")
        found = [use for use in self.uses if use.role in _SHARED and homes[use.tensor].home == DIRECT
                 and times[use.tensor] == 1 and use.rows >= CPU_ROW_STEP]
        pairs = Counter((use.layer, use.rows) for use in found if use.role in _PAIRED)
        return [use for use in found if use.role not in _PAIRED or pairs[use.layer, use.rows] == 2]

    def placed(self, homes: Sequence[TensorHome]) -> tuple[Placed, ...]:
        """Bytes by kind of weight and by place, without kinds that the model lacks."""
        sums = {kind: [0, 0, 0] for kind in KINDS}
        for tensor, use in self._dearest.items():
            size, (home, cpu_rows, _), kind = self.sizes[tensor], homes[tensor], _ROLES[use.role][1]
            on_cpu = size * cpu_rows // use.rows if cpu_rows else 0
            sums[kind][0 if home == VRAM else 1] += size - on_cpu
            sums[kind][2] += on_cpu
        return tuple(Placed(kind, *counts) for kind, counts in sums.items() if any(counts))

    def placed_on_cpu(self) -> tuple[Placed, ...]:
        """The same for a model that runs on the CPU."""
        return tuple(Placed(kind, 0, 0, vram) for kind, vram, _, _ in self.placed(self.homes(len(self.movable))))

    def check(self, homes: Sequence[TensorHome]) -> None:
        """Raises `InvalidRequestError` for homes that this model's tensors cannot have; for plans from elsewhere."""
        if len(homes) != len(self.sizes):
            raise InvalidRequestError(f"it has homes for {len(homes)} tensors, the model has {len(self.sizes)}")
        may_share = {use.tensor: use.rows for use in self.shareable(homes)}
        by_layer: dict[int, set[int]] = {}
        for use in self.uses:
            home, cpu_rows, rank = homes[use.tensor]
            if home not in (VRAM, DIRECT) or rank < 0:
                raise InvalidRequestError(f"{use.name} has the home {home!r} of rank {rank}")
            if home == DIRECT and not self._ranks[use.tensor]:
                raise InvalidRequestError(f"{use.name} has to be in VRAM")
            if cpu_rows % CPU_ROW_STEP or not 0 <= cpu_rows <= may_share.get(use.tensor, 0):
                raise InvalidRequestError(f"the CPU cannot take {cpu_rows} rows of {use.name}")
            if use.role in _PAIRED:
                by_layer.setdefault(use.layer, set()).add(cpu_rows)
        for unit in self.units:
            if len({homes[tensor][0] for tensor in unit.tensors}) > 1 and unit.kind == "feed-forward":
                raise InvalidRequestError(f"gate and up of layer {unit.layer} have different homes")
        for layer, counts in by_layer.items():
            if len(counts) > 1:
                raise InvalidRequestError(f"gate and up of layer {layer} give the CPU different rows")


def _dearest_uses(uses: Sequence[Use]) -> dict[int, Use]:
    """By tensor the use that gains most by VRAM: an embedding that is the output head as well is that."""
    found: dict[int, Use] = {}
    for use in uses:
        if use.tensor not in found or _ROLES[use.role][0] < _ROLES[found[use.tensor].role][0]:
            found[use.tensor] = use
    return found


def _units(uses: dict[int, Use], sizes: Sequence[int]) -> tuple[Unit, ...]:
    groups: dict[tuple[int, float, bool], list[int]] = {}
    for tensor, use in uses.items():
        # A layer's attention is one unit; of its feed-forward gate and up are one, and down is another.
        layer = -1 if use.role in _FIXED else use.layer
        groups.setdefault((_ROLES[use.role][0], _turn(layer), use.role == "ffn_down"), []).append(tensor)
    units: list[Unit] = []
    rank = 0
    for _, tensors in sorted(groups.items()):
        first = uses[tensors[0]]
        rank += first.role not in _FIXED
        layer = -1 if first.role in _FIXED else first.layer
        units.append(Unit(rank, _ROLES[first.role][1], layer, tuple(sorted(tensors)), sum(sizes[t] for t in tensors)))
    return tuple(units)


def _turn(layer: int) -> float:
    """Sorting layers by it, every beginning of the order is evenly spread: multiples of the golden ratio, modulo 1."""
    return (layer * 0.6180339887498949) % 1.0


@dataclass(frozen=True)
class Switches:
    """What the environment says of the homes, for comparing: cache is false where nothing that can be fetched may
    stay in VRAM, `cache_bytes` the most of it that may (`None`: no limit), rows whether the CPU may take rows."""

    cache: bool = True
    cache_bytes: int | None = None
    rows: bool = True

    @property
    def limit(self) -> int | None:
        """The most bytes of weights that may be in VRAM besides those that must."""
        return self.cache_bytes if self.cache else 0

    @classmethod
    def read(cls) -> Switches:
        """Raises `InvalidRequestError` for what is no value of a switch."""
        name = "SHARPI_CUDA_PARTIAL_WEIGHT_CACHE_GB"
        text = os.environ.get(name, "").strip()
        if text and not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,15})?", text):
            raise InvalidRequestError(f"{name}={text!r}: say how many GiB, as in 4 or 2.5")
        return cls(cache=_is_on("SHARPI_CUDA_PARTIAL_WEIGHT_CACHE"), rows=_is_on("SHARPI_CUDA_ROW_SPLIT"),
                   cache_bytes=int(float(text) * 2**30) if text else None)


def _is_on(name: str) -> bool:
    text = os.environ.get(name, "").strip() or "1"
    if text not in ("0", "1"):
        raise InvalidRequestError(f"{name}={text!r}: it is 0 or 1")
    return text == "1"
