"""Models that take no memory, for tests of the store and of the application around it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fake_turns import FakeRunner

from sharpi.serve.models.catalog import ModelFile
from sharpi.serve.models.loading import Loaded

COUNTS = {"waiting": 0, "preparing": 0, "writing": 0, "finished": 0, "refused": 0, "pauses": 0, "steps": 0,
          "step_tokens": 0, "step_seconds": 0.0, "pieces": 0, "piece_seconds": 0.0, "answers_again_tokens": 0}


class FakeLoader:
    """Keeps what became of the models in `events`. hold: a model is loaded when this is set. failures: what loading a
    model raises, by name. counts: what the scheduler of each model says."""

    def __init__(self, sizes: Mapping[str, int] | None = None) -> None:
        self.sizes = dict(sizes or {})
        self.events: list[str] = []
        self.hold = threading.Event()
        self.hold.set()
        self.failures: dict[str, Exception] = {}
        self.counts: dict[str, Any] = dict(COUNTS)
        self.runner = FakeRunner()

    def needs(self, file: ModelFile) -> int:
        return self.sizes.get(file.name, 1)

    def open(self, file: ModelFile) -> Loaded:
        assert self.hold.wait(20)
        if file.name in self.failures:
            raise self.failures[file.name]
        self.events.append(f"open {file.name}")
        scheduler: Any = SimpleNamespace(counts=lambda: dict(self.counts), close=lambda: None)
        model: Any = SimpleNamespace(close=lambda: self.events.append(f"close {file.name}"), context=512)
        return Loaded(file.name, model, scheduler, self.runner, self.sizes.get(file.name, 1))


def model_files(folder: Path, *names: str) -> tuple[ModelFile, ...]:
    """Files that are there, and hold nothing."""
    files = tuple(ModelFile(name, folder / f"{name}.gguf") for name in names)
    for file in files:
        file.path.touch()
    return files
