"""Answers that follow a grammar: JSON, a JSON schema, a Lark or GBNF grammar, a regular expression."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from sharpi.constraints.library import llguidance, parser_limits
from sharpi.constraints.tokens import Tokens, Words, empty
from sharpi.constraints.trial import try_grammar
from sharpi.errors import InvalidRequestError

__all__ = ["Format", "Grammar", "Matcher", "compile_format", "json_options"]

_LARGEST_SOURCE = 256 << 10
_LARGEST_GBNF = 32 << 10  # the interpreter takes up to half a second to convert it
_SLOWEST_MASK = 0.25  # seconds of a thread's own time


class Format(Protocol):
    """What an answer must look like (`OutputFormat` is one). kind: "json_object", "json_schema", "lark", "gbnf",
    "regex"."""

    @property
    def kind(self) -> str: ...

    @property
    def source(self) -> Mapping[str, Any] | str | bool | None: ...


def json_options(lenient: bool) -> dict[str, Any]:
    """How JSON is written. Between its parts stands what printers of JSON write: one space, or a new line with its
    indent. More would let a bad model fill its answer with white space. lenient: keywords that the library cannot
    enforce are ignored, not refused."""
    return {"whitespace_pattern": r"( |\n[ \t]{0,16})", "whitespace_flexible": True, "lenient": lenient,
            "coerce_one_of": lenient}


def compile_format(wanted: Format, tokens: Tokens, prefix: str = "") -> Grammar:
    """The grammar of such answers. It takes up to two seconds: call it from a thread that nobody waits for.

    prefix: Lark for what stands before the answer. Raises InvalidRequestError, whose one line says what is wrong with
    the source.
    """
    source = _library_grammar(wanted)
    if prefix:
        whole = {"name": "whole", "lark_grammar": f"start: {prefix} @answer"}
        source = json.dumps({"grammars": [whole, {**json.loads(source)["grammars"][0], "name": "answer"}]})
    return Grammar(source, tokens, _WHAT[wanted.kind])


_WHAT = {"json_object": "JSON object", "json_schema": "JSON schema", "lark": "Lark grammar",
         "gbnf": "GBNF grammar", "regex": "regular expression"}


def _library_grammar(wanted: Format) -> str:
    matcher, source = llguidance().LLMatcher, wanted.source
    what = _WHAT.get(wanted.kind)
    if what is None:
        raise InvalidRequestError(f"the format {wanted.kind!r} is unknown; known are {', '.join(_WHAT)}")
    if wanted.kind in ("lark", "gbnf", "regex"):
        if not isinstance(source, str) or not source:
            raise InvalidRequestError(f"a {what} must be a text that is not empty")
        _check_size(source, what)
        if wanted.kind == "regex":
            return _as_object(str(matcher.grammar_from_regex(source)))
        return _as_object(str(matcher.grammar_from_lark(source if wanted.kind == "lark" else _lark_of(source))))
    schema: Any = {"type": "object"} if wanted.kind == "json_object" else source
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        _check_size(text, what)
        schema = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError(f"the JSON schema is not JSON: {_one_line(str(error))}") from None
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequestError("a JSON schema must be an object")
    try:
        return _as_object(str(matcher.grammar_from_json_schema(text, overrides=json_options(lenient=False))))
    except ValueError as error:
        raise InvalidRequestError(f"the JSON schema cannot be used: {_one_line(str(error))}") from None


def _lark_of(gbnf: str) -> str:
    """The same grammar as Lark."""
    if len(gbnf) > _LARGEST_GBNF:
        raise InvalidRequestError(f"the GBNF grammar is larger than {_LARGEST_GBNF >> 10} KiB")
    converter = import_module(f"{llguidance().__name__}.gbnf_to_lark")
    try:
        return str(converter.gbnf_to_lark(gbnf))
    except RecursionError:
        raise InvalidRequestError("the GBNF grammar cannot be used: it is nested too deeply") from None
    except Exception as error:  # the converter raises that of all classes
        raise InvalidRequestError(f"the GBNF grammar cannot be used: {_one_line(str(error))}") from None


def _as_object(grammar: str) -> str:
    """The library writes a Lark grammar as it is, all others as an object."""
    return grammar if grammar.startswith('{"grammars"') else json.dumps({"grammars": [{"lark_grammar": grammar}]})


def _check_size(source: str, what: str) -> None:
    if len(source.encode(errors="replace")) > _LARGEST_SOURCE:
        raise InvalidRequestError(f"the {what} is larger than {_LARGEST_SOURCE >> 10} KiB")


def _one_line(text: str) -> str:
    """The library's message without the excerpt of the grammar that follows it."""
    text = text.replace("<non-verbose/>", "")
    told, _, excerpt = text.partition("regex parse error:")
    reasons = re.findall(r"^error: (.*)$", excerpt, re.MULTILINE)
    lines = [told.strip(), *reasons] if reasons else re.split(r"\n\s*\d+ \| ", text)[:1]
    line = " ".join(" ".join(lines).split())
    return line if len(line) <= 300 else line[:299] + "…"


