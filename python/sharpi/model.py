"""The Python API: load a model, ask it for logits or text.

Python reads the file's header, plans and tokenizes; the core maps the weights and runs the model. One `Model` may
have several `Session`s; they share weights and the room of the KV cache: `context` tokens in all.
"""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from sharpi import _core
from sharpi.chat import ChatTemplate
from sharpi.errors import InvalidRequestError, ModelFileError, SharpiError
from sharpi.expert_stats import ExpertStats, unwritable
from sharpi.files import require_writable
from sharpi.gguf import GgufFile
from sharpi.hardware import core_count
from sharpi.planner import Plan, make_plan, saved_plan
from sharpi.profile import HardwareProfile, load_profile
from sharpi.tokenizer import Tokenizer

__all__ = ["BUNDLED_MODEL", "Model", "Session", "Token", "describe"]

BUNDLED_MODEL = Path(__file__).parent / "bundled" / "story.gguf"

Progress = Callable[[int, int], None]
Notice = Callable[[str], None]


@dataclass(frozen=True)
class Token:
    """A generated token. `text` holds whole characters only: it is empty while a character is incomplete."""

    id: int
    text: str


def describe(path: str | os.PathLike[str] | None = None) -> tuple[GgufFile, _core.Description]:
    """Reads what a model is, without its weights. `None` is the bundled model.

    Raises `ModelFileError` for a file that cannot be run.
    """
    file = GgufFile.open(BUNDLED_MODEL if path is None else path)
    rows = [(t.name, t.type, list(t.shape), t.file, t.offset, t.nbytes) for t in file.tensors]
    try:
        return file, _core.Description(file.scalars(), rows)
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


