"""Where special tokens stand in a text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

__all__ = ["SpecialTokens"]

_PREFIX = 2  # characters


class SpecialTokens:
    """Finds some tokens in texts: the leftmost first, and the longest of those that begin at one place.

    The time grows with the text alone. A pattern of all tokens would try each of them wherever one could begin, and
    some vocabularies have thousands that begin with "<".
    """

    def __init__(self, id_of: Mapping[str, int]) -> None:
        self._id_of = id_of
        prefixes = sorted({text[:_PREFIX] for text in id_of}, key=len, reverse=True)
        self._begins = re.compile("|".join(map(re.escape, prefixes))) if prefixes else None
        lengths: dict[str, set[int]] = {prefix: set() for prefix in prefixes}
        for text in id_of:
            for prefix in prefixes:
                if prefix.startswith(text[:_PREFIX]):
                    lengths[prefix].add(len(text))
        self._lengths = {prefix: sorted(found, reverse=True) for prefix, found in lengths.items()}

    def split(self, text: str) -> Iterator[tuple[str, int | None]]:
        """The text in parts: each a token with its id, or what lies between two of them and None."""
        done = at = 0
        while self._begins is not None and (match := self._begins.search(text, at)) is not None:
            at = match.start()
            length = next((n for n in self._lengths[match[0]] if text[at:at + n] in self._id_of), 0)
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
