"""Homes: which weights are in VRAM, which are fetched across PCIe each time, and in which order VRAM is filled.

What a token reads in full comes first, because a byte of VRAM saves it a byte of the slow way with every token:
norms, then attention, routers and the output head, then the feed-forward matrices layer by layer. Then come the
experts, of which a token reads few, and last the embedding, of which it reads one row. Tensors that must change
together are a unit, as gate and up of a layer are, and units have ranks: VRAM holds the lowest ones, so that more of it
never drives a unit out, and the highest leave first if there is less than planned. Layers take turns in an order
whose every beginning is spread over the whole model: while a layer in VRAM is computed, the weights of the next that is
not are on their way.

All experts of the model are one unit: if not all of them fit, none has a place of its own in VRAM, and what is
left of it holds a cache of single experts, the slots. Those that are missed are computed by the CPU or fetched; large
batches fetch all that are not in slots.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

from sharpi.errors import InvalidRequestError
from sharpi.files.gguf import TENSOR_TYPES
from sharpi.settings.switches import check_switches, is_on

if TYPE_CHECKING:
    from sharpi.machine.profile import HardwareProfile

__all__ = [
    "BY_ROW",
    "Beside",
    "CPU_ROW_STEP",
    "DIRECT",
    "ExpertPool",
    "Inventory",
    "KINDS",
    "Placed",
    "ROLES",
    "Role",
    "SLOTS",
    "Switches",
    "TensorHome",
    "Unit",
    "Use",
    "VRAM",
]

VRAM, DIRECT, SLOTS = "vram", "direct", "slots"
# The CPU takes whole groups of rows of a matrix.
CPU_ROW_STEP = 32

# What a tensor is used for, in the words of the core.
Role = Literal["embedding", "layer_embedding", "vector", "attention", "router", "ffn_gate", "ffn_up", "ffn_down",
               "experts", "head"]
ROLES: tuple[Role, ...] = get_args(Role)

# Place in the order of benefit, and the kind of weight that people are told.
_ROLES: dict[Role, tuple[int, str]] = {
    "vector": (0, "norms"),
    "attention": (1, "attention"),
    "router": (2, "routers"),
    "head": (3, "output head"),
    "ffn_gate": (4, "feed-forward"),
    "ffn_up": (4, "feed-forward"),
    "ffn_down": (4, "feed-forward"),
    "experts": (5, "experts"),
    "embedding": (6, "embedding"),
    "layer_embedding": (7, "layer embeddings"),
}
_SHARED: tuple[Role, ...] = ("ffn_gate", "ffn_up", "ffn_down", "head")
# A token reads one row of these. If they are not in VRAM, the host reads it in the mapped file. Tables of per-layer
# embeddings are half of a model, and decode hardly gains by them, so they are never in VRAM.
BY_ROW: tuple[Role, ...] = ("embedding", "layer_embedding")
_NEVER_IN_VRAM: tuple[Role, ...] = ("layer_embedding",)
_PAIRED: tuple[Role, ...] = ("ffn_gate", "ffn_up")
_WHOLE_MODEL: tuple[Role, ...] = ("vector", "experts")
# In the order in which a table shows them.
KINDS = tuple(dict.fromkeys(kind for _, kind in sorted(_ROLES.values())))


class Use(NamedTuple):
    """A tensor as a token meets it, in the words of the core; `parameters` are those that one token multiplies.

    tensor: its index in the file's table. layer: -1 outside of layers. read_bytes: what one token reads of it.
    batch_bytes: what a batch of many tokens reads, if that is more: all experts. Each token reads one row of an
    embedding. type: of its weights. cpu_cost: the time in which the CPU reads a byte, as a multiple of that of Q4_K.
    """

    tensor: int
    name: str
    role: Role
    layer: int
    read_bytes: int
    rows: int
    cols: int
    parameters: float
    batch_bytes: float
    type: str = ""
    cpu_cost: float = 1.0


class Beside(NamedTuple):
    """What a token meets beside its weights. state_bytes: of recurrent layers, read and written by every token.
    shared_experts: layers with products that every token takes beside its experts. row_kernels: small kernels beyond
    those of plain layers. attention_bytes: what attention costs, in bytes that are read where the KV cache is."""

    state_bytes: int = 0
    shared_experts: int = 0
    row_kernels: int = 0
    attention_bytes: float = 0.0


class TensorHome(NamedTuple):
    """Where a tensor's bytes are, as the core wants to be told: `VRAM`; `DIRECT`, whose last `cpu_rows` rows the CPU
    computes in small batches; or, for experts alone, `SLOTS`: in RAM, with a cache of single ones in VRAM. The
    `cpu_rows` of a tensor in VRAM take effect if a plan for less memory moves the tensor out."""

    home: str = VRAM
    cpu_rows: int = 0


class ExpertPool(NamedTuple):
    """Layers whose experts take the same room and share their slots: `slots` of `slot_bytes` each, for the
    `experts` of all these layers together. The slots of a model hold the same part of every pool's experts."""

    layers: int
    experts: int
    slot_bytes: int
    slots: int


