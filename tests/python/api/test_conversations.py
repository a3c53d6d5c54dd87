"""Sessions as clients of the model's scheduler: they share steps, keep nobody from memory, and say what they would say
alone, wherever their readers stop."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from standing import standing
from tiny_models import HYBRIDS, MODELS, write

from sharpi import Generation, Model
from sharpi.errors import InvalidRequestError, OutOfMemoryError

ENDLESS = {"temperature": 0.0, "logit_bias": {0: float("-inf")}}


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model.load(device="cpu", context=512, cache_tokens=4096, threads=1) as loaded:
        yield loaded


@pytest.fixture
def small() -> Iterator[Model]:
    """Its cache holds one context, in pages of 64 tokens."""
    with Model.load(device="cpu", context=256, threads=1) as loaded:
        yield loaded


def prompt_of(model: Model, seed: int, count: int = 100) -> list[int]:
    return np.random.default_rng(seed).integers(3, model.spec.vocab_size, count).tolist()


def ids(generation: Generation, count: int | None = None) -> list[int]:
    if count is None:
        return [token.id for token in generation]
    return [next(generation).id for _ in range(count)]


def alone(prompt: list[int], **options) -> list[int]:
    with Model.load(device="cpu", context=256, threads=1) as fresh:
        return ids(fresh.generate(prompt, **options))


def counts(model: Model) -> dict[str, int]:
    return model._scheduler().counts()


def settled(model: Model) -> dict[str, int]:
    """The scheduler's counts, once it takes no more steps."""
    before = counts(model)
    for _ in range(200):
        time.sleep(0.02)
        after = counts(model)
        if after["steps"] == before["steps"] and after["waiting"] + after["preparing"] == 0:
            return after
        before = after
    raise AssertionError("it goes on and on")


def test_threads_share_steps(model: Model) -> None:
    before, got, start = counts(model)["steps"], {}, threading.Barrier(8)

    def work(seed: int) -> None:
        start.wait()
        got[seed] = ids(model.generate(prompt_of(model, seed, 20), max_tokens=60, **ENDLESS))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts(model)["steps"] - before < 8 * 60 / 2, "480 tokens"
    for seed in range(8):
        assert got[seed] == ids(model.generate(prompt_of(model, seed, 20), max_tokens=60, **ENDLESS))


def test_an_idle_session_gives_its_pages_to_others(small: Model) -> None:
    session, prompt = small.session(), prompt_of(small, 1, 150)
    said = ids(session.generate(prompt, max_tokens=30, **ENDLESS))
    held = session.tokens
    assert held == prompt + said[:-1]
    other = prompt_of(small, 2, 180)
    assert [t.id for t in small.submit(other, max_tokens=40, **ENDLESS)] == alone(other, max_tokens=40, **ENDLESS)
    assert session.tokens == held
    longer = prompt + said + [5, 6, 7]
    assert ids(session.generate(longer, max_tokens=20, **ENDLESS)) == alone(longer, max_tokens=20, **ENDLESS)


def test_many_sessions_take_turns_in_a_small_cache(small: Model) -> None:
    """64 sessions of two turns, of which the cache holds two."""
    sessions = [small.session() for _ in range(64)]
    texts = [prompt_of(small, seed, 70) for seed in range(64)]
    for turn in range(2):
        for index, session in enumerate(sessions):
            said = ids(session.generate(texts[index], max_tokens=5, **ENDLESS))
            if index % 16 == 0:
                assert said == alone(texts[index], max_tokens=5, **ENDLESS), (turn, index)
            assert session.tokens == texts[index] + said[:-1]
            texts[index] = texts[index] + said + prompt_of(small, 1000 + index, 5)


@pytest.mark.parametrize("draft", ["off", "ngram"])
def test_what_a_session_holds_is_what_was_read(model: Model, draft: str) -> None:
    prompt = model.tokenize("one two three four five " * 4)
    whole = ids(model.generate(prompt, max_tokens=40, draft=draft, **ENDLESS))
    for count in (1, 2, 7, 20, 39, 40):
        session = model.session()
        running = session.generate(prompt, max_tokens=40, draft=draft, **ENDLESS)
        assert ids(running, count) == whole[:count]
        for _ in range(2):
            assert session.tokens == prompt + whole[: count - 1], "while it could go on"
            time.sleep(0.01)
        running.close()
        assert session.tokens == prompt + whole[: count - 1]
        again = session.generate(prompt + whole[:count] + [9], max_tokens=9, draft=draft, **ENDLESS)
        assert ids(again) == ids(model.generate(prompt + whole[:count] + [9], max_tokens=9, **ENDLESS))


