"""The Python API: load a model, ask it for logits or text.

Python reads the file's header, plans and tokenizes; the core maps the weights and runs the model. One `Model` may
have several `Session`s; they share weights and the room of the KV cache: `context` tokens in all.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from sharpi import _core
from sharpi.chat import ChatTemplate
from sharpi.drafts import DraftedRun, choose_drafts
from sharpi.errors import InvalidRequestError, ModelFileError, SharpiError
from sharpi.expert_stats import ExpertStats, unwritable
from sharpi.files import require_writable
from sharpi.gguf import GgufFile
from sharpi.hardware import core_count
from sharpi.planner import Plan, make_plan, saved_plan
from sharpi.profile import HardwareProfile, load_profile
from sharpi.session import Session, Timing, Token, as_ids
from sharpi.tokenizer import Tokenizer

__all__ = ["BUNDLED_MODEL", "Model", "Session", "Token", "describe"]

BUNDLED_MODEL = Path(__file__).parent / "bundled" / "story.gguf"

Progress = Callable[[int, int], None]
Notice = Callable[[str], None]

# Drafts are timed with so many tokens, which no other is as likely as.
_FEW, _SURELY = 4, 1000.0


def describe(path: str | os.PathLike[str] | None = None, *, mtp: bool = True) -> tuple[GgufFile, _core.Description]:
    """Reads what a model is, without its weights. `None` is the bundled model. mtp: whether a prediction layer that the
    file may have is part of it.

    Raises `ModelFileError` for a file that cannot be run.
    """
    file = GgufFile.open(BUNDLED_MODEL if path is None else path)
    return file, read_spec(file, mtp)


def read_tokenizer(file: GgufFile, spec: _core.Description | None) -> Tokenizer:
    """The file's tokenizer. Raises `ModelFileError` for a file without one, and for one that does not go with the
    model, if there is a model to go with."""
    tokenizer = Tokenizer.from_metadata(file.metadata)
    if spec is not None and tokenizer.vocab_size > spec.vocab_size:
        raise file.error(f"the tokenizer has {tokenizer.vocab_size} tokens, the model only {spec.vocab_size}")
    return tokenizer


def read_chat_template(file: GgufFile, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """The file's chat template, `None` if it has none. Raises `ModelFileError` for one that does not parse. Without a
    tokenizer, it is given no begin and end tokens."""
    source = file.metadata.get_str("tokenizer.chat_template", None)
    if source is None:
        return None

    def text(token: int | None) -> str:
        return "" if tokenizer is None or token is None else tokenizer.token_text(token)

    bos, eos = (None, None) if tokenizer is None else (tokenizer.bos_id, tokenizer.eos_id)
    return ChatTemplate(source, text(bos), text(eos), file.paths[0])


def read_spec(file: GgufFile, mtp: bool = True) -> _core.Description:
    """What the model is. Raises `ModelFileError` for a file that cannot be run."""
    rows = [(t.name, t.type, list(t.shape), t.file, t.offset, t.nbytes) for t in file.tensors]
    try:
        with np.errstate(invalid="ignore"):  # an odd NaN in an array is no news for people
            return _core.Description(file.metadata.scalars(), rows, predictions=mtp)
    except ModelFileError as error:
        raise file.error(str(error)) from None


def _open(file: GgufFile, spec: _core.Description, plan: Plan, warm: ExpertStats | None) -> _core.Engine:
    arguments = (spec, [str(path) for path in file.paths], plan.context, plan.batch, plan.threads, plan.kv_dtype,
                 plan.device, plan.vram or 0)
    if plan.device == "cpu":
        return _core.Engine(*arguments, sequences=plan.sequences)
    return _core.Engine(*arguments, list(plan.homes), expert_slot_bytes=plan.expert_slots,
                        expert_rates=plan.expert_rates, warm=warm.order() if warm else [], sequences=plan.sequences)


def _engine(file: GgufFile, spec: _core.Description, plan: Plan, warm: ExpertStats | None,
            asked: Mapping[str, Any] | None) -> tuple[_core.Engine, Plan]:
    """The engine, and the plan that it runs: where the GPU fails and the choice was the plan's, one for the CPU.
    warm: what to fill slots by. asked: what the plan was made of, where another may be made."""
    try:
        return _open(file, spec, plan, warm), plan
    except ModelFileError:
        raise
    except SharpiError as reason:
        if asked is None or plan.device == "cpu":
            raise
        # What the plan could not know: memory that went to somebody else, a driver that lacks something, a GPU that
        # fails at its first kernel.
        instead = make_plan(file, spec, **{**asked, "device": "cpu", "vram": None})
        instead = replace(instead, why=str(reason), gpu=plan.gpu, vram=plan.vram)
        return _open(file, spec, instead, warm), instead


def _read_pages(engine: _core.Engine, plan: Plan, progress: Progress) -> None:
    """Reads the file's pages in, where they are still to be read: on the GPU they have been copied."""
    def report(done: int, total: int) -> bool:
        progress(done, total)
        return True

    if plan.device == "cpu":
        engine.warm(report)
    else:
        progress(plan.weights_bytes, plan.weights_bytes)


