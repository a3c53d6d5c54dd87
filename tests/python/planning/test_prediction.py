"""Predicted speeds of decode: the sums, and what bounds them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_weights import MACHINE, inventory_of, random_machine, stats_of, with_rows
from golden_models import write_golden

from sharpi.loading.description import describe
from sharpi.machine.profile import ASSUMED, GPU_FIELDS, HardwareProfile
from sharpi.planning.placement import Beside, ExpertPool, Inventory, TensorHome
from sharpi.planning.prediction.cpu_share import balanced
from sharpi.planning.prediction.decode import (
    BOUNDS,
    BYTES_PER_PRODUCT,
    CPU_EXPERT_LAYER_SECONDS,
    CPU_LAYER_SECONDS,
    CROSSING_SECONDS,
    DECODE_OVERLAP_LOSS,
    DENSE_LAYER_KERNELS,
    EXPERT_CROSSING_SECONDS,
    EXPERT_LAYER_KERNELS,
    KV_EFFICIENCY,
    LONG_BYTES_PER_PRODUCT,
    LONG_KV_EFFICIENCY,
    LONG_START,
    OTHER_KERNELS,
    PIECE_BYTES,
    PIECE_KERNELS,
    SHARED_EXPERT_KERNELS,
    SHARED_LAYER_KERNELS,
    SLOTS_LAYER_KERNELS,
    Cached,
    Traffic,
    after_on_cpu,
    after_on_gpu,
    cached_experts,
    completed,
    decode_on_cpu,
    decode_on_gpu,
    decode_seconds,
    draft_cost_on_cpu,
    draft_cost_on_gpu,
    expert_rates,
    hit_rate,
    traffic,
)
from sharpi.planning.prediction.prefill import (
    ROW_KERNEL_BYTES,
    prefill_on_cpu,
    prefill_on_gpu,
)

# --- decode ---------------------------------------------------------------------------------------------------------


def test_decode_of_a_resident_model() -> None:
    model, inventory = inventory_of(layers=4)
    homes = inventory.homes(len(inventory.movable))
    read = model.total - model.sizes[0] + model.sizes[0] // 8192  # one row of the embedding
    seconds = read / 3e12 + (DENSE_LAYER_KERNELS * 4 + OTHER_KERNELS) * 2e-6  # nothing comes in pieces
    assert decode_on_gpu(inventory.uses, homes, MACHINE).tokens_per_second == pytest.approx(1 / seconds)
    _, inventory = inventory_of(layers=4, experts=(1, 2))
    reads = traffic(inventory.uses, inventory.homes(len(inventory.movable)))
    read = sum(use.read_bytes for use in inventory.uses)
    assert decode_seconds(reads, MACHINE)[0] == pytest.approx(
        read / 3e12 + ((DENSE_LAYER_KERNELS + EXPERT_LAYER_KERNELS) * 2 + OTHER_KERNELS) * 2e-6)


def test_decode_over_pcie() -> None:
    model, inventory = inventory_of()
    homes = inventory.homes(0)
    direct = sum(use.read_bytes for use in inventory.uses if use.role != "vector")
    assert traffic(inventory.uses, homes).direct == direct
    found = decode_on_gpu(inventory.uses, homes, MACHINE)
    # A part of what the GPU does meanwhile is not hidden.
    own = direct / 3e12 + (DENSE_LAYER_KERNELS * 4 + OTHER_KERNELS + PIECE_KERNELS * direct / PIECE_BYTES) * 2e-6
    assert found.tokens_per_second == pytest.approx(1 / (direct / 50e9 + DECODE_OVERLAP_LOSS * own))
    assert found.bound == "PCIe"


def test_decode_with_rows_on_the_cpu() -> None:
    _, inventory = inventory_of()
    homes = with_rows(inventory, inventory.homes(0), 0.5)
    shared = sum(use.read_bytes for use in inventory.uses if use.role.startswith("ffn") or use.role == "head")
    reads = traffic(inventory.uses, homes)
    assert reads.cpu == shared / 2 and reads.shared_layers == 4 + 1
    # A machine on which PCIe takes just a bit longer than the CPU shows the other sum.
    pcie = 0.99 * reads.direct / (shared / 2 / 75e9)
    even = replace(MACHINE, pcie_bytes_per_second_shared=pcie)
    pieces = PIECE_KERNELS * reads.direct / PIECE_BYTES
    assert pieces > 1
    own = (reads.vram + reads.direct) / 3e12 + (
        DENSE_LAYER_KERNELS * 4 + SHARED_LAYER_KERNELS * 5 + OTHER_KERNELS + pieces
    ) * 2e-6
    serial = own + shared / 2 / 75e9 + 2 * 5 * CROSSING_SECONDS
    hidden = DECODE_OVERLAP_LOSS * min(own, reads.direct / pcie)
    assert decode_seconds(reads, even) == (pytest.approx(serial + hidden), "RAM")
    slow = replace(MACHINE, pcie_bytes_per_second_shared=1e9, pcie_bytes_per_second=1e15)
    assert decode_seconds(reads, slow) == (pytest.approx(reads.direct / 1e9 + DECODE_OVERLAP_LOSS * own), "PCIe")
    # With nothing left to fetch, the CPU has the RAM for itself.
    alone = replace(reads, vram=reads.vram + reads.direct, direct=0.0)
    assert decode_seconds(alone, MACHINE)[0] == pytest.approx(
        serial - pieces * 2e-6 - shared / 2 / 75e9 + shared / 2 / 100e9)
    # And so it has after PCIe is done: here it had three quarters of its rate for a third of the time.
    quick = replace(MACHINE, pcie_bytes_per_second_shared=3 * reads.direct / (shared / 2 / 75e9))
    third = shared / 2 / 75e9 / 3
    hidden = DECODE_OVERLAP_LOSS * min(own, third)
    assert decode_seconds(reads, quick)[0] == pytest.approx(
        serial - shared / 2 / 75e9 + third + 2 * third * 0.75 + hidden)


def test_decode_with_experts_on_the_cpu() -> None:
    model, inventory = inventory_of(layers=4, experts=(0, 1, 2))
    experts = [use for use in inventory.uses if use.role == "experts"]
    used = sum(use.read_bytes for use in experts)
    assert used * 4 == sum(model.sizes[use.tensor] for use in experts)
    reads = traffic(inventory.uses, inventory.homes(inventory.before_experts))
    row = model.sizes[0] // 8192
    others = sum(use.read_bytes for use in inventory.uses) - used - row
    assert reads == Traffic(
        vram=others, direct=row, cpu=used, layers=4, expert_layers=3, shared_layers=0, left_layers=3
    )
    # That an embedding's row comes over PCIe is no reason to think the CPU slower than it is.
    seconds = (others / 3e12 + used / 100e9
               + (DENSE_LAYER_KERNELS + (EXPERT_LAYER_KERNELS + SLOTS_LAYER_KERNELS) * 3 + OTHER_KERNELS) * 2e-6
               + 3 * EXPERT_CROSSING_SECONDS)
    found, bound = decode_seconds(reads, MACHINE)
    assert (found, bound) == (pytest.approx(seconds, rel=1e-4), "GPU arithmetic")
    fewer, bound = decode_seconds(reads, MACHINE, 4)
    assert fewer > found and bound == "RAM"


# --- recurrent layers -----------------------------------------------------------------------------------------------


def test_a_state_is_read_and_written_by_every_token() -> None:
    _, plain = inventory_of(layers=4, experts=(1, 3))
    _, hybrid = inventory_of(layers=4, experts=(1, 3), state_bytes=30_000_000, shared_experts=2)
    assert plain.beside == Beside() and hybrid.beside == Beside(30_000_000, 2)
    homes = plain.homes(len(plain.movable))
    seconds = [1 / decode_on_gpu(each.model_uses, homes, MACHINE, beside=each.beside).tokens_per_second
               for each in (plain, hybrid)]
    kernels = SHARED_EXPERT_KERNELS * 2
    assert seconds[1] - seconds[0] == pytest.approx(60e6 / 3e12 + kernels * 2e-6)
    seconds = [1 / decode_on_cpu(each.model_uses, MACHINE, beside=each.beside).tokens_per_second
               for each in (plain, hybrid)]
    assert seconds[1] - seconds[0] == pytest.approx(60e6 / 100e9)


# --- types that take the CPU longer -----------------------------------------------------------------------------------


def test_types_cost_the_cpu_as_measured() -> None:
    model, plain = inventory_of(layers=3, experts=(1,))
    for tensor in model.tensors:
        if "_exps" in tensor.name or "ffn_down" in tensor.name:
            tensor.type = 18  # IQ3_XXS, which costs what IQ3_S does
    machine = replace(MACHINE, cpu_type_costs={"IQ3_S": 4.0})
    costly = Inventory.of(model, model).on(machine)
    assert Inventory.of(model, model).uses[0].cpu_cost == 1.0 and costly.beside == plain.beside
    slow = [use for use in costly.uses if use.cpu_cost == 4.0]
    assert len(slow) == 2 + 3 and {use.cpu_cost for use in costly.uses} == {1.0, 4.0}

    # On the CPU, all bytes count times their cost.
    added = 3 * sum(use.read_bytes for use in slow)
    assert 1 / decode_on_cpu(costly.uses, machine).tokens_per_second == pytest.approx(
        1 / decode_on_cpu(plain.uses, machine).tokens_per_second + added / 100e9)
    # Beside a GPU those that the CPU takes do, and PCIe brings as many as before.
    homes = with_rows(plain, plain.homes(0), 0.5)
    before, after = (traffic(each.uses, homes) for each in (plain, costly))
    experts = sum(use.read_bytes for use in slow if use.role == "experts")
    assert after == replace(before, cpu=before.cpu + 3 * (sum(use.read_bytes for use in slow) - experts) / 2
                            + 3 * experts)
    assert {home.cpu_rows for home in balanced(costly, plain.homes(0), machine)} != {
        home.cpu_rows for home in balanced(plain, plain.homes(0), machine)}, "a slower CPU gets fewer rows"
    # So do misses.
    pools = [ExpertPool(1, 8, model.layer_expert_bytes(1), 2)]
    known, cheap = (cached_experts(each.uses, pools)[1] for each in (costly, plain))
    assert known == cheap._replace(cpu_cost=4.0)
    slower = replace(MACHINE, ram_bytes_per_second=25e9, ram_bytes_per_second_shared=75e9 / 4)
    one, other = (traffic(plain.uses, plain.homes(plain.before_experts), {1: each}) for each in (known, cheap))
    assert decode_seconds(one, MACHINE) == pytest.approx(decode_seconds(other, slower))
    assert expert_rates(machine, None, costly.uses) == (75e9 / 4, 45e9)


# --- attention, and small kernels -------------------------------------------------------------------------------------


def test_attention_is_bound_by_what_it_reads_or_by_its_products() -> None:
    model, inventory = inventory_of(layers=4)
    homes = inventory.homes(len(inventory.movable))
    long = 1 + LONG_START / 50_000  # a long text has kernels of its own
    for tokens, products, expected in ((2_000, 10, 2_000_000 / KV_EFFICIENCY),
                                       (2_000, 2_000_000, 2_000_000 * BYTES_PER_PRODUCT),
                                       (50_000, 10, 50_000_000 / LONG_KV_EFFICIENCY * long),
                                       (50_000, 60_000_000, 60_000_000 * LONG_BYTES_PER_PRODUCT * long)):
        model.attention_products = lambda seen, tokens=tokens, products=products: products if seen == tokens else -1
        beside = after_on_gpu(inventory.beside, model, "bf16", tokens)
        assert beside == inventory.beside._replace(attention_bytes=expected)
        seconds = [1 / decode_on_gpu(inventory.uses, homes, MACHINE, beside=each).tokens_per_second
                   for each in (inventory.beside, beside)]
        assert seconds[1] - seconds[0] == pytest.approx(expected / 3e12)
    model.long_attention = False
    assert after_on_gpu(inventory.beside, model, "bf16", 50_000).attention_bytes == 60_000_000 * BYTES_PER_PRODUCT
    beside = after_on_cpu(inventory.beside, model, "bf16", 50_000)
    seconds = [1 / decode_on_cpu(inventory.uses, MACHINE, beside=each).tokens_per_second
               for each in (inventory.beside, beside)]
    assert seconds[1] - seconds[0] == pytest.approx(50_000_000 / 100e9)


def test_small_kernels_take_time_in_steps_and_in_prompts() -> None:
    _, plain = inventory_of(layers=4)
    _, normed = inventory_of(layers=4, row_kernels=100)
    homes = plain.homes(len(plain.movable))

    def added(predict) -> float:
        return 1 / predict(normed).tokens_per_second - 1 / predict(plain).tokens_per_second

    assert added(lambda each: decode_on_gpu(each.uses, homes, MACHINE, beside=each.beside)) == pytest.approx(100 * 2e-6)
    assert added(lambda each: prefill_on_gpu(each.uses, homes, MACHINE, 500, beside=each.beside)) == pytest.approx(
        100 * 1024 * ROW_KERNEL_BYTES / 3e12)
    assert added(lambda each: prefill_on_gpu(each.uses, homes, MACHINE, 8, prompt="exact", beside=each.beside)
                 ) == pytest.approx(100 * 2e-6 / 8)


def test_what_the_core_says_of_a_token(tmp_path: Path) -> None:
    """Of layers of all kinds; gemma4-e has ten layers, of which every fifth sees more than 16 tokens."""
    counts = {}
    for name in ("gemma4", "gemma4-moe", "gemma4-e", "qwen3next", "llama4", "falcon-h1", "deepseek2",
                 "nemotron_h_moe-latents"):
        _, spec = describe(write_golden(name, tmp_path))
        counts[name] = (spec.row_kernels, spec.shared_experts)
        # The others have latents, or heads of less than 64 elements in some layer.
        assert spec.long_attention == (name == "qwen3next")
        if name == "gemma4-e":
            for tokens in (1, 16, 17, 400):
                assert spec.attention_products(tokens) == 8 * (8 * 32 * min(tokens, 16) + 2 * 64 * tokens)
    # The scaled embedding and the capped logits. What follows a part is done by the kernel of the next norm.
    assert counts["gemma4"] == (2, 0) and counts["gemma4-moe"] == (2 + 2 * 6, 6)
    assert counts["gemma4-e"] == (2 + 4 + 4 * 10, 0)
    assert counts["qwen3next"] == (0, 4) and counts["llama4"][0] == 0
    assert counts["falcon-h1"] == (4 * 3, 0) and counts["deepseek2"] == (9 * 4, 3)
    # Three layers of Mamba 2 and one of attention, each without a dense part, and two of experts without a mixer.
    assert counts["nemotron_h_moe-latents"] == (3 * (2 - 4) - 4 + 2 * (3 - 6), 2)


# --- drafted tokens -------------------------------------------------------------------------------------------------


def test_a_prediction_layer_is_no_part_of_plain_decode() -> None:
    """Wherever its weights are: plain decode does not read them."""
    for options in ({}, {"experts": (0, 1, 2)}, {"tied": True}):
        _, without = inventory_of(layers=4, **options)
        model, inventory = inventory_of(layers=4, prediction_layers=1, **options)
        head = 0 if options.get("tied") else 1
        assert [use[2:] for use in inventory.model_uses] == [use[2:] for use in without.uses]
        assert {use.layer for use in inventory.draft_uses} == {4, -1} and not without.draft_uses
        assert [use.role for use in inventory.draft_uses if use.layer < 0] == ["embedding", "head"]
        assert len({use.tensor for use in inventory.draft_uses if use.layer < 0}) == 1 + head
        # Its tensors have their places, and their rows.
        assert len(inventory.units) > len(without.units) or options.get("experts")
        assert {use.layer for use in inventory.shareable()} >= ({4} if 4 not in model.experts else set())
        for share in (0, 0.5):
            homes = [with_rows(each, each.homes(0), share) for each in (inventory, without)]
            assert decode_on_gpu(inventory.model_uses, homes[0], MACHINE) == decode_on_gpu(
                without.uses, homes[1], MACHINE)
    dice = random.Random(5)
    for _ in range(4):  # and has no say in what the CPU takes
        machine = random_machine(dice)
        _, without = inventory_of(layers=4)
        _, inventory = inventory_of(layers=4, prediction_layers=1)
        rows = [
            [balanced(each, each.homes(0), machine)[use.tensor].cpu_rows for use in each.uses if use.layer in range(4)]
            for each in (inventory, without)
        ]
        assert rows[0] == rows[1]


def test_an_inventory_without_the_layer() -> None:
    model, inventory = inventory_of(layers=4, prediction_layers=1, experts=(0, 4))
    without = Inventory.of(model, model, mtp=False)
    assert without.uses == inventory.model_uses and not without.draft_uses
    unused = {use.tensor for use in inventory.uses} - {use.tensor for use in without.uses}
    assert unused and all(without.homes(0)[tensor] == TensorHome("vram", 0) for tensor in unused)


def arithmetic(inventory: Inventory) -> float:
    """Seconds of the CPU for a further row of the model, its head, and a row of the prediction layer."""
    matrices = [
        use for use in (*inventory.model_uses, *inventory.draft_uses) if use.role not in ("embedding", "vector")
    ]
    return 2 * sum(use.parameters for use in matrices) / MACHINE.cpu_flops


def test_what_a_drafted_token_costs() -> None:
    _, inventory = inventory_of(layers=4, prediction_layers=1)
    homes = inventory.homes(len(inventory.movable))
    read = {name: sum(use.read_bytes for use in uses) for name, uses in (
        ("model", inventory.model_uses), ("layer", [use for use in inventory.uses if use.layer == 4]),
        ("shared", [use for use in inventory.uses if use.role in ("embedding", "head")]))}
    plain = read["model"] / 3e12 + (DENSE_LAYER_KERNELS * 4 + OTHER_KERNELS) * 2e-6
    draft = (read["layer"] + read["shared"]) / 3e12 + (DENSE_LAYER_KERNELS + OTHER_KERNELS) * 2e-6
    assert draft_cost_on_gpu(inventory, homes, MACHINE) == pytest.approx(draft / plain + 0.2)
    # If weights come over PCIe, a second row costs the GPU's own part.
    away = inventory.homes(0)
    seconds = decode_seconds(traffic(inventory.model_uses, away), MACHINE)[0]
    drafted = decode_seconds(traffic(inventory.draft_uses, away), MACHINE)[0]
    assert draft_cost_on_gpu(inventory, away, MACHINE) == pytest.approx((drafted + 0.2 * plain) / seconds)
    bytes_read = (read["layer"] + read["shared"]) / MACHINE.ram_bytes_per_second
    expected = (bytes_read + arithmetic(inventory) + CPU_LAYER_SECONDS) / (
        read["model"] / MACHINE.ram_bytes_per_second + 4 * CPU_LAYER_SECONDS)
    assert draft_cost_on_cpu(inventory, MACHINE) == pytest.approx(expected)
    _, without = inventory_of(layers=4)
    assert draft_cost_on_gpu(without, without.homes(0), MACHINE) is None is draft_cost_on_cpu(without, MACHINE)


def test_a_judged_row_has_its_own_experts() -> None:
    _, inventory = inventory_of(layers=4, prediction_layers=1, experts=(0, 1, 2, 3), state_bytes=10_000_000)
    experts = sum(use.read_bytes for use in inventory.model_uses if use.role == "experts")
    drafted = sum(use.read_bytes for use in inventory.draft_uses)
    plain = sum(use.read_bytes for use in inventory.model_uses) + 20_000_000
    ram = MACHINE.ram_bytes_per_second
    assert draft_cost_on_cpu(inventory, MACHINE) == pytest.approx(
        ((experts + drafted) / ram + arithmetic(inventory) + CPU_LAYER_SECONDS)
        / (plain / ram + 4 * CPU_EXPERT_LAYER_SECONDS)
    )
    homes = inventory.homes(len(inventory.movable))
    reads = traffic(inventory.model_uses, homes, beside=inventory.beside)
    seconds = decode_seconds(reads, MACHINE)[0]
    assert draft_cost_on_gpu(inventory, homes, MACHINE) == pytest.approx(
        (experts / 3e12 + drafted / 3e12 + (DENSE_LAYER_KERNELS + OTHER_KERNELS) * 2e-6) / seconds + 0.2)
    # In slots a second row misses as often as the first: never less than without it.
    resident = decode_seconds(traffic(inventory.model_uses, homes, None, inventory.beside), MACHINE)[0]
    homes = inventory.homes(inventory.before_experts)
    layer = inventory.draft_uses[0].layer
    for hit in (0.0, 0.5, 1.0):
        cached = {number: Cached(2, 1e6, hit, hit) for number in range(layer)}
        doubled = {number: known._replace(used=4) for number, known in cached.items()}
        times = [decode_seconds(traffic(inventory.model_uses, homes, each, inventory.beside), MACHINE)[0]
                 for each in (cached, doubled)]
        draft = decode_seconds(traffic(inventory.draft_uses, homes), MACHINE)[0]
        assert draft_cost_on_gpu(inventory, homes, MACHINE, None, cached) == pytest.approx(
            (times[1] - times[0] + draft + 0.2 * min(times[0], resident)) / times[0])
    # More than all of them no token reads.
    every = [use._replace(batch_bytes=use.read_bytes) for use in inventory.uses]
    most = Inventory(every, inventory.sizes, 4, inventory.beside)
    assert draft_cost_on_cpu(most, MACHINE) == pytest.approx(
        (drafted / ram + arithmetic(most) + CPU_LAYER_SECONDS) / (plain / ram + 4 * CPU_EXPERT_LAYER_SECONDS))


# --- experts in slots -----------------------------------------------------------------------------------------------


def seconds_of(layer: Cached, machine: HardwareProfile, threads: int) -> float:
    """What a layer's experts take: the mean over every way in which its choices may be hits, each written out."""
    working = min(1.0, threads / machine.threads)
    total = 0.0
    for hits in itertools.product((True, False), repeat=layer.used):
        chance = 1.0
        for hit in hits:
            chance *= layer.hit if hit else 1 - layer.hit
        missed = hits.count(False)
        ways = []
        for fetched in range(missed + 1):
            computed, size = missed - fetched, layer.expert_bytes
            alone = not fetched or not computed
            cpu = computed * size / working / (
                machine.ram_bytes_per_second if alone else machine.ram_bytes_per_second_shared)
            pcie = fetched * size / (
                machine.pcie_bytes_per_second if alone else machine.pcie_bytes_per_second_shared)
            products = (hits.count(True) + fetched) * size / machine.vram_bytes_per_second
            ways.append((max(cpu, pcie), max(cpu, pcie + products)))
        total += chance * (min(ways)[1] + (EXPERT_CROSSING_SECONDS if missed else 0.0))
    return total


