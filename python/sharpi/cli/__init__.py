"""The ``sharpi`` command: one click group, one module per command.

What every command shares on its way out lives here, so that no command needs a ``try`` of its own: an error
a person can act on is one line on standard error and exit code 2; Ctrl-C ends with 130 and nothing said; a
reader that went away (``sharpi run … | head``) ends the program quietly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NoReturn

import click

from sharpi.cli.bench import bench_command
from sharpi.cli.chat import chat_command
from sharpi.cli.experts import experts_command
from sharpi.cli.hardware import hardware_command
from sharpi.cli.inspect import inspect_command
from sharpi.cli.list import list_command, rm_command
from sharpi.cli.plan import plan_command
from sharpi.cli.pull import pull_command
from sharpi.cli.run import run_command
from sharpi.errors import SharpiError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


class _Group(click.Group):
    """A click group that ends the program in the way the module's docstring promises."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, complete_var: str | None = None,
             standalone_mode: bool = True, **extra: Any) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "sharpi"
            _fail(f"{_one_line(error.format_message())} (see {command} --help)")
        except click.ClickException as error:
            _fail(_one_line(error.format_message()))
        except click.Abort:
            sys.exit(EXIT_INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        # Inside click's own main, which would turn these into "Aborted!" and its own exit codes.
        _tolerate_narrow_terminals()
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except SharpiError as error:
            _fail(_one_line(str(error)))
        except MemoryError:
            _fail("out of memory; a smaller context (-c) needs less, and `sharpi plan` says how much")
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:
            # What is still buffered would fail once more, aloud, when the interpreter flushes it on its way out.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
            ctx.exit(EXIT_BROKEN_PIPE)


def _fail(message: str) -> NoReturn:
    click.echo(f"sharpi: error: {message}", err=True)
    sys.exit(EXIT_ERROR)


def _one_line(message: str) -> str:
    return " ".join(message.splitlines())


def _tolerate_narrow_terminals() -> None:
    """A character the terminal's encoding lacks is shown as `?` instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def _print_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    try:
        version = metadata.version("sharpi")
    except metadata.PackageNotFoundError:
        version = "(not installed)"
    click.echo(f"sharpi {version}")
    ctx.exit()


@click.group(cls=_Group, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
              help="Show the version and exit.")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Run GGUF language models."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for _command in (run_command, chat_command, inspect_command, plan_command, hardware_command, bench_command,
                 experts_command, pull_command, list_command, rm_command):
    main.add_command(_command)
