"""Drafted tokens from Python and on the command line: the text is the same with each way of drafting, the guesses are
counted, and what is not possible is said in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from fake_model import cli_runner, install
from golden_families import FAMILIES
from golden_models import prediction_tensors, write_golden
from tiny_models import HYBRIDS, MODELS, write

from sharpi import Model
from sharpi.benchmark import Benchmark
from sharpi.cli import main
from sharpi.cli.text import closing_line
from sharpi.errors import InvalidRequestError
from sharpi.planning.drafts import MOST_COST, DraftedRun, choose_drafts


def sharpi(*arguments: str) -> Result:
    return cli_runner().invoke(main, arguments, catch_exceptions=False, prog_name="sharpi")


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(params=["qwen35", "qwen35moe"])
def predicting(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file with a prediction layer, of a model with recurrent layers."""
    assert HYBRIDS[request.param].predictions == 1
    return write(tmp_path / "predicting.gguf", HYBRIDS[request.param])


@pytest.fixture(params=["qwen35", "qwen35moe", "deepseek2-flash"])
def any_predicting(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The same, or of a model with latent attention."""
    name: str = request.param
    if name in HYBRIDS:
        return write(tmp_path / "predicting.gguf", HYBRIDS[name])
    keys = {"block_count": FAMILIES[name].keys["block_count"] + 1, "nextn_predict_layers": 1}
    return write_golden(name, tmp_path, keys=keys, extra=prediction_tensors(name))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A file without one."""
    return write(tmp_path / "plain.gguf", MODELS["qwen3"])


def load(path: Path, **options: Any) -> Model:
    return Model.load(path, **{"device": "cpu", "threads": 1, "batch": 32, **options})


# --- what drafts, and how many ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked, mtp, chosen", [
    ((None, None), True, ("mtp", 1)), ((None, None), False, ("off", 1)), ((None, 2), True, ("mtp", 2)),
    (("mtp", 7), True, ("mtp", 7)), (("off", None), True, ("off", 1)), (("ngram", None), True, ("ngram", 4)),
    (("ngram", np.int64(3)), False, ("ngram", 3)), (("ngram", 1), False, ("ngram", 1)),
])
def test_what_is_chosen(asked: tuple[Any, Any], mtp: bool, chosen: tuple[str, int]) -> None:
    assert choose_drafts(*asked, mtp=mtp) == chosen


@pytest.mark.parametrize("cost, chosen", [(0.79, "mtp"), (0.8, "off"), (3.0, "off")])
def test_a_layer_that_is_not_expected_to_pay_drafts_if_asked_to(cost: float, chosen: str) -> None:
    assert choose_drafts(None, None, mtp=True, cost=cost) == (chosen, 1)
    assert choose_drafts("mtp", None, mtp=True, cost=cost) == ("mtp", 1)
    assert choose_drafts(None, 2, mtp=True, cost=cost) == ("mtp", 2)


@pytest.mark.parametrize("asked, mtp, words", [
    (("mtp", None), False, "no"), (("guess", None), True, "'guess'"), ((3, None), True, "3"), (("", None), True, "''"),
    (("ngram", 0), False, "1 to 7, not 0"), (("mtp", 8), True, "1 to 7, not 8"), ((None, -1), True, "not -1"),
    (("ngram", 1.0), False, "not 1.0"), (("ngram", True), False, "not True"), (("ngram", "2"), False, "not '2'"),
    (("off", 2), True, "draft is off"), ((None, 2), False, "draft is off"),
])
def test_what_cannot_be(asked: tuple[Any, Any], mtp: bool, words: str) -> None:
    assert words in refused(lambda: choose_drafts(*asked, mtp=mtp))


