"""Log-probabilities, prompts that are scored, and constraints: what comes with an answer's tokens."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from sharpi import Answer, InvalidRequestError, Model, Scheduler, SharpiError, Token

PROMPT = "Once upon a time there was a little girl"


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model.load(device="cpu", context=512, cache_tokens=4096, sequences=16, threads=1) as loaded:
        yield loaded


@pytest.fixture
def scheduler(model: Model) -> Iterator[Scheduler]:
    with model.scheduler() as made:
        yield made


class Allowed:
    """Allows some tokens, and ends the answer after some."""

    def __init__(self, tokens: list[int], ends: int = 1000) -> None:
        self.tokens, self.ends = tokens, ends
        self.accepted: list[int] = []
        self.fills = 0

    def fill(self, words: npt.NDArray[np.uint32]) -> bool:
        self.fills += 1
        words[:] = 0
        for token in self.tokens:
            words[token // 32] |= np.uint32(1 << token % 32)
        return True

    def accept(self, token: int) -> None:
        self.accepted.append(token)

    def rollback(self, tokens: int) -> None:
        assert 0 < tokens <= len(self.accepted)
        del self.accepted[-tokens:]

    def ended(self) -> bool:
        return len(self.accepted) >= self.ends


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def likeliest(logits: npt.NDArray[np.float32], count: int) -> list[int]:
    return [int(token) for token in np.lexsort((np.arange(len(logits)), -logits))[:count]]


def test_tokens_have_the_models_own_log_probabilities(model: Model, scheduler: Scheduler) -> None:
    prompt = model.tokenize(PROMPT)
    options = {"max_tokens": 20, "temperature": 0.9, "seed": 3, "logit_bias": {5: 2.0}, "repetition_penalty": 1.3}
    tokens = list(scheduler.submit(prompt, scores=4, **options))  # type: ignore[arg-type]
    ids = [token.id for token in tokens]
    logits = model.logits([*prompt, *ids])[len(prompt) - 1 : -1]
    expected = log_softmax(logits)
    assert len(tokens) == 20
    for row, (token, values) in enumerate(zip(tokens, expected, strict=True)):
        assert token.logprob == pytest.approx(values[token.id], abs=3e-6)
        assert [id for id, _ in token.top] == likeliest(logits[row], 4)
        assert [value for _, value in token.top] == pytest.approx([values[id] for id, _ in token.top], abs=3e-6)
    assert any(token.id != token.top[0][0] for token in tokens), "some tokens are not the likeliest"
    assert [token.id for token in scheduler.submit(prompt, **options)] == ids  # type: ignore[arg-type]


def test_nobody_who_asks_for_none_gets_scores(scheduler: Scheduler) -> None:
    answer = scheduler.submit(PROMPT, max_tokens=5)
    assert {(token.logprob, token.top) for token in answer} == {(None, ())}
    assert answer.prompt_scores is None
    first = next(scheduler.submit(PROMPT, max_tokens=5, scores=0))
    assert first.logprob is not None and first.top == ()


def test_scores_do_not_depend_on_company_or_drafts(model: Model, scheduler: Scheduler) -> None:
    prompts = [f"{PROMPT} and {count} ships" for count in range(8)]

    def submitted(prompt: str, draft: str) -> Answer:
        return scheduler.submit(prompt, max_tokens=30, temperature=0.7, seed=1, scores=2, draft=draft)

    alone = [list(submitted(prompt, "off")) for prompt in prompts]
    together = [submitted(prompt, draft) for draft in ("off", "ngram") for prompt in prompts]
    assert [list(answer) for answer in together] == alone * 2


def test_each_token_carries_its_own_score_however_late_its_text_comes(scheduler: Scheduler) -> None:
    """Text that may become a stop text is held back; scores are not."""
    plain = list(scheduler.submit(PROMPT, max_tokens=20, temperature=0, scores=1))
    text = "".join(token.text for token in plain)
    held = list(scheduler.submit(PROMPT, max_tokens=20, temperature=0, scores=1, stop=text[:12] + "?"))
    assert [(token.id, token.logprob, token.top) for token in held[:20]] == \
        [(token.id, token.logprob, token.top) for token in plain]
    assert held[0].text != plain[0].text
    assert "".join(token.text for token in held) == text
    assert all(token.logprob is None for token in held[20:]), "what was held at the end comes without a score"


@pytest.mark.parametrize("length", [1, 2, 300])
def test_a_prompt_can_be_scored(model: Model, scheduler: Scheduler, length: int) -> None:
    prompt = (model.tokenize(PROMPT) * 50)[:length]
    for tokens in (0, 3):
        answer = scheduler.submit(prompt, echo=True, scores=3, max_tokens=tokens, temperature=0)
        assert len(list(answer)) == tokens
        assert answer.finish_reason == "length"
        assert answer.reused_tokens == 0 and answer.computed_tokens == length
        scores = answer.prompt_scores
        assert scores is not None and len(scores) == length and scores[0] == (None, ())
        logits = model.logits(prompt)
        expected = log_softmax(logits)
        for at in range(1, length):
            logprob, top = scores[at]
            assert logprob == pytest.approx(expected[at - 1, prompt[at]], abs=3e-6)
            assert [id for id, _ in top] == likeliest(logits[at - 1], 3)


def test_a_scored_prompt_has_the_same_answer(scheduler: Scheduler) -> None:
    def ids(echo: bool) -> list[int]:
        return [token.id for token in scheduler.submit(PROMPT, max_tokens=20, seed=5, echo=echo)]

    assert ids(echo=True) == ids(echo=False)


def test_an_answer_tells_what_the_cache_had(scheduler: Scheduler, model: Model) -> None:
    ids = (model.tokenize(PROMPT) * 20)[:100]
    first = scheduler.submit(ids, max_tokens=2)
    assert (first.reused_tokens, len(list(first))) == (0, 2)
    second = scheduler.submit([*ids, 5], max_tokens=2)
    next(second)
    assert second.reused_tokens == 64, "a page of the cache"
    assert second.computed_tokens == len(ids) + 1


# --- constraints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["off", "ngram"])
def test_a_constraint_decides_what_may_come(scheduler: Scheduler, draft: str) -> None:
    constraint = Allowed([7, 300, 301], ends=9)
    answer = scheduler.submit(PROMPT, constraint=constraint, max_tokens=50, draft=draft, seed=2, scores=0)
    ids = [token.id for token in answer if token.logprob is not None]
    assert set(ids) <= {7, 300, 301} and len(ids) == 9
    assert answer.finish_reason == "end"
    assert constraint.accepted == ids


def test_scores_are_those_without_the_constraint(scheduler: Scheduler) -> None:
    free = next(scheduler.submit(PROMPT, scores=20, max_tokens=1, temperature=0))
    third = free.top[2]
    answer = scheduler.submit(PROMPT, scores=20, max_tokens=1, temperature=0, constraint=Allowed([third[0]]))
    forced = next(answer)
    assert (forced.id, forced.logprob) == third
    assert forced.top == free.top


def test_a_constraint_may_forbid_nothing(scheduler: Scheduler) -> None:
    class Free(Allowed):
        def fill(self, words: npt.NDArray[np.uint32]) -> bool:
            words[:] = 0
            return False

    constraint = Free([])
    ids = [token.id for token in scheduler.submit(PROMPT, max_tokens=10, seed=1, constraint=constraint)]
    assert ids == [token.id for token in scheduler.submit(PROMPT, max_tokens=10, seed=1)]
    assert constraint.accepted[:10] == ids[:10]


@pytest.mark.parametrize("method", ["fill", "accept", "ended"])
def test_a_constraint_that_fails_ends_its_answer_alone(scheduler: Scheduler, method: str) -> None:
    def fails(*_: object) -> bool:
        raise ValueError("no grammar allows this")

    constraint = Allowed([7, 300])
    setattr(constraint, method, fails)
    expected = list(scheduler.submit(PROMPT, max_tokens=30, seed=1))
    other = scheduler.submit(PROMPT, max_tokens=30, seed=1)
    failing = scheduler.submit(PROMPT, max_tokens=30, constraint=constraint)
    with pytest.raises(SharpiError, match="constraint failed: ValueError: no grammar allows this"):
        list(failing)
    assert list(other) == expected


def test_what_fill_returns_must_be_a_bool(scheduler: Scheduler) -> None:
    class Wrong(Allowed):
        def fill(self, words: npt.NDArray[np.uint32]) -> bool:
            return "yes"  # type: ignore[return-value]

    with pytest.raises(SharpiError, match="the answer's constraint failed"):
        list(scheduler.submit(PROMPT, constraint=Wrong([7])))


def test_a_constraint_that_forbids_all_ends_the_answer(scheduler: Scheduler) -> None:
    with pytest.raises(SharpiError, match="no token may be chosen"):
        list(scheduler.submit(PROMPT, constraint=Allowed([])))


def test_a_thread_of_the_core_stays_known_between_calls(scheduler: Scheduler) -> None:
    """Else each call makes and clears what the interpreter keeps of a thread, which takes longer than the call."""
    class Counting(Allowed, threading.local):
        calls = 0

        def ended(self) -> bool:
            seen.append(self.calls)
            self.calls += 1
            return False

    seen: list[int] = []
    list(scheduler.submit(PROMPT, max_tokens=20, constraint=Counting([7, 300])))
    assert seen == list(range(20))


def test_a_constraint_is_let_go_with_its_answer(scheduler: Scheduler) -> None:
    constraint = Allowed([7, 300], ends=3)
    gone = weakref.ref(constraint)
    list(scheduler.submit(PROMPT, constraint=constraint))
    del constraint
    gc.collect()
    assert gone() is None


def test_threads_with_constraints_do_not_wait_for_each_other(model: Model, scheduler: Scheduler) -> None:
    """The scheduler's thread asks for the GIL while it holds the model, so no thread may wait for the model with it."""
    done: list[list[Token]] = []

    def work(seed: int) -> None:
        for _ in range(3):
            done.append(list(scheduler.submit(PROMPT, max_tokens=20, seed=seed, constraint=Allowed([7, 300, seed]))))
            scheduler.counts()
            model.generate(PROMPT, max_tokens=2).close()
            list(model.generate(PROMPT, max_tokens=2, seed=1))
            _ = model.logits([1, 2, 3])

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(4)]
    end = time.monotonic() + 120
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
        assert not thread.is_alive(), "a thread is stuck"
    assert len(done) == 12


def test_a_program_ends_while_constraints_are_asked() -> None:
    """The interpreter goes while the scheduler's thread still calls it."""
    program = """
import sharpi

class Slow:
    def fill(self, words):
        sum(range(20000))
        return False
    def accept(self, token): pass
    def rollback(self, tokens): pass
    def ended(self): return False

model = sharpi.Model.load(device="cpu", context=512, sequences=8, threads=1)
scheduler = model.scheduler()
answers = [scheduler.submit("Once", constraint=Slow()) for _ in range(4)]
next(answers[0])
print("the end")
"""
    for _ in range(3):
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, "the end\n", "")


@pytest.mark.parametrize(("options", "words"), [
    ({"scores": -1}, "scores must be 0 to 20, not -1"),
    ({"scores": 21}, "scores must be 0 to 20, not 21"),
    ({"scores": "5"}, "scores"),
    ({"echo": "yes"}, "echo"),
    ({"max_tokens": 0}, "at least one token"),
    ({"constraint": object()}, r"a constraint needs a method fill\(\)"),
])
def test_what_cannot_be_asked_is_refused(scheduler: Scheduler, options: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        scheduler.submit(PROMPT, **options)  # type: ignore[arg-type]
