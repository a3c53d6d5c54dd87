"""Models with recurrent layers and prediction layers on the GPU: near to an independent engine however tokens are cut,
the CPU's bits in decode and exact prompts, the same answers at every budget, memory as planned, and drafts that never
change a text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_models import LOGITS, write_golden
from numpy_model import NumpyModel, relative_error
from test_gpu import (  # noqa: F401 - `needs_a_gpu` is a fixture
    FLOAT32_BOUND,
    HYBRID,
    HYBRID_EXPERTS,
    LARGE,
    MIB,
    ONE_BY_ONE,
    TOKENS,
    free_bytes,
    golden_answers,
    greedy,
    load,
    needs_a_gpu,
)
from test_gpu_partial import cache  # noqa: F401 - a fixture
from texts_and_prompts import LONG, long_logits
from tiny_models import HYBRIDS, MODELS, Delta, TinyModel, write

from sharpi import Model
from sharpi.errors import OutOfMemoryError

pytestmark = pytest.mark.gpu

NAMES = ("qwen35", "qwen35moe")
MAMBAS = ("falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe", "nemotron_h_moe-latents")
CUT = (*NAMES, "qwen3next", *MAMBAS)
# And those that have something of their own for each layer: embeddings, biases of experts, weights on their inputs.
PLACED = (*CUT, "gemma4-e", "gpt-oss", "llama4")
# Larger than a few granules, and of shapes as real models have them.
MEDIUM = {
    "qwen35": TinyModel("qwen35", qk_norm="head", layers=4, type="Q4_K", predictions=1, rope_dims=32,
                        delta=Delta(8, 16, 64), **LARGE),
    "qwen35moe": TinyModel("qwen35moe", qk_norm="head", layers=8, type="Q4_K", predictions=1, rope_dims=32, width=512,
                           heads=4, head_dim=128, hidden=256, vocab=4096, context=8192, experts=32, experts_used=4,
                           shared=256, delta=Delta(4, 8, 64)),
}
# A prompt too has the CPU's bits; states for seven drafted tokens.
EXACT: dict[str, Any] = {"prompt": "exact", "kv_dtype": "bf16", "sequences": 16}


# --- right -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CUT)
def test_reference_models_cut_anywhere(name: str, tmp_path: Path) -> None:
    golden, path = np.load(LOGITS / f"{name}.npz"), write_golden(name, tmp_path)
    tokens, positions, answers = golden["tokens"].tolist(), golden["positions"], golden_answers(path, golden)
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    cuts = [[64] * 5, [63, 65, 1, 127], [9] * 40, [200, 1, 1, 1], *(random.integers(1, 1 + most, 300).tolist()
                                                                    for most in (8, 12, 70, 70, 290))]
    with load(path, batch=len(tokens)) as model:
        for chunks in cuts:
            found = model.logits(tokens, chunks=chunks)[positions]
            assert min(relative_error(found, each) for each in answers) < FLOAT32_BOUND, chunks


@pytest.mark.parametrize("name", PLACED)
def test_reference_models_wherever_they_are(name: str, tmp_path: Path, cache) -> None:  # noqa: F811
    """Decode has the CPU's bits, a token or a few at a time; a prompt has those of a resident model."""
    golden, path = np.load(LOGITS / f"{name}.npz"), write_golden(name, tmp_path)
    tokens = golden["tokens"].tolist()
    with load(path, device="cpu") as model:
        steps = model.logits(tokens)
    assert relative_error(steps[golden["positions"]], golden["logits"]) < FLOAT32_BOUND
    with load(path, batch=len(tokens)) as model:
        prefill, whole = model.logits(tokens), model.stats()["placement"]["vram"]
    kept = set()
    for part in range(8):
        for rows in (False, True):
            cache(whole * part / 7, rows)
            with load(path, batch=len(tokens)) as model:
                np.testing.assert_array_equal(model.logits(tokens), prefill)
                for chunks in ((1,) * len(tokens), (8, 3, 5, 1, 7) * 20):
                    np.testing.assert_array_equal(model.logits(tokens, chunks=chunks, kind="decode"), steps)
                kept.add(model.stats()["placement"]["vram"])
    assert len(kept) >= 3


