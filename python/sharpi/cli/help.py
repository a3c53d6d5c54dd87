"""Commands that show help in sections, whole at 80 columns and with examples, and refuse what they do not know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from sharpi.cli.habits import refuse_foreign_command, refuse_foreign_options

__all__ = ["Command", "Group", "section"]

_OTHERS = "Options"


class Command(click.Command):
    """A command whose options are shown by `section`. examples: lines to type, shown as they are."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuses unknown options, which click may take for others."""
        if not ctx.resilient_parsing:
            refuse_foreign_options(self, ctx, args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options by section, in the order in which sections are first met."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(parameter, "section", _OTHERS), []).append(record)
        for title in sorted(sections, key=lambda title: title == _OTHERS):
            with formatter.section(title):
                formatter.write_dl(sections[title])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The examples."""
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")


class Group(Command, click.Group):
    """The program. sections: by title, the names of its commands; commands without one come last."""

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections or {}

    def resolve_command(self, ctx: click.Context,
                        args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Refuses unknown commands."""
        if not ctx.resilient_parsing:
            refuse_foreign_command(self, ctx, args[0])
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands by section, and then the options."""
        placed = {name for names in self.sections.values() for name in names}
        rest = [name for name in self.list_commands(ctx) if name not in placed]
        for title, names in {**self.sections, "Other commands": rest}.items():
            found = [(name, self.get_command(ctx, name)) for name in names]
            rows = [(name, command.get_short_help_str(limit=200)) for name, command in found if command is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
        super().format_options(ctx, formatter)


def section(title: str, *options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A decorator that adds `options` to a command, in this order, and shows them under `title`."""

    def add(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
            function.__click_params__[-1].section = title
        return function

    return add
