#!/usr/bin/env python3
"""Train the small story model that ships inside the package, and write it as a quantized GGUF file.

A package whose first command needs a download is a package that fails on a train. So Sharpi carries a model of
its own: a mixture of experts in the `qwen3moe` architecture, small enough for a wheel, trained from nothing on
public-domain books. This script and `training/` are the whole of its making, so that anyone can check or repeat it:

    python benchmarks/train_bundled_model.py BOOKS_DIR story.gguf --validate through-the-looking-glass.txt --minutes 5

BOOKS_DIR holds plain text, one paragraph a line, blank lines between. Runs on a CUDA device if there is one, else
(slowly) on the CPU. Needs torch, tokenizers, numpy and gguf.

So little text is read many times over, and what limits the model is forgetting to generalize, not arithmetic: hence
dropout, strong weight decay, an average of the weights over time, and keeping the checkpoint that does best on the
validation book. `--teacher` goes one step further: train several models first, then one that also imitates the mean
of their predictions, which says of each place which other words would have done.

`--architecture qwen35` trains a model of Gated DeltaNet and attention, with a layer that predicts one token further. It
does not ship. Random weights say nothing about how often drafted tokens are right, and little about long texts; this
model does.
"""
from __future__ import annotations

import argparse
import copy
import math
import pathlib
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from training.files import MODELS, Model, read_gguf, write_gguf
from training.muon import Muon
from training.text import END_OF_TEXT, chapters, encode, train_tokenizer

VALIDATION_BATCH = 16  # windows


@torch.no_grad()
def validate(model: Model, tokens: Tensor, window: int) -> tuple[float, Tensor]:
    """Mean loss in nats per token over windows of the context's length, and the mean of what else the model answers."""
    model.eval()
    cut = (len(tokens) - 1) // window * window
    windows = []
    if cut:
        windows.append((tokens[:cut].view(-1, window), tokens[1:cut + 1].view(-1, window)))
    if cut + 1 < len(tokens):
        windows.append((tokens[None, cut:-1], tokens[None, cut + 1:]))
    total, others = 0.0, []
    for inputs, wanted in windows:
        for piece, following in zip(inputs.split(VALIDATION_BATCH), wanted.split(VALIDATION_BATCH), strict=True):
            logits, _, other = model(piece)
            total += F.cross_entropy(logits.float().flatten(0, 1), following.flatten(), reduction="sum").item()
            others.append(other * piece.numel())
    return total / (len(tokens) - 1), torch.stack(others).sum(0) / (len(tokens) - 1)


def soft_loss(logits: Tensor, teachers: list[Model], tokens: Tensor) -> Tensor:
    """Cross entropy against the mean of the teachers' predictions."""
    with torch.no_grad():
        wanted = torch.stack([t(tokens)[0].float().softmax(-1) for t in teachers]).mean(0)
    return -(wanted * logits.log_softmax(-1)).sum(-1).mean()


def total_loss(model: Model, rows: Tensor, teachers: list[Model]) -> tuple[Tensor, Tensor]:
    """What is trained, and the cross entropy in it."""
    logits, added, _ = model(rows[:, :-1])
    hard = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
    if not teachers:
        return hard + added, hard
    return 0.3 * hard + 0.7 * soft_loss(logits.float(), teachers, rows[:, :-1]) + added, hard


def train(model: Model, tokens: Tensor, held: Tensor, teachers: list[Model], a: argparse.Namespace,
          keep: Callable[[Model], None]) -> tuple[Model, int]:
    """Train until the epochs or minutes are over; return the best averaged model and the tokens it was trained on.

    keep: called with each that is better than those before.
    """
    matrices = [p for n, p in model.named_parameters() if p.ndim > 1 and "blk" in n and min(p.shape[-2:]) > 8]
    taken = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in taken]
    muon = Muon(matrices, a.weight_decay)
    adam = torch.optim.AdamW(rest, lr=a.rate, betas=(0.9, 0.98), weight_decay=a.weight_decay / 10)
    average = copy.deepcopy(model)
    best, best_loss, best_step = copy.deepcopy(model), math.inf, 0
    length = a.context
    per_epoch = max(1, len(tokens) // (a.batch * length))
    steps, began, reach = a.epochs * per_epoch, time.time(), torch.arange(length + 1, device=tokens.device)
    for step in range(steps):
        progress = max(step / steps, (time.time() - began) / (60 * a.minutes))
        rate = a.rate * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        starts = torch.randint(len(tokens) - length, (a.batch, 1), device=tokens.device)
        model.train()
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            loss, hard = total_loss(model, tokens[starts + reach], teachers)
        loss.backward()
        nn.utils.clip_grad_norm_(rest, 1.0)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
        muon.step(rate)
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), max(0.004, 1 / (step + 1)))
        if (step + 1) % per_epoch == 0 or step + 1 == steps or progress >= 1:
            held_loss, other = validate(average, held, length)
            print(f"epoch {(step + 1) / per_epoch:6.2f}  {time.time() - began:6.1f} s  training {hard.item():.4f}  "
                  f"validation {held_loss:.4f}  {model.describe(other)}", flush=True)
            if held_loss < best_loss:
                best, best_loss, best_step = copy.deepcopy(average), held_loss, step + 1
                keep(best)
        if progress >= 1:
            break
    return best, best_step * a.batch * length


