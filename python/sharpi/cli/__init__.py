"""The ``sharpi`` command: one click group, one module per command. How commands end is in `ending`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import click
from click.shell_completion import shell_complete

from sharpi.cli.commands.about import (
    COMPLETION_VARIABLE,
    completion_command,
    help_command,
    version_command,
    version_line,
)
from sharpi.cli.commands.bench import bench_command
from sharpi.cli.commands.chat import chat_command
from sharpi.cli.commands.experts import experts_command
from sharpi.cli.commands.hardware import hardware_command
from sharpi.cli.commands.inspect import inspect_command
from sharpi.cli.commands.list import list_command, rm_command
from sharpi.cli.commands.plan import plan_command
from sharpi.cli.commands.pull import pull_command
from sharpi.cli.commands.run import run_command
from sharpi.cli.commands.serve import serve_command
from sharpi.cli.ending import exit_code
from sharpi.cli.help import Group
from sharpi.cli.text import say
from sharpi.settings.switches import check_switches, misspelt_switches


class _Program(Group):
    """The group of all commands, which ends the program itself: click would turn errors into exit codes of its own."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, complete_var: str | None = None,
             standalone_mode: bool = True, **extra: Any) -> Any:
        """Runs a command and exits, unless `standalone_mode` is false."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        name = prog_name or "sharpi"
        typed = [*(sys.argv[1:] if args is None else args)]
        sys.exit(exit_code(lambda: self._run(typed, name, complete_var or COMPLETION_VARIABLE, extra)))

    def _run(self, args: list[str], name: str, complete_var: str, extra: dict[str, Any]) -> Any:
        _tolerate_other_encodings()
        if instruction := os.environ.get(complete_var):
            return shell_complete(self, extra, name, complete_var, instruction)
        with self.make_context(name, args, **extra) as ctx:
            return self.invoke(ctx)


def _tolerate_other_encodings() -> None:
    """What a terminal's encoding lacks is shown as `?`, and bytes that are no text are read as `\\ufffd`, instead of
    ending the program."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def _print_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(version_line())
        ctx.exit()


@click.group(
    cls=_Program, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]},
    sections={"Text": ("run", "chat", "serve"), "Models": ("pull", "list", "rm", "inspect", "plan", "experts"),
              "Speed": ("bench", "hardware")},
    examples=('sharpi run "Once upon a time"             continue a text, with a toy model',
              "sharpi chat -m model.gguf                 talk with a model",
              "sharpi plan -m model.gguf --vram 12GiB    what fits, and how fast it will be",
              "sharpi COMMAND --help                     all options of a command"))
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
              help="Show the version and exit.")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Run GGUF language models, also ones that are larger than the GPU's memory."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        return
    check_switches()
    for name, meant in misspelt_switches():
        say(f"the environment's {name} has no effect: did you mean {meant}?")


for _command in (run_command, chat_command, serve_command, inspect_command, plan_command, hardware_command,
                 bench_command, experts_command, pull_command, list_command, rm_command, version_command,
                 completion_command, help_command):
    main.add_command(_command)
