"""The names by which clients know the models, and the files behind them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sharpi.errors import InvalidRequestError, ModelFileError
from sharpi.hub.names import HubFile, Name, variants
from sharpi.loading.description import BUNDLED_MODEL

__all__ = ["ModelFile", "catalogue"]

Locate = Callable[[str], "str | os.PathLike[str]"]


@dataclass(frozen=True)
class ModelFile:
    """A model that clients may ask for. path: its file, the first of several."""

    name: str
    path: Path


def catalogue(models: Sequence[str], locate: Locate) -> tuple[ModelFile, ...]:
    """The models that `ServerSettings.models` means. locate: finds the file of a model on the Hub by its name, and
    downloads it if it must.

    A file is called as it is named, without ".gguf" and without the number of a part; one on the Hub by the name that
    was given. Raises `ModelFileError`, and `InvalidRequestError` if two would have one name.
    """
    found = [file for model in models for file in _meant(model, locate)]
    if not models:
        found = [ModelFile(BUNDLED_MODEL.stem, BUNDLED_MODEL)]
    seen: dict[str, ModelFile] = {}
    for file in found:
        twin = seen.setdefault(file.name.lower(), file)
        if twin is not file and twin.path != file.path:
            raise InvalidRequestError(f"two models would be called {file.name}, {twin.path} and {file.path}: name one"
                                      f" with -m NAME={file.path}")
    return tuple(seen.values())


def _meant(model: str, locate: Locate) -> Iterator[ModelFile]:
    alias, source = _alias(model)
    if os.path.isdir(source):
        if alias:
            raise InvalidRequestError(f"-m {model}: a folder of models cannot have one name")
        yield from _in_folder(Path(source))
    elif Name.parse(source) is not None:
        yield ModelFile(alias or source, Path(locate(source)))
    else:
        path = Path(source)
        if not path.is_file():
            raise ModelFileError.about(source, "no such file")
        yield ModelFile(alias or _called(path), path)


def _alias(model: str) -> tuple[str, str]:
    """The name that was given and the model; a path may have "=" in it."""
    alias, equals, source = model.partition("=")
    if not equals or os.path.lexists(model) or not alias or "/" in alias:
        return "", model
    if not source:
        raise InvalidRequestError(f"-m {model}: names no model after the =")
    return alias, source


def _in_folder(folder: Path) -> list[ModelFile]:
    """The models below a folder that are whole."""
    files = []
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            if name.lower().endswith(".gguf") and path.is_file():
                files.append(HubFile(path.relative_to(folder).as_posix(), path.stat().st_size))
    found = [ModelFile(variant.stem, folder / variant.files[0].path) for variant in variants(files) if variant.complete]
    if not found:
        raise ModelFileError.about(folder, "has no model: no GGUF file that is whole")
    return sorted(found, key=lambda file: file.name.lower())


def _called(path: Path) -> str:
    """The name of one file, of a split model any part."""
    found = variants([HubFile(path.name, 0)])
    return found[0].stem if found else path.stem
