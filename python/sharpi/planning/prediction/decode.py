"""How fast a model decodes: a model of time in a handful of sums, from its homes and the machine's measured rates.
Prompts are in `prefill`, several streams at once in `streams`.

Decode, one token on the GPU. Two things go on at once, and the longer one counts:

- PCIe brings the direct weights, all but the CPU's rows: their bytes / its rate.
- The blocks run one after another. This is the sum of: the bytes that products read from VRAM / VRAM's rate; a fixed
  time for each kernel, and direct weights need more kernels because they come in pieces; the rows that the CPU
  computes, bytes / RAM's rate; two crossings between GPU and CPU for each layer that has such rows, the output head
  included; and the experts of layers with slots.

In a layer with slots, the hit rate is the probability that a chosen expert is in one, so the number of misses is
binomial. The misses are shared so that the longer of two times is shortest: what PCIe brings, bytes / its rate, and
what the CPU computes meanwhile, bytes / RAM's rate. The GPU then multiplies with the experts in slots and with those
that came, while the CPU may still be busy; and there is a fixed time for crossings. Without slots, the CPU computes all
experts.

A part of the GPU's own time is added to the time of PCIe: copies run ahead by a few slots only, and begin anew with
each token.

While the CPU and PCIe both read RAM, the rates are those measured with both at work. Decode on the CPU is the bytes
that a token reads / RAM's rate, plus a fixed time for each layer.

A recurrent state is read and written once by every token.

A drafted token costs two things: the prediction layer with the output head, which draft it, and one more row in the
step that judges it. That row costs a part of the GPU's own time, or its arithmetic on the CPU, and the experts that are
chosen for it. All other predictions are without drafts.

In decode, attention counts as bytes of VRAM: those of the keys and values that a token sees, or, if that is more, a
fixed number for each multiplication of a query with a key, since each of the heads that share a key takes its time.
With heads of the usual sizes, long texts have kernels of their own, with other rates.
"""

# A profile has no rates of a GPU if there is none, and predictions for a GPU are made only if there are.
# pyright: reportOptionalOperand=false, reportOperatorIssue=false, reportReturnType=false

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sharpi.machine.profile import ASSUMED, HardwareProfile
from sharpi.planning.placement import (
    BY_ROW,
    DIRECT,
    SLOTS,
    VRAM,
    Beside,
    ExpertPool,
    Inventory,
    TensorHome,
    Use,
)

if TYPE_CHECKING:
    from sharpi.planning.expert_stats import ExpertStats

__all__ = ["BOUNDS", "Cached", "Speed", "Traffic", "after_on_cpu", "after_on_gpu", "cached_experts", "completed",
           "cpu_layer_seconds", "decode_from_disk", "decode_on_cpu", "decode_on_gpu", "decode_seconds",
           "draft_cost_on_cpu", "draft_cost_on_gpu", "expert_rates", "hit_rate", "kernels", "missed_bytes",
           "part_at_work", "read_outside_vram", "rows_cost", "step_bytes", "traffic"]

