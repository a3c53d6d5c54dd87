#!/usr/bin/env python3
"""Records llama.cpp's perplexity, with which test_smollm2.py compares Sharpi's.

    pip install cyllama==0.2.18 numpy        # llama.cpp b9190 behind a Python binding
    python tests/real/record_llama_cpp.py MODEL.gguf

The figure is that of llama.cpp's own `llama-perplexity -c 512`: the text is cut into chunks of 512 tokens, and the
second half of each is scored.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from cyllama.llama.llama_cpp import LlamaBatch, LlamaContext, LlamaContextParams, LlamaModel, disable_logging

TEXT = Path(__file__).resolve().parents[1] / "data" / "river_bank.txt"
CHUNK = 512


class Model(LlamaModel):
    """Adds what the binding's get_logits_ith needs and this version lacks."""

    @property
    def n_vocab(self) -> int:
        return self.get_vocab().n_vocab


def main(path: str) -> None:
    disable_logging()
    model = Model(path)
    params = LlamaContextParams()
    params.n_ctx = params.n_batch = params.n_ubatch = CHUNK
    context = LlamaContext(model, params)
    tokens = list(model.get_vocab().tokenize(TEXT.read_text(encoding="utf-8"), True, False))
    losses: list[float] = []
    for begin in range(0, len(tokens) - CHUNK + 1, CHUNK):
        chunk = tokens[begin:begin + CHUNK]
        context.kv_cache_clear()
        batch = LlamaBatch(n_tokens=CHUNK, embd=0, n_seq_max=1)
        for position, token in enumerate(chunk):
            batch.add(token, position, [0], True)
        context.decode(batch)
        for position in range(CHUNK // 2, CHUNK - 1):
            logits = np.asarray(context.get_logits_ith(position), dtype=np.float64)
            highest = logits.max()
            losses.append(highest + np.log(np.exp(logits - highest).sum()) - logits[chunk[position + 1]])
    print(f"{len(tokens)} tokens, {len(losses)} scored, perplexity {np.exp(np.mean(losses)):.4f}")


if __name__ == "__main__":
    main(sys.argv[1])
