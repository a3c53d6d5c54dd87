"""Where a generation ends: at end tokens and at stop texts, which are never shown, and nowhere else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from sharpi import Model, Token
from sharpi.files.metadata import Metadata
from sharpi.request import TextStream
from sharpi.text.tokenizer import Tokenizer

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model.load(device="cpu", context=256) as loaded:
        yield loaded


# --- end tokens ------------------------------------------------------------------------------------------------------


def bias_to_end_within(model: Model, ids: list[int], tokens: list[Token], end: int) -> tuple[int, float]:
    """After how many of the likeliest `tokens` behind the prompt the end token comes, and the bias that lets it win
    there for the first time."""
    rows = model.logits(ids + [token.id for token in tokens])[len(ids) - 1:-1]
    missing = rows.max(axis=1) - rows[:, end]
    later = np.flatnonzero(missing == np.minimum.accumulate(missing))
    at = int(later[later > 3][0])
    return at, float((missing[at] + missing[:at].min()) / 2)


@pytest.mark.parametrize("draft", ["off", "ngram"])
def test_an_end_token_ends_the_text_and_is_no_part_of_it(draft: str, model: Model) -> None:
    ids, end = model.tokenize(PROMPT), model.tokenizer.eos_id
    assert end is not None and end in model.tokenizer.stop_ids
    plain = list(model.generate(ids, max_tokens=60, temperature=0.0))
    at, bias = bias_to_end_within(model, ids, plain, end)
    ended = list(model.generate(ids, max_tokens=60, temperature=0.0, logit_bias={end: bias}, draft=draft))
    assert [token.id for token in ended] == [token.id for token in plain[:at]]
    assert "".join(token.text for token in ended) == model.tokenizer.decode([token.id for token in plain[:at]])
    assert model.stats()["generated_tokens"] == at


def test_an_end_token_at_once_is_an_empty_answer(model: Model) -> None:
    end = model.tokenizer.eos_id
    assert list(model.generate(PROMPT, max_tokens=5, logit_bias={end: 1000.0})) == []
    assert model.stats()["generated_tokens"] == 0


@pytest.mark.parametrize("role", ["eos", "eot", "eom"])
def test_each_kind_of_end_token_ends(role: str, model: Model) -> None:
    """The same token in each role: a file has up to three kinds."""
    ids = model.tokenize(PROMPT)
    third = list(model.generate(ids, max_tokens=3, temperature=0.0))[2].id
    metadata = Metadata("story.gguf", {**model.file.metadata, f"tokenizer.ggml.{role}_token_id": third})
    tokenizer = Tokenizer.from_metadata(metadata)
    assert third in tokenizer.stop_ids
    before, model._tokenizer = model.tokenizer, tokenizer
    try:
        assert len(list(model.generate(ids, max_tokens=9, temperature=0.0))) == 2
    finally:
        model._tokenizer = before


def test_tokens_that_the_file_suppresses_are_never_chosen(model: Model) -> None:
    """However likely, and whatever the caller adds to their logits; the rest is as with a bias of minus infinity."""
    ids = model.tokenize(PROMPT)
    plain = [token.id for token in model.generate(ids, max_tokens=20, temperature=0.0)]
    unwanted = sorted({plain[2], plain[5]})
    forbidden = [token.id for token in model.generate(ids, max_tokens=20, temperature=0.0,
                                                      logit_bias=dict.fromkeys(unwanted, -math.inf))]
    listed = np.array([*unwanted, 10**6], np.int32)
    metadata = Metadata("story.gguf", {**model.file.metadata, "tokenizer.ggml.suppress_tokens": listed})
    before, model._tokenizer = model.tokenizer, Tokenizer.from_metadata(metadata)
    try:
        for draft in ("off", "ngram"):
            tokens = model.generate(ids, max_tokens=20, temperature=0.0, draft=draft,
                                    logit_bias=dict.fromkeys(unwanted, 100.0))
            assert [token.id for token in tokens] == forbidden
        drawn = {token.id for token in model.generate(ids, max_tokens=60, temperature=2.0, top_k=0, seed=3)}
        assert not drawn & set(unwanted)
    finally:
        model._tokenizer = before
    assert plain != forbidden


# --- stop texts ------------------------------------------------------------------------------------------------------


def filtered(pieces: Sequence[str], stop: Sequence[str]) -> tuple[list[str], int]:
    """What has come out after each piece, and at the end; and how many pieces were asked for."""
    taken = 0

    def source() -> Iterator[int]:
        nonlocal taken
        while taken < len(pieces):
            taken += 1
            yield taken

    class Pieces:
        """A tokenizer's stream, whose tokens are the numbers of the pieces."""

        def push(self, id: int) -> str:
            return pieces[id - 1]

        def flush(self) -> str:
            return ""

    shown, text = [], ""
    for token in TextStream(Pieces(), stop).through(source()):
        text += token.text
        if len(shown) < taken:
            shown.append(text)
        else:
            shown[-1] = text  # what was held back, after all
    return shown, taken


