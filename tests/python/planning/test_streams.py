"""What many requests at once can expect of a plan, and what `sharpi plan --streams` says of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from fake_weights import MACHINE
from recorded_models import write_without_weights

from sharpi.cli import main
from sharpi.errors import InvalidRequestError
from sharpi.machine.hardware import Gpu
from sharpi.model import describe
from sharpi.planning.copies import KEPT_BYTES, Kept, kept
from sharpi.planning.plan import Plan
from sharpi.planning.planner import make_plan
from sharpi.planning.prediction.streams import Forecast, forecast, room_for
from sharpi.scheduler import Scheduler

GIB = 1 << 30


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("streams") / "mixture.gguf"
    write_without_weights(path, "qwen3-30b-a3b")
    return describe(path)


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharpi.planning.planner.gpu", lambda: Gpu("A GPU", 0, "9.0", 132, 80 * GIB, 79 * GIB))


def planned(described: Any, **asked: Any) -> Plan:
    return make_plan(*described, profile=MACHINE, shown=True, threads=MACHINE.threads, ram=256 * GIB,
                     **{"context": 4096, **asked})


def expected(described: Any, plan: Plan, streams: int, tokens: int = 1024) -> Forecast:
    found = forecast(plan, *described, streams, tokens)
    assert found is not None
    return found


@pytest.mark.parametrize("asked", [{"device": "cuda"}, {"device": "cuda", "vram": "8GiB"}, {"device": "cpu"}])
def test_more_requests_are_served_faster_in_all_and_slower_each(asked: dict[str, Any], described: Any) -> None:
    plan = planned(described, **asked)
    found = [expected(described, plan, streams) for streams in (1, 2, 8, 64)]
    for fewer, more in zip(found, found[1:], strict=False):
        assert more.step_seconds > fewer.step_seconds
        assert more.decode.tokens_per_second > fewer.decode.tokens_per_second
        assert more.last_first_token_seconds > fewer.last_first_token_seconds


@pytest.mark.parametrize("asked", [{"device": "cuda"}, {"device": "cuda", "vram": "8GiB"}, {"device": "cpu"}])
def test_one_request_is_what_the_plan_predicts(asked: dict[str, Any], described: Any) -> None:
    """A short one, whose attention hardly counts; on the CPU, as long as reading is longer than arithmetic."""
    plan = planned(described, **asked)
    assert plan.decode is not None
    assert expected(described, plan, 1, 2).decode.tokens_per_second == pytest.approx(
        plan.decode.tokens_per_second, rel=0.02)


def test_more_rows_than_a_step_takes_are_several_steps(described: Any) -> None:
    plan = planned(described, device="cuda")
    assert expected(described, plan, 128).step_seconds == 2 * expected(described, plan, 64).step_seconds
    assert expected(described, plan, 65).step_seconds > 1.2 * expected(described, plan, 64).step_seconds


def test_a_prompt_waits_for_steps_and_shares_the_bus(described: Any) -> None:
    whole, part = planned(described, device="cuda"), planned(described, device="cuda", vram="8GiB")
    for plan, most in ((whole, 1.3), (part, 2.0)):
        assert plan.prefill is not None
        alone = 2048 / plan.prefill.tokens_per_second
        found = expected(described, plan, 8, 4096)
        beside = (found.first_token_seconds - found.step_seconds) / alone
        assert 1 < beside <= most * (1 + 1e-9) and (plan is whole or beside == pytest.approx(2.0))
        assert found.last_first_token_seconds == pytest.approx(8 * alone)


def test_a_long_answer_attends_more(described: Any) -> None:
    plan = planned(described, device="cuda")
    assert expected(described, plan, 16, 4096).step_seconds > expected(described, plan, 16, 256).step_seconds


def test_a_plan_without_predictions_has_no_forecast(described: Any) -> None:
    unknown = replace(planned(described), profile=None)
    assert forecast(unknown, *described, 4, 512) is None
    assert forecast(unknown, *described, 4, 512, profile=MACHINE) == forecast(planned(described), *described, 4, 512)
    assert forecast(replace(planned(described), available_bytes=1), *described, 4, 512) is None


def test_room_is_made_for_all_tokens_unless_it_is_given() -> None:
    assert room_for(8, 1000, None, None, None) == (1000, 10, 8 * 1024)
    assert room_for(8, 1000, 2000, 3, 5000) == (2000, 3, 5000)
    assert room_for(8, 1000, 0, None, None)[0] == 0, "the model's own context"
    with pytest.raises(InvalidRequestError, match="requests of 1,000 tokens do not fit into a context of 999"):
        room_for(8, 1000, 999, None, None)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["plan", *arguments], prog_name="sharpi")


def test_the_command_says_what_requests_can_expect(tmp_path: Path) -> None:
    profile = tmp_path / "machine.json"
    profile.write_text(json.dumps(MACHINE.to_dict()), encoding="utf-8")
    given = ("--device", "cpu", "--profile", str(profile))
    said = run("--streams", "8", "--tokens", "512", *given)
    assert said.exit_code == 0, said.output
    assert "4,096 tokens" in said.output, "the cache has room for all"
    assert "8 requests at once, each a prompt of 256 and an answer of 256 tokens:" in said.output
    data = json.loads(run("--streams", "8", "--tokens", "512", "--json", *given).stdout)
    assert data["cache_tokens"] == 4096 and data["sequences"] == 10 and data["context"] == 512
    found = data["streams"]
    assert f"{found['decode']['tokens_per_second']:,.0f} tokens/s" in said.output
    assert found["decode"]["tokens_per_second"] == pytest.approx(8 / found["step_seconds"])
    assert found["kept"] == {"states_bytes": 0, "spill_bytes": KEPT_BYTES}
    assert "1.00 GiB            at most, for what the KV cache gives up" in said.output
    assert "recurrent states" not in said.output
    assert "streams" not in json.loads(run("--json", *given).stdout) and "at once" not in run(*given).output


def test_the_command_refuses_what_means_nothing() -> None:
    assert "--tokens needs --streams" in run("--tokens", "5").output
    refused = run("--streams", "2", "--tokens", "900", "-c", "512")
    assert refused.exit_code != 0 and "do not fit into a context of 512" in refused.output


def test_a_plan_knows_what_the_schedulers_copies_take(described: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(described, device="cpu")
    assert expected(described, plan, 8).kept == Kept(0, KEPT_BYTES), "it has no recurrent layers"
    recurrent = replace(plan, lines=(*plan.lines, ("recurrent state", 1000)))
    assert expected(described, recurrent, 8).kept == Kept(KEPT_BYTES, KEPT_BYTES)
    assert forecast(plan, *described, 8, 512, spill_bytes=5).kept == Kept(0, 5)
    assert kept(256 * GIB, recurrent=True, states_bytes=7, spill_bytes=0) == Kept(7, 0)
    assert kept(256 * GIB, recurrent=False, states_bytes=7, spill_bytes=5) == Kept(0, 5)
    assert kept(8 * GIB, recurrent=True) == Kept(GIB // 2, GIB // 2)

    given: list[dict[str, Any]] = []
    monkeypatch.setattr("sharpi.scheduler._core.Scheduler",
                        lambda engine, **limits: given.append(limits) or SimpleNamespace(close=lambda: None))
    for ram, loaded_for, options in ((256 * GIB, None, {}), (8 * GIB, None, {}), (8 * GIB, 5, {}),
                                     (8 * GIB, 5, {"spill_bytes": 0, "states_bytes": 7})):
        monkeypatch.setattr("sharpi.scheduler.ram_bytes", lambda ram=ram: ram)
        model = SimpleNamespace(engine=None, spill_bytes=loaded_for)
        Scheduler(model, **options)  # type: ignore[arg-type]
    assert [(limits["states_bytes"], limits["spill_bytes"]) for limits in given] == [
        (GIB, GIB), (GIB // 2, GIB // 2), (GIB // 2, 5), (7, 0)]
