"""From a conversation to the text a chat model expects.

A model file brings its chat template as a Jinja program written by whoever made the file.
It is run in Jinja's sandbox: it can build a string from the messages, and reach nothing else. What it may take of time
and memory is limited too (`template_limits`).
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from sharpi.errors import InvalidRequestError, ModelFileError, one_line
from sharpi.text.answers.formats import format_of
from sharpi.text.template_limits import MAX_DEPTH, Limits, TemplateLimitError
from sharpi.text.template_sandbox import MeteredEnvironment

_LONGEST_MESSAGE, _LONGEST_DATE = 500, 200


class ChatTemplate:
    """A compiled chat template. `bos_token` and `eos_token` are the texts of those tokens; errors name the `file`."""

    def __init__(self, source: str, bos_token: str, eos_token: str, file: str | os.PathLike[str] | None = None) -> None:
        """Raises ModelFileError if `source` does not parse, or is too large to be one."""
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self.format = format_of(source)  # how the model's answers are written
        # Whether the model may reason before it answers: one that does has a template that knows the marks.
        self.thinks = any(mark.rstrip() in source for mark in (*self.format.thinking.openings,
                                                               self.format.thinking.closing))
        self._name = "the chat template" if file is None else f"{os.fspath(file)}: the chat template"
        self._lock = threading.Lock()  # the environment counts for one rendering at a time
        self._environment = _make_environment()
        try:
            self._template = self._environment.program(source)
        except jinja2.TemplateSyntaxError as error:
            raise self._broken(f"does not parse: line {error.lineno}: {_one_line(error)}") from None
        except RecursionError:
            raise self._broken("does not parse: it nests too deeply") from None
        except TemplateLimitError as error:
            raise self._broken(str(error)) from None
        except Exception as error:  # a number of thousands of digits, more nested loops than Python takes, ...
            raise self._broken(f"does not parse: {_one_line(error)}") from None

    def _broken(self, what: str) -> ModelFileError:
        return ModelFileError(one_line(f"{self._name} {what}"))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        **extra: Any,
    ) -> str:
        """The prompt for `messages`, each {"role": ..., "content": ...}.

        enable_thinking: None leaves the choice to the template.
        extra: further variables for the template (`tools`, `reasoning_effort`, ...).
        Raises InvalidRequestError if the template refuses the conversation, fails on it, or goes beyond its limits
        (see `template_limits`).
        """
        variables = {**self._tokens, **extra, "messages": list(messages),
                     "add_generation_prompt": add_generation_prompt}
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        with self._lock:
            try:
                self._environment.limits.start(variables)
                return self._template.render(variables)
            except TemplateLimitError as error:
                what = f"{self._name} {error} on this conversation: it is broken, or the conversation far too long"
            except Exception as error:  # a template is a program: it can fail in any way a program can
                what = f"{self._name} failed on this conversation: {_one_line(error)}"
        # Not chained: the failure holds everything that the template has made.
        raise InvalidRequestError(one_line(what))


class Part(NamedTuple):
    """A piece of an answer: a part of the reasoning, which comes first, or of the text after it."""

    kind: Literal["thinking", "answer"]
    text: str


class _GenerationTag(jinja2.ext.Extension):
    """Lets `{% generation %}...{% endgeneration %}` pass: some templates mark answers with it."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _make_environment() -> MeteredEnvironment:
    """The surroundings that templates are written for, those of Hugging Face's transformers."""
    environment = MeteredEnvironment(trim_blocks=True, lstrip_blocks=True,
                                     extensions=[jinja2.ext.loopcontrols, _GenerationTag])
    environment.add_filter("tojson", functools.partial(_to_json, environment.limits))
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(limits: Limits, value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which no model was trained on.
    before = limits.steps
    characters = limits.measure(value)
    width = indent if isinstance(indent, int) else len(indent or "")
    spaces = max(0, width) * MAX_DEPTH + limits.measure(separators)
    limits.require(6 * characters + (limits.steps - before) * spaces)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > _LONGEST_DATE:
        raise jinja2.TemplateError("the date's format is too long")
    return datetime.datetime.now().strftime(pattern)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error)[:_LONGEST_MESSAGE].split())
    return text or type(error).__name__

