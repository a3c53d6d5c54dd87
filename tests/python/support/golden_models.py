"""Writes the small float32 models that gave the logits in tests/data/golden.

The logits are those of other programs, so what counts is that every weight is the same, bit for bit: the generator
(`numpy.random.RandomState`, whose stream never changes), the order in which tensors are drawn, and the type in which
they are scaled. One digest for each model holds all of it.

Weights are scaled so that a block's output is about as large as the residual stream: a wrong block shows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from golden_families import FAMILIES, SEED, VOCABULARY, WIDTH, Family, add_keys

__all__ = ["GOLDEN", "LOGITS", "LONG_LLAMA4", "STORY", "digest", "prediction_tensors", "write_golden"]

_TESTS = Path(__file__).resolve().parents[2]
LOGITS = _TESTS / "data" / "golden"
STORY = _TESTS / "python" / "data" / "story_golden.npz"  # logits of the bundled model
LONG_LLAMA4 = LOGITS / "llama4-long.npz"  # of the model `llama4`, far enough for its chunks and its temperature


@dataclass(frozen=True)
class Golden:
    """A model. `experts`: count, used, width. `delta`: key heads, value heads, head size, convolution of the Gated
    DeltaNet layers, in which every fourth layer has attention, and behind which one layer predicts a further token."""

    architecture: str
    digest: str
    layers: int = 3
    heads: tuple[int, int, int] = (8, 2, 32)  # query heads, key heads, size
    epsilon: float = 1e-6
    base: float = 10000.0
    tied: bool = False
    bias: bool = False
    factors: bool = False
    qk_norm: str = ""  # "head" or "row"
    experts: tuple[int, int, int] | None = None
    shared: int = 0
    delta: tuple[int, int, int, int] | None = None
    rotated: int | None = None
    hidden: int = 512
    embedding: float = 0.7
    sections: tuple[int, ...] = ()  # of the rotary embedding
    float64: bool = False  # draws are scaled in float64; otherwise they are rounded to float32 first

    @property
    def blocks(self) -> int:
        """Layers in the file."""
        return self.layers + (self.delta is not None)

    def is_delta(self, block: int) -> bool:
        """Whether the layer has Gated DeltaNet for attention."""
        return self.delta is not None and block < self.layers and (block + 1) % 4 != 0

    @property
    def maker(self) -> str:
        """The program that wrote the original."""
        return "make_tiny_families.py" if self.float64 else "make_tiny.py"

    def describe(self, writer: gguf.GGUFWriter) -> None:
        """Adds the metadata."""
        _describe(writer, self)

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """All tensors, in the order in which they are drawn."""
        return _weights(self)


_HYBRID = {"layers": 8, "heads": (4, 2, 64), "qk_norm": "head", "base": 1e7, "rotated": 16}
_VISION = {"layers": 4, "heads": (4, 2, 64), "qk_norm": "head", "base": 5e6, "hidden": 384, "float64": True,
           "sections": (12, 10, 10, 0)}
GOLDEN: dict[str, Golden | Family] = {
    "llama": Golden("llama", "e085b6571af53285"),
    "llama-tied": Golden("llama", "0aa0934d7be4571d", tied=True, heads=(8, 8, 32), layers=2, epsilon=1e-5),
    "llama-scaled": Golden("llama", "80a0521c8d9d7a8e", factors=True),
    "mixtral": Golden("llama", "2c1a707905d03db3", experts=(8, 2, 256)),
    "qwen2": Golden("qwen2", "05f66e0a099dd1b0", bias=True, tied=True, epsilon=1e-5),
    "qwen3": Golden("qwen3", "bb4ca56e521f1392", heads=(4, 2, 128), qk_norm="head", base=1e6),
    "qwen3moe": Golden("qwen3moe", "611cea47b4f3524a", heads=(4, 1, 128), qk_norm="head", base=1e6,
                       experts=(16, 4, 256)),
    "olmoe": Golden("olmoe", "ef9d1454dda70aff", heads=(8, 8, 32), qk_norm="row", experts=(8, 3, 512), epsilon=1e-5),
    "qwen35": Golden("qwen35", "d3c456c368324cb7", delta=(2, 6, 64, 4), **_HYBRID),
    "qwen35moe": Golden("qwen35moe", "1fc6d747e46ebe56", delta=(2, 4, 64, 4), experts=(16, 4, 256), shared=256,
                        **_HYBRID),
    "qwen3vl": Golden("qwen3vl", "4b9871017fa5a9ee", **_VISION),
    "qwen3vlmoe": Golden("qwen3vlmoe", "553d3c34874b68ed", experts=(16, 4, 96), **_VISION),
    "smollm3": Golden("smollm3", "ad3dcc7f997db9f7", layers=4, epsilon=1e-5, base=5e6, tied=True, hidden=384,
                      embedding=0.12, float64=True),
    **FAMILIES,
}

# A tensor to draw: name, shape with rows first, and its standard deviation times the root of a row's length; or, for
# vectors, the value that they are spread around.
_Matrix = tuple[str, tuple[int, ...], float]
_Vector = tuple[str, int, float]


def write_golden(name: str, folder: Path, *, kind: str = "F32", keys: Mapping[str, Any] | None = None,
                 change: Callable[[str, np.ndarray], np.ndarray | None] | None = None,
                 extra: Mapping[str, np.ndarray] | None = None) -> Path:
    """Writes a model and gives its path.

    kind: the type of all matrices. keys: metadata that replace the model's, below the architecture's name. change: gets
    the name and the data of each tensor and gives what to store, or None to leave it out. extra: tensors added.
    """
    model, path = GOLDEN[name], folder / f"{name}.gguf"
    writer = gguf.GGUFWriter(path, model.architecture)
    model.describe(writer)
    for key in keys or {}:
        for shard in writer.kv_data:
            shard.pop(f"{model.architecture}.{key}", None)
    add_keys(writer, keys or {})
    for tensor, drawn in (*_drawn(name), *(extra or {}).items()):
        data = drawn if change is None else change(tensor, drawn)
        if data is None:
            continue
        if kind != "F32" and _is_matrix(tensor, data):
            rows = gguf.quants.quantize(data, gguf.GGMLQuantizationType[kind])
            writer.add_tensor(tensor, rows, raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(tensor, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@lru_cache(maxsize=1)
def _drawn(name: str) -> tuple[tuple[str, np.ndarray], ...]:
    """The weights of a model, kept for the next time: tests write one after another with other keys."""
    return tuple(GOLDEN[name].weights())


def _is_matrix(tensor: str, data: np.ndarray) -> bool:
    """Whether files of the model's family quantize it."""
    small = tensor.endswith("_norm.weight") or "ssm_conv1d" in tensor
    return tensor.endswith(".weight") and data.ndim > 1 and not small


