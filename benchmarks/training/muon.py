"""The optimizer of the big matrices."""
from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def orthogonalize(matrices: Tensor) -> Tensor:
    """Newton-Schulz iteration toward the nearest orthogonal matrix, for a stack [n, rows, columns]."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return (x.mT if tall else x).float()


class Muon:
    """Muon (momentum, then orthogonalized updates) for the big matrices; matrices of one shape go as one stack.

    Updates are scaled to the root mean square of a typical AdamW step, so both optimizers share a learning rate.
    """

    def __init__(self, parameters: list[nn.Parameter], decay: float) -> None:
        self.decay = decay
        self.groups: dict[tuple[int, int], list[nn.Parameter]] = {}
        for p in parameters:
            self.groups.setdefault((p.shape[-2], p.shape[-1]), []).append(p)
        self.momentum = {p: torch.zeros_like(p) for p in parameters}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for shape, members in self.groups.items():
            grads, momenta = [p.grad for p in members], [self.momentum[p] for p in members]
            torch._foreach_lerp_(momenta, grads, 0.05)
            ahead = torch._foreach_lerp(grads, momenta, 0.95)
            updates = orthogonalize(torch.cat([u.reshape(-1, *shape) for u in ahead]))
            torch._foreach_mul_(members, 1 - rate * self.decay)
            start, scale = 0, -rate * 0.2 * math.sqrt(max(shape))
            for p in members:
                count = p.numel() // (shape[0] * shape[1])
                p.add_(updates[start:start + count].view_as(p), alpha=scale)
                start += count
