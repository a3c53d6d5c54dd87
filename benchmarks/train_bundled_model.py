#!/usr/bin/env python3
"""Train the small story model that ships inside the package, and write it as a quantized GGUF file.

A package whose first command needs a download is a package that fails on a train. So Sharpi carries a model of
its own: a mixture of experts in the `qwen3moe` architecture, small enough for a wheel, trained from nothing on
public-domain books. This script is the whole of its making, so that anyone can check or repeat it:

    python benchmarks/train_bundled_model.py BOOKS_DIR story.gguf --validate through-the-looking-glass.txt --minutes 5

BOOKS_DIR holds plain text, one paragraph a line, blank lines between. Runs on a CUDA device if there is one, else
(slowly) on the CPU. Needs torch, tokenizers, numpy and gguf.

So little text is read many times over, and what limits the model is forgetting to generalize, not arithmetic: hence
dropout, strong weight decay, an average of the weights over time, and keeping the checkpoint that does best on the
validation book. `--teacher` goes one step further: train several models first, then one that also imitates the mean
of their predictions, which says of each place which other words would have done.
"""
from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import pathlib
import re
import time

import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

END_OF_TEXT = "<|endoftext|>"
HEADING = re.compile(r"^(chapter|part|volume|book|adventure|contents|the end|finis)\b", re.IGNORECASE)
NORM_EPS = 1e-6
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


# --- text ----------------------------------------------------------------------------------------------------


def chapters(text: str) -> list[str]:
    """Split a book into chapters of running prose: headings mark the cuts and are dropped, with tables of contents."""
    found: list[list[str]] = [[]]
    for index, paragraph in enumerate(p.strip(" |") for p in text.split("\n")):
        if not paragraph:
            continue
        shouted = not re.search(r"[a-z]", paragraph)
        listing = len(re.findall(r"\bchapter\b", paragraph, re.IGNORECASE)) > 2
        unfinished = not paragraph.endswith((".", "!", "?", '"', "'", ",", ";", ":", ")", "-"))
        words = paragraph.split()
        titled = unfinished and sum(w[0].isupper() for w in words) > 0.6 * len(words)
        front = index < 120 and unfinished
        if listing or front or len(paragraph) < 90 and (shouted or titled or HEADING.match(paragraph)):
            if found[-1] and not front:
                found.append([])
            continue
        found[-1].append(paragraph)
    return ["\n\n".join(c) for c in found if c]


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """Byte-level BPE with GPT-2's way of splitting words, so that `tokenizer.ggml.pre` can say `gpt-2`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END_OF_TEXT], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts as one row of tokens, each begun by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    rows = [np.array([end, *e.ids], np.int64) for e in tokenizer.encode_batch(texts)]
    return np.concatenate(rows)


# --- model ---------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """RMS norm in float32 over the last axis."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + NORM_EPS) * self.weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding over halves: element i is paired with i + d/2. x: [batch, head, position, d]."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


class Layer(nn.Module):
    """Attention with normalized queries and keys, then a mixture of experts. Names follow GGUF's."""

    def __init__(self, s: Shape, dropout: float) -> None:
        super().__init__()
        out_gain = 0.02 / math.sqrt(2 * s.layers)

        def matrix(*shape: int, gain: float = 0.02) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape) * gain)

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


