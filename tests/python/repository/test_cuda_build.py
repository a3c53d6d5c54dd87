"""How the build decides about CUDA: what is missing is said in one line, and is an error only where CUDA was asked for.

Toolkits are pretended by scripts that stand in for nvcc; no GPU and no toolkit is needed. All is tested with the CMake
that is here and with the oldest that pyproject.toml promises, which tests/run.py fetches and names in
SHARPI_OLDEST_CMAKE.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
TOOLKIT = REPOSITORY / "cuda" / "toolkit.cmake"

PROJECT = """
cmake_minimum_required(VERSION 3.18)
project(decision LANGUAGES CXX)
if(NOTHING_IS_HERE)
  set(CMAKE_FIND_ROOT_PATH ${CMAKE_BINARY_DIR}/nowhere)
  set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM ONLY)
endif()
include(%s)
message(STATUS "decided: ${SHARPI_CUDA_BUILT}: ${SHARPI_CUDA_STATE}")
"""

CHOICE = """
set(SHARPI_CUDA OFF)
include(%s)
sharpi_choose_architectures(chosen)
message("chosen: ${chosen}")
"""


PYPROJECT = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
PROMISED = re.search(r'^cmake\.version = ">=([\d.]+)"', PYPROJECT, re.MULTILINE)[1]


@pytest.fixture(params=["the CMake here", "the oldest CMake"])
def cmake(request: pytest.FixtureRequest) -> str:
    """The CMake that a test is run with."""
    if not shutil.which("c++"):
        pytest.skip("no C++ compiler is here")
    beside = Path(sys.executable).parent / "cmake"
    found = str(beside) if beside.exists() else shutil.which("cmake")
    if request.param == "the oldest CMake":
        found = os.environ.get("SHARPI_OLDEST_CMAKE")
        if not found:
            pytest.skip(f"CMake {PROMISED} is not here: tests/run.py fetches it")
        said = subprocess.run([found, "--version"], text=True, capture_output=True, check=True).stdout
        assert said.startswith(f"cmake version {PROMISED}."), "not the oldest that is promised"
    if found is None:
        pytest.skip("CMake is not here")
    return found


def pretend(folder: Path, name: str, says: str) -> Path:
    """A program that prints a text whatever it is asked."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text").write_text(says)
    program = folder / name
    program.write_text(f"#!/bin/sh\ncat '{folder / 'text'}'\n")
    program.chmod(0o755)
    return program


def run_cmake(cmake: str, *arguments: str, nvcc: Path | None = None,
              path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("CUDACXX", "CUDA_HOME", "CUDA_PATH")}
    if nvcc is not None:
        environment["CUDACXX"] = str(nvcc)
    if path is not None:
        environment["PATH"] = f"{path}{os.pathsep}{environment['PATH']}"
    return subprocess.run([cmake, *arguments], text=True, capture_output=True, env=environment, check=False,
                          timeout=300)


# Where a machine may keep a runtime library that belongs to no toolkit of a test.
SYSTEM_LIBRARIES = ("/usr/local/lib", "/usr/local/lib64", "/usr/lib", "/usr/lib64", "/lib", "/lib64",
                    f"/usr/lib/{platform.machine()}-linux-gnu", f"/lib/{platform.machine()}-linux-gnu")


def decide(cmake: str, tmp_path: Path, wanted: str, *, nvcc: Path | None = None) -> tuple[int, str]:
    """The exit code of configuring, and what was decided or the error, on one line."""
    (tmp_path / "CMakeLists.txt").write_text(PROJECT % TOOLKIT)
    done = run_cmake(cmake, "-S", str(tmp_path), "-B", str(tmp_path / "build"), f"-DSHARPI_CUDA={wanted}",
                     f"-DNOTHING_IS_HERE={'OFF' if nvcc else 'ON'}",
                     f"-DCMAKE_IGNORE_PATH={';'.join(SYSTEM_LIBRARIES)}", nvcc=nvcc)
    text = " ".join((done.stdout if done.returncode == 0 else done.stderr).split())
    return done.returncode, text


