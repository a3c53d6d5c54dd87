"""On a GPU, what a scheduler computes of prompts outlives the cache's memory and the process, and changes no answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from golden_deepseek4 import write_deepseek4
from golden_models import write_golden
from test_gpu import needs_a_gpu  # noqa: F401
from texts_and_prompts import LONGER, PROMPT, said

from sharpi import Model

pytestmark = pytest.mark.gpu

# The bundled mixture, and a tiny model of each other kind of cache.
KINDS = {"experts": None, "windows": "gemma3", "states": "qwen35", "latents": "deepseek2", "blocks": "deepseek4"}


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    name, folder = KINDS[request.param], tmp_path_factory.mktemp("spill")
    if name == "deepseek4":
        return write_deepseek4(folder / "m.gguf")
    return None if name is None else write_golden(name, folder)


def loaded(prompt: str, path: Path | None = None) -> Model:
    return Model.load(path, device="cuda", context=512, threads=1, prompt=prompt)


def cold(prompt: str, tokens: list[int], path: Path | None = None) -> list[Any]:
    with loaded(prompt, path) as model, model.scheduler(spill_bytes=0) as scheduler:
        return said(scheduler, tokens)[0]


@pytest.mark.parametrize("prompt", ["fast", "exact"])
def test_pages_come_back_to_the_gpu(tmp_path: Path, path: Path | None, prompt: str) -> None:
    expected, longer = cold(prompt, PROMPT, path), cold(prompt, LONGER, path)
    with loaded(prompt, path) as model, model.scheduler(cache_dir=tmp_path) as scheduler:
        assert said(scheduler, PROMPT) == (expected, 0)
        said(scheduler, [3] * 480)
        assert scheduler.counts()["spilled_pages"] > 0
        assert said(scheduler, LONGER) == (longer, 192), "from RAM"
        assert scheduler.counts()["restored_pages"] > 0
    with loaded(prompt, path) as model, model.scheduler(cache_dir=tmp_path) as scheduler:
        assert said(scheduler, PROMPT) == (expected, 192), "from disk"
        assert scheduler.counts()["loaded_copies"] >= 3


def test_prompts_of_another_arithmetic_are_not_used(tmp_path: Path) -> None:
    with loaded("fast") as model, model.scheduler(cache_dir=tmp_path) as scheduler:
        said(scheduler, PROMPT)
    with loaded("exact") as model, model.scheduler(cache_dir=tmp_path) as scheduler:
        assert said(scheduler, PROMPT) == (cold("exact", PROMPT), 0)