# Seconds for a row of activations to go from the GPU to the CPU, or back, and to be noticed there.
CROSSING_SECONDS = 15e-6
# For a layer that misses experts: the GPU says which, the CPU orders them and answers.
EXPERT_CROSSING_SECONDS = 12e-6
# What a decode step takes besides reading weights, in multiples of the small kernel that a profile has measured: for
# each layer; for one with experts; more if the CPU takes rows, or if experts are looked up in slots; and outside of
# layers.
DENSE_LAYER_KERNELS, EXPERT_LAYER_KERNELS, SHARED_LAYER_KERNELS, SLOTS_LAYER_KERNELS, OTHER_KERNELS = 10, 16, 6, 3, 6
# A layer with an expert for every token takes this many more.
SHARED_EXPERT_KERNELS = 3
# Direct weights are multiplied as they come, a piece at a time.
PIECE_BYTES, PIECE_KERNELS = 16 << 20, 1.5
# Attention of decode: the part of VRAM's rate at which keys and values are read, and the bytes of VRAM that would take
# as long as one multiplication of a query with a key. Fitted to models with 1, 4 and 8 heads to a KV head, after 8,192
# to 65,536 tokens.
KV_EFFICIENCY, BYTES_PER_PRODUCT = 0.6, 2.0
# The same of the kernels for long texts, and how many tokens more would take as long as these need to begin and to join
# what their warps found. Fitted to an 8B model after 16,384 to 131,000 tokens.
LONG_KV_EFFICIENCY, LONG_BYTES_PER_PRODUCT, LONG_START = 1.0, 1.0, 8600
# A step on the CPU takes a fixed time for a layer without experts, and another for one with them. Fitted to steps of
# six models on two threads.
CPU_LAYER_SECONDS, CPU_EXPERT_LAYER_SECONDS = 20e-6, 45e-6
# Bringing weights and multiplying them overlap, except for this measured part of the shorter one.
DECODE_OVERLAP_LOSS = 0.45
# What a second row adds to the GPU's part of a step: products of few rows are bound by arithmetic too. Measured: 0.24
# and 0.21.
SECOND_ROW = 0.2
# What products of this many rows take on the GPU if each row keeps its bits, in multiples of what reading their weights
# takes: those of steps, and of exact prompts. Measured with an 8B model in Q4_K_M on an H200. A tile of the kernels has
# 8, 16, 24 or 32 rows.
ROWS = (1, 2, 4, 8, 16, 17, 24, 25, 32, 33, 48, 49, 64, 128, 512)
ROWS_COST = (1.0, 1.2, 1.7, 1.8, 2.2, 2.9, 3.0, 3.5, 3.6, 5.0, 5.4, 6.7, 6.8, 13.7, 57.0)
# From this many rows on, rows are grouped by expert, and products of experts take this many times as long. Measured
# with a mixture of 128 experts a layer on an H100.
GROUPED_FROM, GROUPED_COST = 3, 1.9
# What can bound a speed. The fixed times of kernels count as the GPU's arithmetic, those of crossings and of the CPU's
# layers as RAM.
BOUNDS = ("PCIe", "RAM", "VRAM", "GPU arithmetic", "CPU arithmetic", "disk")


@dataclass(frozen=True)
class Speed:
    """A predicted speed, and which of `BOUNDS` it is bound by."""

    tokens_per_second: float
    bound: str


class Cached(NamedTuple):
    """A layer some of whose experts are in slots. used: experts that a token chooses, of `expert_bytes` each. hit: the
    part of the choices that is expected to be in slots; held: the part of all its experts. cpu_cost: see `Use`."""

    used: int
    expert_bytes: float
    hit: float
    held: float
    cpu_cost: float = 1.0


@dataclass(frozen=True)
class Traffic:
    """What one token reads: bytes by place, the CPU's times their cost, and the layers by what they launch.
    shared_layers: layers with rows that the CPU takes, and the output head if it takes rows of that. left_layers:
    layers whose experts are all the CPU's; their bytes are in `cpu`. cached: the layers with slots, whose experts'
    bytes are in no sum. beside: what is no weight."""

    vram: float
    direct: float
    cpu: float
    layers: int
    expert_layers: int
    shared_layers: int
    left_layers: int = 0
    cached: tuple[Cached, ...] = ()
    beside: Beside = Beside()


def cached_experts(uses: Sequence[Use], pools: Sequence[ExpertPool],
                   warm: ExpertStats | None = None) -> dict[int, Cached]:
    """The layers with slots, by number. Without statistics every expert is as likely to be used, and to be in a slot,
    as any other; with them, slots hold those of the largest shares in their layers' uses."""
    slots, experts = sum(pool.slots for pool in pools), sum(pool.experts for pool in pools)
    if not slots:
        return {}
    chosen: defaultdict[int, float] = defaultdict(float)
    whole: defaultdict[int, float] = defaultdict(float)
    cost: defaultdict[int, float] = defaultdict(float)
    for use in uses:
        if use.role == "experts":
            chosen[use.layer] += use.read_bytes
            cost[use.layer] += use.read_bytes * use.cpu_cost
            whole[use.layer] += use.batch_bytes
    layers, count = sorted(chosen), experts // len(chosen)
    known = [(slots / experts,) * 2] * len(layers) if warm is None else _most_used(layers, count, slots, warm)
    found = {}
    for layer, (hit, held) in zip(layers, known, strict=True):
        used = max(1, round(count * chosen[layer] / whole[layer]))
        found[layer] = Cached(used, chosen[layer] / used, hit, held, cost[layer] / chosen[layer])
    return found