def prediction_tensors(name: str) -> dict[str, np.ndarray]:
    """For `extra` of `write_golden`: a block behind the model's last that predicts a further token. It is that last one
    again, with tensors of its own besides, and with what checkpoints of GLM-4.7-Flash repeat: the model's embedding and
    head."""
    weights, count = dict(_drawn(name)), GOLDEN[name].keys["block_count"]
    generator, block = np.random.RandomState(SEED), f"blk.{count}.nextn."
    last = f"blk.{count - 1}."
    drawn = {f"blk.{count}.{tensor.removeprefix(last)}": data for tensor, data in weights.items()
             if tensor.startswith(last)}
    drawn[block + "eh_proj.weight"] = (generator.standard_normal((WIDTH, 2 * WIDTH)) / math.sqrt(2 * WIDTH)
                                       ).astype(np.float32)
    for part in ("enorm", "hnorm", "shared_head_norm"):
        drawn[f"{block}{part}.weight"] = (1 + 0.2 * generator.standard_normal(WIDTH)).astype(np.float32)
    drawn[block + "embed_tokens.weight"] = weights["token_embd.weight"]
    drawn[block + "shared_head_head.weight"] = weights["output.weight"]
    return drawn


def digest(name: str) -> str:
    """A digest of the names, shapes and bytes of all tensors."""
    whole = hashlib.sha256()
    for tensor, data in sorted(_drawn(name), key=lambda entry: entry[0]):
        whole.update(f"{tensor} {data.shape} {data.dtype}\n".encode() + data.tobytes())
    return whole.hexdigest()[:16]


def _describe(writer: gguf.GGUFWriter, model: Golden) -> None:
    heads, kv_heads, size = model.heads
    writer.add_block_count(model.blocks)
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(model.hidden if model.experts is None or model.delta else model.experts[2])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(model.epsilon)
    writer.add_rope_freq_base(model.base)
    writer.add_rope_dimension_count(model.rotated or size)
    writer.add_vocab_size(VOCABULARY)
    if model.sections:
        writer.add_rope_dimension_sections(model.sections)
        writer.add_num_deepstack_layers(3)
    if model.experts:
        writer.add_expert_count(model.experts[0])
        writer.add_expert_used_count(model.experts[1])
    if model.delta:
        key_heads, value_heads, state, convolution = model.delta
        writer.add_ssm_group_count(key_heads)
        writer.add_ssm_time_step_rank(value_heads)
        writer.add_ssm_state_size(state)
        writer.add_ssm_inner_size(value_heads * state)
        writer.add_ssm_conv_kernel(convolution)
        writer.add_full_attention_interval(4)
        writer.add_nextn_predict_layers(1)