class StoryModel(nn.Module):
    """The language model; input and output embedding are one matrix."""

    def __init__(self, s: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.dropout = s, dropout
        self.token_embd = nn.Parameter(torch.randn(s.vocab, s.width) * 0.02)
        self.blk = nn.ModuleList(Layer(s, dropout) for _ in range(s.layers))
        self.output_norm = Norm(s.width)
        frequency = ROPE_BASE ** (-torch.arange(0, s.head_size, 2, dtype=torch.float64) / s.head_size)
        angle = torch.arange(s.context, dtype=torch.float64)[:, None] * frequency
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [batch, length, vocab], mean load-balancing loss, expert shares [layer, expert]."""
        cos, sin = self.cos[:tokens.shape[1]], self.sin[:tokens.shape[1]]
        x = F.dropout(F.embedding(tokens, self.token_embd), self.dropout, self.training)
        balances, shares = [], []
        for layer in self.blk:
            x, balance, share = layer(x, cos, sin)
            balances.append(balance)
            shares.append(share)
        return F.linear(self.output_norm(x), self.token_embd), torch.stack(balances).mean(), torch.stack(shares)


# --- optimizer -----------------------------------------------------------------------------------------------


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


# --- training ------------------------------------------------------------------------------------------------


@torch.no_grad()
def validate(model: StoryModel, tokens: Tensor) -> tuple[float, Tensor]:
    """Mean loss in nats per token over windows of the context's length, and the expert shares."""
    model.eval()
    window, total, shares = model.shape.context, 0.0, []
    for start in range(0, len(tokens) - 1, window):
        piece = tokens[start:start + window + 1]
        logits, _, share = model(piece[None, :-1])
        total += F.cross_entropy(logits[0].float(), piece[1:], reduction="sum").item()
        shares.append(share)
    return total / (len(tokens) - 1), torch.stack(shares).mean(0)


def soft_loss(logits: Tensor, teachers: list[StoryModel], tokens: Tensor) -> Tensor:
    """Cross entropy against the mean of the teachers' predictions."""
    with torch.no_grad():
        wanted = torch.stack([t(tokens)[0].float().softmax(-1) for t in teachers]).mean(0)
    return -(wanted * logits.log_softmax(-1)).sum(-1).mean()


def train(model: StoryModel, tokens: Tensor, held: Tensor, teachers: list[StoryModel],
          a: argparse.Namespace) -> tuple[StoryModel, int]:
    """Train until the epochs or minutes are over; return the best averaged model and the tokens it was trained on."""
    matrices = [p for n, p in model.named_parameters() if p.ndim > 1 and "blk" in n and "gate_inp" not in n]
    taken = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in taken]
    muon = Muon(matrices, a.weight_decay)
    adam = torch.optim.AdamW(rest, lr=a.rate, betas=(0.9, 0.98), weight_decay=a.weight_decay / 10)
    average = copy.deepcopy(model)
    best, best_loss, best_step = copy.deepcopy(model), math.inf, 0
    length = model.shape.context
    per_epoch = max(1, len(tokens) // (a.batch * length))
    steps, began, reach = a.epochs * per_epoch, time.time(), torch.arange(length + 1, device=tokens.device)
    for step in range(steps):
        progress = max(step / steps, (time.time() - began) / (60 * a.minutes))
        rate = a.rate * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        starts = torch.randint(len(tokens) - length, (a.batch, 1), device=tokens.device)
        rows = tokens[starts + reach]
        model.train()
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            logits, balance, _ = model(rows[:, :-1])
            hard = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
            loss = hard
            if teachers:
                loss = 0.3 * hard + 0.7 * soft_loss(logits.float(), teachers, rows[:, :-1])
        (loss + 0.01 * balance).backward()
        nn.utils.clip_grad_norm_(rest, 1.0)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
        muon.step(rate)
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), max(0.004, 1 / (step + 1)))
        if (step + 1) % per_epoch == 0 or step + 1 == steps or progress >= 1:
            held_loss, _ = validate(average, held)
            print(f"epoch {(step + 1) / per_epoch:6.2f}  {time.time() - began:6.1f} s  training {hard.item():.4f}  "
                  f"validation {held_loss:.4f}", flush=True)
            if held_loss < best_loss:
                best, best_loss, best_step = copy.deepcopy(average), held_loss, step + 1
        if progress >= 1:
            break
    return best, best_step * a.batch * length


# --- the file ------------------------------------------------------------------------------------------------


def tensor_type(name: str, ndim: int) -> GGMLQuantizationType:
    """What a tensor is stored as: experts are most of the bytes and lose least, the router decides and keeps all."""
    if ndim == 1 or "gate_inp" in name:
        return GGMLQuantizationType.F32
    return GGMLQuantizationType.Q5_0 if "_exps" in name else GGMLQuantizationType.Q8_0


def add_metadata(writer: GGUFWriter, s: Shape, tokenizer: Tokenizer) -> None:
    """Everything but the tensors: sizes, then the tokenizer."""
    writer.add_name("Sharpi story")
    writer.add_description("A small mixture of experts trained on public-domain English tales and children's novels.")
    writer.add_license("MIT")
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
    writer.add_layer_norm_rms_eps(NORM_EPS)
    writer.add_vocab_size(s.vocab)
    description = json.loads(tokenizer.to_str())["model"]
    ids = {i: t for t, i in description["vocab"].items()}
    end = tokenizer.token_to_id(END_OF_TEXT)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([ids[i] for i in range(s.vocab)])
    writer.add_token_types([3 if i == end else 1 for i in range(s.vocab)])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in description["merges"]])
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


