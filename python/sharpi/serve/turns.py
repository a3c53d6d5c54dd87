"""What clients ask for and what they are answered, in terms that belong to no API.

An API turns a client's request into a `Turn`. A `Runner` (runner.py) runs it and gives `Event`s as they come, which the
API words as its clients expect. So templates, thinking, tool calls, stop texts, scores and counts have one
implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from sharpi.settings.generation_options import GenerationOptions

__all__ = ["CallArguments", "CallBegun", "Ended", "Event", "NamedTool", "OutputFormat", "PromptScores", "Said", "Score",
           "Thought", "Tool", "ToolChoice", "Turn", "Usage"]


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. parameters: the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NamedTool:
    """The model must call this tool."""

    name: str


ToolChoice: TypeAlias = 'Literal["auto", "none", "required"] | NamedTool'


@dataclass(frozen=True)
class OutputFormat:
    """What the answer's text must look like. source: a JSON schema, or the text of a grammar."""

    kind: Literal["json_object", "json_schema", "lark", "gbnf", "regex"]
    source: Mapping[str, Any] | str | bool | None = None


@dataclass(frozen=True)
class Turn:
    """One prompt, and how to answer it.

    messages: a chat's, in OpenAI's shape: "role" and "content" (text), an assistant's perhaps with "reasoning_content"
    and "tool_calls", a tool's with "tool_call_id". prompt: instead of messages, a text or token ids to continue.
    choices: how many answers; answer i has the seed + i. scores: how many of the likeliest tokens each token's score
    names; `None`: no scores. echo: the prompt is part of the answer, with its scores. continues: the last message is an
    assistant's, which the answer continues. thinking: whether the template asks for reasoning; `None` leaves it to the
    template. thinking_budget: the most tokens of reasoning. template: further variables for the template.
    ignore_end: the answer goes on after an end token. least_tokens: no end token comes before these.
    key: of the client; clients take turns, however many requests each has sent. salt: turns with different ones share
    nothing that was computed, so no client learns from an answer's speed what others have asked.
    """

    messages: Sequence[Mapping[str, Any]] = ()
    prompt: str | Sequence[int] | None = None
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = "auto"
    parallel_calls: bool = True
    options: GenerationOptions = field(default_factory=GenerationOptions)
    choices: int = 1
    scores: int | None = None
    echo: bool = False
    format: OutputFormat | None = None
    continues: bool = False
    thinking: bool | None = None
    thinking_budget: int | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    ignore_end: bool = False
    least_tokens: int = 0
    key: str = ""
    salt: str = ""


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """A token and its natural log-probability, before temperature, penalties and bias. `bytes`: what it stands for,
    which need not be whole characters. top: the likeliest tokens, the likeliest first. `None`: the first token of a
    prompt follows nothing."""

    id: int
    text: str
    bytes: bytes
    logprob: float | None
    top: tuple[Score, ...] = ()


@dataclass(frozen=True)
class PromptScores:
    """With `echo`: the prompt's text and scores, before all else of a choice."""

    choice: int
    text: str
    scores: tuple[Score, ...]


@dataclass(frozen=True)
class Thought:
    """More of the reasoning."""

    choice: int
    text: str
    scores: tuple[Score, ...] = ()


@dataclass(frozen=True)
class Said:
    """More of the answer's text."""

    choice: int
    text: str
    scores: tuple[Score, ...] = ()


@dataclass(frozen=True)
class CallBegun:
    """The model calls a tool. index: 0, 1, ... in the choice."""

    choice: int
    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON text of a call's arguments; the pieces of one call make one object."""

    choice: int
    index: int
    json: str


@dataclass(frozen=True)
class Ended:
    """The last event of a choice. "stop": at an end token or a stop text, then stop_text says which. "length": at
    max_tokens, or the context is full. "tool_calls": the answer has tool calls. "timeout": its time is over."""

    choice: int
    reason: Literal["stop", "length", "tool_calls", "timeout"]
    stop_text: str | None = None


@dataclass(frozen=True)
class Usage:
    """The last event of a turn. Tokens of the prompt (once, however many choices), those of it that the cache had,
    tokens of all answers (with end tokens that were computed), those of them that were reasoning. figures: of each
    choice, what `Answer.figures` says."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    thinking_tokens: int
    figures: tuple[Mapping[str, Any], ...] = ()


Event: TypeAlias = "PromptScores | Thought | Said | CallBegun | CallArguments | Ended | Usage"