def test_decode_with_slots() -> None:
    dice, bounds = random.Random(8), set()
    for _ in range(300):
        machine, threads = random_machine(dice), dice.choice((1, 4, 16, 64))
        layers = [Cached(dice.randint(1, 6), 10 ** dice.uniform(4, 7), dice.choice((0.0, 1.0, dice.random())),
                         dice.random()) for _ in range(dice.randint(1, 3))]
        cached = tuple(layers * 2)
        # Nothing else takes time but kernels.
        reads = Traffic(0, 0, 0, len(cached), len(cached), 0, 0, cached)
        kernels = (
            (EXPERT_LAYER_KERNELS + SLOTS_LAYER_KERNELS) * len(cached) + OTHER_KERNELS
        ) * machine.gpu_kernel_seconds
        found, bound = decode_seconds(reads, machine, threads)
        assert found == pytest.approx(2 * sum(seconds_of(layer, machine, threads) for layer in layers) + kernels)
        bounds.add(bound)
    assert bounds == {"PCIe", "RAM", "VRAM", "GPU arithmetic"}


def test_slots_only_help() -> None:
    model, inventory = inventory_of(layers=4, experts=(0, 1, 2, 3))
    homes = inventory.homes(inventory.before_experts)
    reads = traffic(inventory.uses, homes)
    before = decode_seconds(reads, MACHINE)[0]
    size, prefill = model.layer_expert_bytes(0), 0.0
    for slots in range(1, 33):
        cached = cached_experts(inventory.uses, [ExpertPool(4, 32, size, slots)])
        assert cached == dict.fromkeys(range(4), Cached(2, size, slots / 32, slots / 32))
        assert hit_rate(cached) == pytest.approx(slots / 32)
        with_slots = traffic(inventory.uses, homes, cached)
        assert with_slots == replace(reads, cpu=0, left_layers=0, cached=(cached[0],) * 4)
        now = decode_seconds(with_slots, MACHINE)[0]
        assert now < before
        assert decode_on_gpu(inventory.uses, homes, MACHINE, 16, cached).tokens_per_second == pytest.approx(1 / now)
        faster = prefill_on_gpu(inventory.uses, homes, replace(MACHINE, pcie_bytes_per_second=1e9), 100, cached)
        assert faster.tokens_per_second > prefill
        before, prefill = now, faster.tokens_per_second
    # With all of them in slots, it is what resident experts take, but for looking them up.
    resident = traffic(inventory.uses, inventory.homes(inventory.before_experts + 1))
    assert before == pytest.approx(decode_seconds(resident, MACHINE)[0] + 4 * SLOTS_LAYER_KERNELS * 2e-6)
    assert prefill == prefill_on_gpu(inventory.uses, inventory.homes(inventory.before_experts + 1),
                                     replace(MACHINE, pcie_bytes_per_second=1e9), 100).tokens_per_second


