"""The limits of what a chat template may take, and what the operations of one are charged.

A template is a program from a model file. Jinja's sandbox keeps it from reaching anything but its variables. It does
not keep it from running forever or from taking all memory: `"a" * 5000000000` is one step. `Limits` counts both:

- *Steps* stand for time. Each run of a loop's or macro's body costs as many as the body has nodes, each call a few, and
  an operation on text or on a list one for a number of its characters or elements.
- *Made bytes* stand for memory: every text and list that is made counts, whether it is still needed or not.

Both are counted, not measured, so a template ends alike on every machine. What could be large is refused before it is
made: the checks below know it of methods, operators and filters. One that they do not know takes small values only.
`template_sandbox` sees to it that all is charged.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

from jinja2.utils import Namespace

__all__ = ["Limits", "TemplateLimitError"]

MAX_STEPS, MAX_MADE = 20_000_000, 128 << 20
PER_CHARACTER = 32  # beyond both, for each character of the conversation
MAX_DEPTH, MAX_BITS, MAX_DIGITS, MAX_RARE = 200, 4096, 5, 10_000

PIECE, _ELEMENT = 56, 64  # bytes that a text and an element of a list take beside their characters
PER_STEP = 64  # characters that are read or written in the time of a step
_LONGEST_REPR = 10  # characters that repr or JSON may write for one: \U0001f600


class TemplateLimitError(Exception):
    """A template went beyond its limits. The message continues "the chat template ..."."""


class Limits:
    """What one rendering may take, and what it has taken."""

    def __init__(self) -> None:
        self.steps = self.made = 0
        self._most_steps, self._most_made = MAX_STEPS, MAX_MADE

    def start(self, variables: Mapping[str, Any]) -> None:
        """Begins a rendering of `variables`: a long conversation may take more."""
        self._most_steps, self._most_made = sys.maxsize, MAX_MADE
        more = PER_CHARACTER * self.measure(dict(variables))
        self._most_steps, self._most_made = MAX_STEPS + more, MAX_MADE + more
        self.steps = self.made = 0

    def spend(self, steps: int) -> None:
        """Charges steps."""
        self.steps += steps
        if self.steps > self._most_steps:
            raise TemplateLimitError(f"takes more than {self._most_steps:,} steps")

    def require(self, count: int) -> None:
        """Refuses to make `count` bytes more, if they are too many, before they are made."""
        if self.made + count > self._most_made:
            raise TemplateLimitError(f"makes more than {self._most_made >> 20} MiB of text and lists")

    def make(self, count: int) -> None:
        """Charges bytes that have been made."""
        self.require(count)
        self.made += count
        self.spend(count // PER_STEP)

    def measure(self, value: Any) -> int:
        """Charges a walk through `value` and everything in it, as often as it is in it; returns the characters."""
        if isinstance(value, str):
            self.spend(1 + len(value) // PER_STEP)
            return len(value)
        self.spend(5)
        characters, depth, level = 0, 0, [value]
        while level:
            depth += 1
            if depth > MAX_DEPTH:
                raise TemplateLimitError(f"nests lists more than {MAX_DEPTH} deep")
            following: list[Any] = []
            for item in level:
                if isinstance(item, str):
                    characters += len(item)
                    continue
                characters += 16 if not isinstance(item, int) else 8 + item.bit_length() // 3
                if isinstance(item, Namespace):
                    item = vars(item).get("_Namespace__attrs", ())
                if isinstance(item, _WALKED):
                    self.spend(2 * len(item))
                    following.extend(item)
                    if isinstance(item, Mapping):
                        following.extend(item.values())
            self.spend(len(level))
            level = following
        self.spend(characters // PER_STEP)
        return characters

    def written(self, value: Any) -> None:
        """Charges what `str(value)` may take, in steps, and refuses it if its text could be too long."""
        if not isinstance(value, str):
            self.require(_LONGEST_REPR * self.measure(value))
        else:
            self.spend(1 + len(value) // PER_STEP)

    def result(self, value: Any) -> Any:
        """Charges what an operation has made, and returns it; an iterator is charged for its elements as they come."""
        if isinstance(value, str):
            self.make(PIECE + (len(value) if value.isascii() else 4 * len(value)))
        elif isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise TemplateLimitError(f"computes with numbers of more than {MAX_BITS} bits")
        elif isinstance(value, (list, tuple, dict)):
            self.make(PIECE + _ELEMENT * len(value))
        elif isinstance(value, Iterator):
            return self._counted(value)
        return value

    def _counted(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self.spend(5)
            if isinstance(value, tuple):
                self.measure(value)  # it may become a key, whose hash walks through it
            if isinstance(value, (str, list, tuple)):
                self.result(value)
            yield value


VIEWS: Any = (type({}.keys()), type({}.values()), type({}.items()))
_WALKED: Any = (dict, list, tuple, set, frozenset, Mapping, *VIEWS)


# --- operators and methods ----------------------------------------------------------------------------------------


def check_widths(limits: Limits, pattern: str) -> None:
    widths = re.findall(r"\d+", pattern)
    if any(len(width) > MAX_DIGITS for width in widths):
        raise TemplateLimitError(f"formats with a width of more than {MAX_DIGITS} digits")
    limits.spend(1 + len(pattern) // 8)
    limits.require(sum(map(int, widths)))


def check_percent(limits: Limits, pattern: str, values: Any) -> None:
    check_widths(limits, pattern)
    limits.written(values)
    if "*" in pattern and isinstance(values, tuple):  # widths that are values
        for value in values:
            if isinstance(value, int):
                check_widths(limits, str(value))


def check_product(limits: Limits, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_BITS + 1:
            raise TemplateLimitError(f"computes with numbers of more than {MAX_BITS} bits")
        return
    for some, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(some, (str, bytes)):
            limits.require(4 * len(some) * times)
        elif isinstance(times, int) and isinstance(some, Sized):
            limits.require(_ELEMENT * len(some) * times)


def check_append(limits: Limits, value: Any) -> None:
    if value is not None and not isinstance(value, (str, int, float)):
        raise TemplateLimitError(f"appends a {type(value).__name__} to a list; texts and numbers can be")
    limits.make(_ELEMENT)


# --- text ---------------------------------------------------------------------------------------------------------


def _check_width(limits: Limits, text: str, width: Any = 80, *_: Any, **__: Any) -> None:
    if isinstance(width, int):
        limits.require(4 * (len(text) + width))


def _check_tabs(limits: Limits, text: str, tabsize: Any = 8) -> None:
    if isinstance(tabsize, int):
        limits.require(4 * (len(text) + text.count("\t") * tabsize))


def _check_replace(limits: Limits, text: str, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        found = text.count(old)
        limits.require(4 * (len(text) + found * max(0, len(new) - len(old))))
        limits.spend(found)


def _check_join(limits: Limits, text: str, values: Any = (), *_: Any) -> None:
    count = len(values) if isinstance(values, Sized) else 0
    limits.require(4 * len(text) * count)
    if not isinstance(values, str):
        limits.require(limits.measure(values))


def _check_split(limits: Limits, text: str, separator: Any = None, *_: Any, **__: Any) -> None:
    """Text by text: searching from the end, and stripping, may take the product of the lengths."""
    parts = text.count(separator) if isinstance(separator, str) and separator else len(text) // 2
    limits.require(_ELEMENT * parts)
    _check_search(limits, text, separator)


def _check_search(limits: Limits, text: str, wanted: Any = None, *_: Any, **__: Any) -> None:
    if isinstance(wanted, str):
        limits.spend(len(text) * len(wanted) // PER_STEP)


def _check_rare(limits: Limits, text: Any, *args: Any, **options: Any) -> None:
    """For what may take a high power of its text's length, and is seldom used."""
    if limits.measure([text, *args, *options.values()]) > MAX_RARE:
        raise TemplateLimitError(f"uses a filter that takes texts of up to {MAX_RARE:,} characters with a longer one")
    for value in (*args, *options.values()):
        if isinstance(value, (int, float)) and not -MAX_RARE <= value <= MAX_RARE:
            raise TemplateLimitError(f"uses a filter that takes numbers of up to {MAX_RARE:,} with a larger one")


