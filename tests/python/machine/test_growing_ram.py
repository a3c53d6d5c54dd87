"""Virtual machines whose RAM grows as it is used: what plans take for their RAM, and for what of it is free."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_model import cli_runner
from fake_weights import GIB
from tiny_models import MODELS, write

from sharpi import _core
from sharpi.cli import main
from sharpi.errors import OutOfMemoryError
from sharpi.loading.description import describe
from sharpi.machine import hardware
from sharpi.machine.hardware import free_ram_bytes, ram_bytes
from sharpi.machine.profile import ASSUMED
from sharpi.planning.plan import Plan
from sharpi.planning.planner import make_plan

BLOCK, PRESENT = 128 << 20, 8 * GIB - 200 * 2**20
PLUGGED = """\
00100000-bfffffff : System RAM
100000000-23fffffff : System RAM
2000000000-2fffffffff : virtio5
  2000000000-203fffffff : System RAM (virtio_mem)
  2080000000-20bfffffff : System RAM (virtio_mem)
3000000000-3fffffffff : PCI Bus 0000:00
"""


@pytest.fixture(autouse=True)
def _system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 8 GiB, of which the kernel has a part; 6 GiB are free."""
    monkeypatch.delenv("SHARPI_RAM_GB", raising=False)
    monkeypatch.setattr(hardware, "present_ram_bytes", lambda: PRESENT)
    monkeypatch.setattr(_core, "free_ram", lambda: 6 * GIB)
    for name, path in (("_BLOCKS", "memory"), ("_GROWING", "virtio_mem"), ("_RANGES", "iomem")):
        monkeypatch.setattr(hardware, name, str(tmp_path / path))
    monkeypatch.setattr(hardware, "_CGROUP_LIMITS", (str(tmp_path / "memory.max"),))
    blocks(tmp_path, 64)


def blocks(folder: Path, count: int) -> None:
    for number in range(count):
        (folder / "memory" / f"memory{number}").mkdir(parents=True, exist_ok=True)
    (folder / "memory" / "power").mkdir(exist_ok=True)
    (folder / "memory" / "block_size_bytes").write_text(f"{BLOCK:x}\n", encoding="ascii")


def plug(folder: Path, ranges: str) -> None:
    (folder / "virtio_mem" / "virtio5").mkdir(parents=True, exist_ok=True)
    (folder / "virtio_mem" / "module").mkdir(exist_ok=True)
    (folder / "iomem").write_text(ranges, encoding="ascii")


def test_a_machine_that_does_not_grow(tmp_path: Path) -> None:
    assert (ram_bytes(), free_ram_bytes()) == (PRESENT, 6 * GIB)
    (tmp_path / "iomem").write_text(PLUGGED, encoding="ascii")  # and no device that adds RAM
    assert ram_bytes() == PRESENT
    (tmp_path / "memory" / "block_size_bytes").unlink()
    assert ram_bytes() == PRESENT


def test_ram_that_a_device_may_add(tmp_path: Path) -> None:
    """64 GiB of addresses, of which two pieces of a GiB are there. What is not there yet is not free."""
    plug(tmp_path, PLUGGED)
    assert (ram_bytes(), free_ram_bytes()) == (PRESENT + 62 * GIB, 6 * GIB)
    plug(tmp_path, "".join(f"00000000-00000000 : {line.partition(' : ')[2]}\n" for line in PLUGGED.splitlines()))
    assert ram_bytes() == PRESENT, "only root sees addresses"
    (tmp_path / "iomem").unlink()
    assert ram_bytes() == PRESENT


def test_ram_that_a_balloon_holds(tmp_path: Path) -> None:
    blocks(tmp_path, 512)
    assert (ram_bytes(), free_ram_bytes()) == (64 * GIB, 6 * GIB)


def test_a_containers_limit_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plug(tmp_path, PLUGGED)
    (tmp_path / "memory.max").write_text(f"{20 * GIB}\n", encoding="ascii")
    assert ram_bytes() == 20 * GIB
    monkeypatch.setenv("SHARPI_RAM_GB", "30")
    assert ram_bytes() == 20 * GIB


def test_what_a_person_counts_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARPI_RAM_GB", "126.5")
    whole = 253 * GIB // 2
    assert (ram_bytes(), free_ram_bytes()) == (whole, 6 * GIB + whole - PRESENT)
    plug(tmp_path, PLUGGED)
    assert ram_bytes() == whole
    monkeypatch.setenv("SHARPI_RAM_GB", "4")
    assert (ram_bytes(), free_ram_bytes()) == (4 * GIB, 6 * GIB)


def test_a_plan_does_not_refuse_what_the_machine_can_grow_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "model.gguf", MODELS["llama"])
    arguments = ["plan", "-m", str(path), "--device", "cpu", "-t", "1", "-c", "0"]

    def planned(*more: str) -> str:
        return cli_runner().invoke(main, [*arguments, *more], catch_exceptions=False).stdout

    needed = json.loads(planned("--json"))["total_bytes"]
    present = needed - 1
    monkeypatch.setattr(hardware, "present_ram_bytes", lambda: present)
    for folder in (tmp_path / "memory").glob("memory*"):
        folder.rmdir()
    assert "It does not fit" in planned() and "has" not in planned()
    plug(tmp_path, PLUGGED)
    assert "It fits" in planned() and ", which has " in planned()


def test_experts_go_to_the_disk_unless_a_person_counts_on_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "mixture.gguf", replace(MODELS["qwen3moe"], width=256, head_dim=64, kv_heads=2, hidden=256,
                                                    experts=24, type="Q4_K"))
    file, spec = describe(path)

    def planned() -> Plan:
        return make_plan(file, spec, device="cpu", context=128, profile=ASSUMED)

    little = planned().total_bytes * 4 // 5
    monkeypatch.setattr(_core, "free_ram", lambda: little)
    plug(tmp_path, PLUGGED)
    assert planned().expert_slots > 0, "RAM that may come is not free"
    monkeypatch.setenv("SHARPI_RAM_GB", "64")
    assert planned().expert_slots == 0
    slots = replace(planned(), expert_slots=2 * little)
    slots.require()
    monkeypatch.delenv("SHARPI_RAM_GB")
    with pytest.raises(OutOfMemoryError, match="of experts in RAM"):
        slots.require()
