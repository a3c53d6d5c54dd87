"""``sharpi serve``: models behind HTTP, for programs that speak to OpenAI, Anthropic or Ollama, and a page to talk to.

What the server can be told is `ServerSettings`; an option wins over the configuration file, and that over the
environment.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from sharpi.cli.help import Command, section
from sharpi.cli.logs import log_file_option, show_warnings, verbose_option
from sharpi.cli.model_names import fetched
from sharpi.cli.options import (
    batch_option,
    cache_tokens_option,
    context_option,
    cpu_moe_option,
    device_option,
    kv_dtype_option,
    prompt_option,
    spill_option,
    threads_option,
    vram_option,
)
from sharpi.cli.text import say
from sharpi.errors import SharpiError
from sharpi.interrupts import leaving_at_once

if TYPE_CHECKING:
    from sharpi.serve.settings import ServerSettings

_EXTRA = ("httptools", "llguidance", "prometheus_client", "pydantic", "starlette", "uvicorn", "uvloop")


@click.command("serve", cls=Command, examples=(
    "sharpi serve -m model.gguf                   at http://127.0.0.1:8080",
    "sharpi serve -m user/repo:Q4_K_M -c 32768    with a longer context",
    "sharpi serve -m models/ -m small=a.gguf      a folder of models, and one more",
    "sharpi serve --config serve.toml --api-key-file keys --host 0.0.0.0"))
@section(
    "Models",
    click.option("-m", "--model", "-hf", "--hf-repo", "models", metavar="MODEL", multiple=True,
                 help="GGUF file, folder of such files, or a model on the Hugging Face Hub as user/repo:QUANT"
                      " (repeatable). NAME=MODEL gives a name to ask for it by. A model is loaded when it is first"
                      " asked for; the first one at once.  [default: the bundled model]"),
    context_option, kv_dtype_option, cache_tokens_option,
    click.option("--memory", metavar="SIZE",
                 help="Memory that loaded models may take together, such as 24GiB; the one that was not used for the"
                      " longest time goes first.  [default: one model is loaded at a time]"))
@section(
    "Network",
    click.option("--host", metavar="ADDRESS", help="Address to listen at; 0.0.0.0 lets other machines in.  [default:"
                                                   " 127.0.0.1]"),
    click.option("--port", type=int, metavar="N", help="Port to listen at; 0 takes a free one.  [default: 8080]"),
    click.option("--api-key", "api_keys", metavar="KEY", multiple=True,
                 help="Requests must have this key, or another one (repeatable); SHARPI_API_KEY sets one too, and is"
                      " not seen by other users of the machine."),
    click.option("--api-key-file", metavar="FILE", help="Keys, one on each line; SIGHUP reads the file again."),
    click.option("--allowed-host", "hosts", metavar="NAME", multiple=True,
                 help="Name by which clients may reach the server, beside its address (repeatable); * is any."),
    click.option("--cors-origin", "cors_origins", metavar="ORIGIN", multiple=True,
                 help="Page that may use the server from a browser, such as https://example.org (repeatable); * is"
                      " any."),
    click.option("--insecure", is_flag=True, help="Let other machines in without a key."))
@section(
    "Requests",
    click.option("--parallel", "-np", type=int, metavar="N",
                 help="Most requests that are answered at a time.  [default: 8]"),
    click.option("--max-queue", type=int, metavar="N",
                 help="Most requests that wait; further ones are refused.  [default: 64]"),
    click.option("--max-gap", type=float, metavar="SECONDS",
                 help="Longest time that an answer waits for the prompts of others.  [default: 0.2]"),
    click.option("--request-seconds", type=float, metavar="SECONDS",
                 help="An answer ends after this time; 0 sets no limit.  [default: 3600]"),
    click.option("--drain-seconds", type=float, metavar="SECONDS",
                 help="How long requests may go on when the server ends.  [default: 30]"),
    click.option("--stall-seconds", type=float, metavar="SECONDS",
                 help="/health fails if no step ends for so long.  [default: 60]"))
@section(
    "Cache of prompts",
    spill_option,
    click.option("--cache-dir", metavar="DIR",
                 help="Directory for what has no room in RAM, and for all of it when the server ends: the next one goes"
                      " on with it. It holds what prompts said, in a form that only the model reads."),
    click.option("--cache-dir-size", metavar="SIZE",
                 help="What that directory may hold; what was used longest ago goes first.  [default: 16GiB]"))
@section("Device and memory", device_option, vram_option, threads_option, batch_option, prompt_option, cpu_moe_option)
@section(
    "Output", verbose_option, log_file_option,
    click.option("--log-prompts", is_flag=True, help="Let the log hold prompts and answers."))
@click.option("--config", metavar="FILE",
              help="TOML file with settings, named as in docs/serve/serve.toml; options win.")
def serve_command(config: str | None, **options: Any) -> None:
    """Serve models over HTTP.

    Programs that speak to OpenAI, Anthropic or Ollama can use the server instead, and a browser finds a page at its
    address. Ctrl-C or SIGTERM ends it when the requests that have begun are finished; a second one ends it at once.
    """
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        raise click.ClickException(f"the server needs packages that are not installed ({', '.join(missing)}):"
                                   " pip install 'sharpi[serve]'")
    with leaving_at_once():
        from sharpi.serve.http.process import serve
        from sharpi.serve.models.catalog import catalogue

    show_warnings(click.get_current_context())
    settings = _settings(config, options)
    settings.require_safe()  # before anything is downloaded
    settings.require_cache_dir()
    failure = serve(settings, catalogue(settings.models, lambda name: fetched(name) or name), say)
    if failure is not None:
        raise SharpiError(failure)


def _settings(config: str | None, options: dict[str, Any]) -> ServerSettings:
    """What the environment, the file and the options say. An option left out is `None`, or no text."""
    from sharpi.serve.settings import KEY_VARIABLE, ServerSettings, read_config

    given = {} if config is None else read_config(config)
    if KEY_VARIABLE in os.environ and not given.get("api_keys"):
        given["api_keys"] = [os.environ[KEY_VARIABLE]]
    context = click.get_current_context()
    typed = {name: value for name, value in options.items()
             if context.get_parameter_source(name) != click.core.ParameterSource.DEFAULT}
    return ServerSettings(**given | typed)
