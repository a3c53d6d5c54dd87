"""The GGUF reader: what it returns for good files, checked against the `gguf` package, and what it says about bad ones.

Bad files are put together byte by byte here, so that each test breaks exactly one thing.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest

from sharpi.errors import InvalidRequestError, ModelFileError, OutOfMemoryError, SharpiError
from sharpi.files.gguf import TENSOR_TYPES, GgufFile, LazyStringArray

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + values


def record(name: str | bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


ARCHITECTURE = entry("general.architecture", STRING, string("llama"))


def container(entries: list[bytes], records: Sequence[bytes] = (), data: bytes = b"", *, version: int = 3,
              entry_count: int | None = None, tensor_count: int | None = None, alignment: int = 32) -> bytes:
    header = struct.pack("<4sIQQ", b"GGUF", version, len(records) if tensor_count is None else tensor_count,
                         len(entries) if entry_count is None else entry_count)
    header += b"".join(entries) + b"".join(records)
    return header + bytes(-len(header) % alignment) + data


def open_bytes(tmp_path: Path, content: bytes, name: str = "model.gguf") -> GgufFile:
    path = tmp_path / name
    path.write_bytes(content)
    return GgufFile.open(path)


def refusal(path: Path) -> str:
    """The message opening `path` fails with, without the file's name."""
    with pytest.raises(ModelFileError) as caught:
        GgufFile.open(path)
    message = str(caught.value)
    assert "\n" not in message and message.isprintable()
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def refusal_of(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    return refusal(path)


def write_model(path: Path, alignment: int | None = None) -> dict[str, np.ndarray]:
    """A small model with every kind of metadata and several tensor types, by the `gguf` package."""
    random = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_name("Tiny")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -100)
    writer.add_uint16("a.u16", 60000)
    writer.add_int16("a.i16", -30000)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -2_000_000_000)
    writer.add_uint64("a.u64", 1 << 63)
    writer.add_int64("a.i64", -(1 << 62))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.yes", True)
    writer.add_bool("a.no", False)
    writer.add_array("a.ints", [3, -1, 4])
    writer.add_array("a.floats", random.standard_normal(5000).astype(np.float32).tolist())
    writer.add_array("a.bools", [True, False, True])
    writer.add_token_list(["<s>", "", "Grüße", "日本", "😀", "a\nb"])
    tensors = {
        "token_embd.weight": random.standard_normal((6, 64)).astype(np.float32),
        "half.weight": random.standard_normal((2, 3, 32)).astype(np.float16),
        "norm.weight": random.standard_normal(17).astype(np.float32),
    }
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    for kind in (gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0):
        values = gguf.quantize(random.standard_normal((4, 64)).astype(np.float32), kind)
        writer.add_tensor(f"{kind.name}.weight", values, raw_dtype=kind)
        tensors[f"{kind.name}.weight"] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def write_split(folder: Path) -> list[Path]:
    writer = gguf.GGUFWriter(folder / "big.gguf", "llama", split_max_tensors=2)
    for index in range(5):
        writer.add_tensor(f"blk.{index}.weight", np.full((3, 32), index, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    paths = sorted(folder.glob("big-*.gguf"))
    assert len(paths) == 3
    return paths


def as_plain(value):
    if isinstance(value, np.ndarray):
        return value.tolist()
    return list(value) if isinstance(value, LazyStringArray) else value


def test_type_table_agrees_with_the_gguf_package():
    for number, ours in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert ours.name == kind.name
        assert (ours.block_elements, ours.block_bytes) == gguf.GGML_QUANT_SIZES[kind]
    assert {kind.name for kind in TENSOR_TYPES.values()} == set(
        "F32 F16 I32 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS BF16 MXFP4 IQ2_XXS IQ2_XS IQ2_S "
        "IQ3_XXS IQ3_S IQ1_S IQ1_M TQ1_0 TQ2_0 NVFP4 Q1_0".split())


@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_agrees_with_the_gguf_package(tmp_path, alignment):
    path = tmp_path / "model.gguf"
    tensors = write_model(path, alignment)
    model = GgufFile.open(path)
    theirs = gguf.GGUFReader(path)
    assert (model.paths, model.version, model.architecture, model.name) == ([path], 3, "qwen3moe", "Tiny")

    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert {key: as_plain(value) for key, value in model.metadata.items()} == expected
    assert {key: type(as_plain(value)) for key, value in model.metadata.items()} == {
        key: type(value) for key, value in expected.items()}

    content = path.read_bytes()
    assert [tensor.name for tensor in model.tensors] == list(tensors)
    for ours, other in zip(model.tensors, theirs.tensors, strict=True):
        assert (ours.name, ours.type, ours.shape) == (other.name, other.tensor_type, tuple(other.shape.tolist()))
        assert (ours.type_name, ours.file, ours.nbytes) == (other.tensor_type.name, 0, other.n_bytes)
        assert content[ours.offset:ours.offset + ours.nbytes] == tensors[ours.name].tobytes()
    assert model.total_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_version_2_reads_like_version_3(tmp_path):
    path = tmp_path / "model.gguf"
    write_model(path)
    three = GgufFile.open(path)
    content = bytearray(path.read_bytes())
    content[4] = 2
    two = open_bytes(tmp_path, bytes(content), "two.gguf")
    assert two.version == 2 and two.tensors == three.tensors
    assert {k: as_plain(v) for k, v in two.metadata.items()} == {k: as_plain(v) for k, v in three.metadata.items()}


def test_metadata_cannot_be_changed(tmp_path):
    model = open_bytes(tmp_path, container([ARCHITECTURE, entry("n", ARRAY, array(I32, 2, bytes(8))),
                                            entry("b", ARRAY, array(BOOL, 2, b"\0\1"))]))
    with pytest.raises(TypeError):
        model.metadata["n"] = 1
    for key in "nb":
        with pytest.raises(ValueError):
            model.metadata[key][0] = 1


def test_scalars_leave_the_bulk_out(tmp_path):
    path = tmp_path / "model.gguf"
    write_model(path)
    scalars = GgufFile.open(path).metadata.scalars()
    assert scalars["a.floats"] == scalars["tokenizer.ggml.tokens"] == ()
    assert scalars["a.u32"] == 4_000_000_000 and scalars["a.yes"] is True and scalars["general.name"] == "Tiny"
    assert scalars["a.ints"].tolist() == [3, -1, 4]


def test_name_falls_back_to_the_file(tmp_path):
    assert open_bytes(tmp_path, container([ARCHITECTURE]), "some-model.gguf").name == "some-model"


def test_strings_behave_like_a_list(tmp_path):
    texts = ["<s>", "", "Grüße", "日本", "😀", "a\0b\n"]
    raw = b"".join(map(string, texts))
    model = open_bytes(tmp_path, container([ARCHITECTURE, entry("t", ARRAY, array(STRING, len(texts), raw)),
                                            entry("none", ARRAY, array(STRING, 0, b""))]))
    tokens = model.metadata.get_strings("t")
    assert "6 strings" in repr(tokens) and len(tokens) == 6
    assert list(tokens) == texts and tokens[-1] == texts[-1] and tokens[1:3] == texts[1:3]
    assert "日本" in tokens and tokens.index("Grüße") == 2
    assert tokens.decode() is tokens.decode()
    assert list(model.metadata.get_strings("none")) == []


def test_invalid_utf8_in_a_vocabulary_shows_on_first_use(tmp_path):
    raw = string("fine") + string(b"\xff\xfe")
    model = open_bytes(tmp_path, container([ARCHITECTURE, entry("t", ARRAY, array(STRING, 2, raw))]))
    for _ in range(2):
        with pytest.raises(ModelFileError, match="model.gguf: string 1 of 't' is not valid UTF-8"):
            model.metadata["t"][0]


def test_nested_arrays(tmp_path):
    inner = array(I32, 2, struct.pack("<2i", 1, 2)) + array(STRING, 1, string("x"))
    model = open_bytes(tmp_path, container([ARCHITECTURE, entry("n", ARRAY, array(ARRAY, 2, inner))]))
    assert [list(part) for part in model.metadata["n"]] == [[1, 2], ["x"]]
    assert model.metadata.scalars()["n"] == ()


def test_typed_getters(tmp_path):
    model = open_bytes(tmp_path, container([
        ARCHITECTURE, entry("int", U32, struct.pack("<I", 5)), entry("float", F32, struct.pack("<f", 0.5)),
        entry("yes", BOOL, b"\1"), entry("ints", ARRAY, array(I32, 2, struct.pack("<2i", 1, 2))),
        entry("floats", ARRAY, array(F32, 1, struct.pack("<f", 2))), entry("flags", ARRAY, array(BOOL, 1, b"\1")),
    ]))
    assert model.metadata.get_int("int") == 5
    assert model.metadata.get_int("gone", None) is None and model.metadata.get_int("gone", default=3) == 3
    assert model.metadata.get_int("int", minimum=5, maximum=5) == 5
    assert model.metadata.get_int("gone", 0, minimum=1) == 0
    assert model.metadata.get_float("float") == 0.5 and model.metadata.get_float("gone", None) is None
    assert type(model.metadata.get_float("int")) is float
    assert model.metadata.get_bool("yes") is True and model.metadata.get_str("general.architecture") == "llama"
    assert model.metadata.get_ints("ints").tolist() == [1, 2] and model.metadata.get_floats("floats").tolist() == [2.0]
    assert model.metadata.get_ints("gone", None) is None
    for call, complaint in [
        (lambda: model.metadata.get_int("gone"), "metadata key 'gone' is missing"),
        (lambda: model.metadata.get_int("yes"), "'yes' is a bool, not an integer"),
        (lambda: model.metadata.get_int("float"), "'float' is a float, not an integer"),
        (lambda: model.metadata.get_int("int", minimum=6), "'int' is 5, less than 6"),
        (lambda: model.metadata.get_int("int", maximum=4), "'int' is 5, more than 4"),
        (lambda: model.metadata.get_float("yes"), "'yes' is a bool, not a number"),
        (lambda: model.metadata.get_bool("int"), "'int' is an integer, not a bool"),
        (lambda: model.metadata.get_str("int"), "'int' is an integer, not a string"),
        (lambda: model.metadata.get_strings("ints"), "'ints' is an array of int32, not an array of strings"),
        (lambda: model.metadata.get_ints("floats"), "'floats' is an array of float32, not an array of integers"),
        (lambda: model.metadata.get_ints("flags"), "'flags' is an array of bool, not an array of integers"),
        (lambda: model.metadata.get_floats("int"), "'int' is an integer, not an array of floats"),
    ]:
        with pytest.raises(ModelFileError) as caught:
            call()
        assert str(caught.value) == f"{tmp_path / 'model.gguf'}: {complaint}"


@pytest.mark.parametrize("given", [0, 1, 2])
def test_split_model_opens_by_any_part(tmp_path, given):
    paths = write_split(tmp_path)
    model = GgufFile.open(paths[given])
    assert model.paths == paths and model.architecture == "llama"
    assert [tensor.name for tensor in model.tensors] == [f"blk.{index}.weight" for index in range(5)]
    assert [tensor.file for tensor in model.tensors] == [0, 0, 1, 1, 2]
    for index, tensor in enumerate(model.tensors):
        content = paths[tensor.file].read_bytes()[tensor.offset:tensor.offset + tensor.nbytes]
        assert content == np.full((3, 32), index, np.float32).tobytes()


def part(number: int, count: int, tensor: str, total: int | None = 2) -> bytes:
    entries = [ARCHITECTURE, entry("split.no", U16, struct.pack("<H", number)),
               entry("split.count", U16, struct.pack("<H", count))]
    if total is not None:
        entries.append(entry("split.tensors.count", I32, struct.pack("<i", total)))
    return container(entries, [record(tensor, (8,), 0, 0)], bytes(32))


@pytest.mark.parametrize("second, complaint", [
    (None, "no such file, but the model is split into 2 parts"),
    (part(0, 2, "b"), "'split.no' is 0, but by its name it should be 1"),
    (part(1, 3, "b"), "'split.count' is 3; its name says 2"),
    (part(1, 2, "a"), "tensor 'a' is also in another part, m-00001-of-00002.gguf"),
    (part(1, 2, "b")[:-1], "1 bytes are missing at the end"),
    (container([ARCHITECTURE], [record("b", (8,), 0, 0)], bytes(32)), "has no 'split.count'"),
    (container([entry("split.no", STRING, string("1")), entry("split.count", U16, b"\2\0")]),
     "'split.no' is a string, not an integer"),
])
def test_bad_second_part(tmp_path, second, complaint):
    first, other = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    first.write_bytes(part(0, 2, "a"))
    if second is not None:
        other.write_bytes(second)
    with pytest.raises(ModelFileError) as caught:
        GgufFile.open(first)
    assert str(caught.value).startswith(f"{other}: ") and complaint in str(caught.value)


def test_split_tensor_count_is_checked(tmp_path):
    for total in (2, 3, None):
        (tmp_path / "m-00001-of-00002.gguf").write_bytes(part(0, 2, "a", total))
        (tmp_path / "m-00002-of-00002.gguf").write_bytes(part(1, 2, "b", total))
        if total == 3:
            assert "'split.tensors.count' is 3, but the parts hold 2" in refusal(tmp_path / "m-00001-of-00002.gguf")
        else:
            assert len(GgufFile.open(tmp_path / "m-00002-of-00002.gguf").tensors) == 2


def test_renamed_part_says_how_it_should_be_named(tmp_path):
    assert "'split.count' is 2; rename it" in refusal_of(tmp_path, part(0, 2, "a"))


def test_part_number_beyond_count(tmp_path):
    assert refusal(tmp_path / "m-00003-of-00002.gguf") == "the name says part 3 of 2"


def test_whole_file_named_part_one_of_one(tmp_path):
    assert len(open_bytes(tmp_path, container([ARCHITECTURE]), "m-00001-of-00001.gguf").paths) == 1


def test_what_is_not_a_file(tmp_path):
    assert refusal(tmp_path / "gone.gguf") == "no such file"
    assert refusal(tmp_path) == "is a directory; a GGUF file was expected"
    assert refusal_of(tmp_path, b"") == "is empty"
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in refusal(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="cannot be read"):
        GgufFile.open("nul\0byte.gguf")


def test_unreadable_file(tmp_path, monkeypatch):
    path = tmp_path / "secret.gguf"
    path.write_bytes(container([ARCHITECTURE]))

    def denied(*_):  # chmod would not stop a test run as root
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("builtins.open", denied)
    assert refusal(path) == "cannot be read: Permission denied"


def test_odd_path_stays_on_one_line(tmp_path):
    path = tmp_path / "two\nlines.gguf"
    path.write_bytes(b"x")
    with pytest.raises(ModelFileError) as caught:
        GgufFile.open(path)
    assert str(caught.value).isprintable() and r"two\nlines.gguf" in str(caught.value)


@pytest.mark.parametrize("start, verdict", [
    (struct.pack("<Q", 40) + b'{"a":1}' + bytes(64), "safetensors"),
    (b"PK\x03\x04" + bytes(64), "zip archive or PyTorch"),
    (b"\x80\x02}q\0", "pickle"),
    (b"\x1f\x8b\x08" + bytes(64), "gzip"),
    (b"\n<!DOCTYPE html><html>", "web page"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n", "git lfs pull"),
    (b'{"error": "not found"}', "JSON"),
    (bytes(4096), "zeros"),
    (b"tjgg" + bytes(64), "from before GGUF"),
    (b"Hi", "it begins with 48 69, not with 47 47 55 46"),
    (b"GG", "it begins with 47 47, not"),
])
def test_what_is_not_gguf(tmp_path, start, verdict):
    complaint = refusal_of(tmp_path, start)
    assert complaint.startswith("is not a GGUF file: ") and verdict in complaint


@pytest.mark.parametrize("version, complaint", [
    (0, "version 0 is unknown"), (1, "version 1 is no longer read"), (4, "version 4 is unknown"),
    (3 << 24, "big-endian"), (2 << 24, "big-endian"), (0xFFFFFFFF, "is unknown"),
])
def test_versions_not_read(tmp_path, version, complaint):
    assert complaint in refusal_of(tmp_path, container([ARCHITECTURE], version=version))


GOOD = container([ARCHITECTURE, entry("tokens", ARRAY, array(STRING, 2, string("ab") + string("c"))),
                  entry("ints", ARRAY, array(I32, 2, bytes(8)))],
                 [record("a", (32, 2), 0, 0), record("b", (32,), 8, 256)], bytes(256 + 34))


def test_every_cut_is_noticed(tmp_path):
    assert len(open_bytes(tmp_path, GOOD).tensors) == 2
    for length in range(1, len(GOOD)):
        complaint = refusal_of(tmp_path, GOOD[:length])
        if length >= 24:
            assert "incomplete download" in complaint, (length, complaint)


def test_missing_bytes_are_counted(tmp_path):
    assert refusal_of(tmp_path, GOOD[:-40]) == (
        "40 bytes are missing at the end, where 2 of 2 tensors ('a' first) should be: an incomplete download?")


HUGE = 1 << 63
FLOATS = bytes(1024)


@pytest.mark.parametrize("content, complaint", [
    (container([ARCHITECTURE], entry_count=HUGE), "counts 9,223,372,036,854,775,808 metadata entries, but only"),
    (container([ARCHITECTURE], tensor_count=HUGE), "counts 9,223,372,036,854,775,808 tensors, but only"),
    (container([struct.pack("<Q", HUGE) + bytes(64)]), "ends inside the key of metadata entry 0"),
    (container([entry("a", STRING, struct.pack("<Q", HUGE) + bytes(64))]), "ends inside metadata 'a'"),
    (container([entry("a", ARRAY, array(STRING, 1, struct.pack("<Q", HUGE) + bytes(64)))]), "ends inside metadata 'a'"),
    (container([entry("a", ARRAY, array(STRING, 2, struct.pack("<Q", 2 * HUGE - 9) + bytes(64)))]),
     "ends inside metadata 'a'"),
    (container([entry("a", ARRAY, array(STRING, 50, bytes(64)))]), "ends inside metadata 'a'"),
    (container([entry("a", ARRAY, array(F64, 1 << 20, bytes(64)))]), "ends inside metadata 'a'"),
    (container([entry("a", ARRAY, array(F64, HUGE, bytes(64)))]), "metadata 'a' claims 9,223,372,036,854,775,808"),
    (container([entry("a", ARRAY, array(ARRAY, 1 << 20, bytes(64)))]), "'a' holds more than 65,536 arrays"),
    (container([entry("a", ARRAY, array(ARRAY, 1, b"") * 5 + bytes(64))]), "'a' nests arrays more than 4 deep"),
    (container([entry("a", 13, bytes(64))]), "'a' has unknown value type 13"),
    (container([entry("a", ARRAY, array(99, 1, bytes(64)))]), "'a' is an array of unknown value type 99"),
    (container([entry("a", BOOL, b"\2"), ARCHITECTURE]), "'a' is a bool with value 2"),
    (container([entry(b"\xff", U8, b"\0" * 9)]), "the key of metadata entry 0, at byte 24, is not valid UTF-8"),
    (container([entry("a", STRING, string(b"\xff" * 9))]), "metadata 'a', at byte 37, is not valid UTF-8"),
    (container([ARCHITECTURE, ARCHITECTURE]), "metadata key 'general.architecture' appears twice"),
    (container([entry("a\nb", 13, bytes(64))]), r"metadata 'a\nb' has unknown"),
    (container([entry("k" * 500, 13, bytes(64))]), "metadata '" + "k" * 77 + "...' has unknown"),
    (container([]), "metadata key 'general.architecture' is missing"),
    (container([entry("general.architecture", U32, bytes(4))]), "'general.architecture' is an integer, not a string"),
    (container([entry("general.architecture", STRING, string(""))]), "'general.architecture' is empty"),
    *[(container([ARCHITECTURE, entry("general.alignment", U32, struct.pack("<I", alignment))]),
       f"'general.alignment' is {alignment}, not a power of two of at least 8") for alignment in (0, 4, 12, 48)],
    (container([ARCHITECTURE, entry("general.alignment", STRING, string("8"))]), "'general.alignment' is a string"),
])
def test_bad_metadata(tmp_path, content, complaint):
    assert complaint in refusal_of(tmp_path, content)


@pytest.mark.parametrize("records, complaint", [
    ([record(b"\xff", (8,), 0, 0)], "a tensor's name, at byte"),
    ([record("a", (8,), 0, 0), record("a", (8,), 0, 32)], "tensor 'a' appears twice"),
    ([record("a", (), 0, 0)], "tensor 'a' has 0 dimensions"),
    ([record("a", (8, 1, 1, 1, 1), 0, 0)], "tensor 'a' has 5 dimensions"),
    ([record("a", (8, 0), 0, 0)], "tensor 'a' has an empty dimension: shape [8, 0]"),
    ([record("a", (1 << 32, 1 << 32), 0, 0)], "tensor 'a' is impossibly large"),
    ([record("a", (1 << 62,), 0, 0)], "tensor 'a' is impossibly large"),
    ([record("a", (48, 2), 2, 0)], "tensor 'a' has rows of 48 elements, but Q4_0 packs them in blocks of 32"),
    ([record("a", (32, 8), 14, 0)], "Q6_K packs them in blocks of 256"),
    ([record("a", (8,), 0, 8)], "tensor 'a' is at offset 8, not a multiple of 32"),
    ([record("a", (8,), 0, 1 << 40)], "1,099,511,626,784 bytes are missing at the end"),
    ([record("a", (8,), 0, 0), record("b", (16,), 0, 64), record("c", (8,), 0, 96)], "tensors 'b' and 'c' overlap"),
    ([record("a", (8,), 0, 32), record("b", (8,), 0, 32)], "tensors 'a' and 'b' overlap"),
    ([record("a", (256,), 9, 0)], "tensor 'a' has type Q8_1; Sharpi computes with F32, F16, Q4_0"),
    ([record("a", (256,), 5, 0)], "tensor 'a' has unknown type number 5; Sharpi computes with F32"),
])
def test_bad_tensors(tmp_path, records, complaint):
    assert complaint in refusal_of(tmp_path, container([ARCHITECTURE], records, FLOATS))


def test_alignment_is_per_file_and_honoured(tmp_path):
    entries = [ARCHITECTURE, entry("general.alignment", U32, struct.pack("<I", 8))]
    model = open_bytes(tmp_path, container(entries, [record("a", (2,), 0, 8)], bytes(16), alignment=8))
    assert model.tensors[0].offset % 8 == 0 and model.tensors[0].offset + 8 == (tmp_path / "model.gguf").stat().st_size


def test_errors_fit_pythons_own():
    assert issubclass(ModelFileError, SharpiError)
    assert issubclass(InvalidRequestError, ValueError) and issubclass(OutOfMemoryError, MemoryError)
