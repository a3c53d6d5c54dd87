"""What can be chosen, and the defaults. This module imports nothing, so `sharpi --help` is quick."""

from __future__ import annotations

__all__ = ["DEFAULT_CACHE_DIR_BYTES", "DEVICES", "DRAFTS", "EXACT", "FAST", "KV_DTYPES", "MIN_P", "MOST_DRAFT_TOKENS",
           "PROMPT_MODES", "ROPE_SCALINGS", "ROW_KINDS", "TEMPERATURE", "TOP_K", "TOP_P"]

DEVICES = ("auto", "cpu", "cuda")
KV_DTYPES = ("fp32", "bf16", "fp16")
# How prompts are computed: as answers are, with the same bits on every processor, or on the GPU's tensor cores.
PROMPT_MODES = EXACT, FAST = "exact", "fast"
# What a token is computed as: a part of a prompt, or of an answer.
ROW_KINDS = ("prompt", "decode")
# How the rotary embedding is stretched: not at all, evenly, or only its slow rotations.
ROPE_SCALINGS = ("none", "linear", "yarn")
# What drafts: the model's own prediction layer (multi-token prediction); a search for what followed the last few tokens
# earlier in the text; nothing.
DRAFTS = ("mtp", "ngram", "off")
# With the token before them they are a step of 8: as many rows as the GPU's products of few rows take at once.
MOST_DRAFT_TOKENS = 7
# What a directory with the KV cache of earlier prompts may hold.
DEFAULT_CACHE_DIR_BYTES = 16 << 30
# How tokens are drawn by default, in Python and at the command line. Penalties are off.
TEMPERATURE, TOP_K, TOP_P, MIN_P = 0.8, 40, 0.95, 0.05
