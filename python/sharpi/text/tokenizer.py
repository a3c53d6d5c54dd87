"""Text to token ids and back, from a GGUF file's own vocabulary.

Three families exist in the files we run. Byte-level BPE ("gpt2") is handed to Hugging Face's `tokenizers`, with the
pre-tokenizer the file names, and so is "gemma4", which merges characters instead of bytes. SentencePiece ("llama") has
no list of merges: adjacent symbols join in the order of the joined token's score, the leftmost first where scores tie.
A merge list cannot say "the leftmost first" (runs of spaces show the difference), so that family is merged here, on
pieces of text which no token can straddle.

Special tokens are found before any of these runs, so that text of unknown origin can be encoded without ever becoming
one. Decoding works on bytes: a character spread over several tokens is never broken.
"""

from __future__ import annotations

import bisect
import codecs
import itertools
from collections.abc import Iterable, Iterator, Sequence

from sharpi.errors import InvalidRequestError
from sharpi.files.metadata import Metadata
from sharpi.text.encoders import ByteLevelEncoder, CharacterEncoder, Encoder, ScoreEncoder
from sharpi.text.pretokenizers import PreTokenizer, find_pretokenizer
from sharpi.text.special_tokens import SpecialTokens
from sharpi.text.vocabulary import SILENT, SPECIAL, USER_DEFINED, Vocabulary

__all__ = ["StreamDecoder", "Tokenizer"]


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
            self._pretokenizer = find_pretokenizer(metadata)
            add_bos = self._pretokenizer.add_bos
        if vocabulary.kind != "llama":
            self._merges = metadata.get_strings("tokenizer.ggml.merges")
        prefix_space = metadata.get_bool("tokenizer.ggml.add_space_prefix", True)
        self._prefix_space = vocabulary.kind == "llama" and prefix_space
        self.add_bos = self._adds(metadata, "bos", add_bos, vocabulary.bos_id)
        if vocabulary.kind == "gemma4":  # early files say no, but the model needs it
            self.add_bos = vocabulary.bos_id is not None
        self.add_eos = self._adds(metadata, "eos", False, vocabulary.eos_id)
        self._pieces = vocabulary.pieces()
        self._encoder: Encoder | None = None
        self._finders: dict[bool, SpecialTokens] = {}

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
            if self._pretokenizer is not None:
                self._encoder = ByteLevelEncoder(self._vocabulary, self._merges, self._pretokenizer)
            elif self.kind == "gemma4":
                self._encoder = CharacterEncoder(self._vocabulary, self._merges)
            else:
                self._encoder = ScoreEncoder(self._vocabulary, self._pieces)

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    @property
    def kind(self) -> str:
        """What tokenizer.ggml.model says: "gpt2" (byte-level BPE), "llama" (SentencePiece) or "gemma4"."""
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

    @property
    def suppressed_ids(self) -> frozenset[int]:
        """Tokens that the file says must never be chosen."""
        return self._vocabulary.suppressed_ids

    def token_text(self, token: int) -> str:
        """The token as the file spells it (`Ġthe`, `▁the`, `<0x0A>`, `<s>`)."""
        return self._vocabulary.tokens[self._checked(token)]

    def token_bytes(self, token: int) -> bytes:
        """The bytes that the token stands for, which need not be whole characters; a control token stands for its
        name."""
        return self._pieces[self._checked(token)]

    def answer_pieces(self) -> list[bytes | None]:
        """The bytes that each token adds to an answer's text; `None` for a token that adds none, or must never be
        chosen."""
        vocabulary = self._vocabulary
        silent = {token for token, kind in enumerate(vocabulary.types) if kind in SILENT} - vocabulary.shown_ids
        silent |= vocabulary.stop_ids | vocabulary.suppressed_ids
        return [None if token in silent else piece for token, piece in enumerate(self._pieces)]

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
        if parse_special not in self._finders:
            kinds = SPECIAL if parse_special else (USER_DEFINED,)
            types = self._vocabulary.types
            self._finders[parse_special] = SpecialTokens(
                {text: token for text, token in self._vocabulary.id_of.items() if types[token] in kinds})
        stripping = False
        for part, token in self._finders[parse_special].split(text):
            if token is not None:
                stripping = token in self._vocabulary.stripping_ids
                yield part, token
            elif rest := part.lstrip() if stripping else part:
                yield rest, None

    def tokens_before(self, ids: Iterable[int], places: Iterable[int]) -> list[int]:
        """How many of `ids` end at or before each of these bytes of the text that they spell. Of SentencePiece's
        tokens, which may begin with a space that the text lacks, perhaps fewer."""
        ends = list(itertools.accumulate(len(self._pieces[self._checked(id)]) for id in ids))
        return [bisect.bisect_right(ends, place) for place in places]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD.

        skip_special: control tokens are left out, but for those that tell an answer's parts apart; else they appear
            as the file spells them.
        """
        stream = self.stream(skip_special=skip_special)
        return "".join([*map(stream.push, ids), stream.flush()])

    def stream(self, after: Sequence[int] = (), skip_special: bool = True) -> StreamDecoder:
        """A decoder for ids that arrive one by one, following the ids `after`.

        What went before matters to SentencePiece: the space that encoding put before the
        first word is taken away again, but one between words is not.
        """
        at_start = not after or self._vocabulary.types[self._checked(after[-1])] in SPECIAL
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
        if kind in SPECIAL:
            self._strip_space = tokenizer._prefix_space
            if kind in SILENT and self._skip_special and token not in tokenizer._vocabulary.shown_ids:
                return ""
        elif self._strip_space:
            piece = piece.removeprefix(b" ")
            self._strip_space = False
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """What is left of an incomplete character, as U+FFFD; ends the stream."""
        return self._utf8.decode(b"", final=True)
