"""`Plan`: what a model will take and where its weights will be, as data that can be shown, saved and read back.

`planner.make_plan` makes plans, `Model.load` carries them out. A saved plan is the JSON that `sharpi plan --json`
prints; whatever a file holds, reading it ends in a sound plan or in one line that says what is wrong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from sharpi.errors import InvalidRequestError, OutOfMemoryError, one_line
from sharpi.files.gguf import GgufFile, fingerprint
from sharpi.files.rope import RopeScaling
from sharpi.machine.hardware import Gpu, free_ram_bytes
from sharpi.machine.profile import HardwareProfile
from sharpi.planning.placement import SLOTS, VRAM, ExpertPool, Inventory, Placed, TensorHome
from sharpi.planning.prediction.decode import BOUNDS, Speed
from sharpi.planning.prompt_modes import prompt_tile
from sharpi.settings.choices import EXACT, FAST, KV_DTYPES, PROMPT_MODES

__all__ = ["DEFAULT_SEQUENCES", "KV_DTYPES", "MOST_CACHE_TOKENS", "Plan", "SAVED_STATISTICS", "SMALLEST_CONTEXT",
           "UNIFORM_ROUTING", "load_plan", "size_words", "slots_in_ram", "vram_words"]

# For a model with recurrent layers, windows or chunks: conversations, and what they need to roll back.
DEFAULT_SEQUENCES = 4
MOST_CACHE_TOKENS = 1 << 40
_LONGEST_FILE = 64 << 20  # of a plan: many times what a model of thousands of tensors needs
SMALLEST_CONTEXT = 512  # a shorter one is not worth offering, where more was asked for
# Where an expected hit rate comes from.
UNIFORM_ROUTING, SAVED_STATISTICS = "uniform routing assumed", "by saved statistics"


@dataclass(frozen=True)
class Plan:
    """What a model takes on its device, all in bytes but the context and the batch (tokens).

    device: "cpu" or "cuda"; `why` says in one line how it was chosen, if that was left to the plan. gpu: the GPU, or
    why there is none; a plan for the CPU that nobody asked the GPU about has neither. vram: the budget that was set.
    weights_bytes: of the file. kv_bytes: what the KV cache holds; layers with a window or chunks keep what `sequences`
    sequences and a batch see of them, and kv_bytes_if_all_seen is what it would hold if every layer saw all tokens.
    lines: what the core allocates, in order, counted in the device's steps. available_bytes: what all must fit into,
    RAM or VRAM; `None` for a GPU that is not there and no budget. fitting_context and fitting_batch: the longest
    context up to the model's own, and the largest batch up to this one, with which the model would fit, all else as it
    is; 0 if none does. fitting_vram: the least budget that would do, if one was set that does not, and if it can be
    had; else 0.

    homes: on the GPU, each tensor's, in the file's order. placement: bytes of the weights by kind and by place; empty
    for a plan for the CPU that is not to be shown. expert_slots: what slots for experts may take, if not all are in
    VRAM, and expert_pools: what they are then. ram_slots and ram_pools: on the GPU, the same of slots in RAM, for
    experts that VRAM does not hold if RAM cannot hold all of them; the others are read from the disk. expert_rates:
    bytes a second of the CPU and of PCIe, by which they share missed experts; if that of PCIe is 0, the CPU computes
    all of them, as it does if no rates are known. hit_rate: the part of the experts' uses that is expected to find them
    in slots, `None` if no expert has a slot as its home; hit_source says how that is known. ram_hit_rate: the part that
    is expected to find them in ram_slots, `None` without these. prefill (of one batch), decode (at the beginning of a
    context) and decode_full (at its end): the predicted speeds, and `profile` the machine that they are for; `None` if
    nobody needed to know.
    fingerprint: of the file's tensors. disk_bytes: of a mixture that is larger than RAM, on the CPU, its experts'
    bytes: they are read from the disk, at disk_bytes_per_second, unless they are in the slots; that is known too if
    RAM has no room for other weights. sequences: how many
    there is room for whose recurrent state is held, in a model that has one, or what a window or chunk shows of them.
    cache_tokens: that the KV cache has room for, of all sequences together; 0: as many as the context.
    mtp: whether the file's prediction layer is loaded, for drafted tokens. draft_cost: what such a token adds to a
    step, as a part of a plain step's time; `None` if there is no prediction layer, or nobody needed to know. Predicted
    decode is without drafts. prompt: how prompts are computed, "exact" or "fast"; on the CPU always "exact". rope: the
    scaling that replaces the file's; `model_context` is the longest context with it.
    """

    model: str
    architecture: str
    fingerprint: str
    device: str
    why: str
    gpu: Gpu | str | None
    vram: int | None
    context: int
    model_context: int
    kv_dtype: str
    prompt: str
    batch: int
    threads: int
    weights_bytes: int
    kv_bytes: int
    kv_bytes_if_all_seen: int
    lines: tuple[tuple[str, int], ...]
    available_bytes: int | None
    fitting_context: int
    fitting_batch: int
    fitting_vram: int = 0
    homes: tuple[TensorHome, ...] = ()
    placement: tuple[Placed, ...] = ()
    expert_slots: int = 0
    expert_pools: tuple[ExpertPool, ...] = ()
    ram_slots: int = 0
    ram_pools: tuple[ExpertPool, ...] = ()
    expert_rates: tuple[float, float] = (0.0, 0.0)
    hit_rate: float | None = None
    hit_source: str = ""
    ram_hit_rate: float | None = None
    prefill: Speed | None = None
    decode: Speed | None = None
    decode_full: Speed | None = None
    profile: HardwareProfile | None = None
    disk_bytes: int = 0
    disk_bytes_per_second: float | None = None
    sequences: int = DEFAULT_SEQUENCES
    cache_tokens: int = 0
    mtp: bool = False
    draft_cost: float | None = None
    rope: RopeScaling | None = None

    def __repr__(self) -> str:
        vram = "" if self.device == "cpu" else f", {size_words(self.total_bytes)} of VRAM"
        speed = "" if self.decode is None else f", decode {self.decode.tokens_per_second:.1f} tokens/s predicted"
        unfit = "" if self.fits else ", does not fit"
        return (f"<Plan for {self.model!r} on {self.device}: context {self.context:,} in {self.kv_dtype}, {self.prompt}"
                f" prompts in batches of {self.batch:,}{vram}{speed}{unfit}>")

    @property
    def embedding_bytes(self) -> int:
        """The token embedding's line."""
        return self._line("token embedding")

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """The layers' lines, first to last."""
        return tuple(count for name, count in self.lines if name.startswith("layer "))

    @property
    def prediction_bytes(self) -> int:
        """The prediction layer's line; 0 if none is loaded."""
        return self._line("prediction layer")

    @property
    def head_bytes(self) -> int:
        """The output head's line; a head that is the embedding costs nothing."""
        return self._line("output head")

    @property
    def streaming_bytes(self) -> int:
        """The line of the buffers through which direct weights pass; 0 if all are resident."""
        return self._line("streaming")

    @property
    def expert_slots_bytes(self) -> int:
        """The line of the slots for experts, and of what goes with them; 0 if all experts are resident."""
        return self._line("expert slots")

    @property
    def experts(self) -> int:
        """The number of all layers' experts together, if they have slots; else 0."""
        return sum(pool.experts for pool in self.expert_pools)

    @property
    def experts_in_slots(self) -> int:
        """How many of them the slots hold."""
        return sum(pool.slots for pool in self.expert_pools)

    @property
    def slots_per_layer(self) -> float:
        """The mean of the layers whose experts have slots."""
        return self.experts_in_slots / max(1, sum(pool.layers for pool in self.expert_pools))

    @property
    def state_bytes(self) -> int:
        """The line of the recurrent states; 0 for a model without."""
        return self._line("recurrent state")

    @property
    def scratch_bytes(self) -> int:
        """The working memory's line."""
        return self._line("scratch")

    @property
    def graphs_bytes(self) -> int:
        """The line of the captured steps, and of what the driver keeps for them."""
        return self._line("graphs")

    @property
    def mapped_bytes(self) -> int:
        """Weights that are read where the file is mapped, and beside which the lines must fit: all of them on the
        CPU, but for experts that slots are for. On the GPU direct weights are in RAM too, but what must fit there is in
        the lines."""
        return self.weights_bytes - self.disk_bytes if self.device == "cpu" else 0

    @property
    def total_bytes(self) -> int:
        """Mapped weights and all lines together."""
        return self.mapped_bytes + sum(count for _, count in self.lines)

    @property
    def fits(self) -> bool:
        """Whether the total is within what is available; true if nobody knows what is."""
        return self.available_bytes is None or self.total_bytes <= self.available_bytes

    @property
    def reads_disk(self) -> bool:
        """Whether tokens wait for weights that RAM has no room for, as far as the plan knows."""
        return self.disk_bytes > 0 or self.ram_slots > 0 or self.disk_bytes_per_second is not None

    @property
    def resident(self) -> bool:
        """Whether all weights have a place of their own in VRAM."""
        return all(home.home == VRAM for home in self.homes)

    @property
    def most_cached(self) -> int:
        """The tokens of all sequences that the KV cache has room for."""
        return max(self.context, self.cache_tokens)

    @property
    def offered_context(self) -> int:
        """For a plan that does not fit: the fitting context, or 0 if it is too short to be worth the offer."""
        return self.fitting_context if self.fitting_context >= min(SMALLEST_CONTEXT, self.context) else 0

    def to_dict(self) -> dict[str, Any]:
        """Every field and every sum, as `sharpi plan --json` prints them."""
        sums = ("embedding_bytes", "prediction_bytes", "head_bytes", "streaming_bytes", "expert_slots_bytes",
                "state_bytes", "scratch_bytes", "graphs_bytes", "mapped_bytes", "total_bytes", "experts",
                "experts_in_slots", "slots_per_layer", "fits")
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            **{name: getattr(self, name) for name in sums},
            "gpu": asdict(self.gpu) if isinstance(self.gpu, Gpu) else self.gpu,
            "lines": [{"name": name, "bytes": count} for name, count in self.lines],
            "homes": [list(home) for home in self.homes],
            "placement": [placed._asdict() for placed in self.placement],
            **{name: [pool._asdict() for pool in getattr(self, name)] for name in ("expert_pools", "ram_pools")},
            "expert_rates": list(self.expert_rates),
            "prefill": asdict(self.prefill) if self.prefill else None,
            "decode": asdict(self.decode) if self.decode else None,
            "decode_full": asdict(self.decode_full) if self.decode_full else None,
            "profile": self.profile.to_dict() if self.profile else None,
            "rope": self.rope.to_dict() if self.rope else None,
        }

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """The plan that `to_dict` told. Raises `InvalidRequestError` for what is none."""
        if not isinstance(data, dict):
            raise InvalidRequestError("it is no plan (`sharpi plan --json` prints one)")
        return cls(**{field.name: _read(data, field.name) for field in fields(cls)})

    def require(self) -> None:
        """Raises if the plan cannot be carried out: `InvalidRequestError` for a GPU that is not there,
        `OutOfMemoryError` for a model that does not fit into the VRAM, and for slots in RAM for which there is too
        little. Otherwise RAM is not checked: the weights are mapped, and what does not fit is read again."""
        on_gpu = self.device == "cuda"
        if on_gpu and not isinstance(self.gpu, Gpu):
            raise InvalidRequestError(f"device cuda: {self.gpu}")
        if on_gpu and not self.fits:
            raise OutOfMemoryError(self.shortage())
        in_ram = slots_in_ram(self)
        if in_ram > (free := free_ram_bytes()):
            raise OutOfMemoryError(f"the plan holds {size_words(in_ram)} of experts in RAM, and"
                                   f" {size_words(free)} are free: make a new plan")

    def shortage(self) -> str:
        """For a plan that does not fit: how much is missing, and what would fit, in one line."""
        available = self.available_bytes or 0
        needs, room = "RAM", f"there are {size_words(available)}"
        if self.device == "cuda":
            # A budget beyond what the GPU has free is not what is in the way.
            needs = "VRAM" if self.resident else "VRAM beside the weights that may stay in RAM,"
            room = f"the VRAM budget is {size_words(available)}" if self.vram == available else f"{room} free"
        said = [f"{self.model} needs {size_words(self.total_bytes)} of {needs} and {room}:"
                f" {size_words(self.total_bytes - available)} are missing"]
        if self.fitting_vram:
            said.append(f"a larger budget would do (--vram {vram_words(self.fitting_vram)})")
        if self.fitting_batch:
            said.append(f"a batch of {self.fitting_batch} would fit (-b {self.fitting_batch})")
        if self.offered_context:
            said.append(f"a context of {self.offered_context} tokens would fit (-c {self.offered_context})")
        if self.device == "cuda":
            said.append("--device cpu runs it from RAM")
        return "; ".join(said)

    def _line(self, name: str) -> int:
        return sum(count for line, count in self.lines if line == name)