def test_without_slots_experts_are_the_cpus() -> None:
    model, inventory = inventory_of(layers=3, experts=(0, 1, 2))
    size = model.layer_expert_bytes(0)
    for pools in ([], [ExpertPool(3, 24, size, 0)]):
        cached = cached_experts(inventory.uses, pools)
        assert cached == {} and hit_rate(cached) == 0
        reads = traffic(inventory.uses, inventory.homes(inventory.before_experts), cached)
        assert (reads.cpu, reads.left_layers, reads.cached) == (6 * size, 3, ())


def test_statistics_say_which_experts_are_in_slots() -> None:
    """Against taking the most used ones; slots are given to whichever layer needs them."""
    dice = random.Random(21)
    uneven = 0
    for _ in range(60):
        model, inventory = inventory_of(layers=5, experts=(0, 1, 3, 4))
        uses = np.array([[dice.randint(1, 1000) ** 2 for _ in range(8)] for _ in range(4)], np.uint64)
        if dice.random() < 0.3:
            uses[dice.randint(0, 3)] = 0
        slots, some = dice.randint(1, 32), dice.randint(0, 8)
        pools = [ExpertPool(3, 24, 1, max(0, slots - some)), ExpertPool(1, 8, 1, min(slots, some))]
        cached = cached_experts(inventory.uses, pools, stats_of(model, uses))
        assert list(cached) == [0, 1, 3, 4] and {layer.used for layer in cached.values()} == {2}
        part = [[count / sum(row) if any(row) else 1 / 8 for count in row] for row in uses.tolist()]
        best = sorted(itertools.chain(*part), reverse=True)[:slots]
        assert hit_rate(cached) == pytest.approx(sum(best) / 4)
        assert sum(layer.held for layer in cached.values()) * 8 == pytest.approx(slots)
        for mine, layer in zip(part, cached.values(), strict=True):
            assert layer.hit == pytest.approx(sum(sorted(mine, reverse=True)[:round(8 * layer.held)]))
        uneven += len({layer.held for layer in cached.values()}) > 1
        assert hit_rate(cached) >= hit_rate(cached_experts(inventory.uses, pools)) - 1e-9
    assert uneven > 20