@torch.no_grad()
def sample(model: Model, tokenizer: Tokenizer, prompt: str, temperature: float, context: int,
           count: int = 180) -> str:
    """Continue a prompt; tokens less than a twentieth as likely as the likeliest are never drawn."""
    device = model.token_embd.device
    ids = tokenizer.encode(prompt).ids
    for _ in range(count):
        logits = model(torch.tensor([ids[-context:]], device=device))[0][0, -1].float()
        if temperature > 0:
            chance = (logits / temperature).softmax(-1)
            chance[chance < 0.05 * chance.max()] = 0
            ids.append(int(torch.multinomial(chance, 1)))
        else:
            ids.append(int(logits.argmax()))
        if ids[-1] == tokenizer.token_to_id(END_OF_TEXT):
            break
    return tokenizer.decode(ids)


def report(a: argparse.Namespace, best: Model, tokenizer: Tokenizer, held: Tensor, held_bytes: int) -> None:
    """Print the losses before and after quantization, what else the model says of itself, and samples."""
    stored = read_gguf(a.out, a.device)
    for label, model in (("float32", best), ("as stored", stored)):
        loss, other = validate(model, held, a.context)
        print(f"{label}: validation {loss:.4f} nats per token, {loss * (len(held) - 1) / held_bytes:.4f} per byte")
        print(model.describe(other))
    print(f"{sum(p.numel() for p in best.parameters()):,} parameters, {a.out.stat().st_size:,} bytes")
    for temperature in (0.0, 0.7, 0.7, 1.0):
        for prompt in ("Once upon a time", "The little girl"):
            print(f"\n--- temperature {temperature}\n{sample(stored, tokenizer, prompt, temperature, a.context)}")


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("books", type=pathlib.Path, help="folder of .txt files")
    p.add_argument("out", type=pathlib.Path, help="the GGUF file to write")
    p.add_argument("--validate", required=True, help="the book in the folder to hold out")
    p.add_argument("--architecture", choices=sorted(MODELS), default="qwen3moe")
    p.add_argument("--minutes", type=float, default=5, help="stop training after this long")
    p.add_argument("--epochs", type=int, default=30, help="or after this many readings of the text")
    p.add_argument("--batch", type=int, default=16, help="sequences a step")
    p.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    p.add_argument("--dropout", type=float, default=0.2)
    p.add_argument("--weight-decay", type=float, default=0.5)
    p.add_argument("--vocab", type=int, default=4096)
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--interval", type=int, default=4, help="qwen35: every how many layers one has attention")
    p.add_argument("--width", type=int, help="a multiple of 64")
    p.add_argument("--hidden", type=int, help="width of the feed-forward or of one expert, a multiple of 32")
    p.add_argument("--context", type=int, help="length of the sequences in training")
    p.add_argument("--stored-context", type=int, help="longest sequence in the file, if not the same")
    p.add_argument("--exact", action="store_true", help="store all weights in float32")
    p.add_argument("--teacher", type=pathlib.Path, nargs="*", default=[], help="earlier outputs to learn from as well")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = p.parse_args()
    for name, value in MODELS[a.architecture].DEFAULTS.items():
        if getattr(a, name) is None:
            setattr(a, name, value)
    a.stored_context = a.stored_context or a.context
    if a.stored_context < a.context:
        p.error("--stored-context is shorter than the sequences in training")
    return a


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
    kind = MODELS[a.architecture]
    model = kind(kind.asked(a, tokenizer.get_vocab_size()), a.dropout).to(a.device)
    teachers = [read_gguf(p, a.device) for p in a.teacher]
    best, trained_on = train(model, tokens, held, teachers, a, lambda m: write_gguf(a.out, m, tokenizer, a.exact))
    print(f"best after {trained_on:,} tokens")
    report(a, best, tokenizer, held, held_bytes)


if __name__ == "__main__":
    main()
