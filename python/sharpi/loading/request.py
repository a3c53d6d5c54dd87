"""What a caller of `Model.load` asks for: its arguments checked, and the plan that they make."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sharpi import _core
from sharpi.errors import InvalidRequestError
from sharpi.files.gguf import GgufFile
from sharpi.loading.description import read_spec
from sharpi.machine.hardware import usable_threads
from sharpi.machine.profile import HardwareProfile, load_profile
from sharpi.planning.expert_stats import ExpertStats, unwritable
from sharpi.planning.plan import MOST_CACHE_TOKENS, Plan
from sharpi.planning.planner import make_plan, saved_plan
from sharpi.settings import arguments
from sharpi.storage import require_writable

__all__ = ["ROPE_ARGUMENTS", "checked_arguments", "plan_of", "refuse_beside_a_plan", "stats_target", "warm_stats"]


def checked_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Model.load`, each of its type. Raises `InvalidRequestError`, which names the argument."""
    values = dict(given)
    for name, (check, *bounds) in _LOAD_CHECKS.items():
        if given[name] is None and name != "device":  # the only one whose default is not None
            continue
        value = values[name] = check(name, given[name])
        if bounds and not bounds[0] <= value <= bounds[1]:
            raise InvalidRequestError(f"{name} must be {bounds[0]} to {bounds[1]}, not {value}")
    return values


def _profile_or_path(name: str, value: Any) -> Any:
    return value if isinstance(value, HardwareProfile) else arguments.path(name, value)


def _stats_or_path(name: str, value: Any) -> Any:
    return value if isinstance(value, ExpertStats) else arguments.path(name, value)


# The arguments that plans are made of, and those of the scaling.
_PLANNED = ("device", "vram", "context", "kv_dtype", "threads", "batch", "cpu_moe", "sequences", "cache_tokens",
            "prompt", "ram_budget")
ROPE_ARGUMENTS = ("rope_scaling", "rope_scale", "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx")

# How `Model.load`'s arguments are checked, and the bounds of numbers; the planner and `RopeScaling` check the others.
_LOAD_CHECKS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("path", "plan", "expert_stats"), (arguments.path,)),
    **dict.fromkeys(("device", "kv_dtype", "prompt"), (arguments.text,)),
    **dict.fromkeys(("cpu_moe", "mtp"), (arguments.flag,)),
    **dict.fromkeys(("progress", "notice"), (arguments.function,)),
    "context": (arguments.whole,),
    "batch": (arguments.whole, 1, 65536),
    "threads": (arguments.whole, 1, 1024),
    "sequences": (arguments.whole, 1, 4096),
    "cache_tokens": (arguments.whole, 1, MOST_CACHE_TOKENS),
    **dict.fromkeys(("ram_budget", "spill_bytes"), (arguments.whole, 0, 1 << 60)),
    "profile": (_profile_or_path,),
    "warm": (_stats_or_path,),
}


def stats_target(path: str | os.PathLike[str] | None) -> str | None:
    """Where the expert statistics go, if anywhere. Raises `InvalidRequestError` for a path that cannot be written to
    now, before the model is loaded and used for hours."""
    target = os.environ.get("SHARPI_EXPERT_STATS") if path is None else os.fspath(path)
    if not target:
        return None
    try:
        require_writable(target)
    except (OSError, ValueError) as error:
        raise unwritable(target, error) from error
    return target


def warm_stats(warm: ExpertStats | str | os.PathLike[str] | None, file: GgufFile) -> ExpertStats | None:
    """The statistics that say which experts to load first. Raises `InvalidRequestError` for those of another model."""
    if warm is None:
        return None
    if not isinstance(warm, ExpertStats):
        return ExpertStats.load(warm, file)
    warm.require_model(file)
    return warm


def refuse_beside_a_plan(given: Mapping[str, Any]) -> None:
    """Raises `InvalidRequestError` if something is asked for that a saved plan says already."""
    for name in (*_PLANNED, "mtp", "profile", *ROPE_ARGUMENTS):
        if given[name] is not None and (name, given[name]) != ("device", "auto"):
            raise InvalidRequestError(f"a saved plan says {name} already: leave one of the two arguments out")


def plan_of(file: GgufFile, spec: _core.Description, given: Mapping[str, Any],
             more: Mapping[str, Any]) -> tuple[Plan, _core.Description, dict[str, Any] | None]:
    """The plan for the arguments of `Model.load`, the spec that it is for, and the arguments for `make_plan` if the
    device was left to it. more: arguments for `make_plan` beside those of `Model.load`."""
    if given["plan"] is not None:
        made = saved_plan(given["plan"], file, spec)
        made = replace(made, threads=usable_threads(made.threads, more["notice"]))
        return made, spec if made.mtp and made.rope is None else read_spec(file, made.mtp, made.rope), None
    if given["mtp"] and not spec.prediction_layers:
        raise InvalidRequestError(f"{file.name} has no prediction layer to draft with: leave mtp out")
    asked = {**{name: given[name] for name in (*_PLANNED, "spill_bytes")}, **more}
    asked["threads"] = usable_threads(given["threads"], more["notice"])
    profile = given["profile"]
    known = profile if profile is None or isinstance(profile, HardwareProfile) else load_profile(profile)
    return make_plan(file, spec, **asked, profile=known), spec, asked if given["device"] == "auto" else None
