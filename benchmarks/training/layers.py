"""What layers of every architecture are made of."""
from __future__ import annotations

import torch
from torch import Tensor, nn

NORM_EPS = 1e-6


def matrix(*shape: int, gain: float = 0.02) -> nn.Parameter:
    """Normally distributed weights, the inner dimension last."""
    return nn.Parameter(torch.randn(*shape) * gain)


class Norm(nn.Module):
    """RMS norm in float32 over the last axis."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + NORM_EPS) * self.weight).to(x.dtype)


def turns(dims: int, base: float, context: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [context, dims / 2] by which `rotate` turns."""
    frequency = base ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    angle = torch.arange(context, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding over halves: element i < d/2 is paired with i + d/2. x: [batch, head, position, size]."""
    low, high, rest = x.float().split([cos.shape[-1], cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1).to(x.dtype)
