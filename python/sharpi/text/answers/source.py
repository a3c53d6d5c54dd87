"""A text that arrives in pieces, for parsers that are written as if all of it were there.

A parser is a generator: it yields if it needs more text, and its result does not depend on how the text is cut.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

__all__ = ["MisreadError", "Parse", "Source"]

T = TypeVar("T")
Parse = Generator[None, None, T]

_SPACE = re.compile(r"\s*")


class _Finder:
    """Finds marks in texts."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self.pattern = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        self._beginnings = frozenset(mark[:size] for mark in marks for size in range(1, len(mark)))
        self.firsts = frozenset(mark[0] for mark in marks)
        self._longest = max(map(len, marks), default=1)

    def pending(self, text: str, at: int) -> int:
        """Where a mark may begin of which only a part is there; the end of the text if nowhere."""
        for place in range(max(at, len(text) - self._longest + 1), len(text)):
            if text[place] in self.firsts and text[place:] in self._beginnings:
                return place
        return len(text)


_finder = functools.lru_cache(_Finder)


class MisreadError(Exception):
    """The text is not what the parser reads."""


class Source:
    """The text that was pushed and not yet read. `text[at:]` comes next."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._held: int | None = None

    def push(self, text: str) -> None:
        begin = self.at if self._held is None else self._held
        self.text = self.text[begin:] + text
        self.at -= begin
        if self._held is not None:
            self._held = 0

    def hold(self, at: int | None = None) -> None:
        """What follows is kept until `release`, so that `rewind` can return to it."""
        self._held = self.at if at is None else at

    def release(self) -> None:
        self._held = None

    def rewind(self) -> None:
        """Back to the place of `hold`, which is released."""
        assert self._held is not None
        self.at, self._held = self._held, None

    def more(self) -> Parse[bool]:
        """Waits for more text; false at its end. What comes may be empty."""
        if self.ended:
            return False
        yield
        return True

    def skip_space(self) -> Parse[None]:
        while True:
            found = _SPACE.match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            if self.at < len(self.text) or not (yield from self.more()):
                return

    def next_of(self, *texts: str) -> Parse[str]:
        """Which of `texts` comes next, the longest if several do, or ""; nothing is read."""
        while any(len(text) > len(self.text) - self.at and text.startswith(self.text[self.at:]) for text in texts):
            if not (yield from self.more()):
                break
        return max((text for text in texts if self.text.startswith(text, self.at)), key=len, default="")

    def take(self, *texts: str) -> Parse[str]:
        """Reads the one of `texts` that comes next; "" if none does."""
        found = yield from self.next_of(*texts)
        self.at += len(found)
        return found

    def expect(self, *texts: str) -> Parse[str]:
        """As `take`. Raises `MisreadError` if none comes next."""
        found = yield from self.take(*texts)
        if not found:
            raise MisreadError
        return found

    def until(self, marks: Sequence[str], emit: Callable[[str], None]) -> Parse[str]:
        """Emits the text before the first of `marks`, as soon as it cannot be part of one, and reads the mark; "" at
        the text's end. The longest of the marks that begin at one place counts."""
        finder = _finder(tuple(marks))
        while True:
            found, begin = None, len(self.text)
            if not finder.firsts.isdisjoint(self.text[self.at:]):  # a cheap look, as most text has no mark
                found = finder.pattern.search(self.text, self.at)
                begin = found.start() if found else begin
                if not self.ended:  # a longer mark may begin at the same place or before
                    begin = min(begin, finder.pending(self.text, self.at))
            if begin > self.at:
                emit(self.text[self.at:begin])
                self.at = begin
            if found and found.start() == begin:
                whole = yield from self.next_of(*marks)
                self.at += len(whole)
                return whole
            if self.ended:
                return ""
            yield