def test_a_table_of_rows_for_each_layer_takes_no_memory(tmp_path: Path) -> None:
    """Neither the GPU's nor pinned memory, if all else is in VRAM; a staging buffer holds a batch's rows."""
    path, batch, row = write_golden("gemma4-e", tmp_path), 8, 4 * 32 * 10
    with load(path, device="cpu", prompt="exact") as model:
        steps, tokens = model.logits(TOKENS), greedy(model, TOKENS[:20], 30)
    with load(path, batch=batch, prompt="exact") as model:
        table = next(tensor for tensor in model.file.tensors if tensor.name == "per_layer_token_embd.weight")
        stats = model.stats()
        assert stats["pinned_bytes"] == batch * row + 16 < table.nbytes
        assert stats["placement"]["direct"] == table.nbytes == sum(row.by_row for row in model.plan.placement)
        assert not any("per_layer_token_embd" in name for name in stats["holdings"])
        planned = model.plan.total_bytes - model.plan.graphs_bytes
        assert abs(sum(entry[2] for entry in model.engine.trace if entry[0] != "graphs") - planned) <= 4 * MIB
        # Prompts, steps of several rows, replayed steps and drafts.
        np.testing.assert_array_equal(model.logits(TOKENS), steps)
        np.testing.assert_array_equal(model.logits(TOKENS, chunks=ONE_BY_ONE, kind="decode"), steps)
        for draft in ("off", "ngram"):
            said = model.generate(TOKENS[:20], max_tokens=30, temperature=0.0, draft=draft)
            assert [token.id for token in said] == tokens
        assert model.graphs and model.stats()["pinned_bytes"] == stats["pinned_bytes"]


