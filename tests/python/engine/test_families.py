"""The golden models in other types than float32: quantized matrices, narrow KV caches, cut anywhere.

float32 is held to the golden logits in test_reference.py. What rounds is held to numpy that rounds alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from fake_model import cli_runner
from fake_weights import plain_machine, set_gpu  # noqa: F401 - a fixture
from golden_families import FAMILIES
from golden_models import GOLDEN, LOGITS, prediction_tensors, write_golden
from numpy_model import NumpyModel, relative_error
from tiny_models import HYBRIDS, write

from sharpi import Model
from sharpi.cli import main
from sharpi.errors import InvalidRequestError
from sharpi.loading.description import describe
from sharpi.planning.planner import make_plan

COUNT = 40  # more than two windows
CUTS = [1, 7, 2, 20, 1, 1]


def tokens_of(name: str) -> list[int]:
    return np.load(LOGITS / f"{name}.npz")["tokens"][:COUNT].tolist()


def load(path: Path, **options: Any) -> Model:
    return Model.load(path, **{"device": "cpu", "batch": 32, "kv_dtype": "fp32", **options})


def median_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Of the rows: rounding may turn a choice of experts, which moves a row by as much as an expert is worth."""
    return float(np.median([relative_error(*rows) for rows in zip(found, expected, strict=True)]))


@pytest.mark.parametrize("name", FAMILIES)
def test_types_that_round(name: str, tmp_path: Path) -> None:
    """One test for both: the weights are drawn once."""
    quantized_matrices(name, tmp_path)
    narrow_kv_cache(name, tmp_path)


def quantized_matrices(name: str, folder: Path) -> None:
    """Activations are rounded to int8, which makes 2 to 3 % in two layers (test_engine.py). These have up to ten, and
    routers that turn, so numpy that rounds alike says how much it may be. A sequence of one token has few roundings
    that fall on the other side of a tie: without any, its row is within 1e-7 of numpy's; a scale that is rounded the
    other way moves it by 1e-5, a number by 1e-2. So the best fifth of such rows shows whether the arithmetic is right.
    """
    path, tokens = write_golden(name, folder, kind="Q8_0"), tokens_of(name)
    exact = NumpyModel(path)
    rounded = exact.rounded(int8_activations=True)
    with load(path) as model:
        found = model.logits(tokens)
        np.testing.assert_array_equal(model.logits(tokens, chunks=CUTS), found)
        alone = [relative_error(model.logits([token]), rounded.logits([token])) for token in tokens[:25]]
    expected = exact.logits(tokens)
    assert median_error(found, expected) < 1.25 * median_error(rounded.logits(tokens), expected)
    assert np.quantile(alone, 0.2) < 2e-5


def narrow_kv_cache(name: str, folder: Path) -> None:
    """bf16 keeps 8 bits: half an ulp is 0.2 % of each key and value, and the layers behind multiply it. numpy that
    rounds alike is far nearer; what is left are roundings that fall on the other side of a tie."""
    path, tokens = write_golden(name, folder), tokens_of(name)
    with load(path, kv_dtype="bf16") as model:
        found = model.logits(tokens)
        np.testing.assert_array_equal(model.logits(tokens, chunks=CUTS), found)
    exact = NumpyModel(path)
    expected, rounded = exact.logits(tokens), exact.rounded(kv_dtype="bf16").logits(tokens)
    distance = median_error(found, expected)
    assert 1e-5 < distance < 1.1 * median_error(rounded, expected)
    assert median_error(found, rounded) < distance / 5


EVERY_MODEL = """
import sys
import numpy as np
from sharpi import Model, _core
out, *models = sys.argv[1:]
answers = {}
for path in models:
    with Model.load(path, kv_dtype="bf16", threads=2, batch=32, device="cpu") as model:
        answers[path] = model.logits(list(range(60, 100)))
np.savez(out, **answers)
print(_core.cpu_isa())
"""


