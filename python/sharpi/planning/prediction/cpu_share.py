"""The rows that the CPU takes of matrices that are not in VRAM: the fraction that is predicted to decode fastest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from sharpi.machine.profile import HardwareProfile
from sharpi.planning.placement import CPU_ROW_STEP, DIRECT, Inventory, TensorHome
from sharpi.planning.prediction.decode import decode_seconds, traffic

__all__ = ["balanced", "share_rows", "shares"]

# A smaller fraction of the rows does not pay for its crossings.
LEAST_SHARE = 0.03
# The fractions that are tried are multiples of 1 / SHARES: finer ones change the speed by less than the error.
SHARES = 512


def shares() -> list[float]:
    """The fractions of the rows that the CPU may take."""
    return [0.0, *(step / SHARES for step in range(1, SHARES + 1) if step / SHARES >= LEAST_SHARE)]


def share_rows(rows: int, share: float) -> int:
    """How many of a matrix's rows a fraction of them is, in the CPU's steps."""
    return min(round(rows * share / CPU_ROW_STEP), rows // CPU_ROW_STEP) * CPU_ROW_STEP


def balanced(inventory: Inventory, homes: Sequence[TensorHome], profile: HardwareProfile,
             threads: int | None = None) -> tuple[TensorHome, ...]:
    """`homes` with the CPU's rows: one fraction for all matrices that can be shared, the one predicted to decode
    fastest; none if that is best. Matrices in VRAM also have the rows that they would give if they had to leave it:
    the same fraction, or if that is nothing, the one that is best once all of them have left."""
    share, movable = _best_share(inventory, homes, profile, threads), inventory.shareable()
    leaving = {use.tensor for use in movable}
    gone = [home._replace(home=DIRECT) if tensor in leaving else home for tensor, home in enumerate(homes)]
    once_gone = share or _best_share(inventory, gone, profile, threads)
    rows = {use.tensor: share_rows(use.rows, share if homes[use.tensor].home == DIRECT else once_gone)
            for use in movable}
    return tuple(home._replace(cpu_rows=rows.get(tensor, 0)) for tensor, home in enumerate(homes))


def _best_share(inventory: Inventory, homes: Sequence[TensorHome], profile: HardwareProfile,
                threads: int | None) -> float:
    """The fraction of their rows that direct matrices had best give the CPU."""
    of_model = set(inventory.model_uses)
    shared = [use for use in inventory.shareable(homes) if use in of_model]
    if not shared:
        return 0.0
    alone = traffic(inventory.model_uses, [home._replace(cpu_rows=0) for home in homes], beside=inventory.beside)
    # Layers are much alike: a fraction is judged by the few kinds of matrices, not by all. The head is layer -1.
    kinds = Counter((use.rows, use.read_bytes, use.cpu_cost) for use in shared)
    most: dict[int, int] = {}
    for use in shared:
        most[use.layer] = max(use.rows, most.get(use.layer, 0))
    layers = Counter(most.values())

    def seconds(share: float) -> float:
        taken = [(count * size * share_rows(rows, share) / rows, cost) for (rows, size, cost), count in kinds.items()]
        moved, cpu = sum(size for size, _ in taken), sum(size * cost for size, cost in taken)
        touched = sum(count for rows, count in layers.items() if share_rows(rows, share))
        # What is left may be a rounding error instead of nothing.
        direct = alone.direct - moved if alone.direct - moved > 1 else 0.0
        reads = replace(alone, direct=direct, cpu=alone.cpu + cpu, shared_layers=alone.shared_layers + touched)
        return decode_seconds(reads, profile, threads)[0]

    return min(shares(), key=seconds)
