"""`ApiServer`: what the endpoints of a running server share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sharpi.errors import InvalidRequestError
from sharpi.loading.loaded_model import LoadedModel
from sharpi.scheduler import Scheduler
from sharpi.serve.http.keys import Keys
from sharpi.serve.http.metrics import Metrics
from sharpi.serve.http.traffic import Traffic
from sharpi.serve.http.watch import StepWatch
from sharpi.serve.models.catalog import ModelFile
from sharpi.serve.models.loading import MakeRunner, ModelLoader, default_runner
from sharpi.serve.models.measuring import MeasuredRunner
from sharpi.serve.models.store import Loader, ModelStore
from sharpi.serve.server import Runner
from sharpi.serve.settings import ServerSettings
from sharpi.serve.turns import Usage

__all__ = ["ApiServer"]


class ApiServer:
    """A `Server` (see server.py)."""

    def __init__(self, settings: ServerSettings, files: tuple[ModelFile, ...], *,
                 make_runner: MakeRunner | None = None, loader: Loader | None = None) -> None:
        """loader: instead of a `ModelLoader` with `make_runner`. Raises `InvalidRequestError` for keys that cannot be
        read."""
        self.settings = settings
        self.keys = Keys(settings)
        self.traffic = Traffic()
        self._make_runner = make_runner or default_runner
        self.store = ModelStore(files, loader or ModelLoader(settings, self._measured), settings.memory_bytes)
        self.metrics = Metrics(self.counts)
        self.watch = StepWatch(self.counts, settings.stall_seconds)

    def counts(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The names of the loaded models, and what their schedulers count."""
        for loaded in self.store.loaded():
            try:
                yield loaded.name, loaded.scheduler.counts()
            except InvalidRequestError:  # it is being closed
                pass

    def _measured(self, model: LoadedModel, scheduler: Scheduler, settings: ServerSettings, name: str) -> Runner:
        def record(usage: Usage) -> None:
            self.metrics.turn(name, usage)

        return MeasuredRunner(self._make_runner(model, scheduler, settings), record, settings.log_prompts)
