"""``sharpi version``, ``sharpi completion`` and ``sharpi help``: the program about itself."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from sharpi.cli.help import Command

__all__ = ["COMPLETION_VARIABLE", "completion_command", "help_command", "version_command", "version_line"]

COMPLETION_VARIABLE = "_SHARPI_COMPLETE"  # by which a shell asks for completions


def version_line() -> str:
    """The program and its version."""
    from importlib import metadata

    try:
        return f"sharpi {metadata.version('sharpi')}"
    except metadata.PackageNotFoundError:
        return "sharpi (not installed)"


@click.command("version", cls=Command)
def version_command() -> None:
    """Show the version."""
    click.echo(version_line())


@click.command("completion", cls=Command,
               examples=('eval "$(sharpi completion bash)"      in ~/.bashrc',
                         'eval "$(sharpi completion zsh)"       in ~/.zshrc',
                         "sharpi completion fish | source      in ~/.config/fish/config.fish"))
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion_command(shell: str) -> None:
    """Print a script that lets SHELL complete commands and options."""
    found = get_completion_class(shell)
    assert found is not None, "click knows these shells"
    click.echo(found(click.get_current_context().find_root().command, {}, "sharpi", COMPLETION_VARIABLE).source())


@click.command("help", cls=Command)
@click.argument("name", metavar="[COMMAND]", required=False)
@click.pass_context
def help_command(ctx: click.Context, name: str | None) -> None:
    """Show the help of COMMAND, or of the program."""
    program = ctx.find_root()
    if name is None:
        click.echo(program.get_help())
        return
    group = program.command
    assert isinstance(group, click.Group)
    _, command, _ = group.resolve_command(program, [name])
    assert command is not None, "an unknown one is refused"
    with click.Context(command, info_name=name, parent=program) as inner:
        click.echo(inner.get_help())
