"""How fast a prompt of one batch is read, at the beginning of a context; see `decode` for steps.

On the GPU, two things go on at once. The longer one counts in full and the shorter one in part, plus a fixed time. One
is bringing all direct weights and all experts that are in no slot; the CPU takes no part in large batches. The other is
the arithmetic: two operations for each parameter and row, at the part of a large product's rate that whole prompts
reach, attention included, which is less for experts that get few rows each. On the CPU it is the arithmetic, also less
efficient for such experts, and a time for each output of a matrix. The output head is computed for the last row only,
so it is left out; so is a recurrent state, whose way through memory many tokens share and whose arithmetic is about a
hundredth of the products'.

An exact prompt's products on the GPU are those of steps with many rows: of a few hundred at a time, and of fewer with
experts. Each launch reads its weights, the experts that its rows choose among them, and takes a multiple of the time of
reading that grows with the rows. Everything else, attention above all, is a fixed time for each row and layer. Direct
weights are still brought once a batch.
"""

# A profile has no rates of a GPU if there is none, and predictions for a GPU are made only if there are.
# pyright: reportOptionalOperand=false, reportOperatorIssue=false, reportReturnType=false

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sharpi.machine.profile import HardwareProfile
from sharpi.planning.placement import BY_ROW, DIRECT, SLOTS, Beside, TensorHome, Use
from sharpi.planning.prediction.decode import Cached, Speed, kernels, part_at_work, rows_cost, step_bytes, traffic
from sharpi.settings.choices import EXACT, FAST

__all__ = ["operations", "prefill_from_disk", "prefill_on_cpu", "prefill_on_gpu"]

# What a prompt costs besides: the first copy before there is anything to multiply, and the choice of a token.
PREFILL_SECONDS = 1e-3
# The part of a large product's rate that a prompt reaches, with norms, attention and smaller products; measured: 0.71
# to 0.79.
PREFILL_EFFICIENCY = 0.75
# A block of threads multiplies this many rows of a matrix: the last one of a matrix that is no multiple works as long.
OUTPUT_TILE = 128
# What each small kernel over a prompt's rows reads and writes, of bytes for each number.
ROW_KERNEL_BYTES = 8
# The products of experts reach this part of it, times m / (m + a tile's rows) if m rows come to an expert. Fitted to
# prompts of 2,048 tokens and models with 128 and 256 experts.
EXPERT_EFFICIENCY, EXPERT_TILE = 0.66, 128
# On the CPU, experts' products reach m / (m + CPU_EXPERT_TILE) of a large product's rate, if m rows come to an expert.
# A prompt's other work takes one thread CPU_OUTPUT_SECONDS for each row and output of a matrix. Both are fitted to
# prompts of 64 to 2,048 tokens and six models on two threads.
CPU_EXPERT_TILE, CPU_OUTPUT_SECONDS = 8, 3.4e-9
# Bringing weights and multiplying them overlap, except for this measured part of the shorter one.
OVERLAP_LOSS = 0.15
# Rows of an exact prompt that one launch takes, and one of experts; and seconds for what a row does in a layer besides
# products. Fitted to a prompt of 2,048 tokens and an 8B model on an H200.
EXACT_ROWS, EXACT_EXPERT_ROWS, EXACT_ROW_SECONDS = 512, 64, 0.35e-6


def prefill_on_gpu(uses: Sequence[Use], homes: Sequence[TensorHome], profile: HardwareProfile, rows: int,
                   cached: Mapping[int, Cached] | None = None, prompt: str = FAST,
                   beside: Beside = Beside()) -> Speed:
    """The speed of prefill on the GPU, for an "exact" or "fast" prompt of one batch of `rows` tokens; cached: the
    layers with slots."""
    cached = cached or {}
    brought = 0.0
    for use in uses:
        home = homes[use.tensor].home
        if home == DIRECT:
            brought += use.batch_bytes * (rows if use.role in BY_ROW else 1)
        elif home == SLOTS:
            brought += use.batch_bytes * (1 - (cached[use.layer].held if use.layer in cached else 0.0))
    streamed = brought / profile.pcie_bytes_per_second
    if prompt == EXACT:
        computed = _exact_seconds(uses, [TensorHome()] * len(homes), profile, rows, beside)
    else:
        computed = _fast_seconds(uses, profile, rows, beside)
    seconds = max(streamed, computed) + OVERLAP_LOSS * min(streamed, computed) + PREFILL_SECONDS
    return Speed(rows / seconds, "PCIe" if streamed > computed else "GPU arithmetic")


