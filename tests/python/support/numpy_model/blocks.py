"""DeepSeek V4: attention over compressed keys of blocks of tokens, and streams of residuals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from numpy_model.description import Blocks, Description, Indexer, Layer, Rotation, Streams
from numpy_model.parts import rms, rotate, sigmoid

__all__ = ["block_attention", "streamed"]

_OVERLAPPING = 4  # a block of 4 tokens is also made of the 4 tokens before it

_Model = tuple[Callable[[np.ndarray, str], np.ndarray], Callable[[str], np.ndarray]]


class _Tensors:
    """A layer's products and norms, by names within it."""

    def __init__(self, block: str, model: _Model, epsilon: float) -> None:
        self.block, self.epsilon = block, epsilon
        self._linear, self._tensor = model

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return self._linear(x, self.block + name)

    def tensor(self, name: str) -> np.ndarray:
        return self._tensor(f"{self.block}{name}.weight")

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms(x, self.epsilon) * self.tensor(name)


# --- Attention --------------------------------------------------------------------------------------------------------


def block_attention(kind: Blocks, block: str, x: np.ndarray, model: _Model, epsilon: float) -> np.ndarray:
    """What the layer adds. `model`: products with its matrices, and its tensors, both by name."""
    own, count = _Tensors(block, model, epsilon), len(x)
    narrow = own.norm(own.linear(x, "attn_q_a"), "attn_q_a_norm")
    q = rms(own.linear(narrow, "attn_q_b").reshape(count, kind.heads, kind.size), epsilon)
    q = _end_turned(q, kind.rotation, np.arange(count))
    keys = _end_turned(own.norm(own.linear(x, "attn_kv"), "attn_kv_a_norm")[:, None], kind.rotation,
                       np.arange(count))[:, 0]
    behind = np.arange(count)[:, None] - np.arange(count)
    seen = (behind >= 0) & (behind < kind.window)
    if kind.block and kind.compressed:
        rows = _compressed(kind, kind.size, own, x, "attn_compressor")
        finished = (np.arange(count)[:, None] + 1) // kind.block > np.arange(len(rows))
        if kind.indexer is not None:
            finished = _chosen(kind, kind.indexer, own, x, narrow, finished)
        keys, seen = np.concatenate([keys, rows]), np.hstack([seen, finished])
    found = _attended(q, keys, seen, own.tensor("attn_sinks"))
    if kind.turns_back:
        found = _end_turned(found, kind.rotation, -np.arange(count))
    found = found.reshape(count, kind.groups, -1) if kind.grouped else (
        found.reshape(count, -1, kind.groups, kind.size).swapaxes(1, 2).reshape(count, kind.groups, -1))
    first = own.tensor("attn_output_a").reshape(kind.groups, -1, found.shape[2])
    return own.linear(np.einsum("tgd,grd->tgr", found, first).reshape(count, -1), "attn_output_b")


def _end_turned(x: np.ndarray, rotation: Rotation, positions: np.ndarray) -> np.ndarray:
    """x [tokens, heads, size] with the last elements turned."""
    plain, end = np.split(x, [x.shape[2] - rotation.dims], axis=2)
    return np.concatenate([plain, rotate(end, rotation, positions=positions)], axis=2)


def _compressed(kind: Blocks, size: int, own: _Tensors, x: np.ndarray, name: str) -> np.ndarray:
    """[finished blocks, size]: of a block's tokens a mean, by gates. If blocks overlap, the first half of a token's row
    is for the block after its own."""
    blocks = len(x) // kind.block
    rows = x[: blocks * kind.block]
    values = own.linear(rows, name + "_kv").reshape(blocks, kind.block, -1)
    gates = own.linear(rows, name + "_gate").reshape(blocks, kind.block, -1) + own.tensor(name + "_ape")
    if kind.block == _OVERLAPPING:
        nothing = np.zeros((1, kind.block, size))
        values = np.hstack([np.concatenate([nothing, values[:-1, :, :size]]), values[..., size:]])
        gates = np.hstack([np.concatenate([nothing - np.inf, gates[:-1, :, :size]]), gates[..., size:]])
    weights = np.exp(gates - gates.max(axis=1, keepdims=True))
    mean = own.norm((values * weights).sum(axis=1) / weights.sum(axis=1), name + "_norm")
    return _end_turned(mean[:, None], kind.rotation, np.arange(blocks) * kind.block)[:, 0]


