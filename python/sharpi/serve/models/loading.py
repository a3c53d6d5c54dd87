"""Opens one model to be served: its weights, its scheduler and its runner, and closes them again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from sharpi.loading.description import describe
from sharpi.loading.loaded_model import LoadedModel
from sharpi.machine.hardware import ram_bytes, usable_threads
from sharpi.planning.copies import kept
from sharpi.planning.plan import Plan
from sharpi.planning.planner import make_plan, parse_vram
from sharpi.scheduler import Scheduler
from sharpi.serve.models.catalog import ModelFile
from sharpi.serve.server import Runner
from sharpi.serve.settings import ServerSettings

__all__ = ["Loaded", "MakeRunner", "ModelLoader", "default_runner"]

MakeRunner = Callable[[LoadedModel, Scheduler, ServerSettings], Runner]
_NamedRunner = Callable[[LoadedModel, Scheduler, ServerSettings, str], Runner]

_log = logging.getLogger(__name__)


@dataclass
class Loaded:
    """A `Lease`, and the scheduler behind it. bytes: what it takes of the memory."""

    name: str
    model: LoadedModel
    scheduler: Scheduler
    runner: Runner
    bytes: int

    def close(self) -> None:
        """Ends what is still being answered and gives the memory back."""
        try:
            self.scheduler.close()
            end = getattr(self.runner, "close", None)
            if end is not None:
                end()
        finally:
            self.model.close()


def default_runner(model: LoadedModel, scheduler: Scheduler, settings: ServerSettings) -> Runner:
    """A `ModelRunner`."""
    from sharpi.serve.answering.runner import ModelRunner, RunnerLimits

    return ModelRunner(model, scheduler, RunnerLimits(max_queue=settings.max_queue,
                                                      request_seconds=settings.request_seconds or None))


class ModelLoader:
    """Loads models as the settings say."""

    def __init__(self, settings: ServerSettings, make_runner: _NamedRunner) -> None:
        """make_runner: is also given the model's name."""
        self._settings = settings
        self._make_runner = make_runner

    def needs(self, file: ModelFile) -> int:
        """The bytes of memory that a model takes if it has the device to itself. Raises `SharpiError`."""
        given = self._settings.load_arguments()
        threads = usable_threads(given.pop("threads"), None)
        described, spec = describe(file.path)
        plan = make_plan(described, spec, **given, threads=threads)
        # Not the plan's total: with another model in VRAM, the plan leaves to RAM what would not have to be there.
        alone = plan.weights_bytes + plan.kv_bytes + plan.state_bytes + plan.scratch_bytes
        if plan.disk_bytes:
            alone = plan.total_bytes
        return (alone if plan.vram is None else min(alone, plan.vram)) + self._beside(plan)

    def open(self, file: ModelFile) -> Loaded:
        """Raises `SharpiError`."""
        from sharpi.model import Model

        settings = self._limited()
        model = Model.load(file.path, **settings.load_arguments(), notice=_log.warning)
        try:
            scheduler = Scheduler(model, **settings.scheduler_arguments())
            try:
                runner = self._make_runner(model, scheduler, settings, file.name)
            except BaseException:
                scheduler.close()
                raise
        except BaseException:
            model.close()
            raise
        return Loaded(file.name, model, scheduler, runner, model.plan.total_bytes + self._beside(model.plan))

    def _beside(self, plan: Plan) -> int:
        """What the scheduler's copies take of the memory that the models share: on the CPU they are in it too."""
        if plan.device != "cpu":
            return 0
        return kept(ram_bytes(), recurrent=plan.state_bytes > 0, spill_bytes=self._settings.spill_bytes).total

    def _limited(self) -> ServerSettings:
        """The settings, with the memory for all models as the most that one may take of the GPU."""
        settings = self._settings
        if settings.memory_bytes is None or settings.device == "cpu":
            return settings
        asked = parse_vram(settings.vram)
        return replace(settings, vram=settings.memory_bytes if asked is None else min(asked, settings.memory_bytes))