OBSTACLES = {
    "none": (None, "no nvcc was found"),
    "old": ("Cuda compilation tools, release 11.8, V11.8.89\n", "is CUDA 11.8, and 12.0 is needed"),
    "odd": ("hello\n", "does not say its version"),
    "bare": ("Cuda compilation tools, release 12.4, V12.4.89\n", "no static runtime library"),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
@pytest.mark.parametrize("wanted", ["AUTO", "ON"])
def test_what_is_missing_is_said(obstacle: str, wanted: str, tmp_path: Path, cmake: str) -> None:
    says, reason = OBSTACLES[obstacle]
    nvcc = pretend(tmp_path / "toolkit" / "bin", "nvcc", says) if says else None
    code, text = decide(cmake, tmp_path, wanted, nvcc=nvcc)
    if wanted == "AUTO":
        assert code == 0 and "decided: FALSE: not built: " in text
    else:
        assert code != 0 and "SHARPI_CUDA=ON: " in text
    assert reason in text


def test_off_is_off_and_nonsense_is_refused(tmp_path: Path, cmake: str) -> None:
    assert decide(cmake, tmp_path / ".", "OFF")[1].count("decided: FALSE: not built: SHARPI_CUDA=OFF") == 1
    code, text = decide(cmake, tmp_path, "PERHAPS")
    assert code != 0 and "must be AUTO, ON or OFF, not 'PERHAPS'" in text


@pytest.mark.parametrize("shown, chosen", [
    ("9.0\n", "90-real"),
    ("8.9\n9.0\n8.9\n", "89-real;90-real"),
    ("7.5\n12.0\n", "75-real;120-real"),
    ("6.1\n8.6\n", "86-real"),
    ("6.1\n", "75-virtual;80-virtual;90-virtual"),
    ("9.0\n13.7\n", "75-virtual;80-virtual;90-virtual"),
    ("No devices were found\n", "75-virtual;80-virtual;90-virtual"),
])
def test_a_machine_with_gpus_builds_for_them_only(shown: str, chosen: str, tmp_path: Path, cmake: str) -> None:
    nvcc = pretend(tmp_path / "nvcc", "nvcc", "".join(f"compute_{n}\n" for n in (75, 80, 86, 89, 90, 120)))
    pretend(tmp_path / "smi", "nvidia-smi", shown)
    script = tmp_path / "choice.cmake"
    script.write_text(CHOICE % TOOLKIT)
    done = run_cmake(cmake, f"-DSHARPI_NVCC={nvcc}", "-P", str(script), path=tmp_path / "smi")
    assert done.returncode == 0 and f"chosen: {chosen}\n" in done.stderr, done.stderr


def test_the_whole_project_is_configured(tmp_path: Path, cmake: str) -> None:
    done = run_cmake(cmake, "-S", str(REPOSITORY), "-B", str(tmp_path), "-DSHARPI_CUDA=OFF", "-DSHARPI_PYTHON=OFF")
    assert done.returncode == 0 and "CUDA: not built: SHARPI_CUDA=OFF" in done.stdout, done.stderr
    assert "Policy" not in done.stderr and "Warning" not in done.stderr, done.stderr
    told = (REPOSITORY / "CMakeLists.txt").read_text(encoding="utf-8")
    assert f"cmake_minimum_required(VERSION {PROMISED})" in told
    assert f"cmake_policy(VERSION {PROMISED})" in TOOLKIT.read_text(encoding="utf-8")


def test_the_module_needs_no_driver_and_no_toolkit() -> None:
    """What it links is what every Linux has; CUDA's runtime is inside, and looks for the driver when it is asked."""
    from sharpi import _core as core

    assert core.cuda_state
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf is not here")
    done = subprocess.run([readelf, "--dynamic", core.__file__], text=True, capture_output=True, check=True)
    needed = [line.split("[")[1].split("]")[0] for line in done.stdout.splitlines() if "(NEEDED)" in line]
    assert needed and not [name for name in needed if "cu" in name.lower() or "nv" in name.lower()]