def test_the_instruction_set_changes_nothing(tmp_path: Path) -> None:
    paths = [write_golden(name, tmp_path, kind="Q8_0") for name in FAMILIES]
    found: dict[str, dict[str, np.ndarray]] = {}
    for isa in ("scalar", "avx2", "avx512", "amx"):
        out = tmp_path / f"{isa}.npz"
        done = subprocess.run([sys.executable, "-c", EVERY_MODEL, out, *paths], text=True, capture_output=True,
                              env={**os.environ, "SHARPI_CPU_ISA": isa}, check=False)
        if "cannot run on this processor" in done.stderr and isa != "scalar":
            continue
        assert done.returncode == 0 and done.stdout.strip() == isa, done.stderr
        found[isa] = dict(np.load(out))
    if len(found) < 2:
        pytest.skip("this processor runs only the scalar kernels")
    for isa, answers in found.items():
        for path, answer in answers.items():
            np.testing.assert_array_equal(answer, found["scalar"][path], err_msg=f"{isa}: {path}")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_number_of_threads_changes_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharpi.machine.hardware.core_count", lambda: 8)  # more threads than cores are cut
    path, tokens = write_golden(name, tmp_path), tokens_of(name)
    with load(path, threads=1) as model:
        one = model.logits(tokens)
    with load(path, threads=3) as model:
        np.testing.assert_array_equal(model.logits(tokens, chunks=CUTS), one)


REFUSED = "Gated DeltaNet with heads of 20 elements and a convolution over 3 inputs cannot run on the GPU, which takes"


def test_a_plan_for_the_gpu_refuses_what_it_has_no_kernels_for(tmp_path: Path) -> None:
    path, gpu = str(write(tmp_path / "odd.gguf", HYBRIDS["qwen35-odd"])), ["--device", "cuda", "--vram", "1GiB"]
    refused = CliRunner().invoke(main, ["plan", "-m", path, *gpu])
    assert refused.exit_code != 0
    assert refused.output.startswith(f"sharpi: error: {REFUSED} heads of 8, 16, ..")
    assert refused.output.count("\n") == 1
    assert CliRunner().invoke(main, ["plan", "-m", path, "--device", "cpu"]).exit_code == 0


