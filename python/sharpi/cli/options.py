"""The switches several commands share, and what they become.

Each group of switches is one dataclass; its decorator adds the switches to a command and hands the command
that dataclass, so that a new switch is written once. Names and letters follow llama.cpp's habits.
"""

from __future__ import annotations

import functools
import math
import reprlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from sharpi.cli.help import section
from sharpi.cli.logs import log_file_option, verbose_option
from sharpi.cli.model_names import fetched
from sharpi.cli.text import say, takes_escapes
from sharpi.interrupts import leaving_at_once
from sharpi.settings.choices import (
    DEVICES,
    DRAFTS,
    KV_DTYPES,
    MIN_P,
    MOST_DRAFT_TOKENS,
    PROMPT_MODES,
    ROPE_SCALINGS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)

if TYPE_CHECKING:
    from sharpi.model import Model


# The options that a saved plan answers.
_IN_A_PLAN = ("context", "threads", "batch", "device", "vram", "kv_dtype", "cpu_moe", "sequences",
              "cache_tokens", "prompt", "no_mtp", "profile",
              "rope_scaling", "rope_scale", "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx")


@dataclass(frozen=True)
class RopeOptions:
    """How the model is stretched to longer contexts; the fields are `Model.load`'s arguments of the same names."""

    rope_scaling: str | None
    rope_scale: float | None
    rope_freq_base: float | None
    rope_freq_scale: float | None
    yarn_orig_ctx: int | None

    def rope_arguments(self) -> dict[str, Any]:
        """The keyword arguments for `Model.load` and `RopeScaling.asked`."""
        given = {field.name: getattr(self, field.name) for field in fields(RopeOptions)}
        return given | {"yarn_orig_ctx": self.yarn_orig_ctx or None}  # as in llama.cpp, 0 is the file's


@dataclass(frozen=True)
class ModelOptions(RopeOptions):
    """Which model to open and how; `None` leaves the choice to `Model.load`."""

    model: str | None
    context: int | None
    threads: int | None
    batch: int | None
    device: str
    vram: str | None
    kv_dtype: str | None
    cpu_moe: bool
    sequences: int | None
    cache_tokens: int | None
    prompt: str | None
    no_mtp: bool
    plan: str | None
    profile: str | None
    expert_stats: str | None
    warm: str | None

    def load(self, *, context: int | None = None, sequences: int | None = None,
             cache_tokens: int | None = None) -> Model:
        """Opens the model, with a progress bar when standard error is a terminal.

        `context` and the others stand in where the person set none. Standard error says why a GPU that is there is not
        used, that this machine is measured, and what became of a plan that could not be kept.
        """
        with leaving_at_once():  # and late: `sharpi --help` should not wait for numpy and the core
            from sharpi.machine.hardware import Gpu
            from sharpi.model import Model

        if self.plan is not None:
            _require_no_option_beside_a_plan()
            context = sequences = cache_tokens = None
        model_path = fetched(self.model)
        with _loading_bar() as progress:
            model = Model.load(
                model_path,
                device=self.device,
                vram=self.vram,
                context=self.context if self.context is not None else context,
                kv_dtype=self.kv_dtype,
                threads=self.threads,
                batch=self.batch,
                # Left out, it is the environment's.
                cpu_moe=self.cpu_moe or None,
                sequences=self.sequences if self.sequences is not None else sequences,
                cache_tokens=self.cache_tokens if self.cache_tokens is not None else cache_tokens,
                prompt=self.prompt,
                mtp=False if self.no_mtp else None,
                **self.rope_arguments(),
                plan=self.plan,
                profile=self.profile,
                expert_stats=self.expert_stats,
                warm=self.warm,
                progress=progress,
                notice=say,
            )
        if model.device == "cpu" and isinstance(model.plan.gpu, Gpu):
            say(f"on the CPU: {model.plan.why}")
        return model


