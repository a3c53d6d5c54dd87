"""Vocabularies written for a test as the metadata of a file, and texts to encode with them."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from sharpi.files.metadata import LazyStringArray, Metadata
from sharpi.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
ALPHABET = ([chr(c) for c in range(32, 127)] + list("\t\n\r\x00\x07\x7f\u00a0\u2028\u200d\ufeff")
            + list("äßéñŁжщ中文字日本語ひカ한국អ🚀🦙👍\u0301\u0308½²٣५'") + [" "] * 20)
CORPUS = [
    "It was the best of times, it was the worst of times, it was the age of wisdom.",
    "I've told you he'll be there in 1984, they'd say; we're not sure.   It'S 12345 miles; that's it, she's here, he's"
    " there.",
    "Äpfel und Öl kosten 3,50 € – сегодня на рынке 中文字符 日本語 🚀🚀 👍\n\n\tdef f(x):\n        return x\n",
] * 3


def tokenizer_metadata(values: dict[str, Any], name: str = "tiny") -> Metadata:
    """The metadata of a file `name`, where lists stand for the file's arrays."""
    def as_in_a_file(key: str, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        if key.endswith((".tokens", ".merges")):
            encoded = [text.encode() for text in value]
            raw = b"".join(struct.pack("<Q", len(text)) + text for text in encoded)
            return LazyStringArray(Path(name), key, raw, len(value))
        return np.array(value, np.float32 if key.endswith("scores") else np.int32)

    return Metadata(name, {key: as_in_a_file(key, value) for key, value in values.items() if value is not None})


def tokenizer_of(values: dict[str, Any], name: str = "tiny") -> Tokenizer:
    """The tokenizer of that file."""
    return Tokenizer.from_metadata(tokenizer_metadata(values, name))


def random_texts(seed: int, count: int = 300) -> list[str]:
    """Twice `count` random strings: half of them noise, half cut and shuffled from words and space runs."""
    rng = random.Random(seed)
    words = " ".join(CORPUS).split() + ["it's", "  ", "     ", "\n\n", " \t ", "'s", "'LL", "12345", "</s>", "🦙"]
    texts = ["", " ", "\n", "a"]
    for _ in range(count):
        texts.append("".join(rng.choices(ALPHABET, k=rng.randint(1, 40))))
        texts.append(rng.choice(["", " "]).join(rng.choices(words, k=rng.randint(1, 12))))
    return texts


def texts_of_any_characters(seed: int, count: int) -> list[str]:
    """Random strings of all of Unicode's first three planes."""
    rng = random.Random(seed)
    planes = [*range(0x20, 0xD800), *range(0xE000, 0x30000)]
    return ["".join(chr(code) for code in rng.choices(planes, k=rng.randint(1, 20))) for _ in range(count)]


def byte_level_metadata(pre: str, merges: list[str]) -> dict[str, Any]:
    tokens = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens += [merge.replace(" ", "") for merge in merges]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": merges}


# The patterns that publishers' own tokenizer files have; a word is what they cut.
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_CL100K = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
           r"\s*[\r\n]+|\s+(?!\S)|\s+")
OFFICIAL: dict[str, tuple[str, ...]] = {
    "gpt-4o": (_O200K,), "llama4": (_O200K,), "minimax-m2": (_O200K,),
    "llama-bpe": (_CL100K,), "dbrx": (_CL100K,), "smaug-bpe": (_CL100K,), "glm4": (_CL100K,), "pixtral": (_CL100K,),
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",),
    "qwen2": (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
              r"\s*[\r\n]+|\s+(?!\S)|\s+",),
    "qwen35": (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
               r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",),
    "kimi-k2": (
        r"[\p{Han}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",),
    "joyai-llm": (
        r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
        r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
    "refact": (r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
    "gpt-2": (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",),
}


def original_of(pre: str, model: Any) -> Any:
    """The library's own byte-level tokenizer with the published pattern."""
    tokenizer = tokenizers.Tokenizer(model)
    splits = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in OFFICIAL[pre]]
    bytes_of = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*splits, bytes_of])
    return tokenizer
