"""Where a chat's prompt is marked: where its first question begins, and where its last message ends."""

from __future__ import annotations

from typing import Any

import pytest
from vocabularies import CONTROL, NORMAL, tokenizer_of

from sharpi.text.chat import ChatTemplate
from sharpi.text.marks import chat_marks
from sharpi.text.tokenizer import Tokenizer
from sharpi.text.vocabulary import BYTE_OF_CHAR

CHAT = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n<think>\n")
SYSTEM = {"role": "system", "content": "You know why. Ask a user, say hi."}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of({
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["s a", "h i"],
        "tokenizer.ggml.tokens": [*sorted(BYTE_OF_CHAR), "sa", "hi", "<|im_start|>", "<|im_end|>"],
        "tokenizer.ggml.token_type": [NORMAL] * 258 + [CONTROL] * 2})


def cut(tokenizer: Tokenizer, messages: list[dict[str, Any]], template: str = CHAT) -> list[str]:
    """The texts before the marks."""
    text = ChatTemplate(template, "", "").render(messages)
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    marks = chat_marks(messages, text, ids, tokenizer)
    return [tokenizer.decode(ids[:mark], skip_special=False) for mark in marks]


def said(role: str, content: str | None) -> dict[str, Any]:
    return {"role": role, "content": content}


OPENING = f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n<|im_start|>user\n"


@pytest.mark.parametrize("question", ["why", "hi", "s", "user", " Wo ist der Bär? \n", "Ж"])
def test_a_question_begins_where_chats_part(question: str, tokenizer: Tokenizer) -> None:
    """Short ones stand in the system prompt, too."""
    first, last = cut(tokenizer, [SYSTEM, said("user", question)], CHAT.replace("m.content", "m.content | trim"))
    assert first == OPENING
    assert last == OPENING + question.strip()


def test_a_later_turn_has_the_same_beginning(tokenizer: Tokenizer) -> None:
    turns = [SYSTEM, said("user", "hi"), said("assistant", "hi, hi"), said("tool", None), said("user", "so, hi?")]
    first, last = cut(tokenizer, turns)
    assert first == OPENING
    assert last.endswith("<|im_start|>user\nso, hi?") and last.count("so, hi?") == 1


def test_without_a_question_there_are_none(tokenizer: Tokenizer) -> None:
    assert cut(tokenizer, [SYSTEM]) == []


def test_what_a_template_words_differently_is_not_found(tokenizer: Tokenizer) -> None:
    upper = CHAT.replace("m.content", "(m.content if m.role == 'user' else m.content | upper)")
    turns = [said("user", "why"), said("assistant", "because"), said("user", "why")]
    assert [text.count("why") for text in cut(tokenizer, turns, upper)] == [2], "the first question is not known"
    assert cut(tokenizer, [said("user", "why")], CHAT.replace("m.content", "m.content | upper")) == []


def test_tokens_that_begin_with_a_space_of_their_own_are_not_overcounted() -> None:
    words = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u2581a", "\u2581b"]
    pieces = tokenizer_of({
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -3.0, -4.0, -5.0, -1.0, -2.0],
        "tokenizer.ggml.token_type": [2, CONTROL, CONTROL, *[NORMAL] * 5]})
    ids = pieces.encode("<s>ab<s>ab", add_special=False, parse_special=True)
    assert [pieces.token_text(id) for id in ids] == ["<s>", "\u2581a", "b", "<s>", "\u2581a", "b"]
    assert pieces.tokens_before(ids, [0, 3, 4, 8, 10]) == [0, 1, 1, 3, 4]
