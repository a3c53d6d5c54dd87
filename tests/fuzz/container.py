"""GGUF headers taken apart and put together again, for tests that change single values of a real file.

Unlike `sharpi.files.gguf` it keeps every value as the bytes that are in the file, and writes whatever it is told to.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

BOOL, STRING, ARRAY = 7, 8, 9
U32, I32, F32, U64, I64, F64 = 4, 5, 6, 10, 11, 12
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}


def text(value: str | bytes) -> bytes:
    """A string as a file holds it."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: int, value: Any) -> bytes:
    """A value of a scalar type, or a string, as a file holds it."""
    return text(value) if kind == STRING else struct.pack("<" + FORMATS[kind], value)


def array(kind: int, values: list[Any]) -> bytes:
    """An array of scalars or strings as a file holds it."""
    return struct.pack("<IQ", kind, len(values)) + b"".join(scalar(kind, value) for value in values)


@dataclass(frozen=True)
class Tensor:
    """A row of the tensor table."""

    name: bytes
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True)
class Container:
    """A header: the metadata as key → (type, bytes), the tensor table, and the number of data bytes that follow."""

    metadata: dict[bytes, tuple[int, bytes]]
    tensors: list[Tensor]
    data_bytes: int
    version: int = 3
    alignment: int = 32
    counts: tuple[int, int] | None = field(default=None)  # instead of the true numbers of tensors and entries

    @classmethod
    def read(cls, path: Path) -> Container:
        """The header of an undamaged file."""
        raw = path.read_bytes()
        version, tensor_count, entry_count = struct.unpack_from("<IQQ", raw, 4)
        at, metadata, tensors = 24, {}, []
        for _ in range(entry_count):
            key, at = _string(raw, at)
            kind, = struct.unpack_from("<I", raw, at)
            end = _value_end(raw, at + 4, kind)
            metadata[key] = kind, raw[at + 4:end]
            at = end
        for _ in range(tensor_count):
            name, at = _string(raw, at)
            rank, = struct.unpack_from("<I", raw, at)
            *shape, kind, offset = struct.unpack_from(f"<{rank}QIQ", raw, at + 4)
            tensors.append(Tensor(name, tuple(shape), kind, offset))
            at += 4 + 8 * rank + 12
        return cls(metadata, tensors, len(raw) - -(-at // 32) * 32, version)

    def header(self) -> bytes:
        """The bytes of the header, padded up to the data."""
        tensor_count, entry_count = self.counts or (len(self.tensors), len(self.metadata))
        parts = [struct.pack("<4sIQQ", b"GGUF", self.version, tensor_count, entry_count)]
        parts += [text(key) + struct.pack("<I", kind) + raw for key, (kind, raw) in self.metadata.items()]
        parts += [text(t.name) + struct.pack(f"<I{len(t.shape)}QIQ", len(t.shape), *t.shape, t.type, t.offset)
                  for t in self.tensors]
        raw = b"".join(parts)
        return raw + bytes(-len(raw) % self.alignment)

    def write(self, path: Path) -> Path:
        """A file with this header, and zeros for data."""
        header = self.header()
        with open(path, "wb") as stream:
            stream.write(header)
            stream.truncate(len(header) + self.data_bytes)
        return path

    def with_value(self, key: str, kind: int, raw: bytes) -> Container:
        """A copy with this value replaced or added."""
        return replace(self, metadata={**self.metadata, key.encode(): (kind, raw)})

    def without(self, start: str) -> Container:
        """A copy without the keys that begin with `start`."""
        kept = {key: value for key, value in self.metadata.items() if not key.startswith(start.encode())}
        return replace(self, metadata=kept)


def _string(raw: bytes, at: int) -> tuple[bytes, int]:
    length, = struct.unpack_from("<Q", raw, at)
    return raw[at + 8:at + 8 + length], at + 8 + length


def _value_end(raw: bytes, at: int, kind: int) -> int:
    if kind == STRING:
        return _string(raw, at)[1]
    if kind != ARRAY:
        return at + struct.calcsize("<" + FORMATS[kind])
    kind, count = struct.unpack_from("<IQ", raw, at)
    at += 12
    if kind in FORMATS:
        return at + count * struct.calcsize("<" + FORMATS[kind])
    for _ in range(count):
        at = _value_end(raw, at, kind)
    return at