def _check(*, context: Any, threads: Any, batch: Any, cpu_moe: Any, sequences: Any, mtp: Any, **_: Any) -> None:
    """Raises `InvalidRequestError` for values that no model can be loaded with."""
    for name, value in (("context", context), ("threads", threads), ("batch", batch), ("sequences", sequences)):
        if value is not None and not isinstance(value, (int, np.integer)):
            raise InvalidRequestError(f"{name} must be a whole number, not {value!r}")
    if batch is not None and not 1 <= batch <= 65536:
        raise InvalidRequestError(f"batch must be 1 to 65536, not {batch}")
    if threads is not None and not 1 <= threads <= 1024:
        raise InvalidRequestError(f"threads must be 1 to 1024, not {threads}")
    if sequences is not None and not 1 <= sequences <= 4096:
        raise InvalidRequestError(f"sequences must be 1 to 4096, not {sequences}")
    for name, value in (("cpu_moe", cpu_moe), ("mtp", mtp)):
        if value not in (None, True, False):
            raise InvalidRequestError(f"{name} must be true or false, not {value!r}")


def _stats_target(path: str | os.PathLike[str] | None) -> str | None:
    """Where the expert statistics go, if anywhere. Raises `InvalidRequestError` for a path that nothing can be written
    to: before the model is loaded and used for hours."""
    target = os.environ.get("SHARPI_EXPERT_STATS") if path is None else os.fspath(path)
    if not target:
        return None
    try:
        require_writable(target)
    except (OSError, ValueError) as error:
        raise unwritable(target, error) from error
    return target


def _warmth(warm: ExpertStats | str | os.PathLike[str] | None, file: GgufFile) -> ExpertStats | None:
    """The statistics by which the slots are filled, those of `file` and no other model."""
    if warm is None:
        return None
    if not isinstance(warm, ExpertStats):
        return ExpertStats.load(warm, file)
    warm.require_model(file)
    return warm


def _unheeded(file: GgufFile, counts: ExpertStats | None, warm: ExpertStats | None, target: str | None) -> list[str]:
    """What was asked for about experts and has no effect, as lines for people; counts: of the model just loaded."""
    lines = []
    if counts is None and target is not None:
        lines.append(f"no expert statistics are written: {file.name} has no experts")
    if counts is not None and not counts.capacity and warm is not None:
        lines.append("nothing is warmed: no experts are in slots")
    return lines


def _refuse_beside_a_plan(asked: Mapping[str, Any]) -> None:
    """Raises `InvalidRequestError` where something is asked for that the plan says already."""
    for name, value in asked.items():
        if value is not None:
            raise InvalidRequestError(f"a saved plan says the {name} already: leave one of the two out")


