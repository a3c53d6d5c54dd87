#!/usr/bin/env python3
"""Records what llama.cpp makes of a checkpoint, with which test_against_llama_cpp.py compares Sharpi.

    pip install cyllama==0.2.18 numpy        # llama.cpp b9190 behind a Python binding
    python tests/real/record_llama_cpp.py MODEL.gguf --chunk 512

It writes recorded/MODEL.json. The perplexity is that of llama.cpp's own `llama-perplexity -c CHUNK`: the text is cut
into chunks of this size, and the second half of each is scored.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cyllama.llama.llama_cpp import LlamaBatch, LlamaContext, LlamaContextParams, LlamaModel, disable_logging

PROGRAM = "llama.cpp b9190 (cyllama 0.2.18)"
TEXT = Path(__file__).resolve().parents[1] / "data" / "river_bank.txt"
FOLDER = Path(__file__).parent / "recorded"
# What a tokenizer gets wrong more easily than prose.
ODD_TEXT = ("  two spaces,   three\tand\t\ttabs \n\n\n new lines\r\n 1234567890 3.14159 x+=y; def f(x):\n"
            "        return x**2\n"
            "naïve café Ünïcödé Straße ПРИВЕТ мир 你好，世界 こんにちは "
            "안녕하세요 مرحبا שלום ไทย 👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 ﬁ \u200b \u2581 "
            "<b>bold</b> don't WE'LL\u00a0it’s \U00013000 \ue000 \x01 end ")
ANSWER_TOKENS = 200


class Model(LlamaModel):
    """Adds what the binding's get_logits_ith needs and this version lacks."""

    @property
    def n_vocab(self) -> int:
        return self.get_vocab().n_vocab


class Evaluation:
    """Logits from an empty cache on."""

    def __init__(self, model: Model, tokens: int, threads: int) -> None:
        params = LlamaContextParams()
        params.n_ctx = params.n_batch = params.n_ubatch = tokens
        params.n_threads = params.n_threads_batch = threads
        self._context = LlamaContext(model, params)
        self._position = 0

    def clear(self) -> None:
        self._context.kv_cache_clear()
        self._position = 0

    def logits(self, tokens: Sequence[int], first: int) -> np.ndarray:
        """float64 [len(tokens) - first, vocab]: evaluates `tokens` and returns the rows from `first` on."""
        batch = LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1)
        for at, token in enumerate(tokens):
            batch.add(token, self._position + at, [0], at >= first)
        self._context.decode(batch)
        self._position += len(tokens)
        return np.array([self._context.get_logits_ith(at) for at in range(first, len(tokens))], dtype=np.float64)


def perplexity(model: Model, tokens: list[int], chunk: int, threads: int) -> float:
    evaluation, losses = Evaluation(model, chunk, threads), []
    for begin in range(0, len(tokens) - chunk + 1, chunk):
        part = tokens[begin:begin + chunk]
        evaluation.clear()
        logits = evaluation.logits(part, chunk // 2)[:-1]
        logits -= logits.max(axis=1, keepdims=True)
        losses.append(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(logits)), part[chunk // 2 + 1:]])
    return float(np.exp(np.mean(losses)))


def continuation(model: Model, prompt: list[int], threads: int) -> list[int]:
    """The greedy text, without the token that ends it."""
    evaluation, vocab = Evaluation(model, len(prompt) + ANSWER_TOKENS, threads), model.get_vocab()
    answer, row = [], evaluation.logits(prompt, len(prompt) - 1)[0]
    while len(answer) < ANSWER_TOKENS and not vocab.is_eog(token := int(row.argmax())):
        answer.append(token)
        row = evaluation.logits([token], 0)[0]
    return answer


def record(model: Model, chunk: int, threads: int) -> dict[str, Any]:
    def tokenize(text: str) -> list[int]:
        return list(model.get_vocab().tokenize(text, True, False))

    book = TEXT.read_text(encoding="utf-8")
    ids = tokenize(book)
    # The last prompt is longer than the attention windows of small models.
    prompts = [tokenize("The capital of France is"), tokenize("Once upon a time there was a fox who"), ids[:700]]
    return {
        "program": PROGRAM, "chunk": chunk, "perplexity": round(perplexity(model, ids, chunk, threads), 4),
        "book": ids, "odd_text": ODD_TEXT, "odd_text_ids": tokenize(ODD_TEXT),
        "greedy": [{"prompt": prompt, "answer": continuation(model, prompt, threads)} for prompt in prompts],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    disable_logging()
    model = Model(str(options.model))
    found = record(model, options.chunk, options.threads)
    path = FOLDER / f"{options.model.stem}.json"
    path.parent.mkdir(exist_ok=True)
    # One entry a line.
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
    path.write_text("{\n" + lines + "\n}\n", encoding="utf-8")
    print(f"{path}: {len(found['book'])} tokens, perplexity {found['perplexity']}")
    for greedy in found["greedy"]:
        print(f"{len(greedy['answer'])}: {model.get_vocab().detokenize(greedy['answer'])!r}")


if __name__ == "__main__":
    main()