@pytest.mark.usefixtures("plain_machine")
def test_beside_a_gpu_that_cannot_run_it_a_model_is_left_to_the_cpu(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpu(monkeypatch, 1 << 30)
    file, spec = describe(write(tmp_path / "odd.gguf", HYBRIDS["qwen35-odd"]))
    plan = make_plan(file, spec, device="auto")
    assert plan.device == "cpu"
    assert plan.why.startswith(REFUSED)
    plan.require()


@pytest.mark.usefixtures("plain_machine")
@pytest.mark.parametrize("name", ["deepseek2", "deepseek2-lite", "mistral4"])
def test_latent_attention_may_run_on_the_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpu(monkeypatch, 1 << 30)
    file, spec = describe(write_golden(name, tmp_path))
    plan = make_plan(file, spec, device="auto")
    assert plan.device == "cuda"
    plan.require()


def test_latent_attention_keeps_one_row_for_all_heads(tmp_path: Path) -> None:
    """A latent of 64 and a rotated key of 16 in each of four layers; nothing is stored twice."""
    path = str(write_golden("deepseek2", tmp_path))
    for device in (["cpu"], ["cuda", "--vram", "1GiB"]):
        asked = ["plan", "-m", path, "--device", *device, "-c", "4096", "--json"]
        assert json.loads(cli_runner().invoke(main, asked).stdout)["kv_bytes"] == 4 * (64 + 16) * 4096 * 2


def test_mamba_keeps_a_matrix_for_each_head_and_the_last_inputs_of_the_convolution(tmp_path: Path) -> None:
    """Three layers with 12 heads of 32 elements, 32 states each, and three rows of x and of two groups of B and C. Only
    the layer with attention has keys and values."""
    path = str(write_golden("nemotron_h_moe", tmp_path))
    asked = ["plan", "-m", path, "--device", "cpu", "-c", "4096", "--sequences", "10", "--json"]
    plan = json.loads(cli_runner().invoke(main, asked).stdout)
    state = 3 * 4 * (12 * 32 * 32 + 3 * (384 + 2 * 2 * 32))
    assert abs(plan["state_bytes"] - 10 * state) <= 2 * 4096
    assert plan["kv_bytes"] == 2 * 2 * 32 * 4096 * 2
    told = json.loads(cli_runner().invoke(main, ["inspect", path, "--json"]).stdout)
    assert told["state_bytes"] == state and told["takes_token_ids"]


@pytest.mark.parametrize("name", ["deepseek2-flash", "glm4moe", "qwen35"])
@pytest.mark.parametrize("lacking", ["", "nextn."])
def test_a_prediction_layer_that_the_file_lacks_drafts_nothing(name: str, lacking: str, tmp_path: Path) -> None:
    """Writers that drop it may leave it in the metadata: its whole block, or what only prediction layers have."""
    tokens, keys, extra = tokens_of(name), {"nextn_predict_layers": 1}, {}
    if name == "deepseek2-flash":
        keys["block_count"], extra = FAMILIES[name].keys["block_count"] + 1, prediction_tensors(name)
    with load(write_golden(name, tmp_path, keys=keys, extra=extra), mtp=False) as model:
        expected, last = model.logits(tokens), f"blk.{model.spec.layer_count}."
    path = write_golden(name, tmp_path, keys=keys, extra=extra, change=lambda tensor, data:
                        None if tensor.startswith(last + lacking) else data)
    with load(path) as model:
        assert not model.plan.mtp and model.spec.prediction_layers == 0
        np.testing.assert_array_equal(model.logits(tokens), expected)
        list(model.generate(tokens, max_tokens=4))
        assert model.stats()["drafted_tokens"] == 0
        with pytest.raises(InvalidRequestError, match="no prediction layer to draft with"):
            load(path, mtp=True)


@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_joined_matrices_of_heads_change_nothing(kind: str, tmp_path: Path) -> None:
    """Files from before mid-2025 have the rows of a head's keys and then of its values in one matrix. How quantized
    rows become columns is in test_head_matrices.cpp."""
    name, tokens = "deepseek2", tokens_of("deepseek2")
    weights, joined = dict(GOLDEN[name].weights()), {}
    for block in (f"blk.{layer}." for layer in range(4)):
        keys, values = weights[block + "attn_k_b.weight"].transpose(0, 2, 1), weights[block + "attn_v_b.weight"]
        joined[block + "attn_kv_b.weight"] = np.concatenate([keys, values], axis=1).reshape(-1, values.shape[2])
    with load(write_golden(name, tmp_path, kind=kind)) as model:
        apart = model.logits(tokens)
    path = write_golden(name, tmp_path, kind=kind, extra=joined, change=lambda tensor, data:
                        None if tensor.endswith(("attn_k_b.weight", "attn_v_b.weight")) else data)
    with load(path) as model:
        np.testing.assert_array_equal(model.logits(tokens), apart)


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "llama4", "mistral3", "qwen3next"])
def test_fused_tensors_change_nothing(name: str, tmp_path: Path) -> None:
    """Newer files have q, k and v in one matrix, and gate and up of the experts, with their biases in one tensor."""
    weights, tokens = dict(GOLDEN[name].weights()), tokens_of(name)
    joined: dict[str, np.ndarray] = {}
    parts: set[str] = set()
    for whole, names, axis in (("attn_qkv", ("attn_q", "attn_k", "attn_v"), 0),
                               ("ffn_gate_up_exps", ("ffn_gate_exps", "ffn_up_exps"), 1)):
        for block, end in ((f"blk.{layer}.", end) for layer in range(10) for end in (".weight", ".bias")):
            pieces = [block + part + end for part in names]
            if all(piece in weights for piece in pieces):
                joined[block + whole + end] = np.concatenate([weights[piece] for piece in pieces], axis=axis)
                parts.update(pieces)
    with load(write_golden(name, tmp_path)) as model:
        separate = model.logits(tokens)
    path = write_golden(name, tmp_path, extra=joined, change=lambda tensor, data: None if tensor in parts else data)
    with load(path) as model:
        np.testing.assert_array_equal(model.logits(tokens), separate)
    assert joined