class Placed(NamedTuple):
    """Bytes of the weights of one kind by where they are used from: each byte is in one of the six. missed: of
    experts, those beyond what the slots hold; they are the CPU's or come across PCIe, whichever is quicker just
    then. by_row: of tables that stay in the file and need neither VRAM nor RAM; only rows of a batch's tokens are read.
    disk: of experts, those beyond what slots in VRAM and in RAM hold.
    """

    kind: str
    vram: int
    direct: int
    cpu: int
    missed: int = 0
    by_row: int = 0
    disk: int = 0


@dataclass(frozen=True)
class Unit:
    """Tensors that change their home together. rank: its place in the order of benefit; 0 never leaves VRAM. layer: -1
    if they belong to all layers or to none. never: it never enters VRAM."""

    rank: int
    kind: str
    layer: int
    tensors: tuple[int, ...]
    nbytes: int
    never: bool = False


class Inventory:
    """A model's weights in units, ordered by what VRAM gains with them."""

    def __init__(self, uses: Sequence[Use], sizes: Sequence[int], layers: int | None = None,
                 beside: Beside = Beside()) -> None:
        """sizes: bytes of every tensor of the file, in its order. layers: how many the model has, where layers that
        follow them are its prediction layer."""
        self.uses = tuple(uses)
        self.sizes = tuple(sizes)
        self.beside = beside
        self._layers = layers
        # What a token meets, and what a drafted one does beside that: the prediction layer, with what it shares.
        self.model_uses = tuple(use for use in self.uses if layers is None or use.layer < layers)
        self.draft_uses = _drafting(self.uses, layers)
        self._dearest = _dearest_uses(self.uses)
        self.units = _units(self._dearest, self.sizes)
        self.movable = tuple(unit for unit in self.units if unit.rank and not unit.never)
        kinds = [unit.kind for unit in self.movable]
        self.has_experts = "experts" in kinds
        # How many movable units come before the experts.
        self.before_experts = kinds.index("experts") if self.has_experts else len(kinds)
        self._ranks = {tensor: unit.rank for unit in self.units for tensor in unit.tensors}
        self._shareable = _shareable(self.uses)

    @classmethod
    def of(cls, file: Any, spec: Any, *, mtp: bool = True) -> Inventory:
        """What the core says of the model `spec`, whose tensors `file` lists; mtp: with its prediction layer."""
        tensors, met = file.tensors, spec.tensor_uses()
        times = Counter(index for index, *_ in met)
        uses = []
        for index, name, role, layer, read, rows, cols in met:
            if layer >= spec.layer_count and not mtp:
                continue
            nbytes = tensors[index].nbytes
            # A tensor of fused experts is met once for each of the equal parts that are fused.
            batch = nbytes / times[index] if role == "experts" else read
            uses.append(Use(index, name, cast(Role, role), layer, read, rows, cols, batch_bytes=batch,
                            parameters=math.prod(tensors[index].shape) * read / max(1, nbytes),
                            type=TENSOR_TYPES[tensors[index].type].name))
        return cls(uses, [tensor.nbytes for tensor in tensors], spec.layer_count,
                   Beside(spec.state_bytes, spec.shared_experts, spec.row_kernels))

    def on(self, machine: HardwareProfile) -> Inventory:
        """The same weights, with what each type costs the machine's CPU."""
        uses = [use._replace(cpu_cost=machine.cost_of(use.type)) for use in self.uses]
        return Inventory(uses, self.sizes, self._layers, self.beside)

    def homes(self, resident: int, most: Sequence[TensorHome] | None = None) -> tuple[TensorHome, ...]:
        """The homes with the first `resident` movable units in VRAM, except those that are outside of it in `most`.
        Without `most`, the CPU computes no rows."""
        last = self.movable[resident - 1].rank if resident else 0
        return tuple(home if self._ranks.get(tensor, 0) <= last else home._replace(home=self._outside(tensor))
                     for tensor, home in enumerate(most or (TensorHome(),) * len(self.sizes)))

    def kept_bytes(self, homes: Sequence[TensorHome]) -> int:
        """Bytes of the tensors that have a place of their own in VRAM."""
        return sum(self.sizes[tensor] for tensor in self._dearest if homes[tensor].home == VRAM)

    def movable_bytes(self, resident: int) -> int:
        """Bytes of the first `resident` movable units."""
        return sum(unit.nbytes for unit in self.movable[:resident])

    def streamed(self, homes: Sequence[TensorHome]) -> bool:
        """Whether some weight comes across PCIe whole, if only for large batches; single rows of an embedding do not
        count."""
        return any(use.role not in BY_ROW and homes[use.tensor].home != VRAM for use in self.uses)

    def shareable(self, homes: Sequence[TensorHome] | None = None) -> list[Use]:
        """The direct matrices whose rows the CPU may take some of: feed-forward and the output head. Gate and up come
        only together, and if they are the halves of one tensor, its home says how many rows of each half. Without
        homes: all that are so wherever they are direct."""
        return [use for use in self._shareable if homes is None or homes[use.tensor].home == DIRECT]

    def placed(self, homes: Sequence[TensorHome], pools: Sequence[ExpertPool] = ()) -> tuple[Placed, ...]:
        """Bytes by kind of weight and by place, without kinds that the model lacks. pools: of experts with slots, what
        these hold; without any slots there is nothing to fetch to, and all experts are the CPU's."""
        sums = {kind: [0] * 5 for kind in KINDS}
        slots, experts = sum(pool.slots for pool in pools), max(1, sum(pool.experts for pool in pools))
        for tensor, use in self._dearest.items():
            size, (home, cpu_rows), kind = self.sizes[tensor], homes[tensor], _ROLES[use.role][1]
            vram = size if home == VRAM else size * slots // experts if home == SLOTS else 0
            cpu = size * cpu_rows // use.rows if home == DIRECT else 0
            if home == SLOTS and not slots:
                cpu = size
            rest, by_row = size - vram - cpu, use.role in BY_ROW
            for place, count in enumerate((vram, rest * (home == DIRECT and not by_row), cpu, rest * (home == SLOTS),
                                           rest * (home == DIRECT and by_row))):
                sums[kind][place] += count
        return tuple(Placed(kind, *counts) for kind, counts in sums.items() if any(counts))

    def placed_on_cpu(self) -> tuple[Placed, ...]:
        """The same for a model that runs on the CPU."""
        return tuple(Placed(kind, 0, 0, sum(counts)) for kind, *counts in self.placed(self.homes(len(self.movable))))

    def check(self, homes: Sequence[TensorHome]) -> None:
        """Raises `InvalidRequestError` for homes that this model's tensors cannot have; for plans from elsewhere."""
        if len(homes) != len(self.sizes):
            raise InvalidRequestError(f"it has homes for {len(homes)} tensors, the model has {len(self.sizes)}")
        may_share = {use.tensor: use.rows for use in self.shareable()}
        by_layer: dict[int, set[int]] = {}
        for use in self.uses:
            home, cpu_rows = homes[use.tensor]
            if home not in (VRAM, self._outside(use.tensor)):
                raise InvalidRequestError(f"{use.name} has the home {home!r}")
            if home == DIRECT and not self._ranks[use.tensor]:
                raise InvalidRequestError(f"{use.name} has to be in VRAM")
            if cpu_rows % CPU_ROW_STEP or not 0 <= cpu_rows <= may_share.get(use.tensor, 0):
                raise InvalidRequestError(f"the CPU cannot take {cpu_rows} rows of {use.name}")
            if use.role in _PAIRED:
                by_layer.setdefault(use.layer, set()).add(cpu_rows)
        for unit in self.units:
            if len({homes[tensor].home for tensor in unit.tensors}) > 1 and unit.kind == "feed-forward":
                raise InvalidRequestError(f"gate and up of layer {unit.layer} have different homes")
            if len({homes[tensor] for tensor in unit.tensors}) > 1 and unit.kind == "experts":
                raise InvalidRequestError("the experts have different homes")
        for layer, counts in by_layer.items():
            if len(counts) > 1:
                raise InvalidRequestError(f"gate and up of layer {layer} give the CPU different rows")

    def _outside(self, tensor: int) -> str:
        """A tensor's home if it is not in VRAM."""
        use = self._dearest.get(tensor)
        return SLOTS if use is not None and use.role == "experts" else DIRECT


