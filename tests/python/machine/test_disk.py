"""Whether a model's file is in RAM already."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sharpi.machine.disk import bytes_in_ram


def mounted(monkeypatch: pytest.MonkeyPatch, folder: Path, file_system: str) -> None:
    """The system says that `folder`'s file system is of this kind, and another one is in RAM."""
    device = os.stat(folder).st_dev
    mounts = folder / "mountinfo"
    mounts.write_text(f"23 28 0:9999 / /sys rw,nosuid shared:7 - tmpfs tmpfs rw\n"
                      f"30 1 {os.major(device)}:{os.minor(device)} / /a\\040folder rw - {file_system} none rw\n",
                      encoding="utf-8")
    monkeypatch.setattr("sharpi.machine.disk._MOUNTS", str(mounts))


def written(path: Path, count: int) -> Path:
    path.write_bytes(os.urandom(count))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path


@pytest.mark.parametrize("file_system", ["tmpfs", "ramfs", "ext4"])
def test_files_of_a_file_system_in_ram_are_in_ram(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                  file_system: str) -> None:
    files = [written(tmp_path / "a", 1 << 20), written(tmp_path / "b", 1 << 16)]
    mounted(monkeypatch, tmp_path, file_system)
    count = bytes_in_ram(files)
    assert count == 0 if file_system == "ext4" else 1.0 <= count / (17 << 16) < 1.1


def test_holes_are_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = written(tmp_path / "a", 1 << 16)
    os.truncate(file, 1 << 30)
    mounted(monkeypatch, tmp_path, "tmpfs")
    assert bytes_in_ram([file]) < 1 << 20


def test_what_cannot_be_told_counts_as_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = written(tmp_path / "a", 1 << 16)
    mounted(monkeypatch, tmp_path, "tmpfs")
    assert bytes_in_ram([file]) and not bytes_in_ram([file, tmp_path / "gone"])
    monkeypatch.setattr("sharpi.machine.disk._MOUNTS", str(tmp_path / "gone"))
    assert not bytes_in_ram([file])
