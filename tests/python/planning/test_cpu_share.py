"""The CPU's share of matrices outside VRAM is the best there is."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from fake_weights import MACHINE, inventory_of, random_machine, with_rows

from sharpi.planning.placement import TensorHome
from sharpi.planning.prediction.cpu_share import balanced, share_rows, shares
from sharpi.planning.prediction.decode import (
    decode_seconds,
    traffic,
)


def test_the_share_is_the_best_there_is() -> None:
    """Against every share, each tried in full; on machines of all kinds."""
    dice = random.Random(11)
    chosen = set()
    for _ in range(120):
        _, inventory = inventory_of(layers=dice.randint(1, 3), mixed=dice, tied=dice.random() < 0.5,
                                    experts=dice.choice([(), (), (1,), (0, 2)]))
        machine = random_machine(dice)
        homes = inventory.homes(dice.randint(0, len(inventory.movable)))
        found = balanced(inventory, homes, machine)
        inventory.check(found)
        assert [home[::2] for home in found] == [home[::2] for home in homes], "only rows change"

        def seconds(tried: tuple[TensorHome, ...], machine=machine, inventory=inventory) -> float:
            return decode_seconds(traffic(inventory.uses, tried), machine)[0]

        every = [seconds(with_rows(inventory, homes, share)) for share in shares()]
        assert seconds(found) == pytest.approx(min(every), rel=1e-9)
        assert min(every) <= seconds(homes), "no row is one of the choices"
        chosen.add(max(home.cpu_rows for home in found))
    assert 0 in chosen and 8192 in chosen and len(chosen) > 10, "none, all, and much in between"


def test_rows_in_vram_are_for_when_they_leave_it() -> None:
    """A unit in VRAM has the rows that it would give if it were direct; until then they do not count."""
    dice, seen = random.Random(5), set()
    for _ in range(12):
        _, inventory = inventory_of(layers=dice.randint(1, 5), tied=dice.random() < 0.5,
                                    experts=dice.choice([(), (0,)]))
        machine = random_machine(dice)
        leaving = {use.tensor for use in inventory.shareable()}
        for resident in range(len(inventory.movable) + 1):
            homes = inventory.homes(resident)
            found = balanced(inventory, homes, machine)
            inventory.check(found)
            shared = inventory.shareable(homes)
            direct = {share for use in shared if (share := found[use.tensor].cpu_rows / use.rows)}
            for use in inventory.shareable():
                share = found[use.tensor].cpu_rows / use.rows
                if use not in shared and direct:
                    # But for whole steps of 32 rows, of 1,024 at least.
                    assert min(abs(share - other) for other in direct) <= 32 / 1024, "as the others"
                elif use not in shared:
                    gone = balanced(inventory, [home._replace(home="direct") if tensor in leaving else home
                                                for tensor, home in enumerate(homes)], machine)
                    assert found[use.tensor] == gone[use.tensor]._replace(home="vram"), "as if all had left"
                seen.add((use in shared, bool(direct), share > 0))
            without = [home._replace(cpu_rows=0) if home.home == "vram" else home for home in found]
            assert traffic(inventory.uses, found) == traffic(inventory.uses, without)
            assert inventory.placed(found) == inventory.placed(without)
    assert {(False, True, True), (False, False, True), (False, False, False), (True, True, True)} <= seen


def test_the_shares_that_are_tried() -> None:
    tried = shares()
    assert tried[0] == 0 and tried[-1] == 1 and tried == sorted(tried) and 0.03 <= tried[1] < 0.035
    assert max(after - before for before, after in zip(tried[1:], tried[2:], strict=False)) < 0.0025
    assert len(tried) < 600, "each of them is a prediction, and finer ones change the speed by less than it is known"


def test_shares_that_are_too_small_are_none() -> None:
    _, inventory = inventory_of()
    homes = inventory.homes(0)
    rows = set()
    for rate in range(1, 200):
        machine = replace(MACHINE, ram_bytes_per_second=rate * 1e9, ram_bytes_per_second_shared=rate * 1e9,
                          pcie_bytes_per_second_shared=50e9)
        rows.add(max(home.cpu_rows for home in balanced(inventory, homes, machine)))
    assert 0 in rows and min(rows - {0}) >= 0.03 * 4096


@pytest.mark.parametrize("rows, share, taken", [
    (4096, 0.0, 0), (4096, 1.0, 4096), (4096, 0.5, 2048), (100, 1.0, 96), (100, 0.5, 64), (31, 1.0, 0), (64, 0.2, 0),
])
def test_rows_come_in_steps(rows: int, share: float, taken: int) -> None:
    assert share_rows(rows, share) == taken
