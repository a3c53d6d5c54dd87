"""A row's bits belong to its kind, its tokens and its position: the same whatever the batch is, wherever a prompt is
cut, whatever the budget, however many states there are and whoever is answered in between. A later turn of a
conversation has the bits of a cold start. All of it on the CPU, and on the GPU with fast and with exact prompts; exact
prompts, and decode on any processor, have the CPU's bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_models import GOLDEN, LOGITS, write_golden
from test_gpu import DENSE, HYBRID, REQUIRED, the_gpu
from test_gpu_experts import ARCHITECTURES
from tiny_models import HYBRIDS, ON_GPU, TinyModel, write

from sharpi import Model, _core
from sharpi.errors import OutOfMemoryError
from sharpi.loading.description import describe
from sharpi.machine.profile import ASSUMED
from sharpi.planning.placement import Inventory

GIB = 1 << 30
CONTEXT = 4096
VOCABULARY = 96
LENGTHS = (*range(1, 10), 63, 64, 65, 300, 1030, 1031, 2049)

# Models with experts can have some of them in slots.
FAMILIES: dict[str, TinyModel] = {
    "dense": replace(DENSE, type="Q4_K"),
    "dense-F32": ON_GPU["qwen3"],
    "mixture": replace(ARCHITECTURES["qwen3moe"], type="Q4_K"),
    "hybrid": replace(HYBRID, type="Q4_K", predictions=1),
    "hybrid-uneven": HYBRIDS["qwen35-uneven"],
    "hybrid with experts": replace(ARCHITECTURES["qwen35moe"], type="Q6_K"),
}
RECURRENT = [name for name, model in FAMILIES.items() if model.delta]


@pytest.fixture
def dice() -> np.random.Generator:
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def require_a_gpu() -> None:
    found = the_gpu()
    if isinstance(found, str):
        (pytest.fail if REQUIRED else pytest.skip)(found)


@pytest.fixture(
    params=["cpu", pytest.param("fast", marks=pytest.mark.gpu), pytest.param("exact", marks=pytest.mark.gpu)]
)
def machine(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of `Model.load` for a processor, and how it computes prompts."""
    if request.param == "cpu":
        return {"device": "cpu"}
    require_a_gpu()
    return {"device": "cuda", "prompt": request.param}


def load(path: Path, **options: Any) -> Model:
    """Misses of experts are shared out by the same rates on every machine."""
    more = {} if options.get("device") == "cpu" else {"profile": ASSUMED}
    return Model.load(path, **{"context": CONTEXT, "threads": 2, **more, **options})


def text_of(dice: np.random.Generator, count: int) -> list[int]:
    return dice.integers(0, VOCABULARY, count).tolist()


def some_batch(dice: np.random.Generator) -> int:
    """Small ones as often as large ones."""
    return int(2 ** dice.uniform(0, 11.5))


def some_cuts(dice: np.random.Generator, count: int) -> list[int]:
    """Sizes of pieces that make up `count` tokens; sometimes one piece."""
    cuts: list[int] = []
    most = int(2 ** dice.uniform(1, 12))
    while sum(cuts) < count:
        cuts.append(min(int(dice.integers(1, most + 1)), count - sum(cuts)))
    return cuts


def set_budget(monkeypatch: pytest.MonkeyPatch, dice: np.random.Generator, path: Path, part: float) -> str:
    """Limits what a GPU keeps of the weights that may be elsewhere, and of experts gives slots to the others."""
    file, spec = describe(path)
    inventory = Inventory.of(file, spec)
    limit = part * inventory.movable_bytes(len(inventory.movable))
    rows = str(dice.integers(2))
    monkeypatch.setenv("SHARPI_CUDA_PARTIAL_WEIGHT_CACHE_GB", f"{limit / GIB:.12f}")
    monkeypatch.setenv("SHARPI_CUDA_ROW_SPLIT", rows)
    return f"{part:.2f} of the weights in VRAM, rows of the CPU: {rows}"


def likeliest() -> _core.SamplingParams:
    return drawn(0, temperature=0.0)


def drawn(seed: int, temperature: float = 1.0) -> _core.SamplingParams:
    return _core.SamplingParams(temperature=temperature, top_k=20, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
                                presence_penalty=0.0, frequency_penalty=0.0, logit_bias={}, seed=seed)


def answer(session: _core.Session, prompt: Sequence[int], params: _core.SamplingParams, count: int,
           draft: tuple[str, int] = ("off", 1)) -> list[int]:
    session.start(prompt, params, *draft)
    return [token for _ in range(count) if (token := session.next()) is not None]


