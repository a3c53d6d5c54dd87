"""Many requests with one model: each is answered as it would be alone, whoever reads it and however."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator

import pytest

from sharpi import Answer, BusyError, InvalidRequestError, Model, Scheduler, SharpiError

PROMPTS = [f"Once upon a time there were {count} ships" for count in range(2, 12)]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model.load(device="cpu", context=512, cache_tokens=4096, sequences=16, threads=1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def alone(model: Model) -> list[str]:
    return [said(model, prompt, seed) for seed, prompt in enumerate(PROMPTS)]


@pytest.fixture
def scheduler(model: Model) -> Iterator[Scheduler]:
    with model.scheduler() as made:
        yield made


def said(model: Model, prompt: str, seed: int) -> str:
    return "".join(token.text for token in model.generate(prompt, max_tokens=40, temperature=0.8, seed=seed))


def submitted(scheduler: Scheduler, seed: int) -> Answer:
    return scheduler.submit(PROMPTS[seed], max_tokens=40, temperature=0.8, seed=seed)


def test_company_does_not_change_an_answer(scheduler: Scheduler, alone: list[str]) -> None:
    answers = [submitted(scheduler, seed) for seed in range(len(PROMPTS))]
    assert [answer.text() for answer in answers] == alone
    assert {answer.finish_reason for answer in answers} <= {"length", "end"}
    assert all(answer.figures["tokens"] <= 40 for answer in answers)
    counts = scheduler.counts()
    assert counts["finished"] == len(PROMPTS)
    assert counts["steps"] < counts["step_tokens"] / 2, "answers share steps"


def test_prompts_that_begin_alike_are_computed_once(scheduler: Scheduler, model: Model) -> None:
    begin = list(range(40, 168))
    prompts = [[*begin, 7, 8, last] for last in range(9, 12)]
    alone = [[token.id for token in model.generate(prompt, max_tokens=5, temperature=0)] for prompt in prompts]

    def reused(salt: str) -> list[int]:
        answers = [scheduler.submit(prompt, max_tokens=5, temperature=0, salt=salt) for prompt in prompts]
        assert [[token.id for token in answer] for answer in answers] == alone
        return [answer.figures["reused_tokens"] for answer in answers]

    assert sorted(reused("salt")) == [0, 128, 128]
    assert reused("salt") == [128, 128, 128]
    assert sorted(reused("another")) == [0, 128, 128]
    assert reused("") == [128, 128, 128], "what generate() has computed"
    counts = scheduler.counts()
    assert counts["adopted_tokens"] == 10 * 128
    assert counts["shared_pages"] == 6


def test_the_part_of_the_cache_in_use_is_counted(scheduler: Scheduler) -> None:
    assert scheduler.counts()["kv_usage"] == 0
    answer = scheduler.submit(list(range(40, 168)), max_tokens=400, ignore_end=True)
    next(iter(answer))
    assert 0 < scheduler.counts()["kv_usage"] <= 1
    answer.cancel()
    deadline = time.monotonic() + 60
    while scheduler.counts()["kv_usage"] > 0:  # pages that later prompts may find are free
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_answer_can_be_read_in_an_event_loop(scheduler: Scheduler, alone: list[str]) -> None:
    async def read(seed: int) -> str:
        return "".join([token.text async for token in submitted(scheduler, seed)])

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*map(read, range(len(PROMPTS))))

    assert asyncio.run(all_of_them()) == alone
    assert asyncio.run(all_of_them()) == alone, "another event loop"


def test_an_answer_from_outside_the_loop_can_be_read_in_it(scheduler: Scheduler, alone: list[str]) -> None:
    answer = submitted(scheduler, 3)

    async def read() -> str:
        return "".join([token.text async for token in answer])

    assert asyncio.run(read()) == alone[3]


def test_threads_share_a_scheduler(scheduler: Scheduler, alone: list[str]) -> None:
    texts: dict[int, str] = {}

    def work(seed: int) -> None:
        texts[seed] = submitted(scheduler, seed).text()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [texts[seed] for seed in range(len(PROMPTS))] == alone


def test_a_stop_text_ends_an_answer(scheduler: Scheduler, model: Model, alone: list[str]) -> None:
    stop = alone[0][20:26]
    answer = scheduler.submit(PROMPTS[0], max_tokens=40, temperature=0.8, seed=0, stop=stop)
    assert answer.text() == alone[0][:alone[0].index(stop)]
    assert answer.finish_reason == "stop"


def test_an_answer_ends_with_the_context(scheduler: Scheduler, model: Model) -> None:
    answer = scheduler.submit([5] * 500, temperature=0.0)
    tokens = list(answer)
    assert answer.finish_reason in {"context", "end"}
    assert [token.id for token in tokens] == [token.id for token in model.generate([5] * 500, temperature=0.0)]


def test_a_cancelled_answer_ends(scheduler: Scheduler) -> None:
    answer = scheduler.submit(PROMPTS[0], temperature=0.8, seed=1, logit_bias={})
    next(answer)
    answer.cancel()
    assert len(list(answer)) < 500
    assert answer.finish_reason in {"cancelled", "end"}


def test_an_answer_that_nobody_wants_any_more_is_cancelled(model: Model) -> None:
    with model.scheduler() as scheduler:
        answers = [scheduler.submit(PROMPTS[0], temperature=0.8, seed=seed) for seed in range(4)]
        with answers[0] as first:
            next(first)
        del answers, first
        gc.collect()
        until = time.monotonic() + 30
        while scheduler.counts()["finished"] < 4:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_time_can_run_out(scheduler: Scheduler) -> None:
    answer = scheduler.submit(PROMPTS[0], temperature=0.8, seed=1, timeout=1e-6)
    assert list(answer) == [] and answer.finish_reason == "timeout"
    assert answer.figures["tokens"] == 0


def test_too_many_requests_are_refused(model: Model) -> None:
    with model.scheduler(queue=2, running=1) as scheduler:
        answers = []
        with pytest.raises(BusyError, match="2 requests are waiting"):
            for seed in range(6):
                answers.append(scheduler.submit(PROMPTS[0], temperature=0.8, seed=seed))
        assert scheduler.counts()["refused"] == 1
        for answer in answers:
            answer.cancel()


def test_what_cannot_be_served_is_refused_at_the_call(scheduler: Scheduler, model: Model) -> None:
    for prompt, options in (([], {}), ([1] * 513, {}), ([model.spec.vocab_size], {}), (PROMPTS[0], {"top_p": 2.0}),
                            (PROMPTS[0], {"draft": "mtp"}), (PROMPTS[0], {"timeout": 0.0}),
                            (PROMPTS[0], {"priority": "high"}), (PROMPTS[0], {"max_tokens": 0})):
        with pytest.raises(InvalidRequestError):
            scheduler.submit(prompt, **options)
    with pytest.raises(TypeError, match="temprature"):
        scheduler.submit(PROMPTS[0], temprature=1.0)
    for options in ({"max_gap": 0.0}, {"queue": 0}, {"running": -1}, {"max_gap": "long"}):
        with pytest.raises(InvalidRequestError):
            model.scheduler(**options)


def test_forbidding_every_token_fails_one_answer_alone(scheduler: Scheduler, model: Model, alone: list[str]) -> None:
    none = scheduler.submit(PROMPTS[1], logit_bias=dict.fromkeys(range(model.spec.vocab_size), float("-inf")))
    good = submitted(scheduler, 0)
    with pytest.raises(SharpiError, match="no token may be chosen"):
        none.text()
    assert good.text() == alone[0]


def test_a_closed_scheduler_says_so(model: Model) -> None:
    scheduler = model.scheduler()
    running = scheduler.submit(PROMPTS[0], temperature=0.8, seed=1)
    scheduler.close()
    scheduler.close()
    list(running)
    assert running.finish_reason in {"cancelled", "end"}
    for call in (lambda: scheduler.submit(PROMPTS[0]), scheduler.counts):
        with pytest.raises(InvalidRequestError, match="the scheduler is closed"):
            call()


def test_a_cache_may_hold_more_than_one_context(model: Model) -> None:
    assert model.context == 512 and model.plan.cache_tokens == 4096
    with Model.load(device="cpu", context=512, threads=1) as small:
        assert model.stats()["kv_bytes"] == 8 * small.stats()["kv_bytes"]
    with pytest.raises(InvalidRequestError, match="cache_tokens"):
        Model.load(device="cpu", cache_tokens=0)


def test_a_reader_learns_that_the_scheduler_was_closed(model: Model) -> None:
    scheduler = model.scheduler()

    async def read(answer: Answer) -> str | None:
        async for _ in answer:
            pass
        return answer.finish_reason

    async def close_meanwhile() -> set[str | None]:
        answers = [scheduler.submit(PROMPTS[seed], temperature=0.8, seed=seed, ignore_end=True) for seed in range(4)]
        readers = [asyncio.ensure_future(read(answer)) for answer in answers]
        await asyncio.sleep(0.02)
        scheduler.close()
        return {await asyncio.wait_for(reader, 30) for reader in readers}

    assert asyncio.run(close_meanwhile()) == {"cancelled"}


def test_a_model_serves_what_is_submitted_to_it(alone: list[str]) -> None:
    with Model.load(device="cpu", context=512, cache_tokens=4096, sequences=16, threads=1) as model:
        answers = model.generate_many(PROMPTS, max_tokens=40, temperature=0.8, seed=3)
        assert answers[3].text() == alone[3] and len({answer.text() for answer in answers}) > 1
        assert model.submit(PROMPTS[5], max_tokens=40, temperature=0.8, seed=5, scores=0).text() == alone[5]
        for wrong in ("Once", 3):
            with pytest.raises(InvalidRequestError, match="prompts must be a sequence of prompts"):
                model.generate_many(wrong)  # type: ignore[arg-type]
        running = model.submit(PROMPTS[0], max_tokens=400)
    assert running.finish_reason in (None, "cancelled")
    with pytest.raises(InvalidRequestError, match="closed"):
        model.submit(PROMPTS[0])


def test_a_prompt_that_is_refused_cancels_the_others_of_its_list(model: Model) -> None:
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        model.generate_many([[1, 2], []], max_tokens=300)
