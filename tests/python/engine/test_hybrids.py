"""Models with recurrent layers from Python: what their states take, how many sequences there is room for, and that a
conversation which goes back says what one says that did not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_model import cli_runner
from numpy_model import NumpyModel, relative_error
from texts_and_prompts import LONG, long_logits
from tiny_models import HYBRIDS, MODELS, write

from sharpi import Model, _core
from sharpi.cli import main
from sharpi.errors import InvalidRequestError, OutOfMemoryError


@pytest.fixture
def hybrid(tmp_path: Path) -> Path:
    return write(tmp_path / "hybrid.gguf", HYBRIDS["qwen35"])


def load(path: Path, **options) -> Model:
    return Model.load(path, **{"device": "cpu", "threads": 1, "batch": 32, **options})


def large_layout() -> _core.Description:
    """A model of 27 billion parameters as its metadata and tensor table tell it: 64 layers, 16 of them attention."""
    width, hidden, vocab, layers = 5120, 17408, 248320, 64
    numbers = {"block_count": layers, "context_length": 40960, "embedding_length": width, "feed_forward_length": hidden,
               "attention.head_count": 24, "attention.head_count_kv": 4, "attention.key_length": 256,
               "attention.value_length": 256, "rope.dimension_count": 64, "ssm.conv_kernel": 4, "ssm.state_size": 128,
               "ssm.group_count": 16, "ssm.time_step_rank": 48, "ssm.inner_size": 6144, "full_attention_interval": 4}
    metadata = {"general.architecture": "qwen35", "qwen35.attention.layer_norm_rms_epsilon": 1e-6,
                **{f"qwen35.{key}": value for key, value in numbers.items()}}
    shapes: dict[str, list[int]] = {"token_embd.weight": [width, vocab], "output_norm.weight": [width],
                                    "output.weight": [width, vocab]}
    for layer in range(layers):
        block = f"blk.{layer}."
        shapes |= {block + "attn_norm.weight": [width], block + "post_attention_norm.weight": [width],
                   block + "ffn_gate.weight": [width, hidden], block + "ffn_up.weight": [width, hidden],
                   block + "ffn_down.weight": [hidden, width]}
        if (layer + 1) % 4:
            shapes |= {block + "attn_qkv.weight": [width, 10240], block + "attn_gate.weight": [width, 6144],
                       block + "ssm_conv1d.weight": [4, 10240], block + "ssm_dt.bias": [48], block + "ssm_a": [48],
                       block + "ssm_alpha.weight": [width, 48], block + "ssm_beta.weight": [width, 48],
                       block + "ssm_norm.weight": [128], block + "ssm_out.weight": [6144, width]}
        else:
            shapes |= {block + "attn_q.weight": [width, 12288], block + "attn_k.weight": [width, 1024],
                       block + "attn_v.weight": [width, 1024], block + "attn_output.weight": [6144, width],
                       block + "attn_q_norm.weight": [256], block + "attn_k_norm.weight": [256]}
    rows, at = [], 0
    for name, shape in shapes.items():
        nbytes = 4 * int(np.prod(shape))
        rows.append((name, 0, shape, 0, at, nbytes))
        at += nbytes
    return _core.Description(metadata, rows)


def test_only_attention_has_a_kv_cache() -> None:
    spec = large_layout()
    for kv_dtype, expected in (("bf16", 256 << 20), ("fp32", 512 << 20)):
        options = _core.EngineOptions(context=4096, kv_dtype=kv_dtype)
        assert spec.kv_bytes(options) == spec.kv_bytes_if_all_seen(options) == expected
        assert spec.kv_bytes_read(kv_dtype, 2048) == expected // 2
    one = 48 * 4 * (48 * 128 * 128 + 3 * 10240)
    for device in ("cpu", "cuda"):
        for sequences in (1, 4, 64):
            options = _core.EngineOptions(device=device, context=4096, batch=512, threads=8, sequences=sequences)
            lines = dict(spec.memory_lines(options))
            # A granule may be its neighbours' already.
            assert abs(lines["recurrent state"] - sequences * one) <= 2 << 20
            assert abs(lines["KV cache"] - (256 << 20)) <= 2 << 20


def test_the_plan_counts_the_states(hybrid: Path) -> None:
    for sequences in (1, 4, 9):
        with load(hybrid, sequences=sequences) as model:
            assert model.plan.sequences == sequences
            assert model.stats()["state_bytes"] >= sequences * 3 * 4 * (6 * 16 * 16 + 3 * (2 * 2 + 6) * 16)
            assert abs(model.plan.state_bytes - model.stats()["state_bytes"]) <= 4096
    shown = cli_runner().invoke(main, ["plan", "-m", str(hybrid), "--device", "cpu"])
    assert shown.exit_code == 0 and "for 4 sequences" in shown.output, shown.output
    told = json.loads(cli_runner().invoke(main, ["plan", "-m", str(hybrid), "--device", "cpu", "--json"]).stdout)
    assert told["state_bytes"] > 0 and told["sequences"] == 4


def test_models_without_states_have_no_line(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", MODELS["llama"])
    with load(path, sequences=1) as model:
        assert model.plan.state_bytes == model.stats()["state_bytes"] == 0
        sessions = [model.session() for _ in range(5)]  # they share pages alone
        for session in sessions:
            list(session.generate([1, 2], max_tokens=2, temperature=0))
    assert "state " not in cli_runner().invoke(main, ["plan", "-m", str(path), "--device", "cpu"]).output


@pytest.mark.parametrize("value", [0, -1, 4097, 1.5, "two"])
def test_impossible_numbers_of_sequences(hybrid: Path, value: object) -> None:
    with pytest.raises(InvalidRequestError, match="sequences"):
        load(hybrid, sequences=value)


def test_more_sequences_than_there_is_room_for(hybrid: Path) -> None:
    with load(hybrid, sequences=2) as model:
        sessions = [model.session() for _ in range(3)]
        for _ in range(2):  # those that are not at work give way
            for session in sessions:
                assert len(list(session.generate([1, 2, 3], max_tokens=3, temperature=0))) == 3
        for session in sessions:
            session.reset()
        with model.scheduler() as other:  # the texts of another scheduler do not
            # They begin differently and are short, so that neither takes the other's text and neither is paused.
            for answer in [other.submit([seed, 1, 2], max_tokens=8, temperature=0) for seed in (1, 2)]:
                answer.text()
            with pytest.raises(OutOfMemoryError, match="close other sessions"):
                list(sessions[0].generate([3, 2, 1], max_tokens=3, temperature=0))


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe"])
@pytest.mark.parametrize("sequences", [2, 6])
def test_conversations_that_go_back(name: str, sequences: int, tmp_path: Path) -> None:
    """Two sessions in turn, whose prompts share beginnings of any length with what they held before."""
    random = np.random.default_rng(7)
    path = write(tmp_path / "m.gguf", HYBRIDS[name])
    with load(path, sequences=sequences) as model, load(path, sequences=1) as other:
        sessions = [model.session(), model.session()]
        texts = [random.integers(0, 96, 40).tolist() for _ in sessions]
        for turn in range(12):
            session, text = sessions[turn % 2], texts[turn % 2]
            made = [token.id for token in session.generate(text, max_tokens=8, temperature=0)]
            assert made == [token.id for token in other.generate(text, max_tokens=8, temperature=0)]
            kept = (text + made)[: random.integers(1, len(text) + len(made) + 1)]
            texts[turn % 2] = kept + random.integers(0, 96, random.integers(1, 20)).tolist()


def test_states_do_not_drift(tmp_path: Path) -> None:
    """Every token changes every float of a state. What is rounded away decays with it: the last of many rows are as
    near to numpy as the first."""
    path = write(tmp_path / "m.gguf", replace(HYBRIDS["qwen35-states"], context=LONG))
    tokens, found = long_logits(path)
    expected = NumpyModel(path).logits(tokens)
    for begin in (0, LONG // 2, LONG - 256):
        assert relative_error(found[begin : begin + 256], expected[begin : begin + 256]) < 1e-5, begin


def test_a_narrow_kv_cache_at_long_context(tmp_path: Path) -> None:
    """bf16 is wrong by 0.2 % of each key and value. Random ones average out over many tokens, and so do their errors:
    3e-5 of the logits as measured, where 300 tokens of such models have 8e-4."""
    path = write(tmp_path / "m.gguf", replace(HYBRIDS["qwen35"], context=LONG))
    _, narrow = long_logits(path, kv_dtype="bf16")
    _, exact = long_logits(path, kv_dtype="fp32")
    assert 0 < relative_error(narrow[-256:], exact[-256:]) < 1e-3
    assert relative_error(narrow, exact) < 1e-3
