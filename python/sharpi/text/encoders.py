"""From text without special tokens to ids: byte pair encoding by merges, and by scores."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from sharpi.errors import InvalidRequestError, ModelFileError
from sharpi.files.metadata import quoted
from sharpi.text.pretokenizers import PreTokenizer
from sharpi.text.vocabulary import BYTE, BYTE_OF_CHAR, SILENT, SPACE_MARK, Vocabulary

__all__ = ["ByteLevelEncoder", "CharacterEncoder", "Encoder", "ScoreEncoder"]


class Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


class _MergeEncoder:
    """A list of merges, which `tokenizers` applies in their order to the symbols of each word."""

    def __init__(self, vocabulary: Vocabulary, merges: Iterable[str], **options: Any) -> None:
        # Imported here: a model that only takes ids needs no tokenizer library.
        from tokenizers import Tokenizer, models

        self._source = vocabulary.source
        # Control tokens stay out, so that no text can merge or be looked up into one.
        self._words = {text: token for text, token in vocabulary.id_of.items()
                       if vocabulary.types[token] not in (*SILENT, BYTE)}
        pairs = list(self._parse_merges(merges, vocabulary.id_of))
        # Only bytes of unknown characters are looked up among byte tokens; no merge makes one.
        self._byte_ids = {text: token for text, token in vocabulary.id_of.items() if vocabulary.types[token] == BYTE}
        words = {**self._words, **self._byte_ids} if options.get("byte_fallback") else self._words
        self._tokenizer = Tokenizer(models.BPE(words, pairs, **options))

    def _parse_merges(self, merges: Iterable[str], known: dict[str, int]) -> Iterator[tuple[str, str]]:
        """The pairs that text may join."""
        words = self._words
        for rank, merge in enumerate(merges):
            left, _, right = merge.partition(" ")
            if left in words and right in words and left + right in words and " " not in right:
                yield left, right
            elif not left or not right or " " in right:
                raise ModelFileError.about(self._source, f"merge {rank}, {quoted(merge)}, is not two tokens")
            elif left not in known or right not in known or left + right not in known:
                raise ModelFileError.about(self._source, f"merge {rank}, {quoted(merge)}, names or makes "
                                     "a token the vocabulary lacks")

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _refuse_lost(self, lost: Iterable[int]) -> None:
        """The library drops what has no symbol in silence; text must not vanish."""
        if lost:
            raise InvalidRequestError(f"the text holds byte 0x{min(lost):02X}, for which the "
                                      f"vocabulary of {self._source} has no token")


class ByteLevelEncoder(_MergeEncoder):
    """Merges on the bytes of words, written in GPT-2's alphabet."""

    def __init__(self, vocabulary: Vocabulary, merges: Iterable[str], pre: PreTokenizer) -> None:
        from tokenizers import Regex, pre_tokenizers

        super().__init__(vocabulary, merges, ignore_merges=pre.whole_words)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])
        self._missing = frozenset(range(256)) - {BYTE_OF_CHAR[c] for c in self._words if c in BYTE_OF_CHAR}

    def encode(self, text: str) -> list[int]:
        if self._missing:
            self._refuse_lost(self._missing.intersection(text.encode()))
        return self._ids(text)


class CharacterEncoder(_MergeEncoder):
    """Merges on the characters of a text, with spaces as SentencePiece writes them; unknown characters become bytes.

    The text is cut only around runs of newlines. No token holds a newline and anything else, so this changes no ids.
    """

    def __init__(self, vocabulary: Vocabulary, merges: Iterable[str]) -> None:
        from tokenizers import Regex, pre_tokenizers

        super().__init__(vocabulary, merges, byte_fallback=True)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
        self._missing = frozenset(byte for byte in range(256) if f"<0x{byte:02X}>" not in self._byte_ids)

    def encode(self, text: str) -> list[int]:
        text = text.replace(" ", SPACE_MARK)
        if self._missing:
            unknown = "".join(set(text) - self._words.keys())
            self._refuse_lost(self._missing.intersection(unknown.encode()))
        return self._ids(text)


class ScoreEncoder:
    """SentencePiece BPE: join the adjacent pair whose joined token scores highest."""

    _CACHED_WORDS = 1 << 16

    def __init__(self, vocabulary: Vocabulary, pieces: Sequence[bytes]) -> None:
        self._source = vocabulary.source
        self._score = vocabulary.scores
        self._unk_id = vocabulary.unk_id
        # Text must spell neither a control token nor a byte token.
        self._id_of = {text: token for text, token in vocabulary.id_of.items()
                       if vocabulary.types[token] not in (*SILENT, BYTE)}
        self._byte_id = {pieces[token][0]: token for token, kind in enumerate(vocabulary.types) if kind == BYTE}
        # If two characters never meet inside a token, no merge can join them: the text may be
        # cut there, and words that come again are looked up.
        self._joints = {pair for text in self._id_of for pair in map(str.__add__, text, text[1:])}
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in self._words(text.replace(" ", SPACE_MARK)):
            known = self._cache.get(word)
            if known is None:
                known = self._merge(word)
                if len(self._cache) >= self._CACHED_WORDS:
                    self._cache.clear()
                self._cache[word] = known
            ids += known
        return ids

    def _words(self, text: str) -> Iterator[str]:
        joints = self._joints
        start = 0
        for at in range(1, len(text)):
            if text[at - 1:at + 1] not in joints:
                yield text[start:at]
                start = at
        if text:
            yield text[start:]

    def _merge(self, word: str) -> list[int]:
        """Symbols are spans of `word`; a span's start is its name."""
        size = len(word)
        end = list(range(1, size + 1))  # of the symbol starting here; 0 once swallowed
        before = list(range(-1, size - 1))
        queue: list[tuple[float, int, int, int]] = []

        def offer(left: int, right: int) -> None:
            token = self._id_of.get(word[left:end[right]])
            if token is not None:
                heapq.heappush(queue, (-self._score[token], left, right, end[right]))

        for at in range(size - 1):
            offer(at, at + 1)
        while queue:
            _, left, right, stop = heapq.heappop(queue)
            if end[left] != right or end[right] != stop:  # either was merged since
                continue
            end[left], end[right] = stop, 0
            if stop < size:
                before[stop] = left
                offer(left, stop)
            if before[left] >= 0:
                offer(before[left], left)

        ids: list[int] = []
        at = 0
        while at < size:
            ids += self._symbol(word[at:end[at]])
            at = end[at]
        return ids

    def _symbol(self, text: str) -> list[int]:
        token = self._id_of.get(text)
        if token is not None:
            return [token]
        try:
            return [self._byte_id[byte] for byte in text.encode()]
        except KeyError:
            if self._unk_id is None:
                raise InvalidRequestError(f"the vocabulary of {self._source} has no token for "
                                          f"{text!r}") from None
            return [self._unk_id]
