"""Where Sharpi keeps a user's files, and how it writes a file whole or not at all: an old file stays until the new one
is complete."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

__all__ = ["cache_folder", "draft_beside", "require_writable", "write_whole"]


def cache_folder() -> Path | None:
    """Where Sharpi keeps what it could make again for this user; None for a user without a home."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):  # the specification of that variable: relative paths are to be ignored
        try:
            folder = os.path.join(Path.home(), ".cache")
        except RuntimeError:
            return None
    return Path(folder) / "sharpi"


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes `data` to `path`, in place of what is there. Raises `OSError`."""
    if _is_special(path):
        Path(path).write_bytes(data)
        return
    target, draft = _target_and_draft(path)
    try:
        draft.write_bytes(data)
        os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def require_writable(path: str | os.PathLike[str]) -> None:
    """Raises the `OSError` that `write_whole` would raise, except for a disk that is full by then. No file changes,
    and nothing is left behind."""
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if _is_special(path):
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return
    target, draft = _target_and_draft(path)
    if target.exists():
        with target.open("ab"):
            pass
    try:
        draft.touch()
    finally:
        draft.unlink(missing_ok=True)


def _is_special(path: str | os.PathLike[str]) -> bool:
    """Whether the path is a pipe or a terminal, for example, which a file must not replace."""
    return os.path.exists(path) and not os.path.isfile(path)


def _target_and_draft(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """The file that a link leads to, so that the link stays, and its draft."""
    target = Path(os.path.realpath(path))
    return target, draft_beside(target)


def draft_beside(target: Path) -> Path:
    """A file beside `target` that no other process or thread writes to, to be put in its place once it is whole."""
    return target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
