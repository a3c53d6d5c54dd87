"""Plans: the sums, the limits, the choice of a device, and that `sharpi plan` says what a run then takes."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from fake_model import cli_runner
from fake_weights import NO_GPU, plain_machine, set_gpu  # noqa: F401 - a fixture
from tiny_models import QUANTIZED_TYPES

from sharpi import _core
from sharpi.cli import main
from sharpi.errors import InternalError, InvalidRequestError, OutOfMemoryError
from sharpi.machine.hardware import Gpu, gpu, ram_bytes
from sharpi.planning.planner import (
    DEFAULT_BATCH,
    DEFAULT_CONTEXT,
    KV_DTYPES,
    VRAM_MARGIN,
    choose_context,
    choose_kv_dtype,
    make_plan,
    parse_vram,
)

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
MIB, GIB = 1 << 20, 1 << 30
pytestmark = pytest.mark.usefixtures("plain_machine")


@dataclass
class FakeSpec:
    """On the GPU its weights take 1000 bytes, as those of `fake_file(1000)` do, and all of them must be there."""

    context_length: int = 32768
    per_token: int = 10_000
    weights: int = 1000
    layer_count: int = 2
    prediction_layers: int = 0
    state_bytes: int = 0
    shared_experts: int = 0
    row_kernels: int = 0
    most_seen: int = 1 << 30  # tokens
    kv_line: int | None = None  # what the KV cache's line says, if that is not what the cache holds

    def kv_bytes(self, options: _core.EngineOptions) -> int:
        return self.per_token * ELEMENT_BYTES[options.kv_dtype] * min(options.context, self.most_seen)

    def kv_bytes_if_all_seen(self, options: _core.EngineOptions) -> int:
        return self.per_token * ELEMENT_BYTES[options.kv_dtype] * options.context

    def kv_bytes_read(self, kv_dtype: str, tokens: int) -> int:
        return self.per_token * ELEMENT_BYTES[kv_dtype] * min(tokens, self.most_seen)

    long_attention = True

    def attention_products(self, tokens: int) -> int:
        return self.per_token * min(tokens, self.most_seen)

    def tensor_uses(self) -> list[tuple[int, str, str, int, int, int, int]]:
        return [(0, "weights", "vector", 0, 1000, 1, 1000)]

    def refusal(self, device: str) -> str:
        return ""

    def memory_lines(self, options: _core.EngineOptions) -> list[tuple[str, int]]:
        batch, context, on_gpu = options.batch, options.context, options.device == "cuda"
        assert 1 <= batch <= max(context, options.cache_tokens) and not options.homes and options.sequences == 4
        assert options.prompt == "exact" or (on_gpu and batch >= min(64, context))
        weights = [("token embedding", 300), ("layer 0", 250), ("layer 1", 350), ("output head", self.weights - 900)]
        return [*((name, count if on_gpu else 0) for name, count in weights),
                ("KV cache", self.kv_bytes(options) if self.kv_line is None else self.kv_line),
                ("scratch", 50 * batch + 3 * context + 7 * options.threads), ("graphs", 11 if on_gpu else 0)]


def fake_file(*sizes: int) -> SimpleNamespace:
    tensors = [SimpleNamespace(name=f"weights {i}", type=0, shape=(n,), nbytes=n) for i, n in enumerate(sizes)]
    return SimpleNamespace(name="fake", architecture="llama", tensors=tensors, paths=())


def plan_of(weights: int = 1000, spec: FakeSpec | None = None, **options):
    """With exact prompts, whose batches may be of any size."""
    return make_plan(fake_file(weights), spec or FakeSpec(),
                     **{"device": "cpu", "context": 100, "kv_dtype": "fp32", "batch": 8, "prompt": "exact", **options})


# What FakeSpec takes with plan_of's options, in all.
ON_CPU, ON_GPU = 1000 + 4_000_000 + 707, 1000 + 4_000_000 + 707 + 11


# --- the sums ------------------------------------------------------------------------------------------------------


def test_the_sums_on_the_cpu() -> None:
    plan = make_plan(fake_file(700, 300), FakeSpec(), device="cpu", context=100, kv_dtype="fp32", batch=8, ram=10**9)
    assert (plan.weights_bytes, plan.kv_bytes, plan.scratch_bytes) == (1000, 4_000_000, 707)
    assert plan.total_bytes == ON_CPU and plan.fits and plan.mapped_bytes == 1000
    shown = json.loads(json.dumps(plan.to_dict()))
    assert shown["total_bytes"] == ON_CPU and shown["fits"] is True and shown["device"] == "cpu"


def test_the_sums_on_the_gpu() -> None:
    plan = plan_of(device="cuda", vram=10**9)
    assert (plan.embedding_bytes, plan.layer_bytes, plan.head_bytes, plan.graphs_bytes) == (300, (250, 350), 100, 11)
    assert plan.mapped_bytes == 0 and plan.weights_bytes == 1000
    assert plan.total_bytes == ON_GPU == sum(count for _, count in plan.lines)
    shown = json.loads(json.dumps(plan.to_dict()))
    assert [line["name"] for line in shown["lines"]][:3] == ["token embedding", "layer 0", "layer 1"]
    assert shown["vram"] == 10**9 and shown["gpu"] == NO_GPU


def test_a_kv_cache_in_the_step_of_the_line_before() -> None:
    """It takes nothing more of the device, and is not nothing."""
    plan = plan_of(spec=FakeSpec(kv_line=0), device="cuda", vram=10**9)
    assert dict(plan.lines)["KV cache"] == 0 and plan.total_bytes == ON_GPU - 4_000_000
    assert plan.kv_bytes == json.loads(json.dumps(plan.to_dict()))["kv_bytes"] == 4_000_000


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fits_is_exact(device: str) -> None:
    needed = ON_CPU if device == "cpu" else ON_GPU
    for room, fits in ((needed, True), (needed - 1, False)):
        plan = plan_of(device=device, **({"ram": room} if device == "cpu" else {"vram": room}))
        assert plan.fits is fits
        assert plan.fitting_context == (100 if fits else 99)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_would_fit_is_the_most_that_does(device: str) -> None:
    dice = random.Random(5)
    for _ in range(200):
        spec = FakeSpec(context_length=dice.randint(1, 5000), per_token=dice.randint(1, 2000))
        room = dice.randint(MIB, 20_000_000)
        options = {"spec": spec, "device": device, "kv_dtype": dice.choice(KV_DTYPES), "batch": dice.choice([16, 300]),
                   **({"ram": room} if device == "cpu" else {"vram": room})}
        weights = dice.randint(1, 10_000_000)
        plan = plan_of(weights, **{**options, "context": None})
        best = plan.fitting_context
        assert 0 <= best <= spec.context_length
        for context, fits in ((best, True), (best + 1, False)):
            if 1 <= context <= spec.context_length:
                assert plan_of(weights, **{**options, "context": context}).fits is fits
        if plan.fitting_batch:
            assert plan_of(weights, **{**options, "context": None, "batch": plan.fitting_batch}).fits
            assert plan.fitting_batch == plan.batch or not plan.fits
        else:
            assert not plan.fits


def test_batches() -> None:
    assert plan_of(batch=None, context=32768).batch == DEFAULT_BATCH["cpu"] == 512
    assert plan_of(device="cuda", batch=None, context=32768).batch == DEFAULT_BATCH["cuda"] == 2048
    assert plan_of(batch=300, context=32768).batch == 300
    assert plan_of(batch=300, context=200).batch == 200, "no batch is longer than the context"


def test_a_batch_has_prompts_of_several_sequences() -> None:
    """Its rows are bounded by what the cache holds, not by one sequence's context."""
    for device, batch in (("cuda", 2048), ("cpu", 512)):
        for tokens, expected in ((64 * 128, batch), (256, 256), (0, 128)):
            plan = plan_of(device=device, context=128, cache_tokens=tokens, batch=None)
            assert (plan.context, plan.batch) == (128, expected), (device, tokens)


