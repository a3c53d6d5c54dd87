"""What real templates write of an assistant's message, the reader reads back.

Some templates are in tests/data. A folder with more (SHARPI_SHARED, or "shared" beside the repository) is used if it
is at hand.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from answer_texts import Heard, Tool, cut_anywhere, read_whole, written_calls
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sharpi.text.answers.formats import format_of
from sharpi.text.answers.reader import AnswerReader
from sharpi.text.chat import ChatTemplate

SHARED = Path(os.environ.get("SHARPI_SHARED") or Path(__file__).parents[4] / "shared")
DATA = Path(__file__).parents[2] / "data" / "templates"

Calls = Sequence[tuple[str, Mapping[str, Any]]]


WEATHER = Tool("get_weather", {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}, "height": {"type": "number"}, "ok": {"type": "boolean"},
    "flags": {"type": "array", "items": {}}, "at": {"type": "object"}, "none": {"type": "null"}}})
NOW = Tool("now", {"type": "object", "properties": {}})
TOOLS = (WEATHER, NOW)
DESCRIBED = [{"type": "function", "function": {"name": tool.name, "description": "Does it.",
                                               "parameters": tool.parameters}} for tool in TOOLS]
ASKED = {"role": "user", "content": "Which weather?"}
ENDS = re.compile(r"<\|im_end\|>|\[e~\[|<EOS>|<｜end▁of▁sentence｜>|<turn\|>|<\|tool_response>|<\|end_of_text\|>"
                  r"|<\|eot_id\|>|<\|call\|>|<\|END_OF_TURN_TOKEN\|>|<\|observation\|>")


@dataclass(frozen=True)
class Known:
    """A template. format: how its calls are written. thinking, text: whether it writes these beside calls. several: it
    writes more than one call. exact: it writes calls to the letter as the format's data says."""

    format: str
    thinking: bool = True
    text: bool = True
    several: bool = True
    exact: bool = True


KNOWN = {
    "Qwen-Qwen3-0.6B": Known("hermes"),
    "ibm-granite-granite-4.0": Known("hermes", thinking=False),
    "Qwen3-Coder": Known("qwen-xml", thinking=False),
    "Qwen3.5-4B": Known("qwen-xml"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Known("qwen-xml"),
    "GLM-4.6": Known("glm"),
    "GLM-4.7-Flash": Known("glm-compact"),
    "MiniMax-M2": Known("minimax"),
    "deepseek-ai-DeepSeek-V3.1": Known("deepseek", thinking=False),
    "deepseek-ai-DeepSeek-V4": Known("dsml"),
    "deepseek-ai-DeepSeek-V4-Flash-0731": Known("dsml"),
    "Kimi-K2-Instruct": Known("kimi", thinking=False),
    "google-gemma-4-31B-it": Known("gemma"),
    "google-gemma-4-31B-it-interleaved": Known("gemma"),
    "mistralai-Ministral-3-14B-Reasoning-2512": Known("mistral", thinking=False),
    "unsloth-mistral-Devstral-Small-2507": Known("mistral", thinking=False),
    "Mistral-Small-3.2-24B-Instruct-2506": Known("mistral", thinking=False, text=False, exact=False),
    "mistralai-Mistral-Nemo-Instruct-2407": Known("mistral-array", thinking=False, text=False, exact=False),
    "meta-llama-Llama-3.1-8B-Instruct": Known("llama", thinking=False, text=False, several=False),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": Known("command", text=False, exact=False),
    "openai-gpt-oss-120b": Known("harmony", text=False, several=False, exact=False),
}
# Templates that know nothing of tools.
UNAWARE = ("HuggingFaceTB-SmolLM3-3B", "microsoft-Phi-3.5-mini-instruct", "google-gemma-2-2b-it")


def source_of(name: str) -> str:
    for folder in (DATA, SHARED / "templates"):
        if (path := folder / f"{name}.jinja").exists():
            return path.read_text(encoding="utf-8")
    pytest.skip("this template is not part of the repository")


class Rendered:
    """A template with a conversation's start, which renders answers. They begin where the prompt ends, or earlier
    where a template words the assistant's message and the beginning of one differently."""

    def __init__(self, name: str) -> None:
        source = source_of(name)
        self.format = format_of(source)
        self._harmony = self.format.name == "harmony"
        self._render = ChatTemplate(source, "<BOS>", "<EOS>").render
        self._prompts = [self._rendered([ASKED], True, thinks) for thinks in (True, False)]

    def _rendered(self, messages: list[dict[str, Any]], asks: bool, thinks: bool = True) -> str:
        return self._render(messages=messages, tools=DESCRIBED, add_generation_prompt=asks, enable_thinking=thinks)

    def answer(self, calls: Calls, thinking: str = "", text: str = "") -> tuple[str, bool]:
        """An assistant's message, and whether it begins in reasoning."""
        made = [{"id": f"call{index:05}", "type": "function", "function": {"name": name, "arguments": given}}
                for index, (name, given) in enumerate(calls)]
        message = {"role": "assistant", "content": text, "reasoning_content": thinking, "tool_calls": made}
        if self._harmony:
            message["thinking"] = message.pop("reasoning_content")
        whole = self._rendered([ASKED, message], False)
        begin = max(len(os.path.commonprefix([whole, prompt])) for prompt in self._prompts)
        answer = ENDS.split(whole[begin:])[0]
        return answer, self.format.thinking.opened_by(whole[:begin])

    def heard(self, answer: str, opened: bool, times: int = 20) -> Heard:
        """What is read of the answer, which no cut changes."""
        found = [read_whole(AnswerReader(self.format, TOOLS, opened=opened), pieces)
                 for pieces in cut_anywhere(answer, times)]
        assert all(heard == found[0] for heard in found[1:])
        return found[0]


@pytest.fixture(scope="module", params=KNOWN)
def rendered(request: pytest.FixtureRequest) -> tuple[Known, Rendered]:
    return KNOWN[request.param], Rendered(request.param)


CASES: dict[str, Calls] = {
    "text": [("get_weather", {"city": "Oslo"})],
    "nothing": [("now", {})],
    "marks": [("get_weather", {"city": "\"a\" <b> 'c' {d} [e] \\n \\ \n\t </b> é \U0001f600 ： 東京"})],
    "lines": [("get_weather", {"city": "\n\none\n two \n\n"})],
    "spaces": [("get_weather", {"city": "  x ", "days": 1})],
    "text like JSON": [("get_weather", {"city": "null"}), ("get_weather", {"city": "{\"a\": 1}"})],
    "empty": [("get_weather", {"city": "", "flags": [], "at": {}})],
    "all kinds": [("get_weather", {"city": "Å", "days": -3, "height": 1.5e-7, "ok": True, "none": None})],
    "nested": [("get_weather", {"flags": [1, [2, {"a": 0}], "x"], "at": {"b": {"c": ["é\n\"", {}]}}})],
    "nested words": [("get_weather", {"flags": [None, True, {"a": False}]})],
    "two": [("get_weather", {"city": "A", "days": 1}), ("now", {})],
    "three": [("now", {}), ("get_weather", {"days": 0, "city": "B"}), ("now", {})],
}


# Where a format's template writes it as no model would: Python's words and numbers, an empty line for no arguments.
OTHERWISE = {"qwen-xml": {"all kinds"}, "gemma": {"all kinds", "nested words"}, "dsml": {"nothing", "two", "three"}}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("beside", ["", "text", "thinking", "both"])
def test_an_assistants_message_is_read_back(rendered: tuple[Known, Rendered], case: str, beside: str) -> None:
    known, template = rendered
    calls = CASES[case] if known.several else CASES[case][:1]
    thinking = "Hm, I <look>.\nAnd?" if beside in ("thinking", "both") and known.thinking else ""
    text = "I'll see: {x}." if beside in ("text", "both") and known.text else ""
    answer, opened = template.answer(calls, thinking, text)
    heard = template.heard(answer, opened)
    assert heard.parsed() == [(name, dict(given)) for name, given in calls]
    assert (heard.thinking, heard.text) == (thinking, text)


@pytest.mark.parametrize("case", CASES)
def test_the_formats_data_says_what_the_template_writes(rendered: tuple[Known, Rendered], case: str) -> None:
    known, template = rendered
    calls = CASES[case] if known.several else CASES[case][:1]
    written = written_calls(template.format, calls)
    assert template.format.name == known.format
    assert written.startswith((*template.format.triggers, *template.format.starts))
    heard = template.heard(written, False)
    assert heard.parsed() == [(name, dict(given)) for name, given in calls]
    assert (heard.thinking, heard.text) == ("", "")
    if known.exact and case not in OTHERWISE.get(known.format, ()):
        assert written in template.answer(calls)[0]


# No text spells a control token, nor a tag that closes an argument: such a text has no place in most formats.
# (Hypothesis tries the strings that it finds in the code.)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(
    lambda text: not re.search(r"</|<\||\|>|<｜|<EOS>|\[e~\[", text))