TEXT_CHECKS: dict[str, Callable[..., None]] = {
    "center": _check_width, "ljust": _check_width, "rjust": _check_width, "zfill": _check_width,
    "expandtabs": _check_tabs, "replace": _check_replace, "join": _check_join,
    "split": _check_split, "rsplit": _check_split, "splitlines": _check_split,
    **dict.fromkeys(("rfind", "rindex", "rpartition", "strip", "lstrip", "rstrip"), _check_search),
    "striptags": _check_rare, "unescape": _check_rare,
}


# --- filters and tests --------------------------------------------------------------------------------------------


def _check_text(limits: Limits, value: Any, *args: Any, **_: Any) -> None:
    limits.written(value)
    for argument in args:
        limits.measure(argument)


def _check_deep(limits: Limits, value: Any, *args: Any, **options: Any) -> None:
    """For filters that compare, hash or add up elements."""
    count = len(value) if isinstance(value, Sized) else 1
    before = limits.steps
    limits.require(_LONGEST_REPR * limits.measure([value, *args, *options.values()]))
    limits.spend((limits.steps - before) * count.bit_length())


def _check_sum(limits: Limits, value: Any, attribute: Any = None, start: Any = 0) -> None:
    _check_deep(limits, value, start)
    if isinstance(start, (list, tuple)) and isinstance(value, Sized):
        parts: Any = value
        limits.require(_ELEMENT * len(parts) * sum(len(part) for part in parts if isinstance(part, Sized)) // 2)


def _check_list(limits: Limits, value: Any, *_: Any, **__: Any) -> None:
    if isinstance(value, Sized):
        limits.require(_ELEMENT * len(value))


def _check_joined(limits: Limits, value: Any, d: Any = "", attribute: Any = None) -> None:
    if isinstance(value, Iterable):
        limits.require(_LONGEST_REPR * limits.measure(value))
        _check_join(limits, str(d), value)


def _check_replaced(limits: Limits, value: Any, old: Any = "", new: Any = "", count: Any = None) -> None:
    for part in (value, old, new):
        limits.written(part)
    _check_replace(limits, str(value), str(old), str(new))


def _check_indent(limits: Limits, value: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    limits.written(value)
    size = width if isinstance(width, int) else len(width) if isinstance(width, str) else 0
    limits.require(4 * size * (1 + len(str(value).splitlines())))


def _check_format(limits: Limits, value: Any, *args: Any, **options: Any) -> None:
    limits.written(value)
    check_percent(limits, str(value), args or options)


def _check_trim(limits: Limits, value: Any, chars: Any = None) -> None:
    limits.written(value)
    _check_search(limits, str(value), chars)


def _check_batch(limits: Limits, value: Any, linecount: Any = 0, fill_with: Any = None) -> None:
    _check_list(limits, value)
    if fill_with is not None and isinstance(linecount, int):
        limits.require(_ELEMENT * linecount)


def _check_nothing(limits: Limits, value: Any, *args: Any, **options: Any) -> None:
    return None


_FILTER_CHECKS: dict[str, Callable[..., None]] = {
    **dict.fromkeys("abs attr count d default first float items last length map random reject rejectattr safe select "
                    "selectattr tojson".split(), _check_nothing),
    **dict.fromkeys("capitalize e escape forceescape int lower string title truncate upper urlencode wordcount".split(),
                    _check_text),
    **dict.fromkeys("dictsort groupby max min sort unique".split(), _check_deep),
    **dict.fromkeys(("list", "reverse", "slice"), _check_list),
    "batch": _check_batch, "center": _check_width, "format": _check_format, "indent": _check_indent,
    "join": _check_joined, "replace": _check_replaced, "sum": _check_sum,
    "trim": _check_trim,
}
_WALKING = frozenset(name for name, check in _FILTER_CHECKS.items()
                     if check in (_check_deep, _check_sum, _check_joined))
COMPARING_TESTS = frozenset("== eq equalto != ne > gt greaterthan >= ge < lt lessthan <= le in upper lower".split())


def metered_filter(limits: Limits, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, which charges for what it does; `functools.wraps` hands on what Jinja marks filters with."""
    check: Callable[..., None] = _FILTER_CHECKS.get(name, _check_rare)
    at = 1 if getattr(run, "jinja_pass_arg", None) is not None else 0  # behind the context, which some filters take

    @functools.wraps(run)
    def metered(*args: Any, **options: Any) -> Any:
        limits.spend(5)
        before, (value, *rest) = args[:at], args[at:]
        if name in _WALKING and isinstance(value, Iterator):
            value = list(limits.result(value))
        check(limits, value, *rest, **options)
        return limits.result(run(*before, value, *rest, **options))

    return metered


def metered_test(limits: Limits, run: Any) -> Callable[..., Any]:
    @functools.wraps(run)
    def metered(*values: Any) -> Any:
        for value in values:
            limits.written(value)
        return run(*values)

    return metered