def _require_no_option_beside_a_plan() -> None:
    """A plan says how to run a model. Raises `click.UsageError` for an option that says it too."""
    context = click.get_current_context()
    for parameter in context.command.params:
        typed = context.get_parameter_source(parameter.name or "") == click.core.ParameterSource.COMMANDLINE
        if typed and parameter.name in _IN_A_PLAN:
            raise click.UsageError(f"--plan says what {parameter.opts[-1]} would: leave one of the two out", context)


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen; the fields are `Model.generate`'s arguments of the same names."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float] | None
    seed: int | None
    stop: tuple[str, ...]

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments for `generate`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class DraftOptions:
    """What drafts tokens, and how many; the fields are `Model.generate`'s arguments of the same names."""

    draft: str | None
    draft_tokens: int | None

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments for `generate`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class _LogitBias(click.ParamType):
    """`ID=VALUE`: a token id and what is added to its logit; `-inf` forbids the token."""

    name = "ID=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        token, _, amount = str(value).partition("=")
        try:
            bias = (int(token), float(amount))
        except ValueError:
            self.fail(f"{value!r} is not ID=VALUE, as in 15=-2.5", param, ctx)
        if math.isnan(bias[1]):
            self.fail(f"{value!r}: the value is not a number", param, ctx)
        return bias


class _PromptMode(click.ParamType):
    """How prompts are computed. Other programs take the prompt's text after `--prompt`: the error for it says
    where it belongs here."""

    name = "prompt mode"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in PROMPT_MODES:
            self.fail(
                f"{reprlib.repr(value)} is no prompt mode: give {' or '.join(PROMPT_MODES)}; a prompt's text comes"
                " after -p, as in `sharpi run -p TEXT`",
                param,
                ctx,
            )
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(mode) for mode in PROMPT_MODES if mode.startswith(incomplete)]


def model_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Only `-m`, for commands that describe a file without running it."""
    return click.option("-m", "--model", "-hf", "--hf-repo", "model", metavar="MODEL",
                        help="GGUF file, of a split one any part; or a model on the Hugging Face Hub, user/repo or"
                             " user/repo:QUANT, which is downloaded if it is not here.  [default: the bundled"
                             " model]")(function)


def kv_dtype_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Only `--kv-dtype`."""
    return click.option("--kv-dtype", type=click.Choice(KV_DTYPES),
                        help="Element type of the KV cache; SHARPI_KV_DTYPE sets it too.  [default: bf16]")(function)


def context_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Only `-c`."""
    return click.option("-c", "--context", "--ctx-size", "context", type=click.IntRange(min=0), metavar="N",
                        help="Length of the context in tokens: prompt and answer together; 0 is the model's own. "
                             " [default: 4096, or the model's own if that is shorter]")(function)


def threads_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Only `-t`."""
    return click.option("-t", "--threads", type=click.IntRange(min=1, max=1024), metavar="N",
                        help="CPU threads, at most one for each core.  [default: all cores]")(function)


def batch_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Only `-b`."""
    return click.option("-b", "--batch", "--batch-size", "batch", type=click.IntRange(min=1, max=65536), metavar="N",
                        help="Prompt tokens computed at once; at least 64 if the GPU's prompts are fast.  [default:"
                             " 512, on the GPU 2048]")(function)


def prompt_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Only `--prompt`."""
    return click.option(
        "--prompt",
        type=_PromptMode(),
        metavar=f"[{'|'.join(PROMPT_MODES)}]",
        help="How the GPU computes prompts: exact gives the same bits on every processor, and is slower;"
        " fast uses tensor cores, so the bits depend on the kind of GPU too. On the CPU both are exact."
        "  [default: fast]",
    )(function)


def device_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Only `--device`."""
    return click.option("--device", type=click.Choice(DEVICES), default="auto", show_default=True,
                        help="Where to run. auto takes the GPU if the model fits there, else the device that is"
                             " predicted to be faster.")(function)


def vram_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Only `--vram`; the planner reads what it says."""
    return click.option("--vram", metavar="SIZE",
                        help="Most GPU memory to take, such as 12GiB, 12.5GB or 800MiB.  [default: what is"
                             " free]")(function)


