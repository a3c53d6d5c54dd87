"""What llama.cpp's server is tested for in completions, in OpenAI's shape. docs/serve/compatibility.md is the list."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from serving import NAME, OneModelServer, app_of, running, with_template

from sharpi import Model
from sharpi.serve.apis import openai_completions

PROMPT = "The old man lived by the sea and"
GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.fixture
def client(server: str) -> httpx.Client:
    return httpx.Client(base_url=server, timeout=120)


@pytest.fixture
def library(server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)


def complete(client: httpx.Client, prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json={"prompt": prompt, **GREEDY, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text_of(answer: dict[str, Any]) -> str:
    [choice] = answer["choices"]
    return str(choice["text"])


def streamed(client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    response = client.post("/v1/completions", json={"prompt": PROMPT, **GREEDY, "stream": True, **fields})
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(one) for one in data]


def tokens_of(client: httpx.Client, text: str = PROMPT) -> list[int]:
    ids: list[int] = client.post("/tokenize", json={"content": text}).json()["tokens"]
    return ids


# --- what is said -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 8, 64])
def test_counts_are_those_of_the_prompt_and_the_answer(client: httpx.Client, count: int) -> None:
    answer = complete(client, max_tokens=count, ignore_eos=True)
    timings, usage, prompt = answer["timings"], answer["usage"], len(tokens_of(client))
    assert timings["prompt_n"] + timings["cache_n"] == prompt == usage["prompt_tokens"]
    assert timings["predicted_n"] == usage["completion_tokens"] == count == usage["total_tokens"] - prompt
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_streamed_answer_is_the_whole_one(client: httpx.Client) -> None:
    whole, chunks = complete(client, max_tokens=24), streamed(client, max_tokens=24)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text_of(whole) != ""
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_openais_library_completes(library: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "story", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    whole = library.completions.create(**ask)
    assert (whole.system_fingerprint or "").startswith("sharpi-") and whole.choices[0].finish_reason == "length"
    text = "".join(chunk.choices[0].text for chunk in library.completions.create(**ask, stream=True))
    assert text == whole.choices[0].text


def test_a_stop_text_never_shows_in_part(client: httpx.Client) -> None:
    text = text_of(complete(client, max_tokens=40))
    stop = text[17:25]
    assert text_of(complete(client, max_tokens=40, stop=["never said", stop])) == text[:text.index(stop)]
    chunks = streamed(client, max_tokens=40, stop=["never said", stop])
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text[:text.index(stop)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


# --- what decides it --------------------------------------------------------------------------------------------------


def test_a_seed_decides_an_answer_however_many_others_are_answered(client: httpx.Client) -> None:
    def ask(seed: int) -> str:
        return text_of(complete(client, temperature=1.0, seed=seed, max_tokens=16))

    alone = [ask(seed) for seed in range(6)]
    assert len(set(alone)) == 6, "another seed, another text"
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, [*range(6)] * 3)) == alone * 3


def test_the_cache_decides_nothing(client: httpx.Client) -> None:
    prompt = "A prompt that nobody has sent before, of more than one page of tokens. " * 8
    first, second = [complete(client, prompt, temperature=1.0, seed=42, max_tokens=16) for _ in range(2)]
    assert first["timings"]["cache_n"] == 0 and second["timings"]["cache_n"] > 0
    assert text_of(first) == text_of(second)


def one_completion(**options: Any) -> str:
    loaded = Model.load(device="cpu", context=256, cache_tokens=512, sequences=2, threads=1, **options)
    with with_template(loaded) as model, model.scheduler() as scheduler:
        story = OneModelServer(model, scheduler)
        with running(app_of(story, openai_completions.routes)) as address:
            text = text_of(complete(httpx.Client(base_url=address, timeout=120), PROMPT * 12, temperature=1.0, seed=3))
        story.runner.close()
    return text


def test_the_size_of_batches_decides_nothing() -> None:
    assert one_completion(batch=16) == one_completion(batch=64) == one_completion(batch=256) != ""


def test_forbidden_tokens_do_not_come(client: httpx.Client) -> None:
    usual = text_of(complete(client, max_tokens=32))
    forbidden = tokens_of(client, usual)
    for bias in ({str(token): -100 for token in forbidden}, {str(token): -100.0 for token in forbidden}):
        text = text_of(complete(client, max_tokens=32, logit_bias=bias))
        assert text and not set(tokens_of(client, text)) & set(forbidden)


def test_end_tokens_can_be_ignored(client: httpx.Client) -> None:
    [end] = tokens_of(client, "<|endoftext|>")
    for ignored, count in ((False, 1), (True, 8)):
        answer = complete(client, logit_bias={str(end): 100}, ignore_eos=ignored)
        assert answer["usage"]["completion_tokens"] == count


@pytest.mark.parametrize("stream", [False, True])
def test_each_token_has_its_likeliest(client: httpx.Client, stream: bool) -> None:
    if stream:
        found = [chunk["choices"][0]["logprobs"] for chunk in streamed(client, max_tokens=5, logprobs=10)[:-1]]
    else:
        found = [complete(client, max_tokens=5, logprobs=10)["choices"][0]["logprobs"]]
    tokens = [token for one in found for token in one["tokens"]]
    values = [value for one in found for value in one["token_logprobs"]]
    tops = [top for one in found for top in one["top_logprobs"]]
    assert len(tokens) == len(values) == len(tops) == 5
    for token, value, top in zip(tokens, values, tops, strict=True):
        assert len(top) == 10 and all(other <= 0 for other in top.values())
        assert value == top[token] == max(top.values()), "greedy takes the likeliest"


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_prompts_are_text_or_tokens_or_lists_of_both(client: httpx.Client) -> None:
    ids, text = tokens_of(client), text_of(complete(client))
    assert text_of(complete(client, ids)) == text
    for prompts in ([ids, ids], [ids, PROMPT], [PROMPT, PROMPT]):
        assert [choice["text"] for choice in complete(client, prompts)["choices"]] == [text, text]


@pytest.mark.parametrize("prompt", [[1, 2, "text", 3], {"prompt_string": "Hello"}, [{"prompt_string": "Hello"}],
                                    {"prompt_string": "<__media__>", "multimodal_data": ["aGVsbG8="]}, [], None, 5])
def test_a_prompt_of_another_kind_is_refused(client: httpx.Client, prompt: Any) -> None:
    response = client.post("/v1/completions", json={"prompt": prompt})
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_is_refused_before_a_stream(client: httpx.Client, stream: bool) -> None:
    response = client.post("/v1/completions", json={"prompt": PROMPT * 100, "stream": stream})
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] == "exceed_context_size_error"
    assert error["n_ctx"] == 512 < error["n_prompt_tokens"] == len(tokens_of(client, PROMPT * 100))


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_where_the_context_does(client: httpx.Client, stream: bool) -> None:
    fields: dict[str, Any] = {"max_tokens": 100_000, "ignore_eos": True}
    if stream:
        chunks = streamed(client, **fields, stream_options={"include_usage": True})
        usage, reason = chunks[-1]["usage"], chunks[-2]["choices"][0]["finish_reason"]
    else:
        answer = complete(client, **fields)
        usage, reason = answer["usage"], answer["choices"][0]["finish_reason"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == 512 + 1, "nothing follows the last token"
    assert reason == "length"


def test_prompts_that_come_and_go_are_counted_right(client: httpx.Client) -> None:
    for count in (41, 44, 40, 43, 41, 44, 40, 42):
        prompt = " Hello 7" * count
        timings = complete(client, prompt, max_tokens=count % 5 + 1, ignore_eos=True)["timings"]
        assert timings["prompt_n"] + timings["cache_n"] == len(tokens_of(client, prompt))
        assert timings["predicted_n"] == count % 5 + 1


# --- many at once -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crowded() -> Iterator[httpx.Client]:
    """A server whose cache holds one and a half contexts."""
    loaded = Model.load(device="cpu", context=256, cache_tokens=384, sequences=5, threads=1)
    with with_template(loaded) as model, model.scheduler() as scheduler:
        story = OneModelServer(model, scheduler)
        with running(app_of(story, openai_completions.routes)) as address:
            yield httpx.Client(base_url=address, timeout=120)
        story.runner.close()


@pytest.mark.parametrize("counts", [(80, 40, 80, 80), (200, 200, 200, 200), (90, 230, 40, 240)])
def test_answers_that_do_not_fit_together_all_come_whole(crowded: httpx.Client, counts: tuple[int, ...]) -> None:
    def ask(count: int) -> dict[str, Any]:
        return complete(crowded, "A", max_tokens=count, ignore_eos=True, model=NAME)

    with ThreadPoolExecutor(len(counts)) as pool:
        answers = list(pool.map(ask, counts))
    assert [answer["usage"]["completion_tokens"] for answer in answers] == list(counts)
    shortest = min((text_of(answer) for answer in answers), key=len)
    assert all(text_of(answer).startswith(shortest) for answer in answers)
