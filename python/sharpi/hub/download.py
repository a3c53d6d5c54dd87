"""Asks the Hub what a repository has, and downloads files of it into the cache.

`huggingface_hub` knows requests, tokens, redirects and the cache's layout. The bytes of a file are received here: its
own download throws away what has come when it is interrupted, and does not compare the hash of what it received.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from filelock import Timeout
from huggingface_hub import HfApi, constants, get_token, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import WeakFileLock, build_hf_headers, get_session, hf_raise_for_status

from sharpi.errors import HubError, SharpiError
from sharpi.hub.cache import COMMIT, folder_of, read_ref
from sharpi.hub.names import HubFile, Name, Variant
from sharpi.storage import write_whole
from sharpi.words import size

__all__ = ["Listing", "Progress", "ask", "download", "explained", "missing_bytes", "receive"]

_log = logging.getLogger(__name__)

# What is done, bytes done, bytes in all.
Progress = Callable[[str, int, int], None]
Notice = Callable[[str], None]

# The base of what its HTTP library raises, which is another one in each major version.
_HttpError: type[Exception] = next(base for base in reversed(HfHubHTTPError.__mro__) if base.__name__ == "HTTPError")
_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_CHUNK = 1 << 20
_RETRY_AFTER = (0.25, 1.0, 4.0)  # seconds; counted anew whenever something came
_LIBRARY = "sharpi"


@dataclass(frozen=True)
class Listing:
    """What a repository has at one commit."""

    name: Name
    commit: str
    files: tuple[HubFile, ...]


def ask(name: Name) -> Listing:
    """Asks the Hub for a repository's files. Raises `HubError`."""
    _log.debug("asking %s for the files of %s", constants.ENDPOINT, name.repo)
    with explained(name):
        try:
            info = HfApi(library_name=_LIBRARY).model_info(name.repo, revision=name.revision, files_metadata=True)
            files = tuple(_listed(file.rfilename, (file.lfs.size if file.lfs else file.size) or 0,
                                  (file.lfs.sha256 if file.lfs else file.blob_id) or "")
                          for file in info.siblings or () if _is_plain(file.rfilename))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, (HfHubHTTPError, HFValidationError)):
                raise
            raise HubError(f"{name}: {constants.ENDPOINT} does not answer like a Hub; check HF_ENDPOINT") from error
    if not isinstance(info.sha, str) or not COMMIT.fullmatch(info.sha):
        raise HubError(f"{name}: {constants.ENDPOINT} does not say which commit it has; check HF_ENDPOINT")
    return Listing(name, info.sha, files)


def _listed(path: str, size: Any, etag: Any) -> HubFile:
    if not isinstance(size, int) or size < 0 or not isinstance(etag, str):
        raise TypeError(f"{path} has a size of {size!r} and a checksum of {etag!r}")
    return HubFile(path, size, etag)


def _is_plain(path: str) -> bool:
    """Whether it names a file below the repository's folder: a Hub must not choose where files go, nor what a terminal
    does."""
    return path.isprintable() and "\\" not in path and not set(path.split("/")) & {"", ".", ".."}


def missing_bytes(name: Name, variant: Variant) -> int:
    """Bytes of a model that are still to be downloaded."""
    return sum(file.size - _have(_blob(name.repo, file)) for file in variant.files)


def download(listing: Listing, variant: Variant, progress: Progress | None, notice: Notice | None) -> Path:
    """Downloads what is missing of a model and gives its (first) file's path in the cache. What has come when this is
    interrupted is where the next attempt starts. Raises `HubError`."""
    name = listing.name
    total, done = variant.size, 0
    with explained(name):
        _require_room(name, missing_bytes(name, variant))
        snapshot = folder_of(name.repo) / "snapshots" / listing.commit
        snapshot.mkdir(parents=True, exist_ok=True)
        for file in variant.files:
            def report(verb: str, count: int, before: int = done) -> None:
                if progress is not None:
                    progress(verb, before + count, total)

            if not (snapshot / file.path).exists():
                _download_file(listing, file, report, notice)
            done += file.size
            report("downloading", 0, done)
        # Last, so that a branch's name never leads to a commit of which only a part has come.
        ref = folder_of(name.repo) / "refs" / (name.revision or constants.DEFAULT_REVISION)
        if name.revision != listing.commit and read_ref(ref) != listing.commit:
            ref.parent.mkdir(parents=True, exist_ok=True)
            write_whole(ref, listing.commit.encode())
    return snapshot / variant.files[0].path


def _blob(repo: str, file: HubFile) -> Path:
    return folder_of(repo) / "blobs" / file.etag


def _partial(blob: Path) -> Path:
    return blob.with_name(blob.name + ".incomplete")


def _have(blob: Path) -> int:
    """Bytes of a file that are here, whole or in part."""
    for path in (blob, _partial(blob)):
        if path.is_file():
            return path.stat().st_size
    return 0


def _require_room(name: Name, count: int) -> None:
    root = Path(constants.HF_HUB_CACHE)
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if count > free:
        raise HubError(f"{name}: needs {size(count)}, but {root} has only {size(free)} free; HF_HOME moves the"
                       " cache")


def _download_file(listing: Listing, file: HubFile, report: Callable[[str, int], None], notice: Notice | None) -> None:
    blob = _blob(listing.name.repo, file)
    if not _ETAG.fullmatch(file.etag):
        raise HubError(f"{listing.name}: {constants.ENDPOINT} gives no checksum for {file.path}")
    blob.parent.mkdir(parents=True, exist_ok=True)
    with _alone(blob, notice):
        if not blob.exists():
            _receive_whole(listing, file, _partial(blob), report)
            _verify(listing.name, file, _partial(blob), report)
            os.replace(_partial(blob), blob)
    # Finds the blob, so it makes the link and downloads nothing.
    linked = hf_hub_download(listing.name.repo, file.path, revision=listing.commit, library_name=_LIBRARY)
    if os.path.getsize(linked) != file.size:
        raise HubError(f"{listing.name}: {linked} is not as large as {constants.ENDPOINT} says: remove it and try"
                       " again")