# --- one prompt ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_but_its_tokens_decides_a_prompt(family: str, machine: dict[str, Any], tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch, dice: np.random.Generator) -> None:
    """A prompt's rows do not depend on what comes after them either: shorter prompts have the first rows of longer
    ones."""
    path, tokens = write(tmp_path / "m.gguf", replace(FAMILIES[family], context=CONTEXT)), text_of(dice, max(LENGTHS))
    with load(path, batch=CONTEXT, **machine) as model:
        whole, steps = model.logits(tokens), model.logits(tokens[:300], kind="decode")
        texts = {count: answer(_core.Session(model.engine), tokens[:count], likeliest(), 8) for count in LENGTHS}
    assert np.isfinite(whole).all() and len({tuple(text) for text in texts.values()}) > len(LENGTHS) // 2
    in_part = float(dice.uniform(0.5, 0.95))
    for part in (in_part, 1.1) if machine["device"] == "cpu" else (0.0, float(dice.uniform(0.0, 0.5)), in_part, 1.1):
        batch, said = some_batch(dice), set_budget(monkeypatch, dice, path, part)
        sequences = int(dice.integers(1, 5))
        with load(path, batch=batch, sequences=sequences, **machine) as model:
            for count in LENGTHS:
                cuts = some_cuts(dice, count) if dice.integers(3) else []
                where = f"{count} tokens in batches of {batch}, cut {cuts[:5]}, {said}, {sequences} states"
                np.testing.assert_array_equal(model.logits(tokens[:count], chunks=cuts), whole[:count], where)
                assert answer(_core.Session(model.engine), tokens[:count], likeliest(), 8) == texts[count], where
            cuts = some_cuts(dice, 300)
            np.testing.assert_array_equal(model.logits(tokens[:300], chunks=cuts, kind="decode"), steps, f"{cuts[:5]}")
            if part == in_part and machine["device"] == "cuda" and FAMILIES[family].experts:
                assert model.stats()["experts"]["slots"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_decode_goes_on_from_any_prompt(family: str, machine: dict[str, Any], tmp_path: Path,
                                        dice: np.random.Generator) -> None:
    """Decode rows behind prompt rows, in pieces of any size."""
    path = write(tmp_path / "m.gguf", replace(FAMILIES[family], context=CONTEXT))
    prompt, more = text_of(dice, int(dice.choice([1, 8, 9, 63, 64, 65, 300]))), text_of(dice, 150)
    rows = []
    for batch in (CONTEXT, some_batch(dice), some_batch(dice)):
        with load(path, batch=batch, **machine) as model:
            for cuts in ([1] * len(more), some_cuts(dice, len(more)), [len(more)]):
                session = _core.Session(model.engine)
                session.evaluate(prompt, some_cuts(dice, len(prompt)))
                rows.append(session.logits(more, cuts, kind="decode"))
                np.testing.assert_array_equal(rows[-1], rows[0], f"{len(prompt)} tokens, then {cuts[:5]}, {batch}")


@pytest.mark.parametrize("name", GOLDEN)
def test_reference_models_cut_anywhere(name: str, machine: dict[str, Any], tmp_path: Path,
                                       monkeypatch: pytest.MonkeyPatch, dice: np.random.Generator) -> None:
    path, tokens = write_golden(name, tmp_path), np.load(LOGITS / f"{name}.npz")["tokens"].tolist()
    with load(path, batch=512, context=None, **machine) as model:
        whole = model.logits(tokens)
    for _ in range(3):
        batch, cuts = some_batch(dice), some_cuts(dice, len(tokens))
        said = set_budget(monkeypatch, dice, path, float(dice.uniform(0, 1.1)))
        with load(path, batch=batch, context=None, **machine) as model:
            np.testing.assert_array_equal(model.logits(tokens, chunks=cuts), whole, f"{batch}, {said}, {cuts[:5]}")


# --- conversations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_ten_turns_of_a_conversation_are_cold_starts(
    family: str, machine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dice: np.random.Generator
) -> None:
    """Each turn is what was said so far, the answer among it, and new tokens. What the session holds of it gives the
    same answer as the whole text in a new session, and, when more is evaluated behind it, the same bits."""
    path = write(tmp_path / "m.gguf", replace(FAMILIES[family], context=CONTEXT))
    batch, sequences = some_batch(dice), int(dice.integers(1, 7))
    drafts = [("off", 1), ("ngram", 3), *([("mtp", 2)] if FAMILIES[family].predictions else [])]
    with load(path, batch=CONTEXT, sequences=2, **machine) as other:
        print(set_budget(monkeypatch, dice, path, float(dice.uniform(0, 1.1))), "batch", batch, "states", sequences)
        with load(path, batch=batch, sequences=sequences, **machine) as model:
            warm, text, reused = _core.Session(model.engine), text_of(dice, 40), 0
            for turn in range(10):
                params = likeliest() if turn % 2 else drawn(turn)
                count = int(dice.integers(1, 30))
                said = answer(warm, text, params, count, drafts[int(dice.integers(len(drafts)))])
                reused += warm.reused_tokens
                assert said == answer(_core.Session(other.engine), text, params, count), (turn, len(text), batch)
                # The last token of an answer is not evaluated until something comes behind it.
                more = said[-1:] + text_of(dice, int(dice.integers(1, 200)))
                text = text + said[:-1]
                cold = other.logits(text + more)[len(text):]
                np.testing.assert_array_equal(
                    warm.logits(more), cold, f"turn {turn}, {len(text)} tokens, batch {batch}"
                )
                text = text + more + text_of(dice, int(dice.integers(1, 20)))
            # Without a spare state, fast prompts have none to go on from.
            assert reused > len(text) or sequences < 3, "the session was warm"


