"""A machine's profile as a file: what it may say, and what is refused."""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from profiled_machine import COSTS, CPU_RATES, GPU_RATES, a_profile, without_gpu

from sharpi.errors import InvalidRequestError
from sharpi.files.gguf import TENSOR_TYPES
from sharpi.machine.profile import ASSUMED, PROFILE_VERSION, HardwareProfile, load_profile


def refusal(path: Path) -> str:
    """What `load_profile` says of a file that it refuses: one line that names the file first."""
    with pytest.raises(InvalidRequestError) as caught:
        load_profile(path)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize("profile", [a_profile(), without_gpu(), ASSUMED, a_profile(threads=3, measured="")])
def test_a_profile_comes_back_from_its_file(profile: HardwareProfile, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    profile.save(path)
    assert load_profile(path) == profile
    assert HardwareProfile.from_dict(profile.to_dict()) == profile
    assert set(json.loads(path.read_text())) == {field.name for field in fields(HardwareProfile)}


def test_whole_numbers_stand_for_rates_too(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({**a_profile().to_dict(), "ram_bytes_per_second": 91 * 10**9}))
    rate = load_profile(path).ram_bytes_per_second
    assert rate == 91e9 and isinstance(rate, float)


@pytest.mark.parametrize("name", [field.name for field in fields(HardwareProfile)])
def test_a_field_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    values = a_profile().to_dict()
    del values[name]
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(values))
    message = refusal(path)
    assert name in message and "sharpi hardware --save" in message


NUMBERS = ["cores", "threads", "ram_bytes", "vram_bytes", *CPU_RATES, *GPU_RATES]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [0, -1, -2.5e10, math.nan, math.inf, -math.inf, 1e300, 10**400, -10**400, True,
                                   "91e9", [1], {}], ids=lambda value: repr(value)[:12])
def test_a_number_that_cannot_be_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({**a_profile().to_dict(), name: value}))
    message = refusal(path)
    assert message.startswith(f"{name} ") and "sharpi hardware --save" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ram_bytes_per_second", 91.0),
        ("pcie_bytes_per_second", 2e15),
        ("vram_bytes_per_second", 4.5e3),
        ("gpu_flops", 460.0),
        ("gpu_flops", 2e17),
        ("gpu_kernel_seconds", 920.0),
        ("vram_bytes", 80),
        ("ram_bytes", 1 << 61),
        ("cores", 1.5),
        ("ram_bytes", 64e9),
        ("threads", 1025),
        ("assumed", 1),
        ("assumed", None),
        ("cpu", ""),
        ("cpu", None),
        ("cpu", "two\nlines"),
        ("cpu", 7),
        ("cpu", "x" * 201),
        ("gpu", ""),
        ("gpu", 5),
        ("gpu", "\x1b[2J"),
        ("measured", "yesterday"),
        ("measured", None),
        ("measured", 5),
        ("version", "1"),
        ("version", True),
        ("version", PROFILE_VERSION + 1),
        ("version", 0),
        ("version", -1),
        ("version", 1.5),
        ("version", [1]),
        ("version", None),
        ("cores", None),
        ("cpu_flops", None),
        ("spread", None),
        ("spread", []),
        ("spread", 0.1),
        ("spread", {"ram": 0.1}),
        ("spread", {"cpu_flops": 1.5}),
        ("spread", {"cpu_flops": -0.1}),
        ("spread", {"cpu_flops": None}),
        ("spread", {"cpu_flops": math.nan}),
        ("spread", {"cores": 0.1}),
        ("spread", {"a\x1b": 0.1}),
        ("cpu_type_costs", None),
        ("cpu_type_costs", []),
        ("cpu_type_costs", {"Q4_K": 1.0}),
        ("cpu_type_costs", {"Q6_K": 0}),
        ("cpu_type_costs", {"Q6_K": math.nan}),
        ("cpu_type_costs", {"Q6_K": "1"}),
        ("cpu_type_costs", {"\x1b": 1}),
        ("busy", None),
        ("busy", 0),
        ("busy", "no"),
    ],
)
def test_nonsense_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({**a_profile().to_dict(), name: value}))
    assert name in refusal(path)


@pytest.mark.parametrize("name", ["vram_bytes", *GPU_RATES])
def test_a_gpu_has_all_its_rates_and_no_gpu_has_none(name: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({**a_profile().to_dict(), name: None}))
    assert refusal(path).startswith(f"{name} is missing")
    path.write_text(json.dumps({**without_gpu().to_dict(), name: getattr(a_profile(), name)}))
    assert refusal(path).startswith(f"{name} is given")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"null",
        b'"text"',
        b"\xff\xfe{}",
        b"[" * 100_000,
        b"{}",
        b'{"version": 1}',
        b'{"version": 2}',
        b"GGUF\x03\x00\x00\x00",
    ],
    ids=lambda content: repr(content[:12]),
)
def test_a_file_that_is_no_profile_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(content)
    assert "sharpi hardware --save" in refusal(path)