def expected(pieces: Sequence[str], stop: Sequence[str]) -> tuple[list[str], int]:
    """The same, by what is meant: all text that is no beginning of a stop text shows, and nothing from the first on."""
    shown: list[str] = []
    text = ""
    for number, piece in enumerate(pieces, 1):
        text += piece
        places = [text.find(one) for one in stop if one in text]
        if places:
            return [*shown, text[:min(places)]], number
        begun = [n for one in stop for n in range(1, len(one)) if text.endswith(one[:n])]
        shown.append(text[:len(text) - max(begun, default=0)])
    if shown:
        shown[-1] = text
    return shown, len(pieces)


STOPS = [
    ("ab",),
    ("aab",),
    ("aaa",),
    ("abab",),
    ("abb", "b" * 3),
    ("ba", "aab"),
    ("aba", "bb"),
    ("a", "bb"),
    ("bba", "ab"),
    ("aabb", "abb"),
    ("bb", "abba"),
    (),
]


@pytest.mark.parametrize("stop", STOPS, ids="-".join)
def test_every_short_text_in_every_cut(stop: tuple[str, ...]) -> None:
    """Over the letters a and b, texts of up to 7 as they may come: letter by letter, in pairs, with empty pieces."""
    for length in range(1, 8):
        for letters in itertools.product("ab", repeat=length):
            text = "".join(letters)
            for cut in (1, 2, 3):
                pieces = [text[at:at + cut] for at in range(0, length, cut)]
                assert filtered(pieces, stop) == expected(pieces, stop), pieces
            pieces = ["", text[:2], "", text[2:]]
            assert filtered(pieces, stop) == expected(pieces, stop), pieces


def test_the_first_stop_text_in_the_text_wins_not_the_first_in_the_list() -> None:
    for stop in (["three", "two"], ["two", "three"]):
        assert filtered(["one two three"], stop) == (["one "], 1)
    # Nor the longest, nor the one that is complete first within a piece.
    for stop in (["wo th", "two three four"], ["two three four", "wo th"]):
        assert filtered(["one two three four"], stop) == (["one "], 1)


def test_no_beginning_of_a_stop_text_shows_before_it_is_known() -> None:
    shown, taken = filtered(list("the answer is #END# and more"), ["#END#"])
    assert shown[-1] == "the answer is " and taken == len("the answer is #END#")
    assert all("#" not in text for text in shown)
    shown, _ = filtered(list("a #EN d"), ["#END#"])
    assert shown == ["a", "a ", "a ", "a ", "a ", "a #EN ", "a #EN d"]


def test_a_model_shows_no_beginning_of_a_stop_text(model: Model) -> None:
    options = {"max_tokens": 40, "temperature": 0.0}
    full = "".join(token.text for token in model.generate(PROMPT, **options))
    for begin in range(4, 40, 7):
        for length in (2, 5, 17):
            stop = full[begin:begin + length]
            text = ""
            for token in model.generate(PROMPT, stop=[stop, "\0never"], **options):
                text += token.text
                assert full[:full.find(stop)].startswith(text), (stop, text)
            assert text == full[:full.find(stop)]
