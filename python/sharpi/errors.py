"""The exceptions that Sharpi raises: a base class, and one class for each way in which a caller can react."""

from __future__ import annotations

import os

__all__ = [
    "BusyError",
    "DeviceLostError",
    "HubError",
    "InternalError",
    "InvalidRequestError",
    "ModelFileError",
    "OutOfMemoryError",
    "SharpiError",
    "one_line",
]


def one_line(text: str) -> str:
    """`text` for a message: on one line, whatever characters a damaged file brings along."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class SharpiError(Exception):
    """Base of every error that Sharpi raises on purpose."""


class ModelFileError(SharpiError):
    """A model file is missing, damaged, or holds something Sharpi cannot run.

    The message is one line: the file, what is wrong with it and where, and what to do if that helps.
    """

    @classmethod
    def about(cls, path: str | os.PathLike[str], what: str) -> ModelFileError:
        """The error "PATH: WHAT", on one line whatever characters a damaged file or an odd path contains."""
        shown = os.fspath(path)
        if not shown.isprintable():
            shown = repr(shown)
        return cls(f"{shown}: {one_line(what)}")


class HubError(ModelFileError):
    """A model cannot be had by its name: it does not exist, may not be read, is out of reach, or arrived damaged."""


class InvalidRequestError(SharpiError, ValueError):
    """The caller asked for something that cannot be done: an empty prompt, one longer than the context, …"""


class OutOfMemoryError(SharpiError, MemoryError):
    """There is not enough device or host memory for the request.

    If a model did not fit, `wanted` are the bytes of the device's memory that its plan takes, and `available` those
    that can be had now; both are `None` for other requests.
    """

    available: int | None = None
    wanted: int | None = None


class BusyError(SharpiError):
    """Too many requests are waiting already: try again later."""


class DeviceLostError(SharpiError):
    """The device has failed and does nothing more in this process: start it again."""


class InternalError(SharpiError):
    """Sharpi broke one of its own invariants: always a bug, please report it."""
