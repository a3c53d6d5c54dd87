"""`ModelStore`: the models of a server, loaded when they are first asked for, and put away when others need the memory.

All of its state belongs to one event loop; only loading and closing happen in threads. One model is loaded at a time.
A model is put away in two steps: first it takes no further requests, and once those it has are finished, its memory is
given back. Requests that come in between wait, and have it loaded again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from sharpi.errors import InvalidRequestError, ModelFileError, OutOfMemoryError, SharpiError
from sharpi.serve.errors import ApiError
from sharpi.serve.models.catalog import ModelFile
from sharpi.serve.models.loading import Loaded
from sharpi.serve.server import Card

__all__ = ["Loader", "ModelStore", "ending_error"]

_log = logging.getLogger(__name__)


class Loader(Protocol):
    """What a store needs of a `ModelLoader`. Both methods are called in threads."""

    def needs(self, file: ModelFile) -> int: ...

    def open(self, file: ModelFile) -> Loaded: ...


def ending_error() -> ApiError:
    """The server takes no further requests."""
    return ApiError(503, "server_error", "the server is ending", code="server_ending", headers={"Retry-After": "5"})


class _Entry:
    """A model of the server. users: leases, also those that still wait for it to be loaded."""

    def __init__(self, file: ModelFile) -> None:
        self.file = file
        self.loaded: Loaded | None = None
        self.loading: asyncio.Task[None] | None = None
        self.failure: str | None = None
        self.users = 0
        self.last_used = 0.0
        self.leaving = False
        self.idle = asyncio.Event()
        self.gone = asyncio.Event()


class ModelStore:
    """A `Store` (see server.py)."""

    def __init__(self, files: Sequence[ModelFile], loader: Loader, memory: int | None = None) -> None:
        """memory: bytes that the loaded models may take together; `None`: one model is loaded at a time. A model that
        takes more by itself is loaded alone."""
        self._entries = {file.name: _Entry(file) for file in files}
        self._loader = loader
        self._memory = memory
        self._turn = asyncio.Lock()  # held while a model is loaded or put away
        self._ending = False
        self.failures_are_told = False  # to people by whoever loads the first model, so the log need not

    def names(self) -> list[str]:
        return list(self._entries)

    def card(self, name: str) -> Card:
        entry = self._find(name)
        return Card(entry.file.name, entry.file.path, entry.loaded is not None and not entry.leaving)

    def loaded(self) -> list[Loaded]:
        """The models that are loaded now, without a lease: look, but do not wait while holding one."""
        return [entry.loaded for entry in self._entries.values() if entry.loaded is not None]

    @property
    def loading(self) -> list[str]:
        """The names of models that are being loaded, or wait for that."""
        return [name for name, entry in self._entries.items() if entry.loading is not None]

    @property
    def failures(self) -> dict[str, str]:
        """Why models could not be loaded when that was last tried."""
        return {name: entry.failure for name, entry in self._entries.items() if entry.failure is not None}

    @asynccontextmanager
    async def lease(self, name: str | None) -> AsyncIterator[Loaded]:
        entry = self._find(name)
        while entry.leaving:
            await entry.gone.wait()
        entry.users += 1
        entry.idle.clear()
        try:
            yield await self._ready(entry)
        finally:
            entry.users -= 1
            entry.last_used = time.monotonic()
            if entry.users == 0:
                entry.idle.set()

    def end(self) -> None:
        """Refuses all further leases; those that are held stay."""
        self._ending = True

    async def close(self) -> None:
        """Puts all models away, whether they are used or not."""
        self.end()
        loads = [entry.loading for entry in self._entries.values() if entry.loading is not None]
        await asyncio.gather(*loads, return_exceptions=True)
        async with self._turn:
            for entry in self._entries.values():
                if entry.loaded is not None:
                    await self._close(entry)

    def _find(self, name: str | None) -> _Entry:
        if name is None:
            return next(iter(self._entries.values()))
        found = self._entries.get(name)
        if found is None:
            like = [entry for known, entry in self._entries.items() if known.lower() == name.lower()]
            if not like:
                raise ApiError(404, "not_found_error", f"the model {name[:200]!r} does not exist", param="model",
                               code="model_not_found")
            found = like[0]
        return found

    async def _ready(self, entry: _Entry) -> Loaded:
        """The model, loaded now if it must be. A request that gives up waiting does not stop the load."""
        if self._ending:
            raise ending_error()
        if entry.loaded is None:
            if entry.loading is None:
                entry.loading = asyncio.create_task(self._load(entry))
                entry.loading.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.shield(entry.loading)
        if entry.loaded is None:  # closed since then, which only the end does to a model with users
            raise ending_error()
        return entry.loaded

    async def _load(self, entry: _Entry) -> None:
        name = entry.file.name
        try:
            async with self._turn:
                if self._ending:
                    raise ending_error()
                await self._make_room(await asyncio.to_thread(self._needs, entry.file))
                _log.info("loading %s", name)
                entry.loaded = await asyncio.to_thread(self._loader.open, entry.file)
                entry.failure = None
        except SharpiError as error:
            _log.error("%s cannot be loaded: %s", name, error, extra={"told": self.failures_are_told})
            refusal = _load_error(entry.file, error)
            entry.failure = refusal.message
            raise refusal from None
        except ApiError:
            raise
        except Exception as error:  # a bug: its text may hold anything
            entry.failure = f"the model {name!r} cannot be loaded: {type(error).__name__}"
            _log.exception("%s cannot be loaded", name)
            raise ApiError(500, "server_error", entry.failure, code="model_load_error") from None
        finally:
            entry.loading = None

    def _needs(self, file: ModelFile) -> int:
        """The bytes that a model takes; 0 if that does not matter."""
        if not file.path.is_file():
            raise ModelFileError(f"{file.path}: the file is gone")
        return 0 if self._memory is None else self._loader.needs(file)

    async def _make_room(self, needed: int) -> None:
        """Puts models away until `needed` bytes are free, those first that have no requests, of these those used
        longest ago."""
        while here := [entry for entry in self._entries.values() if entry.loaded is not None]:
            taken = sum(entry.loaded.bytes for entry in here if entry.loaded is not None)
            if self._memory is not None and taken + needed <= self._memory:
                return
            await self._put_away(min(here, key=lambda entry: (entry.users > 0, entry.last_used)))

    async def _put_away(self, entry: _Entry) -> None:
        entry.leaving = True
        entry.gone.clear()
        try:
            while entry.users:
                await entry.idle.wait()
            _log.info("putting %s away", entry.file.name)
            await self._close(entry)
        finally:
            entry.leaving = False
            entry.gone.set()

    async def _close(self, entry: _Entry) -> None:
        loaded, entry.loaded = entry.loaded, None
        assert loaded is not None
        try:
            await asyncio.to_thread(loaded.close)
        except SharpiError as error:  # statistics that cannot be written
            _log.error("%s: %s", entry.file.name, error)


def _load_error(file: ModelFile, error: SharpiError) -> ApiError:
    """What a client is told. It does not learn where files are."""
    message = str(error).replace(str(file.path), file.name)
    if isinstance(error, OutOfMemoryError):
        return ApiError(503, "server_error", f"the model {file.name!r} does not fit into memory now: {message}",
                        code="out_of_memory", headers={"Retry-After": "30"})
    code = "model_file_error" if isinstance(error, (ModelFileError, InvalidRequestError)) else "model_load_error"
    return ApiError(500, "server_error", f"the model {file.name!r} cannot be loaded: {message}", code=code)
