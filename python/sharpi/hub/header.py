"""The headers of models that are not downloaded: enough to plan with, a few MiB of many GiB.

A header is received by growing ranges until it is whole, and kept in Sharpi's own cache as a sparse file that is as
long as the real one, so that it opens as if the model were here. Its tensors are zeros: only the header is read.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

from huggingface_hub import hf_hub_url

from sharpi.errors import HubError, ModelFileError
from sharpi.files.gguf import has_whole_header
from sharpi.hub.download import Listing, explained, receive
from sharpi.hub.names import HubFile, Variant
from sharpi.storage import cache_folder, draft_beside

__all__ = ["fetch_header", "forget"]

# The vocabulary takes 2 to 16 MiB, and is in a split model's first part only.
_FIRST_RANGE = 2 << 20
_FIRST_RANGE_OF_LATER_PARTS = 256 << 10
_LONGEST_HEADER = 256 << 20


def fetch_header(listing: Listing, variant: Variant) -> Path:
    """A sparse file with the header of a model; if the model is split, beside the headers of its other parts. Raises
    `HubError`."""
    folder = _folder(listing.name.repo) / listing.commit
    with explained(listing.name):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            folder = _passing_folder()
        for index, file in enumerate(variant.files):
            _fetch(listing, file, folder / file.path, _FIRST_RANGE_OF_LATER_PARTS if index else _FIRST_RANGE)
    return folder / variant.files[0].path


def forget(repo: str) -> None:
    """Removes the headers that are kept of a repository."""
    shutil.rmtree(_folder(repo), ignore_errors=True)


def _folder(repo: str) -> Path:
    return (cache_folder() or _passing_folder()) / "headers" / repo.replace("/", "--")


def _passing_folder() -> Path:
    """For a user without a cache: a folder that goes when this process ends."""
    folder = tempfile.mkdtemp(prefix="sharpi-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _fetch(listing: Listing, file: HubFile, target: Path, first: int) -> None:
    if target.exists() and target.stat().st_size == file.size:
        return
    url = hf_hub_url(listing.name.repo, file.path, revision=listing.commit)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = draft_beside(target)
    longest = min(file.size, _LONGEST_HEADER)
    try:
        with open(draft, "wb") as out:
            end = min(first, longest)
            while True:
                receive(url, out, end)
                out.flush()
                if out.tell() < end:
                    raise EOFError(f"the connection ended after {out.tell():,} bytes")
                if _is_whole(listing, file, draft) or end == longest:
                    break
                end = min(2 * end, longest)
            out.truncate(file.size)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _is_whole(listing: Listing, file: HubFile, draft: Path) -> bool:
    try:
        return has_whole_header(draft)
    except ModelFileError as error:
        raise HubError(f"{listing.name}: {file.path}{str(error).removeprefix(str(draft))}") from error
