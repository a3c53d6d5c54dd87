"""The engine's logits on small random models: right, and the same however the work is cut up.

What is right says numpy_model.py, in float64. Most models here are float32, with a float32 KV cache, so that rounding
stays below 1e-6 and whatever is wrong stands out; quantized ones have bounds of their own, with the reason beside.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy_model import NumpyModel, relative_error
from tiny_models import HYBRIDS, MODELS, QUANTIZED_TYPES, Delta, TinyModel, as_version_2, fused, write

from sharpi import Model, _core
from sharpi.errors import InvalidRequestError

# float32 against float64: about 1e-6 is what rounding makes of it.
FLOAT32_BOUND = 1e-5

# Long enough for two pages of the KV cache and, with batches of BATCH, two batches of prefill.
TOKENS = np.random.default_rng(0).integers(0, 96, 80).tolist()
BATCH = 48

ALL = MODELS | HYBRIDS

# A row of every quantized type must be a whole number of its blocks.
WIDE = {"width": 256, "hidden": 256, "heads": 4, "head_dim": 64}
DENSE = TinyModel("llama", **WIDE)
EXPERTS = TinyModel("qwen3moe", qk_norm="head", experts=4, experts_used=2, **WIDE)
HYBRID = TinyModel("qwen35", qk_norm="head", delta=Delta(value_heads=8, head_dim=32, interval=2), **WIDE)
HYBRID_EXPERTS = TinyModel("qwen35moe", qk_norm="head", experts=4, experts_used=2, shared=256, **WIDE,
                           delta=Delta(value_heads=8, head_dim=32, interval=2))
BASES = {"dense": DENSE, "experts": EXPERTS, "hybrid": HYBRID, "hybrid with experts": HYBRID_EXPERTS}


def logits(path: Path, tokens: list[int] = TOKENS, chunks: tuple[int, ...] = (), **options) -> np.ndarray:
    """From one fresh model; the defaults here are float32, two threads and small batches."""
    with Model.load(path, **{"kv_dtype": "fp32", "threads": 2, "batch": BATCH, "device": "cpu", **options}) as model:
        return model.logits(tokens, chunks=chunks)


@pytest.mark.parametrize("name", ALL)
def test_matches_numpy_however_the_tokens_are_cut(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", ALL[name])
    expected = NumpyModel(path).logits(TOKENS)
    whole = logits(path, batch=len(TOKENS))
    assert whole.shape == (len(TOKENS), 96) and whole.dtype == np.float32
    assert relative_error(whole, expected) < FLOAT32_BOUND
    random = np.random.default_rng(5)
    for chunks in [(), (1,) * len(TOKENS), *(tuple(random.integers(1, 30, 40).tolist()) for _ in range(3))]:
        np.testing.assert_array_equal(logits(path, chunks=chunks), whole)


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "qwen35"])
def test_on_the_cpu_a_rows_kind_does_not_show(name: str, tmp_path: Path) -> None:
    with Model.load(write(tmp_path / "m.gguf", ALL[name]), batch=BATCH, device="cpu") as model:
        whole = _core.Session(model.engine).logits(TOKENS)
        np.testing.assert_array_equal(_core.Session(model.engine).logits(TOKENS, kind="decode"), whole)
        session = _core.Session(model.engine)
        session.evaluate(TOKENS[:30], kind="prompt")
        session.evaluate(TOKENS[30:40], [3, 3], "decode")
        np.testing.assert_array_equal(session.logits(TOKENS[40:]), whole[40:])
        for call in (session.evaluate, session.logits):
            with pytest.raises(InvalidRequestError, match="^unknown kind of rows 'both': known are prompt and decode$"):
                call([1], kind="both")
        assert session.tokens == TOKENS


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen2", "qwen3moe", "olmoe", "qwen35", "qwen35moe"])
def test_fused_tensors_change_nothing(name: str, tmp_path: Path) -> None:
    plain = write(tmp_path / "plain.gguf", ALL[name])
    joined = write(tmp_path / "joined.gguf", fused(ALL[name]))
    assert plain.read_bytes() != joined.read_bytes()
    np.testing.assert_array_equal(logits(joined), logits(plain))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_fused_quantized_tensors_change_nothing(kind: str, tmp_path: Path) -> None:
    model = replace(EXPERTS, type=kind)
    plain, joined = write(tmp_path / "plain.gguf", model), write(tmp_path / "joined.gguf", fused(model))
    np.testing.assert_array_equal(logits(joined), logits(plain))


def test_version_2_and_split_files_are_the_same_model(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", MODELS["llama"])
    expected = logits(path)
    np.testing.assert_array_equal(logits(as_version_2(path, tmp_path / "v2.gguf")), expected)
    write(tmp_path / "split.gguf", MODELS["llama"], split_max_tensors=8)
    parts = sorted(tmp_path.glob("split-0*.gguf"))
    assert len(parts) > 2
    for part in (parts[0], parts[-1]):
        np.testing.assert_array_equal(logits(part), expected)


@pytest.mark.parametrize("model", [MODELS["mixtral"], replace(DENSE, type="Q4_K"), replace(EXPERTS, type="Q6_K"),
                                   replace(HYBRID, type="Q4_K"), HYBRIDS["qwen35-odd"]],
                         ids=["float32", "dense", "experts", "hybrid", "odd hybrid"])
def test_the_number_of_threads_changes_nothing(model: TinyModel, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    # More threads than cores are cut; bits hold for them too.
    monkeypatch.setattr("sharpi.machine.hardware.core_count", lambda: 8)
    path = write(tmp_path / "m.gguf", model)
    one = logits(path, threads=1)
    for threads in (2, 3):
        np.testing.assert_array_equal(logits(path, threads=threads), one)
        np.testing.assert_array_equal(logits(path, threads=threads, chunks=(1, 7, 2, 30)), one)


ISA_SCRIPT = """
import sys
import numpy as np
from sharpi import Model
path, out = sys.argv[1:3]
with Model.load(path, kv_dtype="bf16", threads=2, batch=48, device="cpu") as model:
    print(model.isa)
    np.save(out, model.logits([int(t) for t in sys.argv[3:]]))