def _most_used(layers: Sequence[int], count: int, slots: int, warm: ExpertStats) -> list[tuple[float, float]]:
    """For each layer, with `count` experts each: the part of its uses that falls on experts in slots, and the part of
    its experts that is in slots."""
    uses = np.ones((len(layers), count))
    rows = dict(zip(warm.layers, warm.uses, strict=True))
    for row, layer in zip(uses, layers, strict=True):
        # Nothing is known of the experts of a layer in which nothing was counted.
        if layer in rows and rows[layer][:count].any():
            row[:] = rows[layer][:count]
    part = uses / uses.sum(axis=1, keepdims=True)
    inside = np.zeros(part.shape, dtype=bool)
    inside.flat[np.argsort(-part, axis=None, kind="stable")[:slots]] = True
    hits = np.minimum(1.0, (part * inside).sum(axis=1))  # a sum of all parts may be rounded up
    return list(zip(hits.tolist(), inside.mean(axis=1).tolist(), strict=True))


def hit_rate(cached: Mapping[int, Cached]) -> float:
    """The part of all experts' uses that is expected to find the expert in a slot."""
    return sum(layer.hit for layer in cached.values()) / max(1, len(cached))


def expert_rates(profile: HardwareProfile, threads: int | None = None,
                 uses: Sequence[Use] = ()) -> tuple[float, float]:
    """Bytes a second at which the CPU computes experts and PCIe brings them, both at work: what misses are shared by.
    uses: the model's."""
    experts = [use for use in uses if use.role == "experts"]
    cost = sum(use.read_bytes * use.cpu_cost for use in experts) / max(1, sum(use.read_bytes for use in experts))
    return (profile.ram_bytes_per_second_shared * part_at_work(profile, threads) / (cost or 1.0),
            profile.pcie_bytes_per_second_shared)


def completed(profile: HardwareProfile) -> HardwareProfile:
    """`profile`, with an assumed GPU if it has none; it then says that it is assumed."""
    if profile.gpu is not None:
        return profile
    whole = profile.with_assumed_gpu()
    # RAM that is read from both sides is slower by as much as in the assumed machine.
    slowdown = ASSUMED.ram_bytes_per_second_shared / ASSUMED.ram_bytes_per_second
    return replace(whole, ram_bytes_per_second_shared=profile.ram_bytes_per_second * slowdown)


def traffic(uses: Sequence[Use], homes: Sequence[TensorHome], cached: Mapping[int, Cached] | None = None,
            beside: Beside = Beside()) -> Traffic:
    """What one token reads, and from where, under `homes`. cached: the layers with slots; the CPU computes all experts
    of other layers."""
    cached = cached or {}
    vram = direct = cpu = 0.0
    for use in uses:
        home = homes[use.tensor]
        if home.home == VRAM:
            vram += use.read_bytes
        elif home.home == DIRECT:
            share = use.read_bytes * _on_cpu(use, home)
            cpu += share * use.cpu_cost
            direct += use.read_bytes - share
        elif use.layer not in cached:
            cpu += use.read_bytes * use.cpu_cost
    layers, experts = _layers_of(uses)
    outside = {use.layer for use in uses if homes[use.tensor].home == SLOTS}
    shared = {use.layer for use in uses if _on_cpu(use, homes[use.tensor])}
    return Traffic(vram, direct, cpu, layers, experts, len(shared), len(outside - cached.keys()),
                   tuple(cached[layer] for layer in sorted(outside & cached.keys())), beside)