WORDS = st.from_regex(r"[a-z_]{1,6}", fullmatch=True)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
NESTED = st.recursive(st.none() | st.booleans() | NUMBERS | TEXTS,
                      lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
                      max_leaves=8)
ARGUMENTS = st.fixed_dictionaries({}, optional={
    "city": TEXTS, "days": st.integers(), "height": NUMBERS, "ok": st.booleans(), "flags": st.lists(NESTED, max_size=3),
    "at": st.dictionaries(WORDS, NESTED, max_size=3)})


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given=st.lists(ARGUMENTS, min_size=1, max_size=3), cuts=st.randoms(use_true_random=False))
def test_any_arguments_are_read_back(rendered: tuple[Known, Rendered], given: list[dict[str, Any]],
                                     cuts: Any) -> None:
    known, template = rendered
    calls = [("get_weather", arguments) for arguments in given][:None if known.several else 1]
    answer, opened = template.answer(calls)
    places = sorted(cuts.choices(range(len(answer) + 1), k=9))
    pieces = [answer[a:b] for a, b in zip([0, *places], [*places, len(answer)], strict=True)]
    heard = read_whole(AnswerReader(template.format, TOOLS, opened=opened), pieces)
    assert heard.parsed() == calls
    assert heard.text == ""


def test_ids_are_the_models_own_where_its_format_has_them() -> None:
    calls = [("get_weather", {"city": "A"}), ("now", {})]
    for name, expected in (("Mistral-Small-3.2-24B-Instruct-2506", ["call00000", "call00001"]),
                           ("Kimi-K2-Instruct", ["functions.get_weather:0", "functions.now:1"]),
                           ("mistralai-Mistral-Nemo-Instruct-2407", [None, None]), ("GLM-4.6", [None, None])):
        template = Rendered(name)
        assert template.heard(*template.answer(calls)).ids == expected


@pytest.mark.parametrize("name", UNAWARE)
def test_a_template_without_tools_needs_instructions(name: str) -> None:
    form = format_of(source_of(name))
    assert (form.name, form.needs_instructions) == ("hermes", True)


def test_no_known_format_needs_instructions(rendered: tuple[Known, Rendered]) -> None:
    assert not rendered[1].format.needs_instructions
