"""Random answers under a constraint: each token is drawn from those that it allows."""

from __future__ import annotations

import functools
import lzma
import random
from pathlib import Path

import numpy as np
from vocabularies import CONTROL, NORMAL, byte_level_metadata, tokenizer_of

import sharpi
from sharpi.constraints import Constraint
from sharpi.constraints.tokens import Tokens, Words
from sharpi.files.gguf import GgufFile
from sharpi.text.tokenizer import Tokenizer

TOKENIZERS = Path(__file__).parents[2] / "data" / "tokenizers"


@functools.cache
def gpt2() -> tuple[Tokenizer, Tokens]:
    lines = lzma.open(TOKENIZERS / "gpt-2-merges.txt.xz", "rt", encoding="utf-8").read().splitlines()
    values = byte_level_metadata("gpt-2", [line for line in lines if line and not line.startswith("#version")])
    tokens = values["tokenizer.ggml.tokens"]
    tokens += ["<|endoftext|>", "<|call|>"]
    values["tokenizer.ggml.token_type"] = [NORMAL] * (len(tokens) - 2) + [CONTROL] * 2
    values["tokenizer.ggml.eos_token_id"] = len(tokens) - 2
    tokenizer = tokenizer_of(values)
    return tokenizer, Tokens(tokenizer)


@functools.cache
def bundled() -> tuple[Tokenizer, Tokens]:
    path = Path(sharpi.__file__).parent / "bundled" / "story.gguf"
    tokenizer = Tokenizer.from_metadata(GgufFile.open(path).metadata)
    return tokenizer, Tokens(tokenizer)


def mask_of(constraint: Constraint, tokens: Tokens) -> Words:
    """All that is allowed, also if the constraint forbids nothing."""
    words = np.full(tokens.width + 2, 0xABABABAB, np.uint32)
    if not constraint.fill(words):
        words[:] = 0xFFFFFFFF
    return words


def allowed(words: Words, tokens: Tokens) -> np.ndarray:
    """The ids of what a mask allows."""
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:tokens.count])


def walk(constraint: Constraint, tokens: Tokens, rng: random.Random, most: int = 3000, hurry: float = 0.8) -> list[int]:
    """The tokens of a random answer; those that can close something come more often, so that it ends."""
    closing = closing_ids(tokens)
    ids: list[int] = []
    while not constraint.ended():
        choices = allowed(mask_of(constraint, tokens), tokens)
        if rng.random() < hurry and len(near := np.intersect1d(choices, closing)):
            choices = near
        token = int(rng.choice(choices))
        if token in tokens.end_ids:
            break
        assert len(ids) < most, "the answer does not end"
        ids.append(token)
        constraint.accept(token)
    return ids


@functools.cache
def closing_ids(tokens: Tokens) -> np.ndarray:
    texts = (b'"', b"}", b"]", b"<", b"</")
    return np.array([*tokens.end_ids, *(token for token, piece in enumerate(tokens.pieces) if piece in texts)])
