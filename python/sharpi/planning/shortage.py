"""Loading a plan with less memory than it was made for.

The core loads exactly what a plan says, or nothing, and then says how much memory there is. What was free when the plan
was made may be gone: another plan is made for what is left, and more weights come across PCIe. Which weights are where
does not show in an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from sharpi.errors import OutOfMemoryError
from sharpi.files.gguf import GgufFile
from sharpi.planning.gpu_plan import OnGpu, largest
from sharpi.planning.placement import SLOTS
from sharpi.planning.plan import SMALLEST_CONTEXT, Plan
from sharpi.planning.planner import MachineSpeeds
from sharpi.planning.request import Request, Spec

if TYPE_CHECKING:
    from sharpi.planning.expert_stats import ExpertStats

__all__ = ["ATTEMPTS", "RESERVE", "load_planned"]

# Others may take memory between the look at it and the loading.
ATTEMPTS = 3
# What a plan for less memory leaves free, if that is little beside the whole: kernels and captured steps come with the
# first tokens.
RESERVE = 128 << 20
_LEAST_BATCH = 64  # that is offered before a shorter context is

Engine = TypeVar("Engine")


def load_planned(plan: Plan, file: GgufFile, spec: Spec, warm: ExpertStats | None,
                 load: Callable[[Plan], Engine]) -> tuple[Engine, Plan, list[str]]:
    """What `load` makes of the plan, or of one for less memory; the plan that it made it of; and lines for people.

    Raises `OutOfMemoryError` with a setting that would fit, if one would.
    """
    tried = plan
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return load(tried), tried, _less_is_kept(plan, tried, file, spec)
        except OutOfMemoryError as error:
            if error.available is None:
                raise
            if not plan.homes or attempt == ATTEMPTS:
                raise _advised(error, error.available, tried, file, spec) from error
            # If it is RAM that is short, slots for experts there are figured anew.
            of_ram = bool(plan.ram_slots) and error.wanted is not None and error.wanted <= error.available
            tried = _within(plan, error.available, file, spec, warm, last=attempt + 1 == ATTEMPTS, of_ram=of_ram)
    raise AssertionError("the last attempt returns or raises")


def _within(plan: Plan, available: int, file: GgufFile, spec: Spec, warm: ExpertStats | None, *, last: bool,
            of_ram: bool) -> Plan:
    """The plan if what it takes is there, else one for what there is. The last attempt leaves a reserve even if the
    plan seems to fit, since memory that seemed free before was not. of_ram: RAM is short, and VRAM is not."""
    request = _request(plan, file, spec, warm)
    if of_ram:
        assert plan.gpu is not None
        return OnGpu(request, plan.gpu, available).shortened(plan, available)
    if not last and request.total("cuda", plan.context, plan.batch, plan.homes, plan.expert_slots) <= available:
        return plan
    assert plan.gpu is not None
    return OnGpu(request, plan.gpu, available).shortened(plan, available - min(RESERVE, available // 16))


def _request(plan: Plan, file: GgufFile, spec: Spec, warm: ExpertStats | None) -> Request:
    """What the plan could have been asked for with."""
    left_to_cpu = any(home.home == SLOTS for home in plan.homes) and not plan.expert_rates[1]
    return Request(file=file, spec=spec, context=plan.context, kv_dtype=plan.kv_dtype, batch=plan.batch,
                   threads=plan.threads, vram=plan.vram, cpu_moe=left_to_cpu, ram=None,
                   speeds=MachineSpeeds(plan.profile, None), warm=warm, shown=False, sequences=plan.sequences,
                   cache_tokens=plan.cache_tokens,
                   rope=plan.rope, prompt=plan.prompt)


def _less_is_kept(plan: Plan, tried: Plan, file: GgufFile, spec: Spec) -> list[str]:
    if tried is plan:
        return []
    known = _request(plan, file, spec, None).inventory
    held, wanted = (known.kept_bytes(made.homes) + made.expert_slots for made in (tried, plan))
    if tried.ram_slots < plan.ram_slots:
        return [f"only {_mib(tried.ram_slots)} of RAM are left for experts, not the {_mib(plan.ram_slots)} of the plan:"
                " more is read from the disk"]
    if held == wanted:
        return []
    return [f"only {_mib(tried.available_bytes or 0)} of VRAM are free: {_mib(held)} of weights are kept there, not the"
            f" {_mib(wanted)} of the plan; it will be slower"]


def _mib(count: int) -> str:
    return f"{count >> 20} MiB"


def _advised(error: OutOfMemoryError, available: int, plan: Plan, file: GgufFile, spec: Spec) -> OutOfMemoryError:
    """The error with a setting that would fit; as it is, if it was other memory that is short."""
    if error.wanted is not None and error.wanted <= available:
        return error
    advised = OutOfMemoryError(f"{error}; {_advice(plan, available, _request(plan, file, spec, None))}")
    advised.available, advised.wanted = error.available, error.wanted
    return advised


def _advice(plan: Plan, available: int, request: Request) -> str:
    def fits(context: int, batch: int) -> bool:
        rows = request.most_rows(batch, context)
        return request.total(plan.device, context, rows, plan.homes, plan.expert_slots) <= available

    batch = plan.batch
    while batch >= 1:
        if fits(plan.context, batch):
            return f"a batch of {batch} would fit"
        context = largest(plan.context, lambda tokens: fits(tokens, batch))  # noqa: B023 - called at once
        if context >= min(SMALLEST_CONTEXT, plan.context):
            smaller = f" with a batch of {batch}" if batch < plan.batch else ""
            return f"a context of {context} tokens{smaller} would fit"
        batch = max(batch // 2, _LEAST_BATCH) if batch > _LEAST_BATCH else 0
    return ("the model does not fit there: use device cpu" if plan.device == "cuda"
            else "a smaller context or batch needs less")
