"""``sharpi pull``: downloads models by their names.

Standard output carries the path of each model, for scripts; what happens meanwhile goes to standard error.
"""

from __future__ import annotations

import click

from sharpi.cli.help import Command
from sharpi.cli.logs import log_options
from sharpi.cli.model_names import download_bar, said_if_interrupted
from sharpi.cli.text import say


@click.command("pull", cls=Command, examples=(
    "sharpi pull bartowski/SmolLM2-135M-Instruct-GGUF",
    "sharpi pull bartowski/SmolLM2-135M-Instruct-GGUF:Q8_0"))
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@log_options
def pull_command(names: tuple[str, ...]) -> None:
    """Download models, or newer versions of them, from the Hugging Face Hub.

    NAME is user/repo or user/repo:QUANT. Without a QUANT it is Q4_K_M, or the nearest that the repository has.
    user/repo@REVISION and user/repo/FILE.gguf work too.

    Models go into the Hub's cache, which other tools use too; HF_HOME moves it. HF_TOKEN opens private and gated
    models, HF_ENDPOINT names another Hub. An interrupted download resumes with the same command.
    """
    from sharpi import hub

    for name in names:
        with said_if_interrupted(), download_bar() as progress:
            path, _ = hub.pull(name, progress=progress, notice=say)
        click.echo(str(path))
