"""Mamba 2 (Dao and Gu, 2024): a sum over earlier tokens takes the place of the recurrence."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from numpy_model.description import Mamba
from numpy_model.parts import rms, silu

__all__ = ["mamba"]

_TENSORS = ("conv1d.weight", "conv1d.bias", "dt.bias", "a", "d")

_Model = tuple[Callable[[np.ndarray, str], np.ndarray], Callable[[str], np.ndarray]]


def mamba(kind: Mamba, block: str, x: np.ndarray, model: _Model, epsilon: float) -> np.ndarray:
    """What the layer adds. `model`: products with its matrices, and its tensors, both by name."""
    linear, tensor = model
    names = (*_TENSORS, "norm.weight") if kind.norm_groups else _TENSORS
    tensors = {part: tensor(f"{block}ssm_{part}") for part in names}
    return linear(_inner(kind, linear(x, block + "ssm_in"), tensors, epsilon), block + "ssm_out")


def _inner(kind: Mamba, projected: np.ndarray, tensors: Mapping[str, np.ndarray], epsilon: float) -> np.ndarray:
    """What the last product reads. `projected`: what the first one gives, row by row: gates, x, B, C and steps."""
    count, inner, states = len(projected), kind.inner, kind.groups * kind.state
    z, mixed, dt = np.split(projected, [inner, 2 * inner + 2 * states], axis=1)
    mixed = silu(_convolved(kind, mixed, tensors))
    sizes = {"x": inner, "B": states, "C": states}
    parts = np.split(mixed, np.cumsum([sizes[part] for part in kind.order])[:2], axis=1)
    x, b, c = (dict(zip(kind.order, parts, strict=True))[part] for part in "xBC")
    heads = np.arange(kind.heads)
    shared = heads * kind.groups // kind.heads if kind.grouped else heads % kind.groups
    x = x.reshape(count, kind.heads, -1)
    b, c = (part.reshape(count, kind.groups, -1)[:, shared] for part in (b, c))
    y = _summed(kind, x, b, c, dt + tensors["dt.bias"] * kind.step_biased, tensors["a"][:, 0])
    y = (y + x * tensors["d"] if kind.skips else y).reshape(count, inner)
    if kind.gate == "before the norm":
        y = y * silu(z)
    if kind.norm_groups:
        weights = tensors["norm.weight"].reshape(kind.norm_groups, -1)
        y = (rms(y.reshape(count, kind.norm_groups, -1), epsilon) * weights).reshape(count, inner)
    return y * silu(z) if kind.gate == "after the norm" else y


def _convolved(kind: Mamba, rows: np.ndarray, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    taps = tensors["conv1d.weight"]
    padded = np.vstack([np.zeros((taps.shape[1] - 1 + kind.delay, rows.shape[1])), rows])
    bias = tensors["conv1d.bias"] if kind.biased else 0.0
    return sum(padded[tap : tap + len(rows)] * taps[:, tap] for tap in range(taps.shape[1])) + bias


def _summed(kind: Mamba, x: np.ndarray, b: np.ndarray, c: np.ndarray, dt: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """Token t's head gives the sum over tokens s <= t of x_s step_s (B_s . C_t), times what has decayed since."""
    step = np.log1p(np.exp(dt)) if kind.softplus else dt
    faded = np.cumsum(step * rate, axis=0)
    result = np.empty_like(x)
    for head in range(kind.heads):
        since = faded[:, None, head] - faded[None, :, head]
        weight = np.tril(np.exp(np.minimum(since, 0.0)) if kind.decays else np.ones_like(since))
        weight = weight * (c[:, head] @ b[:, head].T)
        result[:, head] = weight @ (x[:, head] * step[:, head, None] if kind.scaled else x[:, head])
    return result