def cpu_moe_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Only `--cpu-moe`."""
    return click.option("--cpu-moe", is_flag=True,
                        help="Leave all experts to the CPU, even if they fit in VRAM; SHARPI_CPU_MOE=1 does it"
                             " too.")(function)


def sequences_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Only `--sequences`."""
    return click.option("--sequences", type=click.IntRange(min=1, max=4096), metavar="N",
                        help="States to make room for, if the model has recurrent layers, and windows or chunks, if its"
                             " layers see only these. A conversation takes one, and with recurrent layers N drafted"
                             " tokens take N + 1 more; those left over serve to go back in a conversation."
                             "  [default: 4]")(function)


def spill_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Only `--spill`."""
    return click.option("--spill", metavar="SIZE",
                        help="RAM for what the KV cache of a model had to give up, such as 4GiB; 0 keeps nothing."
                             "  [default: 1GiB, or a 16th of a smaller RAM]")(function)


def cache_tokens_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Only `--cache-tokens`."""
    return click.option("--cache-tokens", type=click.IntRange(min=1), metavar="N",
                        help="Tokens that all conversations may have together, if that is more than one may have."
                             "  [default: --context]")(function)


def no_mtp_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Only `--no-mtp`."""
    return click.option("--no-mtp", "no_mtp", is_flag=True,
                        help="Do not load the file's prediction layer, which drafts tokens.")(function)


def plan_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Only `--plan`."""
    return click.option("--plan", metavar="FILE",
                        help="Run the plan that `sharpi plan --json > FILE` saved for this model. A plan keeps the"
                             " switches that it was made with: SHARPI_CUDA_PARTIAL_WEIGHT_CACHE,"
                             " SHARPI_CUDA_PARTIAL_WEIGHT_CACHE_GB, SHARPI_CUDA_ROW_SPLIT and SHARPI_CPU_MOE have no"
                             " effect on it.")(function)


def profile_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Only `--profile`."""
    return click.option("--profile", metavar="FILE",
                        help="Plan with the speeds in FILE, which `sharpi hardware --save FILE` writes.")(function)


def expert_stats_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Only `--expert-stats`."""
    return click.option("--expert-stats", metavar="FILE",
                        help="Write how each expert was used to FILE at the end, for `sharpi experts` and --warm;"
                             " SHARPI_EXPERT_STATS sets it too.")(function)


def warm_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Only `--warm`."""
    return click.option("--warm", metavar="FILE",
                        help="Start with the experts in VRAM, and in slots in RAM, that were used most according to"
                             " FILE, which --expert-stats writes.")(function)


def rope_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the switches of `RopeOptions`; the command receives `rope: RopeOptions`."""
    return _gather(function, "rope", RopeOptions, [section("Longer contexts", *_ROPE_SWITCHES)])


# Names and meanings are llama.cpp's.
_ROPE_SWITCHES = [
    click.option("--rope-scaling", type=click.Choice(ROPE_SCALINGS),
                 help="How to stretch the model to longer contexts.  [default: as the file says, else linear]"),
    click.option("--rope-scale", type=float, metavar="N", help="Stretch the context by this factor."),
    click.option("--rope-freq-base", type=float, metavar="N",
                 help="Base of the rotary frequencies; a larger one stretches too (NTK-aware).  [default: the file's]"),
    click.option("--rope-freq-scale", type=float, metavar="N", help="1 / --rope-scale: stretch the context by 1/N."),
    click.option("--yarn-orig-ctx", type=click.IntRange(min=0), metavar="N",
                 help="With yarn: the context the model was trained with.  [default: the file's]"),
]


