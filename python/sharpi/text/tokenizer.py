"""Text to token ids and back, from a GGUF file's own vocabulary.

Two families exist in the files we run. Byte-level BPE ("gpt2") is handed to Hugging Face's
`tokenizers`, with the pre-tokenizer the file names. SentencePiece ("llama") has no list of
merges: adjacent symbols join in the order of the joined token's score, the leftmost first
where scores tie. A merge list cannot say "the leftmost first" (runs of spaces show the
difference), so that family is merged here, on pieces of text which no token can straddle.

Special tokens are found before either runs, so that text of unknown origin can be encoded
without ever becoming one. Decoding works on bytes: a character spread over several tokens is
never broken.
"""

from __future__ import annotations

import codecs
import heapq
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sharpi.errors import InvalidRequestError, ModelFileError
from sharpi.files.metadata import Metadata, quoted

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_SILENT = (CONTROL, UNKNOWN)  # a meaning but no text
_SPECIAL = (*_SILENT, USER_DEFINED)  # spelled as they are, found before the text is cut

_NO_TOKENIZER = (None, "none", "no_vocab")  # values of tokenizer.ggml.model

SPACE_MARK = "\u2581"  # how SentencePiece vocabularies write a space

# Tokens that end an answer whatever the file calls its end of text: files name one such
# token, while chat models are trained to end a turn with another.
_STOP_TEXTS = frozenset({
    "</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>",
    "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>", "[EOT]",
    "[EOS]", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>",
})


# ---------------------------------------------------------------------------------------------
# Pre-tokenizers: how byte-level BPE cuts text into words before merging.


@dataclass(frozen=True)
class PreTokenizer:
    """Patterns applied one after another; each isolates its matches and leaves the gaps.

    `whole_words`: a word that is itself a token is taken as it is, without merging.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _gpt4_like(digits: str, marks: str = "") -> str:
    """The pattern most models since 2023 share; they differ in digits and combining marks."""
    letters = rf"[\p{{L}}{marks}]+" if marks else r"\p{L}+"
    return (rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}"
            rf"| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}")


def _case_aware(digits: str, contraction: str = "") -> str:
    """The o200k family: a word is capitals then small letters, or capitals alone."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return (f"{lead}{upper}*{lower}+{contraction}|{lead}{upper}+{lower}*{contraction}|{digits}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}")


_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES_AND_SPACES}",
)
_DEEPSEEK_CODER = (
    r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}",
)

# The names are those of tokenizer.ggml.pre. Only what its publisher's own tokenizer
# file or llama.cpp's table spells out is listed: a near miss gives wrong ids in silence.
_PRETOKENIZERS: dict[str, PreTokenizer] = {}
for _names, _pretokenizer in (
    ("gpt-2 phi-2 mpt olmo jais trillion exaone4", PreTokenizer((_GPT2,))),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b",
     PreTokenizer((r"\p{N}", _GPT2))),
    ("llama-bpe llama3 llama-v3 falcon3 pixtral lfm2",
     PreTokenizer((_gpt4_like(r"\p{N}{1,3}"),), whole_words=True, add_bos=True)),
    ("dbrx smaug-bpe glm4 chatglm-bpe", PreTokenizer((_gpt4_like(r"\p{N}{1,3}"),))),
    ("qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan", PreTokenizer((_gpt4_like(r"\p{N}"),))),
    ("qwen35", PreTokenizer((_gpt4_like(r"\p{N}", marks=r"\p{M}"),))),
    ("tekken", PreTokenizer((_case_aware(r"\p{N}"),), whole_words=True, add_bos=True)),
    ("gpt-4o llama4", PreTokenizer((_case_aware(r"\p{N}{1,3}", _CONTRACTION + "?"),))),
    ("deepseek-v3 hunyuan-dense", PreTokenizer(_DEEPSEEK3)),
    ("deepseek-coder", PreTokenizer(_DEEPSEEK_CODER)),
):
    _PRETOKENIZERS.update(dict.fromkeys(_names.split(), _pretokenizer))


