"""Whatever happens to a model file's bytes, opening it ends soon, in a model that holds together or a `ModelFileError`.

Small valid files are damaged at random: bytes flipped, numbers replaced by telling ones, pieces cut out, repeated or
appended. SHARPI_LONG_TESTS=1 tries 10,000 damaged files per test in place of 300.
"""

from __future__ import annotations

import gc
import os
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sharpi.errors import ModelFileError
from sharpi.files.gguf import TENSOR_TYPES, GgufFile, LazyStringArray

CASES = 10_000 if os.environ.get("SHARPI_LONG_TESTS") == "1" else 300
often = settings(max_examples=CASES, deadline=None, database=None, suppress_health_check=list(HealthCheck))

# A damaged file of a few KiB may cost this much at most. Processor time, so that a busy machine fails no test.
MAX_SECONDS = 1.0
MAX_BYTES = 4 << 20


def write_model(path: Path, **writer_options) -> None:
    random = np.random.default_rng(11)
    writer = gguf.GGUFWriter(path, "llama", **writer_options)
    writer.add_name("Small")
    writer.add_custom_alignment(64)
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_bool("llama.flag", True)
    writer.add_array("llama.sections", [1, 2, 3])
    writer.add_token_list(["<s>", "a", "b", "ä", "日本"])
    writer.add_token_scores([0.0, -1.0, -2.0, -3.0, -4.0])
    writer.add_token_merges(["a b", "b a"])
    for index in range(2):
        writer.add_tensor(f"blk.{index}.attn_norm.weight", random.standard_normal(32).astype(np.float32))
        weights = gguf.quantize(random.standard_normal((4, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"blk.{index}.attn_q.weight", weights, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def number_places(path: Path) -> list[tuple[int, int]]:
    """(offset, size) of every number in the file's header: counts, lengths, types, extents, offsets, values."""
    reader = gguf.GGUFReader(path)
    start = reader.data.ctypes.data
    parts = [part for field in reader.fields.values() for part in field.parts]
    parts += [part for tensor in reader.tensors for part in tensor.field.parts]
    return sorted({(part.ctypes.data - start + index * part.itemsize, part.itemsize)
                   for part in parts if part.itemsize > 1 for index in range(part.size)})


class Original:
    """A valid file, and where the numbers of its header are."""

    def __init__(self, path: Path, version: int = 3) -> None:
        self.places = number_places(path)
        content = bytearray(path.read_bytes())
        content[4] = version
        self.content = bytes(content)
        self.header_size = gguf.GGUFReader(path).data_offset


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("corruption")


@pytest.fixture(scope="module")
def originals(folder) -> list[Original]:
    path = folder / "original.gguf"
    write_model(path)
    return [Original(path), Original(path, version=2)]


TELLING = st.sampled_from([0, 1, 2, 3, 5, 8, 9, 12, 13, 31, 32, 39, 255, 4097, (1 << 31) - 1, 1 << 31, (1 << 32) - 1,
                           1 << 32, (1 << 62) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1]) | st.integers(0, 1 << 16)


@st.composite
def damage(draw, original: Original) -> bytes:
    """The original's bytes after one to four accidents, most of them in the header."""
    content = bytearray(original.content)
    for _ in range(draw(st.integers(1, 4))):
        size = max(len(content), 1)
        place = draw(st.integers(0, min(original.header_size, size) - 1) | st.integers(0, size - 1))
        kind = draw(st.sampled_from(["number", "number", "number", "shift", "flip", "cut", "remove", "repeat", "zero",
                                     "append"]))
        if kind == "number":
            place, width = draw(st.sampled_from(original.places))
            value = draw(TELLING) & ((1 << 8 * width) - 1)
            content[place:place + width] = value.to_bytes(width, "little")
        elif kind == "shift":
            # A number that is off by a little lands on a neighbour: the errors that are hardest to notice.
            place, width = draw(st.sampled_from(original.places))
            value = int.from_bytes(content[place:place + width], "little") + draw(st.integers(-9, 9))
            content[place:place + width] = (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        elif kind == "flip":
            content[place:place + 1] = bytes([content[place] ^ draw(st.integers(1, 255))]) if content else b""
        elif kind == "cut":
            del content[place:]
        elif kind == "remove":
            del content[place:place + draw(st.integers(1, 64))]
        elif kind == "repeat":
            content[place:place] = content[place:place + draw(st.integers(1, 64))]
        elif kind == "zero":
            length = draw(st.integers(1, 64))
            content[place:place + length] = bytes(min(length, len(content) - place))
        else:
            content += draw(st.binary(max_size=64))
    return bytes(content)


def check_holds_together(model: GgufFile) -> None:
    """What everyone after the reader relies on."""
    assert isinstance(model.architecture, str) and model.architecture and isinstance(model.name, str)
    assert model.version in (2, 3)
    ends = [0] * len(model.paths)
    for tensor in sorted(model.tensors, key=lambda tensor: (tensor.file, tensor.offset)):
        _, block_elements, block_bytes = TENSOR_TYPES[tensor.type]
        elements = 1
        for extent in tensor.shape:
            elements *= extent
        assert 1 <= len(tensor.shape) <= 4 and elements > 0 and tensor.shape[0] % block_elements == 0
        assert tensor.nbytes == elements // block_elements * block_bytes
        assert tensor.offset % 8 == 0 and tensor.offset >= max(ends[tensor.file], 24)
        ends[tensor.file] = tensor.offset + tensor.nbytes
        assert ends[tensor.file] <= model.paths[tensor.file].stat().st_size
    assert len({tensor.name for tensor in model.tensors}) == len(model.tensors)
    assert model.total_bytes == sum(tensor.nbytes for tensor in model.tensors)
    for value in model.metadata.scalars().values():
        assert isinstance(value, (bool, int, float, str, np.ndarray)) or value == ()


def use(path: Path) -> None:
    """Open the file and touch everything; all but a `ModelFileError` passes through."""
    model = GgufFile.open(path)
    check_holds_together(model)
    for value in model.metadata.values():
        if isinstance(value, LazyStringArray):
            assert len(value.decode()) == len(value)
    assert model.metadata.get_int("llama.block_count", 0) >= 0
    model.metadata.get_floats("tokenizer.ggml.scores", None)
    model.metadata.get_ints("llama.sections", None)
    model.metadata.get_float("llama.attention.layer_norm_rms_epsilon", 0.0)


def check_outcome(path: Path, names: tuple[str, ...]) -> None:
    # Hypothesis keeps a large heap, and a full collection of it takes long enough to be mistaken for a slow reader.
    gc.disable()
    tracemalloc.start()
    started = time.process_time()
    try:
        use(path)
    except ModelFileError as error:
        message = str(error)
        assert message.isprintable() and message.startswith(names) and len(message) < 600
    finally:
        seconds = time.process_time() - started
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        gc.enable()
    assert seconds < MAX_SECONDS
    assert peak < MAX_BYTES


def test_the_originals_are_good(folder, originals):
    for original in originals:
        path = folder / "undamaged.gguf"
        path.write_bytes(original.content)
        use(path)
        assert len(GgufFile.open(path).tensors) == 4
        assert len(original.places) > 60


@often
@given(data=st.data())
def test_damaged_file(folder, originals, data):
    path = folder / "damaged.gguf"
    path.write_bytes(data.draw(damage(data.draw(st.sampled_from(originals)))))
    check_outcome(path, (f"{path}: ",))


@often
@given(data=st.data())
def test_every_single_number_replaced(folder, originals, data):
    """One number at a time, so that no earlier damage hides what it does."""
    original = originals[0]
    place, width = data.draw(st.sampled_from(original.places))
    value = data.draw(TELLING) & ((1 << 8 * width) - 1)
    content = original.content[:place] + value.to_bytes(width, "little") + original.content[place + width:]
    path = folder / "one-number.gguf"
    path.write_bytes(content)
    check_outcome(path, (f"{path}: ",))


@often
@given(data=st.data())
def test_damaged_part_of_a_split_model(folder, split_originals, data):
    number = data.draw(st.integers(0, len(split_originals) - 1))
    paths = [folder / f"split-{index + 1:05d}-of-{len(split_originals):05d}.gguf"
             for index in range(len(split_originals))]
    for index, (path, original) in enumerate(zip(paths, split_originals, strict=True)):
        path.write_bytes(data.draw(damage(original)) if index == number else original.content)
    check_outcome(paths[data.draw(st.integers(0, len(paths) - 1))], tuple(f"{path}: " for path in paths))


@pytest.fixture(scope="module")
def split_originals(folder) -> list[Original]:
    write_model(folder / "whole.gguf", split_max_tensors=2)
    paths = sorted(folder.glob("whole-*.gguf"))
    assert len(paths) == 2 and len(GgufFile.open(paths[1]).tensors) == 4
    return [Original(path) for path in paths]


@often
@given(content=st.binary(max_size=400), counts=st.tuples(TELLING, TELLING), version=st.sampled_from([2, 3]))
def test_noise_behind_a_valid_start(folder, content, counts, version):
    path = folder / "noise.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", version, *counts) + content)
    check_outcome(path, (f"{path}: ",))


def test_a_large_file_of_zeros_ends_soon(folder):
    """A download that was reserved but never written: the counts say nothing, so nothing may be read far."""
    path = folder / "sparse.gguf"
    for counts in [(0, 1), (1 << 20, 1 << 20), (1 << 40, 1 << 40)]:
        with open(path, "wb") as stream:
            stream.write(struct.pack("<4sIQQ", b"GGUF", 3, *counts))
            stream.truncate(64 << 30)
        check_outcome(path, (f"{path}: ",))