# --- the text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    {"temperature": 0}, {"temperature": 1.5, "seed": 5},
    {"temperature": 0.7, "seed": 6, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "top_k": 12},
])
def test_the_text_is_the_same(options: dict[str, Any], any_predicting: Path) -> None:
    random = np.random.default_rng(3)
    with load(any_predicting, sequences=8) as model, load(any_predicting, sequences=8, mtp=False) as without:
        assert (model.plan.mtp, without.plan.mtp) == (True, False)
        drafted = accepted = 0
        for _ in range(3):
            prompt = random.integers(0, 96, 12).tolist() * 3
            expected = [t.id for t in model.generate(prompt, max_tokens=90, draft="off", **options)]
            assert len(expected) == 90 and model.stats()["drafted_tokens"] == 0
            ways: list[dict[str, Any]] = [{}, {"draft": "mtp", "draft_tokens": 2}, {"draft": "mtp", "draft_tokens": 3},
                                          {"draft": "ngram"}, {"draft": "ngram", "draft_tokens": 7}]
            for way in ways:
                assert [t.id for t in model.generate(prompt, max_tokens=90, **way, **options)] == expected, way
                stats = model.stats()
                assert way.get("draft") == "ngram" or stats["drafted_tokens"] > 60
                drafted, accepted = drafted + stats["drafted_tokens"], accepted + stats["accepted_tokens"]
            for draft in (None, "off", "ngram"):
                assert [t.id for t in without.generate(prompt, max_tokens=90, draft=draft, **options)] == expected
        assert drafted > accepted, "random layers guess wrong"


def test_stats_count_what_became_of_guesses(plain: Path) -> None:
    prompt = [5, 6, 7, 8] * 6
    with load(plain) as model:
        for draft, count in (("off", None), ("ngram", 1), ("ngram", 3), ("ngram", 7)):
            tokens = list(model.generate(prompt, max_tokens=200, temperature=0, draft=draft, draft_tokens=count))
            stats = model.stats()
            # The first token comes with the prompt; of the last step some may not have been asked for.
            made = stats["steps"] + stats["accepted_tokens"] + 1
            assert len(tokens) <= made <= len(tokens) + (count or 0)
            assert 0 <= stats["accepted_tokens"] <= stats["drafted_tokens"] <= (count or 0) * stats["steps"]
            if draft == "off":
                assert stats["acceptance_rate"] is None and stats["steps"] == len(tokens) - 1
            else:
                assert stats["acceptance_rate"] == stats["accepted_tokens"] / stats["drafted_tokens"]
                assert stats["accepted_tokens"] > 20, "greedy text of a small model repeats itself"
        list(model.generate([1, 2], max_tokens=3, temperature=0))
        assert model.stats()["drafted_tokens"] == 0, "of the last generation"


def test_a_conversation_that_changes_its_way_of_drafting(any_predicting: Path) -> None:
    """And goes back, stops half way, and goes on: what it says is what one says that never drafts."""
    random = np.random.default_rng(11)
    ways: list[dict[str, Any]] = [{}, {"draft": "off"}, {"draft": "ngram"}, {"draft": "mtp", "draft_tokens": 2}]
    with load(any_predicting) as model, load(any_predicting, mtp=False, sequences=1) as other:
        session, text = model.session(), random.integers(0, 96, 20).tolist()
        for turn in range(16):
            count, options = int(random.integers(1, 30)), {"temperature": 0.9, "seed": turn}
            made = []
            for token in session.generate(text, **ways[random.integers(len(ways))], **options):
                made.append(token.id)
                assert session.tokens == (text + made)[:-1], "what was not handed out is not there"
                if len(made) == count:
                    break
            assert made == [t.id for t in other.generate(text, max_tokens=count, draft="off", **options)]
            whole = text + made
            text = (
                whole[: random.integers(1, len(whole) + 1)][:120]
                + random.integers(0, 96, random.integers(1, 9)).tolist()
            )


def test_a_long_conversation_has_as_many_drafts_as_a_short_one(predicting: Path) -> None:
    """The states that there is room for by default do for two drafted tokens, in the first turn and in the last."""
    random = np.random.default_rng(12)
    with load(predicting) as model:
        session, text = model.session(), []
        for _ in range(7):
            text += random.integers(0, 96, 9).tolist()
            text += [token.id for token in session.generate(text, max_tokens=20, draft_tokens=2, temperature=0)]
            stats = model.stats()
            assert stats["drafted_tokens"] == 2 * stats["steps"] > 0
            assert stats["reused_tokens"] > 0 or len(text) == 29


def test_the_bundled_model_tells_the_same_story() -> None:
    def story(*arguments: str) -> tuple[str, str]:
        result = sharpi("run", "-p", "Once upon a time", "-n", "120", "-t", "2", "--device", "cpu", *arguments)
        assert result.exit_code == 0
        return result.stdout, result.stderr

    for sampling in (("--temp", "0"), ("--seed", "4"), ("--seed", "5", "--repeat-penalty", "1.1")):
        text, line = story(*sampling)
        assert "drafts" not in line and len(text) > 200
        assert story("--draft", "off", *sampling)[0] == text
        for count in ("1", "4", "7"):
            drafted, line = story("--draft", "ngram", "--draft-tokens", count, *sampling)
            assert drafted == text
            # There is nothing to look up for words that were never said before.
            found = re.search(r"; drafts: (\d+) of (\d+) accepted \((\d+) %\)", line)
            assert found and int(found[1]) <= int(found[2])
            assert int(found[3]) == round(100 * int(found[1]) / int(found[2]))