class Grammar:
    """A compiled grammar. Each answer gets its own `Matcher`."""

    def __init__(self, source: str, tokens: Tokens, what: str) -> None:
        """source: what the library makes of a grammar. what: its name in messages. Raises InvalidRequestError."""
        self.tokens = tokens
        self.what = what
        limits, library, vocabulary = parser_limits(), llguidance(), tokens.prepare()
        try:
            try_grammar(source)
        except InvalidRequestError as error:
            raise self.error(f"cannot be used: {_one_line(str(error))}") from None
        self._compiled: Any = library.LLMatcher(vocabulary, source, log_level=0, limits=limits)
        self._check(self._compiled)
        words = np.zeros(tokens.width, np.uint32)
        self._compiled.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check(self._compiled)
        if empty(words):
            raise self.error("cannot be used: the model's vocabulary spells no answer that it allows")

    def _check(self, matcher: Any) -> None:
        if matcher.is_error():
            raise self.error(f"cannot be used: {_one_line(matcher.get_error())}")

    def error(self, told: str) -> InvalidRequestError:
        return InvalidRequestError(f"the {self.what} {told}")

    def start(self) -> Matcher:
        """The constraint of one answer."""
        return Matcher(self, self._compiled.deep_copy())


class Matcher:
    """A `Constraint` that follows one answer through a grammar.

    library: the grammar library's object, which the core calls itself where it can. width: the words of its masks.
    slowest_mask: seconds of a thread's own time.
    """

    slowest_mask = _SLOWEST_MASK

    def __init__(self, grammar: Grammar, library: Any) -> None:
        self._grammar = grammar
        self.library = library
        self.width = grammar.tokens.width

    def matcher(self) -> Matcher:
        return self

    def fill(self, words: Words) -> bool:
        began = time.thread_time()
        self.library.unsafe_compute_mask_ptr(words.ctypes.data, 4 * self.width)
        seconds = time.thread_time() - began
        words[self.width:] = 0
        self.check(empty(words), seconds)
        return True

    def check(self, is_empty: bool, seconds: float) -> None:
        """Raises InvalidRequestError if the last call failed. is_empty: it allowed no token. seconds: that it took."""
        if self.library.is_error():
            raise self._grammar.error(f"cannot be followed any further: {_one_line(self.library.get_error())}")
        if seconds > self.slowest_mask:
            raise self._grammar.error("is too complex: a step of it takes too long")
        if is_empty:
            raise self._grammar.error("leaves no token that the model's vocabulary can write")

    def accept(self, token: int) -> None:
        self.library.consume_token(token)
        self.check(False, 0.0)

    def accepts(self, text: bytes) -> bool:
        """Whether the answer may go on with this text, or with what begins so."""
        ids = self._grammar.tokens.encode(text)
        return bool(self.library.validate_tokens(ids) == len(ids))

    def accept_text(self, text: bytes) -> None:
        """The answer goes on with this text, whatever tokens spell it."""
        for token in self._grammar.tokens.encode(text):
            self.accept(token)

    def rollback(self, tokens: int) -> None:
        if tokens:
            self.library.rollback(tokens)
            self.check(False, 0.0)

    def ended(self) -> bool:
        """Nothing but an end token can follow."""
        return bool(self.library.is_stopped())

    def complete(self) -> bool:
        """The answer may end here."""
        return bool(self.library.is_accepting())
