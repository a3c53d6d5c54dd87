"""Plans: the sums, the limits, and that `sharpi plan` says what a run then takes."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from fake_model import cli_runner

from sharpi.cli import main
from sharpi.errors import InvalidRequestError
from sharpi.hardware import ram_bytes
from sharpi.planner import DEFAULT_CONTEXT, KV_DTYPES, choose_context, choose_kv_dtype, make_plan

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass
class FakeSpec:
    context_length: int = 32768
    per_token: int = 1000

    def kv_bytes(self, kv_dtype: str, context: int) -> int:
        return self.per_token * ELEMENT_BYTES[kv_dtype] * context

    def scratch_bytes(self, batch: int, context: int, threads: int) -> int:
        return 50 * batch + 3 * context + 7 * threads


def fake_file(*sizes: int) -> SimpleNamespace:
    return SimpleNamespace(name="fake", architecture="llama", tensors=[SimpleNamespace(nbytes=n) for n in sizes])


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARPI_KV_DTYPE", raising=False)


def test_the_sums() -> None:
    plan = make_plan(fake_file(700, 300), FakeSpec(), context=100, kv_dtype="fp32", batch=8, ram=10**9)
    assert (plan.weights_bytes, plan.kv_bytes, plan.scratch_bytes) == (1000, 400_000, 707)
    assert plan.total_bytes == 401_707 and plan.fits
    assert plan.to_dict()["total_bytes"] == 401_707 and plan.to_dict()["fits"] is True


def test_fits_is_exact() -> None:
    for ram, fits in ((401_707, True), (401_706, False)):
        plan = make_plan(fake_file(1000), FakeSpec(), context=100, kv_dtype="fp32", batch=8, ram=ram)
        assert plan.fits is fits
        assert plan.fitting_context == (100 if fits else 99)


def test_the_fitting_context_is_the_longest_that_fits() -> None:
    dice = random.Random(5)
    for _ in range(200):
        spec = FakeSpec(context_length=dice.randint(1, 5000), per_token=dice.randint(1, 2000))
        kind = dice.choice(KV_DTYPES)
        ram = dice.randint(1, 20_000_000)
        weights = dice.randint(1, 10_000_000)

        best = make_plan(fake_file(weights), spec, kv_dtype=kind, batch=16, ram=ram).fitting_context
        assert 0 <= best <= spec.context_length
        for context, fits in ((best, True), (best + 1, False)):
            if 1 <= context <= spec.context_length:
                plan = make_plan(fake_file(weights), spec, context=context, kv_dtype=kind, batch=16, ram=ram)
                assert plan.fits is fits


def test_contexts() -> None:
    assert choose_context(FakeSpec(), None) == DEFAULT_CONTEXT
    assert choose_context(FakeSpec(context_length=100), None) == 100
    assert choose_context(FakeSpec(), 32768) == 32768
    for context in (32769, 0, -1):
        with pytest.raises(InvalidRequestError, match="context"):
            choose_context(FakeSpec(), context)


def test_kv_types(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_kv_dtype(None) in KV_DTYPES
    monkeypatch.setenv("SHARPI_KV_DTYPE", "fp16")
    assert choose_kv_dtype(None) == "fp16"
    assert choose_kv_dtype("fp32") == "fp32"
    monkeypatch.setenv("SHARPI_KV_DTYPE", "int3")
    with pytest.raises(InvalidRequestError, match="int3.*fp32, bf16, fp16"):
        choose_kv_dtype(None)


def test_ram_is_plausible() -> None:
    assert 1 << 26 < ram_bytes() < 1 << 50


def plan_command(*arguments: str):
    return cli_runner().invoke(main, ["plan", *arguments], catch_exceptions=False)


@pytest.mark.parametrize("ram, words", [
    (1 << 40, "It fits"),
    (20_000_000, "It would with a context of"),
    (1_000_000, "No context is short enough"),
])
def test_the_command_says_whether_it_fits(monkeypatch: pytest.MonkeyPatch, ram: int, words: str) -> None:
    monkeypatch.setattr("sharpi.model.describe", lambda path=None: (fake_file(10_000_000), FakeSpec()))
    monkeypatch.setattr("sharpi.planner.ram_bytes", lambda: ram)
    result = plan_command("-m", "some.gguf", "-c", "8000", "--kv-dtype", "bf16")
    assert result.exit_code == 0
    assert words in result.stdout
    if "would" in words:
        context = int(result.stdout.rsplit("-c ", 1)[1])
        assert "It fits" in plan_command("-m", "some.gguf", "-c", str(context), "--kv-dtype", "bf16").stdout
        assert "It fits" not in plan_command("-m", "some.gguf", "-c", str(context + 1), "--kv-dtype", "bf16").stdout


def test_the_plan_is_what_a_run_takes() -> None:
    from sharpi import Model

    planned = json.loads(plan_command("--json", "-c", "100", "-t", "2", "--kv-dtype", "fp32").stdout)
    with Model.load(context=100, kv_dtype="fp32", threads=2) as model:
        stats = model.stats()
        assert model.plan.to_dict() == planned
    assert {key: stats[key] for key in ("weights_bytes", "kv_bytes", "scratch_bytes")} == {
        key: planned[key] for key in ("weights_bytes", "kv_bytes", "scratch_bytes")}


def test_a_context_beyond_the_models_is_refused() -> None:
    result = plan_command("-c", "100000000")
    assert result.exit_code == 2
    assert "more than the model's" in result.stderr and result.stderr.count("\n") == 1
