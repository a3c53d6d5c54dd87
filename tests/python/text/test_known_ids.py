"""Real vocabularies: texts with known ids, and random ones against the publishers' own pipelines.

Two vocabularies with known ids are in tests/data. More are used if a folder of them is at hand (SHARPI_SHARED, or
"shared" beside the repository). SHARPI_RANDOM_TEXTS says how many random texts each of these encodes.
"""

from __future__ import annotations

import json
import lzma
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from vocabularies import CONTROL, NORMAL, OFFICIAL, original_of, random_texts, texts_of_any_characters, tokenizer_of

from sharpi.files.gguf import GgufFile
from sharpi.text.tokenizer import Tokenizer
from sharpi.text.vocabulary import BYTE, BYTE_OF_CHAR

SHARED = Path(os.environ.get("SHARPI_SHARED") or Path(__file__).parents[4] / "shared")
DATA = Path(__file__).parents[2] / "data" / "tokenizers"
FILES = sorted((SHARED / "vocab").glob("*.gguf"))
RANDOM_TEXTS = int(os.environ.get("SHARPI_RANDOM_TEXTS", "300"))


def named(path: Path) -> str:
    return path.stem.removeprefix("ggml-vocab-")


def check_known_ids(tokenizer: Tokenizer, cases: Path) -> None:
    """Against the texts in `cases`.inp and their ids in `cases`.out."""
    texts = Path(f"{cases}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    expected = [[int(token) for token in line.split()] for line in Path(f"{cases}.out").read_text().split("\n")]
    if len(expected) > len(texts):
        assert expected.pop() == []  # some of the files end with a line's end
    assert len(texts) == len(expected) > 40
    for text, ids in zip(texts, expected, strict=True):
        assert tokenizer.encode(text, add_special=False) == ids, repr(text)
        assert tokenizer.decode(ids) == text


def test_gpt2_gives_the_known_ids() -> None:
    merges = lzma.decompress((DATA / "gpt-2-merges.txt.xz").read_bytes()).decode().split("\n")
    tokens = [*sorted(BYTE_OF_CHAR), *(merge.replace(" ", "") for merge in merges), "<|endoftext|>"]
    tokenizer = tokenizer_of({
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * 50256 + [CONTROL], "tokenizer.ggml.merges": merges})
    check_known_ids(tokenizer, DATA / "gpt-2")


def test_phi3_gives_the_known_ids() -> None:
    lines = lzma.decompress((DATA / "phi-3-tokens.jsonl.xz").read_bytes()).decode().split("\n")
    tokens, scores, types = map(list, zip(*map(json.loads, lines), strict=True))
    tokenizer = tokenizer_of({
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.eos_token_id": 32000})
    check_known_ids(tokenizer, DATA / "phi-3")
    # As published: white space behind a special token of Phi 3 is dropped.
    prompt = tokenizer.encode("<|user|>\nHi<|end|>\n<|assistant|>\n", add_special=False, parse_special=True)
    assert prompt == [32010, 6324, 32007, 32001]


@pytest.mark.skipif(not FILES, reason=f"no more vocabularies in {SHARED / 'vocab'}")
@pytest.mark.parametrize("path", FILES, ids=named)
def test_real_vocabularies_give_the_known_ids(path: Path) -> None:
    check_known_ids(Tokenizer.from_metadata(GgufFile.open(path).metadata), path)


@pytest.mark.skipif(not FILES, reason=f"no more vocabularies in {SHARED / 'vocab'}")
@pytest.mark.parametrize("path", FILES, ids=named)
def test_random_texts_have_the_ids_of_the_published_pipeline(path: Path) -> None:
    metadata = GgufFile.open(path).metadata
    tokenizer = Tokenizer.from_metadata(metadata)
    if tokenizer.kind == "llama":
        ids_of = by_scores(tokenizer)
    elif tokenizer.kind == "gemma4":
        ids_of = by_characters(tokenizer, list(metadata.get_strings("tokenizer.ggml.merges")))
    else:
        pre = metadata.get_str("tokenizer.ggml.pre")
        if pre not in OFFICIAL:
            pytest.skip(f"the published pattern of {pre} is not here")
        ids_of = by_bytes(tokenizer, list(metadata.get_strings("tokenizer.ggml.merges")), pre)
    for text in random_texts(11, RANDOM_TEXTS // 3) + texts_of_any_characters(12, RANDOM_TEXTS // 3):
        ids = tokenizer.encode(text, add_special=False)
        assert ids == ids_of(text), repr(text)
        assert tokenizer.decode(ids) == text


def by_bytes(tokenizer: Tokenizer, merges: list[str], pre: str) -> Any:
    model = tokenizers.models.BPE(dict(tokenizer._vocabulary.id_of), [tuple(merge.split(" ")) for merge in merges],
                                  ignore_merges=pre == "llama-bpe")
    original = original_of(pre, model)
    return lambda text: original.encode(text, add_special_tokens=False).ids


def by_characters(tokenizer: Tokenizer, merges: list[str]) -> Any:
    """As Gemma's tokenizer file has it: nothing is cut."""
    model = tokenizers.models.BPE(dict(tokenizer._vocabulary.id_of), [tuple(merge.split(" ")) for merge in merges],
                                  unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    original = tokenizers.Tokenizer(model)
    original.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    original.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "merged_with_previous")
    return lambda text: original.encode(text, add_special_tokens=False).ids


def by_scores(tokenizer: Tokenizer) -> Any:
    """The rule: join the pair whose joined token scores highest, the leftmost among equals, until none is left."""
    vocabulary = tokenizer._vocabulary
    id_of = {text: token for text, token in vocabulary.id_of.items() if vocabulary.types[token] == NORMAL}
    first_byte = vocabulary.types.index(BYTE)

    def ids_of(text: str) -> list[int]:
        symbols = list((" " + text if text else "").replace(" ", "\u2581"))
        while True:
            joins = [(-vocabulary.scores[id_of[a + b]], at) for at, (a, b) in enumerate(pairwise(symbols))
                     if a + b in id_of]
            if not joins:
                break
            at = min(joins)[1]
            symbols[at:at + 2] = [symbols[at] + symbols[at + 1]]
        ids: list[int] = []
        for symbol in symbols:
            ids += [id_of[symbol]] if symbol in id_of else [first_byte + byte for byte in symbol.encode()]
        return ids

    return ids_of