def model_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the switches of `ModelOptions`; the command receives `options: ModelOptions`."""
    switches = [
        section("Model", model_option, context_option, kv_dtype_option, sequences_option,
                cache_tokens_option, no_mtp_option),
        section("Longer contexts", *_ROPE_SWITCHES),
        section("Device and memory", device_option, vram_option, threads_option, batch_option, prompt_option,
                cpu_moe_option, warm_option, expert_stats_option, plan_option, profile_option),
    ]
    return _gather(section("Output", verbose_option, log_file_option)(function), "options", ModelOptions, switches)


def sampling_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the switches of `SamplingOptions`; the command receives `sampling: SamplingOptions`."""
    option = functools.partial(click.option, show_default=True)
    switches = section(
        "Sampling",
        option("--temp", "--temperature", "temperature", type=click.FloatRange(min=0), default=TEMPERATURE,
               metavar="X", help="Temperature; 0 always takes the most likely token."),
        option("--top-k", type=click.IntRange(min=0), default=TOP_K, metavar="N",
               help="Choose among the N most likely tokens; 0 keeps all."),
        option("--top-p", type=click.FloatRange(0, 1), default=TOP_P, metavar="X",
               help="Choose among the most likely tokens that have this probability together; 1 keeps all."),
        option("--min-p", type=click.FloatRange(0, 1), default=MIN_P, metavar="X",
               help="Drop tokens less likely than this fraction of the most likely one."),
        option("--repeat-penalty", "repetition_penalty", type=click.FloatRange(min=0, min_open=True), default=1.0,
               metavar="X", help="Make tokens that were seen already less likely; 1 is off."),
        option("--presence-penalty", type=float, default=0.0, metavar="X",
               help="Subtract this from the logit of each token that was seen already."),
        option("--frequency-penalty", type=float, default=0.0, metavar="X",
               help="Subtract this for each time that a token was seen."),
        option("--logit-bias", type=_LogitBias(), multiple=True, callback=lambda _c, _p, pairs: dict(pairs) or None,
               help="Add VALUE to the logit of token ID; -inf forbids it (repeatable)."),
        option("-s", "--seed", type=click.IntRange(min=-1), default=-1, metavar="N",
               callback=lambda _c, _p, seed: None if seed == -1 else seed,
               help="The same seed gives the same text; -1 takes a new one each time."),
        option("--stop", multiple=True, metavar="TEXT", help="End before TEXT appears (repeatable)."),
    )
    return _gather(function, "sampling", SamplingOptions, [switches])


def draft_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the switches of `DraftOptions`; the command receives `drafts: DraftOptions`."""
    switches = section(
        "Drafted tokens",
        click.option("--draft", type=click.Choice(DRAFTS),
                     help="What guesses tokens, several of which one step can check: mtp is the model's prediction"
                          " layer, ngram repeats what followed the same words before. The text is the same with each."
                          "  [default: mtp if the file has such a layer and it is expected to pay, else off]"),
        click.option("--draft-tokens", type=click.IntRange(min=1, max=MOST_DRAFT_TOKENS), metavar="N",
                     help="Most tokens guessed at once; with recurrent layers at most --sequences less two."
                          "  [default: 1 for mtp, 4 for ngram]"),
    )
    return _gather(function, "drafts", DraftOptions, [switches])


def chat_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds what a chat template is given: the command receives `system` and `thinking`."""
    return section(
        "Chat template",
        click.option("--system", metavar="TEXT", help="System message."),
        click.option("--thinking/--no-thinking", default=True,
                     help="Whether the template may ask for reasoning.  [default: thinking]"),
    )(function)


def _gather(function: Callable[..., Any], name: str, dataclass_type: type, switches: list[Any]) -> Callable[..., Any]:
    """Adds `switches` to a command and hands it what they say as one `dataclass_type` named `name`."""

    @functools.wraps(function)
    def command(**given: Any) -> Any:
        values = {field.name: given.pop(field.name) for field in fields(dataclass_type)}
        return function(**given, **{name: dataclass_type(**values)})

    wrapped: Callable[..., Any] = command
    for switch in reversed(switches):
        wrapped = switch(wrapped)
    return wrapped


@contextmanager
def _loading_bar() -> Iterator[Callable[[int, int], None] | None]:
    """A progress callback that draws on standard error and cleans up after itself, or None if it cannot draw there."""
    if not takes_escapes(sys.stderr):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
