"""``sharpi chat``: the conversation at a terminal. Lines are edited with readline, and remembered between visits.

Standard output carries the answers. Reasoning is dimmed on a terminal; where standard output is not one, it goes to
standard error, so that a pipe receives the answers alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

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
from sharpi.cli.text import closing_line, context_full_line, printable, say, takes_escapes
from sharpi.errors import InvalidRequestError, SharpiError
from sharpi.storage import cache_folder

if TYPE_CHECKING:
    from sharpi.conversation import Conversation
    from sharpi.model import Model
    from sharpi.text.chat import Part

_HISTORY_LINES = 1000
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_HELP = """/reset  forget the conversation
/exit   leave (so does Ctrl-D)
/help   this text
Ctrl-C stops an answer."""


# A small model with a chat template, for people who have none yet.
_GOOD_MODEL = "bartowski/SmolLM2-135M-Instruct-GGUF:Q4_K_M"


@click.command("chat", cls=Command, examples=(
    f"sharpi chat -m {_GOOD_MODEL}",
    "sharpi chat -m model.gguf --system 'Answer in one sentence.'",
    "sharpi chat -m model.gguf --vram 8GiB -c 8192"))
@chat_options
@section(
    "Output",
    click.option("-n", "--max-tokens", "--predict", "max_tokens", type=click.IntRange(min=-1), default=-1,
                 show_default=True, metavar="N", help="Most tokens of an answer; -1 sets no limit."),
    click.option("--stats/--no-stats", default=True,
                 help="Show a line of speeds on standard error after each answer.  [default: stats]"))
@model_options
@sampling_options
@draft_options
def chat_command(options: ModelOptions, sampling: SamplingOptions, drafts: DraftOptions, max_tokens: int,
                 system: str | None, thinking: bool, stats: bool) -> None:
    """Talk with a model.

    Ctrl-C stops an answer, Ctrl-D leaves, and /help lists the commands. The model needs a chat template.
    """
    with options.load() as model:
        from sharpi.conversation import Conversation
        from sharpi.planning.drafts import choose_drafts

        if model.chat_template is None and options.model is None and options.plan is None:
            raise InvalidRequestError("the bundled model cannot chat, because it has no chat template. This one can,"
                                      f" and is small: sharpi chat -m {_GOOD_MODEL}")
        choose_drafts(drafts.draft, drafts.draft_tokens, mtp=model.plan.mtp)  # raises now, not at every question
        conversation = Conversation(model, {**sampling.arguments(), **drafts.arguments()}, system=system,
                                    thinking=thinking, max_tokens=None if max_tokens < 0 else max_tokens,
                                    notice=say)
        if _at_terminal():
            click.echo(f"{printable(model.file.name)}. /help lists the commands.", err=True)
        with _line_editing():
            for text in _questions(conversation):
                if _speak(conversation, text):
                    _remark(model, stats)


def _remark(model: Model, stats: bool) -> None:
    """What is to be said after an answer."""
    figures = model.stats()
    if figures["context_full"]:
        say(context_full_line(model.context))
    if stats:
        click.echo(_dimmed(closing_line(figures), takes_escapes(sys.stderr)), err=True)


def _at_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _questions(conversation: Conversation) -> Iterator[str]:
    """What the person says, line by line, until they leave; commands are obeyed on the way."""
    while True:
        try:
            line = input("> " if _at_terminal() else "").strip()
        except OSError as error:
            raise click.ClickException(f"standard input: {error.strerror}") from error
        except EOFError:
            if _at_terminal():
                click.echo()
            return
        except KeyboardInterrupt:
            click.echo("\n/exit or Ctrl-D leaves", err=True)
            continue
        if line == "/exit":
            return
        if line == "/reset":
            conversation.reset()
        elif line == "/help":
            click.echo(_HELP, err=True)
        elif re.fullmatch(r"/\w+", line):
            click.echo(f"{line} is not a command; /help lists them", err=True)
        elif line:
            yield line


def _speak(conversation: Conversation, text: str) -> bool:
    """Shows the answer to `text`; false if it was stopped or could not be given."""
    with closing(conversation.answer(text)) as parts:
        try:
            _show(parts)
            return True
        except KeyboardInterrupt:
            _write(_PLAIN + "\n" if _dims() else "\n")
        except SharpiError as error:
            say(f"error: {error} (/reset starts over)")
    return False


def _show(parts: Iterator[Part]) -> None:
    dims = _dims()
    current = None
    for kind, text in parts:
        if kind != current:
            text = text.lstrip()  # templates surround reasoning with empty lines; the space here is ours
            if not text:
                continue
            if dims:
                _write(("\n\n" if current else "") + (_DIM if kind == "thinking" else _PLAIN))
            current = kind
        if kind == "thinking" and not dims:
            click.echo(text, nl=False, err=True)
        else:
            _write(text)
    _write(_PLAIN + "\n" if dims else "\n")


def _dims() -> bool:
    return takes_escapes(sys.stdout)


def _dimmed(text: str, dims: bool) -> str:
    return f"{_DIM}{text}{_PLAIN}" if dims else text


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def _line_editing() -> Iterator[None]:
    """Gives `input` its line editing and a history on disk. Chatting works without either."""
    try:
        import readline
    except ImportError:  # a Python built without it
        yield
        return
    if not _at_terminal():
        yield
        return
    history = _history_file()
    if history is None:
        yield
        return
    try:
        readline.read_history_file(history)
    except OSError:
        pass  # the first visit
    readline.set_history_length(_HISTORY_LINES)
    try:
        yield
    finally:
        try:
            history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            readline.write_history_file(history)
        except OSError:
            pass  # a cache that cannot be written costs the history, not the chat


def _history_file() -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "chat_history"
