"""Saved plans: what is written is what is read, and whatever else a file holds is said in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_model import cli_runner
from fake_weights import GIB, MACHINE, MIB, FakeWeights, stats_of
from saved_files import CARD, plan_of
from tiny_models import MODELS, write

from sharpi.cli import main
from sharpi.errors import InvalidRequestError, OutOfMemoryError
from sharpi.machine.hardware import Gpu
from sharpi.planning.plan import Plan, load_plan
from sharpi.planning.planner import saved_plan

# Not CARD, so that one can tell when a plan was made from what is there now.
OTHER_CARD = Gpu("Another GPU", 0, "8.0", 100, 40 * GIB, 30 * GIB)


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHARPI_KV_DTYPE", "SHARPI_CUDA_PARTIAL_WEIGHT_CACHE", "SHARPI_CUDA_PARTIAL_WEIGHT_CACHE_GB",
                 "SHARPI_CUDA_ROW_SPLIT", "SHARPI_CPU_MOE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sharpi.planning.planner.gpu", lambda: CARD)
    monkeypatch.setattr("sharpi.planning.planner.current_profile", lambda measure, announce=None, gpu_index=0: MACHINE)


@pytest.fixture
def model() -> FakeWeights:
    return FakeWeights()


def saved(path: Path, plan: Plan | dict[str, Any]) -> Path:
    path.write_text(json.dumps(plan.to_dict() if isinstance(plan, Plan) else plan), encoding="utf-8")
    return path


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- reading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    {}, {"vram": 8 * GIB}, {"device": "cpu", "vram": None}, {"shown": False}, {"device": "auto", "vram": None},
    {"vram": MIB}, {"profile": None},
])
def test_what_is_written_is_read(options: dict[str, Any], model: FakeWeights, tmp_path: Path) -> None:
    plan = plan_of(model, **options)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert load_plan(saved(tmp_path / "plan.json", plan), model, model) == plan


def test_the_plan_has_something_of_everything(model: FakeWeights) -> None:
    homes = plan_of(model).homes
    assert {home.home for home in homes} == {"vram", "direct"} and any(home.cpu_rows for home in homes)


def test_a_plan_with_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeWeights(experts=(0, 1, 2))
    uses = np.array([[9, 9, 1, 1, 1, 1, 1, 1]] * 3, np.uint64)
    for options in ({}, {"warm": stats_of(model, uses)}, {"cpu_moe": True, "vram": 8 * GIB}):
        plan = plan_of(model, **options)
        slotted = [tensor.name for tensor, home in zip(model.tensors, plan.homes, strict=True) if home.home == "slots"]
        assert len(slotted) == 9 and all("_exps" in name for name in slotted)
        assert (plan.expert_slots > 0) is (plan.experts_in_slots > 0) is (plan.expert_rates[1] > 0) is (
            "cpu_moe" not in options)
        assert plan.hit_source == ("by saved statistics" if "warm" in options else "uniform routing assumed")
        path = saved(tmp_path / "plan.json", plan)
        monkeypatch.setenv("SHARPI_CPU_MOE", "0" if "cpu_moe" in options else "1")
        assert load_plan(path, model, model) == plan, "the environment has no say in a plan that is made"
        found = saved_plan(path, model, model)
        assert (found.homes, found.expert_slots, found.expert_rates) == (
            plan.homes, plan.expert_slots, plan.expert_rates)
        monkeypatch.delenv("SHARPI_CPU_MOE")

        def refused_with(plan: Plan = plan, **changes: Any) -> str:
            path = saved(tmp_path / "plan.json", {**plan.to_dict(), **changes})
            return refused(lambda: load_plan(path, model, model))

        index = model.index(slotted[4])
        whole = plan.to_dict()["homes"]
        # A stack that goes its own way; and what was, before there were slots.
        for home, words in ((["vram", 0], "the experts have different homes"),
                            (["slots", 32], f"32 rows of {slotted[4]}"),
                            (["direct", 0], f"{slotted[4]} has the home 'direct'")):
            changed = [home if at == index else known for at, known in enumerate(whole)]
            assert words in refused_with(homes=changed)
        inside = [["vram", 0] if known[0] == "slots" else known for known in whole]
        if plan.expert_slots:
            assert "slots for experts, none of which are to be in slots" in refused_with(homes=inside)


def test_a_plan_that_leaves_the_prediction_layer_in_the_file(tmp_path: Path) -> None:
    whole, without = (FakeWeights(experts=(0, 1, 2, 4), prediction_layers=1) for _ in range(2))
    # What the core says of the same file where the layer is not to be loaded.
    without.prediction_layers, without.experts = 0, (0, 1, 2)
    without.uses = [use for use in without.uses if use[3] < 4]
    plan = plan_of(without, shown=True)
    assert not plan.mtp and plan.draft_cost is None and plan.expert_slots
    path = saved(tmp_path / "plan.json", plan)
    for spec in (without, whole):  # the layer's experts have no home to speak of
        assert load_plan(path, whole, spec) == plan
    flipped = saved(tmp_path / "flipped.json", {**plan.to_dict(), "mtp": True})
    assert "the experts have different homes" in refused(lambda: load_plan(flipped, whole, whole))
    path = saved(tmp_path / "plan.json", plan_of(whole))
    assert load_plan(path, whole, whole).mtp
    assert "loads a prediction layer" in refused(lambda: load_plan(path, whole, without))


def test_a_plan_from_before_there_were_slots(model: FakeWeights, tmp_path: Path) -> None:
    whole = plan_of(model).to_dict()
    later = ("expert_slots", "expert_pools", "expert_rates", "hit_rate", "hit_source")
    path = saved(tmp_path / "plan.json", {name: value for name, value in whole.items() if name not in later})
    message = refused(lambda: load_plan(path, model, model))
    assert message.startswith(f"{path}: ") and "is missing" in message and message.endswith("make a new plan")


def test_a_plan_from_when_homes_had_ranks(model: FakeWeights, tmp_path: Path) -> None:
    """They are read past; anything else behind a home's rows makes no sense."""
    plan = plan_of(model)
    for more, sound in (([3], True), ([0], True), ([-1], False), (["x"], False), ([1, 2], False)):
        changed = {**plan.to_dict(), "homes": [[*home, *more] for home in plan.homes]}
        path = saved(tmp_path / "plan.json", changed)
        if sound:
            assert load_plan(path, model, model) == plan
        else:
            assert "its 'homes' makes no sense" in refused(lambda path=path: load_plan(path, model, model))


