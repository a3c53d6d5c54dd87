"""OpenAI's completions: shapes from written events, and the real client with the bundled model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest
from fake_turns import HELLO, USAGE, FakeServer, Step
from serving import NAME, OneModelServer, app_of, running, sse_data, story_server

from sharpi.serve.apis import openai_completions
from sharpi.serve.errors import ApiError
from sharpi.serve.turns import Ended, OutputFormat, PromptScores, Said, Score, Turn

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}


async def posted(server: FakeServer, body: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app_of(server, openai_completions.routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        return await client.post("/v1/completions", content=json.dumps(body).encode())


def ask(steps: Sequence[Step] = HELLO, **fields: Any) -> tuple[httpx.Response, list[Turn]]:
    """The response, and the turns that the runner was asked for."""
    server = FakeServer(steps)
    response = asyncio.run(posted(server, {"prompt": "Once", **fields}))
    assert all(turn.closed for turn in server.runner.opened)
    return response, server.runner.turns


def turns_for(**fields: Any) -> list[Turn]:
    response, turns = ask(**fields)
    assert response.status_code == 200, response.text
    return turns


def chunks(steps: Sequence[Step] = HELLO, **fields: Any) -> list[dict[str, Any]]:
    response, _ = ask(steps, stream=True, **fields)
    data = sse_data(response.text.splitlines())
    assert data[-1] == "[DONE]"
    return [json.loads(line) for line in data[:-1]]


def test_a_whole_completion() -> None:
    body = ask()[0].json()
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": "Hello.", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["total_tokens"] == 17 and body["timings"]["predicted_n"] == 5


def test_a_streamed_completion() -> None:
    made = chunks(stream_options={"include_usage": True})
    assert [(one["choices"][0]["text"], one["choices"][0]["finish_reason"]) for one in made[:-1]] == [
        ("Hel", None), ("lo.", None), ("", "stop")]
    assert made[-1]["choices"] == [] and made[-1]["usage"]["total_tokens"] == 17
    assert all("usage" not in one for one in chunks())


ENDS = [(Ended(0, "stop"), {"finish_reason": "stop"}), (Ended(0, "length"), {"finish_reason": "length"}),
        (Ended(0, "stop", "END"), {"finish_reason": "stop", "stop_reason": "END"}),
        (Ended(0, "timeout"), {"finish_reason": "length", "stop_reason": "timeout"})]


@pytest.mark.parametrize(("ended", "told"), ENDS)
def test_why_an_answer_ended(ended: Ended, told: dict[str, str]) -> None:
    steps = [Said(0, "x"), ended, USAGE]
    response, _ = ask(steps)
    for choice in (response.json()["choices"][0], chunks(steps)[-1]["choices"][0]):
        assert {name: choice[name] for name in choice if name.endswith("_reason")} == told


def score(id: int, raw: bytes, logprob: float | None, *top: tuple[bytes, float]) -> Score:
    return Score(id, raw.decode("utf-8", "replace"), raw, logprob,
                 tuple(Score(0, other.decode("utf-8", "replace"), other, value) for other, value in top))


ECHOED = (
    PromptScores(0, "Äpf", (score(1, b"\xc3", None), score(2, b"\x84p", -1.0, (b"a", -0.5)), score(3, b"f", -2.0))),
    Said(0, "el", (score(4, b"el", -0.25, (b"el", -0.25), (b"u", -3.0)),)), Ended(0, "length"), USAGE)


def test_scores_have_the_older_shape() -> None:
    response, [turn] = ask(ECHOED, echo=True, logprobs=2)
    assert turn.echo and turn.scores == 2
    [choice] = response.json()["choices"]
    assert choice["text"] == "Äpfel"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\x84\\x70", "f", "el"]
    assert logprobs["token_logprobs"] == [None, -1.0, -2.0, -0.25]
    assert logprobs["top_logprobs"] == [None, {"a": -0.5, "bytes:\\x84\\x70": -1.0}, {"f": -2.0},
                                        {"el": -0.25, "u": -3.0}], "the chosen token is among them"
    assert logprobs["text_offset"] == [0, 0, 2, 3], "the character that two tokens share begins at 0"


def test_streamed_scores_continue_the_offsets() -> None:
    made = [one["choices"][0] for one in chunks(ECHOED, echo=True, logprobs=2)]
    assert [one["text"] for one in made] == ["Äpf", "el", ""]
    assert [offset for one in made[:2] for offset in one["logprobs"]["text_offset"]] == [0, 0, 2, 3]
    assert made[0]["logprobs"]["token_logprobs"][0] is None and made[2]["logprobs"] is None


def test_scores_that_were_not_asked_for_are_not_there() -> None:
    assert ask(ECHOED, echo=True)[0].json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(("prompt", "prompts"), [
    ("Once", ["Once"]), (["Once"], ["Once"]), (["Once", "Twice"], ["Once", "Twice"]),
    ([5, 6], [[5, 6]]), ([[5, 6]], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]]),
])
def test_prompts_are_texts_or_tokens(prompt: Any, prompts: list[Any]) -> None:
    assert [turn.prompt for turn in turns_for(prompt=prompt)] == prompts


def test_several_prompts_have_consecutive_choices() -> None:
    steps = (Said(1, "b"), Said(0, "a"), Ended(0, "stop"), Ended(1, "stop"), USAGE)
    body = ask(steps, prompt=["x", "y"], n=2)[0].json()
    assert [(one["index"], one["text"]) for one in body["choices"]] == [(0, "a"), (1, "b"), (2, "a"), (3, "b")]
    assert body["usage"]["prompt_tokens"] == 24 and body["usage"]["completion_tokens"] == 10


def test_fields_become_the_turns() -> None:
    [turn] = turns_for(seed=5, stop=["a", "b"], ignore_eos=True, min_tokens=2, user="someone", logprobs=0,
                       response_format={"type": "json_object"}, unknown=5)
    assert turn.options == {"max_tokens": 16, "seed": 5, "stop": ["a", "b"]}
    assert (turn.scores, turn.ignore_end, turn.least_tokens, turn.key) == (0, True, 2, "someone")
    assert turn.format == OutputFormat("json_object")
    [turn] = turns_for(max_tokens=0, logprobs=True)
    assert turn.options == {"max_tokens": 0} and turn.scores == 1
    [turn] = turns_for(logprobs=False, best_of=1, suffix="")
    assert turn.scores is None


@pytest.mark.parametrize(("fields", "param"), [
    ({"prompt": None}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"), ({"prompt": 5}, "prompt"),
    ({"prompt": [-1]}, "prompt"), ({"prompt": [True]}, "prompt"), ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": ["a"] * 65}, "prompt"), ({"prompt": ["a"] * 10, "n": 8}, "n"),
    ({"logprobs": 21}, "logprobs"), ({"logprobs": -1}, "logprobs"), ({"suffix": "end"}, "suffix"),
    ({"best_of": 4}, "best_of"), ({"max_tokens": "5"}, "max_tokens"), ({"echo": 1}, "echo"),
])
def test_a_field_that_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    response, turns = ask(**fields)
    assert response.status_code == 400 and not turns
    assert response.json()["error"]["param"] == param and param in response.json()["error"]["message"]


def test_a_prompt_that_is_refused_closes_the_others() -> None:
    server = FakeServer()
    opened = server.runner.open

    async def second_refused(turn: Turn) -> Any:
        if len(server.runner.turns) == 1:
            raise ApiError(400, "invalid_request_error", "no")
        return await opened(turn)

    server.runner.open = second_refused  # type: ignore[method-assign]
    response = asyncio.run(posted(server, {"prompt": ["a", "b"]}))
    assert response.status_code == 400 and [turn.closed for turn in server.runner.opened] == [True]


# --- the real client, the real model ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def story() -> Iterator[OneModelServer]:
    with story_server() as server:
        yield server


@pytest.fixture(scope="module")
def client(story: OneModelServer) -> Iterator[openai.OpenAI]:
    with (running(app_of(story, openai_completions.routes)) as url,
          openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made):
        yield made


def expected(server: OneModelServer, prompt: Any, **options: Any) -> str:
    return "".join(token.text for token in server.model.generate(prompt, **options))


def test_the_text_is_what_the_model_generates(story: OneModelServer, client: openai.OpenAI) -> None:
    text = "Once upon a time"
    ids = story.model.tokenize(text)
    for prompt in (text, ids):
        answer = client.completions.create(model=NAME, prompt=prompt, **GREEDY)
        assert answer.choices[0].text == expected(story, text, **GREEDY) != ""
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 12)
        stream = client.completions.create(model=NAME, prompt=prompt, stream=True, **GREEDY)
        assert "".join(one.choices[0].text for one in stream) == answer.choices[0].text


def test_many_prompts_are_answered_in_order(story: OneModelServer, client: openai.OpenAI) -> None:
    prompts = [f"There were {count} ships" for count in range(5)]
    options: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 15}
    answer = client.completions.create(model=NAME, prompt=prompts, n=2, **options)
    wanted = [expected(story, prompt, **{**options, "seed": seed}) for prompt in prompts for seed in (3, 4)]
    assert [one.text for one in answer.choices] == wanted
    said = [""] * 10
    for one in client.completions.create(model=NAME, prompt=prompts, n=2, stream=True, **options):
        said[one.choices[0].index] += one.choices[0].text
    assert said == wanted


def test_a_prompt_beyond_the_context_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt=["short", [5] * 600], stream=True)
    assert caught.value.code == "exceed_context_size_error" and caught.value.body["n_prompt_tokens"] == 600
