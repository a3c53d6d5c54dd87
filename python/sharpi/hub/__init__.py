"""Models by name: `user/repo[:QUANT]` on the Hugging Face Hub, kept in its cache on this machine.

What the cache has is used without a look at the network; `pull` alone asks whether there is something newer. Strings
that are paths pass through untouched, and what needs the network is imported only for a name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sharpi.errors import HubError
from sharpi.hub.names import DEFAULT_QUANT, Name, Variant, choose, variants
from sharpi.words import size

__all__ = ["Found", "locate", "look", "pull"]

Model = str | os.PathLike[str]
Progress = Callable[[str, int, int], None]
Notice = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """A model that can be described. `path` has its header; `missing` bytes are still to be downloaded before it can
    run. `name` is what to type for it, and empty for a local file."""

    path: Path | str
    name: str = ""
    missing: int = 0
    files: tuple[str, ...] = ()

    def told(self, text: str) -> str:
        """A message with the files' names on the Hub in place of where their headers are kept."""
        if not self.files:
            return text
        shared = os.path.commonprefix([str(self.path)[::-1], self.files[0][::-1]])
        kept, source = str(self.path)[: -len(shared)], self.files[0][: -len(shared)]
        return text.replace(kept, source)


def locate(model: Model, *, progress: Progress | None = None, notice: Notice | None = None) -> Model:
    """The file to load: a path as it is; for a name its file in the cache, downloaded now if it is not there yet.

    progress: called with what is done ("downloading" or "checking"), bytes done and bytes in all. notice: called with
    lines for people. Raises `HubError`.
    """
    name = _name(model)
    if name is None:
        return model
    here = _cached(name, notice)
    return _pull(name, progress, notice)[0] if here is None else here.path


def look(model: Model, *, notice: Notice | None = None) -> Found:
    """What is needed to describe a model: its file if it is here, or else its header. Raises `HubError`."""
    name = _name(model)
    if name is None:
        return Found(os.fspath(model))
    here = _cached(name, notice)
    if here is not None:
        return here
    from sharpi.hub.download import ask, missing_bytes
    from sharpi.hub.header import fetch_header

    listing = ask(name)
    offered = variants(listing.files)
    variant = _chosen(name, offered, notice)
    return Found(fetch_header(listing, variant), variant.name(name.source, offered), missing_bytes(name, variant),
                 tuple(f"{name.source}/{file.path}" for file in variant.files))


def pull(model: str, *, progress: Progress | None = None, notice: Notice | None = None) -> tuple[Path, str]:
    """Downloads a model, or what is newer of it; its path in the cache, and what to type for it. Raises `HubError`."""
    name = _name(model)
    if name is None:
        raise HubError(f"{model}: is {'a local file' if os.path.exists(model) else 'not the name of a model'};"
                       " names are user/repo or user/repo:QUANT")
    from sharpi.hub.cache import is_offline

    here = _cached(name, notice) if is_offline() else None
    if here is None:
        return _pull(name, progress, notice)
    if notice is not None:
        notice(f"{here.name}: is in the cache; HF_HUB_OFFLINE is set, so no newer version is looked for")
    return Path(here.path), here.name


def _name(model: Model) -> Name | None:
    # A `Path` says that it is a path.
    return Name.parse(model) if isinstance(model, str) else None


def _cached(name: Name, notice: Notice | None) -> Found | None:
    from sharpi.hub.cache import find

    found = find(name)
    if found is None:
        return None
    snapshot, variant = found
    if name.quant is None and name.file is None and variant.label != DEFAULT_QUANT and notice is not None:
        notice(f"{name}: using {variant.label or variant.stem}, which is in the cache")
    return Found(snapshot / variant.files[0].path, variant.name(name.source))


def _pull(name: Name, progress: Progress | None, notice: Notice | None) -> tuple[Path, str]:
    from sharpi.hub.download import ask, download, missing_bytes

    listing = ask(name)
    offered = variants(listing.files)
    variant = _chosen(name, offered, notice)
    called = variant.name(name.source, offered)
    missing = missing_bytes(name, variant)
    if notice is not None:
        parts = f" in {len(variant.files)} parts" if len(variant.files) > 1 else ""
        notice(f"{called}: downloading {size(missing)}{parts}" if missing else f"{called}: nothing new to download")
    return download(listing, variant, progress, notice), called


def _chosen(name: Name, offered: list[Variant], notice: Notice | None) -> Variant:
    """The model that `name` means on the Hub; a line says which, if the name does not."""
    variant = choose(name, offered, "the Hub")
    if name.quant is None and name.file is None and variant.label != DEFAULT_QUANT and notice is not None:
        notice(f"{name}: no {DEFAULT_QUANT} there; using {variant.label or variant.stem}")
    return variant
