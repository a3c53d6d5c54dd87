"""Writes small models with random weights, one of each architecture, for tests that run the engine.

Weights are scaled so that every block's output is about as large as the residual stream it is added to: a wrong block
shows in the logits. Gains, norms and biases are random too, so that none can be left out unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

__all__ = [
    "HYBRIDS",
    "MODELS",
    "ON_CPU_ONLY",
    "ON_GPU",
    "QUANTIZED_TYPES",
    "Delta",
    "TinyModel",
    "as_version_2",
    "dequantized",
    "fused",
    "write",
]

QUANTIZED_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
                   "MXFP4", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0",
                   "NVFP4", "Q1_0")

# What gguf.quants can write itself. The others get random blocks.
_WRITABLE = frozenset({"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"})

# Of the types made of random blocks: byte offset of the f16 scale, that of the f16 minimum, and the ratio of the two
# that makes elements about 0 on average.
_SCALE_AT: dict[str, tuple[int, int | None, float]] = {
    "Q2_K": (80, 82, 1.5),
    "Q3_K": (108, None, 0.0),
    "Q4_K": (0, 2, 7.5),
    "Q5_K": (0, 2, 15.5),
    "Q6_K": (208, None, 0.0),
    "IQ4_NL": (0, None, 0.0),
    "IQ4_XS": (0, None, 0.0),
    "IQ2_XXS": (0, None, 0.0),
    "IQ2_XS": (0, None, 0.0),
    "IQ2_S": (0, None, 0.0),
    "IQ3_XXS": (0, None, 0.0),
    "IQ3_S": (0, None, 0.0),
    "IQ1_S": (0, None, 0.0),
    "TQ1_0": (52, None, 0.0),
    "TQ2_0": (64, None, 0.0),
    "Q1_0": (0, None, 0.0),
}


@dataclass(frozen=True)
class Delta:
    """The Gated DeltaNet layers of a hybrid, in which every `interval`-th layer has attention."""

    key_heads: int = 2
    value_heads: int = 4
    head_dim: int = 16
    conv: int = 4
    interval: int = 4


@dataclass(frozen=True)
class TinyModel:
    """What to write. `shared` is the width of an expert for every token, `predictions` how many layers predict further
    tokens; `scaling` holds float metadata below `rope.scaling.`; `type` is that of all matrices."""

    arch: str
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 96
    layers: int = 2
    vocab: int = 96
    context: int = 512
    epsilon: float = 1e-6
    rope_base: float = 10000.0
    rope_dims: int | None = None
    rope_factors: bool = False
    scaling_type: str | None = None
    scaling: tuple[tuple[str, float], ...] = ()
    original_context: int | None = None
    tied: bool = False
    bias: bool = False
    qk_norm: str | None = None
    experts: int = 0
    experts_used: int = 0
    shared: int = 0
    delta: Delta | None = None
    predictions: int = 0
    fused_qkv: bool = False
    fused_experts: bool = False
    type: str = "F32"


MODELS: dict[str, TinyModel] = {
    "llama": TinyModel("llama"),
    "llama-tied": TinyModel("llama", tied=True, kv_heads=4, epsilon=1e-5),
    "llama-factors": TinyModel("llama", rope_factors=True, kv_heads=1),
    # Rows of 172 numbers, which are no whole blocks of 32.
    "llama-odd": TinyModel("llama", hidden=172),
    "llama-partial": TinyModel("llama", rope_dims=16),
    "llama-linear": TinyModel("llama", scaling_type="linear", scaling=(("factor", 4.0),)),
    "llama-yarn": TinyModel("llama", scaling_type="yarn", scaling=(("factor", 4.0),), original_context=256),
    "llama-yarn-set": TinyModel("llama", scaling_type="yarn", original_context=128, rope_factors=True, scaling=(
        ("factor", 8.0), ("attn_factor", 0.8), ("yarn_ext_factor", 0.7), ("yarn_beta_fast", 16.0),
        ("yarn_beta_slow", 2.0))),
    "mixtral": TinyModel("llama", experts=5, experts_used=2),
    "qwen2": TinyModel("qwen2", bias=True, tied=True, epsilon=1e-5),
    "qwen3": TinyModel("qwen3", qk_norm="head", heads=2, head_dim=48, rope_base=1e6),
    "qwen3moe": TinyModel("qwen3moe", qk_norm="head", experts=8, experts_used=3, kv_heads=1, rope_base=1e6),
    "olmoe": TinyModel("olmoe", qk_norm="row", experts=6, experts_used=2, kv_heads=4, head_dim=16, epsilon=1e-5),
}

# Gated DeltaNet with attention in between, which is gated.
HYBRIDS: dict[str, TinyModel] = {
    "qwen35": TinyModel("qwen35", qk_norm="head", layers=4, delta=Delta(value_heads=6), rope_dims=8, rope_base=1e7,
                        predictions=1),
    # Heads that fill no vector.
    "qwen35-odd": TinyModel("qwen35", qk_norm="head", layers=5, rope_dims=16, tied=True,
                            delta=Delta(key_heads=3, value_heads=3, head_dim=20, conv=3, interval=2)),
    # Heads that are no whole warp.
    "qwen35-uneven": TinyModel("qwen35", qk_norm="head", layers=5, rope_dims=16, tied=True,
                               delta=Delta(key_heads=1, value_heads=4, head_dim=24, conv=3, interval=2)),
    "qwen35-long-convolution": TinyModel("qwen35", qk_norm="head", layers=2, delta=Delta(conv=5, interval=2)),
    # No layer with attention, so no KV cache.
    "qwen35-states": TinyModel("qwen35", qk_norm="head", layers=2, delta=Delta(key_heads=1, conv=2)),
    "qwen35moe": TinyModel("qwen35moe", qk_norm="head", layers=4, delta=Delta(), rope_dims=16, rope_base=1e7,
                           experts=8, experts_used=3, shared=32, predictions=1),
}

# The GPU has no kernels for their heads, or for their convolution.
ON_CPU_ONLY = ("qwen35-odd", "qwen35-long-convolution")
ON_GPU = {name: model for name, model in (MODELS | HYBRIDS).items() if name not in ON_CPU_ONLY}


def fused(model: TinyModel) -> TinyModel:
    """The same weights in a file that stores q, k and v as one tensor, and gate and up of the experts as one."""
    return replace(model, fused_qkv=True, fused_experts=model.experts > 0)


def write(path: Path, model: TinyModel, *, seed: int = 1, skip: str | None = None,
          change: Callable[[str, np.ndarray], np.ndarray] | None = None,
          extra: tuple[tuple[str, np.ndarray], ...] = (), leave_out_key: str | None = None,
          **writer_options: Any) -> Path:
    """Writes `model` to `path` and gives the path back.

    change: gets each F32 tensor's name and data and gives what to store. skip, leave_out_key: a tensor and a metadata
    key that are left out; extra: tensors added. `writer_options` go to GGUFWriter, such as split_max_tensors.
    """
    writer = gguf.GGUFWriter(path, model.arch, **writer_options)
    _metadata(writer, model, leave_out_key)
    for name, data, kind in _Tensors(model, np.random.default_rng(seed)).made:
        if name == skip:
            continue
        if kind == "F32":
            data = data if change is None else change(name, data)
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    for name, data in extra:
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_version_2(path: Path, out: Path) -> Path:
    """A copy of a version 3 file that says version 2, which is stored alike."""
    data = bytearray(path.read_bytes())
    assert data[4:8] == (3).to_bytes(4, "little")
    data[4:8] = (2).to_bytes(4, "little")
    out.write_bytes(data)
    return out


def _metadata(writer: gguf.GGUFWriter, m: TinyModel, leave_out: str | None) -> None:
    integers = {
        "block_count": m.layers, "context_length": m.context, "embedding_length": m.width,
        "feed_forward_length": m.hidden, "attention.head_count": m.heads, "attention.head_count_kv": m.kv_heads,
        "attention.key_length": m.head_dim, "attention.value_length": m.head_dim,
        "rope.dimension_count": m.rope_dims or m.head_dim,
    }
    if m.experts:
        integers |= {"expert_count": m.experts, "expert_used_count": m.experts_used}
    if m.delta:
        d = m.delta
        integers |= {"ssm.conv_kernel": d.conv, "ssm.state_size": d.head_dim, "ssm.group_count": d.key_heads,
                     "ssm.time_step_rank": d.value_heads, "ssm.inner_size": d.value_heads * d.head_dim,
                     "full_attention_interval": d.interval}
    if m.predictions:
        integers |= {"block_count": m.layers + m.predictions, "nextn_predict_layers": m.predictions}
    if m.original_context:
        integers["rope.scaling.original_context_length"] = m.original_context
    floats = {"attention.layer_norm_rms_epsilon": m.epsilon, "rope.freq_base": m.rope_base}
    floats |= {f"rope.scaling.{key}": value for key, value in m.scaling}
    for key, value in integers.items():
        if key != leave_out:
            writer.add_uint32(f"{m.arch}.{key}", value)
    for key, number in floats.items():
        if key != leave_out:
            writer.add_float32(f"{m.arch}.{key}", number)
    if m.scaling_type:
        writer.add_string(f"{m.arch}.rope.scaling.type", m.scaling_type)
    writer.add_name("tiny")
    writer.add_tokenizer_model("none")


class _Tensors:
    """Makes all tensors of a model as (name, data, type). The same seed draws the same numbers for a fused and an
    unfused model."""

    def __init__(self, m: TinyModel, random: np.random.Generator) -> None:
        self.made: list[tuple[str, np.ndarray, str]] = []
        self._m = m
        self._random = random
        self._put("token_embd.weight", self._matrix(m.vocab, m.width, gain=0.8 * np.sqrt(m.width)))
        if not m.tied:
            self._put("output.weight", self._matrix(m.vocab, m.width, gain=2.0))
        self._vector("output_norm.weight", m.width, 1.0)
        if m.rope_factors:
            pairs = (m.rope_dims or m.head_dim) // 2
            self._floats("rope_freqs.weight", np.linspace(1.0, 6.0, pairs))
        for layer in range(m.layers + m.predictions):
            self._layer(
                f"blk.{layer}.", layer < m.layers and m.delta is not None and (layer + 1) % m.delta.interval != 0
            )
            if layer >= m.layers:
                self._prediction(f"blk.{layer}.nextn.")

    def _matrix(self, *shape: int, gain: float) -> np.ndarray:
        return _matrix(self._m.type, shape, gain / np.sqrt(shape[-1]), self._random)

    def _put(self, name: str, data: np.ndarray) -> None:
        self.made.append((name, data, self._m.type))

    def _floats(self, name: str, data: np.ndarray) -> None:
        self.made.append((name, data.astype(np.float32), "F32"))

    def _vector(self, name: str, n: int, around: float) -> None:
        self._floats(name, around + 0.2 * self._random.standard_normal(n))

    def _layer(self, block: str, delta: bool) -> None:
        self._vector(block + "attn_norm.weight", self._m.width, 1.0)
        self._vector(block + ("post_attention_norm.weight" if self._m.delta else "ffn_norm.weight"), self._m.width, 1.0)
        if delta:
            self._delta(block)
        else:
            self._attention(block)
        self._feed_forward(block)

    def _attention(self, block: str) -> None:
        m, q_rows, kv_rows = self._m, self._m.heads * self._m.head_dim, self._m.kv_heads * self._m.head_dim
        # A query's gate follows it, head by head.
        parts = {"q": self._matrix(q_rows * (2 if m.delta else 1), m.width, gain=1.5),
                 "k": self._matrix(kv_rows, m.width, gain=1.5), "v": self._matrix(kv_rows, m.width, gain=1.0)}
        biases = {key: 0.3 * self._random.standard_normal(len(part)) for key, part in parts.items()}
        if m.fused_qkv:
            parts = {"qkv": np.concatenate(list(parts.values()))}
            biases = {"qkv": np.concatenate(list(biases.values()))}
        for key, part in parts.items():
            self._put(f"{block}attn_{key}.weight", part)
            if m.bias:
                self._floats(f"{block}attn_{key}.bias", biases[key])
        self._put(block + "attn_output.weight", self._matrix(m.width, q_rows, gain=2.0))
        if m.qk_norm:
            self._vector(block + "attn_q_norm.weight", m.head_dim if m.qk_norm == "head" else q_rows, 1.2)
            self._vector(block + "attn_k_norm.weight", m.head_dim if m.qk_norm == "head" else kv_rows, 1.2)

    def _delta(self, block: str) -> None:
        m, d = self._m, self._m.delta
        assert d is not None
        keys, values = d.key_heads * d.head_dim, d.value_heads * d.head_dim
        self._put(block + "attn_qkv.weight", self._matrix(2 * keys + values, m.width, gain=1.0))
        self._put(block + "attn_gate.weight", self._matrix(values, m.width, gain=1.0))
        self._floats(
            block + "ssm_conv1d.weight", self._random.standard_normal((2 * keys + values, d.conv)) / np.sqrt(d.conv)
        )
        self._vector(block + "ssm_dt.bias", d.value_heads, 0.0)
        self._floats(block + "ssm_a", -np.exp(0.5 * self._random.standard_normal(d.value_heads) - 1.0))
        self._put(block + "ssm_beta.weight", self._matrix(d.value_heads, m.width, gain=1.0))
        self._put(block + "ssm_alpha.weight", self._matrix(d.value_heads, m.width, gain=1.0))
        self._vector(block + "ssm_norm.weight", d.head_dim, 1.0)
        self._put(block + "ssm_out.weight", self._matrix(m.width, values, gain=1.5))

    def _feed_forward(self, block: str) -> None:
        m = self._m
        count = (m.experts,) if m.experts else ()
        suffix = "_exps.weight" if m.experts else ".weight"
        if m.experts:
            self._put(block + "ffn_gate_inp.weight", self._matrix(m.experts, m.width, gain=2.0))
        gate, up = (self._matrix(*count, m.hidden, m.width, gain=1.2) for _ in range(2))
        if m.fused_experts:
            self._put(block + "ffn_gate_up_exps.weight", np.concatenate([gate, up], axis=1))
        else:
            self._put(block + "ffn_gate" + suffix, gate)
            self._put(block + "ffn_up" + suffix, up)
        self._put(block + "ffn_down" + suffix, self._matrix(*count, m.width, m.hidden, gain=3.0))
        if m.shared:
            self._vector(block + "ffn_gate_inp_shexp.weight", m.width, 0.0)
            for key in ("gate", "up"):
                self._put(f"{block}ffn_{key}_shexp.weight", self._matrix(m.shared, m.width, gain=1.2))
            self._put(block + "ffn_down_shexp.weight", self._matrix(m.width, m.shared, gain=3.0))

    def _prediction(self, block: str) -> None:
        width = self._m.width
        self._put(block + "eh_proj.weight", self._matrix(width, 2 * width, gain=1.0))
        for key in ("enorm", "hnorm", "shared_head_norm"):
            self._vector(f"{block}{key}.weight", width, 1.0)


def _matrix(kind: str, shape: tuple[int, ...], deviation: float, random: np.random.Generator) -> np.ndarray:
    """Random rows of a type with about this standard deviation: float32, or the bytes of the rows."""
    if kind not in _WRITABLE:
        return _random_blocks(kind, shape, deviation, random)
    data = (deviation * random.standard_normal(shape)).astype(np.float32)
    if kind == "F32":
        return data
    rows = gguf.quants.quantize(data.reshape(-1, shape[-1]), gguf.GGMLQuantizationType[kind])
    return np.ascontiguousarray(rows).view(np.uint8).reshape(*shape[:-1], -1)


def dequantized(rows: np.ndarray, kind: str) -> np.ndarray:
    """The float32 elements of rows of bytes."""
    if kind != "Q1_0":
        return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    # The package knows this type's size alone. A set bit means the block's scale, another one its negative.
    blocks = rows.reshape(-1, 18)
    scale = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    return np.where(bits == 1, scale, -scale).reshape(*rows.shape[:-1], -1)


def _random_blocks(kind: str, shape: tuple[int, ...], deviation: float, random: np.random.Generator) -> np.ndarray:
    of_type = gguf.GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[of_type]
    blocks = random.integers(0, 256, (int(np.prod(shape)) // elements, size), dtype=np.uint8)
    if kind == "MXFP4":
        # Its scale is one byte, a power of two; the table's elements deviate by 5.85.
        blocks[:, 0] = 128 + round(np.log2(deviation / 5.85)) + random.integers(-1, 2, len(blocks))
        return blocks.reshape(*shape[:-1], -1)
    if kind == "NVFP4":
        scales = deviation / 5.85 * 2 * random.uniform(0.7, 1.3, (len(blocks), 4))
        blocks[:, :4] = gguf.quants.NVFP4.fp32_to_ue4m3(scales)
        return blocks.reshape(*shape[:-1], -1)
    if kind == "TQ2_0":
        # No quantizer writes the fourth code.
        codes = random.integers(0, 3, (4, len(blocks), 64), dtype=np.uint8)
        blocks[:, :64] = codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6
    if kind == "IQ1_M":
        # Its scale is in the upper nibbles of four words; the elements deviate by 7.2 of it.
        scales = (deviation / 7.2 * random.uniform(0.7, 1.3, len(blocks))).astype("<f2").view("<u2")
        for word in range(4):
            blocks[:, 49 + 2 * word] = blocks[:, 49 + 2 * word] & 15 | (scales >> 4 * word & 15) << 4
        return blocks.reshape(*shape[:-1], -1)
    at, minimum_at, ratio = _SCALE_AT[kind]

    def scale(values: np.ndarray) -> None:
        blocks[:, at : at + 2] = values.astype("<f2").view(np.uint8).reshape(-1, 2)
        if minimum_at is not None:
            blocks[:, minimum_at : minimum_at + 2] = (ratio * values).astype("<f2").view(np.uint8).reshape(-1, 2)

    scale(np.ones(len(blocks)))
    unscaled = dequantized(blocks, kind).std()
    scale(deviation / unscaled * random.uniform(0.7, 1.3, len(blocks)))
    return blocks.reshape(*shape[:-1], -1)