def test_the_rates_by_which_misses_are_shared() -> None:
    assert expert_rates(MACHINE) == expert_rates(MACHINE, 64) == (75e9, 45e9)
    assert expert_rates(MACHINE, 4) == (75e9 / 4, 45e9)


# --- what bounds it, and on the CPU -----------------------------------------------------------------------------------


def test_rows_of_an_embedding_are_not_shared() -> None:
    """With a tied embedding the CPU computes rows of the head; a token's own row is read across PCIe."""
    model, inventory = inventory_of(layers=1, tied=True)
    homes = with_rows(inventory, inventory.homes(0), 1.0)
    assert homes[0].cpu_rows == 8192
    row = model.sizes[0] // 8192
    attention = sum(use.read_bytes for use in inventory.uses if use.role == "attention")
    reads = traffic(inventory.uses, homes)
    assert (reads.direct, reads.shared_layers) == (row + attention, 2)
    embedding = [use for use in inventory.uses if use.role == "embedding"]
    assert traffic(embedding, homes).shared_layers == 0 and traffic(embedding, homes).cpu == 0


def test_what_bounds_decode() -> None:
    _, inventory = inventory_of()
    homes = with_rows(inventory, inventory.homes(3), 0.5)
    for change, bound in (({"vram_bytes_per_second": 1e6}, "VRAM"), ({"gpu_kernel_seconds": 0.1}, "GPU arithmetic"),
                          ({"ram_bytes_per_second_shared": 1e6}, "RAM"),
                          ({"pcie_bytes_per_second_shared": 1e6}, "PCIe")):
        assert decode_on_gpu(inventory.uses, homes, replace(MACHINE, **change)).bound == bound
        assert bound in BOUNDS
    assert decode_on_cpu(inventory.uses, MACHINE).bound == "RAM"