def _fast_seconds(uses: Sequence[Use], profile: HardwareProfile, rows: int, beside: Beside) -> float:
    """Seconds of the GPU's arithmetic for `rows` rows on tensor cores."""
    products = sum(operations([use], rows) / _efficiency(use, rows) for use in uses) / profile.gpu_flops
    width = max((use.cols for use in uses if use.role == "embedding"), default=0)
    return products + beside.row_kernels * rows * width * ROW_KERNEL_BYTES / profile.vram_bytes_per_second


def _exact_seconds(uses: Sequence[Use], resident: Sequence[TensorHome], profile: HardwareProfile, rows: int,
                   beside: Beside) -> float:
    """Seconds of the GPU's arithmetic for `rows` rows by the contract; resident: homes with all tensors in VRAM."""
    products = [use for use in uses if use.role not in (*BY_ROW, "head")]
    seconds = 0.0
    for use in products:
        most = EXACT_EXPERT_ROWS if use.role == "experts" else EXACT_ROWS
        for count, launches in ((most, rows // most), (rows % most, 1)):
            if count and launches:
                together = use._replace(read_bytes=round(step_bytes(use, count)))
                seconds += launches * together.read_bytes * rows_cost(together, use, count)
    seconds /= profile.vram_bytes_per_second
    reads = traffic(products, resident, beside=beside)
    seconds += math.ceil(rows / EXACT_ROWS) * kernels(reads) * profile.gpu_kernel_seconds
    return seconds + rows * reads.layers * EXACT_ROW_SECONDS


def _efficiency(use: Use, rows: int) -> float:
    """The part of a large product's rate that a prompt's product with this tensor reaches."""
    efficiency = PREFILL_EFFICIENCY * use.rows / (math.ceil(use.rows / OUTPUT_TILE) * OUTPUT_TILE)
    if use.role != "experts":
        return efficiency
    reached = rows * use.read_bytes / use.batch_bytes  # rows of an expert
    return efficiency * EXPERT_EFFICIENCY * reached / (reached + EXPERT_TILE)


def prefill_on_cpu(uses: Sequence[Use], profile: HardwareProfile, rows: int, threads: int | None = None) -> Speed:
    """The speed of prefill on the CPU."""
    seconds = sum(operations([use], rows) / _cpu_efficiency(use, rows) for use in uses) / profile.cpu_flops
    outputs = sum(use.parameters / use.cols for use in uses if use.role not in (*BY_ROW, "vector", "head"))
    seconds += rows * outputs * CPU_OUTPUT_SECONDS / profile.threads
    return Speed(rows * part_at_work(profile, threads) / max(1e-9, seconds), "CPU arithmetic")


def _cpu_efficiency(use: Use, rows: int) -> float:
    """The part of a large product's rate that a prompt's product with this tensor reaches on the CPU."""
    if use.role != "experts":
        return 1.0
    reached = rows * use.read_bytes / step_bytes(use, rows)  # rows of an expert that has any
    return reached / (reached + CPU_EXPERT_TILE)


def prefill_from_disk(in_ram: Speed, rows: int, read_bytes: float, disk_bytes_per_second: float) -> Speed:
    """The speed of prefill if `read_bytes` of what a batch of `rows` tokens needs are read from the disk, `in_ram`
    being that with all of it in RAM. The disk reads ahead while others are computed."""
    computed, read = rows / in_ram.tokens_per_second, read_bytes / disk_bytes_per_second
    return Speed(rows / read, "disk") if read > computed else in_ram


def operations(uses: Sequence[Use], rows: int) -> float:
    """Those of the products of `rows` rows, without the output head."""
    return 2.0 * rows * sum(use.parameters for use in uses if use.role not in (*BY_ROW, "vector", "head"))
