"""`ExpertStats`: how often each expert of a model was used, and from where, as data that can be saved, shown and
reused.

The core counts (`experts/expert_profiler.h`). A saved file shows people where a cache of experts helps and where it
does not (`sharpi experts`), and says at the next start which experts to bring to the GPU first (`order`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from sharpi.errors import InvalidRequestError, one_line
from sharpi.files.gguf import GgufFile, fingerprint
from sharpi.storage import write_whole

__all__ = ["COUNTS", "STATS_VERSION", "DiskReads", "ExpertStats", "Predictor"]

FORMAT = "sharpi expert statistics"
# What a field means changes with it.
STATS_VERSION = 1
COUNTS = ("uses", "hits", "computed", "fetched", "loads", "evictions")

_LONGEST_FILE = 64 << 20  # many times what the largest models need
# Bounds that keep every sum of counts below 2^63.
_MOST_COUNT = 1 << 42
_MOST_CELLS = 1 << 20
_LAST_LAYER = 1 << 16


class Identity(Protocol):
    """Which model something is for; a `Plan` says it."""

    @property
    def model(self) -> str: ...
    @property
    def architecture(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...


class Predictor(NamedTuple):
    """How good a guess is: it named `named` experts, `used` of them were used, and `wanted` were used in all."""

    name: str
    named: int
    used: int
    wanted: int

    @property
    def accuracy(self) -> float | None:
        """The part of what it named that was used; `None` if it named nothing."""
        return self.used / self.named if self.named else None

    @property
    def coverage(self) -> float | None:
        """The part of what was used that it had named; `None` if nothing was used."""
        return self.used / self.wanted if self.wanted else None


class DiskReads(NamedTuple):
    """Of a model that is larger than RAM: choices of experts that were found in RAM (`hits`) and that had to be read
    (`reads`), counted once a layer and pass; `bytes` from the disk to RAM; the seconds for which products `waited`;
    how many experts the slots in RAM can hold, and do hold."""

    hits: int
    reads: int
    bytes: int
    waited: float
    ram_capacity: int
    ram_resident: int


@dataclass(frozen=True, eq=False)
class ExpertStats:
    """Counts by layer and expert: numpy uint64 [layers, experts], 0 in places that a layer with fewer experts lacks.

    model, architecture, fingerprint: which model they are for, as in a `Plan`. layers: each row's layer in the model.
    present: how many experts it has.

    uses: how often tokens chose an expert, in prompts and in answers. hits, computed, fetched: choices in decode, which
    were found in a slot, computed by the CPU, or fetched by the GPU. loads and evictions: into slots and out of them.
    capacity: how many experts the slots can hold. resident: how many they held at the end. disk: what was read from
    it, `None` if nothing was; it is not saved.
    """

    model: str
    architecture: str
    fingerprint: str
    layers: tuple[int, ...]
    present: tuple[int, ...]
    uses: np.ndarray
    hits: np.ndarray
    computed: np.ndarray
    fetched: np.ndarray
    loads: np.ndarray
    evictions: np.ndarray
    predictors: tuple[Predictor, ...] = ()
    capacity: int = 0
    resident: int = 0
    disk: DiskReads | None = None

    @property
    def experts(self) -> int:
        """The most experts that a layer has."""
        return max(self.present)

    @property
    def choices(self) -> np.ndarray:
        """Choices in decode, hits and misses: [layers, experts]."""
        return self.hits + self.computed + self.fetched

    @property
    def hit_rate(self) -> float | None:
        """The part of the choices in decode that was found in slots; `None` if there were none."""
        return _part(self.hits, self.choices)

    @property
    def hit_rates(self) -> list[float | None]:
        """`hit_rate` of each layer."""
        return [_part(hits, choices) for hits, choices in zip(self.hits, self.choices, strict=True)]

    def top_share(self, row: int, part: float) -> float | None:
        """The share of a layer's uses that its most used experts have: `part` of its experts, at least one. `None`
        if none was used."""
        uses = np.sort(self.uses[row, : self.present[row]])[::-1]
        return _part(uses[: max(1, round(part * len(uses)))], uses)

    def order(self) -> list[tuple[int, int]]:
        """Every (layer, expert), the most used first; among equals, layers take turns."""
        cells = [(-int(self.uses[row, expert]), expert, layer)
                 for row, layer in enumerate(self.layers) for expert in range(self.present[row])]
        return [(layer, expert) for _, expert, layer in sorted(cells)]

    def summary(self) -> dict[str, Any]:
        """Sums over the layers, as `Model.stats` gives them."""
        return {
            "hit_rate": self.hit_rate,
            "slots": self.capacity,
            "resident": self.resident,
            **{name: int(getattr(self, name).sum()) for name in COUNTS},
            "predictors": {predictor.name: predictor._asdict() | {"accuracy": predictor.accuracy}
                           for predictor in self.predictors},
            "disk": self.disk._asdict() if self.disk else None,
        }

    def require_model(self, file: GgufFile) -> None:
        """Raises `InvalidRequestError` if the statistics are of another model than `file`."""
        made_for, given = (self.model, self.architecture), (file.name, file.architecture)
        if made_for != given:
            raise InvalidRequestError("the statistics are of {} ({}), the model is {} ({})".format(*made_for, *given))
        if self.fingerprint != fingerprint(file):
            raise InvalidRequestError(f"the statistics are of another {self.model}, with other tensors")

    # --- from the core, and files ---------------------------------------------------------------------------------

    @classmethod
    def from_engine(cls, engine: Any, model: Identity) -> ExpertStats | None:
        """What the core has counted since `engine` was made for `model`; `None` if it has no experts."""
        counts = engine.expert_stats()
        if counts is None:
            return None
        present = tuple(map(int, counts["present"]))
        tables: dict[str, Any] = {name: np.asarray(counts[name], np.uint64)[:, : max(present)] for name in COUNTS}
        return cls(
            model.model,
            model.architecture,
            model.fingerprint,
            tuple(map(int, counts["layers"])),
            present,
            **tables,
            predictors=tuple(Predictor(name, *map(int, numbers)) for name, *numbers in counts["predictors"]),
            capacity=int(counts["capacity"]),
            resident=int(counts["resident"]),
            disk=DiskReads(**counts["disk"]) if counts["disk"]["bytes"] else None,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file that `load` reads; one that is there is replaced as a whole. Raises `InvalidRequestError`."""
        try:
            write_whole(path, self._text().encode())
        except (OSError, ValueError) as error:
            raise unwritable(path, error) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str], file: GgufFile | None = None) -> ExpertStats:
        """The saved statistics at `path`; with `file`, only those of that model. Raises `InvalidRequestError`, in
        one line, if the file cannot be read, is something else or damaged, or is of another version or model."""
        try:
            with open(path, "rb") as stream:
                content = stream.read(_LONGEST_FILE + 1)
            if len(content) > _LONGEST_FILE:
                raise InvalidRequestError("it is too large for expert statistics")
            stats = _read(json.loads(content.decode("utf-8")))
            if file is not None:
                stats.require_model(file)
        except OSError as error:
            raise InvalidRequestError(
                f"{_shown(path)}: cannot read the expert statistics: {error.strerror or error}") from error
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{_shown(path)}: {one_line(str(error))}") from None
        except (ValueError, RecursionError):  # no text, no JSON, or JSON to break a reader with
            raise InvalidRequestError(f"{_shown(path)}: {_FOREIGN}") from None
        return stats

    def _text(self) -> str:
        """JSON, a layer a line."""
        head = {"format": FORMAT, "version": STATS_VERSION, "model": self.model, "architecture": self.architecture,
                "fingerprint": self.fingerprint, "capacity": self.capacity, "resident": self.resident,
                "predictors": [predictor._asdict() for predictor in self.predictors]}
        rows = [{"layer": layer, **{name: getattr(self, name)[row, : self.present[row]].tolist() for name in COUNTS}}
                for row, layer in enumerate(self.layers)]
        lines = ",\n".join(json.dumps(row) for row in rows)
        return f'{json.dumps(head, indent=1)[:-2]},\n "layers": [\n{lines}\n]}}\n'


