"""DeepSeek V4: near to the golden logits however a prompt is cut, the same bits whatever the threads, the
batch and the roll-backs are, and a part that is off shows."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from golden_deepseek4 import DEEPSEEK4, write_deepseek4
from numpy_model import NumpyModel, relative_error
from numpy_model.description import Blocks, Description, Layer

from sharpi import Model
from sharpi.cli import main

NEAR, FAR = 1e-5, 1e-3


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deepseek4(tmp_path_factory.mktemp("exact") / "deepseek4.gguf")


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deepseek4(tmp_path_factory.mktemp("quantized") / "deepseek4.gguf", "Q8_0")


def load(path: Path, **options: Any) -> Model:
    return Model.load(path, **{"device": "cpu", "batch": 64, "context": 512, **options})


def tokens() -> list[int]:
    return np.load(DEEPSEEK4)["tokens"].tolist()


def test_the_logits_are_those_of_the_reference(exact: Path) -> None:
    golden = np.load(DEEPSEEK4)
    ragged = random.Random(5).choices(range(1, 60), k=40)
    with load(exact, kv_dtype="fp32", batch=300) as model:
        for chunks in ([], [1] * len(tokens()), ragged, [2, 5, 121, 1, 126, 1]):
            found = model.logits(tokens(), chunks=chunks)[golden["positions"]]
            assert relative_error(found, golden["logits"]) < NEAR, chunks[:3]


def test_threads_and_cuts_change_no_bits(quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharpi.machine.hardware.core_count", lambda: 8)
    with load(quantized, threads=1) as model:
        one = model.logits(tokens())
    with load(quantized, threads=3) as model:
        for chunks in ([1] * len(tokens()), [3, 1, 64, 59, 1, 2, 127]):
            np.testing.assert_array_equal(model.logits(tokens(), chunks=chunks), one)


def made(model: Any, text: list[int], **options: Any) -> list[int]:
    return [token.id for token in model.generate(text, max_tokens=12, temperature=0, **options)]


def test_conversations_that_go_back(quantized: Path) -> None:
    """Two sessions in turn, whose prompts share beginnings of any length, within a block too, with what they held. One
    takes back wrong guesses besides."""
    chance = np.random.default_rng(7)
    with load(quantized, sequences=2) as model, load(quantized, sequences=1) as other:
        sessions = [model.session(), model.session()]
        texts = [chance.integers(0, 512, count).tolist() for count in (30, 250)]
        for turn in range(12):
            session, text = sessions[turn % 2], texts[turn % 2]
            found = made(session, text, draft="ngram" if turn % 2 else "off")
            assert found == made(other.session(), text, draft="off"), turn
            kept = (text + found)[: chance.integers(1, len(text) + len(found) + 1)]
            texts[turn % 2] = kept + chance.integers(0, 512, chance.integers(1, 90)).tolist()


def test_texts_of_a_batch_are_those_alone(quantized: Path) -> None:
    chance = np.random.default_rng(8)
    texts = [chance.integers(0, 512, count).tolist() for count in (3, 61, 124, 130, 200)]
    with load(quantized, sequences=len(texts), cache_tokens=2048) as model:
        alone = [made(model, text) for text in texts]
        together = model.generate_many(texts, max_tokens=12, temperature=0)
        assert [[token.id for token in answer] for answer in together] == alone


def test_a_plan_counts_rows_and_unfinished_blocks(exact: Path) -> None:
    """Of 4096 tokens: a row for each 4 or 128 of them, and one for each 64 where blocks are longer. Windows have pages
    of their own for what they see and 64 tokens to roll back to, and for a batch."""
    with load(exact, context=4096, sequences=1, kv_dtype="fp32") as model:
        held = model.stats()["kv_bytes"]
        assert held == model.plan.kv_bytes

    def pages(window: int) -> int:
        return (window - 1 + 64 + 62) // 64 + 2 + 1

    keys = 6 * 64 * 64 * pages(16)
    rows = 4096 // 4 * (64 + 64) * 2 + 4096 // 64 * 64 * 2
    pending = 64 * (2 * 2 * (128 + 128) * pages(8) + 2 * 2 * 64 * pages(128))
    assert held == 4 * (keys + rows + pending)


# What a part is left out by, in the file. The engine then is far from the logits of the whole.
Change = Callable[[str, np.ndarray], np.ndarray]


def set_to(ending: str, value: float) -> Change:
    return lambda name, data: np.full_like(data, value) if name.endswith(ending) else data


OFF_KEYS: dict[str, dict[str, Any]] = {
    "window + 1": {"attention.sliding_window": 17},
    "window - 1": {"attention.sliding_window": 15},
    "one block more": {"attention.indexer.top_k": 9},
    "one block fewer": {"attention.indexer.top_k": 7},
    "base of compressed layers": {"attention.compress_rope_freq_base": 10000.0},
    "YaRN off": {"rope.scaling.type": "none"},
    "few iterations": {"hyper_connection.sinkhorn_iterations": 1},
    "epsilon of streams": {"hyper_connection.epsilon": 1e-2},
    "clamp of experts": {"swiglu_clamp_exp": [1.1] * 6},
    "clamp of the shared expert": {"swiglu_clamp_shexp": [1.0] * 6},
    "weights not normalized": {"expert_weights_norm": False},
    "factor of weights": {"expert_weights_scale": 1.0},
    "weights by sigmoid": {"expert_gating_func": 2},
}
OFF_TENSORS: dict[str, Change] = {
    "sinks": set_to("attn_sinks.weight", -1e30),
    "offsets of gates": set_to("attn_compressor_ape.weight", 0.0),
    "offsets of the indexer's gates": set_to("indexer_compressor_ape.weight", 0.0),
    "norm of rows": set_to("attn_compressor_norm.weight", 1.0),
    "norm of the indexer's rows": lambda name, data: -data if name.endswith("indexer_compressor_norm.weight") else data,
    "weights of the indexer": lambda name, data: data[::-1] if name.endswith("indexer.proj.weight") else data,
    "gates of blocks": set_to("attn_compressor_gate.weight", 0.0),
    "choice by token": lambda name, data: data[::-1] if name.endswith("tid2eid.weight") else data,
    "bias of the choice": set_to("exp_probs_b.bias", 0.0),
    "norm of keys": set_to("attn_kv_a_norm.weight", 1.0),
    "norm of queries of low rank": set_to("attn_q_a_norm.weight", 1.0),
}


@pytest.fixture(scope="module")
def whole(exact: Path) -> np.ndarray:
    with load(exact, kv_dtype="fp32", batch=300) as model:
        return model.logits(tokens())


@pytest.mark.parametrize("part", [*OFF_KEYS, *OFF_TENSORS])
def test_a_part_that_is_off_is_noticed(part: str, whole: np.ndarray, tmp_path: Path) -> None:
    """The logits of the whole are near to the reference, so an engine that left the part out would be noticed."""
    change = OFF_TENSORS.get(part, lambda _, data: data)
    path = write_deepseek4(tmp_path / "off.gguf", keys=OFF_KEYS.get(part), change=change)
    with load(path, kv_dtype="fp32", batch=300) as model:
        assert relative_error(model.logits(tokens()), whole) > FAR


# What no file can leave out.
def blocks_with(**fields: Any) -> Callable[[Description], Description]:
    def change(layer: Layer) -> Layer:
        assert isinstance(layer.mixer, Blocks)
        return replace(layer, mixer=replace(layer.mixer, **fields))

    return lambda model: model.changed(change)


def streams_with(**fields: Any) -> Callable[[Description], Description]:
    def change(model: Description) -> Description:
        assert model.streams is not None
        return replace(model, streams=replace(model.streams, **fields))

    return change


WRONG = {
    "output not turned back": blocks_with(turns_back=False),
    "compressed keys left out": blocks_with(compressed=False),
    "every block chosen": blocks_with(indexer=None),
    "groups of every fourth head": blocks_with(grouped=False),
    "streams not mixed": streams_with(mixes=False),
}


@pytest.mark.parametrize("part", WRONG)
def test_an_engine_without_the_part_would_be_noticed(part: str, whole: np.ndarray, exact: Path) -> None:
    """As in test_wrong_features.py: the engine is far from a model in numpy that computes one thing wrongly."""
    wrong = NumpyModel(exact).changed(WRONG[part]).logits(tokens())
    assert relative_error(whole, wrong) > FAR


def test_the_model_in_numpy_is_near(whole: np.ndarray, exact: Path) -> None:
    assert relative_error(whole, NumpyModel(exact).logits(tokens())) < NEAR


def test_a_table_that_names_no_expert_is_refused(tmp_path: Path) -> None:
    path = write_deepseek4(tmp_path / "bad.gguf", change=set_to("tid2eid.weight", 16))
    with pytest.raises(Exception, match="'blk.0.ffn_gate_tid2eid.weight' holds a number outside 0 to 15"):
        load(path)


def test_a_gpu_has_a_plan_for_it(exact: Path) -> None:
    for placement in ([], ["--vram", "64MiB"]):
        planned = CliRunner().invoke(main, ["plan", "-m", str(exact), "--device", "cuda", "--vram", "1GiB", *placement])
        assert planned.exit_code == 0, planned.output