def vram_words(count: int) -> str:
    """A budget of at least `count` bytes, as `--vram` takes it."""
    return f"{-(-count // 2**20)}MiB"


def slots_in_ram(plan: Plan) -> int:
    """Bytes of RAM for single experts of a model that is larger."""
    return plan.ram_slots if plan.device == "cuda" else plan.expert_slots


def size_words(count: int) -> str:
    """A size for a sentence."""
    return f"{count / 2**30:,.2f} GiB" if count >= 1 << 28 else f"{count / 2**20:,.2f} MiB"


def load_plan(path: str | os.PathLike[str], file: GgufFile, spec: Any) -> Plan:
    """The saved plan at `path`, for running `file`. Raises `InvalidRequestError` in one line if it cannot be
    read, holds nonsense, or was made for another model."""
    try:
        with open(path, "rb") as stream:
            content = stream.read(_LONGEST_FILE + 1)
        if len(content) > _LONGEST_FILE:
            raise InvalidRequestError("it is too large for a plan")
        plan = Plan.from_dict(json.loads(content.decode("utf-8")))
        _check(plan, file, spec)
    except OSError as error:
        raise InvalidRequestError(f"{path}: cannot read the plan: {error.strerror or error}") from error
    except InvalidRequestError as error:
        raise InvalidRequestError(one_line(f"{path}: {error}; make a new plan")) from None
    except (ValueError, RecursionError):  # no text, no JSON, or JSON to break a reader with
        raise InvalidRequestError(f"{path}: it is no plan: `sharpi plan --json` prints one") from None
    return plan


