"""The `qwen35` architecture: Gated DeltaNet with attention in every few layers, and a layer that predicts a further
token.

Gated DeltaNet: Yang et al., 2024 (arXiv 2412.06464). The prediction layer: DeepSeek-V3, 2.2 (arXiv 2412.19437).
"""
from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from gguf import GGUFWriter
from torch import Tensor, nn

from .layers import NORM_EPS, Norm, matrix, rotate, turns

ROPE_BASE = 10000.0
CHUNK = 64  # rows of Gated DeltaNet that are computed at once
PREDICTION_SHARE = 0.3  # of the prediction layer's loss in what is trained


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes that define a model. layers: without the prediction layer."""

    vocab: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    turned: int
    key_heads: int
    value_heads: int
    state: int
    conv: int
    interval: int
    hidden: int
    context: int


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, step: Tensor) -> Tensor:
    """The gated delta rule over whole sequences. q, k, v: [batch, head, position, size]; log_decay, step: [batch, head,
    position].

    Row by row, with a head's state S: S *= decay; d = (v - k S) * step; S += k^T d; answer q S. This computes a chunk
    of rows at a time: a row's d depends on the rows before it in the chunk by a triangular system. The systems of all
    chunks are solved at once, for a chunk's own values and for what its first state recalls; only states pass between
    chunks.
    """
    length, size = q.shape[2], q.shape[3]
    chunks = -(-length // CHUNK)

    def cut(x: Tensor) -> Tensor:
        padding = (0, 0) * (x.ndim - 3) + (0, chunks * CHUNK - length)
        return F.pad(x, padding).unflatten(2, (chunks, CHUNK))

    q, k, v, log_decay, step = (cut(x.float()) for x in (q, k, v, log_decay, step))
    faded = log_decay.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (faded[..., :, None] - faded[..., None, :]).masked_fill(later, -math.inf).exp()
    since_start = faded.exp()[..., None]
    system = (k @ k.mT * between * step[..., None]).tril(-1)
    sides = torch.cat((v, k * since_start), -1) * step[..., None]
    own, recalled = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True).split(size, -1)
    scores = q @ k.mT * between
    q, k = q * since_start, k * (faded[..., -1:] - faded).exp()[..., None]
    state, answers = torch.zeros_like(k[:, :, 0, 0, :, None] * v[:, :, 0, 0, None, :]), []
    for n in range(chunks):
        change = own[:, :, n] - recalled[:, :, n] @ state
        answers.append(q[:, :, n] @ state + scores[:, :, n] @ change)
        state = state * since_start[:, :, n, -1:] + k[:, :, n].mT @ change
    return torch.cat(answers, 2)[:, :, :length]


class GatedDelta(nn.Module):
    """The Gated DeltaNet of a layer, without its norm. Names follow GGUF's; `ssm_a` is a logarithm here."""

    def __init__(self, s: Shape, out_gain: float) -> None:
        super().__init__()
        self.shape = s
        keys, values = s.key_heads * s.state, s.value_heads * s.state
        self.attn_qkv, self.attn_gate = matrix(2 * keys + values, s.width), matrix(values, s.width)
        self.ssm_conv1d = matrix(2 * keys + values, s.conv, gain=0.5)
        self.ssm_alpha, self.ssm_beta = matrix(s.value_heads, s.width), matrix(s.value_heads, s.width)
        # What is kept from row to row is 0.2 to nearly all, as in the paper's code.
        self.ssm_a = nn.Parameter(torch.empty(s.value_heads).uniform_(1, 16).log())
        pace = torch.empty(s.value_heads).uniform_(math.log(0.001), math.log(0.1)).exp()
        self.ssm_dt = nn.Module()
        self.ssm_dt.bias = nn.Parameter(pace.expm1().log())
        self.ssm_norm = Norm(s.state)
        self.ssm_out = matrix(s.width, values, gain=out_gain)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s, (batch, length, _) = self.shape, x.shape
        mixed = F.pad(F.linear(x, self.attn_qkv), (0, 0, s.conv - 1, 0))
        mixed = F.silu(sum(mixed[:, tap:tap + length] * self.ssm_conv1d[:, tap] for tap in range(s.conv)))
        heads = mixed.view(batch, length, -1, s.state).transpose(1, 2)
        q, k, v = heads.split((s.key_heads, s.key_heads, s.value_heads), 1)
        # Value head h goes with key head h mod key_heads.
        q, k = (self.unit(part).repeat(1, s.value_heads // s.key_heads, 1, 1) for part in (q, k))
        with torch.autocast(x.device.type, enabled=False):
            x32 = x.float()
            log_decay = -self.ssm_a.exp() * F.softplus(F.linear(x32, self.ssm_alpha) + self.ssm_dt.bias)
            step = F.linear(x32, self.ssm_beta).sigmoid()
            out = delta_rule(q / math.sqrt(s.state), k, v, log_decay.mT, step.mT).transpose(1, 2)
        gate = F.linear(x, self.attn_gate).view(batch, length, -1, s.state)
        return F.linear((self.ssm_norm(out) * F.silu(gate)).flatten(2), self.ssm_out)

    @staticmethod
    def unit(x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + NORM_EPS)


class GatedAttention(nn.Module):
    """The attention of a layer, without its norm: half of what `attn_q` gives each head is a gate of its answer."""

    def __init__(self, s: Shape, out_gain: float) -> None:
        super().__init__()
        self.shape = s
        self.attn_q = matrix(2 * s.heads * s.head_size, s.width)
        self.attn_k = matrix(s.kv_heads * s.head_size, s.width)
        self.attn_v = matrix(s.kv_heads * s.head_size, s.width)
        self.attn_q_norm, self.attn_k_norm = Norm(s.head_size), Norm(s.head_size)
        self.attn_output = matrix(s.width, s.heads * s.head_size, gain=out_gain)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s, (batch, length, _) = self.shape, x.shape
        q, gate = F.linear(x, self.attn_q).view(batch, length, s.heads, 2 * s.head_size).chunk(2, -1)
        k = F.linear(x, self.attn_k).view(batch, length, s.kv_heads, s.head_size)
        v = F.linear(x, self.attn_v).view(batch, length, s.kv_heads, s.head_size).transpose(1, 2)
        q = rotate(self.attn_q_norm(q).transpose(1, 2), cos, sin)
        k = rotate(self.attn_k_norm(k).transpose(1, 2), cos, sin)
        group = s.heads // s.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return F.linear((mixed * gate.sigmoid()).flatten(2), self.attn_output)


class FeedForward(nn.Module):
    """The feed-forward of a layer, without its norm."""

    def __init__(self, s: Shape, out_gain: float) -> None:
        super().__init__()
        self.ffn_gate, self.ffn_up = matrix(s.hidden, s.width), matrix(s.hidden, s.width)
        self.ffn_down = matrix(s.width, s.hidden, gain=out_gain)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.ffn_gate)) * F.linear(x, self.ffn_up), self.ffn_down)