def _find_pretokenizer(metadata: Metadata) -> PreTokenizer:
    name = metadata.get_str("tokenizer.ggml.pre", None)
    if name in _PRETOKENIZERS:
        return _PRETOKENIZERS[name]
    said = "names no pre-tokenizer" if name is None else f"names the unknown pre-tokenizer {quoted(name)}"
    raise metadata.error(f"tokenizer.ggml.pre {said}; known are {', '.join(sorted(_PRETOKENIZERS))}")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, as character -> byte.

    Printable Latin-1 stands for itself; the other bytes, in order, for U+0100 onwards.
    """
    itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return {chr(byte if byte in itself else next(others)): byte for byte in range(256)}


_BYTE_OF_CHAR = _byte_alphabet()


# ---------------------------------------------------------------------------------------------
# The vocabulary: everything the metadata says, checked.


@dataclass
class Vocabulary:
    """The tokens of one file with their types and scores, and the ids with a role."""

    source: str  # names the file in messages
    kind: str  # "gpt2" or "llama"
    tokens: list[str]
    types: list[int]
    scores: list[float]
    id_of: dict[str, int] = field(repr=False)
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    stop_ids: frozenset[int] = frozenset()

    @classmethod
    def read(cls, metadata: Metadata) -> Vocabulary:
        """Raises ModelFileError for a file without a tokenizer, with an unknown one, or with a broken one."""
        kind = metadata.get_str("tokenizer.ggml.model", None)
        if kind in _NO_TOKENIZER:
            raise metadata.error("the file has no tokenizer, so it only takes token ids")
        if kind not in ("gpt2", "llama"):
            raise metadata.error(f"unknown tokenizer.ggml.model {quoted(kind)}; known are gpt2, llama")
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
        for text in _STOP_TEXTS:
            token = self.id_of.get(text)
            # A normal token that merely reads like one ("</s>" in a web vocabulary) is text.
            if token is not None and self.types[token] in (CONTROL, USER_DEFINED):
                stops.add(token)
                self.types[token] = CONTROL
        texts = {self.tokens[token] for token in stops}
        if {"<|return|>", "<|call|>", "<|end|>"} <= texts:  # there <|end|> only ends one message
            stops.discard(self.id_of["<|end|>"])
        self.stop_ids = frozenset(stops)

    def pieces(self) -> list[bytes]:
        """The bytes each token stands for."""
        return [self._piece(text, kind) for text, kind in zip(self.tokens, self.types, strict=True)]

    def _piece(self, text: str, kind: int) -> bytes:
        if kind == BYTE:
            match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)
            if match is None:
                raise ModelFileError.about(self.source, f"the byte token {quoted(text)} does not read <0xNN>")
            return bytes([int(match[1], 16)])
        if kind in _SPECIAL:
            return text.encode("utf-8")
        if self.kind == "llama":
            return text.replace(SPACE_MARK, " ").encode("utf-8")
        try:
            return bytes([_BYTE_OF_CHAR[char] for char in text])
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


# ---------------------------------------------------------------------------------------------
# The two encoders. Each turns text that holds no special token into ids.


class _Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


class _ByteLevelEncoder:
    """Byte-level BPE, run by `tokenizers`."""

    def __init__(self, vocabulary: Vocabulary, merges: Iterable[str], pre: PreTokenizer) -> None:
        # Imported here: a model that only takes ids needs no tokenizer library.
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        self._source = vocabulary.source
        # Control tokens stay out, so that no text can merge or be looked up into one.
        words = {text: token for text, token in vocabulary.id_of.items()
                 if vocabulary.types[token] not in (*_SILENT, BYTE)}
        pairs = [pair for pair in self._parse_merges(merges, vocabulary.id_of)
                 if pair[0] in words and pair[1] in words and "".join(pair) in words]
        model = models.BPE(words, pairs, ignore_merges=pre.whole_words)
        self._tokenizer = Tokenizer(model)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])
        # The library drops a byte without a symbol in silence; text must not vanish.
        self._missing = frozenset(range(256)) - {_BYTE_OF_CHAR[c] for c in words if c in _BYTE_OF_CHAR}

    def _parse_merges(self, merges: Iterable[str], known: dict[str, int]) -> list[tuple[str, str]]:
        pairs = []
        for rank, merge in enumerate(merges):
            left, _, right = merge.partition(" ")
            if not left or not right or " " in right:
                raise ModelFileError.about(self._source, f"merge {rank}, {quoted(merge)}, is not two tokens")
            if left not in known or right not in known or left + right not in known:
                raise ModelFileError.about(self._source, f"merge {rank}, {quoted(merge)}, names or makes "
                                     "a token the vocabulary lacks")
            pairs.append((left, right))
        return pairs

    def encode(self, text: str) -> list[int]:
        if self._missing and (lost := self._missing.intersection(text.encode())):
            raise InvalidRequestError(f"the text holds byte 0x{min(lost):02X}, for which the "
                                      f"vocabulary of {self._source} has no token")
        return self._tokenizer.encode(text, add_special_tokens=False).ids


class _ScoreEncoder:
    """SentencePiece BPE: join the adjacent pair whose joined token scores highest."""

    _CACHED_WORDS = 1 << 16

    def __init__(self, vocabulary: Vocabulary, pieces: Sequence[bytes]) -> None:
        self._source = vocabulary.source
        self._score = vocabulary.scores
        self._unk_id = vocabulary.unk_id
        # Text must spell neither a control token nor a byte token.
        self._id_of = {text: token for text, token in vocabulary.id_of.items()
                       if vocabulary.types[token] not in (*_SILENT, BYTE)}
        self._byte_id = {pieces[token][0]: token for token, kind in enumerate(vocabulary.types)
                         if kind == BYTE}
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


# ---------------------------------------------------------------------------------------------


class Tokenizer:
    """Encodes text to the ids a model was trained on, and decodes ids to text.

    Made by `from_metadata`; the heavy part (merges, joints) is built by the first `encode`.
    """

    def __init__(self, vocabulary: Vocabulary, metadata: Metadata) -> None:
        self._vocabulary = vocabulary
        self._merges: Sequence[str] = ()
        self._pretokenizer: PreTokenizer | None = None
        add_bos = vocabulary.kind == "llama"
        if vocabulary.kind == "gpt2":
            self._pretokenizer = _find_pretokenizer(metadata)
            add_bos = self._pretokenizer.add_bos
            self._merges = metadata.get_strings("tokenizer.ggml.merges")
        prefix_space = metadata.get_bool("tokenizer.ggml.add_space_prefix", True)
        self._prefix_space = vocabulary.kind == "llama" and prefix_space
        self.add_bos = self._adds(metadata, "bos", add_bos, vocabulary.bos_id)
        self.add_eos = self._adds(metadata, "eos", False, vocabulary.eos_id)
        self._pieces = vocabulary.pieces()
        self._encoder: _Encoder | None = None
        self._splitters: dict[bool, re.Pattern[str] | None] = {}

    @classmethod
    def from_metadata(cls, metadata: Metadata) -> Tokenizer:
        """Reads the `tokenizer.ggml.*` keys.

        Raises ModelFileError if the file has no tokenizer, an unknown one, or a broken one.
        """
        return cls(Vocabulary.read(metadata), metadata)

    @staticmethod
    def _adds(metadata: Metadata, name: str, default: bool, token: int | None) -> bool:
        key = f"tokenizer.ggml.add_{name}_token"
        wanted = metadata.get_bool(key, None)
        if wanted and token is None:
            raise metadata.error(f"{key} is set, but there is no {name}_token_id")
        return token is not None and (default if wanted is None else wanted)

    def prepare(self) -> None:
        """Builds what `encode` needs, which it otherwise does when first called. Raises ModelFileError for merges that
        are broken."""
        if self._encoder is None:
            if self._pretokenizer is None:
                self._encoder = _ScoreEncoder(self._vocabulary, self._pieces)
            else:
                self._encoder = _ByteLevelEncoder(self._vocabulary, self._merges, self._pretokenizer)

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    @property
    def kind(self) -> str:
        """What tokenizer.ggml.model says: "gpt2" (byte-level BPE) or "llama" (SentencePiece)."""
        return self._vocabulary.kind

    @property
    def bos_id(self) -> int | None:
        return self._vocabulary.bos_id

    @property
    def eos_id(self) -> int | None:
        return self._vocabulary.eos_id

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer: end of text, end of turn, and their like."""
        return self._vocabulary.stop_ids

    def token_text(self, token: int) -> str:
        """The token as the file spells it (`Ġthe`, `▁the`, `<0x0A>`, `<s>`)."""
        return self._vocabulary.tokens[self._checked(token)]

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The ids of `text`.

        add_special: with the begin and end tokens the file asks for.
        parse_special: control tokens spelled in the text become those tokens. Leave it off for
            text that others wrote; tokens of the user-defined kind are found either way.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the text is not valid Unicode: {error.reason} "
                                      f"at character {error.start}") from None
        ids = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        after_special = True
        for part, token in self._split_special(text, parse_special):
            if token is not None:
                ids.append(token)
                after_special = True
            else:
                ids += self._encode_plain(" " + part if self._prefix_space and after_special else part)
                after_special = False
        if add_special and self.add_eos and self._vocabulary.eos_id is not None:
            ids.append(self._vocabulary.eos_id)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        self.prepare()
        assert self._encoder is not None
        return self._encoder.encode(text)

    def _split_special(self, text: str, parse_special: bool) -> Iterator[tuple[str, int | None]]:
        """Cuts `text` at special tokens, the longest where several begin; (part, its id or None)."""
        if parse_special not in self._splitters:
            kinds = _SPECIAL if parse_special else (USER_DEFINED,)
            texts = [token for token, kind in zip(self._vocabulary.tokens, self._vocabulary.types, strict=True)
                     if token and kind in kinds]
            texts.sort(key=len, reverse=True)
            self._splitters[parse_special] = (
                re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None)
        splitter = self._splitters[parse_special]
        parts = splitter.split(text) if splitter else [text]
        for index, part in enumerate(parts):
            if part:
                yield part, self._vocabulary.id_of[part] if index % 2 else None

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD.

        skip_special: control tokens are left out; else they appear as the file spells them.
        """
        stream = self.stream(skip_special=skip_special)
        return "".join([*map(stream.push, ids), stream.flush()])

    def stream(self, after: Sequence[int] = (), skip_special: bool = True) -> StreamDecoder:
        """A decoder for ids that arrive one by one, following the ids `after`.

        What went before matters to SentencePiece: the space that encoding put before the
        first word is taken away again, but one between words is not.
        """
        at_start = not after or self._vocabulary.types[self._checked(after[-1])] in _SPECIAL
        return StreamDecoder(self, at_start, skip_special)

    def _checked(self, token: int) -> int:
        if not 0 <= token < len(self._pieces):
            raise InvalidRequestError(f"token {token} is outside the vocabulary of "
                                      f"{len(self._pieces)} tokens")
        return token


class StreamDecoder:
    """Turns tokens into text one at a time, giving out whole characters only.

    The pieces it returns, and `flush` at the end, join up to what `Tokenizer.decode` gives.
    """

    def __init__(self, tokenizer: Tokenizer, at_start: bool, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._strip_space = at_start and tokenizer._prefix_space
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        tokenizer = self._tokenizer
        piece = tokenizer._pieces[tokenizer._checked(token)]
        kind = tokenizer._vocabulary.types[token]
        if kind in _SPECIAL:
            self._strip_space = tokenizer._prefix_space
            if kind in _SILENT and self._skip_special:
                return ""
        elif self._strip_space:
            piece = piece.removeprefix(b" ")
            self._strip_space = False
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """What is left of an incomplete character, as U+FFFD; ends the stream."""
        return self._utf8.decode(b"", final=True)
