"""Reads the container of GGUF model files: metadata, and where each tensor's bytes lie.

Sharpi has its own reader because opening a model must be quick and must never trust the file. The `gguf` package
builds several Python objects for each of the 250,000 and more strings of a vocabulary; this one walks over them and
decodes a vocabulary when it is first asked for. And whatever bytes a file holds, opening it ends in a `GgufFile` or
in a `ModelFileError` that says in one line what is wrong.

Tensor data is never read here: the core maps the files itself, at the offsets found here.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from sharpi.errors import ModelFileError
from sharpi.files.metadata import LazyStringArray, Metadata, quoted

__all__ = ["TENSOR_TYPES", "GgufFile", "LazyStringArray", "TensorInfo", "TensorType", "fingerprint",
           "has_whole_header"]


class TensorType(NamedTuple):
    """How a tensor type is stored: blocks of `block_elements` neighbours in a row, `block_bytes` bytes each."""

    name: str
    block_elements: int
    block_bytes: int


# What Sharpi computes with, by the number used in files. The `gguf` package has the same sizes, but importing it costs
# more than opening a model does; a test holds the two tables together.
TENSOR_TYPES: Mapping[int, TensorType] = MappingProxyType({
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    26: TensorType("I32", 1, 4),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
})

# Limits no real file comes near; they bound the time and memory a damaged or hostile one can take.
_MAX_HEADER_BYTES = 256 << 20
_MAX_ARRAY_ELEMENTS = 1 << 24
_MAX_NESTED_ELEMENTS = 1 << 16
_MAX_ARRAY_DEPTH = 4
_MAX_INT64 = (1 << 63) - 1

_DEFAULT_ALIGNMENT = 32
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: Mapping[int, struct.Struct] = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: _U32, 5: struct.Struct("<i"), 6: struct.Struct("<f"), _BOOL: struct.Struct("<B"),
    10: _U64, 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}
# The least room one entry takes: key length, type, a one-byte value; name length, rank, one extent, type, offset.
_MIN_ENTRY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: what it is and where its bytes are.

    `shape` is in GGUF order: `shape[0]` is the length of a row, whose elements lie next to each other. `file` is an
    index into `GgufFile.paths`, `offset` counts from the start of that file.
    """

    name: str
    type: int
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int

    @property
    def type_name(self) -> str:
        """The type's name, such as "Q4_K"."""
        return TENSOR_TYPES[self.type].name


@dataclass(frozen=True, eq=False)
class GgufFile:
    """An opened model: one file, or all parts of a split one. Make it with `GgufFile.open`.

    `metadata` gives checked access to the values in the header. For a split model it is that of the first part.
    """

    paths: list[Path]
    version: int
    metadata: Metadata
    tensors: list[TensorInfo]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GgufFile:
        """Opens the model at `path`, which may be any part of a split one. Raises `ModelFileError` for every kind of
        bad file."""
        path = Path(path)
        paths = _all_parts(path)
        parts = [_read_part(part_path, index) for index, part_path in enumerate(paths)]
        _check_split(paths, parts)
        model = cls(paths, parts[0].version, parts[0].metadata, [tensor for part in parts for tensor in part.tensors])
        if not model.metadata.get_str("general.architecture"):
            raise model.error("'general.architecture' is empty")
        return model

    def __repr__(self) -> str:
        parts = "" if len(self.paths) == 1 else f" in {len(self.paths)} parts"
        return f"<GgufFile {str(self.paths[0])!r}{parts}: {self.name!r}, {len(self.tensors)} tensors>"

    @property
    def architecture(self) -> str:
        """The model's family, such as "qwen3moe"."""
        return self.metadata["general.architecture"]

    @property
    def name(self) -> str:
        """The model's name for people: `general.name`, else the file's name. A name of a wrong type is the core's to
        refuse: the files that cannot run have to be shown under some name too."""
        name = self.metadata.get("general.name")
        return name if isinstance(name, str) and name else self.paths[0].stem

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def error(self, what: str) -> ModelFileError:
        """A `ModelFileError` about this model, for code that finds its contents wanting later on."""
        return self.metadata.error(what)