def write_gguf(path: pathlib.Path, model: StoryModel, tokenizer: Tokenizer) -> None:
    """Quantize and write the model."""
    writer = GGUFWriter(str(path), "qwen3moe")
    add_metadata(writer, model.shape, tokenizer)
    for name, parameter in model.named_parameters():
        name = name if name.endswith(".weight") else name + ".weight"
        kind = tensor_type(name, parameter.ndim)
        data = parameter.detach().float().cpu().numpy()
        writer.add_tensor(name, quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf(path: pathlib.Path, device: str) -> StoryModel:
    """Read such a file back, its weights dequantized to float32."""
    reader = GGUFReader(str(path))

    def size(key: str) -> int:
        return int(reader.fields[f"qwen3moe.{key}"].contents())

    shape = Shape(size("vocab_size"), size("block_count"), size("embedding_length"), size("attention.head_count"),
                  size("attention.head_count_kv"), size("attention.key_length"), size("expert_count"),
                  size("expert_used_count"), size("expert_feed_forward_length"), size("context_length"))
    model = StoryModel(shape)
    stored = {t.name: quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            data = stored.pop(name if name.endswith(".weight") else name + ".weight")
            parameter.copy_(torch.from_numpy(np.array(data, np.float32)).view_as(parameter))
    assert not stored, f"tensors nobody asked for: {sorted(stored)}"
    return model.to(device).eval()


# --- what came of it -----------------------------------------------------------------------------------------


@torch.no_grad()
def sample(model: StoryModel, tokenizer: Tokenizer, prompt: str, temperature: float, count: int = 180) -> str:
    """Continue a prompt; tokens less than a twentieth as likely as the likeliest are never drawn."""
    device = model.token_embd.device
    ids = tokenizer.encode(prompt).ids
    for _ in range(count):
        logits = model(torch.tensor([ids[-model.shape.context:]], device=device))[0][0, -1].float()
        if temperature > 0:
            chance = (logits / temperature).softmax(-1)
            chance[chance < 0.05 * chance.max()] = 0
            ids.append(int(torch.multinomial(chance, 1)))
        else:
            ids.append(int(logits.argmax()))
        if ids[-1] == tokenizer.token_to_id(END_OF_TEXT):
            break
    return tokenizer.decode(ids)


def report(a: argparse.Namespace, best: StoryModel, tokenizer: Tokenizer, held: Tensor, held_bytes: int) -> None:
    """Print the losses before and after quantization, how evenly the experts are used, and samples."""
    stored = read_gguf(a.out, a.device)
    for label, model in (("float32", best), ("as stored", stored)):
        loss, shares = validate(model, held)
        print(f"{label}: validation {loss:.4f} nats per token, {loss * (len(held) - 1) / held_bytes:.4f} per byte")
    print(f"share of the least and most used expert of a layer: {shares.min():.3f} {shares.max():.3f}")
    print(f"{sum(p.numel() for p in best.parameters()):,} parameters, {a.out.stat().st_size:,} bytes")
    for temperature in (0.0, 0.7, 0.7, 1.0):
        for prompt in ("Once upon a time", "The little girl"):
            print(f"\n--- temperature {temperature}\n{sample(stored, tokenizer, prompt, temperature)}")


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("books", type=pathlib.Path, help="folder of .txt files")
    p.add_argument("out", type=pathlib.Path, help="the GGUF file to write")
    p.add_argument("--validate", required=True, help="the book in the folder to hold out")
    p.add_argument("--minutes", type=float, default=5, help="stop training after this long")
    p.add_argument("--epochs", type=int, default=30, help="or after this many readings of the text")
    p.add_argument("--batch", type=int, default=16, help="sequences a step")
    p.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    p.add_argument("--dropout", type=float, default=0.2)
    p.add_argument("--weight-decay", type=float, default=0.5)
    p.add_argument("--vocab", type=int, default=4096)
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--width", type=int, default=384, help="a multiple of 64")
    p.add_argument("--hidden", type=int, default=192, help="width of one expert, a multiple of 32")
    p.add_argument("--context", type=int, default=1024, help="longest sequence, in training and in the file")
    p.add_argument("--teacher", type=pathlib.Path, nargs="*", default=[], help="earlier outputs to learn from as well")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return p.parse_args()


def main() -> None:
    a = arguments()
    torch.manual_seed(a.seed)
    torch.set_float32_matmul_precision("high")
    books = {p.name: chapters(p.read_text("utf-8")) for p in sorted(a.books.glob("*.txt"))}
    held_texts = books.pop(a.validate)
    texts = [c for book in books.values() for c in book]
    tokenizer = train_tokenizer(texts, a.vocab)
    tokens = torch.from_numpy(encode(tokenizer, texts)).to(a.device)
    held = torch.from_numpy(encode(tokenizer, held_texts)).to(a.device)
    held_bytes = sum(len(c.encode()) for c in held_texts)
    print(f"{len(books)} books, {len(texts)} chapters, {len(tokens):,} tokens; held out {len(held):,} tokens, "
          f"{held_bytes:,} bytes; on {a.device}")
    shape = Shape(tokenizer.get_vocab_size(), a.layers, a.width, a.width // 64, max(1, a.width // 192), 64,
                  8, 2, a.hidden, a.context)
    model = StoryModel(shape, a.dropout).to(a.device)
    teachers = [read_gguf(p, a.device) for p in a.teacher]
    best, trained_on = train(model, tokens, held, teachers, a)
    print(f"best after {trained_on:,} tokens")
    write_gguf(a.out, best, tokenizer)
    report(a, best, tokenizer, held, held_bytes)


if __name__ == "__main__":
    main()
