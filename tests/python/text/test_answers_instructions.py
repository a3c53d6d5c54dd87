"""A template that knows nothing of tools still tells the model of them, and of what was called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from answer_texts import Tool, read_whole

from sharpi.text.answers.formats import HERMES
from sharpi.text.answers.instructions import instructed
from sharpi.text.answers.reader import AnswerReader
from sharpi.text.chat import ChatTemplate

TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
TOOL = {"type": "function", "function": {"name": "weather", "description": "É?", "parameters": {"type": "object"}}}
ASKED = {"role": "user", "content": "Where?"}


def called(*given: Any, content: str | None = None) -> list[dict[str, Any]]:
    calls = [{"id": str(at), "type": "function", "function": {"name": "weather", "arguments": arguments}}
             for at, arguments in enumerate(given)]
    return [{"role": "assistant", "content": content, "tool_calls": calls},
            *({"role": "tool", "tool_call_id": str(at), "content": f"{at} C"} for at in range(len(given)))]


def test_the_system_message_tells_of_the_tools() -> None:
    system, asked = instructed([ASKED], [TOOL])
    assert asked == ASKED and system["role"] == "system"
    assert json.dumps(TOOL, ensure_ascii=False) in system["content"] and "<tool_call>" in system["content"]
    first, asked = instructed([{"role": "system", "content": "Be brief."}, ASKED], [TOOL])
    assert first["content"] == f"Be brief.\n\n{system['content']}"
    [first] = instructed([{"role": "system", "content": "Be brief."}, ASKED], [TOOL], system=False)
    assert first == {"role": "user", "content": f"Be brief.\n\n{system['content']}\n\nWhere?"}


def test_calls_and_what_tools_answered_become_text() -> None:
    given = {"city": "Ü"}
    messages = [ASKED, *called(given, json.dumps(given), content="I look."), {"role": "assistant", "content": "1 C."},
                {"role": "user", "content": "Thanks."}]
    made = instructed(messages, [TOOL])
    assert [message["role"] for message in made] == ["system", "user", "assistant", "user", "assistant", "user"]
    heard = read_whole(AnswerReader(HERMES, [Tool("weather", {})]), [made[2]["content"]])
    assert heard.text == "I look." and [name for name, _ in heard.parsed()] == ["weather", "weather"]
    assert [given for _, given in heard.parsed()] == [given, given]
    assert made[3]["content"] == ("<tool_response>\n0 C\n</tool_response>\n<tool_response>\n1 C\n</tool_response>")
    assert made[4:] == messages[-2:]
    assert all("tool_calls" not in message for message in made)


def test_a_user_who_speaks_after_a_tool_does_not_speak_twice() -> None:
    made = instructed([ASKED, *called({}), {"role": "user", "content": "Well?"}], [TOOL])
    assert [message["role"] for message in made] == ["system", "user", "assistant", "user"]
    assert made[-1]["content"] == "<tool_response>\n0 C\n</tool_response>\n\nWell?"
    two = [ASKED, {"role": "user", "content": "And?"}]
    assert instructed(two, [TOOL])[1:] == two


@pytest.mark.parametrize("name", ["microsoft-Phi-3.5-mini-instruct", "HuggingFaceTB-SmolLM3-3B"])
def test_real_templates_show_the_model_all_of_it(name: str) -> None:
    template = ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"), "<BOS>", "<EOS>")
    assert template.format.needs_instructions
    prompt = template.render(instructed([ASKED, *called({"city": "Oslo"})], [TOOL]))
    for text in (json.dumps(TOOL, ensure_ascii=False), '{"name": "weather", "arguments": {"city": "Oslo"}}', "0 C"):
        assert text in prompt
    assert "weather" not in template.render([ASKED, *called({"city": "Oslo"}, content="")], tools=[TOOL])
