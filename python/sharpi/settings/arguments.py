"""Checks what callers of the Python API pass in: each refusal is an `InvalidRequestError` that names the argument."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from sharpi.errors import InvalidRequestError

__all__ = ["flag", "function", "maybe", "number", "path", "shown", "text", "token_ids", "token_numbers", "whole"]

T = TypeVar("T")

_MOST_TOKEN = (1 << 31) - 1


def shown(value: Any) -> str:
    """`value` for a message: on one line, and short even if the value is long."""
    return " ".join(reprlib.repr(value).split())


def maybe(check: Callable[[str, Any], T], name: str, value: Any) -> T | None:
    """What `check` gives, or `None` for `None`."""
    return None if value is None else check(name, value)


def whole(name: str, value: Any) -> int:
    """A whole number; numpy's are taken, True and False are not."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    raise InvalidRequestError(f"{name} must be a whole number, not {shown(value)}")


def number(name: str, value: Any) -> float:
    """A number that a float can hold; infinity and NaN are left to whoever knows the range."""
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    raise InvalidRequestError(f"{name} must be a number, not {shown(value)}")


def flag(name: str, value: Any) -> bool:
    """True or False; numpy's, 1 and 0 mean the same."""
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise InvalidRequestError(f"{name} must be true or false, not {shown(value)}")


def text(name: str, value: Any) -> str:
    """A string."""
    if isinstance(value, str):
        return value
    raise InvalidRequestError(f"{name} must be text, not {shown(value)}")


def path(name: str, value: Any) -> str | os.PathLike[str]:
    """A path as text or as a `PathLike` of text."""
    if isinstance(value, os.PathLike) and isinstance(os.fspath(value), str):
        return value
    if isinstance(value, str):
        return value
    raise InvalidRequestError(f"{name} must be a path, not {shown(value)}")


def function(name: str, value: Any) -> Callable[..., Any]:
    """Something that can be called."""
    if callable(value):
        return value
    raise InvalidRequestError(f"{name} must be a function, not {shown(value)}")


def token_ids(name: str, value: Any, *, what: str = "token ids") -> list[int]:
    """Token ids, as the core takes them. what: how a message words a sequence of them."""
    try:
        ids = np.asarray(value)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) <= _MOST_TOKEN:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequestError(f"{name} must be {what}, each 0 to 2^31 - 1, not {shown(value)}") from None
    return [int(i) for i in ids]


def token_numbers(name: str, value: Any) -> dict[int, float]:
    """A number for each of some tokens."""
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{name} must map token ids to numbers, not be {shown(value)}")
    numbers = {whole(f"a token of {name}", token): number(f"{name}[{shown(token)}]", amount)
               for token, amount in value.items()}
    for token in numbers:
        if not 0 <= token <= _MOST_TOKEN:
            raise InvalidRequestError(f"{name} names the token {token}: token ids are 0 to 2^31 - 1")
    return numbers
