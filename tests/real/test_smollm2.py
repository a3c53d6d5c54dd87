"""SmolLM2-135M-Instruct as people use it: it answers, ends, and stops where it is told to.

What it says was the likeliest answer by a wide margin when it was written down: the questions are chosen so. A question
whose first tokens are equally likely ("What is the capital of France?") is answered differently by any two programs
that round differently.
"""

from __future__ import annotations

import numpy as np
import pytest
from asking import ANSWER, QUESTION, ask, prompt_ids, said

from sharpi import Model
from sharpi.text.chat import ChatTemplate

END_OF_TURN = 2  # <|im_end|>

# A list of settings, and the beginning of the edited list: from here on, every token is the likeliest by at least 0.6.
SETTINGS = [f"{part}.{key} = {value}" for part, keys in (
    ("server", {"host": "localhost", "port": 8080, "timeout": 30}),
    ("database", {"host": "localhost", "port": 5432, "user": "admin", "timeout": 30}),
    ("cache", {"host": "localhost", "port": 6379, "size": 1024, "timeout": 30})) for key, value in keys.items()]
EDITED = "\n".join(SETTINGS).replace("30", "60") + "\n"
BEGUN = EDITED[:EDITED.index(".timeout", EDITED.index("database"))]
EDITING = "```\n" + "\n".join(SETTINGS) + "\n```\n\nThe same settings with a timeout of 60:\n\n```\n" + BEGUN


def test_it_answers_and_ends_by_itself(model: Model) -> None:
    tokens = ask(model, QUESTION)
    assert said(tokens) == ANSWER
    ids = prompt_ids(model, QUESTION) + [token.id for token in tokens]
    assert END_OF_TURN not in ids[-len(tokens):], "an end token is not part of the answer"
    assert model.logits(ids)[-1].argmax() == END_OF_TURN, "and it is what ended this one"


def test_an_answer_without_its_end_token_goes_on(model: Model) -> None:
    longer = ask(model, QUESTION, logit_bias={END_OF_TURN: -np.inf}, max_tokens=12)
    assert len(longer) == 12 and said(longer).startswith(ANSWER)


def test_a_later_turn_knows_the_earlier_ones(model: Model) -> None:
    assert said(ask(model, QUESTION, ANSWER, "What about Italy?")) == "The capital of Italy is Rome."


@pytest.mark.parametrize("draft", ["off", "ngram"])
@pytest.mark.parametrize("stop, expected", [
    ([" Paris"], "The capital of France is"),
    ("capital of", "The "),
    (["Paris.", "France", "zebra"], "The capital of "),
    (["of France is P", "capital of Fr"], "The "),
    (["is Paris!", "Rome"], ANSWER),  # held back, and said after all
    (["The"], ""),
])
def test_stop_texts(stop: str | list[str], expected: str, draft: str, model: Model) -> None:
    assert said(ask(model, QUESTION, stop=stop, draft=draft)) == expected


def test_its_own_template_is_rendered(model: Model) -> None:
    assert model.chat_template is not None
    text = model.chat_template.render([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = model.tokenize(text, add_special=False, parse_special=True)
    assert [ids.count(token) for token in (1, END_OF_TURN)] == [3, 2]
    assert model.tokenizer.decode(ids) == text.replace("<|im_start|>", "").replace("<|im_end|>", "")


# The template of larger SmolLM2 models, which were trained to call functions. This file's own has no place for tools.
WITH_TOOLS = """{%- if tools %}{{- '<|im_start|>system\\nYou can call these functions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a <city> & its region",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def test_tools_are_rendered_and_reach_the_model(model: Model) -> None:
    messages = [{"role": "user", "content": "Will it rain in Oslo?"}]
    template = ChatTemplate(WITH_TOOLS, "<|im_start|>", "<|im_end|>")
    text = template.render(messages, tools=[WEATHER])
    assert text.startswith("<|im_start|>system\nYou can call these functions:\n<tools>\n{\"type\": \"function\"")
    assert "Weather in a <city> & its region" in text and text.endswith("<|im_start|>assistant\n")
    assert "get_weather" not in template.render(messages)
    ids = model.tokenize(text, add_special=False, parse_special=True)
    assert "get_weather" in model.detokenize(ids)
    answer = list(model.generate(ids, temperature=0.0, max_tokens=48))
    assert answer and END_OF_TURN not in [token.id for token in answer]


def test_ngram_drafts_on_an_editing_task(model: Model) -> None:
    """An edited text repeats itself, so most guesses are right. The speed depends on the machine, so it is printed."""
    ids = model.tokenize(EDITING)
    runs = {}
    for draft in ("off", "ngram"):
        tokens = list(model.generate(ids, temperature=0.0, max_tokens=96, stop="```", draft=draft))
        runs[draft] = tokens, model.stats()
    text, plain, drafted = said(runs["ngram"][0]), runs["off"][1], runs["ngram"][1]
    assert runs["ngram"][0] == runs["off"][0], "drafts decide how fast text comes, never which"
    assert BEGUN + text == EDITED
    assert drafted["acceptance_rate"] > 0.7 and drafted["steps"] < plain["steps"] / 2
    print(f"editing: {drafted['accepted_tokens']} of {drafted['drafted_tokens']} drafts accepted, {drafted['steps']} "
          f"steps for {plain['steps']}, {drafted['generation_tokens_per_second']:.1f} for "
          f"{plain['generation_tokens_per_second']:.1f} tokens/s")
