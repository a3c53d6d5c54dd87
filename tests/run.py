#!/usr/bin/env python3
"""Builds Sharpi, checks its sources, and runs every test: GoogleTest through ctest, then pytest. Sets up what it needs
under build/.

    python tests/run.py                # the checks of the sources, C++ and Python tests
    python tests/run.py --lint         # only the checks of the sources: see tests/lint.py
    python tests/run.py --sanitizers   # also the C++ tests under ASan and UBSan, those with threads under TSan
    python tests/run.py --real         # also real checkpoints: 340 MB, downloaded once and kept in the user's cache
    python tests/run.py --clients      # also clients of the server that are large: langchain, lm-eval, aider; 1.7 GB
    python tests/run.py --gateways     # also several servers behind nginx (if it is here), smg and Ray Serve; 0.5 GB
    python tests/run.py --gpu          # only the tests that need a GPU, C++ and Python; fails if there is none
    python tests/run.py --emulator     # only tests of kernels, on an emulated GPU: needs a CUDA toolkit, but no GPU

Other arguments go to pytest. The script needs Python 3.10 or newer and a C++17 compiler. It takes CMake and ninja from
the PATH if they are new enough, and Python packages from pip. If pip reaches no index, it uses the packages of the
Python that runs it, says in one line what is missing, and does not check the sources. If there is a CUDA toolkit, it
builds the CUDA part too, whose tests are skipped on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
BORROWED = "borrowed.pth"  # names folders of packages outside the environment
GTEST_SOURCE = Path("/usr/src/googletest")
# Programs of tests/cpp/gpu that pass on the emulator, in some minutes together. Whole models take far longer.
EMULATED = ("crossing", "delta_rows", "heads", "latent", "mamba", "many_rows", "residual", "router", "sampling",
            "scores", "streams")


def run(*command: str | Path, **options: object) -> None:
    """Runs a command, shows it, and stops everything when it fails."""
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, **{"cwd": ROOT, **options})


@dataclass(frozen=True)
class Tools:
    """What builds and tests: a virtual environment's Python, and where programs are looked for."""

    python: Path
    path: str
    borrowed: bool  # whether packages are those of the Python that runs this script

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": self.path}

    def program(self, name: str) -> str:
        found = shutil.which(name, path=self.path)
        if found is None:
            sys.exit(f"{name} is not here: install it")
        return found

    def pip(self, *arguments: str | Path) -> None:
        run(self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1", *arguments,
            env=self.environment)


def promised_cmake() -> str:
    """The oldest CMake that pyproject.toml promises to build with."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^cmake\.version = ">=([\d.]+)"', text, re.MULTILINE)
    assert found is not None, "pyproject.toml says no cmake.version"
    return found[1]


def is_new_enough(program: str, oldest: str, path: str) -> bool:
    """Whether a program is on the path, and what it says first with --version is no older than `oldest`."""
    found = shutil.which(program, path=path)
    if found is None:
        return False
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"\d+(\.\d+)+", said)
    return version is not None and numbers(version[0]) >= numbers(oldest)


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


# Prints, as JSON, which of the requirements in sys.argv are not met by what this Python sees.
UNMET = """
import json, sys
from importlib import metadata
from pip._vendor.packaging.requirements import Requirement
def met(text):
    requirement = Requirement(text)
    if requirement.marker and not requirement.marker.evaluate():
        return True
    try:
        return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False