def test_the_default_batch_on_the_gpu_shrinks_to_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    room = 1000 + 4096 * 40_000 + 3 * 4096 + 7 + 11  # all but the batch
    for spare, batch in ((2048, 2048), (2047, 1024), (600, 512), (32, 32)):
        plan = plan_of(device="cuda", batch=None, context=4096, vram=room + 50 * spare)
        assert plan.fits and plan.batch == plan.fitting_batch == batch
    assert not plan_of(device="cuda", batch=None, context=4096, vram=room + 50 * 31).fits
    assert not plan_of(device="cuda", batch=2048, context=4096, vram=room + 50 * 2047).fits, "what was asked for stays"
    set_gpu(monkeypatch, room + 50 * 600 + VRAM_MARGIN)
    plan = plan_of(device="auto", batch=None, context=4096)
    assert (plan.device, plan.batch) == ("cuda", 512)


def fast_plan(notices: list[str] | None = None, **options):
    """A plan for the GPU whose prompts are computed as is the default."""
    notice = None if notices is None else notices.append
    return plan_of(**{"device": "cuda", "context": 4096, "prompt": None, "notice": notice, **options})


def test_batches_of_fast_prompts_are_whole_tiles() -> None:
    for asked, batch in ((1, 64), (8, 64), (63, 64), (64, 64), (65, 65), (2048, 2048), (None, 2048)):
        notices: list[str] = []
        assert fast_plan(notices, batch=asked).batch == batch
        said = [f"a batch of {asked} is rounded up to 64: fast prompts are computed in tiles of 64 tokens"
                " (--prompt exact takes any batch)"]
        assert notices == (said if asked and asked < 64 else [])
        assert fast_plan(notices, batch=asked, prompt="exact").batch == asked or asked is None
    assert fast_plan(notices := [], batch=8, context=40).batch == 40, "no batch is longer than the context"
    assert notices[0].startswith("a batch of 8 is raised to 40, the whole context: ")
    assert fast_plan(batch=None, context=40).batch == 40
    notices = []
    assert fast_plan(notices, batch=64, context=40).batch == 40 and notices == []
    assert fast_plan(notices, batch=8, device="cpu").batch == 8 and notices == []


