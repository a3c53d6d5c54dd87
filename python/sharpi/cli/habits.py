"""What people type out of habit, and what does it here.

Most come from llama.cpp, whose names Sharpi shares if they mean the same. An option that is unknown here is refused
before click sees it: click reads `-hf` as `-h -f` and `-fa` as `-f a`, and would print the help or read a file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence

import click

__all__ = ["refuse_foreign_command", "refuse_foreign_options"]

_ALWAYS = "leave it out: {} is always on"
_NEVER = "Sharpi cannot do that"
_SAMPLERS = "the samplers here are --temp, --top-k, --top-p, --min-p and the penalties"
_ONE_GPU = "leave it out: Sharpi uses one GPU, and CUDA_VISIBLE_DEVICES chooses it"

# By the names that llama.cpp gives an option: what to type instead.
_OPTIONS: dict[tuple[str, ...], str] = {
    ("-hf", "-hfr", "--hf-repo", "-hff", "--hf-file"): "use -m user/repo:QUANT",
    ("-hft", "--hf-token"): "set HF_TOKEN in the environment",
    ("-mu", "--model-url", "-dr", "--docker-repo"): "download the file, and use -m FILE",
    ("-ngl", "--gpu-layers", "--n-gpu-layers"):
        "leave it out to fill the free GPU memory; --vram SIZE takes less of it, --device cpu none",
    ("-ncmoe", "--n-cpu-moe"): "leave it out: the experts that fit go to the GPU; --cpu-moe keeps all on the CPU",
    ("-cmoe",): "use --cpu-moe",
    ("-ot", "--override-tensor"): "use --vram SIZE, or `sharpi plan --json > FILE` and --plan FILE",
    ("-ts", "--tensor-split", "-sm", "--split-mode", "-mg", "--main-gpu"): _ONE_GPU,
    ("-dev",): "use --device auto|cpu|cuda",
    ("--list-devices",): "use `sharpi hardware`",
    ("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"): "use --kv-dtype fp32|bf16|fp16, for keys and values together",
    ("-nkvo", "--no-kv-offload", "-kvu", "--kv-unified", "--swa-full"): "leave it out: the KV cache is on the device",
    ("-fa", "--flash-attn"): "leave it out: attention needs no switch",
    ("-ub", "--ubatch-size"): "use -b N",
    ("-tb", "--threads-batch"): "use -t N, for prompts and answers alike",
    ("--mlock", "--mmap", "--no-mmap", "-dio", "--direct-io"): "leave it out: files are always mapped",
    ("--numa", "-C", "--cpu-mask", "--cpu-range", "--prio", "--poll"): "use -t N, and taskset or numactl",
    ("-np", "--parallel"): "use `sharpi serve`, which answers many requests at a time",
    ("-cb", "--cont-batching"): "leave it out: `sharpi serve` always does that",
    ("--host", "--port", "--api-key"): "use `sharpi serve`",
    ("-a", "--alias"): "use `sharpi serve -m NAME=FILE`",
    ("-st", "--single-turn"): "use `sharpi run --chat -p TEXT`, which answers one message",
    ("-cnv", "--conversation", "-i", "--interactive", "-if", "--interactive-first"): "use `sharpi chat`",
    ("-no-cnv", "--no-conversation"): "leave it out: `sharpi run` continues a text without a template",
    ("-sys", "--system-prompt"): "use --system TEXT, with `sharpi chat` or `sharpi run --chat`",
    ("-sysf", "--system-prompt-file"): 'use --system "$(cat FILE)"',
    ("--jinja",): _ALWAYS.format("the model's chat template"),
    ("--chat-template", "--chat-template-file"): "the chat template is the one in the model file",
    ("--reasoning-budget", "--reasoning-format", "-rea"): "use --no-thinking",
    ("-prompt",): "use -p TEXT",
    ("-r", "--reverse-prompt"): "use --stop TEXT",
    ("-e", "--escape", "--no-escape"): "let the shell write line breaks: -p $'first\\nsecond'",
    ("-bf", "--binary-file"): "use -f FILE",
    ("--no-display-prompt",): "use --no-echo",
    ("-co", "--color", "--simple-io", "--no-perf", "--perf", "--log-disable"):
        "leave it out; --no-stats leaves out the line of speeds",
    ("--context-shift", "--no-context-shift", "--keep"): "leave it out: `sharpi chat` drops the oldest turns by itself",
    ("--ignore-eos",): "use --logit-bias ID=-inf with the end token's ID",
    ("-l",): "use --logit-bias ID=VALUE",
    ("--samplers", "--sampler-seq", "--sampling-seq", "--typical", "--typical-p", "--top-nsigma", "--top-n-sigma",
     "--mirostat", "--mirostat-lr", "--mirostat-ent", "--xtc-probability", "--xtc-threshold", "--dry-multiplier",
     "--dry-base", "--dynatemp-range", "--repeat-last-n"): _SAMPLERS,
    ("--grammar", "--grammar-file", "-j", "--json-schema", "-jf"): "use `sharpi serve`, with grammars in its requests",
    ("--lora", "--lora-scaled", "--control-vector", "-mm", "--mmproj", "--image", "--audio"): _NEVER,
    ("-md", "--model-draft", "-ngld", "-devd", "--draft-p-min", "--spec-type"): "use --draft mtp or --draft ngram",
    ("--draft-max", "--draft-n", "--draft-min"): "use --draft-tokens N",
    ("--check-tensors", "--override-kv", "--no-op-offload", "--no-host", "--no-repack"): "leave it out",
    ("--verbose-prompt",): "leave it out: `sharpi run` prints the prompt",
    ("--completion-bash",): "use `sharpi completion bash`",
    ("--license", "--usage"): "use --help",
}
_OPTION_HINTS = {name: hint for names, hint in _OPTIONS.items() for name in names}

_COMMAND_HINTS = {
    **dict.fromkeys(("server", "start", "ps", "stop"), "use `sharpi serve`"),
    **dict.fromkeys(("show", "info", "metadata"), "use `sharpi inspect`"),
    **dict.fromkeys(("generate", "complete", "cli", "prompt"), "use `sharpi run`"),
    **dict.fromkeys(("benchmark", "perf"), "use `sharpi bench`"),
    **dict.fromkeys(("download", "get", "fetch"), "use `sharpi pull`"),
    **dict.fromkeys(("ls", "models"), "use `sharpi list`"),
    **dict.fromkeys(("remove", "delete"), "use `sharpi rm`"),
    **dict.fromkeys(("gpu", "devices", "info-gpu"), "use `sharpi hardware`"),
    **dict.fromkeys(("fit", "estimate"), "use `sharpi plan`"),
}


def refuse_foreign_options(command: click.Command, ctx: click.Context, args: Sequence[str]) -> None:
    """Raises `click.UsageError` for an option that `command` does not have."""
    takes_value = {name: _takes_value(parameter) for parameter in command.get_params(ctx)
                   if isinstance(parameter, click.Option) for name in (*parameter.opts, *parameter.secondary_opts)}
    for argument in _option_arguments(args, takes_value, ctx.allow_interspersed_args):
        name = argument.partition("=")[0]
        hint = _OPTION_HINTS.get(name) or _OPTION_HINTS.get(name.replace("_", "-"))
        if hint is None:
            hint = _elsewhere(command, ctx, name) or _similar(name, takes_value)
        raise click.UsageError(f"no such option: {name}" + (f"; {hint}" if hint else ""), ctx)


def _option_arguments(args: Sequence[str], takes_value: dict[str, bool], interspersed: bool) -> Iterator[str]:
    """The unknown options among the arguments."""
    rest = iter(args)
    for argument in rest:
        name, has_value, _ = argument.partition("=")
        if argument == "--":
            return
        if not argument.startswith("-") or argument == "-":
            if not interspersed:
                return
        elif argument in takes_value or name in takes_value:
            if argument in takes_value and takes_value[argument]:
                next(rest, None)
        elif re.fullmatch(r"-([A-Za-z])\1+", argument) and takes_value.get(argument[:2]) is False:  # as in -vv
            continue
        elif not (re.fullmatch(r"-[A-Za-z]-?[0-9]+", argument) and takes_value.get(argument[:2])):  # as in -c4096
            yield argument


def _takes_value(option: click.Option) -> bool:
    return not (option.is_flag or option.count)


def _elsewhere(command: click.Command, ctx: click.Context, name: str) -> str:
    """Options of the commands are no options of the program."""
    if not isinstance(command, click.Group):
        return ""
    for candidate in command.list_commands(ctx):
        found = command.get_command(ctx, candidate)
        if found is not None and any(name in parameter.opts for parameter in found.params):
            return f"a command comes first, as in `sharpi {candidate} {name} …`"
    return ""


def _similar(name: str, known: dict[str, bool]) -> str:
    found = difflib.get_close_matches(name.replace("_", "-"), known, 1)
    if not found and f"-{name}" in known:  # -temp for --temp
        found = [f"-{name}"]
    return f"did you mean {found[0]}?" if found else ""


def refuse_foreign_command(group: click.Group, ctx: click.Context, name: str) -> None:
    """Raises `click.UsageError` for a command that `group` does not have."""
    known = group.list_commands(ctx)
    if name in known:
        return
    similar = difflib.get_close_matches(name, known, 1)
    hint = _COMMAND_HINTS.get(name.lower(), f"did you mean `sharpi {similar[0]}`?" if similar else "")
    if name.lower().endswith(".gguf"):
        hint = "a model's file comes after -m, as in `sharpi chat -m FILE`"
    elif " " in name:
        hint = "`sharpi run TEXT` continues a text"
    raise click.UsageError(f"no such command: {name!r}" + (f"; {hint}" if hint else ""), ctx)
