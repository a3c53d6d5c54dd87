"""The `qwen3moe` architecture: attention with normalized queries and keys, then a mixture of experts."""
from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from gguf import GGUFWriter
from torch import Tensor, nn

from .layers import Norm, matrix, rotate, turns

ROPE_BASE = 10000.0


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes that define a model."""

    vocab: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    experts: int
    used: int
    hidden: int
    context: int


class Layer(nn.Module):
    """Attention with normalized queries and keys, then a mixture of experts. Names follow GGUF's."""

    def __init__(self, s: Shape, dropout: float) -> None:
        super().__init__()
        out_gain = 0.02 / math.sqrt(2 * s.layers)
        self.shape, self.dropout = s, dropout
        self.attn_norm, self.ffn_norm = Norm(s.width), Norm(s.width)
        self.attn_q_norm, self.attn_k_norm = Norm(s.head_size), Norm(s.head_size)
        self.attn_q = matrix(s.heads * s.head_size, s.width)
        self.attn_k = matrix(s.kv_heads * s.head_size, s.width)
        self.attn_v = matrix(s.kv_heads * s.head_size, s.width)
        self.attn_output = matrix(s.width, s.heads * s.head_size, gain=out_gain)
        self.ffn_gate_inp = matrix(s.experts, s.width)
        self.ffn_gate_exps = matrix(s.experts, s.hidden, s.width)
        self.ffn_up_exps = matrix(s.experts, s.hidden, s.width)
        self.ffn_down_exps = matrix(s.experts, s.width, s.hidden, gain=out_gain)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s, (batch, length, _) = self.shape, x.shape
        q = F.linear(x, self.attn_q).view(batch, length, s.heads, s.head_size)
        k = F.linear(x, self.attn_k).view(batch, length, s.kv_heads, s.head_size)
        v = F.linear(x, self.attn_v).view(batch, length, s.kv_heads, s.head_size).transpose(1, 2)
        q = rotate(self.attn_q_norm(q).transpose(1, 2), cos, sin)
        k = rotate(self.attn_k_norm(k).transpose(1, 2), cos, sin)
        group = s.heads // s.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(mixed.transpose(1, 2).reshape(batch, length, -1), self.attn_output)

    def experts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Output, load-balancing loss, and each expert's share of the choices.

        Every expert is computed for every token and all but the chosen are multiplied by zero: side by side the
        experts are one matrix product, faster at this size than gathering rows.
        """
        s, (batch, length, _) = self.shape, x.shape
        with torch.autocast(x.device.type, enabled=False):
            chance = F.linear(x.float(), self.ffn_gate_inp).softmax(-1)
        top, chosen = chance.topk(s.used, dim=-1)
        weight = torch.zeros_like(chance).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
        share = (weight > 0).float().mean((0, 1)) / s.used
        balance = s.experts * (share * chance.mean((0, 1))).sum()
        gate = F.linear(x, self.ffn_gate_exps.view(-1, s.width))
        up = F.linear(x, self.ffn_up_exps.view(-1, s.width))
        hidden = (F.silu(gate) * up).view(batch, length, s.experts, s.hidden) * weight.unsqueeze(-1).to(gate.dtype)
        down = self.ffn_down_exps.permute(1, 0, 2).reshape(s.width, -1)
        return F.linear(hidden.view(batch, length, -1), down), balance, share

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + F.dropout(self.attend(self.attn_norm(x), cos, sin), self.dropout, self.training)
        out, balance, share = self.experts(self.ffn_norm(x))
        return x + F.dropout(out, self.dropout, self.training), balance, share


class ExpertModel(nn.Module):
    """The language model; input and output embedding are one matrix."""

    ARCHITECTURE = "qwen3moe"
    DESCRIPTION = "A small mixture of experts trained on public-domain English tales and children's novels."
    DEFAULTS = {"width": 384, "hidden": 192, "context": 1024}

    def __init__(self, s: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.dropout = s, dropout
        self.token_embd = matrix(s.vocab, s.width)
        self.blk = nn.ModuleList(Layer(s, dropout) for _ in range(s.layers))
        self.output_norm = Norm(s.width)
        cos, sin = turns(s.head_size, ROPE_BASE, s.context)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [batch, length, vocab], what load balancing adds to the loss, expert shares [layer, expert]."""
        cos, sin = self.cos[:tokens.shape[1]], self.sin[:tokens.shape[1]]
        x = F.dropout(F.embedding(tokens, self.token_embd), self.dropout, self.training)
        balances, shares = [], []
        for layer in self.blk:
            x, balance, share = layer(x, cos, sin)
            balances.append(balance)
            shares.append(share)
        logits = F.linear(self.output_norm(x), self.token_embd)
        return logits, 0.01 * torch.stack(balances).mean(), torch.stack(shares)

    @staticmethod
    def describe(shares: Tensor) -> str:
        """What forward's third answer, averaged, says of the model."""
        return f"share of the least and most used expert of a layer: {shares.min():.3f} {shares.max():.3f}"

    @staticmethod
    def asked(a: argparse.Namespace, vocab: int) -> Shape:
        """The shape that the command line asks for."""
        return Shape(vocab, a.layers, a.width, a.width // 64, max(1, a.width // 192), 64, 8, 2, a.hidden,
                     a.stored_context)

    @staticmethod
    def stored(size: Callable[[str], int]) -> Shape:
        """The shape of a file, whose metadata `size` reads."""
        return Shape(size("vocab_size"), size("block_count"), size("embedding_length"), size("attention.head_count"),
                     size("attention.head_count_kv"), size("attention.key_length"), size("expert_count"),
                     size("expert_used_count"), size("expert_feed_forward_length"), size("context_length"))

    def add_sizes(self, writer: GGUFWriter) -> None:
        """The metadata that `stored` reads, and what else an engine asks for."""
        s = self.shape
        writer.add_context_length(s.context)
        writer.add_embedding_length(s.width)
        writer.add_block_count(s.layers)
        writer.add_feed_forward_length(s.hidden)
        writer.add_expert_feed_forward_length(s.hidden)
        writer.add_expert_count(s.experts)
        writer.add_expert_used_count(s.used)
        writer.add_head_count(s.heads)
        writer.add_head_count_kv(s.kv_heads)
        writer.add_key_length(s.head_size)
        writer.add_value_length(s.head_size)
        writer.add_rope_dimension_count(s.head_size)
        writer.add_rope_freq_base(ROPE_BASE)
