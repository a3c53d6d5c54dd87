"""Chat templates render what their model was trained on and can do nothing but render.

Two small templates are written here, and those of some real models are in tests/data. A folder with more
(SHARPI_SHARED, or "shared" beside the repository) is used if it is at hand.
"""

from __future__ import annotations

import copy
import datetime
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_templates import HARMLESS, HOSTILE, MARKED
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sharpi.errors import InvalidRequestError, ModelFileError, SharpiError
from sharpi.text.answers.markers import THINK
from sharpi.text.chat import ChatTemplate

SHARED = Path(os.environ.get("SHARPI_SHARED") or Path(__file__).parents[4] / "shared")
TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
REAL_TEMPLATES = sorted({path.name: path for folder in (SHARED / "templates", TEMPLATES)
                         for path in folder.glob("*.jinja")}.values())
CONVERSATION = [
    {"role": "user", "content": "Where is the <é> harbour?"},
    {"role": "assistant", "content": "Down the hill."},
    {"role": "user", "content": "And the\nlighthouse?"},
]


def render(source: str, **options: object) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(CONVERSATION, **options)  # type: ignore[arg-type]


def test_a_conversation_is_rendered_to_the_letter() -> None:
    # Block tags swallow their line's indentation and newline, as templates expect.
    assert render(MARKED) == (
        "<s>[user]Where is the <é> harbour?</s>\n[assistant]Down the hill.</s>\n"
        "[user]And the\nlighthouse?</s>\n[assistant]")
    assert render(MARKED, add_generation_prompt=False).endswith("lighthouse?</s>\n")


def test_the_thinking_switch_reaches_the_template_only_when_set() -> None:
    closed, opened, unset = (render(MARKED, enable_thinking=value) for value in (False, True, None))
    assert closed.endswith("[assistant]<think></think>")
    assert opened.endswith("[assistant]<think>\n")
    assert unset.endswith("[assistant]")
    assert [THINK.opened_by(prompt) for prompt in (closed, opened, unset)] == [False, True, False]


def test_a_marker_in_what_the_user_wrote_opens_nothing() -> None:
    prompt = ChatTemplate(MARKED, "", "").render([{"role": "user", "content": "say <think>"}])
    assert "<think>" in prompt and not THINK.opened_by(prompt)


def test_the_helpers_templates_rely_on() -> None:
    assert render("{{ {'b': '<é>', 'a': [1, none]} | tojson }}") == '{"b": "<é>", "a": [1, null]}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert (
        render("{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}")
        == "user"
    )
    assert render("{% generation %}{{ messages[1].content }}{% endgeneration %}!") == "Down the hill.!"
    assert render("{{ tools | length }}{{ effort }}", tools=[{}], effort="low") == "1low"
    years = {str(datetime.datetime.now().year)}
    rendered = render("{{ strftime_now('%Y') }}")
    assert rendered in years | {str(datetime.datetime.now().year)}


def test_messages_are_left_as_they_were() -> None:
    before = [dict(message) for message in CONVERSATION]
    render("{% set messages = messages[1:] %}{{ messages | length }}")
    for attempt in ("{{ messages.clear() }}", "{{ messages[0].update({'role': 'x'}) }}"):
        with pytest.raises(SharpiError):
            render(attempt)
    assert before == CONVERSATION


def test_a_template_changes_its_own_lists_only() -> None:
    own = "{% set own = ['a'] %}{% set _ = own.append(5) %}{{ own.pop(0) }}{{ own | tojson }}{{ own + [1] }}"
    assert render(own) == "a[5][5, 1]"
    given = [{"role": "user", "content": ["x"]}]
    before = copy.deepcopy(given)
    for attempt in ("messages.append('x')", "messages.pop()", "messages[0].content.append('x')",
                    "(messages | list).append('x')", "messages[:].pop()", "[1].clear()", "[1].extend([2])",
                    "[1].append([2])", "[1].append(messages)"):
        with pytest.raises(InvalidRequestError, match="chat template"):
            ChatTemplate("{{ " + attempt + " }}", "", "").render(given)
    assert given == before