@pytest.mark.parametrize("profile", [a_profile(), without_gpu()])
def test_a_profile_of_version_1_is_read(profile: HardwareProfile, tmp_path: Path) -> None:
    """One sample of each rate: nothing is known of spreads, and of other programs."""
    path = tmp_path / "machine.json"
    since = {"spread": 2, "busy": 2, "cpu_type_costs": 3}
    old = {name: value for name, value in profile.to_dict().items() if since.get(name, 1) <= 1}
    path.write_text(json.dumps({**old, "version": 1}))
    assert load_profile(path) == replace(profile, spread={}, busy=False, cpu_type_costs={})
    path.write_text(json.dumps({**profile.to_dict(), "version": 1}))
    assert refusal(path).startswith("spread is no field of a profile")


@pytest.mark.parametrize("profile", [a_profile(), without_gpu()])
def test_a_profile_of_version_2_is_read(profile: HardwareProfile, tmp_path: Path) -> None:
    """Nothing is known of types: all cost as much as Q4_K."""
    path = tmp_path / "machine.json"
    old = {name: value for name, value in profile.to_dict().items() if name != "cpu_type_costs"}
    path.write_text(json.dumps({**old, "version": 2}))
    read = load_profile(path)
    assert read == replace(profile, cpu_type_costs={}) and read.cost_of("IQ2_XXS") == 1.0
    path.write_text(json.dumps({**old, "version": PROFILE_VERSION}))
    assert refusal(path).startswith("cpu_type_costs is missing")


def test_every_type_has_the_cost_of_its_kind() -> None:
    costs = {tensor_type.name: a_profile().cost_of(tensor_type.name) for tensor_type in TENSOR_TYPES.values()}
    assert {name for name, cost in costs.items() if cost == 1.0} == {"F32", "F16", "BF16", "I32", "Q4_K"}
    assert {costs[name] for name in ("IQ1_S", "IQ2_XXS", "IQ3_S")} == {COSTS["IQ3_S"]}
    assert (costs["MXFP4"], costs["Q8_0"], costs["Q6_K"]) == (COSTS["MXFP4"], COSTS["Q8_0"], COSTS["Q6_K"])
    assert hash(a_profile()) == hash(a_profile())


def test_the_spreads_are_of_this_machines_rates(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="spread has gpu_flops, which is no rate of this machine"):
        without_gpu(spread={"gpu_flops": 0.1})
    assert "gpu_flops" not in a_profile().with_assumed_gpu().spread
    assert a_profile().with_assumed_gpu().spread["cpu_flops"] == 0.1
    assert hash(a_profile()) == hash(a_profile())


def test_another_version_is_named_whatever_its_fields(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"version": PROFILE_VERSION + 1, "nodes": []}))
    assert refusal(path).startswith(f"version is {PROFILE_VERSION + 1}, where 1 to {PROFILE_VERSION} are known")


def test_a_file_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(a_profile().to_dict()) + " " * (2 << 20))
    assert "too large" in refusal(path)


def test_an_unknown_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({**a_profile().to_dict(), "pci_bytes\x1b": 1}))
    message = refusal(path)
    assert "pci_bytes" in message and "\x1b" not in message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent.json")
    assert "directory" in refusal(tmp_path)
    with pytest.raises(InvalidRequestError, match="null byte"):
        load_profile("a\0b")


@pytest.mark.parametrize("values", [None, [], "text", 5])
def test_a_profile_is_a_table(values: Any) -> None:
    with pytest.raises(InvalidRequestError, match="^somewhere: it is no table of fields"):
        HardwareProfile.from_dict(values, "somewhere")


@pytest.mark.parametrize("change", [{"ram_bytes_per_second": -1.0}, {"threads": 0}, {"gpu": None}, {"cpu": ""},
                                    {"pcie_bytes_per_second": math.nan}])
def test_a_profile_made_by_hand_is_checked(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="^hardware profile: "):
        replace(a_profile(), **change)


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "machine.json"
    a_profile().save(path)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(InvalidRequestError, match="No space left") as caught:
        without_gpu().save(path)
    assert str(path) in str(caught.value)
    assert load_profile(path) == a_profile()
    assert os.listdir(tmp_path) == ["machine.json"], "no draft is left behind"


def test_what_is_no_file_is_written_to_and_stays(tmp_path: Path) -> None:
    target = tmp_path / "real.json"
    link = tmp_path / "link.json"
    link.symlink_to(target)
    a_profile().save(link)
    assert link.is_symlink() and load_profile(target) == a_profile()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        a_profile().save(pipe)
        assert json.loads(os.read(reader, 1 << 16)) == a_profile().to_dict()
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)


def test_what_is_assumed_says_so() -> None:
    assert ASSUMED.assumed and ASSUMED.gpu is not None
    assert not a_profile().assumed
    mixed = without_gpu().with_assumed_gpu()
    assert mixed.assumed and mixed.gpu == ASSUMED.gpu and mixed.pcie_bytes_per_second == ASSUMED.pcie_bytes_per_second
    assert mixed.cpu == "Test CPU" and mixed.ram_bytes_per_second == CPU_RATES["ram_bytes_per_second"]
