"""Books as chapters of running prose, and these as rows of tokens."""
from __future__ import annotations

import re

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
HEADING = re.compile(r"^(chapter|part|volume|book|adventure|contents|the end|finis)\b", re.IGNORECASE)


def chapters(text: str) -> list[str]:
    """Split a book into chapters of running prose: headings mark the cuts and are dropped, with tables of contents."""
    found: list[list[str]] = [[]]
    for index, paragraph in enumerate(p.strip(" |") for p in text.split("\n")):
        if not paragraph:
            continue
        shouted = not re.search(r"[a-z]", paragraph)
        listing = len(re.findall(r"\bchapter\b", paragraph, re.IGNORECASE)) > 2
        unfinished = not paragraph.endswith((".", "!", "?", '"', "'", ",", ";", ":", ")", "-"))
        words = paragraph.split()
        titled = unfinished and sum(w[0].isupper() for w in words) > 0.6 * len(words)
        front = index < 120 and unfinished
        if listing or front or len(paragraph) < 90 and (shouted or titled or HEADING.match(paragraph)):
            if found[-1] and not front:
                found.append([])
            continue
        found[-1].append(paragraph)
    return ["\n\n".join(c) for c in found if c]


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """Byte-level BPE with GPT-2's way of splitting words, so that `tokenizer.ggml.pre` can say `gpt-2`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END_OF_TEXT], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts as one row of tokens, each begun by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    rows = [np.array([end, *e.ids], np.int64) for e in tokenizer.encode_batch(texts)]
    return np.concatenate(rows)
