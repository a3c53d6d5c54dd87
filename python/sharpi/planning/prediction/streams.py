"""How fast a plan serves many requests at once: steps that several answers share, and prompts between them.

A step of N rows reads each weight once, and the experts that at least one of its rows chooses: of E experts, of which a
token chooses k, E (1 - (1 - k / E)^N) if all are as likely. It attends once for each row. More rows also mean more
arithmetic, which reading hides less and less. On the GPU that is a factor on the time of reading, fitted; on the CPU a
step takes as long as the longer of reading and arithmetic. More rows than one step takes are several steps.

A prompt is computed in pieces that fill a part of the greatest gap, each followed by a step. Where weights stream, a
prompt gets as much time as the answers do.
"""

# As in decode.py: a profile has a GPU's rates wherever a plan is for a GPU.
# pyright: reportOptionalOperand=false

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sharpi.errors import InvalidRequestError
from sharpi.planning.copies import Kept, kept
from sharpi.planning.placement import BY_ROW, Beside, Inventory, TensorHome, Use
from sharpi.planning.prediction.decode import (
    Cached,
    Speed,
    after_on_cpu,
    after_on_gpu,
    cached_experts,
    cpu_layer_seconds,
    decode_seconds,
    part_at_work,
    rows_cost,
    step_bytes,
    traffic,
)
from sharpi.planning.prediction.prefill import operations, prefill_on_cpu, prefill_on_gpu

if TYPE_CHECKING:
    from sharpi.files.gguf import GgufFile
    from sharpi.machine.profile import HardwareProfile
    from sharpi.planning.expert_stats import ExpertStats
    from sharpi.planning.plan import Plan
    from sharpi.planning.request import Spec

__all__ = ["Forecast", "forecast", "room_for"]

# The KV cache has pages of this many tokens.
PAGE_TOKENS = 64
# Rows that one step takes.
STEP_ROWS = 64
# The scheduler's pieces of prompts fill this part of the greatest gap.
PIECE_PART = 0.7


@dataclass(frozen=True)
class Forecast:
    """What `streams` requests that come at once can expect, each of `tokens` tokens: half of them are its prompt, the
    others its answer.

    decode: of all answers together. step_seconds: of a step in which each gets a token. first_token_seconds: of one
    more request that comes while the others are being answered. last_first_token_seconds: until the last of them all
    has its first token. answer_tokens_per_second: of all answers, prompts included. kept: RAM beside the plan's.
    """

    streams: int
    tokens: int
    decode: Speed
    step_seconds: float
    first_token_seconds: float
    last_first_token_seconds: float
    answer_tokens_per_second: float
    kept: Kept


