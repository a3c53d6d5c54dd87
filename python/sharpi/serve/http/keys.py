"""The keys that requests must have."""

from __future__ import annotations

import hashlib
import hmac
import logging
from pathlib import Path

from sharpi.errors import InvalidRequestError
from sharpi.serve.settings import ServerSettings, key_problem

__all__ = ["Keys"]

_LONGEST_FILE = 1 << 20

_log = logging.getLogger(__name__)


class Keys:
    """The keys of the settings and those of the key file, which can be read again. Only hashes are kept: all have one
    length, so that comparing them takes one time."""

    def __init__(self, settings: ServerSettings) -> None:
        """Raises `InvalidRequestError` for a key file that cannot be used."""
        self._given = settings.api_keys
        self._file = None if settings.api_key_file is None else Path(settings.api_key_file).expanduser()
        self._hashes = self._read()

    @property
    def needed(self) -> bool:
        """Whether requests must have a key."""
        return bool(self._hashes)

    def owner(self, key: bytes) -> str | None:
        """A name for the client that has this key, which does not tell the key; `None` for a wrong one. Takes one time
        for every key, wrong or right."""
        digest = _hash(key)
        found = False
        for known in self._hashes:
            found |= hmac.compare_digest(known, digest)
        return digest.hex()[:16] if found else None

    def reload(self) -> None:
        """Reads the key file again. One that cannot be used leaves the keys as they were: the server must not become
        open, or closed to all, by a slip."""
        try:
            self._hashes = self._read()
        except InvalidRequestError as error:
            _log.error("the keys stay as they were: %s", error)
        else:
            _log.info("%d keys are known", len(self._hashes))

    def _read(self) -> tuple[bytes, ...]:
        keys = [*self._given, *([] if self._file is None else _keys_in(self._file))]
        return tuple(_hash(key.encode()) for key in dict.fromkeys(keys))


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _keys_in(path: Path) -> list[str]:
    """One key on each line; empty lines and lines that begin with # do not count."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file.read(_LONGEST_FILE).splitlines()]
    except OSError as error:
        raise InvalidRequestError(f"{path}: the keys cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidRequestError(f"{path}: the keys cannot be read: it is no text") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    for number, key in enumerate(keys, 1):
        if problem := key_problem(key):
            raise InvalidRequestError(f"{path}: key {number} {problem}")
    if not keys:
        raise InvalidRequestError(f"{path}: holds no key; write one on each line")
    return keys
