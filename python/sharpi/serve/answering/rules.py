"""What a turn's answers must look like, as constraints of their tokens."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from functools import cached_property

from sharpi.constraints.answers import AnswerRules
from sharpi.constraints.thinking import Begins
from sharpi.constraints.tokens import Tokens
from sharpi.serve.answering.prompts import Prompt
from sharpi.serve.turns import Turn
from sharpi.text.answers.formats import HERMES
from sharpi.text.tokenizer import Tokenizer

__all__ = ["RuleBook"]

_KEPT = 32  # compiled rules: a client asks for the same ones with each turn


class RuleBook:
    """Makes the rules of turns for one model, and keeps those that were made last. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._made: OrderedDict[str, AnswerRules] = OrderedDict()

    @cached_property
    def _tokens(self) -> Tokens:
        return Tokens(self._tokenizer)

    def rules_of(self, turn: Turn, prompt: Prompt) -> AnswerRules | None:
        """`None` if anything may be answered. It may take seconds. Raises `InvalidRequestError` for a format or tools
        that cannot be followed."""
        tools = turn.tools if turn.tool_choice != "none" else ()
        if not tools and turn.format is None and turn.thinking_budget is None and not turn.least_tokens:
            return None
        begins = _begins(prompt)
        key = _key(turn, begins)
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key]
        rules = AnswerRules(
            self._tokens, HERMES if prompt.template is None else prompt.template.format, begins=begins, tools=tools,
            choice=turn.tool_choice, parallel=turn.parallel_calls, wanted=turn.format,
            thinking_budget=turn.thinking_budget, least_tokens=turn.least_tokens)
        with self._lock:
            self._made[key] = rules
            while len(self._made) > _KEPT:
                self._made.popitem(last=False)
        return rules


def _begins(prompt: Prompt) -> Begins:
    if prompt.template is None:
        return "outside"
    marks = prompt.template.format.thinking
    if marks.opened_by(prompt.text):
        return "inside"
    return "either" if prompt.template.thinks and not marks.closed_by(prompt.text) else "outside"


def _key(turn: Turn, begins: Begins) -> str:
    choice = turn.tool_choice if isinstance(turn.tool_choice, str) else {"name": turn.tool_choice.name}
    wanted = None if turn.format is None else [turn.format.kind, turn.format.source]
    tools = [[tool.name, dict(tool.parameters)] for tool in turn.tools]
    return json.dumps([begins, turn.tools and choice, turn.parallel_calls, turn.thinking_budget, turn.least_tokens,
                       wanted, tools], default=dict)
