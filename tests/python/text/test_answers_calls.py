"""Calls as models really write them: odd, cut off, broken, and what only looks like one."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from answer_texts import Heard, Tool, cut_anywhere, read_whole, written_calls

from sharpi.text.answers.formats import FORMATS, format_of
from sharpi.text.answers.pieces import CallBegins, CallContinues, Saying, Thinking
from sharpi.text.answers.reader import AnswerReader
from sharpi.text.answers.tool_format import ToolFormat

NAMED = {form.name: form for form in FORMATS}


TOOLS = (Tool("weather", {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"},
                                                           "at": {"type": "object"}}}),
         Tool("now", {}))


def heard(form: ToolFormat | str, text: str, opened: bool = False, tools: tuple[Tool, ...] = TOOLS) -> Heard:
    """What is read of a text, however it is cut."""
    form = NAMED[form] if isinstance(form, str) else form
    found = [read_whole(AnswerReader(form, tools, opened=opened), pieces) for pieces in cut_anywhere(text, 30)]
    assert all(other == found[0] for other in found[1:])
    return found[0]


HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
OSLO = ("weather", {"city": "Oslo"})
NOW = ("now", {})


@pytest.mark.parametrize(("form", "text", "calls"), [
    # objects
    ("hermes", HERMES_CALL, [OSLO]),
    ("hermes", HERMES_CALL.replace("\n", ""), [OSLO]),
    ("hermes", HERMES_CALL.removesuffix("</tool_call>"), [OSLO]),
    ("hermes", '<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>', [OSLO]),
    ("hermes", '<tool_call>{"arguments": null, "name": "now"}</tool_call>', [NOW]),
    ("hermes", '<tool_call>{"type": "function", "name": "weather", "parameters": {"city": "Oslo"}}</tool_call>',
     [OSLO]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>', [OSLO]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', [NOW]),
    ("hermes", '<tool_call>[{"name": "now", "arguments": {}}, {"name": "weather", "arguments": {"city": "Oslo"}}]'
               "</tool_call>", [NOW, OSLO]),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n{"name": "now", "arguments": {}}\n</tool_call>',
     [NOW, NOW]),
    ("hermes", '<tool_call>{"name": "w\\u0065ather", "arguments": {"city": "</tool_call><think>"}}</tool_call>',
     [("weather", {"city": "</tool_call><think>"})]),
    ("hermes", '<tool_call>{"name": "no_such_tool", "arguments": {}}</tool_call>', [("no_such_tool", {})]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "a\nb\\d\\u12"}}</tool_call>',
     [("weather", {"city": "a\nb\\d\\u12"})]),
    ("llama", '{"name": "weather", "parameters": {"city": "Oslo"}}', [OSLO]),
    ("llama", ' \n{"type": "function", "name": "weather", "parameters": {"city": "Oslo"}}', [OSLO]),
    ("llama", '<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}', [OSLO]),
    ("llama", '{"name": "now", "parameters": {}}; {"name": "weather", "parameters": {"city": "Oslo"}}', [NOW, OSLO]),
    ("mistral-array", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}, "id": "abcdefghi"}]', [OSLO]),
    ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "now", "arguments": {}}]',
     [OSLO, NOW]),
    ("command", '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Oslo"}}\n]'
                "<|END_ACTION|>", [OSLO]),
    # a name, then JSON
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]now[ARGS]{}', [OSLO, NOW]),
    ("mistral", '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Oslo"}', [OSLO]),
    ("mistral", '[TOOL_CALLS]weather{"city": "Oslo"}', [OSLO]),
    ("kimi", '<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:3<|tool_call_argument_begin|>'
             '{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>', [OSLO]),
    ("kimi", '<|tool_call_begin|>now:0<|tool_call_argument_begin|><|tool_call_end|>', [NOW]),
    ("deepseek", '<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>weather<｜tool▁sep｜>\n{"city": "Oslo"}\n'
                 "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
     [OSLO, NOW]),
    ("deepseek-fenced", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n'
                        '```json\n{"city": "Oslo"}\n```<｜tool▁call▁end｜>\n'
                        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```"
                        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", [OSLO, NOW]),
    # tags
    ("qwen-xml", "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>", [OSLO]),
    ("qwen-xml", "<tool_call><function=weather><parameter=city>Oslo</parameter></function></tool_call>", [OSLO]),
    ("qwen-xml", "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</tool_call>", [OSLO]),
    ("qwen-xml", "<tool_call>\n<function=now>\n</function>\n<function=now>\n</function>\n</tool_call>", [NOW, NOW]),
    ("qwen-xml", "<tool_call>\n<function=weather>\n<parameter=days>\n 3\n</parameter>\n<parameter=other>\n4\n"
                 "</parameter>\n<parameter=at>\n{'a': 1}\n</parameter>\n</function>",
     [("weather", {"days": 3, "other": "4", "at": "{'a': 1}"})]),
    ("glm", "<tool_call>now</tool_call><tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
            "</tool_call>", [NOW, OSLO]),
    ("glm-compact", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>", [OSLO]),
    ("dsml", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" '
             'string="true">Oslo</｜DSML｜parameter>\n<｜DSML｜parameter name="at" string="false">[1]'
             "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
     [("weather", {"city": "Oslo", "at": [1]})]),
    # notations of their own
    ("gemma", '<|tool_call>call:weather{city:"Oslo",days:-1.5e3,at:{<|"|>k<|"|>:[true,None]}}<tool_call|>',
     [("weather", {"city": "Oslo", "days": -1500.0, "at": {"k": [True, None]}})]),
    ("gemma", "<|tool_call>call:now{}<tool_call|><|tool_call>call:now{ }<tool_call|>", [NOW, NOW]),
    ("python", """<|tool_call_start|>[weather(city='O\\'s\\nlo', days = 2, at={"a": [1.5, None, False]}), now()]"""
               "<|tool_call_end|>",
     [("weather", {"city": "O's\nlo", "days": 2, "at": {"a": [1.5, None, False]}}), NOW]),
    # harmony: the recipient stands before or behind the channel
    ("harmony", ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}', [OSLO]),
    ("harmony", '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
     [OSLO]),
    ("harmony", '<|channel|>analysis to=functions.weather code<|message|>{"city": "Oslo"}', [OSLO]),
    ("harmony", '<|start|>assistant<|channel|>commentary to=functions.now<|message|>{}<|end|>'
                '<|start|>assistant to=functions.weather<|channel|>commentary<|message|>{"city": "Oslo"}', [NOW, OSLO]),
])
def test_what_models_write_of_calls(form: str, text: str, calls: list[tuple[str, Any]]) -> None:
    found = heard(form, text)
    assert (found.parsed(), found.text, found.thinking) == (calls, "", "")


