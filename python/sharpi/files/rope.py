"""`RopeScaling`: how a model's rotary position embedding is stretched, so that its context reaches beyond the file's.

The core reads the model's rotary embedding off the file's metadata. A `RopeScaling` changes that metadata before the
core sees it, so everything that follows (the longest context, plans, either processor) agrees. The options and their
meaning are llama.cpp's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from sharpi.errors import InvalidRequestError
from sharpi.files.gguf import GgufFile
from sharpi.settings import arguments
from sharpi.settings.choices import ROPE_SCALINGS

__all__ = ["RopeScaling"]

_MOST_SCALE = 1024.0
_MOST_BASE = 1e12
_MOST_CONTEXT = 1 << 27  # the core takes no longer one


@dataclass(frozen=True)
class RopeScaling:
    """What to use in place of the file's; `None` leaves it as the file says.

    rope_scaling: "none", "linear" (positions are divided by the scale; Chen et al., 2023) or "yarn" (slow rotations
    only; Peng et al., 2023). rope_scale: the context grows by this factor. rope_freq_base: the base of the frequencies;
    a larger one stretches the slow rotations most ("NTK-aware"). yarn_orig_ctx: the context that the model was trained
    with.
    """

    rope_scaling: str | None = None
    rope_scale: float | None = None
    rope_freq_base: float | None = None
    yarn_orig_ctx: int | None = None

    def __post_init__(self) -> None:
        kind = arguments.maybe(arguments.text, "rope_scaling", self.rope_scaling)
        if kind is not None and kind not in ROPE_SCALINGS:
            raise InvalidRequestError(f"rope_scaling must be none, linear or yarn, not {arguments.shown(kind)}")
        _require_range("rope_scale", self.rope_scale, 1.0, _MOST_SCALE)
        _require_range("rope_freq_base", self.rope_freq_base, 1.001, _MOST_BASE)
        original = arguments.maybe(arguments.whole, "yarn_orig_ctx", self.yarn_orig_ctx)
        _require_range("yarn_orig_ctx", original, 1, _MOST_CONTEXT)
        if kind == "none" and self.rope_scale is not None:
            raise InvalidRequestError("rope_scaling none does not scale: leave it or rope_scale out")

    @classmethod
    def asked(cls, *, rope_scaling: str | None = None, rope_scale: float | None = None,
              rope_freq_base: float | None = None, rope_freq_scale: float | None = None,
              yarn_orig_ctx: int | None = None) -> RopeScaling | None:
        """The scaling for `Model.load`'s arguments; `None` if there are none. rope_freq_scale is 1 / rope_scale."""
        if rope_freq_scale is not None:
            if rope_scale is not None:
                raise InvalidRequestError("rope_freq_scale is 1 / rope_scale: leave one of the two out")
            _require_range("rope_freq_scale", rope_freq_scale, 1 / _MOST_SCALE, 1.0)
            rope_scale = 1 / rope_freq_scale
        scaling = cls(rope_scaling, rope_scale, rope_freq_base, yarn_orig_ctx)
        return None if scaling == cls() else scaling

    def metadata(self, file: GgufFile) -> dict[str, Any]:
        """The metadata to put over that of `file`. Raises `InvalidRequestError` for what cannot be done with it, and
        `ModelFileError` for a file whose own values make no sense."""
        prefix = f"{file.architecture}."
        kind, factor = self._method(file)
        original = self.yarn_orig_ctx or _original_context(file)
        if self.yarn_orig_ctx is not None and kind != "yarn":
            raise InvalidRequestError("yarn_orig_ctx is for yarn alone: ask for rope_scaling yarn too")
        changed: dict[str, Any] = {f"{prefix}rope.scaling.type": kind,
                                   f"{prefix}rope.scaling.original_context_length": original}
        longest = float(original)
        if kind != "none":
            changed[f"{prefix}rope.scaling.factor"] = factor
            longest *= factor
        if self.rope_scaling is None and self.rope_scale is None and self.yarn_orig_ctx is None:
            longest = file.metadata.get_int(f"{prefix}context_length", minimum=1)
        if self.rope_freq_base is not None:
            changed[f"{prefix}rope.freq_base"] = self.rope_freq_base
            longest *= self._stretch(file)
        # Rounded down, but not for want of a last bit: 1 / 0.1 times 4096 is 40960.
        changed[f"{prefix}context_length"] = min(_MOST_CONTEXT, math.floor(longest * (1 + 1e-9)))
        return changed

    def longest_context(self, file: GgufFile) -> int:
        """Tokens that `file` can have in its context with this scaling."""
        length: int = self.metadata(file)[f"{file.architecture}.context_length"]
        return length

    def _method(self, file: GgufFile) -> tuple[str, float]:
        """How, and by which factor: what was asked for, else the file's; llama.cpp's default is linear."""
        prefix = f"{file.architecture}.rope."
        own = file.metadata.get_float(f"{prefix}scaling.factor", file.metadata.get_float(f"{prefix}scale_linear", 1.0))
        if self.rope_scale is None and not 0 < own < math.inf:
            raise file.error(f"'{prefix}scaling.factor' is {own}, not a positive number")  # the core's bounds
        factor = own if self.rope_scale is None else self.rope_scale
        kind = self.rope_scaling or file.metadata.get_str(f"{prefix}scaling.type", "none")
        if self.rope_scaling is None and kind == "none" and factor != 1:
            kind = "linear"
        if self.rope_scaling in ("linear", "yarn") and self.rope_scale is None and own == 1:
            raise InvalidRequestError(f"rope_scaling {self.rope_scaling} needs a rope_scale: {file.name} has none")
        return kind, factor

    def _stretch(self, file: GgufFile) -> float:
        """How much longer the slowest rotation takes by the new base; at least 1."""
        prefix = f"{file.architecture}."
        heads = file.metadata.get_int(f"{prefix}attention.head_count", minimum=1)
        width = file.metadata.get_int(f"{prefix}embedding_length", minimum=1)
        dims = file.metadata.get_int(f"{prefix}rope.dimension_count",
                            file.metadata.get_int(f"{prefix}attention.key_length", width // heads))
        base = file.metadata.get_float(f"{prefix}rope.freq_base", 10000.0)
        if not 1 < base < math.inf:  # the core's bounds too
            raise file.error(f"'{prefix}rope.freq_base' is {base}, not a number above 1")
        grown = (self.rope_freq_base or 1.0) / base
        return max(1.0, grown ** ((dims - 2) / dims)) if dims >= 2 else 1.0

    def to_dict(self) -> dict[str, Any]:
        """The fields, as a saved plan has them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _original_context(file: GgufFile) -> int:
    prefix = f"{file.architecture}."
    trained = file.metadata.get_int(f"{prefix}context_length", minimum=1)
    length: int = file.metadata.get_int(f"{prefix}rope.scaling.original_context_length", trained, minimum=1)
    return length


def _require_range(name: str, value: Any, least: float, most: float) -> None:
    if value is None:
        return
    if not least <= arguments.number(name, value) <= most:
        raise InvalidRequestError(f"{name} must be {least:,g} to {most:,g}, not {arguments.shown(value)}")
