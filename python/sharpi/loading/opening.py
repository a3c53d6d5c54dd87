"""Opening an engine for a plan, and what becomes of the plan if the GPU fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sharpi import _core
from sharpi.errors import ModelFileError, SharpiError
from sharpi.files.gguf import GgufFile
from sharpi.machine.hardware import Gpu
from sharpi.planning.expert_stats import ExpertStats
from sharpi.planning.plan import Plan
from sharpi.planning.planner import make_plan
from sharpi.planning.shortage import load_planned

__all__ = ["Progress", "engine_options", "open_engine", "read_pages"]

Progress = Callable[[int, int], None]

_log = logging.getLogger(__name__)


def engine_options(plan: Plan, warm: ExpertStats | None = None) -> _core.EngineOptions:
    """A plan as the core's options. warm: says which experts fill the slots first."""
    on_gpu = plan.device == "cuda"
    return _core.EngineOptions(
        context=plan.context,
        cache_tokens=plan.cache_tokens,
        batch=plan.batch,
        threads=plan.threads,
        kv_dtype=plan.kv_dtype,
        prompt=plan.prompt,
        sequences=plan.sequences,
        device=plan.device,
        ordinal=plan.gpu.index if isinstance(plan.gpu, Gpu) and on_gpu else 0,
        vram=plan.vram or 0,
        homes=plan.homes if on_gpu else (),
        expert_slot_bytes=plan.expert_slots,
        expert_ram_bytes=plan.ram_slots,
        expert_rates=plan.expert_rates if on_gpu else (0.0, 0.0),
        warm=warm.order() if warm else (),
        tight=on_gpu and not plan.fits,
    )


def _open(file: GgufFile, spec: _core.Description, plan: Plan, warm: ExpertStats | None) -> _core.Engine:
    return _core.Engine(spec, [str(path) for path in file.paths], engine_options(plan, warm))


def open_engine(file: GgufFile, spec: _core.Description, plan: Plan, warm: ExpertStats | None,
                asked: Mapping[str, Any] | None) -> tuple[_core.Engine, Plan, list[str]]:
    """The engine, the plan that it runs, and lines for people. The plan is one for less memory if there is less than
    planned, and one for the CPU if the GPU fails and the plan chose it. warm: says which experts fill the slots first.
    asked: what the plan was made from, if another may be made."""
    def load(made: Plan) -> tuple[_core.Engine, Plan, list[str]]:
        return load_planned(made, file, spec, warm, lambda tried: _open(file, spec, tried, warm))

    try:
        return load(plan)
    except ModelFileError:
        raise
    except SharpiError as reason:
        if asked is None or plan.device == "cpu":
            raise
        # The plan could not know that another process takes the memory, that the driver lacks something, or that the
        # GPU fails at its first kernel.
        _log.warning("%s: the GPU cannot be used, so the CPU is: %s", file.name, reason)
        instead = make_plan(file, spec, **{**asked, "device": "cpu", "vram": None})
        instead = replace(instead, why=str(reason), gpu=plan.gpu, vram=plan.vram)
        return load(instead)


def read_pages(engine: _core.Engine, plan: Plan, progress: Progress) -> None:
    """Reads the file's pages into RAM; for the GPU they have been copied already, and what is larger than RAM is read
    as it is needed."""
    def report(done: int, total: int) -> bool:
        progress(done, total)
        return True

    if plan.device == "cpu" and not plan.disk_bytes:
        engine.warm(report)
    else:
        progress(plan.weights_bytes, plan.weights_bytes)