def _weights(model: Golden) -> Iterator[tuple[str, np.ndarray]]:
    generator = np.random.RandomState(SEED)
    number = np.float64 if model.float64 else np.float32
    for name, shape, spread in _recipe(model):
        if name == "rope_freqs.weight":
            yield name, (1.0 + 7.0 * (np.arange(shape) / shape) ** 2).astype(np.float32)
            continue
        drawn = generator.standard_normal(shape)
        if name.endswith("ssm_a"):
            yield name, -np.exp(drawn * 0.5 - 1.0).astype(np.float32)
        elif isinstance(shape, int):
            yield name, (drawn.astype(number) * number(0.2) + number(spread)).astype(np.float32)
        else:
            scaled = drawn.astype(number).astype(np.float64) * (spread / math.sqrt(shape[-1]))
            yield name, scaled.astype(np.float32)


def _recipe(model: Golden) -> Iterator[_Matrix | _Vector]:
    yield "token_embd.weight", (VOCABULARY, WIDTH), model.embedding * math.sqrt(WIDTH)
    yield "output_norm.weight", WIDTH, 1.0
    if not model.tied:
        yield "output.weight", (VOCABULARY, WIDTH), 2.0
    if model.factors:
        yield "rope_freqs.weight", model.heads[2] // 2, 0.0
    for block in range(model.blocks):
        layer = [("attn_norm.weight", WIDTH, 1.0),
                 *(_delta(model) if model.is_delta(block) else _attention(model)),
                 ("post_attention_norm.weight" if model.delta else "ffn_norm.weight", WIDTH, 1.0),
                 *(_experts(model) if model.experts else _dense(model))]
        if block >= model.layers:
            layer.append(("nextn.eh_proj.weight", (WIDTH, 2 * WIDTH), 1.0))
            layer += [(f"nextn.{part}.weight", WIDTH, 1.0) for part in ("enorm", "hnorm", "shared_head_norm")]
        for name, shape, spread in layer:
            yield f"blk.{block}.{name}", shape, spread


def _attention(model: Golden) -> Iterator[_Matrix | _Vector]:
    heads, kv_heads, size = model.heads
    queries, keys = heads * size, kv_heads * size
    yield "attn_q.weight", (queries * (2 if model.delta else 1), WIDTH), 1.5
    yield "attn_k.weight", (keys, WIDTH), 1.5
    yield "attn_v.weight", (keys, WIDTH), 1.0
    yield "attn_output.weight", (WIDTH, queries), 2.0
    if model.bias:
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"attn_{name}.bias", rows, 0.0
    if model.qk_norm:
        yield "attn_q_norm.weight", queries if model.qk_norm == "row" else size, 1.2
        yield "attn_k_norm.weight", keys if model.qk_norm == "row" else size, 1.2


def _delta(model: Golden) -> Iterator[_Matrix | _Vector]:
    assert model.delta is not None
    key_heads, value_heads, state, convolution = model.delta
    values = value_heads * state
    channels = 2 * key_heads * state + values
    yield "attn_qkv.weight", (channels, WIDTH), 1.0
    yield "attn_gate.weight", (values, WIDTH), 1.0
    yield "ssm_conv1d.weight", (channels, convolution), 1.0
    yield "ssm_dt.bias", value_heads, 0.0
    yield "ssm_a", value_heads, 0.0
    yield "ssm_beta.weight", (value_heads, WIDTH), 1.0
    yield "ssm_alpha.weight", (value_heads, WIDTH), 1.0
    yield "ssm_norm.weight", state, 1.0
    yield "ssm_out.weight", (WIDTH, values), 1.5


def _experts(model: Golden) -> Iterator[_Matrix | _Vector]:
    assert model.experts is not None
    count, _, width = model.experts
    yield "ffn_gate_inp.weight", (count, WIDTH), 2.0
    yield "ffn_gate_exps.weight", (count, width, WIDTH), 1.0
    yield "ffn_up_exps.weight", (count, width, WIDTH), 1.0
    yield "ffn_down_exps.weight", (count, WIDTH, width), 3.0
    if model.shared:
        yield "ffn_gate_inp_shexp.weight", (WIDTH,), 1.0
        yield "ffn_gate_shexp.weight", (model.shared, WIDTH), 1.0
        yield "ffn_up_shexp.weight", (model.shared, WIDTH), 1.0
        yield "ffn_down_shexp.weight", (WIDTH, model.shared), 2.0


def _dense(model: Golden) -> Iterator[_Matrix | _Vector]:
    yield "ffn_gate.weight", (model.hidden, WIDTH), 1.0
    yield "ffn_up.weight", (model.hidden, WIDTH), 1.0
    yield "ffn_down.weight", (WIDTH, model.hidden), 2.0
