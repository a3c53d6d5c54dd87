"""Texts of answers, cut as tokens might cut them."""

from __future__ import annotations

import random

__all__ = ["cut_anywhere"]


def cut_anywhere(text: str, times: int = 50) -> list[list[str]]:
    """The text whole, by characters, and cut at random sets of places."""
    rng = random.Random(text)
    found = [[text], list(text)]
    for _ in range(times):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 6)))
        found.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    return found