def test_a_plan_meets_the_gpu_that_is_there_now(model: FakeWeights, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "plan.json", plan_of(model))
    monkeypatch.setattr("sharpi.planning.planner.gpu", lambda: OTHER_CARD)
    assert saved_plan(path, model, model).gpu == OTHER_CARD
    monkeypatch.setattr("sharpi.planning.planner.gpu", lambda: "it was sold")
    assert "it was sold" in refused(saved_plan(path, model, model).require)
    path = saved(tmp_path / "plan.json", plan_of(model, device="cpu", vram=None))
    assert saved_plan(path, model, model).gpu is None
    monkeypatch.setattr("sharpi.planning.planner.gpu", lambda: CARD)
    path = saved(tmp_path / "plan.json", plan_of(model, vram=60 * GIB))
    monkeypatch.setattr("sharpi.planning.planner.gpu", lambda: OTHER_CARD)
    assert "more than Another GPU has" in refused(lambda: saved_plan(path, model, model))


def test_a_plan_that_did_not_fit_does_not_run(model: FakeWeights, tmp_path: Path) -> None:
    path = saved(tmp_path / "plan.json", plan_of(model, vram=MIB))
    with pytest.raises(OutOfMemoryError, match="--vram"):
        saved_plan(path, model, model).require()


def test_a_plan_for_another_model(model: FakeWeights, tmp_path: Path) -> None:
    path = saved(tmp_path / "plan.json", plan_of(model))
    assert "is for fake (llama), the model is other (llama)" in refused(
        lambda: load_plan(path, FakeWeights(name="other"), model))
    assert "the model is fake (qwen3)" in refused(lambda: load_plan(path, FakeWeights(architecture="qwen3"), model))
    for change in ({"layers": 5}, {"tied": True}):
        other = FakeWeights(**change)
        assert "with other tensors" in refused(lambda other=other: load_plan(path, other, other))
    for name, value in (("name", "blk.0.attn_v"), ("type", 13), ("shape", (512, 2048))):
        other = FakeWeights()
        setattr(other.tensors[2], name, value)
        assert "with other tensors" in refused(lambda other=other: load_plan(path, other, other))
    short = FakeWeights(context_length=999)
    assert "context of 1000 tokens is more than the model's" in refused(lambda: load_plan(path, short, short))
    assert load_plan(path, FakeWeights(), FakeWeights())


