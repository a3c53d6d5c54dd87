"""The metadata of a model file, read with checks.

A file's metadata is whatever its writer put there: a number may stand where a flag belongs, an array where a name
belongs. `Metadata` is the one reader of these values. Each look-up names the type it wants, and a value of another
type ends in a `ModelFileError` that names the file, the key, the type found and the type wanted.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from sharpi.errors import ModelFileError

__all__ = ["LazyStringArray", "Metadata", "quoted"]

_LENGTH = struct.Struct("<Q")
_SMALL_ARRAY = 4096
_REQUIRED: Any = object()


class LazyStringArray(Sequence[str]):
    """An array of strings, kept as its bytes and decoded whole when an element is first asked for.

    Decoding raises `ModelFileError` if a string is not valid UTF-8.
    """

    def __init__(self, path: Path, key: str, raw: bytes, count: int) -> None:
        """`raw`: the strings as in the file (length, bytes, …), already known to hold exactly `count`."""
        self._path = path
        self._key = key
        self._raw = raw
        self._count = count
        self._strings: list[str] | None = None

    def decode(self) -> list[str]:
        """All strings; the same list at every call."""
        if self._strings is None:
            self._strings = self._decode()
            self._raw = b""
        return self._strings

    def _decode(self) -> list[str]:
        raw, length_at = self._raw, _LENGTH.unpack_from
        strings: list[str] = []
        append = strings.append
        position = 0
        try:
            for _ in range(self._count):
                start = position + 8
                position = start + length_at(raw, position)[0]
                append(str(raw[start:position], "utf-8"))
        except UnicodeDecodeError:
            raise ModelFileError.about(self._path, f"string {len(strings)} of {quoted(self._key)} is not valid UTF-8: "
                                                   "the file is damaged") from None
        return strings

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self.decode()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self.decode())

    def __repr__(self) -> str:
        return f"<LazyStringArray {self._key!r}, {self._count} strings>"


class Metadata(Mapping[str, Any]):
    """The metadata of the file at `path`, read-only.

    Values are Python numbers, bools and strings, read-only numpy arrays, a `LazyStringArray` for an array of strings,
    and a list for an array of arrays. As a mapping it gives them as they are, to show them. Code that acts on a value
    takes it from a `get_...` method, which raises `ModelFileError` if the value has another type, or is missing and
    has no default.
    """

    def __init__(self, path: str | os.PathLike[str], values: Mapping[str, Any]) -> None:
        self._path = Path(path)
        self._values = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<Metadata of {str(self._path)!r}, {len(self)} keys>"

    @property
    def path(self) -> Path:
        """The file that the metadata is from."""
        return self._path

    def error(self, what: str) -> ModelFileError:
        """A `ModelFileError` about this file."""
        return ModelFileError.about(self._path, what)

    def scalars(self) -> dict[str, Any]:
        """The metadata without its bulk: numbers, bools, strings and numeric arrays of up to 4096 elements. An empty
        tuple stands for any other array, so that a reader sees that the key is there and holds no scalar."""
        def brief(value: Any) -> Any:
            small = isinstance(value, (bool, int, float, str)) or (
                isinstance(value, np.ndarray) and value.size <= _SMALL_ARRAY)
            return value if small else ()

        return {key: brief(value) for key, value in self._values.items()}

    def get_int(self, key: str, default: Any = _REQUIRED, *, minimum: int | None = None,
                maximum: int | None = None) -> Any:
        """The integer at `key`; `default` if it is absent. A value outside the range is refused like a wrong type."""
        value = self._get(key, default, int, "an integer")
        if key in self._values and minimum is not None and value < minimum:
            raise self.error(f"{quoted(key)} is {value}, less than {minimum}")
        if key in self._values and maximum is not None and value > maximum:
            raise self.error(f"{quoted(key)} is {value}, more than {maximum}")
        return value

    def get_float(self, key: str, default: Any = _REQUIRED) -> Any:
        """The number at `key` as a float; `default` if it is absent."""
        value = self._get(key, default, (int, float), "a number")
        return float(value) if key in self._values else value

    def get_bool(self, key: str, default: Any = _REQUIRED) -> Any:
        """The bool at `key`; `default` if it is absent."""
        return self._get(key, default, bool, "a bool")

    def get_str(self, key: str, default: Any = _REQUIRED) -> Any:
        """The string at `key`; `default` if it is absent."""
        return self._get(key, default, str, "a string")

    def get_strings(self, key: str, default: Any = _REQUIRED) -> Any:
        """The array of strings at `key`, not yet decoded; `default` if it is absent."""
        return self._get(key, default, LazyStringArray, "an array of strings")

    def get_ints(self, key: str, default: Any = _REQUIRED) -> Any:
        """The array of integers at `key` (numpy, its type as in the file); `default` if it is absent."""
        return self._get_numbers(key, default, "iu", "an array of integers")

    def get_floats(self, key: str, default: Any = _REQUIRED) -> Any:
        """The array of floats at `key` (numpy, its type as in the file); `default` if it is absent."""
        return self._get_numbers(key, default, "f", "an array of floats")

    def _get(self, key: str, default: Any, kind: type | tuple[type, ...], kind_name: str) -> Any:
        if key not in self._values:
            if default is _REQUIRED:
                raise self.error(f"metadata key {quoted(key)} is missing")
            return default
        value = self._values[key]
        # bool is a subclass of int, but a flag where a size belongs is a damaged file.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(f"{quoted(key)} is {_kind_of(value)}, not {kind_name}")
        return value

    def _get_numbers(self, key: str, default: Any, dtype_kinds: str, kind_name: str) -> Any:
        value = self._get(key, default, np.ndarray, kind_name)
        if key in self._values and value.dtype.kind not in dtype_kinds:
            raise self.error(f"{quoted(key)} is {_kind_of(value)}, not {kind_name}")
        return value


def _kind_of(value: Any) -> str:
    # bool before int, whose subclass it is.
    names = {bool: "a bool", int: "an integer", float: "a float", str: "a string",
             LazyStringArray: "an array of strings"}
    for kind, name in names.items():
        if isinstance(value, kind):
            return name
    return f"an array of {value.dtype.name}" if isinstance(value, np.ndarray) else "an array of arrays"


def quoted(name: str) -> str:
    """`name` in quotes for an error message, cut short if a damaged length made it absurd."""
    return repr(name if len(name) <= 80 else name[:77] + "...")
