"""A generation as an object: what is refused at the call, what stops it, and figures that are its own."""

from __future__ import annotations

import contextlib
import inspect
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sharpi import Generation, InvalidRequestError, Model, Session
from sharpi.generation import Timing
from sharpi.machine.profile import ASSUMED
from sharpi.settings.generation_options import DEFAULT_OPTIONS, GenerationOptions

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model.load(device="cpu", context=512, threads=1) as loaded:
        yield loaded


def test_the_signatures_show_every_option_with_its_default() -> None:
    assert set(DEFAULT_OPTIONS) == set(GenerationOptions.__annotations__)
    for method in (Model.generate, Session.generate, Model.chat, Session.chat):
        parameters = inspect.signature(method).parameters
        assert {name: parameters[name].default for name in DEFAULT_OPTIONS} == DEFAULT_OPTIONS
        assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in DEFAULT_OPTIONS)
        assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def test_an_unknown_option_is_a_type_error_that_names_it(model: Model) -> None:
    with pytest.raises(TypeError, match="temprature"):
        model.generate(PROMPT, temprature=0.5)  # type: ignore[call-arg]


def test_what_is_refused_is_refused_at_the_call(model: Model) -> None:
    session = model.session()
    kept = list(session.generate(PROMPT, max_tokens=4, temperature=0.0))
    tokens = session.tokens
    for prompt, options in (([], {}), ([1] * 513, {}), ([model.spec.vocab_size], {}), (PROMPT, {"top_p": 2.0}),
                            (PROMPT, {"logit_bias": {model.spec.vocab_size: 1.0}}), (PROMPT, {"draft": "mtp"})):
        with pytest.raises(InvalidRequestError):
            session.generate(prompt, **options)
    assert session.tokens == tokens, "a refusal must leave the session alone"
    assert list(session.generate(PROMPT, max_tokens=4, temperature=0.0)) == kept


def test_nothing_is_computed_before_the_first_token_is_asked_for(model: Model) -> None:
    session = model.session()
    running = session.generate(PROMPT, max_tokens=3)
    other = session.generate("The dog", max_tokens=3)
    assert session.tokens == [] and running.timing == Timing()
    running.close()
    assert list(running) == [] and session.tokens == []
    assert len(list(other)) == 3, "one that never began disturbs no other"


def test_a_with_block_stops_the_work(model: Model) -> None:
    session = model.session()
    with session.generate(PROMPT, temperature=0.0) as running:
        assert isinstance(running, Generation) and iter(running) is running
        for _ in range(5):
            next(running)
    held = session.tokens
    assert list(running) == [] and session.tokens == held
    assert running.timing.generated_tokens == running.stats()["generated_tokens"] == 5
    assert "5 tokens" in repr(running)


def test_another_thread_may_stop_the_work(model: Model) -> None:
    """It closes the generation while a token of it is computed, as a server does whose client has gone."""
    session = model.session()
    running, begun, got = session.generate(PROMPT, temperature=0.0), threading.Event(), []

    def drain() -> None:
        for token in running:
            got.append(token)
            begun.set()

    thread = threading.Thread(target=drain)
    thread.start()
    assert begun.wait(60)
    for _ in range(100):  # one of them comes while the generator runs
        running.close()
    thread.join(60)
    assert not thread.is_alive() and list(running) == []
    assert 0 < len(got) == running.timing.generated_tokens < 400, "the context of 512 did not end it"


def test_a_token_of_one_generation_never_comes_out_of_another(model: Model) -> None:
    """A thread begins another generation of the session while the first one asks for tokens: the first gets its own, or
    is told that it cannot go on."""
    prompts = (PROMPT, "The dog and the cat")
    expected = [[token.id for token in model.generate(prompt, max_tokens=40, temperature=0.0)] for prompt in prompts]
    for delay in range(10):
        session, others = model.session(), []

        def begin_another(session: Session, others: list[int], delay: int) -> None:
            time.sleep(delay / 1000)
            others.extend(token.id for token in session.generate(prompts[1], max_tokens=40, temperature=0.0))

        running, got = session.generate(prompts[0], max_tokens=40, temperature=0.0), []
        got.append(next(running).id)
        thread = threading.Thread(target=begin_another, args=(session, others, delay))
        thread.start()
        with contextlib.suppress(InvalidRequestError):
            got.extend(token.id for token in running)
        thread.join(60)
        assert got == expected[0][: len(got)] and others == expected[1]


