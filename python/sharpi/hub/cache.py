"""Models in the Hub's cache on this machine, which other tools share.

    models--user--repo/refs/main             the commit that the branch pointed to when it was last asked for
    models--user--repo/snapshots/COMMIT/…    the files of a commit as links
    models--user--repo/blobs/ETAG            what the links lead to, and ETAG.incomplete while it is downloaded

Finding a model here is a few looks into one folder, so it does not wait for `huggingface_hub`'s own modules.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from sharpi.errors import HubError
from sharpi.hub.names import HubFile, Name, Variant, choose, matching, variants

try:
    from huggingface_hub import constants  # which reads its variables

    urlsplit(constants.ENDPOINT).port  # noqa: B018 - other modules of it ask for this while they are imported
except ValueError as error:
    raise HubError(f"an HF_ variable of the environment makes no sense: {error}") from error

__all__ = ["COMMIT", "CachedModel", "cached", "find", "folder_of", "is_offline", "listed", "read_ref", "remove"]

COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class CachedModel:
    """A model that is here whole, or (`variant` is None) downloads of a repository that were interrupted."""

    repo: str
    name: str
    variant: Variant | None
    snapshot: Path
    size: int
    used: float      # seconds since 1970
    modified: float

    @property
    def path(self) -> Path:
        """Its file, of a split model the first part."""
        return self.snapshot if self.variant is None else self.snapshot / self.variant.files[0].path


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids to look at the network."""
    return bool(constants.HF_HUB_OFFLINE)


def folder_of(repo: str) -> Path:
    """Where the cache keeps a repository."""
    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def find(name: Name) -> tuple[Path, Variant] | None:
    """The snapshot and the model that `name` means, if it is here whole. Raises `HubError` if it means several."""
    for snapshot in _snapshots(name):
        offered = list(variants(_files(snapshot)))
        if matching(name, offered):
            return snapshot, choose(name, offered, "the cache")
    return None


def _snapshots(name: Name) -> list[Path]:
    """The snapshots to look into, the likeliest first. Without a revision that is the main branch's, then older and
    newer ones: a file that another commit had is better than none."""
    folder = folder_of(name.repo)
    revision = name.revision or "main"
    commit = revision if COMMIT.fullmatch(revision) else read_ref(folder / "refs" / revision)
    first = [folder / "snapshots" / commit] if commit else []
    if name.revision is not None:
        return first
    return first + [snapshot for snapshot in _all_snapshots(folder) if snapshot not in first]


def _all_snapshots(folder: Path) -> list[Path]:
    """A repository's snapshots, the newest first."""
    try:
        found = [entry for entry in (folder / "snapshots").iterdir() if entry.is_dir()]
    except OSError:
        return []
    return sorted(found, key=lambda entry: (-entry.stat().st_mtime, entry.name))


def read_ref(path: Path) -> str | None:
    """The commit that a file below `refs` names, if it does."""
    try:
        commit = path.read_text().strip()
    except (OSError, ValueError):
        return None
    return commit if COMMIT.fullmatch(commit) else None


def _files(snapshot: Path) -> Iterator[HubFile]:
    """The GGUF files of a snapshot; a link whose blob is gone is not one."""
    for folder, _, names in os.walk(snapshot):
        for name in names:
            path = Path(folder, name)
            if name.lower().endswith(".gguf") and path.is_file():
                yield HubFile(path.relative_to(snapshot).as_posix(), path.stat().st_size)


def listed() -> list[CachedModel]:
    """All models in the cache, by name. If several commits have the same model, only the newest is named."""
    root = Path(constants.HF_HUB_CACHE)
    try:
        folders = sorted(entry for entry in root.iterdir() if entry.is_dir() and entry.name.startswith("models--"))
    except OSError:
        return []
    return [model for folder in folders for model in cached(folder.name[len("models--"):].replace("--", "/"))]


def cached(repo: str) -> list[CachedModel]:
    """A repository's models in the cache."""
    folder = folder_of(repo)
    main = read_ref(folder / "refs" / "main")
    snapshots = _all_snapshots(folder)
    snapshots.sort(key=lambda snapshot: snapshot.name != main)
    seen: set[str] = set()
    models = []
    for snapshot in snapshots:
        offered = [variant for variant in variants(_files(snapshot)) if variant.complete]
        for variant in offered:
            name = variant.name(repo, offered)
            if name not in seen:
                seen.add(name)
                stats = [(snapshot / file.path).stat() for file in variant.files]
                models.append(CachedModel(repo, name, variant, snapshot, variant.size,
                                          max(stat.st_atime for stat in stats), max(stat.st_mtime for stat in stats)))
    return sorted(models, key=lambda model: model.name) + _interrupted(repo, folder)


def _interrupted(repo: str, folder: Path) -> list[CachedModel]:
    stats = [path.stat() for path in folder.glob("blobs/*.incomplete")]
    if not stats:
        return []
    return [CachedModel(repo, repo, None, folder, sum(stat.st_size for stat in stats),
                        max(stat.st_atime for stat in stats), max(stat.st_mtime for stat in stats))]


def remove(models: list[CachedModel]) -> int:
    """Removes models of one repository from the cache, of every commit that has them; the bytes that this gave back.
    What other tools keep there stays."""
    from huggingface_hub import scan_cache_dir

    folder = folder_of(models[0].repo)
    partial = list(folder.glob("blobs/*.incomplete")) if any(model.variant is None for model in models) else []
    freed = sum(path.stat().st_size for path in partial)
    for path in partial:
        path.unlink(missing_ok=True)
    paths = {file.path for model in models if model.variant for file in model.variant.files}
    scanned = scan_cache_dir()
    repos = [repo for repo in scanned.repos if repo.repo_path.resolve() == folder.resolve()]
    if paths and not repos:
        raise HubError(f"{models[0].repo}: its folder in the cache is damaged; remove it by hand: {folder}")
    clear = not any(folder.glob("blobs/*.incomplete"))
    for repo in repos:
        files = [(file, file.file_path.relative_to(revision.snapshot_path).as_posix() in paths)
                 for revision in repo.revisions for file in revision.files]
        kept = [file for file, goes in files if not goes]
        strategy = (scanned.delete_files(*(file for file, goes in files if goes)) if kept or not clear
                    else scanned.delete_revisions(*(revision.commit_hash for revision in repo.revisions)))
        strategy.execute()
        freed += strategy.expected_freed_size
    if not any((folder / "snapshots").glob("*/**/*")) and not any(folder.glob("blobs/*")):
        shutil.rmtree(folder, ignore_errors=True)
    return freed
