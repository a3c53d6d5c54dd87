"""The Python API: load a model, ask it for logits or text.

Python reads the file's header, plans and tokenizes; the core maps the weights and runs the model. One `Model` may
have several `Session`s; they share weights and the room of the KV cache: `context` tokens in all.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from sharpi import hub
from sharpi.errors import InvalidRequestError
from sharpi.files.gguf import GgufFile
from sharpi.files.rope import RopeScaling
from sharpi.generation import Generation, Token
from sharpi.loading.description import BUNDLED_MODEL, describe
from sharpi.loading.loaded_model import LoadedModel, Notice, teller
from sharpi.loading.opening import Progress, open_engine, read_pages
from sharpi.loading.request import (
    ROPE_ARGUMENTS,
    checked_arguments,
    plan_of,
    refuse_beside_a_plan,
    stats_target,
    warm_stats,
)
from sharpi.machine.profile import HardwareProfile
from sharpi.planning.expert_stats import ExpertStats
from sharpi.planning.plan import size_words, slots_in_ram
from sharpi.reply import Message, Reply
from sharpi.scheduler import Answer, Scheduler, SubmitOptions
from sharpi.session import Session
from sharpi.settings import arguments
from sharpi.settings.choices import DEFAULT_CACHE_DIR_BYTES, ROW_KINDS
from sharpi.settings.generation_options import GenerationOptions, takes_generation_options
from sharpi.settings.switches import check_switches
from sharpi.text.chat import Part

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["BUNDLED_MODEL", "Answer", "Generation", "Model", "Part", "Reply", "Scheduler", "Session", "Token",
           "describe"]

# What may wait for `Model.submit`: whoever lists prompts has room for them.
_QUEUE = 1 << 20

_log = logging.getLogger(__name__)


def _unheeded(file: GgufFile, counts: ExpertStats | None, warm: ExpertStats | None, target: str | None) -> list[str]:
    """Lines about requests for experts that have no effect. counts: of the model just loaded."""
    lines = []
    if counts is None and target is not None:
        lines.append(f"no expert statistics are written: {file.name} has no experts")
    if counts is not None and not counts.capacity and warm is not None:
        lines.append("nothing is warmed: no experts are in slots")
    return lines


class Model(LoadedModel):
    """A model ready to answer. Make one with `Model.load`; close it, or use it in a `with` block."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._scheduling = threading.Lock()  # guards the following
        self._own_scheduler: Scheduler | None = None

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None, *, device: str = "auto", vram: str | int | None = None,
             context: int | None = None, kv_dtype: str | None = None, threads: int | None = None,
             batch: int | None = None, cpu_moe: bool | None = None, sequences: int | None = None,
             cache_tokens: int | None = None, prompt: str | None = None, mtp: bool | None = None,
             ram_budget: int | None = None, spill_bytes: int | None = None,
             rope_scaling: str | None = None, rope_scale: float | None = None, rope_freq_base: float | None = None,
             rope_freq_scale: float | None = None,
             yarn_orig_ctx: int | None = None, plan: str | os.PathLike[str] | None = None,
             profile: HardwareProfile | str | os.PathLike[str] | None = None,
             warm: ExpertStats | str | os.PathLike[str] | None = None,
             expert_stats: str | os.PathLike[str] | None = None, progress: Progress | None = None,
             notice: Notice | None = None) -> Model:
        """Opens a GGUF file (any part of a split one), or a model on the Hugging Face Hub by its name, such as
        "user/repo:Q4_K_M", which is downloaded if the cache does not have it; `None` is the bundled model.

        device: "auto", "cpu" or "cuda"; "auto" takes the GPU if there is one and the model fits into its memory, else
        whichever of the two is predicted to be faster. vram: the most GPU memory to take, in bytes or as text such as
        "12GiB"; without it, what is free. Weights that do not fit stay in RAM and are used from there. context: the
        tokens that prompt and answer may have together (0: all that the model has; default: 4096). kv_dtype: "fp32",
        "bf16" (default) or "fp16". batch: rows that prefill takes at once (512, on the GPU 2048). threads: the CPU's;
        by default and at most as many as there are cores. cpu_moe: whether all experts stay in RAM and the CPU computes
        them in decode, even if they would fit; `None` is what SHARPI_CPU_MOE says. sequences: for a model with
        recurrent layers, how many states to keep (4), and for one whose layers see a window or chunk, how many of
        these; each conversation that holds tokens needs one, the others serve to roll back; at most two rows for each
        share a step. cache_tokens: the tokens that all conversations may have together, if that is more than one may
        have (`context`). prompt: how the GPU
        computes prompts: "exact" gives the same bits as every other processor, "fast" uses tensor cores, so the bits
        depend on the kind of GPU too, and takes batches of 64 rows or more; `None` is what the kind of GPU says, so far
        "fast". The CPU's are exact. mtp: whether to load a prediction layer, to draft tokens with; `None`: if the file
        has one. spill_bytes: what the model's schedulers take if they are not told (see `Scheduler`). A mixture
        that is larger than RAM leaves room for their copies. ram_budget: on the CPU, bytes that it may take with them,
        if it can do with so few; without it, what is free.

        rope_scaling ("none", "linear" or "yarn"), rope_scale, rope_freq_base, rope_freq_scale (1 / rope_scale) and
        yarn_orig_ctx stretch the model to contexts longer than the file's, as llama.cpp's options of these names do:
        see `RopeScaling`. Without them the file decides.

        plan: a file with a plan for this model, which says all of the above. profile: the machine's speeds, or a file
        with them; without it, they are measured once, when they are first needed.

        expert_stats: a file to write when the model is closed, with what became of its experts; `None` is what
        SHARPI_EXPERT_STATS says. warm: such a file of this model, or its contents: if experts are in slots, the most
        used ones are loaded first.

        progress: called with bytes done and bytes in all while the file is downloaded, and while it is read from disk;
        without it, pages are read when they are first used. notice: called with a line of text when there is something
        people may want to know.

        Raises `ModelFileError`, `InvalidRequestError`, `OutOfMemoryError`.
        """
        started, tell = time.perf_counter(), teller(notice)
        check_switches()
        given = checked_arguments({
            "path": path, "device": device, "vram": vram, "context": context, "kv_dtype": kv_dtype, "threads": threads,
            "batch": batch, "cpu_moe": cpu_moe, "sequences": sequences, "cache_tokens": cache_tokens,
            "prompt": prompt, "mtp": mtp, "ram_budget": ram_budget, "spill_bytes": spill_bytes,
            "rope_scaling": rope_scaling, "rope_scale": rope_scale, "rope_freq_base": rope_freq_base,
            "rope_freq_scale": rope_freq_scale, "yarn_orig_ctx": yarn_orig_ctx, "plan": plan, "profile": profile,
            "warm": warm, "expert_stats": expert_stats, "progress": progress, "notice": notice})
        if plan is not None:
            refuse_beside_a_plan(given)
        rope = RopeScaling.asked(**{name: given[name] for name in ROPE_ARGUMENTS})
        target = stats_target(expert_stats)
        if path is not None:
            path = hub.locate(path, notice=tell,
                              progress=None if progress is None else lambda _, done, total: progress(done, total))
        file, spec = describe(path, mtp=given["mtp"] is not False, rope=rope)
        warmth = warm_stats(warm, file)
        made, spec, asked = plan_of(file, spec, given, {"rope": rope, "warm": warmth, "notice": tell})
        _log.info("%r from %s", made, file.paths[0])
        made.require()
        if warmth is not None and (in_ram := slots_in_ram(made)):
            tell(f"reading {size_words(in_ram)} of the most used experts to RAM")
        engine, made, notes = open_engine(file, spec, made, warmth, asked)
        counts = ExpertStats.from_engine(engine, made)
        for line in (*notes, *engine.notes, *_unheeded(file, counts, warmth, target)):
            tell(line)
        if progress is not None:
            read_pages(engine, made, progress)
        seconds = time.perf_counter() - started
        _log.info("%s is loaded after %.3f s: %s (%s), %d threads", file.name, seconds, made.device, engine.device_name,
                  made.threads)
        return cls(file, spec, engine, made, seconds, None if counts is None else target, notice, notes, spill_bytes)

    def __repr__(self) -> str:
        closed = ", closed" if self._engine is None else ""
        return f"<Model {self.file.name!r} on {self.device}, context {self.context:,} tokens{closed}>"

    def logits(self, tokens: Sequence[int], *, chunks: Sequence[int] = (),
               kind: Literal["prompt", "decode"] = "prompt") -> npt.NDArray[np.float32]:
        """float32 [len(tokens), vocab]: row i says what follows tokens[: i + 1].

        kind: what the tokens are computed as: "prompt", as those of a prompt are, or "decode", as those of an answer
        are. The two differ only on a GPU whose prompts are fast (`plan.prompt`); "decode" has the CPU's bits there too.
        chunks: sizes of the pieces in which the tokens are evaluated; the answer does not depend on them.
        """
        ids, sizes = (arguments.token_ids("tokens", tokens),
                      arguments.token_ids("chunks", chunks, what="numbers of tokens"))
        if arguments.text("kind", kind) not in ROW_KINDS:
            raise InvalidRequestError(f"kind must be {' or '.join(ROW_KINDS)}, not {arguments.shown(kind)}")
        return self._scheduler().core.logits(self.engine, ids, sizes, kind)

    @takes_generation_options
    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]) -> Generation:
        """Continues `prompt` in a session of its own: see `Session.generate`, and `GenerationOptions` for the
        options."""
        return self.session().generate(prompt, **options)

    @takes_generation_options
    def chat(self, messages: Sequence[Message], *, system: str | None = None, thinking: bool | None = None,
             tools: Sequence[Mapping[str, Any]] | None = None, **options: Unpack[GenerationOptions]) -> Reply:
        """Answers `messages` in a session of its own: see `Session.chat`, which computes less for a further turn."""
        return self.session().chat(messages, system=system, thinking=thinking, tools=tools, **options)

    def session(self) -> Session:
        """A new conversation, which keeps its KV cache between calls, as long as nobody else needs the memory."""
        return Session(self, self._scheduler())

    def submit(self, prompt: str | Sequence[int], **options: Unpack[SubmitOptions]) -> Answer:
        """Continues `prompt` together with all else that is asked of the model: see `Scheduler.submit`."""
        return self._scheduler().submit(prompt, **options)

    def _scheduler(self) -> Scheduler:
        """The model's own, which serves all but those that `scheduler` makes. It begins with the first request."""
        _ = self.engine  # raises if the model is closed
        with self._scheduling:
            if self._own_scheduler is None:
                # It does not keep the model alive, which has it.
                self._own_scheduler = Scheduler(weakref.proxy(self), queue=_QUEUE)
            return self._own_scheduler

    def generate_many(self, prompts: Sequence[str] | Sequence[Sequence[int]],
                      **options: Unpack[SubmitOptions]) -> list[Answer]:
        """Continues each of these prompts, all with the same options: the answers in the same order, as `submit` gives
        them. Each says what it would say alone. If one prompt is refused, none is answered."""
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise InvalidRequestError(f"prompts must be a sequence of prompts, not {arguments.shown(prompts)}")
        answers: list[Answer] = []
        try:
            for prompt in prompts:
                answers.append(self.submit(prompt, **options))
        except BaseException:
            for answer in answers:
                answer.cancel()
            raise
        return answers

    def close(self) -> None:
        """Releases memory, cancels what was submitted, and writes the expert statistics that were asked for. Sessions
        that still exist keep the memory until they are gone, and what they have begun to generate may end. Raises
        `InvalidRequestError` if the statistics can no longer be written."""
        with self._scheduling:
            scheduler, self._own_scheduler = self._own_scheduler, None
        if scheduler is not None:
            scheduler.retire()
        super().close()

    def scheduler(self, *, max_gap: float = 0.2, queue: int = 64, running: int | None = None,
                  states_bytes: int | None = None, spill_bytes: int | None = None,
                  cache_dir: str | os.PathLike[str] | None = None,
                  cache_dir_bytes: int = DEFAULT_CACHE_DIR_BYTES) -> Scheduler:
        """Serves many requests at once: see `Scheduler`. Close it before the model. Sessions and `submit` have one of
        their own; the texts of the two do not give way to each other, so use one of them at a time."""
        return Scheduler(self, max_gap=max_gap, queue=queue, running=running, states_bytes=states_bytes,
                         spill_bytes=spill_bytes, cache_dir=cache_dir, cache_dir_bytes=cache_dir_bytes)

    def stats(self) -> dict[str, Any]:
        """Counts and speeds of the generation started last, and the bytes held; `vram_bytes` by the device's own
        account. If several sessions work at once, ask each generation: `Generation.stats`. steps: passes of the model
        after the prompt's. acceptance_rate: of the drafted tokens. A rate is `None` if nothing was counted or timed.
        prompt: how prompts are computed, "exact" or "fast".

        holdings: the bytes of the device's memory by the name of what holds them, largest first: tensors, the KV cache,
        working memory. On the CPU these are bytes of RAM, without the mapped file. pinned_bytes: of RAM, pinned so that
        the GPU reads weights there.

        placement: where the weights are, as the core says: each byte is in "vram" or in "ram", where the file is
        mapped. Of those in "ram", on the GPU: "direct" ones are brought over each time, of embeddings single rows, and
        "slots" ones are experts, of which single ones are in VRAM too; "cpu": those that the CPU computes with, on the
        CPU all of them. "ranges": (file, begin, end, home) of the files' parts, home one of "vram", "direct", "slots"
        and, on the CPU, "ram".
        "cache": how many tensors are "kept" in VRAM of the "candidates", their "bytes" and "candidate_bytes", and the
        "seconds" in which they came (`None` until all are there). notes: lines for people on what became of the plan.

        experts: since loading, sums over all layers of what `ExpertStats` counts, the "hit_rate" of the "slots", and
        the "accuracy" of each of the "predictors"; `None` for a model without experts."""
        experts = ExpertStats.from_engine(self.engine, self.plan)
        taken = sum(entry[2] for entry in self.engine.trace) if self.device == "cuda" else 0
        return {
            **self._last_meter.timing.to_dict(),
            "load_seconds": self._load_seconds,
            "weights_bytes": self.engine.weight_bytes,
            "kv_bytes": self.engine.kv_bytes,
            "state_bytes": self.engine.state_bytes,
            "scratch_bytes": self.engine.scratch_bytes,
            "vram_bytes": taken,
            "pinned_bytes": self.engine.pinned_bytes,
            "holdings": self.engine.holdings(),
            "device": self.device,
            "device_name": self.device_name,
            "prompt": self.plan.prompt,
            "threads": self.threads,
            "isa": self.isa,
            "placement": self.engine.placement(),
            "notes": [*self._notes, *self.engine.notes],
            "experts": experts.summary() if experts else None,
        }

    @property
    def graphs(self) -> bool:
        """Whether a decode step is captured once and replayed, or its kernels launched each time; never on the CPU.

        Set it to compare; the answer does not depend on it. SHARPI_CUDA_GRAPH=0 sets it off at loading.
        """
        return self.engine.graphs

    @graphs.setter
    def graphs(self, replayed: bool) -> None:
        self.engine.graphs = replayed

    @property
    def kernels_per_step(self) -> int:
        """Kernels that the last decode step launched; 0 on the CPU."""
        return self.engine.kernels_per_step
