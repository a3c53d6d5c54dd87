"""`Model.chat` and `Session.chat`: what the model is given, what comes back, and what is refused.

The bundled model has no chat template, so it is given one here; everything else is real.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from sharpi import InvalidRequestError, Model, Reply
from sharpi.conversation import Conversation
from sharpi.files.gguf import GgufFile
from sharpi.files.metadata import Metadata
from sharpi.text.chat import Part

TEMPLATE = ("{% if tools is defined %}<tools>{{ tools | tojson }}\n{% endif %}"
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
            "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}")
HELLO = [{"role": "user", "content": "Hello"}]
FEW = {"max_tokens": 12, "temperature": 0.0}


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model.load(device="cpu", context=512, threads=1) as loaded:
        loaded.file = with_template(loaded.file, TEMPLATE)
        yield loaded


def with_template(file: GgufFile, template: str) -> GgufFile:
    """`file` as if it held `template`."""
    return replace(file, metadata=Metadata(file.paths[0], {**file.metadata, "tokenizer.chat_template": template}))


def text_after(model: Model, prompt: str) -> str:
    """What the model says after a prompt that is read as a rendered one is."""
    ids = model.tokenize(prompt, add_special=False, parse_special=True)
    return "".join(token.text for token in model.generate(ids, **FEW))


def test_an_answer_is_what_follows_the_rendered_messages(model: Model) -> None:
    reply = model.chat(HELLO, **FEW)
    assert isinstance(reply, Reply)
    parts = list(reply)
    assert parts and all(isinstance(part, Part) and part.kind == "answer" for part in parts)
    said = "".join(part.text for part in parts)
    assert said == text_after(model, "<user>Hello\n<assistant>") != ""
    assert reply.message == {"role": "assistant", "content": said.strip()}
    assert reply.stats()["generated_tokens"] == reply.timing.generated_tokens == 12


@pytest.mark.parametrize(("options", "prompt"), [
    ({"system": "Be brief."}, "<system>Be brief.\n<user>Hello\n<assistant>"),
    ({"thinking": False}, "<user>Hello\n<assistant>False"),
    ({"thinking": True}, "<user>Hello\n<assistant>True"),
    ({"tools": [{"name": "add"}]}, '<tools>[{"name": "add"}]\n<user>Hello\n<assistant>'),
])
def test_what_is_said_reaches_the_template(model: Model, options: dict, prompt: str) -> None:
    said = "".join(part.text for part in model.chat(HELLO, **options, **FEW))
    assert said == text_after(model, prompt)
    assert said != text_after(model, "<user>Hello\n<assistant>"), "the test must tell the prompts apart"


def test_a_session_computes_only_what_is_new(model: Model) -> None:
    session = model.session()
    messages: list[dict[str, str]] = list(HELLO)
    reply = session.chat(messages, **FEW)
    list(reply)
    held = len(session.tokens)
    messages += [reply.message, {"role": "user", "content": "And then?"}]
    further = session.chat(messages, **FEW)
    said = list(further)
    # The answer's text may be cut into other tokens than those that were drawn, and spaces around it are dropped.
    assert len(model.tokenize("<user>Hello\n<assistant>")) <= further.timing.reused_tokens <= held
    assert said == list(model.chat(messages, **FEW))


@pytest.mark.parametrize("mark", ["<think>", "<|channel>thought\n", "[THINK]", "<|channel|>analysis<|message|>"])
def test_reasoning_is_told_apart(mark: str, model: Model) -> None:
    model.file, kept = with_template(model.file, f"{TEMPLATE}{{{{ {mark!r} }}}}"), model.file
    try:
        reply = model.chat(HELLO, **FEW)
        assert {part.kind for part in reply} == {"thinking"}
        assert reply.message["content"] == "" and reply.message["reasoning_content"]
        conversation = Conversation(model, {"temperature": 0.0}, max_tokens=5)
        assert {part.kind for part in conversation.answer("Hello")} == {"thinking"}
    finally:
        model.file = kept


def test_a_reply_can_be_stopped(model: Model) -> None:
    with model.chat(HELLO, temperature=0.0) as reply:
        first = next(reply)
    assert list(reply) == [] and reply.message["content"] == first.text.strip()


def test_a_message_and_a_tool_cannot_spell_control_tokens(model: Model) -> None:
    control = model.tokenizer.token_text(model.tokenizer.eos_id)
    assert model.tokenize(control, parse_special=True) != model.tokenize(control)
    for messages in ([{"role": "user", "content": f"a{control}b"}], [{"role": "system", "content": control}, *HELLO]):
        with pytest.raises(InvalidRequestError, match=f"the {messages[0]['role']} message spells"):
            model.chat(messages)
    with pytest.raises(InvalidRequestError, match="tools spell"):
        model.chat(HELLO, tools=[{"name": control}])
    assert model.chat([*HELLO, {"role": "assistant", "content": control}, *HELLO])


def test_a_model_without_a_template_says_so(model: Model) -> None:
    with (Model.load(device="cpu", context=64, threads=1) as bare,
          pytest.raises(InvalidRequestError, match="no chat template")):
        bare.chat(HELLO)


def test_an_assistant_that_called_a_tool_needs_no_content(model: Model) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    assert model.chat([*HELLO, called, {"role": "tool", "content": "4"}])
