"""Where special tokens stand in a text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

__all__ = ["SpecialTokens"]

_PREFIX = 2  # characters


class SpecialTokens:
    """Finds some tokens in texts: the leftmost first, and the longest of those that begin at one place.

    The time grows with the text alone. A pattern of all tokens would try each of them wherever one could begin, and
    some vocabularies have thousands that begin with "<".
    """

    def __init__(self, id_of: Mapping[str, int]) -> None:
        self._id_of = id_of
        firsts = "".join({text[0] for text in id_of})
        self._begins = re.compile(f"[{re.escape(firsts)}]") if firsts else None
        lengths: dict[str, set[int]] = {}
        for text in id_of:
            lengths.setdefault(text[:_PREFIX], set()).add(len(text))
        for prefix, found in lengths.items():
            if prefix[0] in lengths:  # a token of one character
                found.add(1)
        self._lengths = {prefix: sorted(found, reverse=True) for prefix, found in lengths.items()}

    def split(self, text: str) -> Iterator[tuple[str, int | None]]:
        """The text in parts: each a token with its id, or what lies between two of them and None."""
        done = at = 0
        while self._begins is not None and (match := self._begins.search(text, at)) is not None:
            at = match.start()
            length = next((n for n in self._lengths_at(text, at) if text[at:at + n] in self._id_of), 0)
            if not length:
                at += 1
                continue
            if done < at:
                yield text[done:at], None
            done = at + length
            yield text[at:done], self._id_of[text[at:done]]
            at = done
        if done < len(text):
            yield text[done:], None

    def _lengths_at(self, text: str, at: int) -> Sequence[int]:
        """The lengths of the tokens that may begin there."""
        found = self._lengths.get(text[at:at + _PREFIX])
        return self._lengths.get(text[at], ()) if found is None else found
