"""``sharpi list`` and ``sharpi rm``: the models in the cache, and their end."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from sharpi.cli.help import Command
from sharpi.cli.logs import log_file_option, log_options
from sharpi.cli.text import printable, say
from sharpi.words import size

if TYPE_CHECKING:
    from sharpi.hub.cache import CachedModel

_AGES = ((86400 * 365, "year"), (86400 * 30, "month"), (86400 * 7, "week"), (86400, "day"), (3600, "hour"),
         (60, "minute"))


@click.command("list", cls=Command)
@click.option("-v", "--verbose", is_flag=True, help="Show each model's path too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: sizes in bytes, times in seconds since 1970.")
@log_file_option
def list_command(verbose: bool, as_json: bool) -> None:
    """List the models in the cache by the names that other commands take.

    The cache is the one that other tools use too; only GGUF files are listed.
    """
    from sharpi.hub.cache import listed

    models = listed()
    if as_json:
        click.echo(json.dumps([_as_json(model) for model in models], indent=2))
    elif models:
        click.echo(_table(models, verbose))
    else:
        say("no models yet; `sharpi pull user/repo` downloads one")


@click.command("rm", cls=Command)
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@log_options
def rm_command(names: tuple[str, ...], yes: bool) -> None:
    """Remove models from the cache.

    NAME is one that `sharpi list` shows; user/repo without a QUANT is all of the repository's GGUF files, and what is
    left there of interrupted downloads. Files of other kinds, which other tools put there, stay.
    """
    from sharpi.hub.cache import remove

    for name in names:
        models = _named(name)
        for model in models:
            click.echo(f"{printable(_shown(model))}  {size(model.size)}", err=True)
        _require_yes(yes, len(models))
        freed = remove(models)
        _forget_headers(models[0].repo)
        click.echo(f"removed {printable(name)}: {size(freed)} of disk space")


def _named(name: str) -> list[CachedModel]:
    """The models in the cache that `name` means. Raises `HubError` if there are none."""
    from sharpi.errors import HubError
    from sharpi.hub.cache import cached
    from sharpi.hub.names import Name, matching

    parsed = Name.parse(name)
    if parsed is None:
        raise HubError(f"{name}: is not the name of a model in the cache; `sharpi list` shows them")
    models = cached(parsed.repo)
    if parsed.quant is not None or parsed.file is not None:
        fit = matching(parsed, [model.variant for model in models if model.variant is not None])
        models = [model for model in models if model.variant in fit]
    if not models:
        raise HubError(f"{name}: is not in the cache; `sharpi list` shows what is")
    if parsed.quant is not None and len(models) > 1:
        raise HubError(f"{name}: is not clear; name one of {', '.join(model.name for model in models)}")
    return models


def _require_yes(yes: bool, count: int) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError("nobody can confirm here: add -y to remove", click.get_current_context())
    click.confirm("Remove it?" if count == 1 else "Remove them?", abort=True, err=True)


def _forget_headers(repo: str) -> None:
    from sharpi.hub.header import forget

    forget(repo)


def _shown(model: CachedModel) -> str:
    return model.name if model.variant is not None else f"{model.name} (interrupted)"


def _table(models: list[CachedModel], verbose: bool) -> str:
    rows = [(printable(_shown(model)), size(model.size), _ago(model.used), printable(str(model.path)))
            for model in models]
    names = max(len("name"), *(len(row[0]) for row in rows))
    lines = [("name", "size", "last used", "path"), *rows]
    return "\n".join(f"{name:<{names}}  {count:>10}   {used:<16}{path if verbose else ''}".rstrip()
                     for name, count, used, path in lines)


def _ago(moment: float) -> str:
    passed = time.time() - moment
    for seconds, unit in _AGES:
        if passed >= seconds:
            count = int(passed // seconds)
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
    return "just now"


def _as_json(model: CachedModel) -> dict[str, Any]:
    files = model.variant.files if model.variant is not None else ()
    return {"name": model.name, "complete": model.variant is not None, "bytes": model.size, "used": model.used,
            "modified": model.modified, "files": [str(model.snapshot / file.path) for file in files]}
