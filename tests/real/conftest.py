"""The checkpoints as fixtures. A test whose checkpoint could not be fetched is skipped, and says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import GEMMA3, SMOLLM2, Checkpoint, cached

from sharpi import Model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.real)


def _path(checkpoint: Checkpoint) -> Path:
    path = cached(checkpoint)
    if path is None:
        pytest.skip(f"{checkpoint.name} is not here: python tests/real/checkpoints.py fetches it")
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return _path(SMOLLM2)


@pytest.fixture(scope="session")
def gemma3() -> Path:
    return _path(GEMMA3)


@pytest.fixture(scope="session")
def model(smollm2: Path) -> Iterator[Model]:
    """SmolLM2 on the CPU."""
    with Model.load(smollm2, device="cpu", context=1024) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def gemma3_model(gemma3: Path) -> Iterator[Model]:
    """Gemma 3 270M on the CPU."""
    with Model.load(gemma3, device="cpu", context=1024) as loaded:
        yield loaded