@pytest.mark.parametrize(("form", "text"), [
    ("hermes", "A <tool_call> is a tag, </tool_call> another."),
    ("hermes", '<tool_call>\n{"nam": "weather"}\n</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}'),
    ("hermes", '<tool_call>{"name": weather, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "weather", '),
    ("hermes", "<tool_call>"),
    ("llama", '{"name": "Bob", "parameters": {}}'),
    ("llama", '{"name": "weather", "age": 5}'),
    ("llama", '{"answer": {"name": "weather", "parameters": {}}}'),
    ("llama", 'It is {"name": "weather", "parameters": {}}'),
    ("llama", " \n{1, 2}"),
    ("mistral", "[TOOL_CALLS] no name here"),
    ("mistral", "[TOOL_CALLS]weather[CALL_ID]"),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a name of words<｜tool▁sep｜>{}"),
    ("qwen-xml", "Write <function=f> or <tool_call>\nfoo"),
    ("qwen-xml", "<function=a name>"),
    ("glm", "<tool_call>is a tag</tool_call>"),
    ("minimax", "<minimax:tool_call>\n<invoke>"),
    ("gemma", "<|tool_call>call:no name{}"),
    ("python", "<|tool_call_start|>weather(city='Oslo')"),
    ("harmony", "<|channel|>other<|message|>x"),
    ("harmony", "<|start|>user<|message|>x"),
    ("harmony", " to=be, or not to=be"),
])
def test_what_is_no_call_is_text_and_nothing_is_lost(form: str, text: str) -> None:
    assert heard(form, text) == Heard(text=text)


