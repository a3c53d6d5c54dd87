"""What is a name and what a path, and which file of a repository a name means."""

from __future__ import annotations

from pathlib import Path

import pytest

from sharpi.errors import HubError
from sharpi.hub.names import HubFile, Name, choose, variants


def labels(*paths: str) -> dict[str, str]:
    """Label by (first) path."""
    return {variant.files[0].path: variant.label for variant in variants(HubFile(path, 1) for path in paths)}


def chosen(text: str, *paths: str) -> list[str]:
    name = Name.parse(text)
    assert name is not None
    return [file.path for file in choose(name, variants(HubFile(path, 1) for path in paths), "the Hub").files]


def refused(text: str, *paths: str) -> str:
    with pytest.raises(HubError) as caught:
        chosen(text, *paths)
    return str(caught.value)


@pytest.mark.parametrize("text, name", [
    ("user/repo", Name("user/repo")),
    ("bartowski/SmolLM2-135M-Instruct-GGUF:q8_0", Name("bartowski/SmolLM2-135M-Instruct-GGUF", quant="q8_0")),
    ("unsloth/Qwen3-30B-A3B-GGUF:UD-Q4_K_XL", Name("unsloth/Qwen3-30B-A3B-GGUF", quant="UD-Q4_K_XL")),
    ("a/b.c_d-1", Name("a/b.c_d-1")),
    ("a/b@v1.0", Name("a/b", "v1.0")),
    ("a/b@refs/pr/3:F16", Name("a/b", "refs/pr/3", "F16")),
    ("a/b/c.gguf", Name("a/b", file="c.gguf")),
    ("a/b@" + "0" * 40 + "/c/d e.GGUF", Name("a/b", "0" * 40, file="c/d e.GGUF")),
])
def test_a_name(text: str, name: Name) -> None:
    assert Name.parse(text) == name
    assert str(name) == text


@pytest.mark.parametrize("text", [
    "", "a", "model.gguf", "a/model.gguf", "./a/b", "../a/b", "/a/b", "~/a", "a/b/", "a/b/c", "a//b", "a/b:",
    "a/b@", ".a/b", "a/b-", "a/b--c", "a/b..c", "a/../b.gguf", "a/b/../c.gguf", "a/b:x/y", "a b/c", "a/b\0",
    "x" * 96 + "/y", "hf.co/a/b",
])
def test_a_path(text: str) -> None:
    assert Name.parse(text) is None


def test_what_is_there_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert Name.parse("models/story") == Name("models/story")
    (tmp_path / "models" / "story").touch()
    assert Name.parse("models/story") is None