def test_a_batch_is_rounded_for_the_device_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpu(monkeypatch, GIB)
    for vram, device, batch in ((GIB, "cuda", 64), (MIB, "cpu", 8)):
        notices: list[str] = []
        plan = fast_plan(notices, device="auto", batch=8, context=100, vram=vram)
        assert (plan.device, plan.batch, len(notices)) == (device, batch, int(device == "cuda"))


def test_no_batch_is_offered_that_would_be_rounded() -> None:
    room = 1000 + 4096 * 40_000 + 3 * 4096 + 7 + 11  # all but the batch
    for spare, batch in ((128, 128), (127, 64), (64, 64)):
        plan = fast_plan(batch=None, vram=room + 50 * spare)
        assert plan.fits and plan.batch == batch
    # 63 rows: an exact prompt takes 32 of them.
    assert not fast_plan(batch=None, vram=room + 50 * 63).fits
    assert fast_plan(batch=None, vram=room + 50 * 63, prompt="exact").batch == 32
    for asked, offered in ((2048, 32), (100, 50), (60, 60)):
        for prompt, batch in (("exact", offered), ("fast", 0)):
            plan = fast_plan(batch=asked, vram=room + 50 * 63, prompt=prompt)
            assert plan.fitting_batch == batch
            assert plan.fits or ("-b " in plan.shortage()) is (batch > 0)
    # A context below a tile is one batch.
    short = 1000 + 40 * 40_000 + 3 * 40 + 7 + 11 + 50 * 40
    assert fast_plan(batch=None, context=40, vram=short).fits
    assert not fast_plan(batch=8, context=40, vram=short - 1).fits