def fingerprint(file: GgufFile) -> str:
    """Tells models apart by their tensors: how many there are, and a digest of names, types and shapes in order."""
    digest = hashlib.sha256()
    for tensor in file.tensors:
        digest.update(repr((tensor.name, int(tensor.type), tuple(map(int, tensor.shape)))).encode())
    return f"{len(file.tensors)}-{digest.hexdigest()[:32]}"


class _HeaderEndsEarlyError(ModelFileError):
    """The bytes end before the header does."""


def has_whole_header(path: str | os.PathLike[str]) -> bool:
    """Whether a file's beginning, kept at `path`, holds all of its header: then a sparse file of the whole one's size
    is enough for `GgufFile.open`. Raises `ModelFileError` if what is there is wrong."""
    path = Path(path)
    mapped, size = _map_header(path)
    with mapped:
        try:
            # Where tensors end is not looked at: the file may be as long as it likes.
            _HeaderReader(path, 0, mapped, _MAX_INT64).read()
        except _HeaderEndsEarlyError:
            if size >= _MAX_HEADER_BYTES:
                raise
            return False
    return True


class _Part(NamedTuple):
    version: int
    metadata: Metadata
    tensors: list[TensorInfo]


def _all_parts(path: Path) -> list[Path]:
    """`path`, or all parts of the split model that its name says it belongs to."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) <= 1:
        return [path]
    count, part = int(match["count"]), int(match["part"])
    if not 1 <= part <= count:
        raise ModelFileError.about(path, f"the name says part {part} of {count}")
    paths = [path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    for other in paths:
        if not os.path.exists(other):
            raise ModelFileError.about(other, "no such file" if other == path else
                                       f"no such file, but the model is split into {count} parts and needs it")
    return paths


def _check_split(paths: list[Path], parts: list[_Part]) -> None:
    """That the parts name themselves as their file names do, and hold together the tensors of one model."""
    for index, (path, part) in enumerate(zip(paths, parts, strict=True)):
        if len(paths) > 1 and "split.count" not in part.metadata:
            raise ModelFileError.about(path, "is named like part of a split model, but has no 'split.count': "
                                             "rename it if it is whole")
        count = part.metadata.get_int("split.count", 1, minimum=0)
        number = part.metadata.get_int("split.no", 0, minimum=0)
        if max(count, 1) != len(paths):
            hint = ("rename it to NAME-00001-of-00002.gguf and so on, beside its other parts" if len(paths) == 1
                    else f"its name says {len(paths)}")
            raise ModelFileError.about(path, f"'split.count' is {count}; {hint}")
        if number != index:
            raise ModelFileError.about(path, f"'split.no' is {number}, but by its name it should be {index}")
    found = sum(len(part.tensors) for part in parts)
    expected = parts[0].metadata.get_int("split.tensors.count", found) if len(paths) > 1 else found
    if expected != found:
        raise ModelFileError.about(paths[0], f"'split.tensors.count' is {expected}, but the parts hold {found}")
    homes: dict[str, int] = {}
    for tensor in (tensor for part in parts for tensor in part.tensors):
        if homes.setdefault(tensor.name, tensor.file) != tensor.file:
            raise ModelFileError.about(paths[tensor.file], f"tensor {quoted(tensor.name)} is also in another part, "
                                                           f"{paths[homes[tensor.name]].name}")


def _read_part(path: Path, file: int) -> _Part:
    """Read the header of one file, `file` being its index among the model's parts."""
    mapped, size = _map_header(path)
    with mapped:
        return _HeaderReader(path, file, mapped, size).read()