def test_an_answer_that_nobody_reads_takes_no_steps(model: Model) -> None:
    running = model.session().generate(prompt_of(model, 3), **ENDLESS)
    next(running)
    before = settled(model)["steps"]
    assert ids(model.generate(prompt_of(model, 4), max_tokens=30, **ENDLESS))
    stopped = settled(model)
    assert stopped["steps"] - before <= 34 and stopped["writing"] == 0
    used = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - used < 0.15, "the scheduler's thread sleeps"
    assert ids(running, 5) == ids(model.generate(prompt_of(model, 3), max_tokens=6, **ENDLESS))[1:]


def test_an_answer_that_nobody_reads_gives_its_pages_to_others(small: Model) -> None:
    prompt, other = prompt_of(small, 5, 150), prompt_of(small, 6, 180)
    whole = alone(prompt, max_tokens=40, **ENDLESS)
    session = small.session()
    running = session.generate(prompt, max_tokens=40, **ENDLESS)
    got = ids(running, 10)
    assert ids(small.generate(other, max_tokens=40, **ENDLESS)) == alone(other, max_tokens=40, **ENDLESS)
    assert session.tokens == prompt + whole[:9]
    assert got + ids(running) == whole


def test_logits_find_room_beside_sessions_and_requests(small: Model) -> None:
    tokens = prompt_of(small, 7, 250)
    expected = small.logits(tokens)
    session = small.session()
    said = ids(session.generate(prompt_of(small, 8), max_tokens=20, **ENDLESS))
    running = session.generate(prompt_of(small, 8) + said, max_tokens=60, **ENDLESS)
    first = ids(running, 3)
    answers = [small.submit(prompt_of(small, seed), max_tokens=60, **ENDLESS) for seed in (9, 10, 11)]
    for chunks in ((), (7, 100)):
        np.testing.assert_array_equal(small.logits(tokens, chunks=chunks), expected)
    assert first + ids(running) == alone(prompt_of(small, 8) + said, max_tokens=60, **ENDLESS)
    for seed, answer in zip((9, 10, 11), answers, strict=True):
        assert [token.id for token in answer] == alone(prompt_of(small, seed), max_tokens=60, **ENDLESS)


def test_wrong_logits_are_refused_and_cost_no_other(model: Model) -> None:
    for tokens in ([], [1] * 513, [model.spec.vocab_size]):
        with pytest.raises(InvalidRequestError):
            model.logits(tokens)
    assert model.logits([1, 2]).shape == (2, model.spec.vocab_size)


def test_errors_have_their_kinds(model: Model) -> None:
    never = dict.fromkeys(range(model.spec.vocab_size), float("-inf"))
    for call in (lambda: list(model.generate([1, 2], logit_bias=never)),
                 lambda: model.submit([1, 2], logit_bias=never).text()):
        with pytest.raises(InvalidRequestError, match="no token may be chosen"):
            call()


def test_what_does_not_fit_is_out_of_memory(tmp_path: Path) -> None:
    """Two schedulers do not give way to each other."""
    path = write(tmp_path / "m.gguf", HYBRIDS["qwen35"])
    with Model.load(path, device="cpu", threads=1, sequences=1) as hybrid, hybrid.scheduler() as other:
        kept = other.submit([1, 2, 3], max_tokens=400, temperature=0.0)
        next(kept)
        for call in (lambda: list(hybrid.generate([4, 5], max_tokens=4)), lambda: hybrid.logits([4, 5])):
            with pytest.raises(OutOfMemoryError):
                call()
        kept.cancel()


