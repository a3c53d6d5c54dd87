"""The Python API: load a model, ask it for logits or text.

Python reads the file's header, plans and tokenizes; the core maps the weights and runs the model. One `Model` may
have several `Session`s; they share weights and the room of the KV cache: `context` tokens in all.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from sharpi import _core, hub
from sharpi.conversation import Message, Reply
from sharpi.errors import InvalidRequestError, ModelFileError, SharpiError
from sharpi.files.gguf import GgufFile
from sharpi.files.rope import RopeScaling
from sharpi.generation import Generation, GenerationOptions, Meter, takes_generation_options
from sharpi.machine.hardware import usable_threads
from sharpi.machine.profile import HardwareProfile, load_profile
from sharpi.planning.expert_stats import ExpertStats, unwritable
from sharpi.planning.planner import Plan, make_plan, saved_plan
from sharpi.session import Session, Timing, Token
from sharpi.settings import arguments
from sharpi.settings.choices import ROW_KINDS
from sharpi.settings.switches import check_switches
from sharpi.storage import require_writable
from sharpi.text.chat import ChatTemplate
from sharpi.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["BUNDLED_MODEL", "Generation", "Model", "Reply", "Session", "Token", "describe"]

BUNDLED_MODEL = Path(__file__).parent / "bundled" / "story.gguf"

Progress = Callable[[int, int], None]
Notice = Callable[[str], None]

_log = logging.getLogger(__name__)


def describe(path: str | os.PathLike[str] | None = None, *, mtp: bool = True,
             rope: RopeScaling | None = None) -> tuple[GgufFile, _core.Description]:
    """Reads what a model is, without its weights. `None` is the bundled model; of a name such as "user/repo:Q4_K_M"
    that is not in the cache, the header alone is downloaded. mtp: whether a prediction layer that the file may have is
    part of it. rope: a scaling to use in place of the file's.

    Raises `ModelFileError` for a file that cannot be run, `InvalidRequestError` for a scaling that does not suit it.
    """
    file = GgufFile.open(BUNDLED_MODEL if path is None else hub.look(path).path)
    _log.debug("%s: %s, %d tensors of %d bytes in %d files", file.paths[0], file.architecture, len(file.tensors),
               file.total_bytes, len(file.paths))
    return file, read_spec(file, mtp, rope)


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


def read_spec(file: GgufFile, mtp: bool = True, rope: RopeScaling | None = None) -> _core.Description:
    """What the model is. Raises `ModelFileError` for a file that cannot be run."""
    rows = [(t.name, t.type, list(t.shape), t.file, t.offset, t.nbytes) for t in file.tensors]
    try:
        metadata = file.metadata.scalars() | (rope.metadata(file) if rope else {})
        with np.errstate(invalid="ignore"):  # an odd NaN in an array is no news for people
            return _core.Description(metadata, rows, predictions=mtp)
    except ModelFileError as error:
        raise file.error(str(error)) from None


def engine_options(plan: Plan, warm: ExpertStats | None = None) -> _core.EngineOptions:
    """What the core is told of a plan. warm: says which experts fill the slots first."""
    on_gpu = plan.device == "cuda"
    return _core.EngineOptions(
        context=plan.context,
        batch=plan.batch,
        threads=plan.threads,
        kv_dtype=plan.kv_dtype,
        prompt=plan.prompt,
        sequences=plan.sequences,
        device=plan.device,
        vram=plan.vram or 0,
        homes=plan.homes if on_gpu else (),
        expert_slot_bytes=plan.expert_slots if on_gpu else 0,
        expert_rates=plan.expert_rates if on_gpu else (0.0, 0.0),
        warm=warm.order() if warm and on_gpu else (),
    )


def _open(file: GgufFile, spec: _core.Description, plan: Plan, warm: ExpertStats | None) -> _core.Engine:
    return _core.Engine(spec, [str(path) for path in file.paths], engine_options(plan, warm))


def _engine(file: GgufFile, spec: _core.Description, plan: Plan, warm: ExpertStats | None,
            asked: Mapping[str, Any] | None) -> tuple[_core.Engine, Plan]:
    """The engine, and the plan that it runs: if the GPU fails and it was the plan's choice, one for the CPU. warm: says
    which experts fill the slots first. asked: what the plan was made of, if another may be made."""
    try:
        return _open(file, spec, plan, warm), plan
    except ModelFileError:
        raise
    except SharpiError as reason:
        if asked is None or plan.device == "cpu":
            raise
        # The plan could not know that another process takes the memory, that the driver lacks something, or that the
        # GPU fails at its first kernel.
        _log.warning("%s: the GPU cannot be used, so the CPU is: %s", file.name, reason)
        instead = make_plan(file, spec, **{**asked, "device": "cpu", "vram": None})
        instead = replace(instead, why=str(reason), gpu=plan.gpu, vram=plan.vram)
        return _open(file, spec, instead, warm), instead


def _read_pages(engine: _core.Engine, plan: Plan, progress: Progress) -> None:
    """Reads the file's pages in, unless that is done: for the GPU they have been copied."""
    def report(done: int, total: int) -> bool:
        progress(done, total)
        return True

    if plan.device == "cpu":
        engine.warm(report)
    else:
        progress(plan.weights_bytes, plan.weights_bytes)


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Model.load`, each of its type. Raises `InvalidRequestError`, which names the argument."""
    values = dict(given)
    for name, (check, *bounds) in _LOAD_CHECKS.items():
        if given[name] is None and name != "device":  # the only one whose default is not None
            continue
        value = values[name] = check(name, given[name])
        if bounds and not bounds[0] <= value <= bounds[1]:
            raise InvalidRequestError(f"{name} must be {bounds[0]} to {bounds[1]}, not {value}")
    return values


def _profile_or_path(name: str, value: Any) -> Any:
    return value if isinstance(value, HardwareProfile) else arguments.path(name, value)


def _stats_or_path(name: str, value: Any) -> Any:
    return value if isinstance(value, ExpertStats) else arguments.path(name, value)


# The arguments that plans are made of, and those of the scaling.
_PLANNED = ("device", "vram", "context", "kv_dtype", "threads", "batch", "cpu_moe", "sequences", "prompt")
_ROPE = ("rope_scaling", "rope_scale", "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx")

# How `Model.load`'s arguments are checked, and the bounds of numbers; the planner and `RopeScaling` check the others.
_LOAD_CHECKS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("path", "plan", "expert_stats"), (arguments.path,)),
    **dict.fromkeys(("device", "kv_dtype", "prompt"), (arguments.text,)),
    **dict.fromkeys(("cpu_moe", "mtp"), (arguments.flag,)),
    **dict.fromkeys(("progress", "notice"), (arguments.function,)),
    "context": (arguments.whole,),
    "batch": (arguments.whole, 1, 65536),
    "threads": (arguments.whole, 1, 1024),
    "sequences": (arguments.whole, 1, 4096),
    "profile": (_profile_or_path,),
    "warm": (_stats_or_path,),
}


def _stats_target(path: str | os.PathLike[str] | None) -> str | None:
    """Where the expert statistics go, if anywhere. Raises `InvalidRequestError` for a path that cannot be written to
    now, before the model is loaded and used for hours."""
    target = os.environ.get("SHARPI_EXPERT_STATS") if path is None else os.fspath(path)
    if not target:
        return None
    try:
        require_writable(target)
    except (OSError, ValueError) as error:
        raise unwritable(target, error) from error
    return target


def _warmth(warm: ExpertStats | str | os.PathLike[str] | None, file: GgufFile) -> ExpertStats | None:
    """The statistics that say which experts to load first. Raises `InvalidRequestError` for those of another model."""
    if warm is None:
        return None
    if not isinstance(warm, ExpertStats):
        return ExpertStats.load(warm, file)
    warm.require_model(file)
    return warm


def _unheeded(file: GgufFile, counts: ExpertStats | None, warm: ExpertStats | None, target: str | None) -> list[str]:
    """Lines about requests for experts that have no effect. counts: of the model just loaded."""
    lines = []
    if counts is None and target is not None:
        lines.append(f"no expert statistics are written: {file.name} has no experts")
    if counts is not None and not counts.capacity and warm is not None:
        lines.append("nothing is warmed: no experts are in slots")
    return lines


def _teller(notice: Notice | None) -> Notice:
    """Passes lines for people to `notice`, if there is one, and to the log, whose records say whether they were `told`
    already."""
    def tell(line: str) -> None:
        _log.info("%s", line, extra={"told": notice is not None})
        if notice is not None:
            notice(line)

    return tell


def _refuse_beside_a_plan(given: Mapping[str, Any]) -> None:
    """Raises `InvalidRequestError` if something is asked for that a saved plan says already."""
    for name in (*_PLANNED, "mtp", "profile", *_ROPE):
        if given[name] is not None and (name, given[name]) != ("device", "auto"):
            raise InvalidRequestError(f"a saved plan says {name} already: leave one of the two arguments out")


def _planned(file: GgufFile, spec: _core.Description, given: Mapping[str, Any],
             more: Mapping[str, Any]) -> tuple[Plan, _core.Description, dict[str, Any] | None]:
    """The plan for the arguments of `Model.load`, the spec that it is for, and the arguments for `make_plan` if the
    device was left to it. more: arguments for `make_plan` beside those of `Model.load`."""
    if given["plan"] is not None:
        made = saved_plan(given["plan"], file, spec)
        made = replace(made, threads=usable_threads(made.threads, more["notice"]))
        return made, spec if made.mtp and made.rope is None else read_spec(file, made.mtp, made.rope), None
    if given["mtp"] and not spec.prediction_layers:
        raise InvalidRequestError(f"{file.name} has no prediction layer to draft with: leave mtp out")
    asked = {**{name: given[name] for name in _PLANNED}, **more}
    asked["threads"] = usable_threads(given["threads"], more["notice"])
    profile = given["profile"]
    known = profile if profile is None or isinstance(profile, HardwareProfile) else load_profile(profile)
    return make_plan(file, spec, **asked, profile=known), spec, asked if given["device"] == "auto" else None


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
        self._last_meter = Meter(Timing())  # of the generation started last
        self._expert_stats = expert_stats
        self._process = os.getpid()
        self._notice = notice
        self._noticed: set[str] = set()

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None, *, device: str = "auto", vram: str | int | None = None,
             context: int | None = None, kv_dtype: str | None = None, threads: int | None = None,
             batch: int | None = None, cpu_moe: bool | None = None, sequences: int | None = None,
             prompt: str | None = None, mtp: bool | None = None, rope_scaling: str | None = None,
             rope_scale: float | None = None, rope_freq_base: float | None = None, rope_freq_scale: float | None = None,
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
        recurrent layers, how many states to keep (4); each conversation that holds tokens needs one, the others serve
        to roll back. prompt: how the GPU computes prompts: "exact" gives the same bits as every other processor,
        "fast" uses tensor cores, so the bits depend on the kind of GPU too, and takes batches of 64 rows or more;
        `None` is what the kind of GPU says, so far "fast". The CPU's are exact. mtp: whether to load a prediction
        layer, to draft tokens with; `None`: if the file has one.

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
        started, tell = time.perf_counter(), _teller(notice)
        check_switches()
        given = _checked({
            "path": path, "device": device, "vram": vram, "context": context, "kv_dtype": kv_dtype, "threads": threads,
            "batch": batch, "cpu_moe": cpu_moe, "sequences": sequences, "prompt": prompt, "mtp": mtp,
            "rope_scaling": rope_scaling, "rope_scale": rope_scale, "rope_freq_base": rope_freq_base,
            "rope_freq_scale": rope_freq_scale,
            "yarn_orig_ctx": yarn_orig_ctx, "plan": plan, "profile": profile, "warm": warm,
            "expert_stats": expert_stats, "progress": progress, "notice": notice})
        if plan is not None:
            _refuse_beside_a_plan(given)
        rope = RopeScaling.asked(**{name: given[name] for name in _ROPE})
        target = _stats_target(expert_stats)
        if path is not None:
            path = hub.locate(path, notice=tell,
                              progress=None if progress is None else lambda _, done, total: progress(done, total))
        file, spec = describe(path, mtp=given["mtp"] is not False, rope=rope)
        warmth = _warmth(warm, file)
        made, spec, asked = _planned(file, spec, given, {"rope": rope, "warm": warmth, "notice": tell})
        _log.info("%r from %s", made, file.paths[0])
        made.require()
        engine, made = _engine(file, spec, made, warmth, asked)
        counts = ExpertStats.from_engine(engine, made)
        for line in (*engine.notes, *_unheeded(file, counts, warmth, target)):
            tell(line)
        if progress is not None:
            _read_pages(engine, made, progress)
        seconds = time.perf_counter() - started
        _log.info("%s is loaded after %.3f s: %s (%s), %d threads", file.name, seconds, made.device, engine.device_name,
                  made.threads)
        return cls(file, spec, engine, made, made.threads, seconds, None if counts is None else target, notice)

    def __repr__(self) -> str:
        closed = ", closed" if self._engine is None else ""
        return f"<Model {self.file.name!r} on {self.device}, context {self.context:,} tokens{closed}>"

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        try:
            self.close()
        except SharpiError as unsaved:
            if error is None or self._notice is None:
                raise
            self._notice(str(unsaved))  # the error from inside the block goes on its way

    def close(self) -> None:
        """Releases memory, and writes the expert statistics that were asked for. Sessions that still exist keep the
        memory until they are gone. Raises `InvalidRequestError` if the statistics can no longer be written."""
        engine, self._engine = self._engine, None
        # A forked child's counts are its parent's.
        if engine is not None and self._expert_stats is not None and os.getpid() == self._process:
            stats = ExpertStats.from_engine(engine, self.plan)
            if stats is not None:
                stats.save(self._expert_stats)

    def tell(self, line: str) -> None:
        """Passes `line` to the caller's `notice` and to the log, once."""
        if line not in self._noticed:
            self._noticed.add(line)
            _teller(self._notice)(line)

    @property
    def engine(self) -> _core.Engine:
        """The core's engine. Raises `InvalidRequestError` on a closed model."""
        if self._engine is None:
            raise InvalidRequestError("the model is closed")
        return self._engine

    @property
    def context(self) -> int:
        """Tokens that the KV cache has room for: the prompt and the answer without its last token."""
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
        """Token ids of `text`. add_special: with BOS and EOS as the model wants them. parse_special: the names of
        control tokens in the text become those tokens."""
        return self.tokenizer.encode(arguments.text("text", text), arguments.flag("add_special", add_special),
                                     arguments.flag("parse_special", parse_special))

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, control tokens left out."""
        return self.tokenizer.decode(arguments.token_ids("ids", ids))

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
        return _core.Session(self.engine).logits(ids, sizes, kind)

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
        """A new conversation, which keeps its KV cache between calls."""
        return Session(self)

    def note_generation(self, meter: Meter) -> None:
        """Makes a generation the one whose figures `stats` has."""
        self._last_meter = meter

    def stats(self) -> dict[str, Any]:
        """Counts and speeds of the generation started last, and the bytes held; `vram_bytes` by the device's own
        account. If several sessions work at once, ask each generation: `Generation.stats`. steps: passes of the model
        after the prompt's. acceptance_rate: of the drafted tokens. A rate is `None` if nothing was counted or timed.
        prompt: how prompts are computed, "exact" or "fast".

        holdings: the bytes of the device's memory by the name of what holds them, largest first: tensors, the KV cache,
        working memory. On the CPU these are bytes of RAM, without the mapped file.

        placement: where the weights are, as the core says: each byte is in "vram" or in "ram", where the file is
        mapped. Of those in "ram", on the GPU: "direct" ones are brought over each time, and "slots" ones are experts,
        of which single ones are in VRAM too; "cpu": those that the CPU computes with, on the CPU all of them. "ranges":
        (file, begin, end, home) of the files' parts, home one of "vram", "direct", "slots" and, on the CPU, "ram".
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
            "holdings": self.engine.holdings(),
            "device": self.device,
            "device_name": self.device_name,
            "prompt": self.plan.prompt,
            "threads": self.threads,
            "isa": self.isa,
            "placement": self.engine.placement(),
            "notes": list(self.engine.notes),
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
