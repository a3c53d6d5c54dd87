"""The templates of real models over many conversations: the text is that of plain Jinja, set up as in transformers.

Some templates are in tests/data. A folder with more (SHARPI_SHARED, or "shared" beside the repository) is used if it
is at hand.
"""

from __future__ import annotations

import copy
import datetime
import json
import os
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import pytest
from jinja2.sandbox import SandboxedEnvironment

from sharpi.errors import InvalidRequestError
from sharpi.text.answers.markers import Markers
from sharpi.text.chat import ChatTemplate

SHARED = Path(os.environ.get("SHARPI_SHARED") or Path(__file__).parents[4] / "shared")
TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
FILES = sorted({path.name: path for folder in (SHARED / "templates", TEMPLATES)
                for path in folder.glob("*.jinja")}.values())

Messages = list[dict[str, Any]]
SYSTEM = {"role": "system", "content": "Be brief. <b>&\"'"}
ASKED = {"role": "user", "content": "Where is the <\u00e9> harbour?"}
SAID = {"role": "assistant", "content": "Down the hill."}
AGAIN = {"role": "user", "content": "And the\nlighthouse? "}
TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "The weather of a <city> & \"more\"",
        "parameters": {"type": "object", "required": ["city"], "properties": {
            "city": {"type": "string", "description": "Which \u00fc"}, "days": {"type": "integer", "default": 3},
            "units": {"type": "string", "enum": ["C", "F"]}, "flags": {"type": "array", "items": {"type": "string"}},
            "note": {"type": ["string", "null"]},
            "at": {"type": "object", "properties": {"hour": {"type": "number"}}, "required": ["hour"]}}}}},
    {"type": "function", "function": {"name": "now", "description": "The time",
                                      "parameters": {"type": "object", "properties": {}}}},
]


def called(*arguments: Any, content: str | None = "", **more: str) -> Messages:
    """An assistant's message that calls a tool with each of the arguments, and what the tool said."""
    ids = [f"call{index:05}" for index in range(len(arguments))]
    calls = [{"id": number, "type": "function", "function": {"name": "get_weather", "arguments": given}}
             for number, given in zip(ids, arguments, strict=True)]
    return [{"role": "assistant", "content": content, "tool_calls": calls, **more},
            *({"role": "tool", "content": '{"t": 5}', "tool_call_id": number, "name": "get_weather"} for number in ids)]


ARGUMENTS = {"city": "\u00dc", "days": 2}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "a question": {"messages": [ASKED]},
    "a question of nothing": {"messages": [{"role": "user", "content": ""}]},
    "a system message": {"messages": [SYSTEM, ASKED]},
    "a developer's message": {"messages": [{"role": "developer", "content": "Be brief."}, ASKED]},
    "several turns": {"messages": [SYSTEM, ASKED, SAID, AGAIN]},
    "several turns without a system message": {"messages": [ASKED, SAID, AGAIN]},
    "an answer at the end": {"messages": [ASKED, SAID], "add_generation_prompt": False},
    "two questions in a row": {"messages": [ASKED, AGAIN]},
    "an unknown role": {"messages": [{"role": "wizard", "content": "x"}]},
    "reasoning on": {"messages": [SYSTEM, ASKED, SAID, AGAIN], "enable_thinking": True},
    "reasoning off": {"messages": [SYSTEM, ASKED, SAID, AGAIN], "enable_thinking": False},
    "much reasoning": {"messages": [ASKED], "reasoning_effort": "high"},
    "reasoning of before": {"messages": [ASKED, {**SAID, "reasoning_content": "Hm. Down?"}, AGAIN]},
    "reasoning in the answer": {"messages": [ASKED, {**SAID, "content": "<think>\nHm.\n</think>\n\nDown."}, AGAIN]},
    "reasoning at the end": {"messages": [ASKED, {**SAID, "reasoning_content": "Hm."}], "add_generation_prompt": False},
    "tools": {"messages": [SYSTEM, ASKED], "tools": TOOLS},
    "tools without a system message": {"messages": [ASKED], "tools": TOOLS},
    "tools and reasoning": {"messages": [SYSTEM, ASKED], "tools": TOOLS, "enable_thinking": True},
    "built-in tools": {"messages": [ASKED], "builtin_tools": ["browser", "python"]},
    "a call": {"messages": [ASKED, *called(ARGUMENTS)], "tools": TOOLS},
    "a call in JSON": {"messages": [ASKED, *called(json.dumps(ARGUMENTS))], "tools": TOOLS},
    "a call without content": {"messages": [ASKED, *called(ARGUMENTS, content=None), SAID, AGAIN], "tools": TOOLS},
    "a call after reasoning": {"messages": [ASKED, *called(ARGUMENTS, reasoning_content="Look.")], "tools": TOOLS},
    "a call after thinking": {"messages": [ASKED, *called(ARGUMENTS, thinking="Look.")], "tools": TOOLS},
    "two calls": {"messages": [SYSTEM, ASKED, *called(ARGUMENTS, {"city": "B", "flags": ["x"], "at": {"hour": 1.5}},
                                                      content="I look.")], "tools": TOOLS},
    "a call at the end": {"messages": [ASKED, *called(ARGUMENTS)[:1]], "tools": TOOLS, "add_generation_prompt": False},
    "a call and its end": {"messages": [SYSTEM, ASKED, *called(ARGUMENTS), SAID], "tools": TOOLS,
                           "add_generation_prompt": False},
    "content in parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "One"},
                                                                   {"type": "text", "text": " two"}]}]},
    "a picture": {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]},
    "a date": {"messages": [ASKED], "date_string": "1 Jan 2026"},
}
# What a template may refuse, or fail on, without anything being wrong.
ODD = {"a developer's message", "two questions in a row", "an unknown role", "a call in JSON", "a call without content",
       "content in parts", "a picture", "a question of nothing"}


