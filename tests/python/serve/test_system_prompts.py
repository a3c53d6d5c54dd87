"""Chats with one system prompt compute it once, whatever layers the model has, and are answered as alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from golden_families import VOCABULARY
from golden_models import write_golden
from serving import OneModelServer
from vocabularies import CONTROL, NORMAL, tokenizer_metadata

from sharpi import InvalidRequestError, Model
from sharpi.conversation import Conversation
from sharpi.files.metadata import Metadata
from sharpi.serve.turns import Event, Turn, Usage
from sharpi.text.vocabulary import BYTE_OF_CHAR

TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "<|im_start|>assistant\n")
# Each byte is a token, and so is what begins a message, and what ends it.
SYSTEM = ("You answer in few words. " * 20)[:480]
BEFORE = len("s" + "system\n" + SYSTEM + "e" + "\n" + "s" + "user\n")
FOUND = BEFORE // 64 * 64
QUESTIONS = [word * 40 for word in ("Why? ", "How? ", "When? ")]
FEW: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0}
STATES = ("qwen35", "nemotron_h_moe", "granitehybrid", "falcon-h1")


@pytest.fixture(scope="module", params=[*STATES, "llama"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_golden(request.param, tmp_path_factory.mktemp("models"))


@contextmanager
def loaded(path: Path) -> Iterator[Model]:
    """The model with a vocabulary and a template."""
    more = ["<|im_start|>", "<|im_end|>", *(f"more{token}" for token in range(VOCABULARY - 259))]
    words = tokenizer_metadata({
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["q q"],
        "tokenizer.ggml.tokens": [*sorted(BYTE_OF_CHAR), "qq", *more],
        "tokenizer.ggml.token_type": [NORMAL] * 257 + [CONTROL] * 2 + [NORMAL] * (VOCABULARY - 259)})
    with Model.load(path, device="cpu", context=1024, cache_tokens=8192, threads=1) as model:
        model.file = replace(model.file, metadata=Metadata(model.file.paths[0], {
            **model.file.metadata, **words, "tokenizer.chat_template": TEMPLATE}))
        yield model


def turn_of(question: str) -> Turn:
    return Turn(messages=({"role": "system", "content": SYSTEM}, {"role": "user", "content": question}), options=FEW,
                scores=3)


async def events_of(server: OneModelServer, turn: Turn) -> list[Event]:
    return [event async for event in await server.runner.open(turn)]


@contextmanager
def served(path: Path, **options: Any) -> Iterator[Callable[[str], tuple[list[Event], int]]]:
    """Asks a server: the events of an answer, with the scores of its tokens, and how many tokens were found."""
    with loaded(path) as model, model.scheduler(**options) as scheduler:
        server = OneModelServer(model, scheduler)

        def ask(question: str) -> tuple[list[Event], int]:
            events = asyncio.run(events_of(server, turn_of(question)))
            usage = events.pop()
            assert isinstance(usage, Usage)
            assert usage.prompt_tokens > BEFORE + 128
            return events, usage.cached_tokens

        yield ask
        server.runner.close()


@pytest.fixture(scope="module")
def cold(path: Path) -> list[list[Event]]:
    """The answers of servers that have seen nothing."""
    answers = []
    for question in QUESTIONS:
        with served(path) as ask:
            events, cached = ask(question)
        assert cached == 0
        answers.append(events)
    assert len({str(events) for events in answers}) == len(answers), "the test must tell the questions apart"
    return answers


def test_served_chats_share_a_system_prompt(path: Path, cold: list[list[Event]]) -> None:
    with served(path) as ask:
        assert [ask(question) for question in QUESTIONS] == [(cold[0], 0), (cold[1], FOUND), (cold[2], FOUND)]


def test_a_system_prompt_outlives_the_server(path: Path, cold: list[list[Event]], tmp_path: Path) -> None:
    with served(path, cache_dir=tmp_path) as ask:
        assert ask(QUESTIONS[0]) == (cold[0], 0)
    with served(path, cache_dir=tmp_path) as ask:
        assert ask(QUESTIONS[1]) == (cold[1], FOUND)


def test_sessions_share_a_system_prompt(path: Path) -> None:
    with loaded(path) as model:
        for question, found in zip(QUESTIONS, (0, FOUND, FOUND), strict=True):
            reply = model.chat([{"role": "user", "content": question}], system=SYSTEM, **FEW)
            list(reply)
            assert reply.timing.reused_tokens == found
        list(Conversation(model, FEW, system=SYSTEM, max_tokens=2).answer("Who?" * 50))
        assert model.stats()["reused_tokens"] == FOUND
    with loaded(path) as model:
        list(Conversation(model, FEW, system=SYSTEM, max_tokens=2).answer(QUESTIONS[0]))
        assert model.stats()["reused_tokens"] == 0
        list(Conversation(model, FEW, system=SYSTEM, max_tokens=2).answer(QUESTIONS[1]))
        assert model.stats()["reused_tokens"] == FOUND


def test_prompts_without_marks_share_where_two_were_seen_to_part(path: Path) -> None:
    states = path.stem in STATES
    with loaded(path) as model, model.scheduler() as scheduler:
        prompts = [model.tokenize(SYSTEM + question) for question in QUESTIONS]
        found = []
        for prompt in prompts:
            answer = scheduler.submit(prompt, **FEW)
            answer.text()
            found.append(answer.reused_tokens)
        page = len(SYSTEM) // 64 * 64
        assert found == [0, 0 if states else page, page]


def test_marks_outside_of_a_prompt_are_refused(path: Path) -> None:
    with loaded(path) as model, model.scheduler() as scheduler:
        scheduler.submit([1, 2, 3], marks=[3, 0, 3], **FEW).text()
        with pytest.raises(InvalidRequestError, match="a mark after 4 tokens is outside the prompt, which has 3"):
            scheduler.submit([1, 2, 3], marks=[1, 4])
        for wrong in ([-1], [1 << 70], "end", 1.5):
            with pytest.raises(InvalidRequestError, match="^marks must be numbers of tokens, each 0 to"):
                scheduler.submit([1, 2, 3], marks=wrong)  # type: ignore[arg-type]