def test_hybrids_have_more_sessions_than_states(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", HYBRIDS["qwen35"])
    random = np.random.default_rng(3)
    texts = [random.integers(0, 96, 40).tolist() for _ in range(16)]
    with Model.load(path, device="cpu", threads=1, sequences=4) as small, \
            Model.load(path, device="cpu", threads=1) as other:
        sessions = [small.session() for _ in texts]
        got: dict[int, list[int]] = {}
        for _turn in range(2):
            def work(index: int) -> None:
                got[index] = ids(sessions[index].generate(texts[index], max_tokens=12, temperature=0.0))

            threads = [threading.Thread(target=work, args=(index,)) for index in range(16)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for index in range(16):
                assert got[index] == ids(other.generate(texts[index], max_tokens=12, temperature=0.0))
                texts[index] = texts[index] + got[index][:5] + random.integers(0, 96, 4).tolist()


def test_sessions_submits_and_drafts_in_company_say_what_they_say_alone(model: Model) -> None:
    requests = [(prompt_of(model, seed, 10 + 7 * seed), {"max_tokens": 30, "seed": seed, "temperature": seed % 3 / 2,
                                                         "draft": ("off", "ngram")[seed % 2]}) for seed in range(12)]
    expected = [ids(model.generate(prompt, **options)) for prompt, options in requests]
    got: dict[int, list[int]] = {}

    def work(index: int) -> None:
        prompt, options = requests[index]
        if index % 3:
            got[index] = ids(model.session().generate(prompt, **options))
        else:
            got[index] = [token.id for token in model.submit(prompt, **options)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[index] for index in range(12)] == expected


def test_dropped_sessions_and_models_give_memory_back(model: Model) -> None:
    sessions = [model.session() for _ in range(8)]
    for seed, session in enumerate(sessions):
        ids(session.generate(prompt_of(model, 50 + seed, 200), max_tokens=2, **ENDLESS))
    held = counts(model)["kv_usage"]
    del sessions, session
    until = time.monotonic() + 10
    while counts(model)["kv_usage"] > held / 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    threads = threading.active_count()
    fresh = Model.load(device="cpu", context=64, threads=1)
    ids(fresh.generate([1, 2], max_tokens=2))
    core = fresh.engine
    before = sys.getrefcount(core)
    del fresh
    assert sys.getrefcount(core) < before, "no cycle keeps the model"
    assert threading.active_count() == threads


CTRL_C = """
import os, signal, sys, threading, time
from sharpi import Model
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that a shell runs in the background ignore Ctrl-C
model = Model.load(device='cpu', context=8192, threads=1, batch=64, rope_scaling='yarn', rope_scale=8)
session, prompt = model.session(), [5, 6, 7, 8] * 2000
def interrupt():
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)
for work in (lambda: list(session.generate(prompt, temperature=0.0)), lambda: model.logits(prompt)):
    threading.Thread(target=interrupt).start()
    started = time.monotonic()
    try:
        work()
        sys.exit('it was not interrupted')
    except KeyboardInterrupt:
        pass
    print(time.monotonic() - started)
expected = [t.id for t in model.generate([1, 2, 3], max_tokens=4, temperature=0.0)]
assert [t.id for t in session.generate([1, 2, 3], max_tokens=4, temperature=0.0)] == expected
"""


def test_control_c_stops_long_work_and_leaves_the_session_usable() -> None:
    done = subprocess.run([sys.executable, "-c", CTRL_C], text=True, capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert max(map(float, done.stdout.split())) < 5


UNFINISHED = """
import threading, time
from sharpi import Model
model = Model.load(device='cpu', context=512, threads=1)
running, answer = model.session().generate([1, 2], temperature=0.0), model.submit([3, 4])
next(running)
started = threading.Event()
def read():
    for _ in model.generate([5, 6], temperature=0.0):
        started.set()
threading.Thread(target=read, daemon=True).start()
started.wait()
"""


@pytest.mark.parametrize("ending", ["", "model.close()", "del running", "del model", "del model, running, answer"])
def test_a_program_may_end_with_unfinished_generations(ending: str) -> None:
    done = subprocess.run([sys.executable, "-c", UNFINISHED + ending], text=True, capture_output=True, check=False,
                          timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr


FORK = """
import os, sys
from sharpi import InvalidRequestError, Model
model = Model.load(sys.argv[1], threads=2, device='cpu')
session = model.session()
running = session.generate([1, 2], max_tokens=8)
next(running)
child = os.fork()
if child == 0:
    refused = 0
    for call in (lambda: next(running), lambda: list(session.generate([1, 2])), lambda: session.tokens, session.reset,
                 lambda: model.logits([1, 2]), model.session, lambda: model.submit([1, 2])):
        try:
            call()
        except InvalidRequestError as error:
            refused += 'forked' in str(error)
    sys.exit(refused)
list(running)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_is_told_so_whatever_it_asks(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", MODELS["llama"])
    done = subprocess.run([sys.executable, "-c", FORK, str(path)], text=True, capture_output=True, check=False,
                          timeout=60)
    assert done.returncode == 7, done.stderr


def test_a_model_may_be_closed_while_a_session_generates(model: Model) -> None:
    closed = Model.load(device="cpu", context=512, threads=1)
    session = closed.session()
    running = session.generate(prompt_of(model, 60), max_tokens=30, **ENDLESS)
    first = ids(running, 2)
    with standing() as stop:
        submitted = closed.submit(prompt_of(model, 61), constraint=stop, **ENDLESS)
        stop.reached.wait()
        closed.close()
    assert first + ids(running) == ids(model.generate(prompt_of(model, 60), max_tokens=30, **ENDLESS))
    list(submitted)
    assert submitted.finish_reason == "cancelled" and not stop.is_late
