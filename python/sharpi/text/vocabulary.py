"""The vocabulary of a GGUF file: its tokens, what each stands for, and the ids with a role."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sharpi.errors import ModelFileError
from sharpi.files.metadata import Metadata, quoted
from sharpi.text.answers.formats import ANSWER_TOKENS

__all__ = ["BYTE", "BYTE_OF_CHAR", "CONTROL", "SILENT", "SPACE_MARK", "SPECIAL", "USER_DEFINED", "Vocabulary"]

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SILENT = (CONTROL, UNKNOWN)  # a meaning but no text
SPECIAL = (*SILENT, USER_DEFINED)  # spelled as they are, found before the text is cut

# Values of tokenizer.ggml.model.
_NO_TOKENIZER = (None, "none", "no_vocab")
_KNOWN = ("gemma4", "gpt2", "llama")

SPACE_MARK = "\u2581"  # how SentencePiece vocabularies write a space

# Tokens that end an answer whatever the file calls its end of text: files name one such
# token, while chat models are trained to end a turn with another.
_STOP_TEXTS = frozenset({
    "</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>",
    "<|eom|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>", "[EOT]", "[EOS]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "<turn|>", "<|tool_response>", "[e~[", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>",
})
# Models with these write an answer as several messages. There, <|end|> ends a message and not the answer.
_MESSAGES = frozenset({"<|return|>", "<|call|>", "<|end|>"})

# Further control tokens that tell the parts of an answer apart, of models that write several messages.
_SHOWN_OF_MESSAGES = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")

# A SentencePiece vocabulary with these (Phi 3) drops the white space behind its special tokens, except for some.
_STRIPPING = frozenset({"<|user|>", "<|assistant|>", "<|system|>", "<|end|>"})
_NOT_STRIPPING = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, as character -> byte.

    Printable Latin-1 stands for itself; the other bytes, in order, for U+0100 onwards.
    """
    itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return {chr(byte if byte in itself else next(others)): byte for byte in range(256)}


BYTE_OF_CHAR = _byte_alphabet()


