"""From what a client asks of an answer to its constraint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sharpi.constraints import Constraint
from sharpi.constraints.budget import All, Either, LeastTokens, ThinkingBudget
from sharpi.constraints.calls import DescribedTool, OptionalCalls, compile_calls
from sharpi.constraints.grammar import Format, compile_format
from sharpi.constraints.literals import literal
from sharpi.constraints.thinking import AfterThinking, Begins
from sharpi.constraints.tokens import Tokens
from sharpi.errors import InvalidRequestError
from sharpi.text.answers.tool_format import ToolFormat

__all__ = ["AnswerRules", "Named"]

# What stands before an answer and before its text, for readers of answers that are several messages.
_MESSAGES = {"harmony": (literal("<|start|>assistant") + "?", literal("<|channel|>final<|message|>"))}


class Named(Protocol):
    """The choice of one tool."""

    @property
    def name(self) -> str: ...


class AnswerRules:
    """The constraints of a turn's answers, compiled once however many answers there are.

    Making it may take seconds: use a thread. `begin` takes a fraction of a millisecond.
    """

    def __init__(self, tokens: Tokens, form: ToolFormat, *, begins: Begins, tools: Sequence[DescribedTool] = (),
                 choice: str | Named = "auto", parallel: bool = True, wanted: Format | None = None,
                 thinking_budget: int | None = None, least_tokens: int = 0) -> None:
        """choice: "auto", "none", "required", or a tool. wanted: the format of the answer's text; if tools may be
        called, an answer is either such a text or calls. Raises InvalidRequestError, whose one line says what is wrong
        with the format or the tools."""
        self._tokens = tokens
        self._form = form
        self._begins: Begins = begins
        self._thinking_budget = thinking_budget
        self._least_tokens = least_tokens
        self._compulsory = False
        self._make = self._answer(list(tools), choice, parallel, wanted)
        if self._make is not None:
            tokens.going_on_after(form.thinking.closing.encode())  # slow when first asked, which must not be in a step

    def _answer(self, tools: list[DescribedTool], choice: str | Named, parallel: bool,
                wanted: Format | None) -> Callable[[], Constraint] | None:
        tokens, form = self._tokens, self._form
        before, before_text = _MESSAGES.get(form.reader, ("", ""))
        if not isinstance(choice, str):
            tools = [tool for tool in tools if tool.name == choice.name]
            if not tools:
                raise InvalidRequestError(f"tool_choice names {choice.name!r}, which is none of the tools")
            parallel = False  # whoever names a tool wants one call of it
        elif choice not in ("auto", "none", "required"):
            raise InvalidRequestError(f"tool_choice must be auto, none, required or a tool, not {choice!r}")
        if choice == "none" or (choice == "auto" and not tools):
            tools = []
        elif choice == "auto" and wanted is None:
            return OptionalCalls(tools, form, tokens, parallel=parallel).begin
        self._compulsory = bool(tools) or wanted is not None or choice == "required"
        if choice != "auto" and choice != "none":
            return compile_calls(tools, form, tokens, parallel=parallel, prefix=before).start
        if wanted is None:
            return None
        text = compile_format(wanted, tokens, f"{before} {before_text}".strip())
        if not tools:
            return text.start
        calls = compile_calls(tools, form, tokens, parallel=parallel, prefix=before)
        return lambda: Either(tokens, text.start(), calls.start())

    def begin(self) -> Constraint | None:
        """The constraint of one answer; `None` if everything is allowed."""
        openings, closing, _ = self._form.thinking
        found: list[Constraint] = []
        if self._make is not None:
            found.append(AfterThinking(self._tokens, self._make, openings, closing, begins=self._begins,
                                       compulsory=self._compulsory))
        if self._thinking_budget is not None and self._begins != "outside":
            found.append(ThinkingBudget(self._tokens, self._thinking_budget, openings, closing,
                                        inside=self._begins == "inside"))
        if self._least_tokens:
            found.append(LeastTokens(self._tokens, self._least_tokens))
        return All(found) if len(found) > 1 else found[0] if found else None