def test_a_plan_that_lacks_something(model: FakeWeights, tmp_path: Path) -> None:
    whole = plan_of(model).to_dict()
    sums = {
        "disk_bytes",  # plans of before have none
        "disk_bytes_per_second",
        "ram_slots",
        "ram_pools",
        "ram_hit_rate",
        "embedding_bytes",
        "prediction_bytes",
        "head_bytes",
        "streaming_bytes",
        "expert_slots_bytes",
        "state_bytes",
        "scratch_bytes",
        "graphs_bytes",
        "mapped_bytes",
        "total_bytes",
        "experts",
        "experts_in_slots",
        "slots_per_layer",
        "fits",
    }
    for name in whole:
        path = saved(tmp_path / "plan.json", {key: value for key, value in whole.items() if key != name})
        if name in sums:
            assert load_plan(path, model, model)
        else:
            assert f"{name!r} is missing" in refused(lambda path=path: load_plan(path, model, model))


NONSENSE = {
    "device": ["tpu", None, 1], "context": [0, -1, 1.5, True, "1000", None, 1 << 70], "batch": [0, 65537, None],
    "threads": [0, 1025], "sequences": [0, 4097, None], "cache_tokens": [-1, 1 << 41, None], "mtp": [None, 1, "yes"],
    "draft_cost": [-0.1, "0.1", True, float("nan")], "kv_dtype": ["int3", None], "prompt": ["quick", None, 1, "Fast"],
    "vram": [5, -1, "12GiB"], "why": [None, 3], "gpu": [3, {}, [1]],
    "lines": [None, 3, [3], [{}], [{"name": "x", "bytes": -1}], [{"name": 5, "bytes": 1}], {"name": 3}],
    "homes": [None, {}, [3], [["vram"]], [["vram", 0, 0, 0]], [["vram", -1, 0]], [["vram", 0.5, 0]], [[0, 0, 0]]],
    "placement": [None, [3], [{"kind": "x"}], [{"kind": "x", "vram": 1, "direct": -1, "cpu": 0, "missed": 0}],
                  [{"kind": "x", "vram": 1, "direct": 1, "cpu": 0}]],
    "expert_slots": [-1, None, 0.5, True, "1GiB"], "hit_source": [None, "hearsay"],
    "expert_rates": [None, 3, [], [1], [1, 2, 3], [-1, 1], [1, float("nan")], [1, "2"], [1, float("inf")], {}],
    "hit_rate": [-0.1, 1.1, float("nan"), "0.5", True],
    "ram_slots": [-1, None, 0.5, True, "1GiB"], "ram_hit_rate": [-0.1, 1.1, float("nan"), "0.5", True],
    "ram_pools": [None, 3, [3], [{}], [{"layers": 1, "experts": 8, "slot_bytes": 1, "slots": 9}]],
    "expert_pools": [None, 3, {}, [3], [[]], [{}], [{"layers": [1], "experts": 8, "slot_bytes": 1, "slots": 0}],
                     [{"layers": 1, "experts": 8, "slot_bytes": 1, "slots": 9}],
                     [{"layers": -1, "experts": 8, "slot_bytes": 1, "slots": 0}],
                     [{"layers": 1, "experts": 8, "slot_bytes": -1, "slots": 0}]],
    "decode": [3, {}, {"tokens_per_second": 0, "bound": "RAM"}, {"tokens_per_second": float("nan"), "bound": "RAM"},
               {"tokens_per_second": "5", "bound": "RAM"}, {"tokens_per_second": 5, "bound": "weather"}],
    "profile": [3, {}, {"version": 0}], "weights_bytes": [-1, "x"], "model": [None], "fitting_vram": [-1],
}