def _drafting(uses: Sequence[Use], layers: int | None) -> tuple[Use, ...]:
    """The uses of the prediction layer, and of the embedding and the head that it shares with the model."""
    own = [use for use in uses if layers is not None and use.layer >= layers]
    shared = {"head"} if any(use.role == "embedding" for use in own) else {"embedding", "head"}
    return (*own, *(use for use in uses if use.role in shared and use.layer < 0)) if own else ()


def _shareable(uses: Sequence[Use]) -> tuple[Use, ...]:
    times = Counter(use.tensor for use in uses if use.role not in BY_ROW)
    # Gate and up may be halves of a tensor; a part without a gate has only up.
    paired = [use for use in uses if use.role in _PAIRED]
    halves, parts = Counter((use.tensor, use.layer) for use in paired), Counter(use.layer for use in paired)
    found = [use for use in uses if use.role in _SHARED and use.rows >= CPU_ROW_STEP
             and times[use.tensor] == (halves[use.tensor, use.layer] or 1)]
    alike = Counter((use.layer, use.rows) for use in found if use.role in _PAIRED)
    return tuple(use for use in found if use.role not in _PAIRED or alike[use.layer, use.rows] == parts[use.layer])


def _dearest_uses(uses: Sequence[Use]) -> dict[int, Use]:
    """By tensor, the use that gains most by VRAM: an embedding that is also the output head counts as the head."""
    found: dict[int, Use] = {}
    for use in uses:
        if use.tensor not in found or _ROLES[use.role][0] < _ROLES[found[use.tensor].role][0]:
            found[use.tensor] = use
    return found