def _map_header(path: Path) -> tuple[mmap.mmap, int]:
    """Map as much of the file as may be header; also its size."""
    try:
        # Asked before opening: opening a pipe would wait for someone to write to it.
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
            raise ModelFileError.about(path, f"is {kind}; a GGUF file was expected")
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size == 0:
                raise ModelFileError.about(path, "is empty")
            return mmap.mmap(stream.fileno(), min(size, _MAX_HEADER_BYTES), access=mmap.ACCESS_READ), size
    except FileNotFoundError as error:
        raise ModelFileError.about(path, "no such file") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path, or the file shrank just now
        raise ModelFileError.about(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from error


class _HeaderReader:
    """Walks one file's header from front to back. Nothing read is used before it was checked against the file."""

    def __init__(self, path: Path, file: int, mapped: mmap.mmap, size: int) -> None:
        self._path = path
        self._file = file
        self._mapped = mapped
        self._size = size
        self._position = 0
        self._nested = 0

    def read(self) -> _Part:
        version = self._read_version()
        tensor_count = self._number(_U64, "the header")
        entry_count = self._number(_U64, "the header")
        metadata = self._read_metadata(entry_count)
        self._check_room(tensor_count, _MIN_TENSOR_BYTES, "tensors")
        records = [self._read_tensor_record() for _ in range(tensor_count)]
        return _Part(version, metadata, self._place_tensors(records, self._alignment(metadata)))

    def _fail(self, what: str) -> ModelFileError:
        return ModelFileError.about(self._path, what)

    def _ends_early(self, where: str) -> ModelFileError:
        if len(self._mapped) < self._size:
            what = f"{where} reaches beyond the first {_MAX_HEADER_BYTES >> 20} MiB: the file is damaged"
        else:
            what = f"the file ends inside {where}, after {self._size:,} bytes: an incomplete download, or damaged"
        return _HeaderEndsEarlyError.about(self._path, what)

    def _number(self, layout: struct.Struct, where: str) -> Any:
        end = self._position + layout.size
        if end > len(self._mapped):
            raise self._ends_early(where)
        value = layout.unpack_from(self._mapped, self._position)[0]
        self._position = end
        return value

    def _bytes(self, count: int, where: str) -> bytes:
        end = self._position + count
        if end > len(self._mapped):
            raise self._ends_early(where)
        data = self._mapped[self._position:end]
        self._position = end
        return data

    def _string(self, where: str) -> str:
        start = self._position
        data = self._bytes(self._number(_U64, where), where)
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError:
            raise self._fail(f"{where}, at byte {start:,}, is not valid UTF-8: the file is damaged") from None

    def _check_room(self, count: int, least_bytes: int, things: str) -> None:
        """Checks a count from the file before anything is made with it: `count` things must fit into the rest of the
        file."""
        room = (len(self._mapped) - self._position) // least_bytes
        if count > room:
            raise _HeaderEndsEarlyError.about(self._path, f"the header counts {count:,} {things}, but only {room:,} "
                                                          "could fit: an incomplete download, or damaged")

    def _read_version(self) -> int:
        magic = self._mapped[:4]
        if magic != b"GGUF":
            raise self._fail(f"is not a GGUF file: {_looks_like(self._mapped[:512], self._size)}")
        self._position = 4
        version = self._number(_U32, "the header")
        if version in (2, 3):
            return version
        if version == 1:
            raise self._fail("GGUF version 1 is no longer read: convert the model again")
        if version & 0xFFFF == 0 and int.from_bytes(version.to_bytes(4, "little"), "big") <= 0xFFFF and version:
            raise self._fail("is a big-endian GGUF file, made for other processors: get the little-endian one")
        raise self._fail(f"GGUF version {version} is unknown (2 and 3 are read): "
                         "a newer file than this Sharpi, or damaged")

    def _read_metadata(self, count: int) -> Metadata:
        self._check_room(count, _MIN_ENTRY_BYTES, "metadata entries")
        metadata: dict[str, Any] = {}
        for index in range(count):
            key = self._string(f"the key of metadata entry {index}")
            if key in metadata:
                raise self._fail(f"metadata key {quoted(key)} appears twice")
            where = f"metadata {quoted(key)}"
            metadata[key] = self._value(self._number(_U32, where), key, where, 0)
        return Metadata(self._path, metadata)

    def _value(self, kind: int, key: str, where: str, depth: int) -> Any:
        if kind == _STRING:
            return self._string(where)
        if kind == _ARRAY:
            return self._array(key, where, depth + 1)
        if kind not in _SCALARS:
            raise self._fail(f"{where} has unknown value type {kind}")
        value = self._number(_SCALARS[kind], where)
        if kind != _BOOL:
            return value
        if value > 1:
            raise self._fail(f"{where} is a bool with value {value}: the file is damaged")
        return value == 1

    def _array(self, key: str, where: str, depth: int) -> Any:
        if depth > _MAX_ARRAY_DEPTH:
            raise self._fail(f"{where} nests arrays more than {_MAX_ARRAY_DEPTH} deep")
        kind = self._number(_U32, where)
        count = self._number(_U64, where)
        if count > _MAX_ARRAY_ELEMENTS:
            raise self._fail(f"{where} claims {count:,} elements: the file is damaged")
        if kind == _STRING:
            return self._string_array(key, where, count)
        if kind == _ARRAY:
            self._nested += count
            if self._nested > _MAX_NESTED_ELEMENTS:
                raise self._fail(f"{where} holds more than {_MAX_NESTED_ELEMENTS:,} arrays: the file is damaged")
            return [self._array(key, where, depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise self._fail(f"{where} is an array of unknown value type {kind}")
        layout = _SCALARS[kind]
        values = np.frombuffer(self._bytes(count * layout.size, where), dtype=np.dtype(layout.format))
        if kind == _BOOL:
            values = values != 0
            values.flags.writeable = False
        return values

    def _string_array(self, key: str, where: str, count: int) -> LazyStringArray:
        """Find the end of the array. This loop is most of the time that opening a model takes."""
        mapped, length_at = self._mapped, _U64.unpack_from
        start = position = self._position
        try:
            for _ in range(count):
                position += length_at(mapped, position)[0] + 8
        except (struct.error, OverflowError):
            raise self._ends_early(where) from None
        return LazyStringArray(self._path, key, self._bytes(position - start, where), count)

    def _alignment(self, metadata: Metadata) -> int:
        alignment = metadata.get_int("general.alignment", _DEFAULT_ALIGNMENT)
        if alignment < 8 or alignment & (alignment - 1):
            raise self._fail(f"'general.alignment' is {alignment}, not a power of two of at least 8")
        return alignment

    def _read_tensor_record(self) -> tuple[str, int, tuple[int, ...], int]:
        """The next entry of the tensor table: name, type, shape, offset from the start of the data."""
        name = self._string("a tensor's name")
        where = f"the entry of tensor {quoted(name)}"
        rank = self._number(_U32, where)
        if not 1 <= rank <= 4:
            raise self._fail(f"tensor {quoted(name)} has {rank} dimensions: 1 to 4 are possible")
        shape = tuple(self._number(_U64, where) for _ in range(rank))
        return name, self._number(_U32, where), shape, self._number(_U64, where)

    def _place_tensors(self, records: list[tuple[str, int, tuple[int, ...], int]],
                       alignment: int) -> list[TensorInfo]:
        """Check each tensor by itself and against the others, and turn offsets into places in the file."""
        data_start = -(-self._position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, kind, shape, offset in records:
            if name in tensors:
                raise self._fail(f"tensor {quoted(name)} appears twice")
            if offset % alignment:
                raise self._fail(f"tensor {quoted(name)} is at offset {offset}, not a multiple of {alignment}")
            nbytes = self._tensor_bytes(name, kind, shape)
            tensors[name] = TensorInfo(name, kind, shape, self._file, data_start + offset, nbytes)
        self._check_places(sorted(tensors.values(), key=lambda tensor: tensor.offset))
        return list(tensors.values())

    def _tensor_bytes(self, name: str, kind: int, shape: tuple[int, ...]) -> int:
        if kind not in TENSOR_TYPES:
            known = ", ".join(tensor_type.name for tensor_type in TENSOR_TYPES.values())
            raise self._fail(f"tensor {quoted(name)} has {_foreign_type(kind)}; Sharpi computes with {known}")
        _, block_elements, block_bytes = TENSOR_TYPES[kind]
        elements = 1
        for extent in shape:
            elements *= extent
        if elements == 0:
            raise self._fail(f"tensor {quoted(name)} has an empty dimension: shape {list(shape)}")
        if shape[0] % block_elements:
            raise self._fail(f"tensor {quoted(name)} has rows of {shape[0]} elements, but {TENSOR_TYPES[kind].name} "
                             f"packs them in blocks of {block_elements}")
        nbytes = elements // block_elements * block_bytes
        if max(elements, nbytes) > _MAX_INT64:
            raise self._fail(f"tensor {quoted(name)} is impossibly large: shape {list(shape)}")
        return nbytes

    def _check_places(self, by_offset: list[TensorInfo]) -> None:
        """That the tensors, given in order of offset, lie inside the file and apart from each other."""
        for tensor, following in pairwise(by_offset):
            if tensor.offset + tensor.nbytes > following.offset:
                raise self._fail(f"tensors {quoted(tensor.name)} and {quoted(following.name)} overlap: "
                                 "the file is damaged")
        outside = [tensor for tensor in by_offset if tensor.offset + tensor.nbytes > self._size]
        if outside:
            missing = outside[-1].offset + outside[-1].nbytes - self._size
            raise self._fail(f"{missing:,} bytes are missing at the end, where {len(outside)} of {len(by_offset)} "
                             f"tensors ({quoted(outside[0].name)} first) should be: an incomplete download?")


def _foreign_type(kind: int) -> str:
    """The name of a tensor type Sharpi has no arithmetic for."""
    # Imported here only: it takes longer than opening a model, and good files never need it.
    from gguf.constants import GGMLQuantizationType

    try:
        return f"type {GGMLQuantizationType(kind).name}"
    except ValueError:
        return f"unknown type number {kind}"


# First bytes of what people take for a GGUF file, or get in place of one.
_FAMILIAR_STARTS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer, so the model itself was not downloaded: run `git lfs pull`"),
    (b"PK\x03\x04", "it looks like a zip archive or PyTorch checkpoint; convert the model to GGUF"),
    (b"\x80\x02", "it looks like a Python pickle; convert the model to GGUF"),
    (b"\x1f\x8b", "it looks gzip-compressed; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "it looks zstd-compressed; unpack it first"),
    (b"FUGG", "it is a GGUF file written with the bytes of its numbers reversed"),
    (b"lmgg", "it is in the GGML format from before GGUF; convert the model again"),
    (b"fmgg", "it is in the GGML format from before GGUF; convert the model again"),
    (b"tjgg", "it is in the GGML format from before GGUF; convert the model again"),
)


def _looks_like(start: bytes, size: int) -> str:
    """What a file that is not GGUF seems to be, from its first bytes."""
    for prefix, verdict in _FAMILIAR_STARTS:
        if start.startswith(prefix):
            return verdict
    if start[8:9] == b"{" and 2 <= int.from_bytes(start[:8], "little") <= size - 8:
        return "it looks like a safetensors file; convert the model to GGUF"
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "it is a web page, perhaps an error or login page that was saved in the model's place"
    if text.startswith(b"{"):
        return "it looks like JSON, perhaps an error message that was saved in the model's place"
    if not start.strip(b"\0"):
        return "it begins with zeros, like a download that was never filled in"
    return f"it begins with {start[:4].hex(' ')}, not with 47 47 55 46 (\"GGUF\")"
