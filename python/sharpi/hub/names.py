"""Names of models on the Hugging Face Hub, and which files of a repository a name means.

    user/repo[@revision][:QUANT]            user/repo[@revision]/folder/file.gguf

Nothing here looks at the network or the disk, except that a local file wins over a name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sharpi.errors import HubError

__all__ = ["DEFAULT_QUANT", "HubFile", "Name", "Variant", "choose", "matching", "variants"]

DEFAULT_QUANT = "Q4_K_M"

# Without a QUANT, in this order: near to Q4_K_M in size first, then what is better, then what is worse.
_PREFERRED = (DEFAULT_QUANT, "Q4_K_L", "Q4_K_XL", "Q4_K_S", "MXFP4", "MXFP4_MOE", "IQ4_NL", "IQ4_XS", "Q4_0", "Q4_1",
              "Q5_K_M", "Q5_K_L", "Q5_K_XL", "Q5_K_S", "Q5_0", "Q5_1", "Q6_K", "Q6_K_L", "Q6_K_XL", "Q8_0", "Q8_K_XL",
              "Q3_K_L", "Q3_K_XL", "Q3_K_M", "IQ3_M", "IQ3_S", "Q3_K_S", "IQ3_XS", "IQ3_XXS", "Q2_K", "Q2_K_L",
              "Q2_K_XL", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "BF16", "F16", "FP16", "F32", "FP32")
_RANK = {label: rank for rank, label in enumerate(_PREFERRED)}

# The Hub's own rules for the two halves of a repository's name.
_HALF = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?P<repo>{_HALF}/{_HALF})(?:@(?P<revision>refs/pr/\d+|[^/:@\s]+))?"
                   r"(?:/(?P<file>[^:@\0]+\.gguf)|:(?P<quant>[A-Za-z0-9_.-]+))?", re.IGNORECASE)
_LONGEST_REPO = 96

_LABEL = r"(?:UD-)?(?:I?Q[1-8](?:_[0-9A-Z]+)*|TQ[12]_0|MXFP4(?:_MOE)?|NVFP4|BF16|FP?16|FP?32)"
_LABEL_IN_STEM = re.compile(rf"(?:^|[-._])({_LABEL})(?=$|[-.])", re.IGNORECASE)
_LABEL_ALONE = re.compile(_LABEL, re.IGNORECASE)
_PART = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})", re.DOTALL)
# What stands beside models in their repositories: projectors for images, and statistics for quantizing.
_NOT_A_MODEL = re.compile(r"(?:^|[^a-z])(?:mmproj|imatrix)(?:[^a-z]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Name:
    """A model's name, as typed. `revision`: a branch, tag or commit; `None` is the main branch."""

    repo: str
    revision: str | None = None
    quant: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """The name that `text` is, or `None` if it is a path. What is there locally is always a path, and so is what
        looks like one."""
        match = _NAME.fullmatch(text)
        if match is None or os.path.lexists(text):
            return None
        repo, file = match["repo"], match["file"]
        if len(repo) > _LONGEST_REPO or "--" in repo or ".." in repo or repo.lower().endswith(".gguf"):
            return None
        # user/repo/file.gguf or folder/folder/file.gguf, with a mistake in it? The folder that is there tells.
        if file is not None and (os.path.isdir(repo.split("/")[0]) or ".." in file.split("/")):
            return None
        return cls(repo, match["revision"], match["quant"], file)

    @property
    def source(self) -> str:
        """The repository and, if it was typed, the revision."""
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    def __str__(self) -> str:
        if self.file is not None:
            return f"{self.source}/{self.file}"
        return self.source if self.quant is None else f"{self.source}:{self.quant}"


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. etag: its SHA-256, or for small files the hash that git gives it; empty if unknown."""

    path: str
    size: int
    etag: str = ""

    @property
    def stem(self) -> str:
        """The file's name without folder and suffix."""
        return self.path.rsplit("/", 1)[-1][: -len(".gguf")]