def test_a_text_that_goes_on_is_not_held_back() -> None:
    reader = AnswerReader(NAMED["qwen-xml"], TOOLS)
    assert reader.push("See <function=") == [Saying("See")]
    assert reader.push("a ") == [Saying(" <function=a")]
    reader = AnswerReader(NAMED["llama"], TOOLS)
    assert reader.push('{"name"') == []
    assert reader.push(': "Bob"') == [Saying('{"name": "Bob"')]


@pytest.mark.parametrize("form", NAMED)
def test_without_tools_calls_are_text(form: str) -> None:
    text = written_calls(NAMED[form], [OSLO])
    found = heard(form, f"Look: {text}", tools=())
    assert found.calls == []
    if form != "harmony":  # whose ends of messages are no text
        assert found == Heard(text=f"Look: {text}")


@pytest.mark.parametrize("form", NAMED)
def test_a_call_that_is_cut_off_is_not_made_whole(form: str) -> None:
    """Whatever has been said so far is the beginning of the call, and never valid before its arguments end."""
    whole = written_calls(NAMED[form], [("weather", {"city": "Oslo", "days": 12})])
    begun = 0
    for end in range(len(whole) + 1):
        found = read_whole(AnswerReader(NAMED[form], TOOLS), [whole[:end]])
        if not found.calls:
            assert found.text.strip() == whole[:end].strip() or form == "harmony"
            continue
        begun += 1
        [(name, text)] = found.calls
        assert name == "weather"
        try:
            given = json.loads(text)
        except ValueError:
            continue
        assert given == {"city": "Oslo", "days": 12}
    assert begun > 10


@pytest.mark.parametrize(("form", "text", "said"), [
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": Oslo}}</tool_call> Done.', " Done."),
    ("deepseek", "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{'city': 1}<｜tool▁call▁end｜>Done.", "Done."),
    ("llama", '{"name": "weather", "parameters": {"city": Oslo}}', ""),
    ("harmony", "<|channel|>commentary to=functions.weather<|message|>print(1)<|end|>Done.", "Done."),
    ("gemma", "<|tool_call>call:weather{city:Oslo}<tool_call|>Done.", "Done."),
])
def test_arguments_that_are_broken_stay_with_their_call(form: str, text: str, said: str) -> None:
    """Its client says so to the model."""
    found = heard(form, text)
    [(name, given)] = found.calls
    assert name == "weather" and given
    with pytest.raises(ValueError):
        json.loads(given)
    assert found.text.strip() == said.strip()


def test_junk_between_arguments_in_tags_ends_the_call() -> None:
    found = heard("qwen-xml", "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\nand so on")
    assert found.parsed() == [OSLO]
    assert found.text == "and so on"


def test_only_what_follows_the_last_call_becomes_text() -> None:
    found = heard("hermes", '<tool_call>[{"name": "now", "arguments": {}}, {"nam": 1}]</tool_call>')
    assert found.parsed() == [NOW]
    assert "".join(found.text.split()) == ',{"nam":1}]</tool_call>'


@pytest.mark.parametrize(("form", "before", "between", "after"), [
    ("hermes", "I look.\n\n", "\n", "\n\nThere."), ("qwen-xml", "I look.\n", "\n", "\n"), ("glm", "I look.", "\n", " "),
])
def test_white_space_around_calls_is_the_formats(form: str, before: str, between: str, after: str) -> None:
    call = written_calls(NAMED[form], [NOW])
    found = heard(form, before + call + between + call + after)
    assert found.parsed() == [NOW, NOW]
    assert found.text == before.strip() + after.strip()


@pytest.mark.parametrize("form", NAMED)
def test_reasoning_text_and_calls_in_turn(form: str) -> None:
    known = NAMED[form]
    call = written_calls(known, [OSLO])
    if form == "harmony":
        text = f"<|channel|>analysis<|message|>Hm {call}<|end|>"  # a header in the reasoning begins a message
        text = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{call}"
    elif form == "llama":
        text = f"<think>\nHm.\n</think>\n\n{call}"
    else:
        text = f"<think>\nHm.\n</think>\n\nWait.\n{call}"
    found = heard(form, text)
    assert (found.thinking, found.parsed()) == ("Hm.", [OSLO])
    assert found.text == ("" if form in ("harmony", "llama") else "Wait.")


