"""What the core is told by name: what it refuses, and that a plan and the engine that runs it are told the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_weights import GIB, fields_of, plain_machine, set_gpu  # noqa: F401 - a fixture
from tiny_models import HYBRIDS, MODELS, write

from sharpi import _core
from sharpi.errors import InvalidRequestError
from sharpi.loading.description import describe
from sharpi.loading.opening import engine_options
from sharpi.planning.placement import ExpertPool
from sharpi.planning.planner import make_plan

# Every field, none with its default.
ALL = {
    "context": 100, "cache_tokens": 300, "batch": 20, "threads": 3, "kv_dtype": "fp16", "prompt": "exact",
    "sequences": 7, "device": "cuda",
    "ordinal": 3, "vram": 1 << 40, "homes": [("vram", 0), ("direct", 32), ("slots", 0)],
    "expert_slot_bytes": 5 << 32, "expert_ram_bytes": 6 << 32, "expert_rates": (1e9, 2e9), "warm": [(3, 4), (0, 1)],
    "tight": True,
}


def test_every_field_is_kept_under_its_name() -> None:
    usual = fields_of(_core.EngineOptions(context=100))
    assert list(usual) == sorted(ALL)
    for name in ALL:
        assert fields_of(_core.EngineOptions(**{"context": 100, name: ALL[name]})) == {**usual, name: ALL[name]}
        assert usual[name] != ALL[name] or name == "context"
    assert fields_of(_core.EngineOptions(**ALL)) == ALL
    for kv_dtype in ("fp32", "bf16", "fp16"):
        assert _core.EngineOptions(context=1, kv_dtype=kv_dtype).kv_dtype == kv_dtype


@pytest.mark.parametrize("name", ["contxt", "kv_type", "expert_slots", "cuda", "Batch"])
def test_an_unknown_field_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        _core.EngineOptions(**ALL, **{name: 1})


def test_fields_have_names_and_a_context_is_needed() -> None:
    with pytest.raises(TypeError):
        _core.EngineOptions(100)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        _core.EngineOptions(batch=20)  # type: ignore[call-arg]
    options = _core.EngineOptions(**ALL)
    for name in ALL:
        with pytest.raises(AttributeError):
            setattr(options, name, ALL[name])


@pytest.mark.parametrize("name, value, message", [
    ("kv_dtype", "fp8", "unknown KV type 'fp8': known are fp32, bf16 and fp16"),
    ("kv_dtype", "", "unknown KV type '': known are fp32, bf16 and fp16"),
    ("prompt", "slow", "unknown prompt mode 'slow': known are exact and fast"),
    ("prompt", "Fast", "unknown prompt mode 'Fast': known are exact and fast"),
    ("device", "auto", "unknown device 'auto': known are cpu and cuda"),
    ("homes", [("vram", 0), ("ram", 0)], "unknown home 'ram': known are vram, direct and slots"),
    ("homes", [("direct", -1)], "a plan with an impossible number of rows for the CPU"),
    ("homes", [("direct", (1 << 40) + 1)], "a plan with an impossible number of rows for the CPU"),
])
def test_a_value_that_cannot_be_is_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        _core.EngineOptions(**{**ALL, name: value})
    assert str(refusal.value) == message


@pytest.mark.parametrize("name, value", [
    ("context", "many"), ("batch", None), ("threads", 1 << 31), ("sequences", 1 << 31), ("vram", -1),
    ("expert_slot_bytes", -1), ("expert_ram_bytes", -1), ("homes", [("vram",)]), ("homes", [("vram", 0, 0)]),
    ("ordinal", 1 << 31), ("expert_rates", (1.0,)), ("warm", [3]), ("prompt", 1)])
def test_a_value_of_another_type_is_refused(name: str, value: object) -> None:
    with pytest.raises(TypeError):
        _core.EngineOptions(**{**ALL, name: value})


def test_what_the_engine_checks(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", MODELS["llama"])
    _, spec = describe(path)
    for name, value, word in (("context", 0, "at least 1 token"), ("context", 1 << 40, "larger than the model's"),
                              ("batch", 0, "batch must be"), ("batch", 65537, "batch must be"),
                              ("cache_tokens", -1, "fewer than 0 tokens"),
                              ("sequences", 0, "sequences must be"), ("sequences", 4097, "sequences must be")):
        with pytest.raises(InvalidRequestError, match=word):
            _core.Engine(spec, [str(path)], _core.EngineOptions(**{"context": 8, name: value}))
    with pytest.raises(TypeError):
        _core.Engine(spec, [str(path)], {"context": 8})  # type: ignore[arg-type]


def test_homes_are_for_all_tensors_of_the_model(tmp_path: Path) -> None:
    file, spec = describe(write(tmp_path / "m.gguf", MODELS["llama"]))
    options = _core.EngineOptions(context=8, device="cuda", homes=[("vram", 0)] * 2)
    for ask in (spec.memory_lines, spec.expert_pools):
        with pytest.raises(InvalidRequestError, match=f"homes for 2 tensors of {len(file.tensors)}"):
            ask(options)


# The most GB of movable weights in VRAM; the experts alone take 0.04.
LIMITS = {"nothing in VRAM": "0", "experts in slots": "0.03"}


@pytest.mark.parametrize("place", ["cpu", "all in VRAM", *LIMITS])
@pytest.mark.parametrize("prompt", ["exact", "fast"])
@pytest.mark.usefixtures("plain_machine")
def test_the_engine_is_told_what_the_plan_was_made_with(place: str, prompt: str, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """So its memory is what the plan says, by the core's own sums."""
    set_gpu(monkeypatch, 80 * GIB)
    layout = replace(HYBRIDS["qwen35moe"], layers=8, context=40_000, experts=64)
    file, spec = describe(write(tmp_path / "m.gguf", layout))
    asked = {"device": "cpu" if place == "cpu" else "cuda", "context": 30_000, "kv_dtype": "fp32", "batch": 100,
             "threads": 5, "sequences": 9, "cache_tokens": 35_000, "prompt": prompt}
    if place in LIMITS:
        monkeypatch.setenv("SHARPI_CUDA_PARTIAL_WEIGHT_CACHE_GB", LIMITS[place])
    plan = make_plan(file, spec, **asked)
    options = engine_options(plan)
    assert plan.fits and spec.memory_lines(options) == list(plan.lines)
    if place == "experts in slots":
        assert plan.experts_in_slots and [ExpertPool(*pool) for pool in spec.expert_pools(options)] == list(
            plan.expert_pools)
    assert fields_of(options) == {
        **asked, "prompt": plan.prompt, "ordinal": 0, "vram": plan.vram or 0, "homes": list(plan.homes), "warm": [],
        "expert_slot_bytes": plan.expert_slots, "expert_ram_bytes": 0, "expert_rates": plan.expert_rates,
        "tight": not plan.fits}
    for name, value in (("context", 40_000), ("batch", 3000), ("kv_dtype", "bf16"), ("sequences", 90),
                        ("cache_tokens", 60_000)):
        other = _core.EngineOptions(**{**fields_of(options), name: value})
        assert spec.memory_lines(other) != list(plan.lines), f"{name} does not show in the sums"
