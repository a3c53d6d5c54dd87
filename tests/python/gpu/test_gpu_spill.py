"""On a GPU, what a scheduler computes of prompts outlives the cache's memory and the process, and changes no answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_gpu import needs_a_gpu  # noqa: F401
from texts_and_prompts import LONGER, PROMPT, said

from sharpi import Model

pytestmark = pytest.mark.gpu


def loaded(prompt: str) -> Model:
    return Model.load(device="cuda", context=512, threads=1, prompt=prompt)


def cold(prompt: str, tokens: list[int]) -> list[Any]:
    with loaded(prompt) as model, model.scheduler(spill_bytes=0) as scheduler:
        return said(scheduler, tokens)[0]


@pytest.mark.parametrize("prompt", ["fast", "exact"])
def test_pages_come_back_to_the_gpu(tmp_path: Path, prompt: str) -> None:
    expected, longer = cold(prompt, PROMPT), cold(prompt, LONGER)
    with loaded(prompt) as model, model.scheduler(cache_dir=tmp_path) as scheduler:
        assert said(scheduler, PROMPT) == (expected, 0)
        said(scheduler, [3] * 480)
        assert scheduler.counts()["spilled_pages"] > 0
        assert said(scheduler, LONGER) == (longer, 192), "from RAM"
        assert scheduler.counts()["restored_pages"] > 0
    with loaded(prompt) as model, model.scheduler(cache_dir=tmp_path) as scheduler:
        assert said(scheduler, PROMPT) == (expected, 192), "from disk"
        assert scheduler.counts()["loaded_copies"] == 3


def test_prompts_of_another_arithmetic_are_not_used(tmp_path: Path) -> None:
    with loaded("fast") as model, model.scheduler(cache_dir=tmp_path) as scheduler:
        said(scheduler, PROMPT)
    with loaded("exact") as model, model.scheduler(cache_dir=tmp_path) as scheduler:
        assert said(scheduler, PROMPT) == (cold("exact", PROMPT), 0)
