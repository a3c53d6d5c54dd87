"""A stand-in for `sharpi.Model` with which the commands are tested: quick, and it does exactly what it is told.

Its tokens are characters. It answers with a set text, and remembers what it was asked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from click.testing import CliRunner

from sharpi.errors import InvalidRequestError
from sharpi.reply import ChatPrompt, Reply
from sharpi.text.chat import ChatTemplate

TEMPLATE = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
            "<assistant>{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}")

# What the fake's tokenizer reads as one token when it parses control tokens.
CONTROL_TOKEN = "<|end|>"

# The folder that the program below is given: it imports this module.
SUPPORT = Path(__file__).parent

# A program that runs a command with the fake, for what only a program can show: signals, pipes, terminals. Its
# arguments are this folder and the command's; the model says a letter every 20 ms, for ten seconds.
SLOW_PROGRAM = """
import sys, time
sys.path.insert(0, sys.argv.pop(1))
import pytest, fake_model
from sharpi.cli import main
script = fake_model.install(pytest.MonkeyPatch())
script.answer = "abcdefghij" * 50
script.on_token = lambda index: time.sleep(0.02)
main(prog_name="sharpi")
"""


@dataclass
class Script:
    """What the fake does next, and what it saw."""

    answer: str = " there was a fox."
    context: int = 1000
    template: str | None = TEMPLATE
    experts: dict[str, Any] | None = None
    mtp: bool = False
    drafts: tuple[int, int] = (0, 0)  # drafted and accepted
    on_load: Callable[[dict[str, Any]], None] = lambda arguments: None
    on_token: Callable[[int], None] = lambda index: None
    loads: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    stopped: int = 0
    resets: int = 0


class FakeSession:
    """A session: remembers its tokens and counts those it need not compute again."""

    def __init__(self, model: FakeModel) -> None:
        self._model = model
        self.tokens: list[int] = []

    def generate(self, prompt: Sequence[int], **request: Any) -> Iterator[SimpleNamespace]:
        kept = 0
        while kept < min(len(prompt), len(self.tokens)) and prompt[kept] == self.tokens[kept]:
            kept += 1
        self._model.reused = kept
        self.tokens = list(prompt)
        for token in self._model.generate(prompt, **request):
            self.tokens.append(token.id)
            yield token

    def reply(self, prompt: ChatPrompt, options: dict[str, Any]) -> Reply:
        return Reply(self.generate(prompt.ids, **options), prompt)

    def reset(self) -> None:
        self._model.script.resets += 1
        self.tokens = []


class FakeModel:
    """What the commands use of a Model."""

    threads = 3
    isa = "avx2"
    device = "cpu"
    device_name = "avx2"

    def __init__(self, script: Script) -> None:
        self.script = script
        self.context = script.context
        self.file = SimpleNamespace(name="fake")
        self.plan = SimpleNamespace(gpu=None, why="", mtp=script.mtp, prompt="exact")
        self.spec = SimpleNamespace(name="fake")
        self.chat_template = ChatTemplate(script.template, "", "") if script.template else None
        self.tokenizer = SimpleNamespace(tokens_before=lambda ids, places: places)  # of one byte each
        self.reused = 0
        self._counts = (0, 0)
        self._full = False

    def __enter__(self) -> FakeModel:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        if parse_special:
            text = text.replace(CONTROL_TOKEN, "\0")
        return [ord(c) for c in text]

    def session(self) -> FakeSession:
        return FakeSession(self)

    def generate(self, prompt: Sequence[int], *, max_tokens: int | None, **request: Any) -> Iterator[SimpleNamespace]:
        self.script.prompts.append("".join(map(chr, prompt)))
        self.script.requests.append({**request, "max_tokens": max_tokens})
        if len(prompt) > self.context:
            raise InvalidRequestError(f"the prompt has {len(prompt)} tokens, the context holds {self.context}")
        self._full = False
        try:
            for index, character in enumerate(self.script.answer[:max_tokens]):
                self.script.on_token(index)
                if len(prompt) + index > self.context:
                    self._full = True
                    break
                self._counts = (len(prompt), index + 1)
                yield SimpleNamespace(id=ord(character), text=character)
        finally:
            self.script.stopped += 1

    def stats(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._counts[0] - self.reused,
            "prompt_tokens_per_second": 1234.5,
            "generated_tokens": self._counts[1],
            "generation_tokens_per_second": 67.89,
            "reused_tokens": self.reused,
            "context_full": self._full,
            "load_seconds": 0.25,
            "experts": self.script.experts,
            "drafted_tokens": self.script.drafts[0],
            "accepted_tokens": self.script.drafts[1],
        }


def install(monkeypatch: Any) -> Script:
    """Makes every command open the fake; returns its script."""
    script = Script()

    def load(path: str | None = None, **arguments: Any) -> FakeModel:
        arguments = {"path": path, **arguments}
        script.loads.append(arguments)
        script.on_load(arguments)
        return FakeModel(script)

    monkeypatch.setattr("sharpi.model.Model.load", load)
    return script


def cli_runner() -> CliRunner:
    """A runner that keeps standard output and error apart: click 8.1 must be told, later ones know no other way."""
    apart = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}
    return CliRunner(**apart)