def test_states_do_not_drift(tmp_path: Path) -> None:
    """As on the CPU (test_hybrids.py): the last of 32,768 rows are as near to numpy as the first."""
    path = write(tmp_path / "m.gguf", replace(HYBRIDS["qwen35-states"], context=LONG))
    tokens, found = long_logits(path, device="cuda", kv_dtype="fp32")
    expected = NumpyModel(path).logits(tokens)
    for begin in (0, LONG // 2, LONG - 256):
        assert relative_error(found[begin : begin + 256], expected[begin : begin + 256]) < FLOAT32_BOUND, begin


def test_a_narrow_kv_cache_at_long_context(tmp_path: Path) -> None:
    """Prefill over a bf16 cache rounds queries and weights of attention to bf16 as well (test_gpu.py): 1e-2."""
    path = write(tmp_path / "m.gguf", replace(HYBRIDS["qwen35"], context=LONG))
    _, narrow = long_logits(path, device="cuda", kv_dtype="bf16")
    _, exact = long_logits(path, device="cuda", kv_dtype="fp32")
    assert 0 < relative_error(narrow[-256:], exact[-256:]) < 1e-2
    assert relative_error(narrow, exact) < 1e-2


def test_sixty_four_conversations_at_once(tmp_path: Path) -> None:
    """Each has a text of its own and a state of its own, token by token in turn. A session that does not generate keeps
    nobody from memory: a further one takes the state of one of these, which then takes it back."""
    count, random = 64, np.random.default_rng(2)
    prompts = [random.integers(0, 96, random.integers(1, 8)).tolist() for _ in range(count)]
    further = [1, 2]
    path = write(tmp_path / "m.gguf", replace(HYBRID, type="Q4_K", context=count * 64))
    with load(path, device="cpu", sequences=1) as model:
        alone = [greedy(model, prompt, 30) for prompt in prompts]
        longer = [[*prompt, *text, 5] for prompt, text in zip(prompts, alone, strict=True)]
        alone_again = [greedy(model, text, 15) for text in longer]
        alone_further = greedy(model, further, 30)

    def in_turn(texts: list[list[int]], tokens: int) -> list[list[int]]:
        running = [session.generate(text, max_tokens=tokens, temperature=0.0)
                   for session, text in zip(sessions, texts, strict=True)]
        steps = zip(*running, strict=True)
        return [list(said) for said in zip(*([token.id for token in step] for step in steps), strict=True)]

    with load(path, sequences=count, context=count * 64, prompt="exact") as model:
        sessions = [model.session() for _ in prompts]
        assert in_turn(prompts, 30) == alone
        late = model.session()
        assert [token.id for token in late.generate(further, max_tokens=30, temperature=0.0)] == alone_further
        assert in_turn(longer, 15) == alone_again
    assert len({tuple(text) for text in alone}) > count // 2


# --- every budget ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_budget_gives_the_same(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", MEDIUM[name])
    options: dict[str, Any] = {"kv_dtype": "bf16", "context": 512, "sequences": 8}
    with load(path, device="cpu", **options) as model:
        steps = model.logits(TOKENS)
    with load(path, **options) as model:
        prefill, tokens, needed = model.logits(TOKENS), greedy(model, TOKENS[:40], 40), model.plan.total_bytes
        assert model.plan.resident
        np.testing.assert_array_equal(model.logits(TOKENS, chunks=ONE_BY_ONE, kind="decode"), steps)
    kept: list[int] = []
    for budget in range(needed // 2, needed + 3 * MIB, 2 * MIB):
        try:
            with load(path, vram=budget, **options) as model:
                np.testing.assert_array_equal(model.logits(TOKENS), prefill)
                np.testing.assert_array_equal(model.logits(TOKENS, chunks=ONE_BY_ONE, kind="decode"), steps)
                assert greedy(model, TOKENS[:40], 40) == tokens, budget
                drafted = model.generate(TOKENS[:40], max_tokens=40, temperature=0.0, draft="mtp", draft_tokens=3)
                assert [token.id for token in drafted] == tokens, budget
                assert model.stats()["drafted_tokens"] > 0
                kept.append(model.stats()["placement"]["vram"])
                assert model.plan.total_bytes <= budget
                taken = sum(entry[2] for entry in model.engine.trace if entry[0] != "graphs")
                assert abs(taken - (model.plan.total_bytes - model.plan.graphs_bytes)) <= 4 * MIB
        except OutOfMemoryError:
            assert not kept, "what fits into less fits"
    assert len(kept) > 5 and kept[0] < kept[-1]


# --- memory ----------------------------------------------------------------------------------------------------------


def taken(model: Model, name: str) -> int:
    """What a line of the trace says that loading took."""
    return sum(entry[2] for entry in model.engine.trace if entry[0] == name)


@pytest.mark.parametrize("kv_dtype, mib", [("bf16", 256), ("fp32", 512)])
def test_only_attention_has_a_kv_cache(kv_dtype: str, mib: int, tmp_path: Path) -> None:
    """The layers and heads of a model of 27 billion parameters, in all else small: of 64 layers 16 are attention, with
    4 heads of 256 for keys and values."""
    model = TinyModel("qwen35", qk_norm="head", layers=64, heads=4, kv_heads=4, head_dim=256, rope_dims=64, width=32,
                      hidden=32, delta=Delta(1, 1, 8), context=4096)
    with load(write(tmp_path / "m.gguf", model), kv_dtype=kv_dtype, context=4096) as loaded:
        planned = dict(loaded.plan.lines)["KV cache"]
        # A line may begin within a granule that its neighbour took.
        assert abs(planned - mib * MIB) <= 2 * MIB and abs(taken(loaded, "KV cache") - mib * MIB) <= 4 * MIB
        assert len(greedy(loaded, [1, 2, 3], 5)) == 5


def test_states_are_as_many_as_asked_for(tmp_path: Path) -> None:
    model = replace(HYBRID, delta=Delta(16, 32, 128, interval=2), type="Q4_K")
    path = write(tmp_path / "m.gguf", model)
    one = 4 * (32 * 128 * 128 + 3 * (2 * 16 + 32) * 128)  # of the only layer that has states
    before = free_bytes()
    for sequences in (1, 9, 40):
        with load(path, sequences=sequences) as loaded:
            assert abs(taken(loaded, "recurrent state") - sequences * one) <= 4 * MIB
            assert abs(dict(loaded.plan.lines)["recurrent state"] - sequences * one) <= 4 * MIB
    assert before - free_bytes() <= 16 * MIB


# --- drafts ----------------------------------------------------------------------------------------------------------

# Sayings of few different tokens, so that look-ups find something.
PROMPT = (TOKENS[:6] * 3)[:-2]
DRAFTED = {"llama": replace(MODELS["llama"], type="Q8_0"), "qwen3moe": replace(MODELS["qwen3moe"], type="Q8_0"),
           **{name: replace(HYBRIDS[name], type="Q8_0") for name in NAMES},
           "hybrid": replace(HYBRID, type="Q4_K", predictions=1),
           "hybrid with experts": replace(HYBRID_EXPERTS, type="Q6_K", predictions=1)}
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 2, "top_k": 20, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
]


def ways(model: TinyModel) -> Iterator[dict[str, Any]]:
    """Every way of drafting that a model has."""
    for draft in ("ngram", "mtp") if model.predictions else ("ngram",):
        for count in (1, 2, 3, 7):
            yield {"draft": draft, "draft_tokens": count}


def text(model: Model, **options: Any) -> list[int]:
    return [token.id for token in model.generate(PROMPT, max_tokens=60, **options)]


@pytest.mark.parametrize("name", DRAFTED)
def test_drafts_never_change_the_text(name: str, tmp_path: Path, cache) -> None:  # noqa: F811
    """Resident, with half of the weights elsewhere and with all of them, replayed and launched."""
    path = write(tmp_path / "m.gguf", DRAFTED[name])
    with load(path, device="cpu", **EXACT) as model:
        expected = [text(model, draft="off", **sampling) for sampling in SAMPLINGS]
    whole = drafted = 0
    for part in (None, 0.5, 0.0):
        if part is not None:
            cache(part * whole, True)
        with load(path, **EXACT) as model:
            whole = whole or model.stats()["placement"]["vram"]
            for graphs in (True, False):
                model.graphs = graphs
                for way in ways(DRAFTED[name]):
                    for sampling, words in zip(SAMPLINGS, expected, strict=True):
                        assert text(model, **way, **sampling) == words, (part, graphs, way, sampling)
                        stats = model.stats()
                        # The first token comes with the prompt; the last step may have had more than were asked for.
                        assert stats["steps"] <= len(words) and stats["accepted_tokens"] <= stats["drafted_tokens"]
                        assert stats["steps"] + stats["accepted_tokens"] >= len(words) - 1 - way["draft_tokens"]
                        drafted += stats["drafted_tokens"]
    assert drafted > 0


def test_without_the_prediction_layer_it_is_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", MEDIUM["qwen35"])
    options: dict[str, Any] = {"kv_dtype": "bf16", "context": 512}
    with load(path, **options) as model:
        expected = greedy(model, TOKENS[:30], 40)
        assert model.stats()["drafted_tokens"] > 0, "it drafts by itself"
        logits, held = model.logits(TOKENS), model.stats()["placement"]["vram"]
    with load(path, mtp=False, **options) as model:
        assert greedy(model, TOKENS[:30], 40) == expected
        assert model.stats()["drafted_tokens"] == 0
        np.testing.assert_array_equal(model.logits(TOKENS), logits)
        assert model.stats()["placement"]["vram"] < held


def test_the_bundled_model_looks_up() -> None:
    prompt = "The fox saw the owl. The owl saw the fox. The fox saw"

    def story(**options: Any) -> tuple[str, dict[str, Any]]:
        with load(None, kv_dtype="bf16", prompt="exact", **options) as model:
            tokens = model.generate(prompt, max_tokens=150, temperature=0.0, draft="ngram", draft_tokens=4)
            return "".join(token.text for token in tokens), model.stats()

    with load(None, kv_dtype="bf16", device="cpu") as model:
        expected = "".join(token.text for token in model.generate(prompt, max_tokens=150, temperature=0.0, draft="off"))
    said, stats = story()
    on_cpu, counted = story(device="cpu")
    assert said == on_cpu == expected
    for count in ("steps", "drafted_tokens", "accepted_tokens"):
        assert stats[count] == counted[count] > 0