def test_fewer_threads_than_were_measured() -> None:
    _, inventory = inventory_of()
    # The fixed part of a step's layers does not depend on the threads.
    fixed = CPU_LAYER_SECONDS * len({use.layer for use in inventory.uses} - {-1})
    for predict, same in ((lambda threads: decode_on_cpu(inventory.uses, MACHINE, threads), fixed),
                          (lambda threads: prefill_on_cpu(inventory.uses, MACHINE, 100, threads), 0.0)):
        few, all_of_them = (1 / predict(threads).tokens_per_second - same for threads in (4, 16))
        assert few == pytest.approx(4 * all_of_them)
        assert predict(64) == predict(16) == predict(None), "more of them bring nothing more"
    homes = inventory.homes(3)
    shares = [sum(home.cpu_rows for home in balanced(inventory, homes, MACHINE, threads)) for threads in (1, 4, 16)]
    assert shares == sorted(set(shares)), "a slower CPU gets fewer rows"


def test_decode_on_the_cpu() -> None:
    model, inventory = inventory_of(experts=(0,))
    read = sum(use.read_bytes for use in inventory.uses)
    experts = sum(tensor.nbytes for tensor in model.tensors if "_exps" in tensor.name)
    assert read == pytest.approx(model.total - experts * 0.75 - model.sizes[0] * 8191 / 8192)
    layers = len({use.layer for use in inventory.uses} - {-1})
    fixed = (layers - 1) * CPU_LAYER_SECONDS + CPU_EXPERT_LAYER_SECONDS
    assert 1 / decode_on_cpu(inventory.uses, MACHINE).tokens_per_second == pytest.approx(read / 100e9 + fixed)


def test_a_machine_without_a_gpu_is_given_an_assumed_one() -> None:
    cpu_only = replace(MACHINE, **dict.fromkeys(GPU_FIELDS))
    whole = completed(cpu_only)
    assert whole.assumed and whole.ram_bytes_per_second == MACHINE.ram_bytes_per_second
    assert whole.pcie_bytes_per_second == ASSUMED.pcie_bytes_per_second
    assert whole.ram_bytes_per_second_shared == pytest.approx(100e9 * 26 / 40)
    assert completed(MACHINE) is MACHINE