def test_the_mode_of_prompts_follows_the_kind_of_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = {"9.0": "exact", "8.9": "fast"}
    monkeypatch.setattr("sharpi.planning.prompt_modes._BY_COMPUTE_CAPABILITY", modes)
    dice = random.Random(3)
    for capability, default in {**modes, "12.0": "fast", "": "fast"}.items():
        for _ in range(20):
            card = Gpu("Some GPU", 0, capability, dice.randint(1, 200), 80 * GIB, dice.randint(300 * MIB, 80 * GIB))
            monkeypatch.setattr("sharpi.planning.planner.gpu", lambda card=card: card)
            options = {"batch": dice.choice([None, 100, 2048]), "context": dice.choice([40, 500, 2000]),
                       "vram": dice.choice([None, 50 * MIB, 300 * MIB]), "kv_dtype": dice.choice(KV_DTYPES)}
            assert fast_plan(**options).prompt == default
            for asked in ("exact", "fast"):
                assert fast_plan(**options, prompt=asked).prompt == asked
    set_gpu(monkeypatch, NO_GPU)
    assert fast_plan(vram=GIB).prompt == "fast", "also of a GPU that is not there"


@pytest.mark.parametrize("asked", [None, "exact", "fast"])
def test_on_the_cpu_prompts_are_exact(asked: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpu(monkeypatch, 1000)
    for device in ("cpu", "auto"):
        plan = plan_of(device=device, prompt=asked)
        assert (plan.device, plan.prompt, plan.batch) == ("cpu", "exact", 8)
        assert json.loads(json.dumps(plan.to_dict()))["prompt"] == "exact"


@pytest.mark.parametrize("device", ["cpu", "cuda", "auto"])
@pytest.mark.parametrize("prompt", ["quick", "", "FAST", "exact "])
def test_unknown_modes_are_refused(prompt: str, device: str) -> None:
    with pytest.raises(InvalidRequestError, match="prompt mode .* is unknown; there are exact and fast"):
        plan_of(device=device, prompt=prompt)


def test_contexts() -> None:
    assert choose_context(FakeSpec(), None) == DEFAULT_CONTEXT
    assert choose_context(FakeSpec(context_length=100), None) == 100
    assert choose_context(FakeSpec(), 32768) == 32768
    assert choose_context(FakeSpec(context_length=5000), 0) == 5000
    for context in (32769, -1):
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


@pytest.mark.parametrize("text, count", [
    (None, None), (12 * GIB, 12 * GIB), ("12GiB", 12 * GIB), ("12 gib", 12 * GIB), (" 12G ", 12 * GIB),
    ("12GB", 12 * 10**9), ("1.5GiB", 3 * GIB // 2), ("800M", 800 * MIB), ("800mb", 800 * 10**6), ("1TiB", 1024 * GIB),
    ("1234567", 1234567), ("1234567B", 1234567), ("7000k", 7168000), (MIB, MIB), ("1048576", MIB),
])
def test_budgets(text: str | int | None, count: int | None) -> None:
    assert parse_vram(text) == count


@pytest.mark.parametrize("text", ["", "lots", "12GiBs", "-1GiB", "1e9", "GiB", "12,5GiB", "1.2.3G", "0", "0.0GiB", 0,
                                  -5, 1 << 62, "9999999TiB", 1.5, True, [], "١٢GiB", "nan", "0x10"])
def test_budgets_that_are_none(text: object) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        parse_vram(text)
    assert "VRAM" in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("text, words", [
    (12, "of 12 bytes: did you mean 12GiB?"), ("12", "of 12 bytes: did you mean 12GiB?"),
    ("12.5 B", "of 12 bytes: did you mean 12.5GiB?"), ("8k", "of 8192 bytes: did you mean 8GiB?"),
    ("24000", "of 24000 bytes: did you mean 24000MiB?"), (MIB - 1, "of 1048575 bytes: did you mean 1048575MiB?"),
    ("0.0001GiB", "of 107374 bytes: 1MiB is the least"),
])
def test_budgets_whose_unit_was_forgotten(text: str | int, words: str) -> None:
    for device in ("auto", "cuda"):
        with pytest.raises(InvalidRequestError) as refusal:
            plan_of(device=device, vram=text)
        assert str(refusal.value) == f"a VRAM budget {words}"


# --- the choice of a device ------------------------------------------------------------------------------------------


def test_auto_without_a_gpu_is_the_cpu_and_says_why() -> None:
    for vram in (None, "12GiB"):
        plan = plan_of(device="auto", vram=vram)
        assert (plan.device, plan.why) == ("cpu", NO_GPU)
        plan.require()


def test_auto_takes_the_gpu_where_the_model_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, device in ((ON_GPU + VRAM_MARGIN, "cuda"), (ON_GPU + VRAM_MARGIN - 1, "cpu"), (1, "cpu")):
        set_gpu(monkeypatch, free)
        plan = plan_of(device="auto")
        assert plan.device == device and plan.why and "\n" not in plan.why
        assert ("VRAM" in plan.why) == (device == "cpu")
        plan.require()


def test_auto_heeds_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpu(monkeypatch, GIB)
    for vram, device in ((ON_GPU, "cuda"), (ON_GPU - 1, "cpu")):
        plan = plan_of(device="auto", vram=vram)
        assert (plan.device, plan.vram) == (device, vram)
        assert ("budget" in plan.why) == (device == "cpu")
    # What is not free, or is left to others, cannot be had, whatever the budget says.
    for vram in (ON_GPU, GIB):
        for free, device in ((ON_GPU + VRAM_MARGIN, "cuda"), (ON_GPU + VRAM_MARGIN - 1, "cpu"), (ON_GPU - 1, "cpu")):
            set_gpu(monkeypatch, free)
            assert plan_of(device="auto", vram=vram).device == device


def test_the_gpu_where_there_is_none() -> None:
    plan = plan_of(device="cuda")
    assert plan.available_bytes is None and plan.fits
    with pytest.raises(InvalidRequestError, match="no usable GPU"):
        plan.require()
    with pytest.raises(InvalidRequestError, match="no usable GPU"):
        plan_of(device="cuda", vram=MIB).require()


def test_a_model_that_does_not_fit_says_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpu(monkeypatch, GIB)
    plan_of(device="cuda", vram=ON_GPU).require()
    with pytest.raises(OutOfMemoryError) as refusal:
        plan_of(device="cuda", context=2000, vram=30_000_000, batch=8).require()
    message = str(refusal.value)
    assert "\n" not in message and "--device cpu" in message and "are missing" in message
    context = plan_of(device="cuda", context=2000, vram=30_000_000).fitting_context
    assert 512 < context < 2000 and f"-c {context})" in message
    # Less than the weights: nothing would help, and nothing is offered.
    with pytest.raises(OutOfMemoryError) as refusal:
        plan_of(spec=FakeSpec(weights=10**7), device="cuda", vram=2 * MIB).require()
    assert "would fit" not in str(refusal.value)
    # A smaller batch is enough.
    with pytest.raises(OutOfMemoryError, match=r"-b 128\)"):
        room = 40_960_000 + 1000 + 11 + 3 * 1024 + 7 + 50 * 200
        plan_of(device="cuda", context=1024, batch=1024, vram=room).require()


@pytest.mark.parametrize("asked, least", [(2000, 512), (512, 512), (400, 400), (1, 1)])
def test_contexts_too_short_to_be_of_use_are_not_offered(asked: int, least: int) -> None:
    def plan(fitting: int):
        spec = FakeSpec(weights=2 * MIB)
        options = _core.EngineOptions(device="cuda", kv_dtype="fp32", prompt="exact", batch=1, context=max(1, fitting))
        room = sum(n for _, n in spec.memory_lines(options)) - (fitting == 0)
        return plan_of(spec=spec, device="cuda", context=asked, batch=1, vram=room)

    for fitting in {0, 1, least - 1, least, asked - 1} - {asked}:
        found = plan(fitting)
        assert not found.fits and found.fitting_context == fitting
        assert found.offered_context == (fitting if fitting >= least else 0)
        assert ("-c" in found.shortage()) is (fitting >= least)


def test_a_shortage_names_what_is_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget or the GPU's free memory, whichever is less."""
    set_gpu(monkeypatch, VRAM_MARGIN + 3 * MIB)
    for vram, words in ((2 * MIB, "the VRAM budget is 2.00 MiB:"), (3 * MIB, "the VRAM budget is 3.00 MiB:"),
                        (GIB, "there are 3.00 MiB free:"), (None, "there are 3.00 MiB free:")):
        for device in ("cuda", "auto"):
            plan = plan_of(device=device, vram=vram)
            said = plan.why if device == "auto" else plan.shortage()
            assert f"fake needs 3.82 MiB of VRAM and {words} " in said
    assert "of RAM and there are 3.00 MiB: " in plan_of(ram=3 * MIB).shortage()


def test_a_budget_on_the_cpu_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="means nothing"):
        plan_of(device="cpu", vram="1GiB")
    with pytest.raises(InvalidRequestError, match="unknown device 'tpu'"):
        plan_of(device="tpu")


# --- the machine and the command -------------------------------------------------------------------------------------


def test_ram_is_plausible() -> None:
    assert 1 << 26 < ram_bytes() < 1 << 50


@pytest.mark.parametrize("kind", [InvalidRequestError, InternalError, OutOfMemoryError])
def test_a_gpu_that_cannot_be_asked_is_none(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(ordinal: int) -> None:
        raise kind("device 0:\nan illegal memory access")

    monkeypatch.setattr(_core, "find_cuda_device", fail)
    assert gpu() == "device 0: an illegal memory access"


def test_the_gpu_or_a_reason() -> None:
    found = gpu()
    if isinstance(found, str):
        assert found and "\n" not in found
    else:
        assert 0 < found.free_bytes <= found.total_bytes and float(found.compute_capability) >= 7.5


def plan_command(*arguments: str):
    return cli_runner().invoke(main, ["plan", *arguments], catch_exceptions=False)


@pytest.fixture
def fake_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharpi.loading.description.describe",
                        lambda path=None, mtp=True, rope=None: (fake_file(10_000_000), FakeSpec()))


@pytest.mark.parametrize("ram, words", [
    (1 << 40, "It fits"),
    (40_000_000, "a context of"),
    (15_000_000, "No useful context is short enough"),
    (1_000_000, "No useful context is short enough"),
])
def test_the_command_says_whether_it_fits(fake_described: None, monkeypatch: pytest.MonkeyPatch, ram: int,
                                          words: str) -> None:
    monkeypatch.setattr("sharpi.planning.disk.ram_bytes", lambda: ram)
    options = ("-m", "some.gguf", "--kv-dtype", "bf16", "--device", "cpu")
    result = plan_command("-c", "8000", *options)
    assert result.exit_code == (0 if "fits" in words else 1)
    assert words in result.stdout
    assert plan_command("-c", "8000", *options, "--json").exit_code == result.exit_code
    if "a context" in words:
        context = int(result.stdout.rsplit("-c ", 1)[1])
        assert "It fits" in plan_command("-c", str(context), *options).stdout
        assert "It fits" not in plan_command("-c", str(context + 1), *options).stdout


def test_the_command_plans_for_a_gpu_that_is_not_there(fake_described: None) -> None:
    options = ("-m", "some.gguf", "--device", "cuda", "-c", "100", "--kv-dtype", "fp32", "-b", "8", "-t", "1",
               "--prompt", "exact")
    result = plan_command(*options, "--vram", "12GiB")
    assert result.exit_code == 0 and "on the GPU" in result.stdout
    assert "It fits" in result.stdout and "12.00 GiB   --vram" in result.stdout
    assert f"It cannot run on this machine: {NO_GPU}." in " ".join(result.stdout.split())
    assert "2 of them" in result.stdout and "layer 1" not in result.stdout
    assert "layer 1 " in plan_command(*options, "--vram", "12GiB", "--verbose").stdout
    assert "--vram says how much" in plan_command(*options).stdout
    short = plan_command(*options, "--vram", "2MB").stdout
    assert "does not fit" in short and "-c " not in short
    short = plan_command(*options, "-c", "1000", "--vram", "30MB").stdout
    assert "does not fit" in short and "-c " in short
    assert json.loads(plan_command(*options, "--json").stdout)["total_bytes"] == ON_GPU


@pytest.mark.parametrize("most_seen, words", [
    (420, "8.0 MiB   1,000 tokens, bf16; 19.1 MiB if every layer saw all"),
    (1000, "19.1 MiB   1,000 tokens, bf16"),
])
def test_the_command_says_what_windows_save(monkeypatch: pytest.MonkeyPatch, most_seen: int, words: str) -> None:
    spec = FakeSpec(most_seen=most_seen)
    monkeypatch.setattr("sharpi.loading.description.describe",
                        lambda path=None, mtp=True, rope=None: (fake_file(1000), spec))
    options = ("-m", "some.gguf", "--device", "cpu", "-c", "1000", "--kv-dtype", "bf16", "-b", "8", "-t", "1")
    lines = plan_command(*options).stdout.splitlines()
    assert [line.split("KV cache")[1].strip() for line in lines if "KV cache" in line] == [words]
    shown = json.loads(plan_command(*options, "--json").stdout)
    assert shown["kv_bytes"] == 20_000 * most_seen and shown["kv_bytes_if_all_seen"] == 20_000_000


def test_the_command_says_how_prompts_are_computed(fake_described: None) -> None:
    options = ("-m", "some.gguf", "-c", "4000", "-t", "1", "--vram", "12GiB")
    fast, exact = (plan_command(*options, *more) for more in (("-b", "8"), ("-b", "8", "--prompt", "exact")))
    assert "Prompts are fast: computed on tensor cores, with bits that depend on the kind of GPU." in " ".join(
        fast.stdout.split()
    )
    assert "batches of 64 tokens" in fast.stdout
    assert fast.stderr == ("sharpi: a batch of 8 is rounded up to 64: fast prompts are computed in tiles of 64 tokens"
                           " (--prompt exact takes any batch)\n")
    assert "Prompts are exact: the bits are the same on every processor." in exact.stdout
    assert "batches of 8 tokens" in exact.stdout and exact.stderr == ""
    for mode in ("exact", "fast"):
        assert "Prompts are exact" in plan_command("-m", "some.gguf", "--device", "cpu", "--prompt", mode).stdout
        shown = plan_command(*options, "--prompt", mode, "--json")
        assert json.loads(shown.stdout)["prompt"] == mode and shown.stderr == ""


def test_the_command_says_what_is_free(fake_described: None, monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpu(monkeypatch, GIB)
    result = plan_command("-m", "some.gguf", "-c", "100")
    assert "1.00 GiB   Some GPU" in result.stdout and "Device cuda was chosen" in result.stdout
    set_gpu(monkeypatch, 1000)
    result = plan_command("-m", "some.gguf", "-c", "100")
    assert "mapped from the file" in result.stdout and "Device cpu was chosen: fake needs" in result.stdout


def test_the_plan_is_what_a_run_takes() -> None:
    from sharpi import Model

    planned = json.loads(plan_command("--json", "-c", "100", "-t", "2", "--kv-dtype", "fp32", "--device", "cpu").stdout)
    with Model.load(context=100, kv_dtype="fp32", threads=2, device="cpu") as model:
        stats = model.stats()
        ran = json.loads(json.dumps(model.plan.to_dict()))
        # A plan to look at says more than one to run needs.
        for name in ("decode", "decode_full", "prefill", "profile", "placement"):
            assert planned.pop(name) and not ran.pop(name)
        assert ran == planned
        asked = {name: count for name, count, _, _ in model.engine.trace if name != "start"}
    assert list(asked) == [line["name"] for line in planned["lines"]]
    # Lines are in whole pages of memory; one that begins within the page of the line before it may seem a page short.
    for line in planned["lines"]:
        assert abs(line["bytes"] - asked[line["name"]]) <= 4096, line
    assert stats["weights_bytes"] == planned["weights_bytes"]
    assert (stats["kv_bytes"], stats["scratch_bytes"]) == (asked["KV cache"], asked["scratch"])
    assert planned["kv_bytes"] == asked["KV cache"]


def described(kind: str, *, experts: int) -> tuple[object, int]:
    """An 8B model, or one of the same shapes with experts, all its matrices of one type: what the core reads off such
    a file, and the bytes of its tensors. No file is needed for that."""
    import gguf

    width, hidden, heads, layers, vocab = 4096, 768 if experts else 12288, 32, 36, 151936
    arch = "qwen3moe" if experts else "qwen3"
    integers = {
        "block_count": layers,
        "context_length": 40960,
        "embedding_length": width,
        "feed_forward_length": hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": 8,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "expert_count": experts,
        "expert_used_count": min(experts, 8),
        "expert_feed_forward_length": hidden,
    }
    metadata = {f"{arch}.{key}": value for key, value in integers.items() if value}
    metadata |= {"general.architecture": arch, f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
                 f"{arch}.rope.freq_base": 1e6}
    shapes = {"token_embd": [width, vocab], "output": [width, vocab], "output_norm": [width]}
    count = [experts] if experts else []
    suffix = "_exps" if experts else ""
    for block in (f"blk.{layer}." for layer in range(layers)):
        shapes |= {block + "attn_norm": [width], block + "ffn_norm": [width], block + "attn_q_norm": [128],
                   block + "attn_k_norm": [128], block + "attn_q": [width, 4096], block + "attn_k": [width, 1024],
                   block + "attn_v": [width, 1024], block + "attn_output": [4096, width],
                   block + "ffn_gate" + suffix: [width, hidden, *count],
                   block + "ffn_up" + suffix: [width, hidden, *count],
                   block + "ffn_down" + suffix: [hidden, width, *count]}
        if experts:
            shapes[block + "ffn_gate_inp"] = [width, experts]
    rows, at = [], 0
    for name, shape in shapes.items():
        of_type = gguf.GGMLQuantizationType["F32" if len(shape) == 1 or name.endswith("gate_inp") else kind]
        elements, size = gguf.GGML_QUANT_SIZES[of_type]
        nbytes = math.prod(shape) // elements * size
        rows.append((name + ".weight", int(of_type), shape, 0, at, nbytes))
        at += nbytes
    return _core.Description(metadata, rows), at


@pytest.mark.parametrize("experts", [0, 16])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *QUANTIZED_TYPES])
def test_weights_take_on_the_gpu_what_they_take_in_the_file(kind: str, experts: int) -> None:
    spec, file_bytes = described(kind, experts=experts)
    lines = dict(spec.memory_lines(_core.EngineOptions(device="cuda", batch=2048, context=4096, threads=8)))
    weights = sum(count for name, count in lines.items() if name not in ("KV cache", "scratch", "graphs"))
    angles = 4096 * 128 * 4
    assert file_bytes <= weights <= 1.01 * file_bytes + angles
    assert lines["KV cache"] == 36 * 2 * 8 * 128 * 2 * 4096
    assert 0 < lines["scratch"] < 2 << 30
    on_cpu = dict(spec.memory_lines(_core.EngineOptions(device="cpu", batch=512, context=4096, threads=8)))
    assert list(on_cpu) == list(lines)
    assert sum(count for name, count in on_cpu.items() if name not in ("KV cache", "scratch")) < 1 << 24


@pytest.mark.parametrize("arguments, word", [
    (["-c", "100000000"], "more than the model's"), (["--vram", "lots"], "no amount of VRAM"),
    (["--vram", "12"], "did you mean 12GiB?"),
    (["--vram", "1GiB", "--device", "cpu"], "means nothing"), (["--device", "tpu"], "tpu"), (["-b", "0"], "batch"),
])
def test_what_cannot_be_planned_is_refused(arguments: list[str], word: str) -> None:
    result = plan_command(*arguments)
    assert result.exit_code == 2
    assert word in result.stderr and result.stderr.count("\n") == 1