class Model:
    """A model ready to answer. Make one with `Model.load`; close it, or use it in a `with` block."""

    def __init__(self, file: GgufFile, spec: _core.Description, engine: _core.Engine, plan: Plan, threads: int,
                 load_seconds: float, expert_stats: str | None = None, notice: Notice | None = None) -> None:
        self.file = file
        self.spec = spec
        self.plan = plan
        self.threads = threads
        self._engine: _core.Engine | None = engine
        self._load_seconds = load_seconds
        self._tokenizer: Tokenizer | None = None
        self.timing = Timing()  # of the last generation
        self._expert_stats = expert_stats
        self._process = os.getpid()
        self._notice = notice
        self._noticed: set[str] = set()
        self._dense = engine.expert_stats() is None
        self._bench_runs = 0

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None, *, device: str = "auto", vram: str | int | None = None,
             context: int | None = None, kv_dtype: str | None = None, threads: int | None = None,
             batch: int | None = None, cpu_moe: bool | None = None, sequences: int | None = None,
             mtp: bool | None = None, plan: str | os.PathLike[str] | None = None,
             profile: HardwareProfile | str | os.PathLike[str] | None = None,
             warm: ExpertStats | str | os.PathLike[str] | None = None,
             expert_stats: str | os.PathLike[str] | None = None, progress: Progress | None = None,
             notice: Notice | None = None) -> Model:
        """Opens a GGUF file (any part of a split one); `None` is the bundled model.

        device: "auto", "cpu" or "cuda"; "auto" takes the GPU where there is one and the model fits into its memory,
        and else the faster of the two, as predicted. vram: the most to take of that memory, in bytes or as text such
        as "12GiB"; without it, what is free. Weights that do not fit stay in RAM and are used from there. context:
        tokens that prompt and answer may have together. kv_dtype: "fp32", "bf16" (default) or "fp16". batch: rows that
        prefill takes at once (512, on the GPU 2048). cpu_moe: whether all experts stay in RAM, for the CPU to compute
        in decode, even where they would fit; `None` is what SHARPI_CPU_MOE says. sequences: conversations that may hold
        tokens at once, where the model keeps a state for each of them (4, of which those not used serve to go back in
        others). mtp: whether a prediction layer is loaded, to draft tokens with; `None`: where the file has one. plan: a
        file with a plan for this model, which says all of these. profile: the machine's speeds, or a file with them;
        without it, they are measured once where they are needed.

        expert_stats: a file to write when the model is closed, with what became of its experts; `None` is what
        SHARPI_EXPERT_STATS says. warm: such a file of this model, or what it holds: where experts are in slots, the
        most used ones are brought there first.

        progress: called with bytes done and bytes in all while the file is read from disk; without it, pages are read
        as they are first used. notice: called with a line for people, where there is something that they may want to
        know.

        Raises `ModelFileError`, `InvalidRequestError`, `OutOfMemoryError`.
        """
        started = time.perf_counter()
        asked = {"device": device, "vram": vram, "context": context, "kv_dtype": kv_dtype, "threads": threads,
                 "batch": batch, "cpu_moe": cpu_moe, "sequences": sequences}
        _check(**asked, mtp=mtp)
        if plan is not None:
            _refuse_beside_a_plan({**asked, "device": None if device == "auto" else device, "profile": profile,
                                    "mtp": mtp})
        target = _stats_target(expert_stats)
        file, spec = describe(path, mtp=mtp is None or bool(mtp))
        warmth = asked["warm"] = _warmth(warm, file)
        if plan is not None:
            made = saved_plan(plan, file, spec)
            spec = spec if made.mtp else read_spec(file, False)
        else:
            if mtp and not spec.prediction_layers:
                raise InvalidRequestError(f"{file.name} has no prediction layer to draft with: leave mtp out")
            asked["threads"] = core_count() if threads is None else threads
            known = profile if profile is None or isinstance(profile, HardwareProfile) else load_profile(profile)
            made = make_plan(file, spec, **asked, profile=known, notice=notice)
        made.require()
        engine, made = _engine(file, spec, made, warmth, asked if device == "auto" and plan is None else None)
        counts = ExpertStats.from_engine(engine, made)
        for line in (*engine.notes, *_unheeded(file, counts, warmth, target)) if notice is not None else ():
            notice(line)
        if progress is not None:
            _read_pages(engine, made, progress)
        return cls(file, spec, engine, made, made.threads, time.perf_counter() - started,
                   None if counts is None else target, notice)

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        try:
            self.close()
        except SharpiError as unsaved:
            if error is None or self._notice is None:
                raise
            self._notice(str(unsaved))  # what went wrong inside is the news, and goes on its way

    def close(self) -> None:
        """Gives memory back, and writes the expert statistics that were asked for. Sessions that are still held keep
        the memory until they go. Raises `InvalidRequestError` where the statistics cannot be written (any more)."""
        engine, self._engine = self._engine, None
        # A forked child's counts are its parent's.
        if engine is not None and self._expert_stats is not None and os.getpid() == self._process:
            ExpertStats.from_engine(engine, self.plan).save(self._expert_stats)

    def tell(self, line: str) -> None:
        """Gives `line` to whoever asked for notices, unless it was said before."""
        if self._notice is not None and line not in self._noticed:
            self._noticed.add(line)
            self._notice(line)

    @property
    def engine(self) -> _core.Engine:
        """The core's engine. Raises `InvalidRequestError` on a closed model."""
        if self._engine is None:
            raise InvalidRequestError("the model is closed")
        return self._engine

    @property
    def context(self) -> int:
        """Tokens that the KV cache holds: the prompt and the answer, but for the answer's last token."""
        return self.plan.context

    @property
    def device(self) -> str:
        """Where the model runs: "cpu" or "cuda"."""
        return self.plan.device

    @property
    def device_name(self) -> str:
        """The name of the GPU, or what the CPU kernels are compiled for."""
        return self.engine.device_name

    @property
    def isa(self) -> str:
        """The instruction set that the CPU kernels use: "scalar", "avx2" or "avx512"."""
        return _core.cpu_isa()

    @property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer, built on first use. Raises `ModelFileError` for a file without one."""
        if self._tokenizer is None:
            self._tokenizer = read_tokenizer(self.file, self.spec)
        return self._tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The file's chat template, `None` if it has none."""
        return read_chat_template(self.file, self.tokenizer)

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`; `add_special` adds BOS and EOS as the model wants them, `parse_special` reads the
        names of control tokens in the text as those tokens."""
        return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, control tokens left out."""
        return self.tokenizer.decode(ids)

    def logits(self, tokens: Sequence[int], *, chunks: Sequence[int] = ()) -> np.ndarray:
        """float32 [len(tokens), vocab]: row i says what follows tokens[: i + 1].

        chunks: sizes of the pieces in which the tokens are evaluated; the answer does not depend on them.
        """
        return _core.Session(self.engine).logits(as_ids(tokens), list(chunks))

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Iterator[Token]:
        """Continues `prompt` in a session of its own; for the options see `Session.generate`."""
        session = self.session()
        yield from session.generate(prompt, **options)

    def session(self) -> Session:
        """A new conversation, which keeps its KV cache between calls."""
        return Session(self)

    def stats(self) -> dict[str, Any]:
        """Counts and speeds of the last generation, and the bytes held; `vram_bytes` by the device's own account.
        steps: passes of the model after the prompt's; acceptance_rate: of the drafted tokens, `None` where there were
        none.

        placement: where the weights are, as the core says: bytes in "vram", "direct" (of these "cpu" is the CPU's
        share) and "slots" (experts in the file, of which single ones are in VRAM), and the "ranges" of the files. notes:
        lines for people on what became of the plan.

        experts: since loading, sums over all layers of what `ExpertStats` counts, the "hit_rate" of the "slots", and
        the "accuracy" of each of the "predictors"; `None` for a model without experts."""
        experts = ExpertStats.from_engine(self.engine, self.plan)
        taken = sum(entry[2] for entry in self.engine.trace) if self.device == "cuda" else 0
        return {
            **self.timing.to_dict(),
            "load_seconds": self._load_seconds,
            "weights_bytes": self.engine.weight_bytes,
            "kv_bytes": self.engine.kv_bytes,
            "state_bytes": self.engine.state_bytes,
            "scratch_bytes": self.engine.scratch_bytes,
            "vram_bytes": taken,
            "device": self.device,
            "device_name": self.device_name,
            "threads": self.threads,
            "isa": self.isa,
            "placement": self.engine.placement(),
            "notes": list(self.engine.notes),
            "experts": experts.summary() if experts else None,
        }

    def bench_prefill(self, tokens: int) -> float:
        """Seconds from a prompt of `tokens` random tokens to the token that follows it."""
        session, ids = _core.Session(self.engine), self._random_ids(tokens)
        started = time.perf_counter()
        session.start(ids, _likeliest())
        return time.perf_counter() - started

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

    def bench_decode(self, depth: int, tokens: int) -> float:
        """Seconds for `tokens` decode steps, each with the choice of a token, after `depth` (at least 1) tokens.

        Where there are experts, tokens are drawn, others in each call: the likeliest soon repeat themselves with random
        weights, and with them the experts, which would make any cache look good."""
        session = _core.Session(self.engine)
        self._bench_runs += 1
        params = _likeliest() if self._dense else _drawn(seed=self._bench_runs)
        session.start(self._random_ids(max(1, depth)), params)
        session.next()  # was chosen with the prompt
        started = time.perf_counter()
        for _ in range(tokens):
            session.next()
        return time.perf_counter() - started

    def bench_drafts(self, depth: int, tokens: int, draft: str, draft_tokens: int | None = None) -> DraftedRun:
        """What it takes to generate at least `tokens` tokens with drafts (see `Session.generate`) after `depth` (at
        least 1) tokens.

        What a step costs counts here, not how often a guess is right, which random tokens cannot tell. So that there
        is always something to look up for "ngram", all tokens are drawn from a few, alike for every way of drafting."""
        drafts = choose_drafts(draft, draft_tokens, mtp=self.plan.mtp)
        self._bench_runs += 1
        few = np.random.default_rng(0).choice(self.spec.vocab_size, min(_FEW, self.spec.vocab_size), replace=False)
        prompt = np.random.default_rng(self._bench_runs).choice(few, max(1, depth)).tolist()
        session = _core.Session(self.engine)
        session.start(prompt, _drawn(self._bench_runs, {int(token): _SURELY for token in few}), *drafts)
        session.next()  # was chosen with the prompt
        before = np.array(session.draft_counts)
        started = time.perf_counter()
        for _ in range(tokens):
            session.next()
        seconds = time.perf_counter() - started
        steps, drafted, accepted = (np.array(session.draft_counts) - before).tolist()
        return DraftedRun(seconds, steps + accepted, steps, drafted, accepted)

    def _random_ids(self, count: int) -> list[int]:
        return np.random.default_rng(0).integers(0, self.spec.vocab_size, count).tolist()


def _likeliest() -> _core.SamplingParams:
    return _core.SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
                                presence_penalty=0.0, frequency_penalty=0.0, logit_bias={}, seed=0)


def _drawn(seed: int, bias: Mapping[int, float] | None = None) -> _core.SamplingParams:
    return _core.SamplingParams(temperature=1.0, top_k=40, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
                                presence_penalty=0.0, frequency_penalty=0.0, logit_bias=dict(bias or {}), seed=seed)