def _chosen(kind: Blocks, indexer: Indexer, own: _Tensors, x: np.ndarray, narrow: np.ndarray, finished: np.ndarray
            ) -> np.ndarray:
    """[tokens, blocks]: the finished blocks with the best scores."""
    q = own.linear(narrow, "indexer.attn_q_b").reshape(len(x), indexer.heads, indexer.size)
    q = _end_turned(q, kind.rotation, np.arange(len(x)))
    rows = _compressed(kind, indexer.size, own, x, "indexer_compressor")
    by_head = np.maximum(np.einsum("thd,sd->ths", q, rows), 0.0)
    scores = np.einsum("ths,th->ts", by_head, own.linear(x, "indexer.proj") / np.sqrt(indexer.heads * indexer.size))
    best = np.argsort(np.where(finished, -scores, np.inf), axis=1, kind="stable")[:, : indexer.best]
    chosen = np.zeros_like(finished)
    np.put_along_axis(chosen, best, True, axis=1)
    return finished & chosen


def _attended(q: np.ndarray, keys: np.ndarray, seen: np.ndarray, sinks: np.ndarray) -> np.ndarray:
    """[tokens, heads, size]. A sink is a score without a value."""
    scores = np.where(seen[:, None], np.einsum("thd,sd->ths", q, keys) / np.sqrt(q.shape[2]), -np.inf)
    most = np.maximum(scores.max(axis=2), sinks)[..., None]
    weights = np.exp(scores - most)
    return weights @ keys / (weights.sum(axis=2, keepdims=True) + np.exp(sinks[:, None] - most))


# --- Streams ----------------------------------------------------------------------------------------------------------


def streamed(description: Description, x: np.ndarray, after: Callable[[int, Layer, np.ndarray, None], np.ndarray],
             model: _Model) -> np.ndarray:
    """What the output head's norm reads, of embeddings x. `after`: a row after the layer of a number, which is given a
    layer of one part at a time."""
    kind, epsilon = description.streams, description.epsilon
    assert kind is not None
    streams = np.repeat(x[:, None], kind.count, axis=1)
    for number, layer in enumerate(description.layers):
        for name, part in (("hc_attn", replace(layer, feeds=False)), ("hc_ffn", replace(layer, mixer=None))):
            read, factors, mixed = _entered(kind, streams, f"blk.{number}.{name}", model, epsilon)
            streams = mixed + factors[..., None] * (after(number, part, read, None) - read)[:, None]
    return _joined(kind, streams, model, epsilon)


def _entered(kind: Streams, streams: np.ndarray, name: str, model: _Model, epsilon: float
             ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of streams [tokens, count, width]: what a part reads, by what factors its result is added to them [tokens,
    count], and what they are when they were mixed."""
    count = kind.count
    read, factors, mix = np.split(_mixes(streams, name, model, epsilon), [count, 2 * count], axis=1)
    scale, base = (model[1](f"{name}_{part}.weight") for part in ("scale", "base"))
    read = sigmoid(read * scale[0] + base[:count]) + kind.epsilon
    factors = 2 * sigmoid(factors * scale[1] + base[count : 2 * count])
    mix = np.exp(mix * scale[2] + base[2 * count :]).reshape(-1, count, count)  # from, to
    mix = mix / mix.sum(axis=2, keepdims=True) + kind.epsilon
    for _ in range(kind.iterations - 1):
        mix = mix / (mix.sum(axis=1, keepdims=True) + kind.epsilon)
        mix = mix / (mix.sum(axis=2, keepdims=True) + kind.epsilon)
    mix = mix / (mix.sum(axis=1, keepdims=True) + kind.epsilon)
    mixed = np.einsum("tab,tae->tbe", mix, streams) if kind.mixes else streams
    return (read[..., None] * streams).sum(axis=1), factors, mixed


def _joined(kind: Streams, streams: np.ndarray, model: _Model, epsilon: float) -> np.ndarray:
    scale, base = (model[1](f"output_hc_{part}.weight") for part in ("scale", "base"))
    factors = sigmoid(_mixes(streams, "output_hc", model, epsilon) * scale + base) + kind.epsilon
    return (factors[..., None] * streams).sum(axis=1)


def _mixes(streams: np.ndarray, name: str, model: _Model, epsilon: float) -> np.ndarray:
    return model[0](rms(streams.reshape(len(streams), -1), epsilon), name + "_fn")
