"""``sharpi run``: continue a text, or answer one message, and leave.

Standard output carries the text and nothing else, so that it can be piped; what it cost goes to standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from sharpi.cli.help import Command, section
from sharpi.cli.options import (
    DraftOptions,
    ModelOptions,
    SamplingOptions,
    chat_options,
    draft_options,
    model_options,
    sampling_options,
)
from sharpi.cli.text import closing_line, context_full_line, say

if TYPE_CHECKING:
    from sharpi.model import Model

_LONGEST_PROMPT = 64 << 20  # bytes; more than any context holds


@click.command("run", cls=Command, examples=(
    'sharpi run "Once upon a time" -n 100',
    "sharpi run -m model.gguf --chat 'What is a GGUF file?'",
    "cat notes.txt | sharpi run -m model.gguf --temp 0",
    "sharpi run -m model.gguf -f prompt.txt --vram 8GiB > answer.txt"))
@click.argument("words", nargs=-1, metavar="[TEXT]")
@section(
    "Prompt",
    click.option("-p", "--text", metavar="TEXT", help="The same as TEXT; - reads standard input, as no text does."),
    click.option("-f", "--file", metavar="FILE", help="Read the prompt from FILE; - reads standard input."),
    click.option("--special", is_flag=True,
                 help="Read the names of control tokens in the prompt, such as <|im_start|>, as those tokens."),
    click.option("--chat", "as_chat", is_flag=True,
                 help="Send the prompt as one message, in the model's chat template; implies --no-echo."))
@chat_options
@section(
    "Output",
    click.option("-n", "--max-tokens", "--predict", "max_tokens", type=click.IntRange(min=-1), default=256,
                 show_default=True, metavar="N", help="Most tokens to generate; -1 sets no limit."),
    click.option("--echo/--no-echo", default=True, help="Print the prompt before what follows it.  [default: echo]"),
    click.option("--stats/--no-stats", default=True,
                 help="End with a line of speeds on standard error.  [default: stats]"))
@model_options
@sampling_options
@draft_options
def run_command(options: ModelOptions, sampling: SamplingOptions, drafts: DraftOptions, words: tuple[str, ...],
                text: str | None, file: str | None, special: bool, as_chat: bool, system: str | None, thinking: bool,
                max_tokens: int, echo: bool, stats: bool) -> None:
    """Continue TEXT, or answer it with --chat.

    Without TEXT, -p or -f the prompt is read from a pipe.
    """
    _require_chat(as_chat, special)
    prompt = _read_prompt(words, text, file)
    with options.load() as model:
        tokens = (_chat_tokens(model, prompt, system, thinking) if as_chat
                  else model.tokenize(prompt, parse_special=special))
        output = _Output(prompt if echo and not as_chat else "")
        try:
            for token in model.generate(tokens, max_tokens=None if max_tokens < 0 else max_tokens,
                                        **sampling.arguments(), **drafts.arguments()):
                output.write(token.text)
            output.write("")
        finally:
            output.end_line()
        figures = model.stats()
        if figures["context_full"]:
            say(context_full_line(model.context))
        if stats:
            click.echo(closing_line(figures), err=True)
        _compare(model, options, figures, stats)


def _compare(model: Model, options: ModelOptions, figures: Mapping[str, Any], said: bool) -> None:
    """Notes that decode was not as fast as predicted, and says so if `said`."""
    from sharpi.agreement import disagreement, seen_in_run

    seen = seen_in_run(figures)
    elsewhere = options.plan is not None or options.profile is not None
    line = seen and disagreement(model, seen, elsewhere=elsewhere, known=False)
    if line and said:
        say(line)


def _require_chat(as_chat: bool, special: bool) -> None:
    """Raises `click.UsageError` for options that contradict `--chat`, or need it."""
    context = click.get_current_context()
    if as_chat and special:
        raise click.UsageError("--special does not go with --chat, whose template has the control tokens", context)
    for name, option in (("system", "--system"), ("thinking", "--no-thinking")):
        if not as_chat and context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{option} needs --chat", context)


def _read_prompt(words: tuple[str, ...], text: str | None, file: str | None) -> str:
    """The prompt's text; one newline at the end of a file belongs to the file, not to the prompt."""
    context = click.get_current_context()
    if len(words) > 1:
        raise click.UsageError("the text is one argument: put it in quotes", context)
    given = [each for each in (*words, text) if each is not None]
    if len(given) + (file is not None) > 1:
        raise click.UsageError("give one prompt: TEXT, -p TEXT or -f FILE", context)
    if given and given[0] != "-":
        if words and words[0].endswith(".gguf"):
            raise click.UsageError(f"a model's file comes after -m: sharpi run -m {words[0]} TEXT", context)
        return given[0]
    if file not in (None, "-"):
        return _decoded(str(file), _read_file(Path(file)))
    if not given and file is None and sys.stdin.isatty():
        raise click.UsageError('give a prompt: sharpi run "Once upon a time", -f FILE, or a pipe', context)
    try:
        return _decoded("standard input", _bounded(sys.stdin.buffer, "standard input"))
    except OSError as error:
        raise click.ClickException(f"standard input: the prompt cannot be read: {error.strerror}") from error


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return _bounded(stream, str(path))
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{path}: the prompt cannot be read: {getattr(error, 'strerror', error)}") from error


def _bounded(stream: BinaryIO, name: str) -> bytes:
    data = stream.read(_LONGEST_PROMPT + 1)
    if len(data) > _LONGEST_PROMPT:
        raise click.ClickException(f"{name}: the prompt is longer than {_LONGEST_PROMPT >> 20} MiB")
    return data


def _decoded(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise click.ClickException(f"{name}: the prompt is not UTF-8 (byte {error.start})") from error


def _chat_tokens(model: Model, text: str, system: str | None, thinking: bool) -> list[int]:
    from sharpi.reply import chat_prompt, checked_messages

    messages = checked_messages([{"role": "user", "content": text}], system)
    return chat_prompt(model, messages, thinking=None if thinking else False).ids


class _Output:
    """Standard output, whose last line is ended whatever ends the text."""

    def __init__(self, unsaid: str) -> None:
        """unsaid: goes before the first token; a prompt that is refused is not echoed."""
        self._unsaid = unsaid
        self._open = False

    def write(self, text: str) -> None:
        text, self._unsaid = self._unsaid + text, ""
        if text:
            self._open = not text.endswith("\n")
            sys.stdout.write(text)
            sys.stdout.flush()

    def end_line(self) -> None:
        if self._open:
            self._open = False
            self.write("\n")
