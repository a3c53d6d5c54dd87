"""Reasoning is told from the answer, whatever marks it and however the text is cut."""

from __future__ import annotations

import pytest
from answer_texts import cut_anywhere

from sharpi.text.answers.formats import FORMATS, HERMES, format_of
from sharpi.text.answers.pieces import Piece, Saying, Thinking
from sharpi.text.answers.reader import AnswerReader
from sharpi.text.answers.tool_format import ToolFormat

KINDS = {Thinking: "thinking", Saying: "answer"}


def split(pieces: list[str], thinking: bool = False, form: ToolFormat = HERMES,
          trim: bool = False) -> list[tuple[str, str]]:
    """The reader's pieces, neighbours of one kind joined."""
    reader = AnswerReader(form, opened=thinking, trim=trim)
    joined: list[tuple[str, str]] = []
    for piece in [found for text in pieces for found in reader.push(text)] + reader.flush():
        assert isinstance(piece, (Thinking, Saying)) and piece.text
        kind = KINDS[type(piece)]
        if joined and joined[-1][0] == kind:
            joined[-1] = (kind, joined[-1][1] + piece.text)
        else:
            joined.append((kind, piece.text))
    return joined


@pytest.mark.parametrize(("text", "thinking", "expected"), [
    ("plain <b>answer</b>", False, [("answer", "plain <b>answer</b>")]),
    ("<think>hm\n</think>\n\nyes", False, [("thinking", "hm\n"), ("answer", "\n\nyes")]),
    ("hm</think>yes", True, [("thinking", "hm"), ("answer", "yes")]),
    ("<think></think>yes", False, [("answer", "yes")]),
    ("a<think>b</think>c<think>d", False, [("answer", "a"), ("thinking", "b"), ("answer", "c"), ("thinking", "d")]),
    ("1 <thin 2 <<think>x<y</thi</think>z<", False,
     [("answer", "1 <thin 2 <"), ("thinking", "x<y</thi"), ("answer", "z<")]),
    ("</think>", False, [("answer", "</think>")]),
    ("never closed </thin", True, [("thinking", "never closed </thin")]),
])
def test_thinking_is_told_from_the_answer_however_it_is_cut(
        text: str, thinking: bool, expected: list[tuple[str, str]]) -> None:
    for pieces in cut_anywhere(text):
        assert split(pieces, thinking) == expected


CHANNELS = format_of("<|channel|>analysis<|message|>")
CALL = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"


@pytest.mark.parametrize(("form", "text", "expected"), [
    (CHANNELS, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
     [("thinking", "Hm."), ("answer", "Yes.")]),
    (CHANNELS, "<|channel|>final<|message|>Yes <|end", [("answer", "Yes <|end")]),
    (CHANNELS, "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
               "<|start|>assistant<|channel|>commentary<|message|>c<|end|>"
               "<|start|>assistant<|channel|>final<|message|>d",
     [("thinking", "ab"), ("answer", "cd")]),
    (CHANNELS, f"<|channel|>analysis<|message|>a<|end|>{CALL}", [("thinking", "a"), ("answer", CALL)]),
    (format_of("'<|channel>thought\\n'"), "<|channel>thought\nHm.\n<channel|>Yes <channel|>",
     [("thinking", "Hm.\n"), ("answer", "Yes <channel|>")]),
    (format_of("'<|channel>thought\\n'"), "<|channel>thought\n<channel|>Yes <think>", [("answer", "Yes <think>")]),
    (format_of("[THINK]"), "[THINK]Hm.[/THINK]Yes [INST]", [("thinking", "Hm."), ("answer", "Yes [INST]")]),
    (format_of("<think>"), "<think>Hm.</think>Yes", [("thinking", "Hm."), ("answer", "Yes")]),
    (format_of(""), "<think>Hm.</think>Yes", [("thinking", "Hm."), ("answer", "Yes")]),
])
def test_each_familys_marks_of_thinking(form: ToolFormat, text: str, expected: list[tuple[str, str]]) -> None:
    for pieces in cut_anywhere(text):
        assert split(pieces, form=form) == expected


def test_no_mark_begins_another() -> None:
    for form in FORMATS:
        marks = {*form.thinking.openings, *form.thinking.dropped, *form.triggers}
        assert not [(a, b) for a in marks for b in marks if a != b and b.startswith(a)]


def test_text_is_held_back_no_longer_than_needed() -> None:
    reader = AnswerReader(HERMES)

    def push(text: str) -> list[Piece]:
        return reader.push(text)

    assert push("a <") == [Saying("a")]  # the space may stand before a mark
    assert push("thi") == []
    assert push("s") == [Saying(" <this")]
    assert push("<think>b</") == [Thinking("b")]
    assert reader.flush() == [Thinking("</")]
    assert reader.flush() == []


@pytest.mark.parametrize(("text", "thinking", "expected"), [
    ("<think>\n\n hm \n</think>\n\nyes \n", False, [("thinking", "hm"), ("answer", "yes \n")]),
    ("\nhm </think>\nyes", True, [("thinking", "hm"), ("answer", "yes")]),
    ("\n yes", False, [("answer", "\n yes")]),
    ("a\n<think>b", False, [("answer", "a"), ("thinking", "b")]),
    ("<think> \n</think> \n", False, []),
])
def test_white_space_around_reasoning_is_the_formats(
        text: str, thinking: bool, expected: list[tuple[str, str]]) -> None:
    for pieces in cut_anywhere(text):
        assert split(pieces, thinking, trim=True) == expected
