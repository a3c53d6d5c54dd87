#!/usr/bin/env python3
"""Builds Sharpi and runs every test: GoogleTest through ctest, then pytest. Sets up what it needs under build/.

    python tests/run.py                # C++ and Python tests
    python tests/run.py --sanitizers   # also the C++ tests under ASan and UBSan, the thread pool under TSan

Needs Python 3.10 or newer, a C++17 compiler, and a network or pip cache for the Python packages.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
GTEST_SOURCE = Path("/usr/src/googletest")


def run(*command: str | Path, **options: object) -> None:
    """Runs a command, shows it, and stops everything when it fails."""
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, cwd=ROOT, **options)


def make_environment() -> Path:
    """The virtual environment's Python, with the build tools in it."""
    folder = BUILD / "venv"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "cmake>=3.18", "ninja",
        "scikit-build-core>=0.10", "pybind11>=2.12")
    return python


def ensure_googletest() -> None:
    """Installs Debian's package where there is neither an installed GoogleTest nor its source."""
    found = GTEST_SOURCE.exists() or any(Path(p).exists() for p in ("/usr/include/gtest", "/usr/local/include/gtest"))
    if found or os.environ.get("SHARPI_GTEST_SOURCE"):
        return
    if not shutil.which("apt-get") or os.geteuid() != 0:
        sys.exit("GoogleTest is not here: install libgtest-dev, or set SHARPI_GTEST_SOURCE to a copy of its source")
    run("apt-get", "update", "-q")
    run("apt-get", "install", "-q", "-y", "libgtest-dev")


def cpp_tests(python: Path, name: str, *options: str, target: str = "all", pattern: str = ".") -> None:
    """Builds the C++ tests in a folder of their own and runs those whose names match `pattern`."""
    tools = python.parent
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    folder = BUILD / name
    source = os.environ.get("SHARPI_GTEST_SOURCE", str(GTEST_SOURCE))
    run(tools / "cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "-DSHARPI_PYTHON=OFF", "-DSHARPI_TESTS=ON",
        f"-DSHARPI_GTEST_SOURCE={source}", *options, env=environment)
    run(tools / "cmake", "--build", folder, "--target", target, env=environment)
    run(tools / "ctest", "--test-dir", folder, "--output-on-failure", "--no-tests=error", "-R", pattern,
        "-j", str(os.cpu_count() or 1), env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sanitizers", action="store_true", help="also run the C++ tests under sanitizers")
    options, pytest_arguments = parser.parse_known_args()
    if sys.version_info < (3, 10):
        sys.exit("Sharpi needs Python 3.10 or newer")
    BUILD.mkdir(exist_ok=True)
    python = make_environment()
    ensure_googletest()
    cpp_tests(python, "tests", "-DCMAKE_BUILD_TYPE=Release")
    if options.sanitizers:
        cpp_tests(python, "tests-asan", "-DCMAKE_BUILD_TYPE=Release", "-DSHARPI_SANITIZE=address;undefined")
        cpp_tests(python, "tests-tsan", "-DCMAKE_BUILD_TYPE=Release", "-DSHARPI_SANITIZE=thread",
                  target="test_thread_pool", pattern="ThreadPool")
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-build-isolation", ".[test]")
    run(python, "-m", "pytest", "-q", *pytest_arguments)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"failed: {' '.join(error.cmd)}")