# --- loading ----------------------------------------------------------------------------------------------------------


def test_a_prediction_layer_is_loaded_where_there_is_one(predicting: Path, plain: Path, tmp_path: Path) -> None:
    with load(predicting, mtp=True) as model, load(predicting) as as_usual, load(predicting, mtp=False) as without:
        assert model.plan == as_usual.plan and model.plan.mtp and not without.plan.mtp
        assert model.stats()["kv_bytes"] == model.plan.kv_bytes == 2 * without.plan.kv_bytes, "it has keys and values"
        assert "prediction layer" in dict(model.plan.lines) and "prediction layer" not in dict(without.plan.lines)
        assert (model.spec.prediction_layers, without.spec.prediction_layers) == (1, 0)
        assert "no prediction layer" in refused(lambda: load(plain, mtp=True))
        for draft in ("mtp", None):
            options = {"draft": draft, "draft_tokens": 1}
            assert "draft" in refused(lambda options=options: next(without.generate([1], **options)))
    with load(plain) as model, load(plain, mtp=False):
        assert not model.plan.mtp and model.plan.state_bytes == 0
    for off in (0, np.False_):
        with load(predicting, mtp=off) as model:
            assert not model.plan.mtp
    for value in (2, "yes", 0.5):
        assert "mtp must be true or false" in refused(lambda value=value: load(plain, mtp=value))


def test_a_plan_says_whether_it_is_loaded(any_predicting: Path, tmp_path: Path) -> None:
    for arguments, mtp in (((), True), (("--no-mtp",), False)):
        result = sharpi("plan", "-m", str(any_predicting), "--device", "cpu", "-t", "1", "--json", *arguments)
        saved = tmp_path / "plan.json"
        saved.write_text(result.stdout, encoding="utf-8")
        with Model.load(any_predicting, plan=saved) as model:
            assert model.plan.mtp is mtp and model.spec.prediction_layers == mtp
            assert model.plan.to_dict() == json.loads(result.stdout)
            list(model.generate([1, 2, 3], max_tokens=5, temperature=0))
            pays = mtp and model.plan.draft_cost < MOST_COST
            assert (model.stats()["drafted_tokens"] > 0) is pays
        assert "says mtp already" in refused(lambda saved=saved: Model.load(any_predicting, plan=saved, mtp=False))