def _units(uses: dict[int, Use], sizes: Sequence[int]) -> tuple[Unit, ...]:
    groups: dict[tuple[int, float, bool], list[int]] = {}
    for tensor, use in uses.items():
        # A layer's attention is one unit; of its feed-forward gate and up are one, and down is another. Norms are one
        # for the whole model, and so are experts.
        layer = -1 if use.role in _WHOLE_MODEL else use.layer
        groups.setdefault((_ROLES[use.role][0], _turn(layer), use.role == "ffn_down"), []).append(tensor)
    units: list[Unit] = []
    rank = 0
    for _, tensors in sorted(groups.items()):
        first = uses[tensors[0]]
        rank += first.role != "vector"
        layer = -1 if first.role in _WHOLE_MODEL else first.layer
        units.append(Unit(rank, _ROLES[first.role][1], layer, tuple(sorted(tensors)), sum(sizes[t] for t in tensors),
                          first.role in _NEVER_IN_VRAM))
    return tuple(units)


def _turn(layer: int) -> float:
    """Sorting layers by it, every beginning of the order is evenly spread: multiples of the golden ratio, modulo 1."""
    return (layer * 0.6180339887498949) % 1.0


@dataclass(frozen=True)
class Switches:
    """What the environment says of the homes, for comparing: cache is false if nothing that can be fetched may
    stay in VRAM, `cache_bytes` the most of it that may (`None`: no limit), rows whether the CPU may take rows,
    cpu_moe whether all experts are the CPU's even if they would fit. What the cache may hold is for slots too."""

    cache: bool = True
    cache_bytes: int | None = None
    rows: bool = True
    cpu_moe: bool = False

    @property
    def limit(self) -> int | None:
        """The most bytes of weights that may be in VRAM besides those that must."""
        return self.cache_bytes if self.cache else 0

    @classmethod
    def read(cls) -> Switches:
        """Raises `InvalidRequestError` for a value that means nothing."""
        check_switches()
        gigabytes = os.environ.get("SHARPI_CUDA_PARTIAL_WEIGHT_CACHE_GB")
        return cls(cache=is_on("SHARPI_CUDA_PARTIAL_WEIGHT_CACHE", True), rows=is_on("SHARPI_CUDA_ROW_SPLIT", True),
                   cache_bytes=int(float(gigabytes) * 2**30) if gigabytes else None,
                   cpu_moe=is_on("SHARPI_CPU_MOE", False))