@pytest.mark.parametrize("name", NONSENSE)
def test_a_plan_with_nonsense(name: str, model: FakeWeights, tmp_path: Path) -> None:
    whole = plan_of(model).to_dict()
    for value in NONSENSE[name]:
        path = saved(tmp_path / "plan.json", {**whole, name: value})
        message = refused(lambda path=path: load_plan(path, model, model))
        assert message.startswith(f"{path}: ") and name in message and "make a new plan" in message


def test_a_plan_keeps_how_prompts_are_computed(model: FakeWeights, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever GPU is there now, and whatever is its default."""
    for prompt in ("exact", "fast"):
        path = saved(tmp_path / "plan.json", plan_of(model, prompt=prompt))
        for default in ("exact", "fast"):
            monkeypatch.setattr("sharpi.planning.prompt_modes._BY_COMPUTE_CAPABILITY", {"9.0": default, "8.0": default})
            for card in (CARD, OTHER_CARD):
                monkeypatch.setattr("sharpi.planning.planner.gpu", lambda card=card: card)
                assert saved_plan(path, model, model).prompt == prompt


def test_prompts_that_cannot_be(model: FakeWeights, tmp_path: Path) -> None:
    """What no plan says, as the CPU has one arithmetic and the planner rounds batches up."""
    on_cpu, on_gpu = plan_of(model, device="cpu", vram=None).to_dict(), plan_of(model).to_dict()
    for plan, words in (({**on_cpu, "prompt": "fast"}, "its 'prompt' is fast, and the CPU's prompts are exact"),
                        ({**on_gpu, "batch": 63}, "its batch of 63 is less than the 64 that fast prompts take"),
                        ({**on_gpu, "batch": 39, "context": 40}, "its batch of 39 is less than the 64")):
        path = saved(tmp_path / "plan.json", plan)
        assert words in refused(lambda path=path: load_plan(path, model, model))
    for changes in ({"batch": 64}, {"batch": 40, "context": 40}, {"batch": 1, "prompt": "exact"}):
        assert load_plan(saved(tmp_path / "plan.json", {**on_gpu, **changes}), model, model)


def test_homes_that_the_model_cannot_have(model: FakeWeights, tmp_path: Path) -> None:
    whole = plan_of(model).to_dict()
    norm, gate = model.index("blk.0.attn_norm"), model.index("blk.3.ffn_gate")
    for tensor, home, words in ((norm, ["direct", 0, 0], "blk.0.attn_norm has to be in VRAM"),
                                (gate, ["attic", 0, 5], "attic"), (gate, ["direct", 33, 5], "33 rows"),
                                (gate, ["direct", 0, 5], "different rows")):
        homes = [home if index == tensor else known for index, known in enumerate(whole["homes"])]
        path = saved(tmp_path / "plan.json", {**whole, "homes": homes})
        assert words in refused(lambda path=path: load_plan(path, model, model))
    path = saved(tmp_path / "plan.json", {**whole, "homes": whole["homes"][1:]})
    assert "homes for" in refused(lambda: load_plan(path, model, model))
    path = saved(tmp_path / "plan.json", {**whole, "batch": 1001})
    assert "more than the" in refused(lambda: load_plan(path, model, model))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b"GGUF\x03\x00", b"[" * 100_000,
                                     b"1" * 5000])
def test_files_that_are_no_plans(content: bytes, model: FakeWeights, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    message = refused(lambda: load_plan(path, model, model))
    assert message.startswith(f"{path}: ") and "sharpi plan --json" in message


def test_a_model_taken_for_a_plan_is_not_read_whole(model: FakeWeights, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # no machine could hold it
    assert "too large for a plan" in refused(lambda: load_plan(path, model, model))


def test_files_that_cannot_be_read(model: FakeWeights, tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        assert "cannot read the plan" in refused(lambda path=path: load_plan(path, model, model))


# --- the commands --------------------------------------------------------------------------------------------------


def sharpi(*arguments: str) -> Any:
    return cli_runner().invoke(main, arguments, catch_exceptions=False, prog_name="sharpi")


@pytest.fixture
def story(tmp_path: Path) -> Path:
    """A plan for the bundled model."""
    result = sharpi("plan", "--json", "--device", "cpu", "-c", "77", "-b", "16", "-t", "2", "--kv-dtype", "fp32")
    assert result.exit_code == 0
    path = tmp_path / "story.json"
    path.write_text(result.stdout, encoding="utf-8")
    return path


def test_a_saved_plan_is_run(story: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sharpi import Model

    # What the environment says is for plans that are still to be made.
    monkeypatch.setenv("SHARPI_KV_DTYPE", "fp16")
    with Model.load(plan=story) as loaded:
        assert (loaded.context, loaded.threads, loaded.device, loaded.plan.kv_dtype) == (77, 2, "cpu", "fp32")
        assert loaded.plan.to_dict() == json.loads(story.read_text(encoding="utf-8"))
        assert loaded.stats()["kv_bytes"] == loaded.plan.kv_bytes
    result = sharpi("run", "--plan", str(story), "-p", "Once upon a time", "-n", "500", "--no-stats")
    assert result.exit_code == 0 and result.stdout.startswith("Once upon a time")
    assert sharpi("bench", "--prefill", "8", "--decode", "4", "--plan", str(story)).exit_code == 0


@pytest.mark.parametrize("option", [["--vram", "1GiB"], ["-c", "77"], ["--ctx-size", "77"], ["--device", "auto"],
                                    ["--device", "cuda"], ["-b", "16"], ["-t", "2"], ["--kv-dtype", "fp32"],
                                    ["--profile", "some.json"], ["--cpu-moe"], ["--sequences", "4"], ["--no-mtp"],
                                    ["--prompt", "exact"]])
@pytest.mark.parametrize("command", [["run", "-p", "x"], ["chat"], ["bench"]])
def test_options_that_a_plan_answers_are_refused(command: list[str], option: list[str], story: Path) -> None:
    result = sharpi(*command, "--plan", str(story), *option)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--plan says" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    [
        {"device": "cpu"},
        {"vram": "1GiB"},
        {"context": 77},
        {"kv_dtype": "fp32"},
        {"threads": 2},
        {"batch": 16},
        {"sequences": 2},
        {"cache_tokens": 2000},
        {"cpu_moe": True},
        {"cpu_moe": False},
        {"mtp": True},
        {"mtp": False},
        {"prompt": "exact"},
        {"profile": MACHINE},
    ],
)
def test_arguments_that_a_plan_answers_are_refused(options: dict[str, Any], story: Path) -> None:
    from sharpi import Model

    assert f"says {next(iter(options))} already" in refused(lambda: Model.load(plan=story, **options))


def test_a_wrong_plan_is_one_line(story: Path, tmp_path: Path) -> None:
    tiny = write(tmp_path / "tiny.gguf", MODELS["llama"])
    broken = tmp_path / "broken.json"
    broken.write_text("{}", encoding="utf-8")
    for command in (["run", "-p", "x"], ["chat"], ["bench"]):
        for plan, model in ((story, ["-m", str(tiny)]), (broken, []), (tmp_path / "missing.json", [])):
            result = sharpi(*command, "--plan", str(plan), *model)
            assert (result.exit_code, result.stdout) == (2, "")
            assert result.stderr.startswith(f"sharpi: error: {plan}: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["run", "-p", "x"], ["chat"], ["bench"], ["plan"]])
def test_a_wrong_profile_is_one_line(command: list[str], tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"version": 1}', encoding="utf-8")
    for path in (broken, tmp_path / "missing.json"):
        result = sharpi(*command, "--profile", str(path))
        assert (result.exit_code, result.stdout) == (2, "")
        assert str(path) in result.stderr and result.stderr.count("\n") == 1


def test_a_profile_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    MACHINE.save(path)
    result = sharpi("plan", "--profile", str(path), "--json")
    assert json.loads(result.stdout)["profile"] == MACHINE.to_dict()
    assert sharpi("run", "--profile", str(path), "--device", "cpu", "-p", "Once", "-n", "1").exit_code == 0
