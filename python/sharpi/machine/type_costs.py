"""How fast the CPU multiplies with weights of each type.

Products with one row read Q4_K about as fast as RAM gives it. Other types take longer for a byte where unpacking them
is the bottleneck: with few threads, and for the types with grids on any machine. The core measures one type of each
kind; the others of the kind take about as long, by measurements of all types on a Zen 4 with one and two threads.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["COST_TYPES", "cost_of"]

_KINDS = {
    "Q6_K": ("Q5_K", "Q6_K"),
    "Q8_0": ("Q8_0",),
    "MXFP4": ("MXFP4", "IQ4_NL", "IQ4_XS", "TQ2_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K"),
    "IQ3_S": ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "NVFP4", "TQ1_0", "Q1_0"),
}
# The types that the core measures.
COST_TYPES = tuple(_KINDS)
_MEASURED = {name: kind for kind, names in _KINDS.items() for name in names}


def cost_of(costs: Mapping[str, float], name: str) -> float:
    """The time in which the CPU reads a byte of weights of a type, as a multiple of that of Q4_K; 1 for what was not
    measured. costs: of `COST_TYPES`."""
    return costs.get(_MEASURED.get(name, ""), 1.0)
