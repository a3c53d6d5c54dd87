"""A small deepseek4: two layers that see a window alone, two that see blocks of 4 tokens chosen by an indexer, and two
that see all blocks of 128. tests/data/golden/deepseek4.npz has its logits, from a forward pass in float64 numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from golden_families import add_keys

__all__ = ["DEEPSEEK4", "write_deepseek4"]

DEEPSEEK4 = Path(__file__).parents[2] / "data" / "golden" / "deepseek4.npz"
_SEED, _VOCABULARY = 7, 512
_WIDTH, _HEADS, _SIZE, _TURNED = 128, 8, 64, 16
_BLOCKS = [0, 4, 128, 4, 0, 128]
_HASHED = 2  # layers whose experts the token chooses
_STREAMS, _GROUPS, _OUTPUT_RANK, _QUERY_RANK = 4, 4, 32, 64
_INDEX_HEADS, _INDEX_SIZE = 16, 64
_EXPERTS, _USED, _EXPERT = 16, 4, 64

_KEYS: dict[str, Any] = {
    "vocab_size": _VOCABULARY, "context_length": 16384, "embedding_length": _WIDTH, "block_count": len(_BLOCKS),
    "attention.head_count": _HEADS, "attention.head_count_kv": 1, "attention.key_length": _SIZE,
    "attention.value_length": _SIZE, "feed_forward_length": _EXPERT, "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.dimension_count": _TURNED, "rope.freq_base": 10000.0, "rope.scaling.type": "yarn",
    "rope.scaling.factor": 16.0, "rope.scaling.original_context_length": 64, "attention.q_lora_rank": _QUERY_RANK,
    "attention.sliding_window": 16, "attention.indexer.head_count": _INDEX_HEADS,
    "attention.indexer.key_length": _INDEX_SIZE, "attention.indexer.top_k": 8,
    "attention.output_group_count": _GROUPS, "attention.output_lora_rank": _OUTPUT_RANK,
    "attention.compress_ratios": _BLOCKS, "attention.compress_rope_freq_base": 160000.0,
    "hyper_connection.count": _STREAMS, "hyper_connection.sinkhorn_iterations": 20, "hyper_connection.epsilon": 1e-6,
    "hash_layer_count": _HASHED, "expert_count": _EXPERTS, "expert_used_count": _USED,
    "expert_feed_forward_length": _EXPERT, "expert_shared_count": 1, "expert_weights_scale": 1.5,
    "expert_weights_norm": True, "expert_gating_func": 4, "swiglu_clamp_exp": [1.0] * len(_BLOCKS),
    "swiglu_clamp_shexp": [0.8] * len(_BLOCKS), "embedding_length_out": _STREAMS * _WIDTH}

_Tensors = Iterator[tuple[str, np.ndarray]]


class _Draws:
    def __init__(self) -> None:
        self.random = np.random.RandomState(_SEED)

    def matrix(self, name: str, *shape: int, gain: float = 1.0) -> tuple[str, np.ndarray]:
        """`gain`: how large its product with a vector of size 1 is."""
        return f"{name}.weight", self.random.standard_normal(shape) * (gain / math.sqrt(shape[-1]))

    def vector(self, name: str, *shape: int, center: float = 1.0, spread: float = 0.2) -> tuple[str, np.ndarray]:
        return f"{name}.weight", center + spread * self.random.standard_normal(shape)

    def streams(self, name: str, rows: int, scales: int) -> _Tensors:
        yield self.matrix(f"{name}_fn", rows, _STREAMS * _WIDTH)
        yield self.vector(f"{name}_base", rows, center=0.0, spread=0.5)
        yield self.vector(f"{name}_scale", scales)

    def compressor(self, name: str, size: int, block: int, center: float) -> _Tensors:
        width = (2 if block == 4 else 1) * size
        yield self.matrix(f"{name}_kv", width, _WIDTH)
        yield self.matrix(f"{name}_gate", width, _WIDTH)
        yield self.vector(f"{name}_ape", block, width, center=0.0, spread=1.0)
        yield self.vector(f"{name}_norm", size, center=center)

    def attention(self, block: int) -> _Tensors:
        yield self.vector("attn_norm", _WIDTH)
        yield self.vector("attn_sinks", _HEADS, spread=1.0)
        yield self.matrix("attn_q_a", _QUERY_RANK, _WIDTH)
        yield self.vector("attn_q_a_norm", _QUERY_RANK)
        yield self.matrix("attn_q_b", _HEADS * _SIZE, _QUERY_RANK)
        yield self.matrix("attn_kv", _SIZE, _WIDTH)
        yield self.vector("attn_kv_a_norm", _SIZE, center=1.3)
        yield self.matrix("attn_output_a", _OUTPUT_RANK * _GROUPS, _HEADS * _SIZE // _GROUPS)
        yield self.matrix("attn_output_b", _WIDTH, _OUTPUT_RANK * _GROUPS, gain=2.0)
        yield from self.streams("hc_attn", (2 + _STREAMS) * _STREAMS, 3)
        yield from self.streams("hc_ffn", (2 + _STREAMS) * _STREAMS, 3)
        if block:
            yield from self.compressor("attn_compressor", _SIZE, block, 1.3)
        if block == 4:
            yield self.matrix("indexer.proj", _INDEX_HEADS, _WIDTH)
            yield self.matrix("indexer.attn_q_b", _INDEX_HEADS * _INDEX_SIZE, _QUERY_RANK)
            yield from self.compressor("indexer_compressor", _INDEX_SIZE, block, 1.0)

    def experts(self, hashed: bool) -> _Tensors:
        yield self.vector("ffn_norm", _WIDTH)
        yield self.matrix("ffn_gate_inp", _EXPERTS, _WIDTH, gain=2.0)
        if not hashed:
            yield "exp_probs_b.bias", 0.3 * self.random.standard_normal(_EXPERTS)
        yield self.matrix("ffn_gate_exps", _EXPERTS, _EXPERT, _WIDTH, gain=1.5)
        yield self.matrix("ffn_up_exps", _EXPERTS, _EXPERT, _WIDTH, gain=1.5)
        yield self.matrix("ffn_down_exps", _EXPERTS, _WIDTH, _EXPERT, gain=3.0)
        yield self.matrix("ffn_gate_shexp", _EXPERT, _WIDTH)
        yield self.matrix("ffn_up_shexp", _EXPERT, _WIDTH)
        yield self.matrix("ffn_down_shexp", _WIDTH, _EXPERT, gain=2.0)
        if hashed:
            rows = [self.random.permutation(_EXPERTS)[:_USED] for _ in range(_VOCABULARY)]
            yield "ffn_gate_tid2eid.weight", np.array(rows, np.int32)

    def all(self) -> _Tensors:
        yield self.matrix("token_embd", _VOCABULARY, _WIDTH, gain=0.7 * math.sqrt(_WIDTH))
        yield self.vector("output_norm", _WIDTH)
        yield self.matrix("output", _VOCABULARY, _WIDTH, gain=2.0)
        yield from self.streams("output_hc", _STREAMS, 1)
        for number, block in enumerate(_BLOCKS):
            for part in (self.attention(block), self.experts(number < _HASHED)):
                for name, data in part:
                    yield f"blk.{number}.{name}", data


def _is_matrix(name: str, data: np.ndarray) -> bool:
    return data.ndim > 1 and not name.endswith(("_ape.weight", "tid2eid.weight")) and "hc_" not in name


def write_deepseek4(path: Path, kind: str = "F32", keys: Mapping[str, Any] | None = None,
                    change: Callable[[str, np.ndarray], np.ndarray] = lambda _, data: data) -> Path:
    """`keys` replace the model's; `change` gets each tensor and gives what to store."""
    writer = gguf.GGUFWriter(path, "deepseek4")
    add_keys(writer, {**_KEYS, **(keys or {})})
    for name, drawn in _Draws().all():
        data = change(name, drawn if drawn.dtype == np.int32 else drawn.astype(np.float32))
        if kind != "F32" and _is_matrix(name, data):
            quantized = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(data, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
