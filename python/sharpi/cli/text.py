"""How the commands word what they print: sizes, speeds, and text that came out of a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TextIO

import click

from sharpi.errors import one_line
from sharpi.words import plural, speed


def closing_line(stats: Mapping[str, Any]) -> str:
    """What a generation cost, from `Model.stats()`."""
    prompt = f"prompt {_tokens(stats['prompt_tokens'], stats['prompt_tokens_per_second'])}"
    if stats.get("reused_tokens"):
        prompt += f" ({stats['reused_tokens']:,} more kept from before)"
    generated = f"generated {_tokens(stats['generated_tokens'], stats['generation_tokens_per_second'])}"
    return f"{prompt}; {generated}{_drafts(stats)}{_hits(stats.get('experts'))}"


def _tokens(count: int, tokens_per_second: float | None) -> str:
    """How many tokens, and how fast, unless nothing was timed: the first token of an answer comes with the prompt."""
    rate = "" if tokens_per_second is None else f", {speed(tokens_per_second)} tokens/s"
    return f"{plural(count, 'token')}{rate}"


def takes_escapes(stream: TextIO | None) -> bool:
    """Whether escape codes may be written to `stream`: it is a terminal that knows them, and NO_COLOR is not set."""
    return (stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
            and not os.environ.get("NO_COLOR"))


def _drafts(stats: Mapping[str, Any]) -> str:
    """What became of drafted tokens, where there were any."""
    drafted = stats.get("drafted_tokens")
    if not drafted:
        return ""
    accepted = stats["accepted_tokens"]
    return f"; drafts: {accepted:,} of {drafted:,} accepted ({100 * accepted / drafted:.0f} %)"


def _hits(experts: Mapping[str, Any] | None) -> str:
    """The part of the experts' choices, since loading, that slots answered, where there are slots."""
    if not experts or not experts["slots"] or experts["hit_rate"] is None:
        return ""
    disk = experts.get("disk")
    read = f"; {disk['bytes'] / 1e9:,.1f} GB read from the disk, waited for {disk['waited']:.1f} s" if disk else ""
    return f"; {100 * experts['hit_rate']:.1f} % of experts from slots{read}"


def printable(text: str) -> str:
    """Text from a file with control characters spelled out: a file must not be able to drive the terminal."""
    return one_line(text)


def say(line: str) -> None:
    """A line for people, on standard error."""
    click.echo(f"sharpi: {printable(line)}", err=True)


def context_full_line(context: int) -> str:
    """Why a text ends where it does."""
    return f"stopped: the context of {context:,} tokens is full (-c sets it)"
