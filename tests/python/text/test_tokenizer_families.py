"""What tells the tokenizers of model families apart: pre-tokenizers, merges on characters, and tokens with a role."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tokenizers
from answer_texts import Tool, read_whole, written_calls
from vocabularies import (
    BYTE,
    CONTROL,
    CORPUS,
    NORMAL,
    OFFICIAL,
    USER_DEFINED,
    byte_level_metadata,
    original_of,
    random_texts,
    texts_of_any_characters,
    tokenizer_of,
)

from sharpi.errors import InvalidRequestError, ModelFileError
from sharpi.text.answers.formats import FORMATS
from sharpi.text.answers.reader import AnswerReader
from sharpi.text.answers.tool_format import ToolFormat
from sharpi.text.special_tokens import SpecialTokens

SPACE = "\u2581"
FIRST_BYTE = 4  # the id of <0x00> in `character_metadata`


# --- pre-tokenizers ---------------------------------------------------------------------------


@pytest.mark.parametrize("pre", OFFICIAL)
def test_words_are_cut_as_the_published_pattern_cuts_them(pre: str) -> None:
    original = original_of(pre, tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, show_progress=False,
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    original.train_from_iterator([*CORPUS, *random_texts(8, 200)], trainer)
    model = json.loads(original.to_str())["model"]
    tokenizer = tokenizer_of({
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": sorted(
            model["vocab"], key=model["vocab"].__getitem__),
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]})
    merged = 0
    for text in random_texts(9, 100) + texts_of_any_characters(10, 100):
        ids = tokenizer.encode(text, add_special=False)
        assert ids == original.encode(text).ids, repr(text)
        assert tokenizer.decode(ids) == text
        merged += len(ids) < len(text.encode())
    assert merged > 150


@pytest.mark.parametrize(("pre", "whole"), [
    ("gpt-4o", True), ("llama4", True), ("minimax-m2", True), ("tekken", True), ("kimi-k2", True), ("joyai-llm", True),
    ("llama-bpe", False), ("glm4", False), ("dbrx", False),
])
def test_a_combining_mark_stays_with_its_letter_where_it_does(pre: str, whole: bool) -> None:
    # The bytes of e, A and U+0301.
    merges = ["e \u00cc", "e\u00cc \u0123", "A \u00cc", "A\u00cc \u0123", "A\u00cc\u0123 B", "A\u00cc\u0123B c"]
    tokenizer = tokenizer_of(byte_level_metadata(pre, merges))
    for text in ("e\u0301", "A\u0301Bc"):
        assert (len(tokenizer.encode(text, add_special=False)) == 1) is whole, text


def test_han_is_apart_from_other_letters_in_kimi_only() -> None:
    merges = ["a \u00e4", "a\u00e4 \u00b8", "a\u00e4\u00b8 \u0143"]  # the bytes of a and U+4E2D
    lengths = {pre: len(tokenizer_of(byte_level_metadata(pre, merges)).encode("a\u4e2d", add_special=False))
               for pre in ("kimi-k2", "gpt-4o")}
    assert lengths == {"kimi-k2": 4, "gpt-4o": 1}


@pytest.mark.parametrize(("pre", "kept"), [("gpt-4o", True), ("tekken", True), ("kimi-k2", False), ("glm4", False)])
def test_a_slash_stays_with_the_lines_end_before_it_where_it_does(pre: str, kept: bool) -> None:
    tokenizer = tokenizer_of(byte_level_metadata(pre, [". \u010a", ".\u010a /"]))
    assert (len(tokenizer.encode(".\n/", add_special=False)) == 1) is kept


@pytest.mark.parametrize(("pre", "taken"), [("glm4", True), ("kimi-k2", True), ("tekken", True), ("dbrx", False)])
def test_words_that_are_tokens_are_taken_whole_where_they_are(pre: str, taken: bool) -> None:
    metadata = byte_level_metadata(pre, ["b c"])
    metadata["tokenizer.ggml.tokens"].append("abc")  # no merge leads here
    assert (len(tokenizer_of(metadata).encode("abc", add_special=False)) == 1) is taken


@pytest.mark.parametrize(("pre", "begins"), [
    ("llama4", True), ("llama-bpe", True), ("tekken", True), ("gpt-4o", False), ("glm4", False), ("qwen2", False),
])
def test_only_some_put_a_token_before_the_text(pre: str, begins: bool) -> None:
    metadata = {**byte_level_metadata(pre, []), "tokenizer.ggml.bos_token_id": 9}
    assert (tokenizer_of(metadata).encode("a")[0] == 9) is begins
    for said in (True, False):
        told = tokenizer_of({**metadata, "tokenizer.ggml.add_bos_token": said})
        assert (told.encode("a")[0] == 9) is said


# --- merges on characters ---------------------------------------------------------------------


def learnt_merges(texts: list[str], count: int) -> list[tuple[str, str]]:
    """The pairs that byte pair encoding joins, on characters, none of them across a line's end."""
    words = [list(part) for text in texts for line in text.replace(" ", SPACE).splitlines(keepends=True)
             for part in (line.rstrip("\n"), "\n" * line.count("\n")) if part]
    merges = [("\n", "\n"), ("\n\n", "\n")]
    while len(merges) < count:
        (left, right), _ = Counter(pair for word in words for pair in pairwise(word)).most_common(1)[0]
        merges.append((left, right))
        for word in words:
            at = 0
            while at + 1 < len(word):
                if word[at] == left and word[at + 1] == right:
                    word[at:at + 2] = [left + right]
                at += 1
    return merges