def _on_cpu(use: Use, home: TensorHome) -> float:
    """The part of the rows of a direct matrix that the CPU computes. It computes rows of products only. An
    embedding's rows are read from the file, even if it is also the head."""
    return home.cpu_rows / use.rows if home.home == DIRECT and use.role not in BY_ROW else 0.0


def decode_seconds(reads: Traffic, profile: HardwareProfile, threads: int | None = None) -> tuple[float, str]:
    """Seconds a token takes on the GPU, and what bounds it; `profile` has a GPU's rates. threads: the CPU's, where
    they may be fewer than those that were measured."""
    both = reads.cpu > 0 and reads.direct > 0
    streamed = reads.direct / (profile.pcie_bytes_per_second_shared if both else profile.pcie_bytes_per_second)
    beside = reads.beside
    serial = {"VRAM": (reads.vram + reads.direct + 2 * beside.state_bytes + beside.attention_bytes)
              / profile.vram_bytes_per_second,
              "GPU arithmetic": kernels(reads) * profile.gpu_kernel_seconds,
              "RAM": (_cpu_seconds(reads.cpu, streamed, profile, threads) + 2 * reads.shared_layers * CROSSING_SECONDS
                      + reads.left_layers * EXPERT_CROSSING_SECONDS),
              "PCIe": 0.0}
    # The GPU's own work hides a part of the streaming; but hardly anything is streamed beside slots.
    own = serial["VRAM"] + serial["GPU arithmetic"]
    for layer, count in Counter(reads.cached).items():
        for name, seconds in _cached_seconds(layer, profile, threads).items():
            serial[name] += count * seconds
    computed = sum(serial.values())
    shown = DECODE_OVERLAP_LOSS * min(streamed, own)
    if streamed > computed:
        return streamed + shown, "PCIe"
    return computed + shown, max(serial, key=lambda name: serial[name])


def kernels(reads: Traffic) -> float:
    """The fixed times of a step's kernels, in times of the one that a profile has measured."""
    return (DENSE_LAYER_KERNELS * (reads.layers - reads.expert_layers) + EXPERT_LAYER_KERNELS * reads.expert_layers
            + SHARED_LAYER_KERNELS * reads.shared_layers
            + SLOTS_LAYER_KERNELS * (reads.left_layers + len(reads.cached))
            + SHARED_EXPERT_KERNELS * reads.beside.shared_experts + reads.beside.row_kernels
            + PIECE_KERNELS * reads.direct / PIECE_BYTES + OTHER_KERNELS)


def _cached_seconds(layer: Cached, profile: HardwareProfile, threads: int | None) -> dict[str, float]:
    """The seconds that a layer's experts are expected to take, by what bounds them."""
    expected = {"VRAM": 0.0, "RAM": 0.0, "PCIe": 0.0}
    for misses in range(layer.used + 1):
        chance = (math.comb(layer.used, misses) * (1 - layer.hit) ** misses * layer.hit ** (layer.used - misses))
        cpu, pcie, fetched = _split(misses, layer, profile, threads)
        products = (layer.used - misses + fetched) * layer.expert_bytes / profile.vram_bytes_per_second
        if cpu > pcie + products:
            expected["RAM"] += chance * cpu
        else:
            expected["PCIe"] += chance * pcie
            expected["VRAM"] += chance * products
        expected["RAM"] += chance * EXPERT_CROSSING_SECONDS * (misses > 0)
    return expected


def _split(misses: int, layer: Cached, profile: HardwareProfile, threads: int | None) -> tuple[float, float, int]:
    """The CPU's seconds, the seconds of PCIe, and how many experts PCIe brings, if a layer's misses are shared so that
    the longer time is shortest."""
    at_work, size = part_at_work(profile, threads), layer.expert_bytes

    def seconds(fetched: int) -> tuple[float, float]:
        both = 0 < fetched < misses
        ram = (profile.ram_bytes_per_second_shared if both else profile.ram_bytes_per_second) * at_work
        return ((misses - fetched) * size * layer.cpu_cost / ram,
                fetched * size / (profile.pcie_bytes_per_second_shared if both else profile.pcie_bytes_per_second))

    fetched = min(range(misses + 1), key=lambda count: max(seconds(count)))
    return *seconds(fetched), fetched


