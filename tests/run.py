#!/usr/bin/env python3
"""Builds Sharpi and runs every test: GoogleTest through ctest, then pytest. Sets up what it needs under build/.

    python tests/run.py                # C++ and Python tests
    python tests/run.py --sanitizers   # also the C++ tests under ASan and UBSan, the thread pool under TSan
    python tests/run.py --real         # also real checkpoints, which are downloaded (340 MB) and kept in the user's cache
    python tests/run.py --gpu          # only the tests that need a GPU, C++ and Python; fails where none is

What is left goes to pytest. Needs Python 3.10 or newer, a C++17 compiler, and a network or pip cache for the Python
packages. Where a CUDA toolkit is, the CUDA part is built too; its tests skip themselves where no GPU is.
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


def with_cuda(wanted: str) -> list[str]:
    """The build's CUDA settings: AUTO, ON or OFF, and for which GPUs."""
    # Where no GPU will run them the kernels are compiled once, to see that they do; not once for every generation.
    architectures = "" if gpu_is_visible() else "90-virtual"
    return [f"SHARPI_CUDA={wanted}", f"SHARPI_CUDA_ARCHITECTURES={architectures}"]


def gpu_is_visible() -> bool:
    """Whether the driver's own tool finds a GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    listed = subprocess.run([tool, "-L"], capture_output=True, check=False)
    return listed.returncode == 0 and listed.stdout.startswith(b"GPU ")


def cpp_tests(python: Path, name: str, settings: list[str], *ctest_options: str, target: str = "all") -> None:
    """Builds the C++ tests in a folder of their own and runs those that ctest's options choose."""
    tools = python.parent
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    folder = BUILD / name
    source = os.environ.get("SHARPI_GTEST_SOURCE", str(GTEST_SOURCE))
    settings = ["CMAKE_BUILD_TYPE=Release", "SHARPI_PYTHON=OFF", "SHARPI_TESTS=ON", f"SHARPI_GTEST_SOURCE={source}",
                *settings]
    run(tools / "cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", *(f"-D{s}" for s in settings), env=environment)
    run(tools / "cmake", "--build", folder, "--target", target, env=environment)
    run(tools / "ctest", "--test-dir", folder, "--output-on-failure", "--no-tests=error", "-j",
        str(os.cpu_count() or 1), *ctest_options, env=environment)


def install(python: Path, settings: list[str]) -> None:
    """Installs the package, built in the folder of the C++ tests: the core and the kernels are not compiled again."""
    environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "CMAKE_GENERATOR": "Ninja"}
    defines = (f"--config-settings=cmake.define.{setting}" for setting in ["SHARPI_PYTHON=ON", *settings])
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-build-isolation",
        f"--config-settings=build-dir={BUILD / 'tests'}", *defines, ".[test]", env=environment)


def real_tests(python: Path, *options: str) -> str | None:
    """Runs real checkpoints. Returns a line for the end if some could not be fetched, which fails nothing."""
    script = ROOT / "tests" / "real" / "checkpoints.py"
    print("+", python, script, flush=True)
    fetched = subprocess.run([str(python), str(script)], check=False).returncode
    if fetched not in (0, 3):  # 3: a download failed
        sys.exit("failed: a real checkpoint is not what its hash says")
    run(python, "-m", "pytest", "-q", "-rsP", *options, "tests/real")
    if not fetched:
        return None
    return "NOT TESTED: a real checkpoint could not be downloaded; the lines above that begin with NO CHECKPOINT say why"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sanitizers", action="store_true", help="also run the C++ tests under sanitizers")
    parser.add_argument("--gpu", action="store_true", help="run only the tests that need a GPU")
    parser.add_argument("--real", action="store_true", help="also run real checkpoints, downloaded and kept in a cache")
    options, pytest_arguments = parser.parse_known_args()
    if sys.version_info < (3, 10):
        sys.exit("Sharpi needs Python 3.10 or newer")
    if options.gpu:
        if not gpu_is_visible():
            sys.exit("--gpu: nvidia-smi lists no GPU here; without --gpu the tests that need one are skipped")
        os.environ["SHARPI_REQUIRE_GPU"] = "1"  # tests that cannot use it then fail instead of skipping
    BUILD.mkdir(exist_ok=True)
    python = make_environment()
    ensure_googletest()
    cuda = with_cuda("ON" if options.gpu else "AUTO")
    cpp_tests(python, "tests", cuda, *(["-L", "gpu"] if options.gpu else []))
    if options.sanitizers:
        cpp_tests(python, "tests-asan", ["SHARPI_CUDA=OFF", "SHARPI_SANITIZE=address;undefined"])
        cpp_tests(python, "tests-tsan", ["SHARPI_CUDA=OFF", "SHARPI_SANITIZE=thread"], "-R", "ThreadPool",
                  target="test_thread_pool")
    install(python, cuda)
    run(python, "-m", "pytest", "-q", *(["-m", "gpu"] if options.gpu else []), *pytest_arguments)
    untested = real_tests(python, *(["-m", "gpu"] if options.gpu else [])) if options.real else None
    if untested:
        print(untested, flush=True)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"failed: {' '.join(error.cmd)}")