@dataclass(frozen=True)
class Variant:
    """One of a repository's models: a file, or the parts of a split one in order. label: the quantization by the
    file's name, such as "Q4_K_M"; empty if it names none."""

    label: str
    files: tuple[HubFile, ...]
    complete: bool = True
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum(file.size for file in self.files))

    @property
    def stem(self) -> str:
        """The name of the file, without its number if it is split."""
        match = _PART.fullmatch(self.files[0].stem)
        return match["stem"] if match else self.files[0].stem

    def name(self, source: str, among: Iterable[Variant] = ()) -> str:
        """What to type for it. among: all models of the repository, of which some may have the same label."""
        twins = sum(variant.label == self.label for variant in among)
        return f"{source}:{self.label}" if self.label and twins <= 1 else f"{source}/{self.files[0].path}"


def variants(files: Iterable[HubFile]) -> list[Variant]:
    """The models among a repository's files, by path."""
    groups: dict[tuple[str, int], dict[int, HubFile]] = {}
    for file in sorted(files, key=lambda file: file.path):
        if not file.path.lower().endswith(".gguf") or _NOT_A_MODEL.search(file.stem):
            continue
        match = _PART.fullmatch(file.stem)
        folder = file.path[: -len(file.stem) - len(".gguf")]
        if match is None or int(match["count"]) <= 1:
            groups[file.path, 1] = {1: file}
        else:
            groups.setdefault((folder + match["stem"], int(match["count"])), {})[int(match["part"])] = file
    return [Variant(_label(parts[min(parts)].path), tuple(parts[number] for number in sorted(parts)),
                    sorted(parts) == list(range(1, count + 1)))
            for (_, count), parts in groups.items()]


def _label(path: str) -> str:
    *folders, name = path.split("/")
    match = _PART.fullmatch(name[: -len(".gguf")])
    found = _LABEL_IN_STEM.findall(match["stem"] if match else name[: -len(".gguf")])
    if found:
        return str(found[-1]).upper()
    return next((folder.upper() for folder in reversed(folders) if _LABEL_ALONE.fullmatch(folder)), "")


def matching(name: Name, offered: Sequence[Variant]) -> list[Variant]:
    """The models that `name` may mean: one, if it is clear."""
    whole = [variant for variant in offered if variant.complete]
    if name.file is not None:
        return [variant for variant in whole if any(file.path == name.file for file in variant.files)]
    return _preferred(whole) if name.quant is None else _by_quant(name.quant, whole)


def choose(name: Name, offered: Sequence[Variant], where: str) -> Variant:
    """The model that `name` means. where: for messages, what offers them. Raises `HubError` if there is none, or no
    single one."""
    found = matching(name, offered)
    if len(found) == 1:
        return found[0]
    if found:
        paths = ", ".join(f"{name.source}/{variant.files[0].path}" for variant in found)
        raise HubError(f"{name}: {where} has {len(found)} such models; name one of them: {paths}")
    if not offered:
        raise HubError(f"{name}: {where} has no GGUF file of a model: look for a repository whose name ends in GGUF")
    whole = [variant for variant in offered if variant.complete]
    if not whole:
        raise HubError(f"{name}: {where} has only some parts of {offered[0].files[0].path}")
    raise HubError(f"{name}: {where} has no {name.file or name.quant}; it has {_listed(whole)}")


def _by_quant(quant: str, whole: list[Variant]) -> list[Variant]:
    wanted = quant.upper()
    for fits in (lambda variant: variant.label == wanted, lambda variant: variant.label == f"UD-{wanted}",
                 lambda variant: variant.stem.upper() in (wanted, wanted.removesuffix(".GGUF"))):
        found = [variant for variant in whole if fits(variant)]
        if found:
            return found
    return []


def _preferred(whole: list[Variant]) -> list[Variant]:
    """Those of the best label there is. Labels that are not in the order come last, and of them the smallest file."""
    def rank(variant: Variant) -> tuple[int, bool, int]:
        place = _RANK.get(variant.label.removeprefix("UD-"), len(_RANK))
        return place, variant.label.startswith("UD-"), variant.size if place == len(_RANK) else 0

    best = min(map(rank, whole), default=None)
    return [variant for variant in whole if rank(variant) == best]


def _listed(whole: list[Variant]) -> str:
    return ", ".join(sorted({variant.label or f"{variant.stem}.gguf" for variant in whole}))