print(json.dumps([text for text in sys.argv[1:] if not met(text)]))
"""


def unmet(python: Path, requirements: list[str]) -> list[str]:
    done = subprocess.run([python, "-c", UNMET, *requirements], check=True, capture_output=True, text=True)
    missing: list[str] = json.loads(done.stdout)
    return missing


def lists_in_pyproject() -> tuple[list[str], list[str], list[str]]:
    """What building needs, what running and testing needs, and what checks the sources, as pyproject.toml says; Python
    3.10 cannot read that format."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

    def quoted(key: str) -> list[str]:
        found = re.search(rf"^{key} = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
        assert found is not None, f"pyproject.toml has no {key}"
        return re.findall(r'"([^"]+)"', found[1])

    return quoted("requires"), [*quoted("dependencies"), *quoted("serve"), *quoted("test")], quoted("lint")


def make_environment() -> Tools:
    """A virtual environment with the build tools in it; if pip reaches no index, with those of the Python that runs
    this."""
    folder = BUILD / "venv"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    for left in folder.glob(f"lib/*/site-packages/{BORROWED}"):
        left.unlink()
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"], str(Path(sys.executable).parent)])
    building, running, linting = lists_in_pyproject()
    programs = [f"cmake>={promised_cmake()}"] if not is_new_enough("cmake", promised_cmake(), path) else []
    programs += ["ninja"] if shutil.which("ninja", path=path) is None else []
    tools = Tools(python, path, borrowed=False)
    try:
        # All at once: an environment that sees the build tools by PYTHONPATH may still lack what the tests need.
        tools.pip(*programs, *building, *running)
    except subprocess.CalledProcessError:
        print("pip reaches no index: using the packages of", sys.executable, flush=True)
        return borrow(Tools(python, path, borrowed=True), [*programs, *building, *running])
    try:
        tools.pip(*linting)
    except subprocess.CalledProcessError:
        pass  # there may be none for this machine: `lint` says so
    return tools


def borrow(tools: Tools, needed: list[str]) -> Tools:
    """Lets the environment see the packages of the Python that runs this. What is not there may lie in
    PIP_FIND_LINKS."""
    own = next(tools.python.parent.parent.glob("lib/*/site-packages"))
    seen = [entry for entry in sys.path
            if Path(entry).name in ("site-packages", "dist-packages") and Path(entry) != own]
    (own / BORROWED).write_text("".join(f"{entry}\n" for entry in seen), encoding="utf-8")
    missing = unmet(tools.python, needed)
    if missing:
        try:
            tools.pip("--no-deps", *missing)
        except subprocess.CalledProcessError:
            sys.exit(f"missing, and pip cannot fetch it: {', '.join(missing)}; connect to a package index, or name a"
                     " folder with wheels in PIP_FIND_LINKS")
    return tools


def fetch_oldest_cmake(tools: Tools) -> None:
    """Gets the oldest CMake that is promised, for the tests of the build, by the variable SHARPI_OLDEST_CMAKE."""
    version = promised_cmake()
    folder = BUILD / f"cmake-{version}"
    program = folder / "cmake" / "data" / "bin" / "cmake"
    if not program.exists():
        try:
            tools.pip("--no-deps", "--only-binary=:all:", "--target", folder, f"cmake=={version}.*")
        except subprocess.CalledProcessError:
            print(f"CMake {version}, the oldest that is promised, cannot be fetched: its tests are skipped", flush=True)
            return
    os.environ["SHARPI_OLDEST_CMAKE"] = str(program)


def ensure_googletest() -> None:
    """Installs Debian's package if there is neither an installed GoogleTest nor its source."""
    found = GTEST_SOURCE.exists() or any(Path(p).exists() for p in ("/usr/include/gtest", "/usr/local/include/gtest"))
    if found or os.environ.get("SHARPI_GTEST_SOURCE"):
        return
    if not shutil.which("apt-get") or os.geteuid() != 0:
        sys.exit("GoogleTest is not here: install libgtest-dev, or set SHARPI_GTEST_SOURCE to a copy of its source")
    run("apt-get", "update", "-q")
    run("apt-get", "install", "-q", "-y", "libgtest-dev")


def with_cuda(tools: Tools, wanted: str) -> list[str]:
    """The build's CUDA settings: AUTO, ON or OFF, for which GPUs, and with which options of the compiler."""
    if gpu_is_visible():
        return [f"SHARPI_CUDA={wanted}", "SHARPI_CUDA_ARCHITECTURES="]
    # Without a GPU to run them, the kernels are compiled only to see that they compile: for one generation, and with as
    # little optimization as the compiler offers, which takes a third of the time.
    return [f"SHARPI_CUDA={wanted}", "SHARPI_CUDA_ARCHITECTURES=90-virtual",
            *(["CMAKE_CUDA_FLAGS=-Ofc=max"] if nvcc_compiles_fast(tools) else [])]


def nvcc_compiles_fast(tools: Tools) -> bool:
    """Whether the CUDA compiler on the path has an option for that; older versions have none."""
    nvcc = shutil.which("nvcc", path=tools.path)
    listed = subprocess.run([nvcc, "--help"], capture_output=True, text=True, check=False).stdout if nvcc else ""
    return "--Ofast-compile" in listed


def gpu_is_visible() -> bool:
    """Whether the driver's own tool finds a GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    listed = subprocess.run([tool, "-L"], capture_output=True, check=False)
    return listed.returncode == 0 and listed.stdout.startswith(b"GPU ")


def configure(tools: Tools, name: str, settings: list[str]) -> Path:
    """Lets CMake prepare a build of the C++ tests in a folder of its own."""
    folder = BUILD / name
    source = os.environ.get("SHARPI_GTEST_SOURCE", str(GTEST_SOURCE))
    settings = ["CMAKE_BUILD_TYPE=Release", "SHARPI_PYTHON=OFF", "SHARPI_TESTS=ON", f"SHARPI_GTEST_SOURCE={source}",
                *settings]
    run(tools.program("cmake"), "-S", ROOT, "-B", folder, "-G", "Ninja", *(f"-D{s}" for s in settings),
        env=tools.environment)
    return folder


def lint(tools: Tools, build: Path) -> None:
    """Checks the sources, if the programs that do could be installed."""
    missing = unmet(tools.python, lists_in_pyproject()[2])
    if tools.borrowed or missing:
        print("NOT CHECKED: the sources; pip could not install", ", ".join(missing) or "what checks them", flush=True)
    else:
        run(tools.python, ROOT / "tests" / "lint.py", build, env=tools.environment)


def cpp_tests(tools: Tools, name: str, settings: list[str], *ctest_options: str,
              targets: Sequence[str] = ("all",)) -> None:
    """Builds the C++ tests and runs those that ctest's options choose."""
    folder = configure(tools, name, settings)
    run(tools.program("cmake"), "--build", folder, "--target", *targets, env=tools.environment)
    # ctest of the same CMake, started in the folder: older ones have no --test-dir.
    run(
        tools.program("ctest"),
        "--output-on-failure",
        "--no-tests=error",
        "-j",
        str(os.cpu_count() or 1),
        *ctest_options,
        env=tools.environment,
        cwd=folder,
    )


def emulator_tests(tools: Tools) -> None:
    """Runs kernels' tests on the CPU, see tests/emulator. The kernels are compiled as they are for a GPU."""
    os.environ["SHARPI_REQUIRE_GPU"] = "1"  # a test that does not find the emulator fails instead of skipping
    cpp_tests(tools, "tests-emulator", ["SHARPI_CUDA=ON", "SHARPI_CUDA_EMULATOR=ON"], "-L", "^(gpu|emulator)$",
              targets=("test_emulator", *(f"gpu_test_{name}" for name in EMULATED)))


def install(tools: Tools, settings: list[str]) -> None:
    """Installs the package, built in the folder of the C++ tests: the core and the kernels are not compiled again."""
    defines = (f"--config-settings=cmake.define.{setting}" for setting in ["SHARPI_PYTHON=ON", *settings])
    os.environ["CMAKE_GENERATOR"] = "Ninja"
    # What it depends on is there already; of borrowed packages pip would look for what they in turn ask for.
    tools.pip("--no-build-isolation", "--no-deps", f"--config-settings=build-dir={BUILD / 'tests'}", *defines, ".")


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
    return (
        "NOT TESTED: a real checkpoint could not be downloaded; the lines above that begin with NO CHECKPOINT say why"
    )


def client_tests(python: Path) -> None:
    """Runs large clients against the server, in environments without Sharpi."""
    folder = ROOT / "tests" / "clients"
    pythons = {}
    for name in ("requirements", "requirements-aider"):
        home = BUILD / f"clients-{name}"
        venv.create(home, with_pip=True)
        pythons[name] = home / "bin" / "python"
        run(pythons[name], "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r",
            folder / f"{name}.txt")
    aider = pythons["requirements-aider"].with_name("aider")
    run(pythons["requirements"], "-m", "pytest", "-q", "-rs", folder,
        env={**os.environ, "SHARPI_PYTHON": str(python), "SHARPI_AIDER": str(aider)})


def gateway_tests(tools: Tools) -> None:
    """Runs several servers behind gateways, in an environment that has these beside all that `tools` sees."""
    folder, home = ROOT / "tests" / "gateways", BUILD / "gateways"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    seen = next(tools.python.parent.parent.glob("lib/*/site-packages"))
    own = next(home.glob("lib/*/site-packages"))
    (own / BORROWED).write_text(f"import site; site.addsitedir({str(seen)!r})\n", encoding="utf-8")
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", folder / "requirements.txt")
    run(python, "-m", "pytest", "-q", "-rs", folder, env=tools.environment)


def options_and_rest() -> tuple[argparse.Namespace, list[str]]:
    """The options of this script, and the arguments for pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lint", action="store_true", help="only check the sources")
    parser.add_argument("--sanitizers", action="store_true", help="also run the C++ tests under sanitizers")
    parser.add_argument("--gpu", action="store_true", help="run only the tests that need a GPU")
    parser.add_argument("--emulator", action="store_true", help="run only tests of kernels, on an emulated GPU")
    parser.add_argument("--real", action="store_true", help="also run real checkpoints, downloaded and kept in a cache")
    parser.add_argument("--clients", action="store_true", help="also run large clients of the server")
    parser.add_argument("--gateways", action="store_true", help="also run several servers behind gateways")
    return parser.parse_known_args()


def main() -> None:
    options, pytest_arguments = options_and_rest()
    if sys.version_info < (3, 10):  # noqa: UP036  an older Python may be asked to run this
        sys.exit("Sharpi needs Python 3.10 or newer")
    if options.gpu:
        if not gpu_is_visible():
            sys.exit("--gpu: nvidia-smi lists no GPU here; without --gpu the tests that need one are skipped")
        os.environ["SHARPI_REQUIRE_GPU"] = "1"  # tests that cannot use it then fail instead of skipping
    BUILD.mkdir(exist_ok=True)
    tools = make_environment()
    ensure_googletest()
    if options.emulator:
        emulator_tests(tools)
        return
    cuda = with_cuda(tools, "ON" if options.gpu else "AUTO")
    if not options.gpu:
        lint(tools, configure(tools, "tests", cuda))
    if options.lint:
        return
    cpp_tests(tools, "tests", cuda, *(["-L", "gpu"] if options.gpu else []))
    if options.sanitizers:
        # These have the accesses and the threads of the scheduler's other tests, and take most of their time.
        long = "RowsKeepTheirKinds|APausedRequestGoesOn"
        cpp_tests(tools, "tests-asan", ["SHARPI_CUDA=OFF", "SHARPI_SANITIZE=address;undefined"], "-E", long)
        cpp_tests(tools, "tests-tsan", ["SHARPI_CUDA=OFF", "SHARPI_SANITIZE=thread"], "-R",
                  "^(ThreadPool|Scheduler|Arrivals|Conversations|Counts|HostClock|SharedPrefixes)", "-E",
                  f"{long}|SharedPrefixes.(AreComputedOnce|AnswersStayTheSame)",
                  targets=("test_thread_pool", "test_scheduler", "test_conversations", "test_counts",
                           "test_shared_prefixes"))
    install(tools, cuda)
    if not options.gpu:
        fetch_oldest_cmake(tools)
    run(tools.python, "-m", "pytest", "-q", *(["-m", "gpu"] if options.gpu else []), *pytest_arguments,
        env=tools.environment)
    untested = real_tests(tools.python, *(["-m", "gpu"] if options.gpu else [])) if options.real else None
    if options.clients:
        client_tests(tools.python)
    if options.gateways:
        gateway_tests(tools)
    if untested:
        print(untested, flush=True)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"failed: {' '.join(error.cmd)}")