def forecast(plan: Plan, file: GgufFile, spec: Spec, streams: int, tokens: int, *, max_gap: float = 0.2,
             warm: ExpertStats | None = None, profile: HardwareProfile | None = None,
             spill_bytes: int | None = None) -> Forecast | None:
    """`None` if the plan does not fit or reads weights from the disk, or if nobody knows the machine.
    profile: the machine's speeds, if the plan has
    none. spill_bytes: the scheduler's, if it is given any."""
    known = plan.profile or profile
    if known is None or not plan.fits or plan.reads_disk or (plan.device == "cuda" and known.gpu is None):
        return None
    inventory = Inventory.of(file, spec, mtp=plan.mtp).on(known)
    held, prompt = tokens - max(1, tokens // 4), max(1, tokens // 2)
    cached: Mapping[int, Cached] = {}
    if plan.device == "cpu":
        beside = after_on_cpu(inventory.beside, spec, plan.kv_dtype, held)
        prefill = prefill_on_cpu(inventory.model_uses, known, plan.batch, plan.threads)
    else:
        beside = after_on_gpu(inventory.beside, spec, plan.kv_dtype, held)
        cached = cached_experts(inventory.uses, plan.expert_pools, warm)
        prefill = prefill_on_gpu(inventory.model_uses, _homes(plan, inventory), known, plan.batch, cached, plan.prompt,
                                 inventory.beside)
    step, bound = _step(plan, inventory, known, streams, beside, cached)
    one = prompt / prefill.tokens_per_second
    streamed = plan.device == "cuda" and inventory.streamed(_homes(plan, inventory))
    last = streams * one
    copies = kept(known.ram_bytes, recurrent=plan.state_bytes > 0, spill_bytes=spill_bytes)
    return Forecast(streams, tokens, Speed(streams / step, bound), step,
                    one * (2.0 if streamed else 1 + step / (PIECE_PART * max_gap)) + step, last,
                    streams * (tokens - prompt) / (last + (tokens - prompt) * step), copies)


def room_for(streams: int, tokens: int, context: int | None, sequences: int | None,
             cache_tokens: int | None) -> tuple[int, int, int]:
    """The context, sequences and cache tokens of a plan for `streams` requests of `tokens` tokens each; those that are
    given stay as they are. Raises `InvalidRequestError` if a request exceeds the given context."""
    if context and tokens > context:
        raise InvalidRequestError(f"requests of {tokens:,} tokens do not fit into a context of {context:,}: -c sets it")
    whole = -(-tokens // PAGE_TOKENS) * PAGE_TOKENS
    # Two more states or windows than requests: those of a request that waits for its turn, and of one that has ended.
    return tokens if context is None else context, sequences or streams + 2, cache_tokens or streams * whole


def _homes(plan: Plan, inventory: Inventory) -> Sequence[TensorHome]:
    return plan.homes or (TensorHome(),) * len(inventory.sizes)


def _step(plan: Plan, inventory: Inventory, profile: HardwareProfile, streams: int, beside: Beside,
          cached: Mapping[int, Cached]) -> tuple[float, str]:
    """Seconds of a step of `streams` rows, and what bounds it."""
    steps = math.ceil(streams / STEP_ROWS)
    rows = math.ceil(streams / steps)
    if plan.device == "cpu":
        seconds, bound = _on_cpu(inventory, profile, plan.threads, rows, beside)
    else:
        seconds, bound = _on_gpu(inventory, _homes(plan, inventory), profile, plan.threads, rows, cached, beside)
    return steps * seconds, bound


def _on_cpu(inventory: Inventory, profile: HardwareProfile, threads: int, rows: int,
            beside: Beside) -> tuple[float, str]:
    uses, at_work = inventory.model_uses, part_at_work(profile, threads)
    own = rows * (2 * beside.state_bytes + beside.attention_bytes)
    read = (sum(step_bytes(use, rows) * use.cpu_cost for use in uses) + own) / (profile.ram_bytes_per_second * at_work)
    # The output head is computed for each row, too.
    head = 2.0 * rows * sum(use.parameters for use in uses if use.role == "head")
    computed = (operations(uses, rows) + head) / (profile.cpu_flops * at_work)
    seconds, bound = max((read, "RAM"), (computed, "CPU arithmetic"))
    return seconds + cpu_layer_seconds(uses), bound


def _on_gpu(inventory: Inventory, homes: Sequence[TensorHome], profile: HardwareProfile, threads: int, rows: int,
            cached: Mapping[int, Cached], beside: Beside) -> tuple[float, str]:
    uses = [use._replace(read_bytes=round(step_bytes(use, rows))) for use in inventory.model_uses]
    together = {layer: _of_rows(known, uses, layer, rows) for layer, known in cached.items()}
    each = beside._replace(state_bytes=rows * beside.state_bytes, attention_bytes=rows * beside.attention_bytes)
    reads = traffic(uses, homes, together, each)
    # Arithmetic of products whose weights are anywhere: those that come over PCIe are multiplied as they come.
    computed = sum((rows_cost(use, known, rows) - 1) * use.read_bytes
                   for use, known in zip(uses, inventory.model_uses, strict=True) if use.role not in BY_ROW)
    more = each._replace(attention_bytes=each.attention_bytes + computed)
    seconds, bound = decode_seconds(traffic(uses, homes, together, more), profile, threads)
    hides = computed > reads.vram + each.attention_bytes and bound == "VRAM"
    return seconds, "GPU arithmetic" if hides else bound


def _of_rows(known: Cached, uses: Sequence[Use], layer: int, rows: int) -> Cached:
    """A layer with slots, as a step of several rows uses it: more of its experts."""
    read = sum(use.read_bytes for use in uses if use.role == "experts" and use.layer == layer)
    return known._replace(used=max(known.used, round(read / known.expert_bytes)))