def _check(*, context: Any, threads: Any, batch: Any, cpu_moe: Any, sequences: Any, **_: Any) -> None:
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
    if cpu_moe not in (None, True, False):
        raise InvalidRequestError(f"cpu_moe must be true or false, not {cpu_moe!r}")


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
        self._timing = _Timing()
        self._expert_stats = expert_stats
        self._process = os.getpid()
        self._notice = notice
        self._dense = engine.expert_stats() is None
        self._bench_runs = 0

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None, *, device: str = "auto", vram: str | int | None = None,
             context: int | None = None, kv_dtype: str | None = None, threads: int | None = None,
             batch: int | None = None, cpu_moe: bool | None = None, sequences: int | None = None,
             plan: str | os.PathLike[str] | None = None, profile: HardwareProfile | str | os.PathLike[str] | None = None,
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
        others). plan: a file with a plan for this
        model, which says all of these. profile: the machine's speeds, or a file with them; without it, they are
        measured once where they are needed.

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
        _check(**asked)
        if plan is not None:
            _refuse_beside_a_plan({**asked, "device": None if device == "auto" else device, "profile": profile})
        target = _stats_target(expert_stats)
        file, spec = describe(path)
        warmth = asked["warm"] = _warmth(warm, file)
        if plan is not None:
            made = saved_plan(plan, file, spec)
        else:
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
            self._tokenizer = Tokenizer.from_metadata(self.file.metadata, str(self.file.paths[0]))
            if self._tokenizer.vocab_size > self.spec.vocab_size:
                count, rows = self._tokenizer.vocab_size, self.spec.vocab_size
                self._tokenizer = None
                raise self.file.error(f"the tokenizer has {count} tokens, the model only {rows}")
        return self._tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The file's chat template, `None` if it has none."""
        source = self.file.metadata.get("tokenizer.chat_template")
        if not isinstance(source, str):
            return None

        def text(token: int | None) -> str:
            return "" if token is None else self.tokenizer.token_text(token)

        return ChatTemplate(source, text(self.tokenizer.bos_id), text(self.tokenizer.eos_id))

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
        return _core.Session(self.engine).logits(_as_ids(tokens), list(chunks))

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Iterator[Token]:
        """Continues `prompt` in a session of its own; for the options see `Session.generate`."""
        session = self.session()
        yield from session.generate(prompt, **options)

    def session(self) -> Session:
        """A new conversation, which keeps its KV cache between calls."""
        return Session(self)

    def stats(self) -> dict[str, Any]:
        """Counts and speeds of the last generation, and the bytes held; `vram_bytes` by the device's own account.

        placement: where the weights are, as the core says: bytes in "vram", "direct" (of these "cpu" is the CPU's
        share) and "slots" (experts in the file, of which single ones are in VRAM), and the "ranges" of the files. notes: lines for people on what became of the plan.

        experts: since loading, sums over all layers of what `ExpertStats` counts, the "hit_rate" of the "slots", and
        the "accuracy" of each of the "predictors"; `None` for a model without experts."""
        experts = ExpertStats.from_engine(self.engine, self.plan)
        taken = sum(entry[2] for entry in self.engine.trace) if self.device == "cuda" else 0
        return {
            **self._timing.to_dict(),
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

    def _random_ids(self, count: int) -> list[int]:
        return np.random.default_rng(0).integers(0, self.spec.vocab_size, count).tolist()


class Session:
    """A conversation: what was evaluated stays in the KV cache, and the next prompt reuses what it shares with it."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._core = _core.Session(model.engine)
        self._turn = 0  # which generation the core session is at

    @property
    def tokens(self) -> list[int]:
        """The tokens in the KV cache, in order."""
        return self._core.tokens

    def reset(self) -> None:
        """Forgets all tokens; a generation that is under way cannot go on."""
        self._turn += 1
        self._core.reset()

    def generate(self, prompt: str | Sequence[int], *, max_tokens: int | None = None, temperature: float = 0.8,
                 top_k: int = 40, top_p: float = 0.95, min_p: float = 0.05, repetition_penalty: float = 1.0,
                 presence_penalty: float = 0.0, frequency_penalty: float = 0.0,
                 logit_bias: Mapping[int, float] | None = None, seed: int | None = None,
                 stop: str | Sequence[str] = ()) -> Iterator[Token]:
        """Yields tokens that continue `prompt` (the whole conversation so far, as text or token ids).

        Ends at `max_tokens` (`None`: no limit), at an end token of the model, where one of the `stop` texts begins,
        or when the context is full. temperature 0 always takes the most likely token; the same seed gives the same
        text. Closing the iterator stops the work. Raises `InvalidRequestError` before the first token.
        """
        model = self._model
        if max_tokens is not None and max_tokens < 0:
            raise InvalidRequestError(f"max_tokens must be 0 or more, not {max_tokens}")
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if any(not text for text in stop):
            raise InvalidRequestError("a stop text is empty")
        if seed is not None and not 0 <= seed < 2**64:
            raise InvalidRequestError(f"the seed must be 0 to 2^64 - 1, not {seed}")
        ids = model.tokenize(prompt) if isinstance(prompt, str) else _as_ids(prompt)
        if not ids:
            raise InvalidRequestError("the prompt is empty: give at least one token")
        try:
            params = _core.SamplingParams(
                temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
                presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
                logit_bias=dict(logit_bias or {}),
                seed=secrets.randbits(63) if seed is None else seed)
        except TypeError:
            raise InvalidRequestError("a sampling option has the wrong type or is too large") from None
        try:
            decoder, ends = model.tokenizer.stream(after=ids), model.tokenizer.stop_ids
        except ModelFileError:
            if isinstance(prompt, str) or stop:
                raise
            decoder, ends = None, frozenset()  # a file without a tokenizer still answers in token ids
        timing = model._timing = _Timing()
        started = time.perf_counter()
        self._turn += 1
        turn = self._turn
        self._core.start(ids, params)
        timing.prompt_seconds = time.perf_counter() - started
        timing.reused_tokens = self._core.reused_tokens
        timing.prompt_tokens = len(ids) - timing.reused_tokens
        yield from _StopFilter(stop).through(self._tokens(turn, max_tokens, ends, decoder, timing))

    def _tokens(self, turn: int, max_tokens: int | None, ends: frozenset[int], decoder: Any,
                timing: _Timing) -> Iterator[Token]:
        last = None
        while max_tokens is None or timing.generated_tokens < max_tokens:
            if turn != self._turn:
                raise InvalidRequestError("the session was used for something else: this generation cannot go on")
            started = time.perf_counter()
            token = self._core.next()
            timing.generation_seconds += time.perf_counter() - started
            if token is None or token in ends:
                break
            timing.generated_tokens += 1
            last = token
            yield Token(token, decoder.push(token) if decoder else "")
        rest = decoder.flush() if decoder else ""
        if rest and last is not None:
            yield Token(last, rest)


@dataclass
class _Timing:
    """Of the last generation."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    generated_tokens: int = 0
    generation_seconds: float = 0.0
    reused_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        def rate(tokens: int, seconds: float) -> float:
            return tokens / seconds if seconds > 0 else 0.0

        return {
            "prompt_tokens": self.prompt_tokens,
            "prompt_seconds": self.prompt_seconds,
            "prompt_tokens_per_second": rate(self.prompt_tokens, self.prompt_seconds),
            "generated_tokens": self.generated_tokens,
            "generation_seconds": self.generation_seconds,
            "generation_tokens_per_second": rate(self.generated_tokens, self.generation_seconds),
            "reused_tokens": self.reused_tokens,
        }


class _StopFilter:
    """Ends a stream where one of some texts begins, holding text back while it may still become one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop

    def through(self, tokens: Iterator[Token]) -> Iterator[Token]:
        held, last = "", None
        for token in tokens:
            held, last = held + token.text, token.id
            found = min((at for text in self._stop if (at := held.find(text)) >= 0), default=-1)
            if found >= 0:
                yield Token(token.id, held[:found])
                return
            keep = max((self._overlap(held, text) for text in self._stop), default=0)
            yield Token(token.id, held[: len(held) - keep])
            held = held[len(held) - keep :]
        if held and last is not None:
            yield Token(last, held)

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """How many of the last characters of `text` begin `stop`."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)


def _likeliest() -> _core.SamplingParams:
    return _core.SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
                                presence_penalty=0.0, frequency_penalty=0.0, logit_bias={}, seed=0)


def _drawn(seed: int) -> _core.SamplingParams:
    return _core.SamplingParams(temperature=1.0, top_k=40, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
                                presence_penalty=0.0, frequency_penalty=0.0, logit_bias={}, seed=seed)


def _as_ids(tokens: Sequence[int]) -> list[int]:
    """Token ids as the core takes them. Raises `InvalidRequestError` for anything else."""
    try:
        ids = np.asarray(tokens)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < 2**31:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequestError("tokens must be a sequence of token ids, 0 to 2^31 - 1") from None
    return [int(i) for i in ids]
