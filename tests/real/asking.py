"""Lets a model answer a conversation greedily, through its own template."""

from __future__ import annotations

from typing import Any

from sharpi import Model, Token
from sharpi.reply import chat_prompt

QUESTION = "Tell me the capital of France."
ANSWER = "The capital of France is Paris."


def prompt_ids(model: Model, *texts: str) -> list[int]:
    """The prompt after which the model answers. texts: what user and assistant said in turn."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    return chat_prompt(model, messages).ids


def ask(model: Model, *texts: str, **options: Any) -> list[Token]:
    """The greedy answer, token by token."""
    return list(model.generate(prompt_ids(model, *texts), **{"temperature": 0.0, "max_tokens": 64, **options}))


def said(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)
