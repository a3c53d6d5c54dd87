"""Where chats part: after these tokens of a prompt other prompts are likely to differ.

Models with recurrent layers, or with windows, can continue another prompt's beginning only where something was kept for
it. A mark is a hint that it is worth keeping something there. The ends of earlier turns need none: a prompt ended at
each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sharpi.text.tokenizer import Tokenizer

__all__ = ["chat_marks"]


def chat_marks(messages: Sequence[Mapping[str, Any]], text: str, ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """How many tokens of a chat's prompt come before its first question, where other chats with the same system prompt
    and tools differ, and before what its template adds behind the last message, where the next turn may. ids: the
    tokens of the rendered `text`."""
    return tokenizer.tokens_before(ids, [len(text[:place].encode()) for place in sorted(_places(messages, text))])


def _places(messages: Sequence[Mapping[str, Any]], text: str) -> Iterator[int]:
    """Messages are found by their texts, the last one first: what a short one says may well stand before it too, in the
    system prompt or in a tool. Behind it there are the words of the template, of which it may be a part: "hi" is one of
    "<think>". Before a message that the template words differently nothing is found."""
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), len(messages))
    end = len(text)
    for index in reversed(range(first, len(messages))):
        said = (messages[index].get("content") or "").strip()
        at = text.rfind(said, 0, end)
        while at > 0 and _is_part_of_a_word(text, at, at + len(said)):
            at = text.rfind(said, 0, at + len(said) - 1)
        if at < 0:
            return
        if index == len(messages) - 1:
            yield at + len(said)
        if index == first:
            yield at
        end = at


def _is_part_of_a_word(text: str, begin: int, end: int) -> bool:
    return begin < end and (text[begin - 1:begin + 1].isalnum() or text[end - 1:end + 1].isalnum())