def character_metadata() -> dict[str, Any]:
    merges = learnt_merges(CORPUS[:3], 120)
    made = [left + right for left, right in merges]
    characters = sorted(set("".join(CORPUS).replace(" ", SPACE)) | set("<>0xA\n"))
    entries = [("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), ("<unk>", CONTROL)]
    entries += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    entries += [("<|channel>", USER_DEFINED), ("<|tool_response>", USER_DEFINED), ("<turn|>", CONTROL)]
    entries += [(text, NORMAL) for text in ["</s>", *characters, *dict.fromkeys(made)]]
    tokens, types = map(list, zip(*entries, strict=True))
    return {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": [" ".join(merge) for merge in merges], "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.add_bos_token": False}


def naive_ids(metadata: dict[str, Any], text: str) -> list[int]:
    """Joins the pair that comes first among the merges, the leftmost of these, until none is left. Nothing is cut."""
    id_of = {token: at for at, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    rank_of = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
    symbols = list(text.replace(" ", SPACE))
    while joins := [(rank_of[pair], at) for at, pair in enumerate(pairwise(symbols)) if pair in rank_of]:
        at = min(joins)[1]
        symbols[at:at + 2] = [symbols[at] + symbols[at + 1]]
    ids: list[int] = []
    for symbol in symbols:
        ids += [id_of[symbol]] if symbol in id_of else [FIRST_BYTE + byte for byte in symbol.encode()]
    return ids


def test_merges_on_characters_are_those_of_the_naive_reference() -> None:
    metadata = character_metadata()
    tokenizer = tokenizer_of(metadata)
    merged = as_bytes = 0
    for text in random_texts(3) + texts_of_any_characters(4, 50) + ["\n" * n for n in range(8)] + ["  a\n\n  b "]:
        ids = tokenizer.encode(text, add_special=False)
        assert ids == naive_ids(metadata, text), repr(text)
        assert tokenizer.decode(ids) == text
        merged += len(ids) < len(text)
        as_bytes += any(FIRST_BYTE <= token < FIRST_BYTE + 256 for token in ids)
    assert merged > 200 and as_bytes > 200


def test_such_a_text_begins_with_its_token_whatever_the_file_says() -> None:
    metadata = character_metadata()
    for said in (None, False, True):
        assert tokenizer_of({**metadata, "tokenizer.ggml.add_bos_token": said}).encode("a")[:1] == [2]
    assert tokenizer_of({**metadata, "tokenizer.ggml.bos_token_id": None}).encode("a") == naive_ids(metadata, "a")


def test_bytes_and_control_tokens_are_not_spelled_by_text() -> None:
    metadata = character_metadata()
    for token in ("<0", "<0x", "<0x0", "<0x0A", "<0x0A>"):  # merges lead to the byte token
        metadata["tokenizer.ggml.merges"].append(f"{token[:-1]} {token[-1]}")
        if token not in metadata["tokenizer.ggml.tokens"]:
            metadata["tokenizer.ggml.tokens"].append(token)
            metadata["tokenizer.ggml.token_type"].append(NORMAL)
    tokenizer = tokenizer_of(metadata)
    ids = tokenizer.encode("<0x0A><eos></s>", add_special=False)
    assert not {FIRST_BYTE + 0x0A, 1} & set(ids)
    assert tokenizer.decode(ids) == "<0x0A><eos></s>"
    assert tokenizer.encode("<eos>", add_special=False, parse_special=True) == [1]


def test_characters_without_tokens_for_their_bytes_are_an_error_not_a_loss() -> None:
    metadata = character_metadata()
    metadata["tokenizer.ggml.tokens"][FIRST_BYTE + 0x86] = "<other>"
    metadata["tokenizer.ggml.token_type"][FIRST_BYTE + 0x86] = NORMAL
    tokenizer = tokenizer_of(metadata)
    assert tokenizer.decode(tokenizer.encode("the \u00e9\u00c4")) == "the \u00e9\u00c4"
    with pytest.raises(InvalidRequestError, match="0x86"):
        tokenizer.encode("\u2206")  # E2 88 86


# --- tokens with a role -----------------------------------------------------------------------


def with_tokens(texts: dict[str, int], pre: str = "gpt-4o", **keys: object) -> dict[str, Any]:
    """A byte-level vocabulary with more tokens, each of a type; `keys` name the tokens with a role."""
    metadata = byte_level_metadata(pre, [])
    first = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += texts
    metadata["tokenizer.ggml.token_type"] = [NORMAL] * first + list(texts.values())
    return {**metadata, **{f"tokenizer.ggml.{role}_token_id": first + list(texts).index(str(text))
                           for role, text in keys.items()}}


HARMONY = dict.fromkeys(["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>",
                         "<|end|>", "<|message|>", "<|call|>"], CONTROL)
ENDS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "gemma 4": (character_metadata(), {"<eos>", "<turn|>", "<|tool_response>"}),
    "gemma 4, early": ({**character_metadata(), "tokenizer.ggml.token_type": [
        NORMAL if at == 1 else kind for at, kind in enumerate(character_metadata()["tokenizer.ggml.token_type"])]},
        {"<eos>", "<turn|>", "<|tool_response>"}),
    "gemma 3": (with_tokens({"<eos>": CONTROL, "<end_of_turn>": CONTROL, "<s>": USER_DEFINED, "</s>": USER_DEFINED},
                            eos="<eos>"), {"<eos>", "<end_of_turn>"}),
    "gpt-oss": (with_tokens(HARMONY, eos="<|return|>"), {"<|return|>", "<|call|>", "<|endoftext|>"}),
    "gpt-oss, told otherwise": (with_tokens(HARMONY, eos="<|return|>", eot="<|end|>"),
                                {"<|return|>", "<|call|>", "<|endoftext|>"}),
    "phi mini": (with_tokens({"<|endoftext|>": CONTROL, "<|user|>": CONTROL, "<|end|>": CONTROL}, eos="<|endoftext|>"),
                 {"<|endoftext|>", "<|end|>"}),
    "llama 4": (with_tokens({"<|begin_of_text|>": CONTROL, "<|end_of_text|>": CONTROL, "<|eom|>": CONTROL,
                             "<|eot|>": CONTROL}, eos="<|end_of_text|>"), {"<|end_of_text|>", "<|eom|>", "<|eot|>"}),
    "mistral": (with_tokens({"<s>": CONTROL, "</s>": CONTROL, "[/INST]": CONTROL}, eos="</s>"), {"</s>"}),
    "qwen and smollm3": (with_tokens({"<|endoftext|>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": CONTROL},
                                     eos="<|im_end|>"), {"<|im_end|>", "<|endoftext|>"}),
    "glm": (with_tokens({"<|endoftext|>": CONTROL, "<|user|>": CONTROL, "<|observation|>": CONTROL},
                        eos="<|endoftext|>", eot="<|user|>", eom="<|observation|>"),
            {"<|endoftext|>", "<|user|>", "<|observation|>"}),
    "minimax": (with_tokens({"]~b]": CONTROL, "[e~[": CONTROL}), {"[e~["}),
}


@pytest.mark.parametrize("family", ENDS)
def test_the_tokens_that_end_an_answer(family: str) -> None:
    metadata, ends = ENDS[family]
    tokenizer = tokenizer_of(metadata)
    assert {tokenizer.token_text(token) for token in tokenizer.stop_ids} == ends


def test_the_marks_of_an_answers_parts_are_shown_and_still_no_text_spells_them() -> None:
    tokenizer = tokenizer_of(with_tokens(HARMONY, eos="<|return|>"))
    answer = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    ids = tokenizer.encode(f"<|startoftext|>{answer}<|return|>", parse_special=True)
    assert tokenizer.decode(ids) == answer
    assert set(tokenizer.encode(answer)) < set(range(256))
    thinking = tokenizer_of(with_tokens({"</s>": CONTROL, "[THINK]": CONTROL, "[/THINK]": CONTROL}))
    assert thinking.decode(thinking.encode("[THINK]a[/THINK]b</s>", parse_special=True)) == "[THINK]a[/THINK]b"
    # Without messages, <|end|> only ends.
    phi = tokenizer_of(with_tokens({"<|end|>": CONTROL, "<|user|>": CONTROL}))
    assert phi.decode(phi.encode("<|user|>a<|end|>", parse_special=True)) == "a"


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_an_answers_calls_survive_the_tokenizer(form: ToolFormat) -> None:
    """The reader sees the marks that are control tokens in a file, and no other text spells these tokens."""
    tokenizer = tokenizer_of(with_tokens({**HARMONY, "<s>": CONTROL, **dict.fromkeys(form.tokens, CONTROL)},
                                         eos="<|return|>"))
    answer = written_calls(form, [("now", {"a": "b"})])
    ids = tokenizer.encode(f"<s>{answer}<s>", parse_special=True)
    stream = tokenizer.stream()
    schema = {"properties": {"a": {"type": "string"}}}
    reader = AnswerReader(form, [Tool("now", schema)])
    assert read_whole(reader, [*map(stream.push, ids), stream.flush()]).parsed() == [("now", {"a": "b"})]
    assert set(tokenizer.encode(answer)) < set(range(256))


def test_special_tokens_are_found_from_the_left_the_longest_first() -> None:
    rng = random.Random(3)
    for _ in range(200):
        words = {"".join(rng.choices("ab<", k=rng.randint(1, 5))) for _ in range(rng.randint(0, 6))}
        finder = SpecialTokens({word: at for at, word in enumerate(sorted(words))})
        by_length = sorted(words, key=len, reverse=True)
        text = "".join(rng.choices("ab<", k=rng.randint(0, 30)))
        expected: list[tuple[str, int | None]] = []
        at = plain = 0
        while at < len(text):
            word = next((word for word in by_length if text.startswith(word, at)), None)
            if word is None:
                at += 1
                continue
            expected += [(text[plain:at], None)] if plain < at else []
            expected.append((word, sorted(words).index(word)))
            at = plain = at + len(word)
        expected += [(text[plain:], None)] if plain < len(text) else []
        assert list(finder.split(text)) == expected, (words, text)


def test_user_defined_tokens_are_text() -> None:
    tokenizer = tokenizer_of(character_metadata())
    ids = tokenizer.encode("<|channel>the</s><turn|>", parse_special=True)
    assert tokenizer.decode(ids) == "<|channel>the</s>"


def phi3_metadata() -> dict[str, Any]:
    entries = [("<unk>", CONTROL), ("<s>", CONTROL), ("</s>", USER_DEFINED)]
    entries += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    entries += [(text, CONTROL) for text in ("<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>")]
    entries += [(SPACE, NORMAL), ("a", NORMAL), (SPACE + "a", NORMAL)]
    tokens, types = map(list, zip(*entries, strict=True))
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.scores": [0.0] * len(tokens)}


def test_white_space_behind_the_special_tokens_of_phi3_is_dropped() -> None:
    tokenizer = tokenizer_of(phi3_metadata())

    def spelled(text: str) -> list[str]:
        return [tokenizer.token_text(token) for token in tokenizer.encode(text, add_special=False, parse_special=True)]

    assert spelled("<|user|>\n a<|end|> \n<|assistant|>\t") == ["<|user|>", SPACE + "a", "<|end|>", "<|assistant|>"]
    assert spelled("<s>\na<|endoftext|> a")[:3] == ["<s>", SPACE, "<0x0A>"]
    assert spelled("<|endoftext|> a") == ["<|endoftext|>", SPACE, SPACE + "a"]
    # Text that only looks like one is not stripped, nor is any of another vocabulary.
    assert tokenizer.decode(tokenizer.encode("<|user|>\na")) == "<|user|>\na"
    other = phi3_metadata()
    other["tokenizer.ggml.tokens"][-4] = "<|human|>"  # for <|user|>
    assert 3 + 0x0A in tokenizer_of(other).encode("<|end|>\na", parse_special=True)


def test_ids_that_are_never_to_be_chosen() -> None:
    metadata = byte_level_metadata("gpt-2", [])
    assert tokenizer_of(metadata).suppressed_ids == frozenset()
    listed = {**metadata, "tokenizer.ggml.suppress_tokens": np.array([7, 255, 256, 100_000, -1], np.int32)}
    assert tokenizer_of(listed).suppressed_ids == {7, 255}
    with pytest.raises(ModelFileError, match="suppress_tokens"):
        tokenizer_of({**metadata, "tokenizer.ggml.suppress_tokens": np.array([1.5], np.float32)})


def test_a_vocabulary_on_characters_needs_merges() -> None:
    metadata = character_metadata()
    del metadata["tokenizer.ggml.merges"]
    with pytest.raises(ModelFileError, match="merges"):
        tokenizer_of(metadata)


def test_random_ids_of_characters_decode_like_their_stream() -> None:
    tokenizer, rng = tokenizer_of(character_metadata()), random.Random(6)
    for _ in range(100):
        ids = rng.choices(range(tokenizer.vocab_size), k=30)
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)
