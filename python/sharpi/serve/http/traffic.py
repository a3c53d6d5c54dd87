"""How many requests are being served, and whether further ones are taken."""

from __future__ import annotations

__all__ = ["Traffic"]


class Traffic:
    """active: requests that have begun and not ended. ending: no further ones are taken."""

    def __init__(self) -> None:
        self.active = 0
        self.ending = False
