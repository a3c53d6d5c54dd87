"""``sharpi run``: continue a text, or answer one message, and leave.

Standard output carries the text and nothing else, so that it can be piped; what it cost goes to standard error.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sharpi.conversation import render_prompt
from sharpi.cli.options import (DraftOptions, ModelOptions, SamplingOptions, draft_options, model_options,
                                sampling_options)
from sharpi.cli.text import closing_line

if TYPE_CHECKING:
    from sharpi.model import Model


@click.command("run")
@model_options
@click.option("-p", "--prompt", metavar="TEXT", help="The text to continue; - reads standard input.")
@click.option("-f", "--file", metavar="FILE", help="Read the prompt from a file; - reads standard input.")
@click.option("-n", "--max-tokens", "--predict", "max_tokens", type=click.IntRange(min=-1), default=256,
              show_default=True, metavar="N",
              help="Tokens to generate; -1 goes on until the model or the context ends.")
@sampling_options
@draft_options
@click.option("--chat", "as_chat", is_flag=True,
              help="Wrap the prompt in the model's chat template, as one message; implies --no-echo.")
@click.option("--echo/--no-echo", default=True, help="Print the prompt before its continuation.  [default: echo]")
@click.option("--stats/--no-stats", default=True,
              help="Close with a line of tokens/s on standard error.  [default: stats]")
def run_command(options: ModelOptions, sampling: SamplingOptions, drafts: DraftOptions, prompt: str | None,
                file: str | None, max_tokens: int, as_chat: bool, echo: bool, stats: bool) -> None:
    """Continue a text."""
    text = _read_prompt(prompt, file)
    with options.load() as model:
        tokens = _chat_tokens(model, text) if as_chat else model.tokenize(text)
        unsaid = text if echo and not as_chat else ""  # until the first token: a refused prompt is not echoed
        limit = None if max_tokens < 0 else max_tokens
        for token in model.generate(tokens, max_tokens=limit, **sampling.arguments(), **drafts.arguments()):
            _write(unsaid + token.text)
            unsaid = ""
        _write(unsaid)
        if sys.stdout.isatty():
            _write("\n")
        generated = model.stats()["generated_tokens"]
        if len(tokens) + generated >= model.context and generated != limit:
            click.echo(f"sharpi: stopped: the context of {model.context} tokens is full (-c sets it)", err=True)
        if stats:
            click.echo(closing_line(model.stats()), err=True)
        _compare(model, options, stats)


def _compare(model: Model, options: ModelOptions, said: bool) -> None:
    """Notes, and says where wanted, that decode was not as fast as predicted."""
    from sharpi.agreement import disagreement, seen_in_run

    seen = seen_in_run(model.stats())
    line = seen and disagreement(model, seen, elsewhere=options.plan is not None or options.profile is not None, known=False)
    if line and said:
        click.echo(f"sharpi: {line}", err=True)


def _read_prompt(prompt: str | None, file: str | None) -> str:
    """The prompt's text; one newline at the end of a file belongs to the file, not to the prompt."""
    if (prompt is None) == (file is None):
        raise click.UsageError("give one prompt: -p TEXT, -f FILE, or -p - to read standard input",
                               click.get_current_context())
    if prompt is not None and prompt != "-":
        return prompt
    try:
        data = sys.stdin.buffer.read() if file in (None, "-") else Path(file).read_bytes()
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise click.ClickException(f"{file}: cannot read the prompt: {error.strerror}") from error
    except UnicodeDecodeError as error:
        name = "standard input" if file in (None, "-") else file
        raise click.ClickException(f"{name}: the prompt is not UTF-8 (byte {error.start})") from error


def _chat_tokens(model: Model, text: str) -> list[int]:
    prompt = render_prompt(model, [{"role": "user", "content": text}])
    return model.tokenize(prompt, add_special=False, parse_special=True)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
