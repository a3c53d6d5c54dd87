"""RAM that a scheduler's copies take beside a plan's memory."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KEPT_BYTES", "Kept", "kept"]

# What a scheduler may take for copies of states unless it is told, and as much for copies of pages. No more than a part
# of a small RAM.
KEPT_BYTES, _PART = 1 << 30, 16


@dataclass(frozen=True)
class Kept:
    """RAM that a scheduler's copies take at most, in bytes: those of recurrent states, and those of pages that the KV
    cache has to give up."""

    states_bytes: int
    spill_bytes: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.states_bytes + self.spill_bytes


def kept(ram: int, *, recurrent: bool, states_bytes: int | None = None, spill_bytes: int | None = None) -> Kept:
    """For a scheduler that is given these limits, on a machine with so much RAM. recurrent: whether the model has
    recurrent layers. Others keep no copies of states."""
    usual = min(KEPT_BYTES, ram // _PART)
    return Kept((usual if states_bytes is None else states_bytes) if recurrent else 0,
                usual if spill_bytes is None else spill_bytes)
