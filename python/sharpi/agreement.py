"""Whether a model ran as fast as predicted: what `run` and `bench` say if it did not, and that the machine is measured
again.

Speeds are compared only if the prediction means something: enough steps; a token that reads more than any cache
holds; short contexts, no drafted tokens, and all threads, as predictions assume; the plan carried out as it was made,
without switches that slow it down on purpose; and about as many experts found in slots as expected.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sharpi.machine.hardware import Gpu
from sharpi.machine.profile import HardwareProfile
from sharpi.machine.profile_cache import cached_profile, doubt, why_stale
from sharpi.planning.placement import Inventory
from sharpi.planning.prediction.decode import (
    Speed,
    after_on_cpu,
    after_on_gpu,
    cached_experts,
    decode_on_cpu,
    decode_on_gpu,
)
from sharpi.planning.prediction.prefill import prefill_on_cpu, prefill_on_gpu
from sharpi.words import speed

if TYPE_CHECKING:
    from sharpi.model import Model

__all__ = ["LEAST_READ", "LEAST_STEPS", "Seen", "disagreement", "seen_in_bench", "seen_in_run"]

# The part of a prediction by which a measured speed may differ from it.
MOST_OFF = 1 / 3
# Steps of decode, tokens of a prompt, and bytes that a token reads: fewer say little. The bytes are more than most
# processors' caches hold; for smaller models, predictions are known to be too high.
LEAST_STEPS, LEAST_PROMPT, LEAST_READ = 32, 256, 256 << 20
# On the GPU the prediction is for a whole batch: a shorter prompt takes mostly fixed times.
_LEAST_BATCH = 1024
# Predictions of attention are rough, so what a token reads of the KV cache may be at most this part of the weights that
# it reads.
_MOST_KV = 0.1
_MOST_HIT_RATE_OFF = 0.15
_SLOWING = ("SHARPI_CPU_ISA", "SHARPI_CUDA_GRAPH", "SHARPI_CUDA_PDL", "SHARPI_CUDA_WGMMA", "SHARPI_CUDA_PIN",
            "SHARPI_EXPERT_PREFETCH")


@dataclass(frozen=True)
class Seen:
    """A measured speed: decode over `tokens` steps with `held` tokens in the context on average, or prefill of a prompt
    of `tokens`."""

    what: str
    tokens_per_second: float
    tokens: int
    held: float = 0.0


def seen_in_run(stats: Mapping[str, Any]) -> Seen | None:
    """The speed of decode that `Model.stats` has of the last generation; None if it was too short, or had drafts. The
    prompt's speed is not comparable: it may include reading the file from disk, and copying it to the GPU."""
    steps = stats.get("steps", 0)
    if steps < LEAST_STEPS or stats["drafted_tokens"]:
        return None
    held = stats["reused_tokens"] + stats["prompt_tokens"] + steps / 2
    return Seen("decode", stats["generation_tokens_per_second"], steps, held)


def seen_in_bench(results: Sequence[Mapping[str, Any]]) -> list[Seen]:
    """The speeds in the entries of `sharpi bench`; on the GPU, of decode with captured steps."""
    found = []
    for entry in results:
        if entry["kind"] == "prefill" and entry["tokens"] >= LEAST_PROMPT:
            found.append(Seen("prefill", entry["tokens_per_second"]["median"], entry["tokens"]))
        elif entry["kind"] == "decode" and entry["tokens"] >= LEAST_STEPS and entry.get("graphs", True):
            held = entry.get("depth", 1) + entry["tokens"] / 2
            found.append(Seen("decode", entry["tokens_per_second"]["median"], entry["tokens"], held))
    return found


def disagreement(model: Model, seen: Seen, *, elsewhere: bool, known: bool) -> str | None:
    """A line for people if a speed is more than a third off its prediction; None if it is not, or if the two cannot be
    compared. The first time for a model, the profile that is kept for this machine is doubted.

    elsewhere: the plan or the profile was given, and may be of another machine: nothing is doubted. known: whether the
    line is wanted also if measuring the machine again did not help before."""
    profile = _profile(model)
    found = None if profile is None else _predicted(model, profile, seen)
    if profile is None or found is None:
        return None
    predicted = found.tokens_per_second
    if abs(seen.tokens_per_second - predicted) <= MOST_OFF * predicted:
        return None
    said = f"{seen.what} was predicted at {speed(predicted)} tokens/s and ran at {speed(seen.tokens_per_second)}: "
    if elsewhere or profile != _kept(model):
        return said + "the profile may be of another machine, or of a busy one (`sharpi hardware` measures this one)"
    if doubt(profile, f"{model.plan.fingerprint} {model.plan.device} {seen.what}"):
        return said + "this machine's speeds are measured again at the next start"
    return said + "measuring this machine again did not help, the prediction is off for this model" if known else None


def _profile(model: Model) -> HardwareProfile | None:
    """The profile that the plan was made with, else the one that is kept; None if it is not measured, or will be
    measured again anyway."""
    used, kept = model.plan.profile, _kept(model)
    holds = kept is not None and why_stale(kept) is None
    if used is None:
        return kept if holds else None
    return None if used.assumed or (used == kept and not holds) else used


def _kept(model: Model) -> HardwareProfile | None:
    """The profile that is kept for the machine with the plan's GPU."""
    gpu = model.plan.gpu
    return cached_profile(gpu.index if isinstance(gpu, Gpu) else 0)


def _predicted(model: Model, profile: HardwareProfile, seen: Seen) -> Speed | None:
    """The speed that was to be expected, None if the plan does not say."""
    plan = model.plan
    if plan.threads != profile.threads or any(os.environ.get(name) for name in _SLOWING):
        return None
    inventory = Inventory.of(model.file, model.spec, mtp=plan.mtp).on(profile)
    read = sum(use.read_bytes for use in inventory.model_uses)
    if read < LEAST_READ or model.spec.kv_bytes_read(plan.kv_dtype, round(seen.held)) > _MOST_KV * read:
        return None
    if seen.what == "prefill" and seen.tokens > plan.batch:
        return None
    uses, threads = inventory.model_uses, plan.threads
    after = after_on_cpu if plan.device == "cpu" else after_on_gpu
    beside = after(inventory.beside, model.spec, plan.kv_dtype, round(seen.held))
    if plan.reads_disk:
        return None  # how much of it was in RAM is chance
    if plan.device == "cpu":
        return (prefill_on_cpu(uses, profile, seen.tokens, threads) if seen.what == "prefill"
                else decode_on_cpu(uses, profile, threads, beside))
    if profile.gpu is None or not plan.homes or model.engine.notes or not _hits_as_expected(model):
        return None
    cached = cached_experts(inventory.uses, plan.expert_pools)
    if plan.hit_rate is not None:
        cached = {layer: known._replace(hit=plan.hit_rate) for layer, known in cached.items()}
    if seen.what == "decode":
        return decode_on_gpu(uses, plan.homes, profile, threads, cached, beside)
    if seen.tokens < _LEAST_BATCH:
        return None
    return prefill_on_gpu(uses, plan.homes, profile, seen.tokens, cached, plan.prompt, beside)


def _hits_as_expected(model: Model) -> bool:
    """Whether about as many experts were found in slots as the plan expects: a text of few tokens finds more."""
    expected = model.plan.hit_rate
    found = (model.stats()["experts"] or {}).get("hit_rate")
    return expected is None or (found is not None and abs(found - expected) <= _MOST_HIT_RATE_OFF)
