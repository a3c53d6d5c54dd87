"""SmolLM2 and Gemma 3 on a GPU. With exact prompts, logits have the CPU's bits, and the text is the same. Fast prompts
round differently; the test prints where the texts then differ."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from asking import QUESTION, prompt_ids
from test_smollm2 import EDITING

from sharpi import Model
from sharpi.machine.hardware import gpu

pytestmark = pytest.mark.gpu

TOKENS = 96
TEXT = Path(__file__).parents[1] / "data" / "river_bank.txt"


@pytest.fixture(scope="module", autouse=True)
def needs_a_gpu() -> None:
    found = gpu()
    if isinstance(found, str):
        (pytest.fail if os.environ.get("SHARPI_REQUIRE_GPU", "") not in ("", "0") else pytest.skip)(found)


@pytest.fixture(scope="module", params=[8, 1024], ids=["batch 8", "batch 1024"])
def exact(smollm2: Path, request: pytest.FixtureRequest) -> Iterator[Model]:
    """A model that computes prompts exactly."""
    with Model.load(smollm2, device="cuda", context=1024, batch=request.param, prompt="exact") as loaded:
        yield loaded


def prompts(model: Model) -> dict[str, list[int]]:
    return {"question": prompt_ids(model, QUESTION), "editing": model.tokenize(EDITING),
            "story": prompt_ids(model, "Tell me a story about a fox and a mole.")}


def text_ids(model: Model, ids: list[int], **options: object) -> list[int]:
    return [token.id for token in model.generate(ids, max_tokens=TOKENS, **{"temperature": 0.0, **options})]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 5}, {"draft": "ngram"}],
                         ids=["greedy", "sampled", "drafted"])
def test_exact_prompts_say_what_the_cpu_says(model: Model, exact: Model, options: dict[str, object]) -> None:
    for name, ids in prompts(model).items():
        assert text_ids(exact, ids, **options) == text_ids(model, ids, **options), name


def test_exact_prompts_and_decode_have_the_cpus_logits(model: Model, exact: Model) -> None:
    for name, ids in prompts(model).items():
        on_cpu = model.logits(ids).view(np.uint32)
        for kind in ("prompt", "decode"):
            np.testing.assert_array_equal(exact.logits(ids, kind=kind).view(np.uint32), on_cpu, f"{name}, {kind}")


def test_windows_have_the_cpus_logits_and_text(gemma3_model: Model, gemma3: Path) -> None:
    """The prompt is longer than Gemma 3's windows of 512 tokens."""
    ids = gemma3_model.tokenize(TEXT.read_text(encoding="utf-8"))[:700]
    on_cpu = gemma3_model.logits(ids).view(np.uint32)
    with Model.load(gemma3, device="cuda", context=1024, prompt="exact") as exact:
        for kind in ("prompt", "decode"):
            np.testing.assert_array_equal(exact.logits(ids, kind=kind).view(np.uint32), on_cpu, kind)
        assert text_ids(exact, ids) == text_ids(gemma3_model, ids)


def test_where_prompts_on_tensor_cores_part_from_it(model: Model, smollm2: Path) -> None:
    """Printed, not checked: both are right within rounding."""
    with Model.load(smollm2, device="cuda", context=1024, prompt="fast") as fast:
        for name, ids in prompts(model).items():
            here, there = text_ids(model, ids), text_ids(fast, ids)
            apart = next((at for at, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), None)
            print(
                f"{name}: "
                + (
                    "the same text"
                    if apart is None and len(here) == len(there)
                    else f"the texts part after {min(len(here), len(there)) if apart is None else apart} tokens"
                )
            )
            assert there