def test_a_plan_counts_the_weights_that_are_loaded(any_predicting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARPI_CUDA_PARTIAL_WEIGHT_CACHE", "0")
    arguments = ("plan", "-m", str(any_predicting), "--vram", "200MiB", "-t", "1")
    for more in ((), ("--no-mtp",)):
        plan = json.loads(sharpi(*arguments, "--json", *more).stdout)
        outside = sum(kind["direct"] + kind["cpu"] + kind["missed"] for kind in plan["placement"])
        weights = outside + sum(kind["vram"] + kind["by_row"] for kind in plan["placement"])
        assert (weights < 0.9 * plan["weights_bytes"]) == bool(more), "the prediction layer is left in the file"
        assert f"It fits with {100 * outside / weights:.0f} % of the weights in RAM" in sharpi(*arguments, *more).stdout


# --- the commands -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments, words", [
    (["--draft", "mtp"], "needs a prediction layer"), (["--draft-tokens", "2"], "draft is off"),
    (["--draft", "off", "--draft-tokens", "2"], "draft is off"),
])
@pytest.mark.parametrize("command", [["run", "-p", "Once", "-n", "3"]])
def test_impossible_drafts_are_one_line(command: list[str], arguments: list[str], words: str) -> None:
    result = sharpi(*command, "-t", "1", "--device", "cpu", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr and result.stderr.count("\n") == 1


def test_the_closing_line_tells_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    script = install(monkeypatch)
    script.drafts = (80, 61)
    assert sharpi("run", "-p", "Once").stderr.endswith("tokens/s; drafts: 61 of 80 accepted (76 %)\n")
    stats = {"prompt_tokens": 1, "prompt_tokens_per_second": 1.0, "generated_tokens": 1,
             "generation_tokens_per_second": 1.0, "drafted_tokens": 0, "accepted_tokens": 0}
    assert "drafts" not in closing_line(stats)


def test_chat_hands_drafts_on(monkeypatch: pytest.MonkeyPatch) -> None:
    script = install(monkeypatch)
    result = cli_runner().invoke(
        main, ["chat", "--draft", "ngram", "--no-mtp"], input="Hello\n", catch_exceptions=False
    )
    assert result.exit_code == 0
    assert (script.requests[0]["draft"], script.requests[0]["draft_tokens"]) == ("ngram", None)
    assert script.loads[0]["mtp"] is False


@pytest.mark.parametrize("arguments", [("--draft", "mtp"), ("--draft-tokens", "2")])
def test_chat_refuses_drafts_before_the_first_question(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = install(monkeypatch)
    result = cli_runner().invoke(main, ["chat", *arguments], input="Hello\nAgain\n", catch_exceptions=False)
    assert (result.exit_code, result.stdout, script.requests) == (2, "", [])
    assert "draft" in result.stderr and result.stderr.count("\n") == 1


def test_inspect_shows_what_is_special(predicting: Path, plain: Path) -> None:
    text = sharpi("inspect", str(predicting)).stdout
    assert re.search(r"prediction +a layer that drafts tokens", text)
    assert re.search(r"state +\d+\.\d KiB for each sequence", text)
    report = json.loads(sharpi("inspect", "--json", str(predicting)).stdout)
    assert report["prediction_layers"] == 1 and report["state_bytes"] > 10_000
    text = sharpi("inspect", str(plain)).stdout
    assert "prediction " not in text and "each sequence" not in text
    report = json.loads(sharpi("inspect", "--json", str(plain)).stdout)
    assert (report["prediction_layers"], report["state_bytes"]) == (0, 0)


def test_there_is_room_for_so_many_states(predicting: Path) -> None:
    takes = {}
    for count in (1, 4, 40):
        said = sharpi("plan", "-m", str(predicting), "--device", "cpu", "-t", "1", "--sequences", str(count), "--json")
        takes[count] = json.loads(said.stdout)["state_bytes"]
        table = sharpi("plan", "-m", str(predicting), "--device", "cpu", "-t", "1", "--sequences", str(count)).stdout
        assert re.search(rf"state +[\d.]+ KiB +of recurrent layers, for {count} sequences", table)
    assert 20 < takes[40] / takes[1] < 60 and takes[1] < takes[4] < takes[40]


# --- timing -----------------------------------------------------------------------------------------------------------


def test_a_step_with_drafts_is_timed(any_predicting: Path, plain: Path) -> None:
    with load(any_predicting) as model:
        for draft, count in (("off", None), ("mtp", 1), ("mtp", 2), ("ngram", 2)):
            run = Benchmark(model).drafts(5, 40, draft, count)
            assert 40 <= run.tokens == run.steps + run.accepted <= 40 + (count or 0)
            assert run.seconds > 0 and run.seconds_per_step == run.seconds / run.steps
            assert 0 <= run.accepted <= run.drafted <= (count or 0) * run.steps
            assert (run.drafted > run.steps / 2) == (draft != "off"), "there is something to look up"
    with load(plain) as model:
        assert "prediction layer" in refused(lambda: Benchmark(model).drafts(5, 40, "mtp"))


def test_bench_times_drafts_beside_plain_steps(predicting: Path) -> None:
    arguments = ("bench", "-m", str(predicting), "--device", "cpu", "-t", "1", "--prefill", "0", "--decode", "12",
                 "--repeat", "2", "--draft", "mtp")
    report = json.loads(sharpi(*arguments, "--depth", "9", "--json").stdout)
    decode, plain, one, two = report["results"]
    assert (decode["kind"], plain["kind"], one["kind"], two["kind"]) == ("decode", "drafts", "drafts", "drafts")
    assert [(entry["draft"], entry["draft_tokens"]) for entry in (plain, one, two)] == [
        ("off", 0),
        ("mtp", 1),
        ("mtp", 2),
    ]
    assert plain["plain_steps"] == 1 and plain["drafted"] == plain["accepted"] == 0 and plain["steps"] == 24
    for entry in (one, two):
        median = entry["seconds_per_step"]["median"]
        assert entry["plain_steps"] == pytest.approx(median / plain["seconds_per_step"]["median"])
        assert entry["drafted"] > 12 and entry["depth"] == 9
    table = sharpi(*arguments, "--draft-tokens", "3").stdout.splitlines()
    assert [line.split()[:2] for line in table[2:]] == [["decode", "12"], ["drafts", "tokens"], ["plain", "12"],
                                                        ["mtp", "3"]]
    assert re.search(
        r"[\d.]+ plain steps, (pays from \d+ % accepted|does not pay); here \d+ % of [\d.]+ a step$", table[-1]
    )


def test_bench_refuses_before_it_times(monkeypatch: pytest.MonkeyPatch) -> None:
    script = install(monkeypatch)
    result = sharpi("bench", "--draft", "mtp")  # the fake has no timers
    assert (result.exit_code, result.stdout) == (2, "")
    assert "needs a prediction layer" in result.stderr and result.stderr.count("\n") == 1
    assert script.loads[0]["context"] == 512, "there is room for the prompt"
    result = sharpi("bench", "--draft-tokens", "2")
    assert (result.exit_code, result.stdout, len(script.loads)) == (2, "", 1)
    assert "needs --draft mtp" in result.stderr and result.stderr.count("\n") == 1


def test_bench_takes_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways of drafting take turns, so that a machine that slows down slows all of them; the first round warms up."""
    script, runs = install(monkeypatch), []
    script.mtp = True

    def run(self: Benchmark, depth: int, tokens: int, draft: str, count: int | None) -> DraftedRun:
        runs.append((draft, count))
        steps = tokens // (1 + (count or 0))
        return DraftedRun(steps * (1.0 + (count or 0) / 4) * (100 if len(runs) <= 3 else 1), tokens, steps,
                          steps * (count or 0), steps * (count or 0) // 2)

    monkeypatch.setattr(Benchmark, "drafts", run)
    monkeypatch.setattr(Benchmark, "prefill", lambda self, tokens: 1.0)
    monkeypatch.setattr(Benchmark, "decode", lambda self, depth, tokens: 1.0)
    arguments = ("bench", "--draft", "mtp", "--prefill", "0", "--decode", "12", "--repeat", "2")
    results = json.loads(sharpi(*arguments, "--json").stdout)["results"]
    assert runs == [("off", None), ("mtp", 1), ("mtp", 2)] * 3
    assert [entry["plain_steps"] for entry in results[1:]] == [1.0, 1.25, 1.5]
    assert [entry["seconds_per_step"]["max"] for entry in results[1:]] == [1.0, 1.25, 1.5]
    assert [(entry["steps"], entry["drafted"], entry["accepted"]) for entry in results[1:]] == [
        (24, 0, 0), (12, 12, 6), (8, 16, 8)]
    assert script.loads[0]["context"] == 1 + 12 + 8
    table = sharpi(*arguments).stdout
    assert "1.25 plain steps, pays from 25 % accepted; here 50 % of 1.0 a step\n" in table
    assert "1.50 plain steps, pays from 25 % accepted; here 50 % of 2.0 a step\n" in table
    # A drafted token that costs more than a plain step cannot pay.
    monkeypatch.setattr(Benchmark, "drafts", lambda self, depth, tokens, draft, count: DraftedRun(
        tokens * (1.0 + 1.5 * (count or 0)), tokens, tokens, tokens * (count or 0), 0))
    assert "2.50 plain steps, does not pay; here 0 % of 1.0 a step\n" in sharpi(*arguments).stdout
    # Nothing to look up.
    monkeypatch.setattr(Benchmark, "drafts", lambda self, depth, tokens, draft, count: DraftedRun(
        2.0, tokens, tokens, 0, 0))
    assert "1.00 plain steps, and nothing was drafted\n" in sharpi(*arguments).stdout


def test_drafts_without_room_for_their_states(predicting: Path, plain: Path) -> None:
    lines: list[str] = []
    with load(predicting, notice=lines.append) as model:
        for count in (1, 2, 3, 7, 7):
            list(model.generate([1, 2, 3], max_tokens=4, draft="mtp", draft_tokens=count))
        list(model.generate([1, 2, 3], max_tokens=4, draft="ngram"))  # as many as go
    assert [line.split(":")[0] for line in lines] == [
        f"no more than 2 of {count} drafted tokens at once" for count in (3, 7)
    ]
    assert "sequences 9" in lines[1]
    for path, room in ((predicting, 9), (plain, 1)):
        with load(path, notice=lines.append, sequences=room) as model:
            list(model.generate([1, 2, 3], max_tokens=4, draft="ngram", draft_tokens=7))
    assert len(lines) == 2