def test_a_file_in_a_folder_that_is_there_is_a_path_with_a_mistake_in_it(tmp_path: Path,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Name.parse("models/small/stroy.gguf") == Name("models/small", file="stroy.gguf")
    (tmp_path / "models").mkdir()
    assert Name.parse("models/small/stroy.gguf") is None


def test_labels() -> None:
    assert labels(
        "SmolLM2-135M-Instruct-Q4_K_M.gguf", "qwen2.5-0.5b-instruct-q8_0.gguf", "tinyllama-1.1b-chat-v1.0.Q5_K_S.gguf",
        "Qwen3-30B-A3B-UD-Q4_K_XL.gguf", "gpt-oss-20b-mxfp4.gguf", "gpt-oss-20b-MXFP4_MOE.gguf", "gemma-IQ4_XS.gguf",
        "model-f16.gguf", "model-BF16-v2.gguf", "ggml-model-Q4_0_4_4.gguf", "model.gguf", "Q6_K/model-of-q.gguf",
        "deep/Q2_K/x-00001-of-00002.gguf", "deep/Q2_K/x-00002-of-00002.gguf", "a-q4_0-b-q5_1.gguf", "iq2_xxs.gguf",
    ) == {
        "SmolLM2-135M-Instruct-Q4_K_M.gguf": "Q4_K_M", "qwen2.5-0.5b-instruct-q8_0.gguf": "Q8_0",
        "tinyllama-1.1b-chat-v1.0.Q5_K_S.gguf": "Q5_K_S", "Qwen3-30B-A3B-UD-Q4_K_XL.gguf": "UD-Q4_K_XL",
        "gpt-oss-20b-mxfp4.gguf": "MXFP4", "gpt-oss-20b-MXFP4_MOE.gguf": "MXFP4_MOE", "gemma-IQ4_XS.gguf": "IQ4_XS",
        "model-f16.gguf": "F16", "model-BF16-v2.gguf": "BF16", "ggml-model-Q4_0_4_4.gguf": "Q4_0_4_4", "model.gguf": "",
        "Q6_K/model-of-q.gguf": "Q6_K", "deep/Q2_K/x-00001-of-00002.gguf": "Q2_K", "a-q4_0-b-q5_1.gguf": "Q5_1",
        "iq2_xxs.gguf": "IQ2_XXS",
    }


def test_what_is_no_model_is_skipped() -> None:
    assert list(labels("mmproj-model-f16.gguf", "model-mmproj.gguf", "imatrix_unsloth.gguf", "a/x-imatrix.gguf",
                       "README.md", "x.gguf.part", "imatrix.dat", "x-Q4_0.gguf", "immatrix-Q8_0.gguf")) == [
        "immatrix-Q8_0.gguf", "x-Q4_0.gguf"]


@pytest.mark.parametrize("text, path", [
    ("a/b", "m-Q4_K_M.gguf"), ("a/b:q4_k_m", "m-Q4_K_M.gguf"), ("a/b:Q8_0", "m-q8_0.gguf"),
    ("a/b:ud-q2_k", "m-UD-Q2_K.gguf"), ("a/b:Q2_K", "m-UD-Q2_K.gguf"), ("a/b:extra", "extra.gguf"),
    ("a/b:Extra.gguf", "extra.gguf"), ("a/b/extra.gguf", "extra.gguf"),
])
def test_one_of_several(text: str, path: str) -> None:
    assert chosen(text, "m-q8_0.gguf", "m-Q4_K_M.gguf", "m-UD-Q2_K.gguf", "extra.gguf", "mmproj-Q4_K_M.gguf") == [path]


@pytest.mark.parametrize("better, worse", [
    ("m-Q4_K_M", "m-UD-Q4_K_M"), ("m-Q4_K_S", "m-Q5_K_M"), ("m-UD-Q4_K_XL", "m-Q4_0"), ("m-Q4_0", "m-Q8_0"),
    ("m-Q5_K_M", "m-Q6_K"), ("m-Q6_K", "m-Q8_0"), ("m-Q8_0", "m-Q3_K_M"), ("m-Q2_K", "m-F16"), ("m-F32", "m-IQ1_S"),
    ("m-MXFP4", "m-F16"), ("m-IQ3_XXS", "m-Q2_K"), ("m-IQ2_M", "m-F16"),
])
def test_without_q4_k_m(better: str, worse: str) -> None:
    assert chosen("a/b", f"{worse}.gguf", f"{better}.gguf") == [f"{better}.gguf"]


def test_parts_belong_together() -> None:
    parts = [f"Q4_K_M/m-Q4_K_M-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    for text in ("a/b", "a/b:Q4_K_M", f"a/b/{parts[1]}"):
        assert chosen(text, parts[2], parts[0], "m-Q8_0.gguf", parts[1]) == parts


def test_a_missing_quant_lists_what_is_there() -> None:
    assert refused("a/b:Q6_K", "m-Q8_0.gguf", "m-Q4_K_M.gguf", "other.gguf") == (
        "a/b:Q6_K: the Hub has no Q6_K; it has Q4_K_M, Q8_0, other.gguf")


def test_two_models_of_the_same_quant_are_named_by_their_files() -> None:
    message = refused("a/b", "small-Q4_K_M.gguf", "large-Q4_K_M.gguf")
    assert message == ("a/b: the Hub has 2 such models; name one of them: a/b/large-Q4_K_M.gguf,"
                       " a/b/small-Q4_K_M.gguf")


def test_without_a_gguf_file() -> None:
    assert refused("a/b", "model.safetensors", "mmproj-f16.gguf").startswith("a/b: the Hub has no GGUF file of a model")
    assert "only some parts of m-00001-of-00002.gguf" in refused("a/b", "m-00001-of-00002.gguf")
