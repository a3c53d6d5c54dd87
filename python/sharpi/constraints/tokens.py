"""A model's vocabulary as constraints need it."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from sharpi.constraints.library import llguidance
from sharpi.errors import InvalidRequestError, SharpiError
from sharpi.text.tokenizer import Tokenizer

__all__ = ["Tokens", "Words", "allows", "empty"]

Words = npt.NDArray[np.uint32]

_SPACE = b" \t\r\n"


class Tokens:
    """The bytes that each token adds to an answer, and the tokens that end one.

    Build one for each model and keep it: `prepare` takes about a second for 150,000 tokens, and is called by the first
    grammar. Threads may share it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.pieces = tokenizer.answer_pieces()
        self.end_ids = tuple(sorted(tokenizer.stop_ids))
        self._lock = threading.Lock()
        self._library: Any = None
        self._around: dict[bytes, list[tuple[int, bytes]]] = {}

    @cached_property
    def end_texts(self) -> frozenset[str]:
        """How the file spells the tokens that end an answer."""
        return frozenset(map(self._tokenizer.token_text, self.end_ids))

    @property
    def count(self) -> int:
        return len(self.pieces)

    @property
    def width(self) -> int:
        """The words of a mask. A model may have more logits: masks forbid those."""
        return (len(self.pieces) + 31) // 32

    def prepare(self) -> Any:
        """The library's own tokenizer, which it builds if that has not been done. Raises InvalidRequestError if the
        library is missing or the vocabulary has no end token."""
        with self._lock:
            if self._library is None:
                if not self.end_ids:
                    raise InvalidRequestError("the model's vocabulary has no end token, which a grammar needs")
                _ = self._sorted, self._longest, self.spaces, self.ends  # not while a step waits for a mask
                self._library = llguidance().LLTokenizer(_Described(self), eos_token=list(self.end_ids))
            return self._library

    def piece(self, token: int) -> bytes:
        """The bytes that the token adds to an answer; none for a control token."""
        return (self.pieces[token] or b"") if token < len(self.pieces) else b""

    def mask(self, ids: Iterable[int]) -> Words:
        """The words in which these tokens have a 1."""
        bits = np.zeros(self.width * 32, np.uint8)
        bits[list(ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    @cached_property
    def ends(self) -> Words:
        return self.mask(self.end_ids)

    @cached_property
    def spaces(self) -> Words:
        """Tokens that are white space alone."""
        return self.mask(token for token, piece in enumerate(self.pieces) if piece and not piece.strip(_SPACE))

    def going_on_after(self, text: bytes) -> list[tuple[int, bytes]]:
        """Tokens that have this text inside, and what they say after it. The first call for a text takes 20 ms."""
        if text not in self._around:
            found = ((token, piece.partition(text)) for token, piece in enumerate(self.pieces) if piece)
            self._around[text] = [(token, rest) for token, (_, separator, rest) in found if separator and rest]
        return self._around[text]

    def beginning_with(self, text: bytes) -> Sequence[int]:
        """Tokens that begin with this text and go on after it."""
        order, sorted_pieces = self._sorted
        begin = bisect_left(sorted_pieces, text)
        found = []
        while begin < len(order) and sorted_pieces[begin].startswith(text):
            if len(sorted_pieces[begin]) > len(text):
                found.append(order[begin])
            begin += 1
        return found

    def begun_by(self, text: bytes) -> list[int]:
        """Tokens with which this text begins."""
        return [self._ids[text[:end]] for end in range(1, len(text) + 1) if text[:end] in self._ids]

    @cached_property
    def _sorted(self) -> tuple[list[int], list[bytes]]:
        order = sorted((token for token, piece in enumerate(self.pieces) if piece), key=self.piece)
        return order, [self.piece(token) for token in order]

    def encode(self, text: bytes) -> list[int]:
        """Tokens that spell this text: as the model was taught to cut it, if that spells it exactly."""
        try:
            whole = text.decode()
            for special in (True, False):
                ids = self._tokenizer.encode(whole, add_special=False, parse_special=special)
                if b"".join(self.pieces[token] or b"\xff" for token in ids) == text:
                    return ids
        except (SharpiError, UnicodeDecodeError):
            pass  # spelled below, as far as the vocabulary can
        return self._longest_first(text)

    def _longest_first(self, text: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            token, size = next(((self._ids[text[at:end]], end - at)
                                for end in range(min(len(text), at + self._longest), at, -1)
                                if text[at:end] in self._ids), (None, 1))
            if token is None:
                break
            ids.append(token)
            at += size
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {piece: token for token, piece in reversed(list(enumerate(self.pieces))) if piece}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)


class _Described:
    """A vocabulary in the shape that the library reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Tokens) -> None:
        self._encode = tokens.encode
        self.eos_token_id = tokens.end_ids[0]
        self.special_token_ids = [token for token, piece in enumerate(tokens.pieces) if piece is None]
        # The library's names of special tokens must differ, and no grammar is to spell one.
        self.tokens = [f"<[{token}]>".encode() if piece is None else piece for token, piece in enumerate(tokens.pieces)]

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text.encode() if isinstance(text, str) else text)


def allows(words: Words, token: int) -> bool:
    return bool(words[token >> 5] >> np.uint32(token & 31) & 1)


def empty(words: Words) -> bool:
    return not words.any()