@dataclass
class Vocabulary:
    """The tokens of one file with their types and scores, and the ids with a role. All that the metadata says is
    checked."""

    source: str  # names the file in messages
    kind: str  # "gpt2", "llama" or "gemma4"
    tokens: list[str]
    types: list[int]
    scores: list[float]
    id_of: dict[str, int] = field(repr=False)
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    stop_ids: frozenset[int] = frozenset()
    shown_ids: frozenset[int] = frozenset()  # control tokens that are text in an answer
    stripping_ids: frozenset[int] = frozenset()  # special tokens that drop white space behind them
    suppressed_ids: frozenset[int] = frozenset()  # must never be chosen

    @classmethod
    def read(cls, metadata: Metadata) -> Vocabulary:
        """Raises ModelFileError for a file without a tokenizer, with an unknown one, or with a broken one."""
        kind = metadata.get_str("tokenizer.ggml.model", None)
        if kind in _NO_TOKENIZER:
            raise metadata.error("the file has no tokenizer, so it only takes token ids")
        if kind not in _KNOWN:
            raise metadata.error(f"unknown tokenizer.ggml.model {quoted(kind)}; known are {', '.join(_KNOWN)}")
        tokens = list(metadata.get_strings("tokenizer.ggml.tokens", ()))
        if not tokens:
            raise metadata.error("tokenizer.ggml.tokens is missing or empty")
        types = _numbers(metadata, "token_type", metadata.get_ints, len(tokens)) or [NORMAL] * len(tokens)
        scores = _numbers(metadata, "scores", metadata.get_floats, len(tokens))
        if kind == "llama" and not scores:
            raise metadata.error("tokenizer.ggml.scores is missing, which the tokenizer model llama needs")
        if any(score != score for score in scores):
            raise metadata.error("tokenizer.ggml.scores holds a NaN")
        vocabulary = cls(str(metadata.path), kind, tokens, types, scores, _index_tokens(tokens, metadata))
        vocabulary._read_roles(metadata)
        vocabulary._find_stripping()
        suppressed = metadata.get_ints("tokenizer.ggml.suppress_tokens", None)
        if suppressed is not None:  # ids that are not there cannot be chosen anyway
            vocabulary.suppressed_ids = frozenset(token for token in suppressed.tolist() if 0 <= token < len(tokens))
        return vocabulary

    def _read_roles(self, metadata: Metadata) -> None:
        defaults = {"bos": 1, "eos": 2, "unknown": 0} if self.kind == "llama" else {}

        def role(name: str) -> int | None:
            key = f"tokenizer.ggml.{name}_token_id"
            token = metadata.get_int(key, None)
            if token is None:
                token = defaults.get(name)
                return token if token is not None and token < len(self.tokens) else None
            if not 0 <= token < len(self.tokens):
                raise metadata.error(f"{key} is {token}, but the vocabulary has {len(self.tokens)} tokens")
            return token

        self.bos_id, self.eos_id, self.unk_id = role("bos"), role("eos"), role("unknown")
        stops = {token for name in ("eos", "eot", "eom") if (token := role(name)) is not None}
        tags = {"</s>"} if "<eos>" in self.id_of else set()  # Gemma's is HTML
        for text in _STOP_TEXTS - tags:
            token = self.id_of.get(text)
            # A normal token that merely reads like one ("</s>" in a web vocabulary) is text.
            if token is not None and self.types[token] in (CONTROL, USER_DEFINED):
                stops.add(token)
                self.types[token] = CONTROL
        shown = ANSWER_TOKENS
        if {self.tokens[token] for token in stops} >= _MESSAGES:
            stops.discard(self.id_of["<|end|>"])
            shown += _SHOWN_OF_MESSAGES
        self.stop_ids = frozenset(stops)
        self.shown_ids = frozenset(token for text in shown if (token := self.id_of.get(text)) is not None)

    def _find_stripping(self) -> None:
        if self.kind == "llama" and self.id_of.keys() >= _STRIPPING:
            self.stripping_ids = frozenset(token for text, token in self.id_of.items()
                                           if self.types[token] in SPECIAL and text not in _NOT_STRIPPING)

    def pieces(self) -> list[bytes]:
        """The bytes each token stands for."""
        return [self._piece(text, kind) for text, kind in zip(self.tokens, self.types, strict=True)]

    def _piece(self, text: str, kind: int) -> bytes:
        if kind == BYTE:
            match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)
            if match is None:
                raise ModelFileError.about(self.source, f"the byte token {quoted(text)} does not read <0xNN>")
            return bytes([int(match[1], 16)])
        if kind in SPECIAL:
            return text.encode("utf-8")
        if self.kind != "gpt2":
            return text.replace(SPACE_MARK, " ").encode("utf-8")
        try:
            return bytes([BYTE_OF_CHAR[char] for char in text])
        except KeyError:  # not written in the byte alphabet: added later, as plain text
            return text.encode("utf-8")


def _numbers(metadata: Metadata, name: str, get: Callable[..., Any], count: int) -> list[Any]:
    """The array of one number for each token, read with `get`; empty if the file has none."""
    key = f"tokenizer.ggml.{name}"
    values = get(key, None)
    if values is None or not len(values):
        return []
    if len(values) != count:
        raise metadata.error(f"{key} has {len(values)} entries for {count} tokens")
    return values.tolist()


def _index_tokens(tokens: list[str], metadata: Metadata) -> dict[str, int]:
    id_of = {text: token for token, text in enumerate(tokens) if text}
    if len(id_of) + tokens.count("") != len(tokens):
        first: dict[str, int] = {}
        for token, text in enumerate(tokens):
            if text and first.setdefault(text, token) != token:
                raise metadata.error(f"tokens {first[text]} and {token} are both {quoted(text)}")
    return id_of