def _cpu_seconds(count: float, streamed: float, profile: HardwareProfile, threads: int | None) -> float:
    """Seconds in which the CPU reads `count` bytes, while PCIe also reads RAM for the first `streamed` seconds."""
    beside = profile.ram_bytes_per_second_shared * part_at_work(profile, threads)
    together = min(count / beside, streamed)
    return together + (count - together * beside) / (profile.ram_bytes_per_second * part_at_work(profile, threads))


def decode_on_gpu(uses: Sequence[Use], homes: Sequence[TensorHome], profile: HardwareProfile,
                  threads: int | None = None, cached: Mapping[int, Cached] | None = None,
                  beside: Beside = Beside()) -> Speed:
    """The speed of decode on the GPU; cached: the layers with slots."""
    seconds, bound = decode_seconds(traffic(uses, homes, cached, beside), profile, threads)
    return Speed(1 / seconds, bound)


def decode_on_cpu(uses: Sequence[Use], profile: HardwareProfile, threads: int | None = None,
                  beside: Beside = Beside()) -> Speed:
    """The speed of decode on the CPU."""
    read = sum(use.read_bytes * use.cpu_cost for use in uses) + 2 * beside.state_bytes + beside.attention_bytes
    rate = profile.ram_bytes_per_second * part_at_work(profile, threads)
    return Speed(1 / (max(1, read) / rate + cpu_layer_seconds(uses)), "RAM")


def cpu_layer_seconds(uses: Sequence[Use]) -> float:
    """What the layers of a step take on the CPU besides reading weights."""
    layers, experts = _layers_of(uses)
    return CPU_LAYER_SECONDS * (layers - experts) + CPU_EXPERT_LAYER_SECONDS * experts


def _layers_of(uses: Sequence[Use]) -> tuple[int, int]:
    """How many layers there are, and those with experts."""
    return (len({use.layer for use in uses if use.layer >= 0}),
            len({use.layer for use in uses if use.role == "experts"}))


def after_on_gpu(beside: Beside, spec: Any, kv_dtype: str, tokens: int) -> Beside:
    """`beside` with the attention of a token that sees `tokens` tokens, on the GPU."""
    read, products = spec.kv_bytes_read(kv_dtype, tokens), spec.attention_products(tokens)
    cost = max(read / KV_EFFICIENCY, BYTES_PER_PRODUCT * products)
    if spec.long_attention:
        long = max(read / LONG_KV_EFFICIENCY, LONG_BYTES_PER_PRODUCT * products)
        cost = min(cost, long * (1 + LONG_START / max(1, tokens)))
    return beside._replace(attention_bytes=cost)


def after_on_cpu(beside: Beside, spec: Any, kv_dtype: str, tokens: int) -> Beside:
    """The same on the CPU."""
    return beside._replace(attention_bytes=float(spec.kv_bytes_read(kv_dtype, tokens)))


def draft_cost_on_gpu(inventory: Inventory, homes: Sequence[TensorHome], profile: HardwareProfile,
                      threads: int | None = None, cached: Mapping[int, Cached] | None = None) -> float | None:
    """What a token that the prediction layer drafts adds to a step on the GPU, as a part of a plain step's time; `None`
    without such a layer."""
    if not inventory.draft_uses:
        return None
    doubled = {layer: known._replace(used=2 * known.used) for layer, known in (cached or {}).items()}

    def seconds(uses: Sequence[Use], cached: Mapping[int, Cached] | None, beside: Beside) -> float:
        return decode_seconds(traffic(uses, homes, cached, beside), profile, threads)[0]

    plain = seconds(inventory.model_uses, cached, inventory.beside)
    judged = seconds(_of_rows(inventory.model_uses, 2), doubled, inventory.beside)
    resident = traffic(inventory.model_uses, [TensorHome()] * len(homes), None, inventory.beside)
    row = SECOND_ROW * min(plain, decode_seconds(resident, profile, threads)[0])
    return (judged - plain + row + seconds(inventory.draft_uses, cached, Beside())) / plain


