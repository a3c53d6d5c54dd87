"""tests/run.py where pip reaches no index: it takes what the machine has, and says in one line what is missing. What it
runs for the emulator."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "run.py"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the environment, which is made once: that takes some seconds."""
    return tmp_path_factory.mktemp("build")


@pytest.fixture
def script(build: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module that works in a folder of its own, without an index."""
    spec = importlib.util.spec_from_file_location("run_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_script", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "BUILD", build)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for name in ("PIP_FIND_LINKS", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    return module


def program(folder: Path, name: str, says: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho '{says}'\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(("says", "enough"), [
    ("cmake version 3.17.5", False), ("cmake version 3.18.0", True), ("cmake version 3.9.6", False),
    ("cmake version 4.4.4", True), ("cmake version 3.31.2-g1234", True), ("hello", False)])
def test_a_program_is_taken_if_it_is_new_enough(script: ModuleType, tmp_path: Path, says: str, enough: bool) -> None:
    program(tmp_path / "bin", "cmake", says)
    assert script.is_new_enough("cmake", "3.18", str(tmp_path / "bin")) is enough
    assert not script.is_new_enough("cmake", "3.18", str(tmp_path / "empty"))


def test_what_the_project_needs_is_read_from_pyproject(script: ModuleType) -> None:
    building, running, linting = script.lists_in_pyproject()
    assert [name.split(">")[0] for name in building] == ["scikit-build-core", "pybind11"]
    assert [name.split("==")[0] for name in linting] == ["mypy", "ruff", "clang-format", "clang-tidy"]
    assert {"numpy", "click", "pytest", "hypothesis"} <= {name.split(">")[0] for name in running}
    assert script.promised_cmake() == "3.18"


def test_what_the_machine_has_is_borrowed(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin", "cmake", "cmake version 3.18.1")
    program(tmp_path / "bin", "ninja", "1.11")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    # Not every Python that runs these tests has the build's packages too.
    monkeypatch.setattr(script, "lists_in_pyproject", lambda: (["pluggy>=0.1"], ["pytest>=8", "numpy>=1.24"], []))
    tools = script.make_environment()
    assert tools.borrowed and tools.program("cmake") == str(tmp_path / "bin" / "cmake")
    seen = subprocess.run([tools.python, "-c", "import numpy, pytest; print(pytest.__version__)"], check=True,
                          capture_output=True, text=True, cwd=tmp_path)
    assert seen.stdout.strip() == pytest.__version__
    # A later run begins without what was borrowed, so it looks for an index again.
    assert script.make_environment().borrowed


@pytest.mark.parametrize("missing", ["no-such-thing>=1", "pytest>=99"])
def test_what_is_missing_is_said(script: ModuleType, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "is_new_enough", lambda *_: True)
    monkeypatch.setattr(script, "lists_in_pyproject", lambda: (["pluggy>=0.1"], ["pytest>=8", missing], []))
    with pytest.raises(SystemExit) as stopped:
        script.make_environment()
    said = str(stopped.value)
    assert said.startswith(f"missing, and pip cannot fetch it: {missing}; ") and "PIP_FIND_LINKS" in said
    assert "\n" not in said and "pytest>=8" not in said


def test_an_old_cmake_is_missing_too(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "promised_cmake", lambda: "99.0")
    monkeypatch.setattr(script, "lists_in_pyproject", lambda: (["pluggy>=0.1"], ["pytest>=8"], []))
    with pytest.raises(SystemExit, match=r"^missing, and pip cannot fetch it: cmake>=99\.0; "):
        script.make_environment()


@pytest.mark.parametrize(("borrowed", "needed"), [(True, []), (False, ["no-such-thing==1"])])
def test_sources_that_cannot_be_checked_are_said_in_a_line(script: ModuleType, borrowed: bool, needed: list[str],
                                                           monkeypatch: pytest.MonkeyPatch,
                                                           capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(script, "lists_in_pyproject", lambda: ([], [], needed))
    script.lint(script.Tools(Path(sys.executable), os.environ["PATH"], borrowed), Path("no build"))
    said = capfd.readouterr().out
    assert said.startswith("NOT CHECKED: ") and said.count("\n") == 1 and all(name in said for name in needed)


def test_each_source_of_the_product_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import lint

    names = ["cpp/cpu/kernels/rope.cpp"] * 3 + ["tests/cpp/core/test_errors.cpp", "cuda/kernels/rows/rows.cu",
                                               "cuda/backend/cuda_backend.cpp", "build/_deps/gtest.cpp"]
    commands = [{"file": str(lint.ROOT / name), "command": f"c++ -DN={n}"} for n, name in enumerate(names)]
    (tmp_path / "compile_commands.json").write_text(json.dumps(commands), encoding="utf-8")
    found = [Path(entry["file"]).relative_to(lint.ROOT).as_posix() for entry in lint.production_commands(tmp_path)]
    assert found == ["cpp/cpu/kernels/rope.cpp", "cuda/backend/cuda_backend.cpp"]


def commands(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[list[str]]:
    """What the script would run on a machine without a GPU."""
    ran: list[list[str]] = []
    tools = script.Tools(Path(sys.executable), os.environ["PATH"], False)
    monkeypatch.setattr(script.Tools, "program", lambda _, name: name)
    monkeypatch.setattr(script, "make_environment", lambda: tools)
    monkeypatch.setattr(script, "run", lambda *command, **_: ran.append([str(part) for part in command]))
    for name, result in {"gpu_is_visible": False, "nvcc_compiles_fast": False, "unmet": [], "ensure_googletest": None,
                         "fetch_oldest_cmake": None}.items():
        monkeypatch.setattr(script, name, lambda *_, result=result: result)
    monkeypatch.setenv("SHARPI_REQUIRE_GPU", "")  # set again afterwards, and so is this
    monkeypatch.setenv("CMAKE_GENERATOR", "")
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    script.main()
    return ran


def test_the_emulator_has_a_build_of_its_own_and_runs_alone(script: ModuleType, build: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    configures, builds, tests = commands(script, monkeypatch, "--emulator")
    assert configures[configures.index("-B") + 1] == str(build / "tests-emulator")
    assert {"-DSHARPI_CUDA=ON", "-DSHARPI_CUDA_EMULATOR=ON"} <= set(configures)
    assert builds[:4] == ["cmake", "--build", str(build / "tests-emulator"), "--target"]
    assert {"test_emulator", "gpu_test_streams"} <= set(builds[4:]) and "all" not in builds
    assert tests[0] == "ctest" and tests[-2:] == ["-L", "^(gpu|emulator)$"]
    assert os.environ["SHARPI_REQUIRE_GPU"] == "1"


@pytest.mark.parametrize("arguments", [[], ["--sanitizers", "--real"], ["--lint"]])
def test_nothing_else_runs_the_emulator(script: ModuleType, monkeypatch: pytest.MonkeyPatch,
                                        arguments: list[str]) -> None:
    monkeypatch.setattr(script, "real_tests", lambda *_: None)
    ran = commands(script, monkeypatch, *arguments)
    assert ran and not [part for command in ran for part in command if "emulator" in part.lower()]


def test_programs_for_the_emulator_are_there(script: ModuleType) -> None:
    programs = {path.stem for path in (SCRIPT.parent / "cpp" / "gpu").glob("*/test_*.cpp")}
    assert {f"test_{name}" for name in script.EMULATED} <= programs