def test_sessions_in_threads_have_their_own_figures(model: Model) -> None:
    """Both are at work at once: each thread waits for the other after its prompt and before its last token."""
    prompts, limits = (PROMPT, " ".join([PROMPT] * 20)), (30, 7)
    generations: list[Generation] = [model.session().generate(prompt, max_tokens=limit, temperature=0.0)
                                     for prompt, limit in zip(prompts, limits, strict=True)]
    barrier = threading.Barrier(2, timeout=60)

    def drain(index: int) -> None:
        next(generations[index])
        barrier.wait()
        for _ in range(limits[index] - 2):
            next(generations[index])
        barrier.wait()
        assert len(list(generations[index])) == 1

    threads = [threading.Thread(target=drain, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt, limit, generation in zip(prompts, limits, generations, strict=True):
        stats = generation.stats()
        assert (stats["prompt_tokens"], stats["generated_tokens"]) == (len(model.tokenize(prompt)), limit)
        assert stats["prompt_seconds"] > 0 and stats["generation_seconds"] > 0


def test_the_model_has_the_figures_of_the_generation_that_began_last(model: Model) -> None:
    first, second = (model.session().generate(PROMPT, max_tokens=count, temperature=0.0) for count in (6, 9))
    next(first)
    list(second)
    list(first)
    assert model.stats()["generated_tokens"] == 9
    assert (first.stats()["generated_tokens"], second.stats()["generated_tokens"]) == (6, 9)


def test_before_any_generation_there_are_no_speeds(model: Model) -> None:
    with Model.load(device="cpu", context=64, threads=1) as fresh:
        stats = fresh.stats()
    counts = ("prompt_tokens", "generated_tokens", "reused_tokens", "steps", "drafted_tokens", "accepted_tokens")
    assert [stats[name] for name in counts] == [0] * len(counts)
    rates = ("prompt_tokens_per_second", "generation_tokens_per_second", "acceptance_rate")
    assert [stats[name] for name in rates] == [None] * len(rates)


def test_a_closed_model_keeps_what_needs_no_engine(tmp_path: Path) -> None:
    model = Model.load(device="cpu", context=64, threads=1)
    session, ids = model.session(), model.tokenize(PROMPT)
    running = session.generate(PROMPT, max_tokens=4)
    next(running)
    model.close()
    assert model.tokenize(PROMPT) == ids and model.detokenize(ids) == PROMPT
    assert (model.context, model.device, model.chat_template) == (64, "cpu", None) and model.plan and model.isa
    for call in (model.session, model.stats, lambda: model.generate(PROMPT), lambda: model.logits(ids),
                 lambda: session.generate(PROMPT), lambda: model.device_name, lambda: model.graphs):
        with pytest.raises(InvalidRequestError, match="the model is closed"):
            call()
    assert len(list(running)) == 3, "what is under way may end: the session keeps the memory"


def test_what_objects_say_of_themselves(model: Model) -> None:
    session = model.session()
    assert repr(model) == "<Model 'Sharpi story' on cpu, context 512 tokens>"
    assert repr(session) == f"<Session of {model!r}>"
    assert "'Sharpi story' on cpu" in repr(model.plan) and "context 512" in repr(model.plan)
    assert "story.gguf" in repr(model.file) and f"{len(model.file.tensors)} tensors" in repr(model.file)
    assert "RAM 40.0 GB/s" in repr(ASSUMED) and "assumed" in repr(ASSUMED)
    token = next(session.generate(PROMPT, max_tokens=1, temperature=0.0))
    assert repr(token) == f"Token(id={token.id}, text={token.text!r})"
    values = (model, session, model.plan, model.file, ASSUMED, session.generate(PROMPT), model.file.metadata)
    assert all(len(repr(value)) < 300 and "\n" not in repr(value) for value in values)
    closed = Model.load(device="cpu", context=64, threads=1)
    closed.close()
    assert repr(closed).endswith("closed>")
