"""Runs a model file. Tensors are dequantized by the `gguf` package. Each call works on a whole sequence, without a KV
cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from tiny_models import dequantized

from numpy_model.blocks import block_attention, streamed
from numpy_model.description import Attention, Blocks, Delta, Description, Experts, Latent, Layer
from numpy_model.families import Keys, describe
from numpy_model.mamba import mamba
from numpy_model.parts import (
    activate,
    attend,
    in_best_groups,
    rms,
    rotate,
    round_bf16,
    round_int8,
    sigmoid,
    silu,
    softcapped,
    softmax,
    temperatures,
    unit,
)
from sharpi.files.gguf import GgufFile

__all__ = ["NumpyModel", "relative_error"]

CLOSE = 2**-17  # what products in split form keep

_FLOATS = ("F32", "F16", "BF16")
_ROUND_KV = {"fp32": lambda x: x, "fp16": lambda x: x.astype(np.float16).astype(np.float64), "bf16": round_bf16}


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference, relative to that of what is expected."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


class NumpyModel:
    """A model file, run by numpy.

    int8_activations: round what goes into a quantized matrix as the engine does, to int8 in blocks of 32; left out,
    nothing is rounded. kv_dtype: round keys and values as a cache of that type does. otherwise: (layer, row) where the
    last of the chosen experts gives way to the next best. context: how many tokens there is room for, if the model
    asks.

    description: what the file says that the model computes. close_choices: after logits(), (layer, row) of each choice
    of experts in which the last chosen one is no more than CLOSE better than the next best, as a part of the layer's
    largest router logit.
    """

    def __init__(self, path: Path, *, int8_activations: bool = False, kv_dtype: str = "fp32",
                 otherwise: tuple[str, int] | None = None, context: int = 0) -> None:
        self._otherwise = otherwise
        self.close_choices: list[tuple[str, int]] = []
        self._file = GgufFile.open(path)
        self._infos = {tensor.name: tensor for tensor in self._file.tensors}
        self._read: dict[str, np.ndarray] = {}
        self._int8 = int8_activations
        self._round_kv = _ROUND_KV[kv_dtype]
        self.description = describe(Keys(self._file.architecture, self._file.metadata, self._infos, context))
        self._tokens: list[int] = []  # of the call
        self._keys_and_values: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by layer, for those that share them

    def changed(self, change: Callable[[Description], Description]) -> NumpyModel:
        """A model of the same tensors that computes something else."""
        other = copy.copy(self)
        other.description = change(self.description)
        return other

    def rounded(self, *, int8_activations: bool = False, kv_dtype: str = "fp32") -> NumpyModel:
        """A model of the same tensors that rounds otherwise."""
        other = copy.copy(self)
        other._int8, other._round_kv = int8_activations, _ROUND_KV[kv_dtype]
        return other

    def logits(self, tokens: list[int]) -> np.ndarray:
        """float64 [len(tokens), vocab]."""
        self.close_choices = []
        return self._head(self._rows(tokens))

    def draft_logits(self, tokens: list[int]) -> np.ndarray:
        """The prediction layer's, float64 [len(tokens) - 1, vocab]: row j continues the model's row j with token j +
        1."""
        layer, number = self.description.prediction, len(self.description.layers)
        assert layer is not None
        block = f"blk.{number}."
        embedding = block + "nextn.embed_tokens.weight"
        following = self._tensor(embedding if embedding in self._infos else "token_embd.weight")[tokens[1:]]
        joined = [self._norm(following, block + "nextn.enorm"),
                  self._norm(self._rows(tokens)[:-1], block + "nextn.hnorm")]
        x = self._layer(number, layer, self._linear(np.hstack(joined), block + "nextn.eh_proj"), None)
        norm = block + "nextn.shared_head_norm"
        return self._head(self._norm(x, norm if norm + ".weight" in self._infos else "output_norm"))

    # --- The whole ---

    def _rows(self, tokens: list[int]) -> np.ndarray:
        """What the output head reads."""
        x = self._tensor("token_embd.weight")[tokens] * self.description.embedding_scale
        self._tokens = tokens
        if self.description.streams is not None:
            x = streamed(self.description, x, self._layer, (self._linear, self._tensor))
            return self._pre_norm(x, "output_norm")
        inputs = self._layer_inputs(tokens, x) if self.description.input_width else None
        for number, layer in enumerate(self.description.layers):
            x = self._layer(number, layer, x, inputs)
        return self._pre_norm(x, "output_norm")

    def _head(self, rows: np.ndarray) -> np.ndarray:
        logits = self._linear(rows, "output" if "output.weight" in self._infos else "token_embd")
        return softcapped(logits * self.description.logit_scale, self.description.logit_softcap)

    def _layer_inputs(self, tokens: list[int], x: np.ndarray) -> np.ndarray:
        """[tokens, layers, width]: each layer's own embedding of a token, and what the model makes of the common
        one."""
        shape = (len(tokens), len(self.description.layers), self.description.input_width)
        own = self._tensor("per_layer_token_embd.weight")[tokens].reshape(shape) * np.sqrt(shape[2])
        common = self._linear(x / np.sqrt(x.shape[1]), "per_layer_model_proj").reshape(shape)
        return (self._norm(common, "per_layer_proj_norm") + own) / np.sqrt(2)

    def _layer(self, number: int, layer: Layer, x: np.ndarray, inputs: np.ndarray | None) -> np.ndarray:
        block, before = f"blk.{number}.", x
        normed = x if layer.pre_norms == "none" else self._pre_norm(x, block + "attn_norm")
        if layer.mixer is not None:
            read, epsilon = (self._linear, self._tensor), self.description.epsilon
            mixed = sum(self._attention(number, part, normed) if isinstance(part, Attention) else
                        self._delta(block, part, normed) if isinstance(part, Delta) else
                        block_attention(part, block, normed, read, epsilon) if isinstance(part, Blocks) else
                        mamba(part, block, normed, read, epsilon)
                        for part in (layer.mixer, layer.mamba) if part is not None)
            x = x + layer.factor * (self._norm(mixed, block + "post_attention_norm") if layer.post_norms else mixed)
        if layer.feeds:
            if layer.pre_norms != "one":
                normed = x if layer.pre_norms == "none" else self._pre_norm(x, block + layer.ffn_norm)
            fed = self._feed(block, layer, x, normed)
            x = x + layer.factor * (self._norm(fed, block + "post_ffw_norm") if layer.post_norms else fed)
        if layer.inputs and inputs is not None:
            inner = activate(layer.activation, self._linear(x, block + "inp_gate"), inputs[:, number])
            x = x + self._norm(self._linear(inner, block + "proj"), block + "post_norm")
        if not layer.scales:
            return x
        scale = self._tensor(block + "layer_output_scale.weight")
        return x * scale if layer.scales == "the stream" else before + (x - before) * scale

    # --- Tensors ---

    def _tensor(self, name: str) -> np.ndarray:
        """float64, outermost dimension first."""
        if name not in self._read:
            self._read[name] = self._dequantized(name)
        return self._read[name]

    def _dequantized(self, name: str) -> np.ndarray:
        info = self._infos[name]
        raw = np.fromfile(self._file.paths[info.file], np.uint8, info.nbytes, offset=info.offset)
        rows = raw.reshape(int(np.prod(info.shape[1:])), -1)
        data = rows.view(np.int32) if info.type_name == "I32" else dequantized(rows, info.type_name)
        return data.reshape(info.shape[::-1]).astype(np.float64)

    def _linear(self, x: np.ndarray, name: str, expert: int | None = None) -> np.ndarray:
        """`name` lacks the endings that the matrix and its bias have."""
        parts = [self._tensor(each) for each in (f"{name}.weight", f"{name}.bias") if each in self._infos]
        if expert is not None:
            parts = [part[expert] for part in parts]
        if self._int8 and self._infos[f"{name}.weight"].type_name not in _FLOATS:
            x = round_int8(x)
        return sum(parts[1:], x @ parts[0].T)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms(x, self.description.epsilon) * self._tensor(name if name in self._infos else f"{name}.weight")

    def _pre_norm(self, x: np.ndarray, name: str) -> np.ndarray:
        """In front of a part or of the output head."""
        if not self.description.centered:
            return self._norm(x, name)
        normed = self._norm(x - x.mean(axis=-1, keepdims=True), name)
        return normed + self._tensor(f"{name}.bias") if f"{name}.bias" in self._infos else normed

    # --- Attention and what stands for it ---

    def _attention(self, number: int, kind: Attention, x: np.ndarray) -> np.ndarray:
        if kind.latent is not None:
            return self._latent(f"blk.{number}.", kind, kind.latent, x)
        block, gate = f"blk.{number}.", np.ones(1)
        q, *own = self._queries_keys_values(block, kind, x)
        if kind.gated:
            q, logit = np.split(q.reshape(len(x), kind.heads, 2 * kind.size), 2, axis=2)
            gate = sigmoid(logit).reshape(len(x), -1)
        q = self._prepared(block + "attn_q_norm", kind, q, kind.heads)
        if kind.temperature is not None:
            q = q * temperatures(kind.temperature, len(x))[:, None, None]
        if kind.source is None:
            k = self._prepared(block + "attn_k_norm", kind, own[0], kind.kv_heads)
            v = own[1].reshape(len(x), kind.kv_heads, kind.size)
            v = rms(v, self.description.epsilon) if kind.value_norm else v
            self._keys_and_values[number] = self._round_kv(k), self._round_kv(v)
        k, v = self._keys_and_values[number if kind.source is None else kind.source]
        sinks = self._tensor(block + "attn_sinks.weight") if kind.sinks else None
        return self._linear(gate * attend(kind, q, k, v, sinks).reshape(len(x), -1), block + "attn_output")

    def _latent(self, block: str, kind: Attention, latent: Latent, x: np.ndarray) -> np.ndarray:
        """As the engine multiplies: what a head makes of keys goes into its query, and of values into what it saw. With
        keys and values of their own for each head the sums are equal, but not what is rounded."""
        assert kind.rotation is not None
        if latent.narrow_queries:
            narrow = self._norm(self._linear(x, block + "attn_q_a"), block + "attn_q_a_norm")
            q = self._linear(narrow, block + "attn_q_b")
        else:
            q = self._linear(x, block + "attn_q")
        plain, turned = np.split(q.reshape(len(x), kind.heads, -1), [latent.plain], axis=2)
        up = [self._linear(plain[:, head], block + "attn_k_b", head) for head in range(kind.heads)]
        q = np.concatenate([np.stack(up, axis=1), rotate(turned, kind.rotation)], axis=2)
        if kind.temperature is not None:
            q = q * temperatures(kind.temperature, len(x))[:, None, None]
        row = self._linear(x, block + "attn_kv_a_mqa")
        shared = self._norm(row[:, : latent.rank], block + "attn_kv_a_norm") if latent.normed else row[:, : latent.rank]
        k = self._round_kv(np.hstack([shared, rotate(row[:, None, latent.rank :], kind.rotation)[:, 0]]))[:, None]
        seen = attend(kind, q, k, k[:, :, : latent.rank], None)
        values = [self._linear(seen[:, head], block + "attn_v_b", head) for head in range(kind.heads)]
        return self._linear(np.hstack(values), block + "attn_output")

    def _queries_keys_values(self, block: str, kind: Attention, x: np.ndarray) -> list[np.ndarray]:
        """Queries alone if keys and values are another layer's. Keys are the values too if there is no matrix of
        values."""
        if block + "attn_qkv.weight" in self._infos:
            q_end = kind.heads * kind.size
            return np.split(self._linear(x, block + "attn_qkv"), [q_end, q_end + kind.kv_heads * kind.size], axis=1)
        names = ["attn_q"] if kind.source is not None else ["attn_q", "attn_k", "attn_v"]
        found = [self._linear(x, block + name) for name in names if f"{block}{name}.weight" in self._infos]
        return found if len(found) == len(names) else [*found, found[-1]]

    def _prepared(self, norm: str, kind: Attention, rows: np.ndarray, heads: int) -> np.ndarray:
        """Queries or keys by head, with norm and positions."""
        def normed(x: np.ndarray) -> np.ndarray:
            return rms(x, self.description.epsilon) if kind.norm == "head without weights" else self._norm(x, norm)

        x = (self._norm(rows, norm) if kind.norm == "row" else rows).reshape(len(rows), heads, kind.size)
        by_head = kind.norm.startswith("head")
        if by_head and not kind.norm_last:
            x = normed(x)
        if kind.rotation is not None:
            x = rotate(x, kind.rotation, self._tensor(kind.rotation.factors) if kind.rotation.factors else 1.0)
        return normed(x) if by_head and kind.norm_last else x

    def _delta(self, block: str, kind: Delta, x: np.ndarray) -> np.ndarray:
        """Gated DeltaNet as its paper says it (Yang et al., 2024, equation 10), a token at a time, heads as an axis."""
        count, heads, dim, epsilon = len(x), kind.value_heads, kind.size, self.description.epsilon
        mixed = self._linear(x, block + "attn_qkv")
        taps = self._tensor(block + "ssm_conv1d.weight")
        padded = np.vstack([np.zeros((taps.shape[1] - 1, mixed.shape[1])), mixed])
        mixed = silu(sum(padded[tap : tap + count] * taps[:, tap] for tap in range(taps.shape[1])))
        q, k, v = np.split(mixed.reshape(count, -1, dim), [kind.key_heads, 2 * kind.key_heads], axis=1)
        each = np.arange(heads)
        with_key = each * kind.key_heads // heads if kind.grouped else each % kind.key_heads
        q, k = unit(q, epsilon)[:, with_key], unit(k, epsilon)[:, with_key]
        beta, alpha = self._steps(block, kind, x)
        step = sigmoid(beta)
        pace = np.log1p(np.exp(alpha + self._tensor(block + "ssm_dt.bias")))
        decay = np.exp(self._tensor(block + "ssm_a") * pace)
        state, out = np.zeros((heads, dim, dim)), np.empty_like(v)  # state: values by keys
        for t in range(count):
            erase = np.eye(dim) - step[t, :, None, None] * k[t, :, :, None] * k[t, :, None, :]
            state = (
                decay[t, :, None, None] * state @ erase + step[t, :, None, None] * v[t, :, :, None] * k[t, :, None, :]
            )
            out[t] = (state @ q[t, :, :, None])[..., 0] / np.sqrt(dim)
        z = self._linear(x, block + "attn_gate").reshape(count, heads, dim)
        return self._linear((self._norm(out, block + "ssm_norm") * silu(z)).reshape(count, -1), block + "ssm_out")

    def _steps(self, block: str, kind: Delta, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Betas and alphas of each value head."""
        if not kind.joined:
            return self._linear(x, block + "ssm_beta"), self._linear(x, block + "ssm_alpha")
        both = self._linear(x, block + "ssm_ba").reshape(len(x), kind.key_heads, 2, -1)
        return both[:, :, 0].reshape(len(x), -1), both[:, :, 1].reshape(len(x), -1)

    # --- Feed-forward parts ---

    def _feed(self, block: str, layer: Layer, x: np.ndarray, normed: np.ndarray) -> np.ndarray:
        if layer.experts is None:
            return self._dense(block, layer, normed)
        if not layer.beside:
            return self._experts(block, layer, layer.experts, x, normed)
        routed = self._experts(block, layer, layer.experts, x, self._norm(x, block + "pre_ffw_norm_2"))
        return (self._norm(self._dense(block, layer, normed), block + "post_ffw_norm_1")
                + self._norm(routed, block + "post_ffw_norm_2"))

    def _dense(self, block: str, layer: Layer, x: np.ndarray, suffix: str = "", expert: int | None = None
               ) -> np.ndarray:
        """Gate and up may be one matrix, which has the name of both or that of up alone. A part without a gate has only
        up."""
        parts = [self._linear(x, f"{block}ffn_{part}{suffix}", expert) for part in ("gate", "up", "gate_up")
                 if f"{block}ffn_{part}{suffix}.weight" in self._infos]
        if not layer.gated:
            parts.append(1.0)
        gate, up = parts if len(parts) == 2 else np.split(parts[0], 2, axis=1)
        return self._linear(activate(layer.activation, gate, up), f"{block}ffn_down{suffix}", expert)

    def _experts(self, block: str, layer: Layer, kind: Experts, x: np.ndarray, normed: np.ndarray) -> np.ndarray:
        weights = self._weights(block, kind, self._routed(block, kind, x, normed))
        read = self._linear(normed, block + "ffn_latent_down") if kind.latents else normed
        result = np.zeros_like(read)
        for expert in range(kind.count):
            rows = np.flatnonzero(weights[:, expert])
            if not rows.size:
                continue
            weight = weights[rows, expert, None]
            before, after = (weight, 1.0) if kind.weighs == "input" else (1.0, weight)
            if kind.scaled:
                after = after * self._tensor(block + "ffn_down_exps.scale")[expert]
            result[rows] += after * self._dense(block, layer, before * read[rows], "_exps", expert)
        if kind.latents:
            result = self._linear(result, block + "ffn_latent_up")
        if kind.shared:
            gate = self._tensor(block + "ffn_gate_inp_shexp.weight") if kind.shared == "gated" else None
            share = 1.0 if gate is None else sigmoid(normed @ gate)[:, None]
            own = layer if kind.shared_activation is None else replace(layer, activation=kind.shared_activation)
            result += share * self._dense(block, own, normed, "_shexp")
        return result

    def _routed(self, block: str, kind: Experts, x: np.ndarray, normed: np.ndarray) -> np.ndarray:
        """The router's logits."""
        if kind.router == "what experts read":
            return self._linear(normed, block + "ffn_gate_inp")
        read = rms(x if kind.router == "the stream" else normed, self.description.epsilon) / np.sqrt(x.shape[1])
        return self._linear(read * self._tensor(block + "ffn_gate_inp.scale"), block + "ffn_gate_inp")

    def _weights(self, block: str, kind: Experts, logits: np.ndarray) -> np.ndarray:
        """What each expert weighs, for each row; 0 for those not chosen."""
        scores = sigmoid(logits) if kind.scores == "sigmoid" else logits
        if kind.scores == "softmax":
            scores = softmax(logits)
        elif kind.scores == "root of softplus":
            scores = np.sqrt(np.logaddexp(0.0, logits))
        keys = logits if kind.groups[0] == 1 else scores  # alone, both choose alike
        if kind.biased:
            keys = scores + self._tensor(block + "exp_probs_b.bias")
        keys = in_best_groups(keys, *kind.groups)
        order, count = np.argsort(-keys, axis=1, kind="stable"), kind.used
        if kind.named:
            order = self._tensor(block + "ffn_gate_tid2eid.weight")[self._tokens].astype(int)
        elif count < kind.count:
            last, next_best = np.take_along_axis(keys, order[:, count - 1 : count + 1], axis=1).T
            gaps = (last - next_best) / np.abs(keys[np.isfinite(keys)]).max()
            self.close_choices += [(block, int(row)) for row in np.flatnonzero(gaps < CLOSE)]
        if self._otherwise is not None and self._otherwise[0] == block:
            row = order[self._otherwise[1]]
            row[count - 1], row[count] = row[count], row[count - 1]
        chosen = np.zeros_like(keys, bool)
        np.put_along_axis(chosen, order[:, :count], True, axis=1)
        if kind.scores == "softmax of chosen":
            scores = softmax(np.where(chosen, scores, -np.inf))
        weights = np.where(chosen, scores, 0.0)
        return kind.factor * (weights / weights.sum(axis=1, keepdims=True) if kind.normalized else weights)