@contextmanager
def _alone(blob: Path, notice: Notice | None) -> Iterator[None]:
    """Keeps other processes from downloading the same file, by the lock that `huggingface_hub` has for it."""
    lock = blob.parents[2] / ".locks" / blob.parents[1].name / f"{blob.name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with WeakFileLock(lock, timeout=0.1):
            yield
            return
    except Timeout:
        if notice is not None:
            notice("waiting for another program that downloads this file")
    with WeakFileLock(lock):
        yield


def _receive_whole(listing: Listing, file: HubFile, partial: Path, report: Callable[[str, int], None]) -> None:
    """Receives what `partial` lacks of a file, again and again while something comes."""
    url = hf_hub_url(listing.name.repo, file.path, revision=listing.commit)
    attempt = 0
    with open(partial, "ab") as out:
        if out.tell() > file.size:
            out.truncate(0)
            out.seek(0)
        while True:
            before = out.tell()
            try:
                if before < file.size:
                    receive(url, out, file.size, lambda count: report("downloading", count))
                if out.tell() == file.size:
                    return
                raise EOFError(f"the connection ended after {out.tell():,} of {file.size:,} bytes")
            except (_HttpError, OSError, EOFError) as error:
                attempt = 1 if out.tell() > before else attempt + 1
                if attempt > len(_RETRY_AFTER) or not _is_passing(error):
                    raise
                time.sleep(_RETRY_AFTER[attempt - 1])


def _is_passing(error: Exception) -> bool:
    """Whether a request is worth another attempt: not if it was refused, nor if the disk is at fault."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    return isinstance(error, (_HttpError, EOFError))


def receive(url: str, out: BinaryIO, end: int, report: Callable[[int], None] | None = None) -> None:
    """Appends to `out`, which holds the beginning of the file at `url`, until it holds `end` bytes, or fewer if the
    connection ends. A server that cannot begin in the middle makes it start over."""
    start = out.tell()
    _log.debug("GET %s, bytes %d to %d", url, start, end - 1)
    headers = build_hf_headers(library_name=_LIBRARY)
    headers |= {"Accept-Encoding": "identity", "Range": f"bytes={start}-{end - 1}"}
    with get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
        if response.status_code >= 400:
            response.read()
        hf_raise_for_status(response)
        if response.status_code != 206 and start:
            out.seek(0)
            out.truncate()
        for chunk in response.iter_bytes(_CHUNK):
            out.write(chunk[: end - out.tell()])
            if report is not None:
                report(out.tell())
            if out.tell() >= end:
                break


def _verify(name: Name, file: HubFile, path: Path, report: Callable[[str, int], None]) -> None:
    """Compares a file's hash with the Hub's: SHA-256, or for what is not in large file storage, git's."""
    git = len(file.etag) == 40
    digest = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False) if git else hashlib.sha256()
    done = 0
    with open(path, "rb") as stream:
        while chunk := stream.read(16 * _CHUNK):
            digest.update(chunk)
            done += len(chunk)
            report("checking", done)
    if digest.hexdigest() != file.etag:
        path.unlink()
        raise HubError(f"{name}: {file.path} is damaged: its checksum differs from the one at {constants.ENDPOINT};"
                       " it was removed, try again")


@contextmanager
def explained(name: Name) -> Iterator[None]:
    """Turns what goes wrong inside into a `HubError` that says in one line what to do."""
    try:
        yield
    except SharpiError:
        raise
    except (HfHubHTTPError, EntryNotFoundError, OfflineModeIsEnabled, HFValidationError) as error:
        raise HubError(f"{name}: {_refusal(name, error)}") from error
    except (_HttpError, EOFError) as error:
        raise HubError(f"{name}: cannot be read from {constants.ENDPOINT}: {_reason(error)}") from error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        where = constants.HF_HUB_CACHE
        what = (f"the disk of {where} is full; the partial download stays for the next attempt; HF_HOME moves"
                " the cache" if full else f"cannot be written to {where}: {_reason(error)}; HF_HOME moves the cache")
        raise HubError(f"{name}: {what}") from error


def _refusal(name: Name, error: Exception) -> str:
    endpoint = constants.ENDPOINT
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, OfflineModeIsEnabled):
        return "is not in the cache, and HF_HUB_OFFLINE forbids a download"
    if isinstance(error, GatedRepoError):
        known = "with the account of your token" if get_token() else "and set HF_TOKEN to a token of yours"
        return f"access is gated: accept its terms at {endpoint}/{name.repo} {known}"
    if isinstance(error, RevisionNotFoundError):
        return f"{endpoint}/{name.repo} has no revision {name.revision or constants.DEFAULT_REVISION}"
    if isinstance(error, RepositoryNotFoundError) or (status == 401 and not get_token()):
        private = "or HF_TOKEN may not read it" if get_token() else "if it is private, set HF_TOKEN"
        return f"no such file, and no such model at {endpoint} ({private})"
    if isinstance(error, EntryNotFoundError):
        return f"the file is no longer at {endpoint}/{name.repo}"
    if status == 401:
        return f"{endpoint} does not accept the token: HF_TOKEN sets it, {endpoint}/settings/tokens shows it"
    if status == 403:
        return f"{endpoint} forbids it; the token (HF_TOKEN) may lack the permission"
    if status is not None:
        return f"{endpoint} answers with error {status}: try again later"
    return _reason(error)


def _reason(error: Exception) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(text.split())
