"""The functions that layers are made of, on float64 arrays with a row for each token."""

from __future__ import annotations

import math

import numpy as np

from numpy_model.description import Activation, Attention, Rotation, Temperature

__all__ = ["activate", "attend", "in_best_groups", "rms", "rotate", "round_bf16", "round_int8", "sigmoid", "silu",
           "softcapped", "softmax", "temperatures", "unit"]

_ROWS = 256  # queries at a time


def rms(x: np.ndarray, epsilon: float) -> np.ndarray:
    """Scaled to a mean square of 1."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon)


def unit(x: np.ndarray, epsilon: float) -> np.ndarray:
    """Scaled to a length of 1."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + epsilon)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def softmax(x: np.ndarray) -> np.ndarray:
    """Of each row."""
    exps = np.exp(x - x.max(axis=1, keepdims=True))
    return exps / exps.sum(axis=1, keepdims=True)


def in_best_groups(keys: np.ndarray, groups: int, used: int) -> np.ndarray:
    """keys [rows, count] with minus infinity outside the groups whose two best keys have the largest sums."""
    if groups == 1:
        return keys
    grouped = keys.reshape(len(keys), groups, -1)
    sums = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
    best = np.argsort(-sums, axis=1, kind="stable")[:, :used]
    kept = np.full_like(grouped, -np.inf)
    np.put_along_axis(kept, best[:, :, None], np.take_along_axis(grouped, best[:, :, None], axis=1), axis=1)
    return kept.reshape(keys.shape)


def softcapped(x: np.ndarray, cap: float) -> np.ndarray:
    return cap * np.tanh(x / cap) if cap else x


def activate(activation: Activation, gate: np.ndarray, up: np.ndarray | float) -> np.ndarray:
    """What a feed-forward part multiplies by its last matrix. Without a gate, its one product is `gate`, and `up`
    is 1."""
    if activation.kind == "silu":
        return silu(gate) * up
    if activation.kind.startswith("relu"):
        return np.maximum(gate, 0.0) ** (2 if activation.kind == "relu squared" else 1) * up
    if activation.kind == "gelu":
        return gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate))) * up
    if activation.kind == "gelu by erf":
        return gate / 2 * (1 + np.vectorize(math.erf)(gate / math.sqrt(2))) * up
    gate, up = np.minimum(gate, activation.limit), np.clip(up, -activation.limit, activation.limit)
    return silu(gate) * up if activation.kind == "clamped silu" else gate * sigmoid(1.702 * gate) * (up + 1)


# --- Positions --------------------------------------------------------------------------------------------------------


def temperatures(rule: Temperature, count: int) -> np.ndarray:
    """The factor of each position's query."""
    return 1 + rule.slope * np.log(np.floor((np.arange(count) + rule.offset) / rule.length) + 1)


def _frequencies(rotation: Rotation, factors: np.ndarray | float) -> np.ndarray:
    """Radians a position of each pair."""
    pair = np.arange(rotation.dims // 2)
    plain = rotation.base ** (-2.0 * pair / rotation.dims) / factors
    yarn = rotation.yarn
    if yarn is None:
        return plain / rotation.slower

    def pair_with_turns(turns: float) -> float:
        # base ** (-2 pair / dims) * original == 2 pi turns, solved for pair
        return rotation.dims / 2 * np.log(yarn.original / (2 * np.pi * turns)) / np.log(rotation.base)

    first = max(np.floor(pair_with_turns(yarn.fast)), 0)
    last = min(np.ceil(pair_with_turns(yarn.slow)), rotation.dims - 1)
    mix = yarn.mix * (1 - np.clip((pair - first) / max(last - first, 0.001), 0, 1))
    return plain * mix + plain / yarn.factor * (1 - mix)


def rotate(x: np.ndarray, rotation: Rotation, factors: np.ndarray | float = 1.0,
           positions: np.ndarray | None = None) -> np.ndarray:
    """x [tokens, heads, size] with its first elements turned by the tokens' positions: their numbers, if not given."""
    angles = (np.arange(len(x)) if positions is None else positions)[:, None] * _frequencies(rotation, factors)
    turn = (rotation.magnitude * np.exp(1j * angles))[:, None, :]
    result, dims = x.copy(), rotation.dims
    evens, odds = (slice(0, dims, 2), slice(1, dims, 2)) if rotation.adjacent else (slice(0, dims // 2),
                                                                                   slice(dims // 2, dims))
    pairs = (x[..., evens] + 1j * x[..., odds]) * turn
    result[..., evens], result[..., odds] = pairs.real, pairs.imag
    return result


# --- Attention --------------------------------------------------------------------------------------------------------


def _first_seen(kind: Attention, query: int) -> int:
    if kind.window:
        return max(0, query - kind.window + 1)
    return query // kind.chunk * kind.chunk if kind.chunk else 0


def _seen(kind: Attention, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    seen = keys <= queries
    if kind.window:
        seen = seen & (queries - keys < kind.window)
    if kind.chunk:
        seen = seen & (queries // kind.chunk == keys // kind.chunk)
    return seen


def attend(kind: Attention, q: np.ndarray, k: np.ndarray, v: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    """[tokens, heads, size of values], for q [tokens, heads, size] and k, v [tokens, kv_heads, ..]. A sink is a score
    without a value."""
    result = np.empty((*q.shape[:2], v.shape[2]))
    for begin in range(0, len(q), _ROWS):
        queries = np.arange(begin, min(begin + _ROWS, len(q)))[:, None]
        keys = np.arange(_first_seen(kind, begin), queries[-1, 0] + 1)
        seen = _seen(kind, queries, keys)
        for head in range(kind.heads):
            shared = head // (kind.heads // kind.kv_heads)
            scores = softcapped(kind.scale * (q[queries[:, 0], head] @ k[keys, shared].T), kind.softcap)
            scores = np.where(seen, scores, -np.inf)
            sink = np.full((len(queries), 1), -np.inf if sinks is None else sinks[head])
            most = np.maximum(scores.max(axis=1, keepdims=True), sink)
            weights = np.exp(scores - most)
            result[queries[:, 0], head] = weights @ v[keys, shared] / (
                weights.sum(axis=1, keepdims=True) + np.exp(sink - most))
    return result


# --- What is rounded --------------------------------------------------------------------------------------------------


def round_int8(x: np.ndarray) -> np.ndarray:
    """In blocks of 32, whose steps have 16 significant bits."""
    blocks = x.reshape(-1, 32)
    fraction, exponent = np.frexp(np.abs(blocks).max(axis=1, keepdims=True) / 127)
    step = np.ldexp(np.ceil(np.ldexp(fraction, 16)), exponent - 16)
    whole = np.rint(np.divide(blocks, step, out=np.zeros_like(blocks), where=step > 0))
    return (whole * step).reshape(x.shape)


def round_bf16(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)