def _check(plan: Plan, file: GgufFile, spec: Any) -> None:
    """Raises for a plan that is not for `file`, or that asks for what no plan asks for."""
    made_for, given = (plan.model, plan.architecture), (file.name, file.architecture)
    if made_for != given:
        raise InvalidRequestError("the plan is for {} ({}), the model is {} ({})".format(*made_for, *given))
    if plan.fingerprint != fingerprint(file):
        raise InvalidRequestError(f"the plan is for another {plan.model}, with other tensors")
    if plan.context > (plan.rope.longest_context(file) if plan.rope else spec.context_length):
        raise InvalidRequestError(f"its context of {plan.context} tokens is more than the model's")
    if plan.batch > plan.most_cached:
        raise InvalidRequestError(f"its batch of {plan.batch} is more than the {plan.most_cached} tokens of its cache")
    if plan.prompt == FAST and plan.device == "cpu":
        raise InvalidRequestError(f"its 'prompt' is {FAST}, and the CPU's prompts are {EXACT}")
    if plan.prompt == FAST and plan.batch < min(prompt_tile(), plan.most_cached):
        raise InvalidRequestError(f"its batch of {plan.batch} is less than the {prompt_tile()} that fast prompts take")
    if plan.mtp and not spec.prediction_layers:
        raise InvalidRequestError("it loads a prediction layer, and the model has none to use")
    if plan.device == "cuda":
        Inventory.of(file, spec, mtp=plan.mtp).check(plan.homes)
    slots = plan.expert_slots or plan.ram_slots
    if plan.device == "cuda" and slots and all(home.home != SLOTS for home in plan.homes):
        raise InvalidRequestError("it has slots for experts, none of which are to be in slots")
    if plan.device == "cpu" and plan.ram_slots:
        raise InvalidRequestError("its 'ram_slots' are for a GPU's plan, and it is for the CPU")