def draft_cost_on_cpu(inventory: Inventory, profile: HardwareProfile, threads: int | None = None) -> float | None:
    """The same on the CPU. There another row is arithmetic that nothing hides."""
    if not inventory.draft_uses:
        return None
    plain, judged, drafted = (sum(use.read_bytes * use.cpu_cost for use in uses) for uses in (
        inventory.model_uses, _of_rows(inventory.model_uses, 2), inventory.draft_uses))
    multiplied = sum(use.parameters for use in (*inventory.model_uses, *inventory.draft_uses)
                     if use.role not in (*BY_ROW, "vector"))
    at_work = part_at_work(profile, threads)
    added = (judged - plain + drafted) / (profile.ram_bytes_per_second * at_work) + 2 * multiplied / (
        profile.cpu_flops * at_work
    ) + cpu_layer_seconds(inventory.draft_uses)
    return added * decode_on_cpu(inventory.model_uses, profile, threads, inventory.beside).tokens_per_second


def _of_rows(uses: Sequence[Use], rows: int) -> list[Use]:
    """The uses of a few tokens at once: weights are read once for all of them, but each chooses experts of its own."""
    return [use._replace(read_bytes=round(min(rows * use.read_bytes, use.batch_bytes))) if use.role == "experts"
            else use for use in uses]


def step_bytes(use: Use, rows: int) -> float:
    """Bytes that a step of this many rows reads of a tensor."""
    if use.role in BY_ROW:
        return float(rows * use.read_bytes)
    if use.role != "experts":
        return float(use.read_bytes)
    return use.batch_bytes * (1 - (1 - min(1.0, use.read_bytes / use.batch_bytes)) ** rows)


def rows_cost(use: Use, of_one: Use, rows: int) -> float:
    """What a product of a step with this many rows takes on the GPU, in multiples of reading its weights; an expert has
    only the rows that choose it. use, of_one: as the step and as one row read the tensor."""
    if use.role == "experts":
        grouped = GROUPED_COST if rows >= GROUPED_FROM else 1.0
        return grouped * float(np.interp(rows * of_one.read_bytes / use.read_bytes, ROWS, ROWS_COST))
    return float(np.interp(rows, ROWS, ROWS_COST))


def missed_bytes(cached: Mapping[int, Cached]) -> float:
    """Bytes of experts that a token chooses and that are in no slot."""
    return sum(layer.used * layer.expert_bytes * (1 - layer.hit) for layer in cached.values())


def read_outside_vram(uses: Sequence[Use], homes: Sequence[TensorHome], cached: Mapping[int, Cached]) -> float:
    """Bytes of weights that a token reads from RAM under `homes`, whoever computes with them. cached: the layers with
    slots."""
    whole = sum(use.read_bytes for use in uses if use.role not in BY_ROW and homes[use.tensor].home != VRAM
                and not (homes[use.tensor].home == SLOTS and use.layer in cached))
    layers = {use.layer for use in uses if homes[use.tensor].home == SLOTS}
    return whole + missed_bytes({layer: known for layer, known in cached.items() if layer in layers})


def decode_from_disk(in_ram: Speed, read_bytes: float, disk_bytes_per_second: float) -> Speed:
    """The speed of decode if `read_bytes` of what a token needs are read from the disk, `in_ram` being that with all of
    it in RAM. Products wait for the last of what they need, so little is hidden."""
    computed, read = 1 / in_ram.tokens_per_second, read_bytes / disk_bytes_per_second
    return Speed(1 / (computed + read), "disk" if read > computed else in_ram.bound)


def part_at_work(profile: HardwareProfile, threads: int | None) -> float:
    """The fraction of the measured threads that works."""
    return 1.0 if threads is None else min(1.0, threads / profile.threads)