class Layer(nn.Module):
    """A mixer and a feed-forward."""

    def __init__(self, s: Shape, attention: bool, dropout: float) -> None:
        super().__init__()
        out_gain = 0.02 / math.sqrt(2 * s.layers)
        self.dropout = dropout
        self.attn_norm, self.post_attention_norm = Norm(s.width), Norm(s.width)
        self.mixer = GatedAttention(s, out_gain) if attention else GatedDelta(s, out_gain)
        self.ffn = FeedForward(s, out_gain)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + F.dropout(self.mixer(self.attn_norm(x), cos, sin), self.dropout, self.training)
        return x + F.dropout(self.ffn(self.post_attention_norm(x)), self.dropout, self.training)


class PredictionLayer(Layer):
    """Goes on from the model's last rows and the tokens that followed, toward the tokens after those."""

    def __init__(self, s: Shape, dropout: float) -> None:
        super().__init__(s, True, dropout)
        self.nextn = nn.Module()
        self.nextn.eh_proj = matrix(s.width, 2 * s.width)
        self.nextn.enorm, self.nextn.hnorm, self.nextn.shared_head_norm = Norm(s.width), Norm(s.width), Norm(s.width)

    def predict(self, rows: Tensor, following: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """rows: behind the model's output norm; following: embeddings of the tokens after them. What the head reads."""
        joined = torch.cat((self.nextn.enorm(following), self.nextn.hnorm(rows)), -1)
        return self.nextn.shared_head_norm(self(F.linear(joined, self.nextn.eh_proj), cos, sin))


class HybridModel(nn.Module):
    """The language model with its prediction layer; input and output embedding are one matrix."""

    ARCHITECTURE = "qwen35"
    DESCRIPTION = "Gated DeltaNet and attention, trained on public-domain English tales and children's novels."
    DEFAULTS = {"width": 256, "hidden": 384, "context": 512}

    def __init__(self, s: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.dropout = s, dropout
        self.token_embd = matrix(s.vocab, s.width)
        layers = [Layer(s, (i + 1) % s.interval == 0, dropout) for i in range(s.layers)]
        self.blk = nn.ModuleList([*layers, PredictionLayer(s, dropout)])
        self.output_norm = Norm(s.width)
        cos, sin = turns(s.turned, ROPE_BASE, s.context)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def logits(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The model's logits [batch, length, vocab], and the prediction layer's for all rows but the last."""
        cos, sin = self.cos[:tokens.shape[1]], self.sin[:tokens.shape[1]]
        embedded = F.embedding(tokens, self.token_embd)
        x = F.dropout(embedded, self.dropout, self.training)
        for layer in self.blk[:-1]:
            x = layer(x, cos, sin)
        x = self.output_norm(x)
        drafted = self.blk[-1].predict(x[:, :-1], embedded[:, 1:], cos[:-1], sin[:-1])
        return F.linear(x, self.token_embd), F.linear(drafted, self.token_embd)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [batch, length, vocab], the prediction layer's part of the loss, and three figures of that layer."""
        logits, drafted = self.logits(tokens)
        if tokens.shape[1] < 3:
            return logits, logits.new_zeros(()), logits.new_zeros(3)
        wanted = tokens[:, 2:]
        loss = F.cross_entropy(drafted[:, :-1].float().flatten(0, 1), wanted.flatten())
        with torch.no_grad():
            guess = drafted.argmax(-1)
            right = (guess[:, :-1] == wanted).float().mean()
            agreed = (guess == logits[:, 1:].argmax(-1)).float().mean()
        return logits, PREDICTION_SHARE * loss, torch.stack((loss.detach(), right, agreed))

    @staticmethod
    def describe(figures: Tensor) -> str:
        """What forward's third answer, averaged, says of the model."""
        loss, right, agreed = figures.tolist()
        return (f"prediction layer: {loss:.4f} nats per token, right {right:.1%}, agrees with the model's first choice"
                f" {agreed:.1%}")

    @staticmethod
    def asked(a: argparse.Namespace, vocab: int) -> Shape:
        """The shape that the command line asks for."""
        heads, key_heads = a.width // 64, max(1, a.width // 128)
        return Shape(
            vocab,
            a.layers,
            a.width,
            heads,
            max(1, heads // 2),
            64,
            16,
            key_heads,
            2 * key_heads,
            64,
            4,
            a.interval,
            a.hidden,
            a.stored_context,
        )

    @staticmethod
    def stored(size: Callable[[str], int]) -> Shape:
        """The shape of a file, whose metadata `size` reads."""
        return Shape(size("vocab_size"), size("block_count") - size("nextn_predict_layers"), size("embedding_length"),
                     size("attention.head_count"), size("attention.head_count_kv"), size("attention.key_length"),
                     size("rope.dimension_count"), size("ssm.group_count"), size("ssm.time_step_rank"),
                     size("ssm.state_size"), size("ssm.conv_kernel"), size("full_attention_interval"),
                     size("feed_forward_length"), size("context_length"))

    def add_sizes(self, writer: GGUFWriter) -> None:
        """The metadata that `stored` reads, and what else an engine asks for."""
        s = self.shape
        writer.add_context_length(s.context)
        writer.add_embedding_length(s.width)
        writer.add_block_count(s.layers + 1)
        writer.add_nextn_predict_layers(1)
        writer.add_feed_forward_length(s.hidden)
        writer.add_head_count(s.heads)
        writer.add_head_count_kv(s.kv_heads)
        writer.add_key_length(s.head_size)
        writer.add_value_length(s.head_size)
        writer.add_rope_dimension_count(s.turned)
        writer.add_rope_dimension_sections([s.turned // 2, 0, 0, 0])
        writer.add_rope_freq_base(ROPE_BASE)
        writer.add_ssm_conv_kernel(s.conv)
        writer.add_ssm_state_size(s.state)
        writer.add_ssm_group_count(s.key_heads)
        writer.add_ssm_time_step_rank(s.value_heads)
        writer.add_ssm_inner_size(s.value_heads * s.state)
        writer.add_full_attention_interval(s.interval)