# --- reading ------------------------------------------------------------------------------------------------------


def _read(data: dict[str, Any], name: str) -> Any:
    if name in _LATER and name not in data:
        return _LATER[name]
    if name not in data:
        raise InvalidRequestError(f"it is no whole plan: {name!r} is missing")
    try:
        return _READERS[name](data[name])
    except (TypeError, ValueError, KeyError):
        raise InvalidRequestError(f"its {name!r} makes no sense") from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _one_of(*choices: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if _text(value) not in choices:
            raise ValueError
        return value

    return read


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _count(least: int = 0, most: int = 1 << 60) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError
        return value

    return read


def _maybe(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def _each(read: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    def read_all(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise ValueError
        return tuple(map(read, value))

    return read_all


def _gpu(value: Any) -> Gpu | str | None:
    if not isinstance(value, dict):
        return _maybe(_text)(value)
    read = {field.name: _text if field.type == "str" else _count() for field in fields(Gpu)}
    given: dict[str, Any] = {name: check(value[name]) for name, check in read.items()}
    return Gpu(**given)


def _speed(value: Any) -> Speed:
    return Speed(_number(1e-300, 1e15)(value["tokens_per_second"]), _one_of(*BOUNDS)(value["bound"]))


def _home(value: Any) -> TensorHome:
    home, cpu_rows, *ranks = value
    for rank in ranks[:1]:  # older plans have one, which means nothing now
        _count()(rank)
    if len(ranks) > 1:
        raise ValueError
    return TensorHome(_text(home), _count()(cpu_rows))


def _line(value: Any) -> tuple[str, int]:
    # A line may take nothing, but none gives memory back.
    return _text(value["name"]), _count()(value["bytes"])


def _placed(value: Any) -> Placed:
    # Plans were made before tables, and before experts on the disk, were counted apart.
    counts = {"by_row": 0, "disk": 0, **value}
    places = ("vram", "direct", "cpu", "missed", "by_row", "disk")
    return Placed(_text(value["kind"]), *(_count()(counts[place]) for place in places))


def _pool(value: Any) -> ExpertPool:
    pool = ExpertPool(*(_count()(value[name]) for name in ExpertPool._fields))
    if pool.slots > pool.experts:
        raise ValueError
    return pool


def _rates(value: Any) -> tuple[float, float]:
    cpu, pcie = (_number(0, 1e15)(rate) for rate in value)
    return cpu, pcie


def _rope(value: Any) -> RopeScaling:
    return RopeScaling(**{field.name: value[field.name] for field in fields(RopeScaling)})


def _number(least: float, most: float) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError
        return float(value)

    return read


# What plans have had for some time only, and what the others mean.
_LATER = {"disk_bytes": 0, "disk_bytes_per_second": None, "ram_slots": 0, "ram_pools": (), "ram_hit_rate": None}

_READERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("model", "architecture", "fingerprint", "why"), _text),
    **{name: _count() for name in ("weights_bytes", "kv_bytes", "kv_bytes_if_all_seen", "fitting_context",
                                   "fitting_batch", "fitting_vram", "expert_slots", "ram_slots", "disk_bytes")},
    "disk_bytes_per_second": _maybe(_number(1, 1e15)),
    "device": _one_of("cpu", "cuda"),
    "gpu": _gpu,
    "vram": _maybe(_count(1 << 20)),
    "context": _count(1),
    "model_context": _count(1),
    "kv_dtype": _one_of(*KV_DTYPES),
    "prompt": _one_of(*PROMPT_MODES),
    "batch": _count(1, 65536),
    "threads": _count(1, 1024),
    "sequences": _count(1, 4096),
    "cache_tokens": _count(0, MOST_CACHE_TOKENS),
    "mtp": _truth,
    "draft_cost": _maybe(_number(0, 1e9)),
    "available_bytes": _maybe(_count()),
    "lines": _each(_line),
    "homes": _each(_home),
    "placement": _each(_placed),
    **dict.fromkeys(("expert_pools", "ram_pools"), _each(_pool)),
    "expert_rates": _rates,
    **dict.fromkeys(("hit_rate", "ram_hit_rate"), _maybe(_number(0, 1))),
    "hit_source": _one_of("", UNIFORM_ROUTING, SAVED_STATISTICS),
    "prefill": _maybe(_speed),
    "decode": _maybe(_speed),
    "decode_full": _maybe(_speed),
    "profile": _maybe(HardwareProfile.from_dict),
    "rope": _maybe(_rope),
}
