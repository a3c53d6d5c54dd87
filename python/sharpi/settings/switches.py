"""The switches of the environment: which there are, and what they may say.

Python reads some, the core and its CUDA part read the others. All are checked here, whatever the device: a switch that
is misspelt must not pass for one that is off.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from sharpi.errors import InvalidRequestError
from sharpi.settings.choices import KV_DTYPES

__all__ = ["SWITCHES", "check_switches", "is_on", "misspelt_switches"]


class _Switch(NamedTuple):
    """pattern: what the whole value matches; words: what may be said, for people."""

    pattern: str
    words: str


def _one_of(*values: str) -> _Switch:
    return _Switch("|".join(map(re.escape, values)), f"{', '.join(values[:-1])} or {values[-1]}")


_BINARY = _one_of("0", "1")
_GIB = _Switch(r" *[0-9]{1,9}(\.[0-9]{1,15})? *", "a number of GiB, such as 4 or 2.5")

SWITCHES: Mapping[str, _Switch] = {
    "SHARPI_CPU_ISA": _one_of("scalar", "avx2", "avx512", "amx"),
    "SHARPI_CPU_MOE": _BINARY,
    "SHARPI_CUDA_GRAPH": _BINARY,
    "SHARPI_CUDA_PARTIAL_WEIGHT_CACHE": _BINARY,
    "SHARPI_CUDA_PARTIAL_WEIGHT_CACHE_GB": _GIB,
    "SHARPI_CUDA_PDL": _BINARY,
    "SHARPI_CUDA_PIN": _BINARY,
    "SHARPI_CUDA_ROW_SPLIT": _BINARY,
    "SHARPI_CUDA_WGMMA": _BINARY,
    "SHARPI_EXPERT_PREFETCH": _one_of("off", "count", "next-token", "next-layer"),
    "SHARPI_EXPERT_STATS": _Switch(r"(?s:.*)", "the path of a file"),
    "SHARPI_KV_DTYPE": _one_of(*KV_DTYPES),
    "SHARPI_RAM_GB": _GIB,
    "SHARPI_TRACE_VRAM": _BINARY,
}


def check_switches() -> None:
    """Raises `InvalidRequestError` for a switch whose value means nothing. An empty value is the default."""
    for name, switch in SWITCHES.items():
        value = os.environ.get(name, "")
        if value and not re.fullmatch(switch.pattern, value):
            raise InvalidRequestError(f"the environment says {name}={value!r}, but its value must be {switch.words}")


def is_on(name: str, default: bool) -> bool:
    """What a switch of 0 or 1 says, once `check_switches` has passed."""
    value = os.environ.get(name, "")
    return value == "1" if value else default


def misspelt_switches() -> list[tuple[str, str]]:
    """Variables that no part of Sharpi reads, each with the switch that was probably meant."""
    found = []
    for name in sorted(os.environ):
        if name.startswith("SHARPI_") and name not in SWITCHES:
            found += [(name, meant) for meant in difflib.get_close_matches(name, SWITCHES, 1, 0.85)]
    return found
