"""Sharpi runs GGUF language models that are larger than the GPU's memory, fast, on the machine you own.

    from sharpi import Model

    with Model.load() as model:
        for token in model.generate("Once upon a time", max_tokens=64):
            print(token.text, end="", flush=True)
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sharpi.errors import (
    BusyError,
    DeviceLostError,
    HubError,
    InternalError,
    InvalidRequestError,
    ModelFileError,
    OutOfMemoryError,
    SharpiError,
)

if TYPE_CHECKING:
    from sharpi.model import Answer, Generation, Model, Part, Reply, Scheduler, Session, Token

__version__ = "0.1.0"
__all__ = ["Answer", "BusyError", "DeviceLostError", "Generation", "HubError", "InternalError", "InvalidRequestError",
           "Model", "ModelFileError", "OutOfMemoryError", "Part", "Reply", "Scheduler", "Session", "SharpiError",
           "Token", "__version__"]

# What a program does not ask to hear goes nowhere: see `logging` in the standard library.
logging.getLogger("sharpi").addHandler(logging.NullHandler())

_FROM_MODEL = ("Answer", "Generation", "Model", "Part", "Reply", "Scheduler", "Session", "Token")


def __getattr__(name: str) -> Any:
    """Loads the core when it is first asked for, so that `sharpi --help` and reading a file need not wait for it."""
    if name in _FROM_MODEL:
        from sharpi import model

        return getattr(model, name)
    raise AttributeError(f"module 'sharpi' has no attribute {name!r}")