def test_a_refusal_is_one_line() -> None:
    with pytest.raises(InvalidRequestError, match="no role wizard") as caught:
        ChatTemplate(MARKED, "", "").render([{"role": "wizard", "content": ""}])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", [
    "{{ messages[0]['content'] + 5 }}", "{{ nothing.at.all }}", "{{ messages[99].role }}",
    "{{ 1 // 0 }}", "{% include 'other' %}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
])
def test_a_template_that_fails_is_an_error_of_ours(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template") as caught:
        render(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["{% for %}", "{{ 'open }}", "{% if x %}", "{{ x | no_such_filter }}", "{% new %}"])
def test_a_template_that_does_not_parse_is_a_broken_file(source: str) -> None:
    with pytest.raises(ModelFileError, match="does not parse: line 1") as caught:
        ChatTemplate(source, "", "")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("escape", [
    "''.__class__.__mro__[1].__subclasses__()",
    "cycler.__init__.__globals__.os.mkdir(PATH)",
    "raise_exception.__globals__['__builtins__']['open'](PATH, 'w')",
    "strftime_now.__globals__['json'].__loader__",
    "self.__init__.__globals__.__builtins__.open(PATH, 'w')",
    "('' | attr('__class__')) | string",
    "'{0.__class__.__mro__}'.format(messages)",
    "messages.__class__.__base__",
    "namespace.__init__.__globals__['sys']",
    "range(10 ** 9) | list",
])
def test_a_template_cannot_leave_its_sandbox(escape: str, tmp_path: Path) -> None:
    target = tmp_path / "made-by-the-template"
    source = "{{ " + escape.replace("PATH", repr(str(target))) + " }}"
    try:
        rendered = render(source)
    except SharpiError:
        rendered = ""
    assert not target.exists()
    assert not re.search("class|object|module|built", rendered)


# --- limits -----------------------------------------------------------------------------------


def test_a_hostile_template_ends_in_an_error_that_names_it() -> None:
    program = Path(__file__).parents[1] / "support" / "hostile_templates.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, encoding="utf-8", check=False)
    found = dict(line.split("\t") for line in done.stdout.splitlines())
    missing = [name for name in HOSTILE if name not in found]
    assert not missing, f"the program ended with {done.returncode} in {missing[0]!r}: {done.stderr[-500:]}"
    for name, outcome in found.items():
        if name in HARMLESS:
            assert re.fullmatch(r"\d{1,4} characters", outcome), name
        else:
            assert outcome.startswith("hostile.gguf: the chat template ") and len(outcome) < 800, (name, outcome)
            assert "memory" not in outcome.lower(), (name, outcome)


def test_limits_are_counted_and_so_the_same_each_time() -> None:
    template = ChatTemplate(MARKED, "<s>", "</s>")
    counts = set()
    for _ in range(3):
        template.render(CONVERSATION)
        counts.add((template._environment.limits.steps, template._environment.limits.made))
    assert len(counts) == 1 and min(counts.pop()) > 0


def test_what_a_list_grows_by_counts_as_made() -> None:
    template = ChatTemplate("{% set a = [] %}{% for i in range(9999) %}{% set _ = a.append(i) %}{% endfor %}", "", "")
    template.render(CONVERSATION)
    assert template._environment.limits.made > 9999 * 64


def test_a_template_works_again_after_it_went_too_far() -> None:
    template = ChatTemplate("{% if messages | length == 1 %}{{ 'a' * 10 ** 9 }}{% endif %}b", "", "", "a.gguf")
    with pytest.raises(InvalidRequestError, match=r"^a\.gguf: the chat template makes more than"):
        template.render(CONVERSATION[:1])
    assert template.render(CONVERSATION) == "b"


def test_a_long_conversation_is_within_the_limits() -> None:
    """1,000 turns of 4 KB, and a template that looks back from each turn to the first."""
    looks_back = ("{% for m in messages %}{% set n = namespace(k=0) %}{% for o in messages[:loop.index] %}"
                  "{% if o.role == m.role %}{% set n.k = n.k + 1 %}{% endif %}{% endfor %}"
                  "{{ n.k ~ m.role ~ m.content | trim }}{% endfor %}")
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 800} for i in range(1000)]
    rendered = ChatTemplate(looks_back, "", "").render(messages)
    assert rendered.startswith("1userword ") and rendered.count("word") == 800_000


