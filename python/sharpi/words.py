"""Sizes, speeds and numbers of things, worded for people."""

from __future__ import annotations

__all__ = ["plural", "seconds", "size", "speed"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: int) -> str:
    """A number of bytes for people: `17 B`, `4.2 KiB`, `1.50 GiB`."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    unit = 0
    # 1023.95 and up would round to "1024.0" of the unit; the next one says it better.
    while value >= 1023.95 and unit + 1 < len(_UNITS):
        value /= 1024
        unit += 1
    return f"{value:.2f} {_UNITS[unit]}" if unit >= 3 else f"{value:.1f} {_UNITS[unit]}"


def speed(tokens_per_second: float) -> str:
    """Tokens a second, with as many digits as mean something."""
    return f"{tokens_per_second:.1f}" if tokens_per_second < 1000 else f"{tokens_per_second:,.0f}"


def seconds(count: float) -> str:
    """A time: `35 ms`, `1.2 s`, `90 s`, `1,200 s`."""
    if count < 1:
        return f"{1000 * count:.0f} ms"
    return f"{count:.1f} s" if count < 60 else f"{count:,.0f} s"


def plural(count: int, noun: str) -> str:
    """`1 token`, `2,000 tokens`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
