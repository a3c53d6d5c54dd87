"""Predicted speeds of prompts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fake_weights import MACHINE, inventory_of, stats_of, with_rows

from sharpi.planning.placement import ExpertPool
from sharpi.planning.prediction.decode import (
    DENSE_LAYER_KERNELS,
    EXPERT_LAYER_KERNELS,
    GROUPED_COST,
    GROUPED_FROM,
    OTHER_KERNELS,
    ROWS,
    ROWS_COST,
    cached_experts,
)
from sharpi.planning.prediction.prefill import (
    CPU_EXPERT_TILE,
    CPU_OUTPUT_SECONDS,
    EXACT_EXPERT_ROWS,
    EXACT_ROW_SECONDS,
    EXACT_ROWS,
    EXPERT_EFFICIENCY,
    EXPERT_TILE,
    OUTPUT_TILE,
    OVERLAP_LOSS,
    PREFILL_EFFICIENCY,
    PREFILL_SECONDS,
    prefill_on_cpu,
    prefill_on_gpu,
)


def test_prefill() -> None:
    model, inventory = inventory_of(layers=4, experts=(3,))
    dense = 3 * 3 * 4096 * 1024 + 4 * (2 * 1024 + 256) * 1024 + 8 * 1024
    used = dense + 3 * 8 * 1024 * 1024 // 4
    # An expert gets a quarter of the rows; the router's eight rows take as long as a block's.
    router = (OUTPUT_TILE - 8) * 1024
    slowed = 2 * 500 * (dense + router + (used - dense) / EXPERT_EFFICIENCY * (125 + EXPERT_TILE) / 125)
    fast = replace(MACHINE, pcie_bytes_per_second=1e15, gpu_flops=1e12)
    found = prefill_on_gpu(inventory.uses, inventory.homes(0), fast, 500)
    assert found.tokens_per_second == pytest.approx(500 / (slowed / (1e12 * PREFILL_EFFICIENCY) + PREFILL_SECONDS))
    assert found.bound == "GPU arithmetic"
    # All that is direct is fetched once, whoever would compute it in decode, and every expert; of the embedding a row
    # for each token.
    slow = replace(MACHINE, pcie_bytes_per_second=1e9, gpu_flops=1e15)
    direct = sum(size for tensor, size in zip(model.tensors, model.sizes, strict=True)
                 if "norm" not in tensor.name) - model.sizes[0] * (1 - 500 / 8192)
    for homes in (inventory.homes(0), with_rows(inventory, inventory.homes(0), 0.5)):
        found = prefill_on_gpu(inventory.uses, homes, slow, 500)
        hardly_shown = OVERLAP_LOSS * slowed / (1e15 * PREFILL_EFFICIENCY)
        assert found.tokens_per_second == pytest.approx(500 / (direct / 1e9 + hardly_shown + PREFILL_SECONDS))
        assert found.bound == "PCIe"
    # If both take equally long, they do not overlap completely.
    even = replace(slow, gpu_flops=slowed / PREFILL_EFFICIENCY / (direct / 1e9))
    found = prefill_on_gpu(inventory.uses, inventory.homes(0), even, 500)
    assert found.tokens_per_second == pytest.approx(500 / ((1 + OVERLAP_LOSS) * direct / 1e9 + PREFILL_SECONDS))
    # On the CPU, too, experts with few rows are slower; and every output takes other work besides.
    found = prefill_on_cpu(inventory.uses, MACHINE, 500)
    slowed = 2 * 500 * (dense + (used - dense) * (125 + CPU_EXPERT_TILE) / 125)
    outputs = 3 * (2 * 4096 + 1024) + 4 * (2 * 1024 + 256) + 8 + 3 * 2 * 1024
    seconds = slowed / 1e12 + 500 * outputs * CPU_OUTPUT_SECONDS / MACHINE.threads
    assert found.tokens_per_second == pytest.approx(500 / seconds) and found.bound == "CPU arithmetic"


def test_one_row_of_a_prompt_is_one_row_of_its_experts_on_the_cpu() -> None:
    _, inventory = inventory_of(layers=4, experts=(3,))
    experts = [use for use in inventory.uses if use.role == "experts"]
    outputs = sum(use.parameters / use.cols for use in experts)
    for rows, reached in ((1, 1.0), (2, 2 * 0.25 / (1 - 0.75 ** 2))):
        seconds = (2 * rows * sum(use.parameters for use in experts) / 1e12 * (reached + CPU_EXPERT_TILE) / reached
                   + rows * outputs * CPU_OUTPUT_SECONDS / MACHINE.threads)
        assert rows / prefill_on_cpu(experts, MACHINE, rows).tokens_per_second == pytest.approx(seconds)


def test_exact_prefill() -> None:
    """As many rows as fit in a launch read what a step reads; what is direct is brought once, as for fast prompts."""
    model, inventory = inventory_of(layers=4, experts=(3,))
    experts = sum(use.batch_bytes for use in inventory.uses if use.role == "experts")
    others = sum(use.read_bytes for use in inventory.uses if use.role not in ("embedding", "head", "experts"))
    kernels = (3 * DENSE_LAYER_KERNELS + EXPERT_LAYER_KERNELS + OTHER_KERNELS) * 2e-6
    whole = inventory.homes(len(inventory.movable))

    def seconds(dense: list[int], mixed: list[int]) -> float:
        """By the rows of each launch. A token chooses a quarter of the eight experts."""
        read = others * sum(float(np.interp(rows, ROWS, ROWS_COST)) for rows in dense)
        for rows in mixed:
            hit = 1 - 0.75 ** rows
            cost = float(np.interp(0.25 * rows / hit, ROWS, ROWS_COST)) * (GROUPED_COST if rows >= GROUPED_FROM else 1)
            read += experts * hit * cost
        return read / 3e12 + len(dense) * kernels + 4 * sum(dense) * EXACT_ROW_SECONDS

    assert (EXACT_ROWS, EXACT_EXPERT_ROWS) == (512, 64)
    for dense, mixed in (([1], [1]), ([2], [2]), ([64], [64]), ([65], [64, 1]), ([512], [64] * 8),
                         ([512, 512, 276], [64] * 20 + [20])):
        assert sum(dense) == sum(mixed)
        found = prefill_on_gpu(inventory.uses, whole, MACHINE, sum(dense), prompt="exact")
        assert found.tokens_per_second == pytest.approx(sum(dense) / (seconds(dense, mixed) + PREFILL_SECONDS))
        assert found.bound == "GPU arithmetic"
    step = seconds([8], [8])
    slow = replace(MACHINE, pcie_bytes_per_second=1e9)
    direct = sum(size for tensor, size in zip(model.tensors, model.sizes, strict=True)
                 if "norm" not in tensor.name) - model.sizes[0] * (1 - 8 / 8192)
    found = prefill_on_gpu(inventory.uses, inventory.homes(0), slow, 8, prompt="exact")
    assert found.tokens_per_second == pytest.approx(8 / (direct / 1e9 + OVERLAP_LOSS * step + PREFILL_SECONDS))
    assert found.bound == "PCIe"
    fast = prefill_on_gpu(inventory.uses, whole, MACHINE, 500)
    assert fast == prefill_on_gpu(inventory.uses, whole, MACHINE, 500, prompt="fast")
    exact = prefill_on_gpu(inventory.uses, whole, MACHINE, 500, prompt="exact")
    assert fast.tokens_per_second > exact.tokens_per_second


def test_prefill_brings_the_experts_that_are_in_no_slot() -> None:
    model, inventory = inventory_of(layers=3, experts=(0, 1))
    homes = inventory.homes(inventory.before_experts)
    size = model.layer_expert_bytes(0)
    slow = replace(MACHINE, pcie_bytes_per_second=1e8, gpu_flops=1e16)
    brought = (16 - 9) * size + 50 * model.sizes[0] // 8192
    uses = np.array([[9, 9, 9, 9, 9, 9, 9, 1], [5, 5, 1, 1, 1, 1, 1, 1]], np.uint64)
    for warm in (None, stats_of(model, uses)):
        cached = cached_experts(inventory.uses, [ExpertPool(2, 16, size, 9)], warm)
        found = prefill_on_gpu(inventory.uses, homes, slow, 50, cached)
        assert found.tokens_per_second == pytest.approx(50 / (brought / 1e8 + PREFILL_SECONDS), rel=1e-4)
        assert found.bound == "PCIe"