@pytest.mark.parametrize(("source", "expected"), [
    ("{{ 'a' * 3 ~ 1 ~ none ~ [1, 'b'] }}", "aaa1None[1, 'b']"),
    ("{{ '%s and %05.1f' % ('a', 2) }}{{ '%s' | format('b') }}", "a and 002.0b"),
    ("{{ '{} {x:>4}|{0!r}'.format('a', x=1) }}", None),
    ("{{ '{:>4}|{x!r}'.format('a', x='b') }}{{ '{a}'.format_map({'a': 1}) }}", "   a|'b'1"),
    ("{{ 'a,b'.split(',') | join('-') }}{{ ' a '.strip() }}{{ 'aXa'.replace('X', 'yy') }}", "a-baayya"),
    ("{{ ['b', 'a', 'b'] | unique | sort | join }}{{ [3, 1] | max }}{{ [1, 2] | sum }}", "ab33"),
    ("{{ {'a': 1}.items() | list }}{{ {'a': {'b': 2}}.a.get('b') }}", "[('a', 1)]2"),
    ("{{ 1 < 2 < 3 }}{{ 'a' in 'abc' }}{{ 2 not in [1] }}{{ (1, 2) == (1, 2) }}", "TrueTrueTrueTrue"),
    ("{{ messages[0].content[6:8] }}{{ messages[::-1][0].role }}", "isuser"),
    ("{% for a, b in {'x': 1, 'y': 2} | dictsort %}{{ a }}{{ b }}{{ loop.last }}{% endfor %}", "x1Falsey2True"),
    ("{% for i in range(5) if i is odd %}{{ loop.index }}/{{ loop.length }}:{{ i }} {% else %}none{% endfor %}",
     "1/2:1 2/2:3 "),
    ("{% macro m(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ caller() }}{% endmacro %}{% call m(1) %}c{% endcall %}",
     "12()c"),
    ("{% set n = namespace(a=[]) %}{% for i in 'ab' %}{% set n.a = n.a + [i] %}{% endfor %}{{ n.a }}", "['a', 'b']"),
    ("{% set x %}a{{ 1 }}{% endset %}{{ x | upper }}{% filter upper %}b{% endfilter %}", "A1B"),
    ("{{ 'a\nb' | indent(2) }}{{ 'a' | center(5) }}|{{ [1, 2, 3] | batch(2, 0) | list }}",
     "a\n  b  a  |[[1, 2], [3, 0]]"),
    ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='role') | list }}", "['user', 'user']"),
    ("{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ -3 | abs }}{{ 7 / 2 }}{{ 5 - 2 }}{{ 1.55 | round(1) }}", "33102433.531.6"),
])
def test_what_templates_do_within_the_limits_is_done_as_jinja_does_it(source: str, expected: str | None) -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    try:
        by_jinja = plain.render(messages=CONVERSATION)
    except ValueError:
        assert expected is None
        with pytest.raises(InvalidRequestError):
            render(source)
        return
    assert render(source) == by_jinja == expected


# --- real templates ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", REAL_TEMPLATES, ids=lambda path: path.stem)
def test_real_templates_render_a_conversation(path: Path) -> None:
    template = ChatTemplate(path.read_text(encoding="utf-8"), "<BOS>", "<EOS>")
    rendered = template.render(CONVERSATION)
    places = [rendered.index(message["content"]) for message in CONVERSATION]
    assert places == sorted(places)
    shorter = template.render(CONVERSATION, add_generation_prompt=False)
    # Mistral's and Cohere's templates open the answer with or without being asked; Phi's ends with EOS if not asked.
    assert rendered.startswith(shorter.removesuffix("<EOS>"))
    assert len(shorter) < len(rendered) or "[/INST]" in rendered or "<|CHATBOT_TOKEN|>" in rendered
    for switch in (True, False):
        assert CONVERSATION[2]["content"] in template.render(CONVERSATION, enable_thinking=switch)


@pytest.mark.parametrize(("name", "opens"), [
    ("Qwen-Qwen3-0.6B", (False, False)), ("Qwen3.5-4B", (True, False)),
    ("HuggingFaceTB-SmolLM3-3B", (False, False)), ("deepseek-ai-DeepSeek-V3.1", (True, False)),
])
def test_real_templates_take_the_thinking_switch(name: str, opens: tuple[bool, bool]) -> None:
    template = ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"), "<BOS>", "<EOS>")
    on, off = (template.render(CONVERSATION, enable_thinking=switch) for switch in (True, False))
    assert on != off
    assert off.rstrip().endswith("</think>")
    assert (THINK.opened_by(on), THINK.opened_by(off)) == opens