@pytest.mark.parametrize("family", RECURRENT)
@pytest.mark.parametrize("sequences", [1, 2, 3])
def test_two_sessions_with_few_states(family: str, sequences: int, machine: dict[str, Any], tmp_path: Path,
                                      dice: np.random.Generator) -> None:
    """In turn, going back to beginnings of any length, token by token at once, and each after the other has had its
    states."""
    path = write(tmp_path / "m.gguf", replace(FAMILIES[family], context=CONTEXT))
    with load(path, batch=CONTEXT, **machine) as other, load(path, batch=some_batch(dice), sequences=sequences,
                                                             **machine) as model:
        def alone(text: list[int], count: int) -> list[int]:
            return answer(_core.Session(other.engine), text, likeliest(), count)

        sessions = [_core.Session(model.engine) for _ in range(2)]
        texts = [text_of(dice, 100) for _ in sessions]
        for turn in range(10):
            session, text = sessions[turn % 2], texts[turn % 2]
            if sequences == 1:
                sessions[1 - turn % 2].reset()  # a session with tokens needs a state
            count = int(dice.integers(2, 90))
            said = answer(session, text, likeliest(), count)
            assert said == alone(text, count), (turn, len(text), count)
            more = said[-1:] + text_of(dice, 30)
            held = text + said[:-1]
            if turn % 3:
                np.testing.assert_array_equal(session.logits(more), other.logits(held + more)[len(held):], f"{turn}")
                held += more
            kept = held[: int(dice.integers(1, len(held) + 1))]
            texts[turn % 2] = kept + text_of(dice, int(dice.integers(1, 80)))
        if sequences == 1:
            with pytest.raises(OutOfMemoryError, match="close other sessions"):
                sessions[0].start(texts[0], likeliest())
            return
        for session, text in zip(sessions, texts, strict=True):
            session.start(text, likeliest())
        at_once = [[session.next() for session in sessions] for _ in range(70)]
        assert [list(said) for said in zip(*at_once, strict=True)] == [alone(text, 70) for text in texts]


# --- the CPU's bits --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", ON_GPU)
def test_exact_prompts_and_decode_have_the_cpus_bits(name: str, kind: str, tmp_path: Path,
                                                     dice: np.random.Generator) -> None:
    require_a_gpu()
    model = replace(ON_GPU[name], type=kind)
    if kind == "Q8_0" and model.hidden % 32:
        pytest.skip("its rows are no whole blocks")
    path, tokens = write(tmp_path / "m.gguf", model), text_of(dice, 300)
    for kv_dtype in ("fp32", "bf16"):
        with load(path, device="cpu", context=None, kv_dtype=kv_dtype) as loaded:
            expected = loaded.logits(tokens)
            story = answer(_core.Session(loaded.engine), tokens, drawn(1), 40)
        with load(path, device="cuda", context=None, kv_dtype=kv_dtype, prompt="exact") as loaded:
            np.testing.assert_array_equal(loaded.logits(tokens), expected)
            np.testing.assert_array_equal(loaded.logits(tokens, chunks=some_cuts(dice, 300)), expected)
            np.testing.assert_array_equal(loaded.logits(tokens, kind="decode"), expected)
            assert answer(_core.Session(loaded.engine), tokens, drawn(1), 40) == story
        with load(path, device="cuda", context=None, kv_dtype=kv_dtype, prompt="fast") as loaded:
            for cuts in ((), [1] * 300, some_cuts(dice, 300)):
                np.testing.assert_array_equal(loaded.logits(tokens, chunks=cuts, kind="decode"), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_on_the_cpu_kinds_do_not_show(family: str, tmp_path: Path, dice: np.random.Generator) -> None:
    path, tokens = write(tmp_path / "m.gguf", FAMILIES[family]), text_of(dice, 300)
    with load(path, device="cpu", context=None) as model:
        np.testing.assert_array_equal(model.logits(tokens), model.logits(tokens, kind="decode"))
