"""The forward pass once more, in float64 numpy and as plainly as it can be said: what the engine is held against.

It shares no code with the engine but the reading of the file's container. Tensors are dequantized by the `gguf`
package. Each call works on a whole sequence, without a KV cache.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from sharpi.files.gguf import GgufFile

__all__ = ["NumpyModel", "relative_error"]

_FLOATS = ("F32", "F16", "BF16")


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference, relative to that of what is expected."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


class NumpyModel:
    """A model file, run by numpy.

    int8_activations: round what goes into a quantized matrix as the engine does, to int8 in blocks of 32; left out,
    nothing is rounded. kv_dtype: round keys and values as a cache of that type does. otherwise: (layer, row) where the
    last of the chosen experts gives way to the next best.

    closest_choice: after a call, (gap, layer, row) of the closest choice of experts: the gap between the last chosen
    one and the next best, as a part of the layer's largest router logit.
    """

    def __init__(self, path: Path, *, int8_activations: bool = False, kv_dtype: str = "fp32",
                 otherwise: tuple[str, int] | None = None) -> None:
        self._otherwise = otherwise
        self.closest_choice: tuple[float, str, int] | None = None
        self._file = GgufFile.open(path)
        self._infos = {tensor.name: tensor for tensor in self._file.tensors}
        self._read: dict[str, np.ndarray] = {}
        self._int8 = int8_activations
        self._round_kv = {"fp32": lambda x: x, "fp16": lambda x: x.astype(np.float16).astype(np.float64),
                          "bf16": _round_bf16}[kv_dtype]
        self._arch = self._file.architecture
        self._heads = self._key("attention.head_count")
        self._kv_heads = self._key("attention.head_count_kv", self._heads)
        self._head_dim = self._key("attention.key_length", self._key("embedding_length") // self._heads)
        self._epsilon = self._key("attention.layer_norm_rms_epsilon")

    def logits(self, tokens: list[int]) -> np.ndarray:
        """float64 [len(tokens), vocab]."""
        return self._head(self._rows(tokens))

    def draft_logits(self, tokens: list[int]) -> np.ndarray:
        """The prediction layer's, float64 [len(tokens) - 1, vocab]: row j continues the model's row j with token j +
        1."""
        block = f"blk.{self._layers()}."
        embedding = block + "nextn.embed_tokens.weight"
        following = self._tensor(embedding if embedding in self._infos else "token_embd.weight")[tokens[1:]]
        joined = [self._norm(following, block + "nextn.enorm.weight"),
                  self._norm(self._rows(tokens)[:-1], block + "nextn.hnorm.weight")]
        x = self._layer(block, self._linear(np.hstack(joined), block + "nextn.eh_proj.weight"))
        norm = block + "nextn.shared_head_norm.weight"
        return self._head(self._norm(x, norm if norm in self._infos else "output_norm.weight"))

    def _layers(self) -> int:
        return self._key("block_count") - self._key("nextn_predict_layers", 0)

    def _rows(self, tokens: list[int]) -> np.ndarray:
        """What the output head reads."""
        x = self._tensor("token_embd.weight")[tokens]
        for layer in range(self._layers()):
            x = self._layer(f"blk.{layer}.", x)
        return self._norm(x, "output_norm.weight")

    def _head(self, rows: np.ndarray) -> np.ndarray:
        return self._linear(rows, "output.weight" if "output.weight" in self._infos else "token_embd.weight")

    def _layer(self, block: str, x: np.ndarray) -> np.ndarray:
        normed = self._norm(x, block + "attn_norm.weight")
        recurrent = block + "ssm_a" in self._infos
        x = x + (self._delta(block, normed) if recurrent else self._attention(block, normed))
        after = block + "post_attention_norm.weight"
        normed = self._norm(x, after if after in self._infos else block + "ffn_norm.weight")
        experts = block + "ffn_gate_inp.weight" in self._infos
        return x + (self._experts(block, normed) if experts else self._dense(block, normed))

    def _key(self, name: str, default: float | None = None):
        value = self._file.metadata.get(f"{self._arch}.{name}", default)
        assert value is not None, name
        return value

    def _tensor(self, name: str) -> np.ndarray:
        """float64, outermost dimension first."""
        if name not in self._read:
            self._read[name] = self._dequantized(name)
        return self._read[name]

    def _dequantized(self, name: str) -> np.ndarray:
        info = self._infos[name]
        raw = np.fromfile(self._file.paths[info.file], np.uint8, info.nbytes, offset=info.offset)
        rows = raw.reshape(int(np.prod(info.shape[1:])), -1)
        data = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[info.type_name])
        return data.reshape(info.shape[::-1]).astype(np.float64)

    def _linear(self, x: np.ndarray, name: str, expert: int | None = None) -> np.ndarray:
        matrix = self._tensor(name)
        if self._int8 and self._infos[name].type_name not in _FLOATS:
            x = _round_int8(x)
        return x @ (matrix if expert is None else matrix[expert]).T

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self._epsilon) * self._tensor(name)

    def _attention(self, block: str, x: np.ndarray) -> np.ndarray:
        count = len(x)
        q, k, v = self._qkv(block, x)
        gate = 1.0
        if self._arch.startswith("qwen35"):
            q, logit = np.split(q.reshape(count, self._heads, 2 * self._head_dim), 2, axis=2)
            gate = _sigmoid(logit).reshape(count, -1)
        if self._arch == "olmoe":
            q, k = self._norm(q, block + "attn_q_norm.weight"), self._norm(k, block + "attn_k_norm.weight")
        q = q.reshape(count, self._heads, self._head_dim)
        k = k.reshape(count, self._kv_heads, self._head_dim)
        v = v.reshape(count, self._kv_heads, self._head_dim)
        if self._arch.startswith("qwen3"):
            q, k = self._norm(q, block + "attn_q_norm.weight"), self._norm(k, block + "attn_k_norm.weight")
        if self._embeds_positions(block):
            q, k = self._rotate(q), self._rotate(k)
        k, v = self._round_kv(k), self._round_kv(v)
        result = np.empty_like(q)
        for head in range(self._heads):
            shared = head // (self._heads // self._kv_heads)
            for row in range(count):
                scores = k[: row + 1, shared] @ q[row, head] / np.sqrt(self._head_dim)
                weights = np.exp(scores - scores.max())
                result[row, head] = weights @ v[: row + 1, shared] / weights.sum()
        return self._linear(gate * result.reshape(count, -1), block + "attn_output.weight")

    def _delta(self, block: str, x: np.ndarray) -> np.ndarray:
        """Gated DeltaNet as its paper says it (Yang et al., 2024, equation 10), a token at a time, heads as an axis."""
        count, heads, dim = len(x), self._key("ssm.time_step_rank"), self._key("ssm.state_size")
        mixed = self._linear(x, block + "attn_qkv.weight")
        taps = self._tensor(block + "ssm_conv1d.weight")
        padded = np.vstack([np.zeros((taps.shape[1] - 1, mixed.shape[1])), mixed])
        mixed = _silu(sum(padded[tap : tap + count] * taps[:, tap] for tap in range(taps.shape[1])))
        keys = self._key("ssm.group_count")
        q, k, v = np.split(mixed.reshape(count, -1, dim), [keys, 2 * keys], axis=1)
        # Value head h goes with key head h mod keys.
        q, k = (np.tile(_unit(part), (1, heads // keys, 1)) for part in (q, k))
        step = _sigmoid(self._linear(x, block + "ssm_beta.weight"))
        pace = np.log1p(np.exp(self._linear(x, block + "ssm_alpha.weight") + self._tensor(block + "ssm_dt.bias")))
        decay = np.exp(self._tensor(block + "ssm_a") * pace)
        state, out = np.zeros((heads, dim, dim)), np.empty_like(v)  # state: values by keys
        for t in range(count):
            erase = np.eye(dim) - step[t, :, None, None] * k[t, :, :, None] * k[t, :, None, :]
            state = (
                decay[t, :, None, None] * state @ erase + step[t, :, None, None] * v[t, :, :, None] * k[t, :, None, :]
            )
            out[t] = (state @ q[t, :, :, None])[..., 0] / np.sqrt(dim)
        z = self._linear(x, block + "attn_gate.weight").reshape(count, heads, dim)
        return self._linear(
            (self._norm(out, block + "ssm_norm.weight") * _silu(z)).reshape(count, -1), block + "ssm_out.weight"
        )

    def _qkv(self, block: str, x: np.ndarray) -> list[np.ndarray]:
        def biased(name: str) -> np.ndarray:
            y = self._linear(x, f"{block}{name}.weight")
            return y + self._tensor(f"{block}{name}.bias") if f"{block}{name}.bias" in self._infos else y

        if block + "attn_qkv.weight" in self._infos:
            q_end = self._heads * self._head_dim
            return np.split(biased("attn_qkv"), [q_end, q_end + self._kv_heads * self._head_dim], axis=1)
        return [biased("attn_q"), biased("attn_k"), biased("attn_v")]

    def _embeds_positions(self, block: str) -> bool:
        """Every fourth layer of SmolLM3 does without."""
        return self._arch != "smollm3" or (int(block.split(".")[1]) + 1) % 4 != 0

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        dims = self._key("rope.dimension_count", self._head_dim)
        frequencies, magnitude = self._frequencies(dims)
        angles = np.arange(len(x))[:, None] * frequencies
        turn = (magnitude * np.exp(1j * angles))[:, None, :]
        result = x.copy()
        if self._arch in ("llama", "smollm3"):
            pairs = (x[..., 0:dims:2] + 1j * x[..., 1:dims:2]) * turn
            result[..., 0:dims:2], result[..., 1:dims:2] = pairs.real, pairs.imag
        else:
            half = dims // 2
            pairs = (x[..., :half] + 1j * x[..., half:dims]) * turn
            result[..., :half], result[..., half:dims] = pairs.real, pairs.imag
        return result

    def _frequencies(self, dims: int) -> tuple[np.ndarray, float]:
        """Radians a position of each pair, and the length that turning gives. YaRN: Peng et al., 2023."""
        base = self._key("rope.freq_base", 10000.0)
        pair = np.arange(dims // 2)
        plain = base ** (-2.0 * pair / dims)
        if "rope_freqs.weight" in self._infos:
            plain = plain / self._tensor("rope_freqs.weight")
        kind = self._key("rope.scaling.type", "none")
        if kind == "none":
            return plain, 1.0
        factor = self._key("rope.scaling.factor")
        if kind == "linear":
            return plain / factor, 1.0
        original = self._key("rope.scaling.original_context_length")

        def pair_with_turns(turns: float) -> float:
            # base ** (-2 pair / dims) * original == 2 pi turns, solved for pair
            return dims / 2 * np.log(original / (2 * np.pi * turns)) / np.log(base)

        first = max(np.floor(pair_with_turns(self._key("rope.scaling.yarn_beta_fast", 32.0))), 0)
        last = min(np.ceil(pair_with_turns(self._key("rope.scaling.yarn_beta_slow", 1.0))), dims - 1)
        stretched = np.clip((pair - first) / max(last - first, 0.001), 0, 1)
        mix = self._key("rope.scaling.yarn_ext_factor", 1.0) * (1 - stretched)
        length = self._key("rope.scaling.attn_factor", 1.0) * (1 + 0.1 * np.log(factor))
        return plain * mix + plain / factor * (1 - mix), length

    def _dense(self, block: str, x: np.ndarray) -> np.ndarray:
        hidden = _silu(self._linear(x, block + "ffn_gate.weight")) * self._linear(x, block + "ffn_up.weight")
        return self._linear(hidden, block + "ffn_down.weight")

    def _experts(self, block: str, x: np.ndarray) -> np.ndarray:
        scores = self._linear(x, block + "ffn_gate_inp.weight")
        probabilities = np.exp(scores - scores.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        order, count = np.argsort(-probabilities, axis=1, kind="stable"), self._key("expert_used_count")
        self._note_choice(
            block, np.take_along_axis(scores, order, axis=1)[:, count - 1 : count + 1], np.abs(scores).max()
        )
        if self._otherwise is not None and self._otherwise[0] == block:
            row = order[self._otherwise[1]]
            row[count - 1], row[count] = row[count], row[count - 1]
        used = order[:, :count]
        weights = np.zeros_like(probabilities)
        np.put_along_axis(weights, used, np.take_along_axis(probabilities, used, axis=1), axis=1)
        if self._arch != "olmoe":
            weights /= weights.sum(axis=1, keepdims=True)
        result = np.zeros_like(x)
        for expert in range(self._key("expert_count")):
            rows = np.flatnonzero(weights[:, expert])
            if rows.size:
                result[rows] += weights[rows, expert, None] * self._expert(block, x[rows], expert)
        if block + "ffn_gate_inp_shexp.weight" in self._infos:
            share = _sigmoid(x @ self._tensor(block + "ffn_gate_inp_shexp.weight"))
            hidden = _silu(self._linear(x, block + "ffn_gate_shexp.weight")) * self._linear(
                x, block + "ffn_up_shexp.weight"
            )
            result += share[:, None] * self._linear(hidden, block + "ffn_down_shexp.weight")
        return result

    def _note_choice(self, block: str, scores: np.ndarray, largest: float) -> None:
        if scores.shape[1] < 2:
            return  # all are chosen
        gaps = (scores[:, 0] - scores[:, 1]) / largest
        row = int(gaps.argmin())
        if self.closest_choice is None or gaps[row] < self.closest_choice[0]:
            self.closest_choice = (float(gaps[row]), block, row)

    def _expert(self, block: str, x: np.ndarray, expert: int) -> np.ndarray:
        if block + "ffn_gate_up_exps.weight" in self._infos:
            gate, up = np.split(self._linear(x, block + "ffn_gate_up_exps.weight", expert), 2, axis=1)
        else:
            gate = self._linear(x, block + "ffn_gate_exps.weight", expert)
            up = self._linear(x, block + "ffn_up_exps.weight", expert)
        return self._linear(_silu(gate) * up, block + "ffn_down_exps.weight", expert)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _round_int8(x: np.ndarray) -> np.ndarray:
    blocks = x.reshape(-1, 32)
    step = np.abs(blocks).max(axis=1, keepdims=True) / 127
    whole = np.rint(np.divide(blocks, step, out=np.zeros_like(blocks), where=step > 0))
    return (whole * step).reshape(x.shape)


def _round_bf16(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)