def unwritable(path: str | os.PathLike[str], error: Exception) -> InvalidRequestError:
    """The error of a file that statistics cannot be written to."""
    reason = (error.strerror if isinstance(error, OSError) else None) or one_line(str(error))
    return InvalidRequestError(f"{_shown(path)}: the expert statistics cannot be written there: {reason}")


# --- reading ------------------------------------------------------------------------------------------------------

_FOREIGN = "these are no expert statistics (--expert-stats FILE of `sharpi run` writes them)"


def _read(data: Any) -> ExpertStats:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InvalidRequestError(_FOREIGN)
    version = data.get("version")
    if type(version) is not int or version != STATS_VERSION:
        raise InvalidRequestError(f"their version is {str(version)[:20]}, where {STATS_VERSION} is known")
    fields = {name: _field(data, name, read) for name, read in _READERS.items()}
    rows = fields.pop("rows")
    present = tuple(len(row["uses"]) for row in rows)
    counts: dict[str, Any] = {name: np.zeros((len(rows), max(present)), np.uint64) for name in COUNTS}
    for index, row in enumerate(rows):
        for name in COUNTS:
            counts[name][index, : present[index]] = row[name]
    return ExpertStats(**fields, layers=tuple(row["layer"] for row in rows), present=present, **counts)


def _field(data: dict[str, Any], name: str, read: Callable[[Any], Any]) -> Any:
    key = "layers" if name == "rows" else name
    if key not in data:
        raise InvalidRequestError(f"they are not whole: {key!r} is missing")
    try:
        return read(data[key])
    except (TypeError, ValueError, KeyError):
        raise InvalidRequestError(f"they are damaged: {key!r} makes no sense") from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST_COUNT:
        raise ValueError
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError
    return value


def _predictor(value: Any) -> Predictor:
    return Predictor(_text(value["name"]), *(_count(value[name]) for name in ("named", "used", "wanted")))


def _rows(value: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"layer": _count(row["layer"]), **{name: list(map(_count, _list(row[name]))) for name in COUNTS}}
        for row in _list(value)]
    layers, lengths = [row["layer"] for row in rows], [len(row["uses"]) for row in rows]
    sound = (rows and layers == sorted(set(layers)) and layers[-1] <= _LAST_LAYER
             and min(lengths) > 0 and len(rows) * max(lengths) <= _MOST_CELLS
             and all(len(row[name]) == len(row["uses"]) for row in rows for name in COUNTS))
    if not sound:
        raise ValueError
    return rows


_READERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("model", "architecture", "fingerprint"), _text),
    **dict.fromkeys(("capacity", "resident"), _count),
    "predictors": lambda value: tuple(map(_predictor, _list(value))),
    "rows": _rows,
}


def _part(some: np.ndarray, of: np.ndarray) -> float | None:
    whole = int(of.sum())
    return int(some.sum()) / whole if whole else None


def _shown(path: str | os.PathLike[str]) -> str:
    return one_line(os.fspath(path))
