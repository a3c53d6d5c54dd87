"""The tokenizer against the original library and a naive reference.

Small vocabularies are made here: byte-level ones are trained with `tokenizers` itself, whose own
pipeline then says what is right; SentencePiece ones are written by hand and checked against
a merge loop that looks at the whole text after every merge.
"""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from vocabularies import (
    BYTE,
    CONTROL,
    CORPUS,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    byte_level_metadata,
    random_texts,
    tokenizer_metadata,
    tokenizer_of,
)

from sharpi.errors import InvalidRequestError, ModelFileError
from sharpi.files.metadata import LazyStringArray, Metadata
from sharpi.text.tokenizer import Tokenizer

# --- byte-level BPE ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def original() -> Any:
    """A small GPT-2-like tokenizer, trained and run by the library alone."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<|endoftext|>", "<|im_end|>", "<think>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.fixture
def gpt2_metadata(original: Any) -> dict[str, Any]:
    model = json.loads(original.to_str())["model"]
    tokens = [text for text, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    types = np.full(len(tokens), NORMAL, np.int32)
    types[:3] = CONTROL, CONTROL, USER_DEFINED
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in model["merges"]],
    }


def test_byte_level_ids_are_those_of_the_original(original: Any, gpt2_metadata: dict[str, Any]) -> None:
    tokenizer = tokenizer_of(gpt2_metadata)
    assert tokenizer.vocab_size == original.get_vocab_size() > 400
    merged = 0
    for text in random_texts(1):
        ids = tokenizer.encode(text)
        assert ids == original.encode(text).ids
        assert tokenizer.decode(ids) == text
        merged += len(ids) < len(text.encode())
    assert merged > 300  # else the merges were not exercised


@pytest.mark.parametrize(("pre", "expected"), [
    ("gpt-2", ["1234", "'", "S", "abB"]),
    ("smollm", ["1", "2", "3", "4", "'", "S", "abB"]),
    ("qwen2", ["1", "2", "3", "4", "'S", "abB"]),
    ("qwen35", ["1", "2", "3", "4", "'S", "abB"]),
    ("llama-bpe", ["123", "4", "'S", "abB"]),
    ("glm4", ["123", "4", "'S", "abB"]),
    ("tekken", ["1", "2", "3", "4", "'S", "ab", "B"]),
    ("gpt-4o", ["123", "4", "'S", "ab", "B"]),
    ("deepseek-v3", ["123", "4", "'S", "abB"]),
    ("deepseek-coder", ["1", "2", "3", "4", "'", "S", "abB"]),
])
def test_pretokenizers_cut_where_their_models_do(pre: str, expected: list[str]) -> None:
    # Everything that stays in one word merges; what is cut apart cannot.
    merges = ["1 2", "12 3", "123 4", "' S", "a b", "ab B"]
    tokenizer = tokenizer_of(byte_level_metadata(pre, merges))
    parts = [tokenizer.encode(text, add_special=False) for text in ("1234", "'S", "abB")]
    assert [tokenizer.token_text(token) for ids in parts for token in ids] == expected


def test_combining_marks_stay_with_their_letter_in_qwen35_only() -> None:
    merges = ["e Ì", "eÌ ģ"]  # the bytes of e and U+0301
    ids = {pre: tokenizer_of(byte_level_metadata(pre, merges)).encode("e\u0301")
           for pre in ("qwen35", "qwen2")}
    assert len(ids["qwen35"]) == 1
    assert len(ids["qwen2"]) == 3


def test_whole_words_are_taken_without_merging_in_llama_bpe_only() -> None:
    metadata = byte_level_metadata("llama-bpe", ["b c"])
    metadata["tokenizer.ggml.tokens"].append("abc")  # no merge leads here
    whole = tokenizer_of(metadata)
    assert [whole.token_text(t) for t in whole.encode("abc", add_special=False)] == ["abc"]
    merged = tokenizer_of({**metadata, "tokenizer.ggml.pre": "qwen2"})
    assert [merged.token_text(t) for t in merged.encode("abc")] == ["a", "bc"]


@pytest.mark.parametrize("pre", [None, "default", "qwen99"])
def test_an_unknown_pretokenizer_is_never_guessed(pre: object, gpt2_metadata: dict[str, Any]) -> None:
    gpt2_metadata["tokenizer.ggml.pre"] = pre
    with pytest.raises(ModelFileError, match=r"file\.gguf.*pre-tokenizer.*llama-bpe.*qwen2"):
        tokenizer_of(gpt2_metadata, "file.gguf")


def test_a_byte_without_a_token_is_an_error_not_a_loss() -> None:
    metadata = byte_level_metadata("gpt-2", [])
    metadata["tokenizer.ggml.tokens"].remove("z")
    tokenizer = tokenizer_of(metadata)
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    with pytest.raises(InvalidRequestError, match="0x7A"):
        tokenizer.encode("fizz")


# --- special tokens ---------------------------------------------------------------------------


def test_control_tokens_in_text_count_only_when_asked(gpt2_metadata: dict[str, Any]) -> None:
    tokenizer = tokenizer_of(gpt2_metadata)
    text = "a<|im_end|>b<think>c"
    plain, parsed = tokenizer.encode(text), tokenizer.encode(text, parse_special=True)
    assert 1 not in plain and parsed.count(1) == 1
    assert plain.count(2) == parsed.count(2) == 1  # user-defined: always
    assert tokenizer.decode(plain) == text
    assert tokenizer.decode(parsed) == "ab<think>c"
    assert tokenizer.decode(parsed, skip_special=False) == text


def test_a_control_token_that_is_a_plain_word_is_not_reached_by_text() -> None:
    metadata = byte_level_metadata("llama-bpe", ["a b"])
    metadata["tokenizer.ggml.tokens"].append("stop")
    metadata["tokenizer.ggml.token_type"] = [NORMAL] * 257 + [CONTROL]
    metadata["tokenizer.ggml.token_type"][256] = CONTROL  # "ab" too, though a merge makes it
    tokenizer = tokenizer_of(metadata)
    assert not {256, 257} & set(tokenizer.encode("stop ab"))
    assert {256, 257} <= set(tokenizer.encode("stop ab", parse_special=True))


def test_the_longest_special_token_wins(gpt2_metadata: dict[str, Any]) -> None:
    gpt2_metadata["tokenizer.ggml.tokens"][:3] = ["<x>", "<x><y>", "<y>"]
    tokenizer = tokenizer_of(gpt2_metadata)
    assert tokenizer.encode("<x><y><x><x>", parse_special=True) == [1, 0, 0]


def test_begin_end_and_stop_tokens(gpt2_metadata: dict[str, Any]) -> None:
    tokenizer = tokenizer_of(gpt2_metadata)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids) == (0, 0, {0, 1})
    bare = tokenizer.encode("hi")
    assert bare and bare[0] != 0
    gpt2_metadata |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True,
                      "tokenizer.ggml.eot_token_id": 5}
    tokenizer = tokenizer_of(gpt2_metadata)
    assert tokenizer.encode("hi") == [0, *bare, 0]
    assert tokenizer.encode("hi", add_special=False) == bare
    assert tokenizer.stop_ids == {0, 1, 5}
    llama3 = tokenizer_of({**byte_level_metadata("llama-bpe", []),
                                      "tokenizer.ggml.bos_token_id": 9})
    assert llama3.encode("a")[0] == 9 and len(llama3.encode("a")) == 2


def test_a_normal_token_that_reads_like_a_stop_token_is_text(gpt2_metadata: dict[str, Any]) -> None:
    gpt2_metadata["tokenizer.ggml.tokens"][-1] = "</s>"
    gpt2_metadata["tokenizer.ggml.merges"].pop()
    tokenizer = tokenizer_of(gpt2_metadata)
    assert tokenizer.stop_ids == {0, 1}


# --- SentencePiece ----------------------------------------------------------------------------


def spm_metadata(seed: int = 5) -> dict[str, Any]:
    """Specials, all byte tokens, single characters, and random joins, many with equal scores."""
    rng = random.Random(seed)
    entries = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<tool>", 0.0, USER_DEFINED)]
    entries += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    words = ["▁" * n for n in (2, 3, 4, 8)] + ["aa", "aaa", "aaaa", "</s", "<s", "<0x0A", "文字"]
    for word in "".join(CORPUS).replace(" ", " ▁").split():
        for _ in range(3):
            start = rng.randrange(len(word))
            words.append(word[start:start + rng.randint(2, 6)])
    characters = set("".join(words)) | set("abcdefghijklmnopqrstuvwxyz<>/0xA\n")
    for word in sorted({*characters, *words}):
        entries.append((word, float(-rng.randint(1, 12) if len(word) > 1 else -100), NORMAL))
    texts, scores, types = zip(*entries, strict=True)
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": list(texts),
            "tokenizer.ggml.scores": np.array(scores, np.float32),
            "tokenizer.ggml.token_type": np.array(types, np.int32)}


def naive_ids(metadata: dict[str, Any], text: str) -> list[int]:
    """Merges the best pair of the whole text, the leftmost among equals, until none is left."""
    texts, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = metadata["tokenizer.ggml.scores"]
    id_of = {t: i for i, t in enumerate(texts) if types[i] in (NORMAL, USER_DEFINED)}
    symbols = list(text.replace(" ", "▁"))
    while True:
        joins = [(-scores[id_of[a + b]], at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in id_of]
        if not joins:
            break
        at = min(joins)[1]
        symbols[at:at + 2] = [symbols[at] + symbols[at + 1]]
    ids: list[int] = []
    for symbol in symbols:
        ids += [id_of[symbol]] if symbol in id_of else [4 + byte for byte in symbol.encode()]
    return ids


def test_score_merging_is_that_of_the_naive_reference() -> None:
    metadata = spm_metadata()
    tokenizer = tokenizer_of(metadata)
    merged = as_bytes = 0
    texts = random_texts(2) + ["a" * n for n in range(1, 12)] + [" " * n + "x" for n in range(12)]
    for text in texts:
        ids = tokenizer.encode(text, add_special=False)
        assert ids == (naive_ids(metadata, " " + text) if text else [])
        assert tokenizer.decode(ids) == text
        merged += len(ids) < len(text)
        as_bytes += any(4 <= token < 260 for token in ids)
    assert merged > 200 and as_bytes > 200


def test_the_cache_does_not_change_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    from sharpi.text.encoders import ScoreEncoder

    monkeypatch.setattr(ScoreEncoder, "_CACHED_WORDS", 3)
    metadata = spm_metadata()
    tokenizer = tokenizer_of(metadata)
    for text in random_texts(3, 40) * 2:
        assert tokenizer.encode(text, add_special=False) == (naive_ids(metadata, " " + text) if text else [])


def test_the_space_prefix_follows_every_special_token() -> None:
    metadata = spm_metadata()
    tokenizer = tokenizer_of(metadata)
    ids = tokenizer.encode("</s>the<tool>age", parse_special=True)
    assert ids == [1, 2, *naive_ids(metadata, " the"), 3, *naive_ids(metadata, " age")]
    assert tokenizer.decode(ids) == "the<tool>age"
    metadata["tokenizer.ggml.add_space_prefix"] = False
    unprefixed = tokenizer_of(metadata)
    assert unprefixed.encode("the age", add_special=False) == naive_ids(metadata, "the age")
    assert unprefixed.decode(unprefixed.encode(" the")) == " the"


def test_text_spells_neither_control_nor_byte_tokens() -> None:
    tokenizer = tokenizer_of(spm_metadata())  # it has "</s" and "<0x0A" to merge from
    ids = tokenizer.encode("</s> <0x0A> <s>", add_special=False)
    assert not {1, 2, 4 + 0x0A} & set(ids)
    assert tokenizer.decode(ids) == "</s> <0x0A> <s>"


def test_without_byte_tokens_the_unknown_token_stands_in() -> None:
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a", "▁"],
                "tokenizer.ggml.scores": [0.0] * 5, "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, 1, 1]}
    assert tokenizer_of(metadata).encode("aü") == [1, 4, 3, 0]


# --- decoding a stream ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_streamed_pieces_are_whole_characters_and_join_up(kind: str, gpt2_metadata: dict[str, Any]) -> None:
    metadata = gpt2_metadata if kind == "gpt2" else spm_metadata()
    tokenizer = tokenizer_of(metadata)
    held = 0
    for text in random_texts(4, 100):
        ids = tokenizer.encode(text, add_special=False)
        stream = tokenizer.stream()
        pieces = [stream.push(token) for token in ids]
        assert stream.flush() == ""
        assert "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces)
        held += pieces.count("")
    assert held > 50


def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    metadata = spm_metadata()
    tokenizer = tokenizer_of(metadata)
    rocket = [4 + byte for byte in "🚀".encode()]
    stream = tokenizer.stream()
    assert [stream.push(token) for token in rocket[:3]] == ["", "", ""]
    assert stream.flush() == "\ufffd"
    assert tokenizer.decode(rocket[:3]) == "\ufffd"
    assert tokenizer.decode([*rocket[:2], *naive_ids(metadata, "a")]) == "\ufffda"


def test_random_ids_decode_like_their_stream(gpt2_metadata: dict[str, Any]) -> None:
    rng = random.Random(6)
    for metadata in (gpt2_metadata, spm_metadata()):
        tokenizer = tokenizer_of(metadata)
        for _ in range(100):
            ids = rng.choices(range(tokenizer.vocab_size), k=30)
            stream = tokenizer.stream()
            assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)


def test_a_stream_keeps_the_space_between_prompt_and_answer() -> None:
    metadata = spm_metadata()
    tokenizer = tokenizer_of(metadata)
    prompt, word = tokenizer.encode("Once upon a"), naive_ids(metadata, " the")

    def streamed(after: list[int]) -> str:
        stream = tokenizer.stream(after)
        return "".join(map(stream.push, word))

    assert streamed(prompt) == " the"
    assert streamed([1]) == streamed([]) == streamed([3]) == "the"


# --- damaged vocabularies ---------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, "none", "no_vocab"])
def test_a_file_without_tokenizer_says_so(model: str | None) -> None:
    metadata = {} if model is None else {"tokenizer.ggml.model": model}
    with pytest.raises(ModelFileError, match="no tokenizer"):
        tokenizer_of(metadata, "file.gguf")


DAMAGES: dict[str, tuple[Any, str]] = {
    "model": ("bert", "bert"),
    "tokens": (None, "tokens"),
    "token_type": ([1, 1], "token_type has 2"),
    "scores": ([0.0] * 7, "scores has 7"),
    "eos_token_id": (10**6, "eos_token_id is 1000000"),
    "bos_token_id": (-1, "bos_token_id is -1"),
    "eot_token_id": ("x", r"'tokenizer\.ggml\.eot_token_id' is a string, not an integer"),
    "merges": (None, r"'tokenizer\.ggml\.merges' is missing"),
}


@pytest.mark.parametrize("key", DAMAGES)
def test_damage_is_named_in_one_line(key: str, gpt2_metadata: dict[str, Any]) -> None:
    value, message = DAMAGES[key]
    gpt2_metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(ModelFileError, match=message) as caught:
        tokenizer_of(gpt2_metadata, "file.gguf")
    assert str(caught.value).startswith("file.gguf: ") and "\n" not in str(caught.value)


MISTYPED = {"a string": "1", "a bool": True, "an integer": 1, "a float": 0.5,
            "an array of float32": np.ones(3, np.float32), "an array of int64": np.ones(1, np.int64),
            "an array of bool": np.ones(2, bool), "an array of strings": ["a", "b"], "an array of arrays": [["a"]]}
WANTED = {
    "model": "a string", "pre": "a string", "tokens": "an array of strings", "token_type": "an array of integers",
    "scores": "an array of floats", "merges": "an array of strings", "add_space_prefix": "a bool",
    "suppress_tokens": "an array of integers",
    **{f"add_{role}_token": "a bool" for role in ("bos", "eos")},
    **{f"{role}_token_id": "an integer" for role in ("bos", "eos", "eot", "eom", "unknown")},
}
FITTING = {"an array of integers": ("an array of int64",), "an array of floats": ("an array of float32",)}


@pytest.mark.parametrize("found", MISTYPED)
@pytest.mark.parametrize("key", WANTED)
def test_a_value_of_a_wrong_type_is_named_with_its_key(key: str, found: str, gpt2_metadata: dict[str, Any]) -> None:
    wanted = WANTED[key]
    if found == wanted or found in FITTING.get(wanted, ()):
        return
    value, key = MISTYPED[found], f"tokenizer.ggml.{key}"
    if found == "an array of strings":
        value = LazyStringArray(Path("file.gguf"), key, b"", 0)
    metadata = tokenizer_metadata(gpt2_metadata, "file.gguf")
    with pytest.raises(ModelFileError) as caught:
        Tokenizer.from_metadata(Metadata("file.gguf", {**metadata, key: value}))
    assert str(caught.value) == f"file.gguf: '{key}' is {found}, not {wanted}"


@pytest.mark.parametrize("merge", ["abc", "a b c", " a", "a ", "", "q \n", "a £££"])
def test_a_malformed_merge_is_named(merge: Any, gpt2_metadata: dict[str, Any]) -> None:
    gpt2_metadata["tokenizer.ggml.merges"][3] = merge
    with pytest.raises(ModelFileError, match="merge 3") as caught:
        tokenizer_of(gpt2_metadata, "file.gguf").encode("a")
    assert "\n" not in str(caught.value)


def test_other_damage(gpt2_metadata: dict[str, Any]) -> None:
    tokens = list(gpt2_metadata["tokenizer.ggml.tokens"])
    tokens[300] = tokens[20]
    with pytest.raises(ModelFileError, match="tokens 20 and 300 are both"):
        tokenizer_of({**gpt2_metadata, "tokenizer.ggml.tokens": tokens}, "file.gguf")
    without_bos = {k: v for k, v in gpt2_metadata.items() if "bos" not in k}
    with pytest.raises(ModelFileError, match="no bos_token_id"):
        tokenizer_of({**without_bos, "tokenizer.ggml.add_bos_token": True}, "file.gguf")
    spm = spm_metadata()
    spm["tokenizer.ggml.tokens"][4 + 7] = "<0xZZ>"
    with pytest.raises(ModelFileError, match="0xZZ"):
        tokenizer_of(spm, "file.gguf")
    spm = spm_metadata()
    spm["tokenizer.ggml.scores"][9] = np.nan
    with pytest.raises(ModelFileError, match="NaN"):
        tokenizer_of(spm, "file.gguf")
    del spm["tokenizer.ggml.scores"]
    with pytest.raises(ModelFileError, match="scores is missing"):
        tokenizer_of(spm, "file.gguf")


def test_requests_that_make_no_sense(gpt2_metadata: dict[str, Any]) -> None:
    tokenizer = tokenizer_of(gpt2_metadata)
    for token in (-1, tokenizer.vocab_size):
        with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
            tokenizer.decode([token])
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        tokenizer.encode("a\ud800")
