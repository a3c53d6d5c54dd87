"""What Ollama's clients are told of the models."""

from __future__ import annotations

import functools
import hashlib
import math
import os
from pathlib import Path
from typing import Any

from sharpi.errors import SharpiError
from sharpi.files.gguf import GgufFile
from sharpi.serve.apis.ollama_events import time_text
from sharpi.serve.server import Card
from sharpi.text.answers.markers import Markers

__all__ = ["listed", "running", "shown"]

_NEVER = "9999-12-31T23:59:59Z"  # when a model is put away that no client can ask to be
_UNITS = (("B", 1e9), ("M", 1e6), ("K", 1e3))


def listed(card: Card) -> dict[str, Any]:
    """An entry of /api/tags."""
    file = _header(card)
    try:
        changed = os.stat(card.path).st_mtime
    except OSError:
        changed = 0.0
    # A name for this state of the file. To compute its real digest would mean to read all of it.
    state = f"{card.name}:{changed}:{file.total_bytes if file else 0}"
    return {"name": card.name, "model": card.name, "modified_at": time_text(changed),
            "size": file.total_bytes if file else 0, "digest": hashlib.sha256(state.encode()).hexdigest(),
            "details": _details(file)}


def running(card: Card, context: int, on_gpu: bool) -> dict[str, Any]:
    """An entry of /api/ps."""
    entry = listed(card)
    del entry["modified_at"]
    return {**entry, "expires_at": _NEVER, "size_vram": entry["size"] if on_gpu else 0, "context_length": context}


def shown(card: Card) -> dict[str, Any] | None:
    """The answer of /api/show, from the file's header; nothing if the file cannot be read."""
    file = _header(card)
    if file is None:
        return None
    template = file.metadata.get_str("tokenizer.chat_template", None) or ""
    information = {key: value for key, value in file.metadata.scalars().items()
                   if isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))}
    entry = listed(card)
    return {"modelfile": f"FROM {card.path.name}\n", "parameters": "", "template": template,
            "details": entry["details"], "model_info": {**information, "general.parameter_count": _parameters(file)},
            "capabilities": _capabilities(template), "modified_at": entry["modified_at"]}


def _header(card: Card) -> GgufFile | None:
    try:
        return _read(card.path, os.stat(card.path).st_mtime_ns)
    except (OSError, SharpiError):
        return None


@functools.lru_cache(maxsize=64)
def _read(path: Path, changed: int) -> GgufFile:
    return GgufFile.open(path)


def _details(file: GgufFile | None) -> dict[str, Any]:
    family = file.architecture if file else ""
    return {"parent_model": "", "format": "gguf", "family": family, "families": [family] if family else [],
            "parameter_size": _size(_parameters(file)) if file else "",
            "quantization_level": _quantization(file) if file else ""}


def _parameters(file: GgufFile) -> int:
    count = 0
    for tensor in file.tensors:
        values = 1
        for extent in tensor.shape:
            values *= extent
        count += values
    return count


def _size(parameters: int) -> str:
    unit, scale = next(((unit, scale) for unit, scale in _UNITS if parameters >= scale), ("", 1.0))
    return f"{parameters / scale:.1f}{unit}" if unit else str(parameters)


def _quantization(file: GgufFile) -> str:
    """The type that most bytes of the weights have."""
    by_type: dict[str, int] = {}
    for tensor in file.tensors:
        by_type[tensor.type_name] = by_type.get(tensor.type_name, 0) + tensor.nbytes
    return max(by_type, key=lambda name: by_type[name], default="")


def _capabilities(template: str) -> list[str]:
    """What the chat template provides for."""
    thinks = "enable_thinking" in template or Markers.of(template).openings[0].rstrip() in template
    return ["completion", *(["tools"] if "tools" in template else []), *(["thinking"] if thinks else [])]