def test_a_call_in_the_reasoning_is_reasoning() -> None:
    assert heard("hermes", f"<think>I could {HERMES_CALL}</think>No.") == Heard(f"I could {HERMES_CALL}", "No.")


def test_pieces_come_as_soon_as_they_are_sure() -> None:
    reader = AnswerReader(NAMED["hermes"], TOOLS, opened=True)
    assert reader.push("Hm") == [Thinking("Hm")]
    assert reader.push(".\n</think>\n\n<tool") == [Thinking(".")]
    assert reader.push('_call>\n{"name": "weather", "arguments": ') == []
    assert reader.push('{"ci') == [CallBegins(0, "weather"), CallContinues(0, '{"ci')]
    assert reader.push('ty": "Os') == [CallContinues(0, 'ty": "Os')]
    assert reader.push('lo"}') == [CallContinues(0, 'lo"}')]
    assert reader.push("}\n</tool_call>") == reader.flush() == []
    reader = AnswerReader(NAMED["qwen-xml"], TOOLS)
    assert reader.push("<tool_call>\n<function=weather>\n") == [CallBegins(0, "weather")]
    assert reader.push("<parameter=city>\nOs") == [CallContinues(0, '{"city": "Os')]
    assert reader.push('lo "\n') == [CallContinues(0, 'lo \\"')]
    assert reader.push("</parameter>\n<parameter=days>\n1") == [CallContinues(0, '", "days": ')]
    assert reader.push("2\n</parameter>\n</function>") == [CallContinues(0, "12}")]


def test_an_id_tells_calls_apart() -> None:
    once = '<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>'
    assert heard("kimi", once * 2).ids == ["functions.now:0", None]


FRAGMENTS = sorted({
    " ", "\n", "{", "}", "[", "]", "(", ")", ",", ":", "=", '"', "'", "\\", "x", "weather", "now", "city", "1", "null",
    '"name"', '"arguments"', '"weather"', "{}", '{"name": "now", "arguments": ', "=weather>", "<parameter=city>",
    "</parameter>", "</function>", '<invoke name="', '">', "</invoke>", '<parameter name="', '" string="true">',
    '<|"|>', "<|message|>", " to=functions.now", "<|call|>", "<|start|>assistant", "analysis",
    '<｜DSML｜invoke name="', '<｜DSML｜parameter name="', "</｜DSML｜parameter>",
    *(text for form in FORMATS for text in (*form.tokens, *form.triggers, form.end, form.closing, form.opening,
                                            form.begin("now"), form.thinking.closing, *form.thinking.openings))} - {""})


@pytest.mark.parametrize("form", NAMED)
def test_any_text_is_read_alike_however_it_is_cut(form: str) -> None:
    """Texts of marks in any order: nothing fails, and no cut changes anything."""
    rng = random.Random(form)
    own = [text for text in FRAGMENTS if any(text in mark for mark in (
        *NAMED[form].triggers, NAMED[form].begin("now"), NAMED[form].end, NAMED[form].closing))] + ['{"name": "now"']
    for _ in range(100):
        text = "".join(rng.choice(own if rng.random() < 0.6 else FRAGMENTS) for _ in range(rng.randint(1, 14)))
        heard_of(form, text, rng.random() < 0.2)


def heard_of(form: str, text: str, opened: bool) -> None:
    found = [read_whole(AnswerReader(NAMED[form], TOOLS, opened=opened), pieces) for pieces in cut_anywhere(text, 6)]
    assert all(other == found[0] for other in found[1:]), text


def test_a_format_is_found_by_what_the_template_writes() -> None:
    assert format_of("{{ '<tool_call>' }}").name == "hermes"
    assert format_of("").needs_instructions and not format_of("<tool_call>").needs_instructions
    assert format_of("<｜tool▁calls▁begin｜> ```json").name == "deepseek-fenced"
    assert format_of("[TOOL_CALLS] [THINK]").thinking.closing == "[/THINK]"