"""


@pytest.mark.parametrize("model", [replace(DENSE, type="Q4_K"), replace(EXPERTS, type="Q5_0"),
                                   replace(HYBRID, type="Q4_K"), HYBRIDS["qwen35-odd"], HYBRIDS["qwen35moe"]],
                         ids=["dense", "experts", "hybrid", "odd hybrid", "hybrid with experts"])
def test_the_instruction_set_changes_nothing(model: TinyModel, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", model)
    found: dict[str, np.ndarray] = {}
    for isa in ("scalar", "avx2", "avx512", "amx"):
        out = tmp_path / f"{isa}.npy"
        done = subprocess.run([sys.executable, "-c", ISA_SCRIPT, path, out, *map(str, TOKENS)], text=True,
                              capture_output=True, env={**os.environ, "SHARPI_CPU_ISA": isa}, check=False)
        if done.returncode and "cannot run on this processor" in done.stderr and isa != "scalar":
            continue
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == isa
        found[isa] = np.load(out)
    if len(found) < 2:
        pytest.skip("this processor runs only the scalar kernels")
    for isa, answer in found.items():
        np.testing.assert_array_equal(answer, found["scalar"], err_msg=isa)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_half_precision_matrices_lose_nothing(kind: str, base: TinyModel, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", replace(base, type=kind))
    assert relative_error(logits(path), NumpyModel(path).logits(TOKENS)) < FLOAT32_BOUND


@pytest.mark.parametrize("kind", QUANTIZED_TYPES)
@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_quantized_matrices(kind: str, base: TinyModel, tmp_path: Path) -> None:
    """Every matrix of one type: embeddings, attention, experts, router and output.

    Activations are rounded to int8: an error of 1/127 of a block's largest element, evenly spread, is 0.6 % of a
    normally distributed row, and some nine matmuls one after another make 2 to 3 % of it. A router may choose another
    expert because of it, which moves that row by as much as an expert is worth: so the median of the rows has the bound
    of dense models, and their sum, in which such rows count, a wider one.

    numpy with the same rounding is within 1e-6, but for rows where a rounding falls on the other side of a tie. Those
    are few while every sequence is one token long: the median of the rows shows whether the arithmetic is right.
    """
    path = write(tmp_path / "m.gguf", replace(base, type=kind))
    count = 48
    exact, rounded = NumpyModel(path), NumpyModel(path, int8_activations=True)
    found, expected = logits(path, TOKENS[:count]), exact.logits(TOKENS[:count])
    assert np.median([relative_error(*rows) for rows in zip(found, expected, strict=True)]) < 0.06
    assert relative_error(found, expected) < (0.25 if base.experts else 0.06)
    with Model.load(path, kv_dtype="fp32", threads=2, device="cpu") as model:
        errors = [relative_error(model.logits([t]), rounded.logits([t])) for t in range(0, 96, 4)]
    assert np.median(errors) < FLOAT32_BOUND
    assert max(errors) < 0.1


@pytest.mark.parametrize("kind", QUANTIZED_TYPES)
@pytest.mark.parametrize("base", [EXPERTS, HYBRID_EXPERTS], ids=["experts", "hybrid with experts"])
def test_quantized_experts_without_a_choice(kind: str, base: TinyModel, tmp_path: Path) -> None:
    """If every token uses all experts, no rounding changes a choice: the bound of dense models holds for all rows."""
    path = write(tmp_path / "m.gguf", replace(base, type=kind, experts_used=base.experts))
    assert relative_error(logits(path, TOKENS[:48]), NumpyModel(path).logits(TOKENS[:48])) < 0.06


@pytest.mark.parametrize("kv_dtype, bound", [("bf16", 0.06), ("fp16", 0.006)])
@pytest.mark.parametrize("name", ["llama", "qwen3moe", "qwen35"])
def test_narrow_kv_caches(name: str, kv_dtype: str, bound: float, tmp_path: Path) -> None:
    """bf16 keeps 8 bits, fp16 11: half an ulp is 0.2 % and 0.02 % of each key and value; the layers after them and
    a router multiply it some ten times at most. numpy that rounds keys and values alike is as near as float32 is, a
    rare rounding of a tie to the other side apart."""
    path = write(tmp_path / "m.gguf", ALL[name])
    found = logits(path, kv_dtype=kv_dtype)
    assert FLOAT32_BOUND < relative_error(found, NumpyModel(path).logits(TOKENS)) < bound
    assert relative_error(found, NumpyModel(path, kv_dtype=kv_dtype).logits(TOKENS)) < 3e-4
    np.testing.assert_array_equal(logits(path, kv_dtype=kv_dtype, chunks=(1,) * len(TOKENS)), found)


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "qwen35"])
def test_sessions_that_share_steps_give_what_each_gives_alone(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", ALL[name])
    prompts = [TOKENS[:9], TOKENS[20:21], TOKENS[30:60]]
    params = [_core.SamplingParams(temperature=1.0, top_k=top_k, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
                                   presence_penalty=0.0, frequency_penalty=0.0, logit_bias={}, seed=7)
              for top_k in (1, 0, 20)]
    with Model.load(path, threads=2, batch=BATCH, device="cpu", context=256, sequences=9) as model:
        alone = []
        for prompt, how in zip(prompts, params, strict=True):
            session = _core.Session(model.engine)
            session.start(prompt, how)
            alone.append([session.next() for _ in range(6)])
            del session
        sessions = [_core.Session(model.engine) for _ in prompts]
        for session, prompt, how in zip(sessions, prompts, params, strict=True):
            session.start(prompt, how)
        together = [_core.Session.next_of(sessions) for _ in range(6)]
        assert [list(tokens) for tokens in zip(*together, strict=True)] == alone
        with pytest.raises(TypeError):
            _core.Session.next_of([sessions[0], None])  # type: ignore[list-item]
        with pytest.raises(InvalidRequestError, match="only one next token"):
            _core.Session.next_of([sessions[0], sessions[0]])
