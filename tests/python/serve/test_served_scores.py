"""Log-probabilities: of answers and of prompts, as clients read them, against the model's own logits."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import openai
import pytest
from serving import NAME, OneModelServer, app_of, running, story_server

from sharpi.serve.answering.scoring import ScoreQueue, score
from sharpi.serve.apis import openai_chat, openai_completions
from sharpi.serve.turns import Event, PromptScores, Said, Score, Turn

PROMPT = "Once upon a time there was a king who had two sons and a golden bird"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}


@pytest.fixture(scope="module")
def story() -> Iterator[OneModelServer]:
    with story_server() as server:
        yield server


@pytest.fixture(scope="module")
def client(story: OneModelServer) -> Iterator[openai.OpenAI]:
    with (running(app_of(story, openai_chat.routes, openai_completions.routes)) as url,
          openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made):
        yield made


def likelihoods(server: OneModelServer, ids: Sequence[int]) -> np.ndarray:
    """The natural log-probabilities of all tokens after each of `ids`, by plain arithmetic."""
    logits = np.asarray(server.model.logits(ids), np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def ask(server: OneModelServer, turn: Turn) -> list[Event]:
    async def read() -> list[Event]:
        return [event async for event in await server.runner.open(turn)]

    return asyncio.run(read())


def scores_of(events: Sequence[Event]) -> list[Score]:
    return [one for event in events if isinstance(event, Said) for one in event.scores]


def test_a_prompt_scores_as_its_logits_say(story: OneModelServer, client: openai.OpenAI) -> None:
    """What lm-eval asks for and reads."""
    ids = story.model.tokenize(PROMPT)
    rows = likelihoods(story, ids)
    [choice] = client.completions.create(model=NAME, prompt=[ids], max_tokens=1, logprobs=1, echo=True, seed=1,
                                         temperature=0).choices
    found = choice.logprobs
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert len(found.tokens) == len(ids) + 1
    for at, token in enumerate(ids[1:], 1):
        assert found.token_logprobs[at] == pytest.approx(rows[at - 1, token], abs=1e-5)
        assert max(found.top_logprobs[at].values()) == pytest.approx(rows[at - 1].max(), abs=1e-5)
        assert (token == rows[at - 1].argmax()) == (found.token_logprobs[at] == max(found.top_logprobs[at].values()))
    assert found.token_logprobs[-1] == max(found.top_logprobs[-1].values()), "greedy"
    assert choice.text.startswith(PROMPT) and "".join(found.tokens) == choice.text
    assert [choice.text[start:].startswith(token) for start, token in zip(found.text_offset, found.tokens, strict=True)
            ] == [True] * len(found.tokens)


def test_a_prompt_can_be_scored_alone(story: OneModelServer, client: openai.OpenAI) -> None:
    for logprobs in (None, 0):
        answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=0, echo=True, logprobs=logprobs)
        assert answer.choices[0].text == PROMPT and answer.usage.completion_tokens == 0
        assert (answer.choices[0].logprobs is None) == (logprobs is None)


def test_a_prompt_is_echoed_without_scores(story: OneModelServer) -> None:
    events = ask(story, Turn(prompt=PROMPT, echo=True, options=GREEDY, choices=2))
    assert [event for event in events if isinstance(event, PromptScores)] == [
        PromptScores(choice, PROMPT, ()) for choice in range(2)]
    assert isinstance(events[0], PromptScores)


def test_an_answer_scores_as_its_logits_say(story: OneModelServer) -> None:
    ids = story.model.tokenize(PROMPT)
    options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 20}
    found = scores_of(ask(story, Turn(prompt=ids, scores=3, options=options)))
    drawn = [token.id for token in story.model.generate(ids, **options)]
    assert [one.id for one in found] == drawn
    rows = likelihoods(story, [*ids, *drawn])[len(ids) - 1:]
    for row, one in zip(rows, found, strict=False):
        # Answers' rows are computed in another order than those of a prompt.
        assert one.logprob == pytest.approx(row[one.id], abs=1e-3)
        assert [other.id for other in one.top] == [*np.argsort(-row)[:3]]


def test_scores_are_those_of_the_text_that_is_shown(story: OneModelServer) -> None:
    ids = story.model.tokenize(PROMPT)
    whole = "".join(token.text for token in story.model.generate(ids, temperature=0.0, max_tokens=30))
    stop = whole[30:36]
    events = ask(story, Turn(prompt=ids, scores=0, options={"temperature": 0.0, "max_tokens": 30, "stop": stop}))
    said = "".join(event.text for event in events if isinstance(event, Said))
    assert said == whole[:whole.index(stop)]
    spelled = b"".join(one.bytes for one in scores_of(events)).decode()
    assert said.startswith(spelled) and len(said) - len(spelled) < 12, "but for a token that the stop text cut in two"
    free = scores_of(ask(story, Turn(prompt=ids, scores=0, options={"temperature": 0.0, "max_tokens": 30})))
    assert b"".join(one.bytes for one in free).decode() == whole


def test_chats_score_what_they_say(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Hello"}]
    asked: dict[str, Any] = {"model": NAME, "messages": messages, "logprobs": True, "top_logprobs": 2, **GREEDY}
    [choice] = client.chat.completions.create(**asked).choices
    content = choice.logprobs.content
    assert len(content) == 12
    assert bytes(byte for one in content for byte in one.bytes).decode() == choice.message.content
    assert all(one.token == one.top_logprobs[0].token and one.logprob == one.top_logprobs[0].logprob for one in content)
    streamed = [one for chunk in client.chat.completions.create(stream=True, **asked) if chunk.choices[0].logprobs
                for one in chunk.choices[0].logprobs.content]
    assert streamed == content


def test_scores_wait_for_their_text(story: OneModelServer) -> None:
    tokenizer = story.model.tokenizer
    fox = tokenizer.encode("\U0001f98a and")
    queue = ScoreQueue(tokenizer.stream())
    scores = [score(tokenizer, token, -1.0, ()) for token in fox]
    whole = [len(tokenizer.decode(fox[:count])) for count in range(1, len(fox) + 1)]
    assert len(fox) >= 3 and scores[0].text == "\ufffd", "the character has several tokens"
    for one in scores[:-1]:
        queue.push(one)
        assert queue.shown("") == ()
    assert queue.shown("\U0001f98a") == tuple(scores[:-1])
    queue.push(scores[-1])
    assert queue.shown(" an") == () and whole[-1] == 5
    assert queue.rest() == (scores[-1],) and queue.rest() == ()
    assert math.isfinite(scores[0].logprob or 0.0)