def plain_jinja(source: str) -> jinja2.Template:
    """Without our limits and rewriting. Any list may be changed, which Kimi's template does to its own."""
    environment = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
                separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment.from_string(source.replace("{% generation %}", "").replace("{% endgeneration %}", ""))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_templates_render_what_plain_jinja_renders(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class OneDay(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> OneDay:
            return cls(2026, 2, 3, 4, 5, 6)

    monkeypatch.setattr(datetime, "datetime", OneDay)
    source = path.read_text(encoding="utf-8")
    ours, plain = ChatTemplate(source, "<BOS>", "<EOS>"), plain_jinja(source)
    refused = set()
    for name, given in CONVERSATIONS.items():
        variables = {"add_generation_prompt": True, **given}
        try:
            expected = plain.render(bos_token="<BOS>", eos_token="<EOS>", **copy.deepcopy(variables))
        except Exception:
            refused.add(name)
            with pytest.raises(InvalidRequestError):
                ours.render(**copy.deepcopy(variables))
            continue
        assert ours.render(**copy.deepcopy(variables)) == expected, name
    assert len(CONVERSATIONS) - len(refused) > 12  # Gemma 2 has neither system messages nor tools
    if "tools" in source:
        assert refused - ODD <= {"two calls"}  # which Llama 3.1 has not learnt


@pytest.mark.parametrize(("name", "marks", "asked", "answers"), [
    ("google-gemma-4-31B-it", "<|channel>thought\n", {}, "<|turn>model\n<|channel>thought\n<channel|>"),
    ("google-gemma-4-31B-it", "<|channel>thought\n", {"enable_thinking": True}, "<|turn>model\n"),
    ("openai-gpt-oss-120b", "<|channel|>analysis<|message|>", {}, "<|start|>assistant"),
    ("mistralai-Ministral-3-14B-Reasoning-2512", "[THINK]", {}, "[/INST]"),
    ("Mistral-Small-3.2-24B-Instruct-2506", "<think>", {}, "[/INST]"),
    ("HuggingFaceTB-SmolLM3-3B", "<think>", {}, "<|im_start|>assistant\n"),
    ("microsoft-Phi-3.5-mini-instruct", "<think>", {}, "<|assistant|>\n"),
    ("Qwen3-Coder", "<think>", {}, "<|im_start|>assistant\n"),
])
def test_where_an_answer_begins_and_how_it_marks_its_reasoning(name: str, marks: str, asked: dict[str, Any],
                                                               answers: str) -> None:
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(source, "<BOS>", "<EOS>")
    prompt = template.render([ASKED, SAID, AGAIN], **asked)
    assert prompt.endswith(answers)
    markers = template.format.thinking
    assert markers == Markers.of(source) and markers.openings[0] == marks
    assert not markers.opened_by(prompt)
