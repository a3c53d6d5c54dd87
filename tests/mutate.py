#!/usr/bin/env python3
"""Changes the source in small ways, one at a time, and says which changes no test notices.

    python tests/mutate.py --python 60 --cpp 40 --seed 1 --save before.json  # draw changes, run them
    python tests/mutate.py --replay before.json --only-survivors             # the same changes on today's source
    python tests/mutate.py --list --python 10                                # show them, run nothing

Everything happens in a copy of the tracked files under build/mutate; the work tree is never touched. C++ needs CMake
and Ninja, Python the built module beside python/sharpi. A change counts as noticed when the tests of its file fail,
crash or run over their time; if those pass, a C++ change is held against all C++ tests (not with --quick). One that
does not compile counts for nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from mutation_sites import Site, cpp_sites, python_sites

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / os.environ.get("SHARPI_MUTATE", "mutate")  # a name for each that runs at the same time
BUILT = TREE / "build" / "tests"
MEMORY = 24 << 30  # address space of a test: a changed loop may allocate forever
CPU_SECONDS, SECONDS = 180, 1800  # of a test program: the first whatever else runs here, the second for one that sleeps
COMPILER = "the compiler"

# The tests of each file: names of pytest files and of C++ test programs, without "test_".
PYTHON_TESTS = {
    "session": "where_text_ends model_api chat_session drafts engine",
    "chat": "chat_template chat_session",
    "tokenizer": "tokenizer",
    "gguf": "gguf corruption dequantize",
    "planner": "planner placement partial_plans expert_plans plan_file",
    "placement": "placement prediction partial_plans expert_plans planner",
    "plan": "plan_file planner cli partial_plans",
    "heat_map": "heat_map experts_command",
    "expert_stats": "expert_stats experts_command model_api",
    "drafts": "drafts model_api",
    "prediction": "prediction partial_plans expert_plans",
    "prompt_modes": "planner plan_file",
    "storage": "expert_stats cli hardware_profile",
    "model": "model_api engine drafts expert_stats",
}
CPP_TESTS = {
    "sampler": "sampler drafts",
    "sample": "sample sampler",
    "sampling_rule": "sample sampler",
    "session": "draft_sessions recurrent_sessions row_kinds drafts engine",
    "cached_sequence": "row_kinds recurrent_sessions draft_sessions",
    "model_runner": "drafts row_kinds session_threads",
    "drafter": "drafts draft_sessions prediction_layer",
    "kv_cache": "kv_cache drafts recurrent_sessions",
    "recurrent_state": "recurrent_state recurrent_sessions",
    "allocator": "allocator allocator_random memory",
    "weight_stream": "weight_stream expert_stream",
    "weight_group": "weight_group weight_stream expert_stream",
    "piece_ring": "weight_group weight_stream expert_stream",
    "host_memory": "host_memory memory",
    "expert_slots": "expert_slots expert_slots_random expert_slot_budget",
    "expert_pool": "expert_pool expert_slots expert_slots_random",
    "slot_memory": "expert_slot_budget expert_slots",
    "expert_policy": "expert_policy expert_slots",
    "expert_profiler": "expert_profiler",
    "expert_prefetcher": "expert_prefetcher",
    "placement": "placement homes",
    "memory_plan": "placement memory engine",
    "placer": "homes placement",
    "read_spec": "model_spec",
    "metadata": "model_spec",
    "architecture": "model_spec",
    "weights": "engine model_spec",
    "dtype": "dequantize model_spec",
    "workspace": "gpu_scratch placement",
    "step_limits": "placement",
    "forward_pass": "engine drafts prediction_layer",
    "host_experts": "host_experts expert_shares",
    "gpu_scratch": "gpu_scratch placement",
    "packed_shape": "packed_layout placement",
}
CPP_FILES = (
    "cpp/core/dtype.cpp",
    "cpp/core/rules/sampling_rule.h",
    "cpp/memory/*.cpp",
    "cpp/memory/stream/*.cpp",
    "cpp/experts/*.cpp",
    "cpp/experts/cache/*.cpp",
    "cpp/model/*.cpp",
    "cpp/cpu/sample.cpp",
    "cpp/engine/texts/sampler.cpp",
    "cpp/engine/session.cpp",
    "cpp/engine/scheduler/scheduler.cpp",
    "cpp/engine/texts/continuation.cpp",
    "cpp/engine/texts/held_text.cpp",
    "cpp/engine/texts/shared_steps.cpp",
    "cpp/engine/texts/text_passes.cpp",
    "cpp/engine/texts/cached_sequence.cpp",
    "cpp/engine/model_runner.*",
    "cpp/engine/texts/drafter.cpp",
    "cpp/placement/placement.cpp",
    "cpp/placement/placer.cpp",
    "cpp/planning/memory_plan.cpp",
    "cpp/operations/step_limits.cpp",
    "cpp/layers/forward_pass.cpp",
    "cuda/plan/gpu_scratch.cpp",
    "cuda/plan/workspace.cpp",
    "cuda/kernels/formats/packed_shape.h",
)


@dataclass
class Result:
    site: Site
    killed: bool
    by: str  # the tests that noticed
    seconds: float

    @property
    def counts(self) -> bool:
        return self.by != COMPILER


def make_tree(base: str) -> None:
    """A copy of the tracked files as they are at `base`, or in the work tree if it is empty."""
    if (TREE / "tests").exists():
        for entry in TREE.iterdir():
            if entry.name != "build":
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    TREE.mkdir(parents=True, exist_ok=True)
    if base:
        archive = subprocess.run(["git", "archive", base], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "x"], cwd=TREE, input=archive, check=True)
    else:
        names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, check=True,
                               capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (TREE / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, TREE / name)
    for module in (ROOT / "python" / "sharpi").glob("_core*.so"):
        shutil.copy2(module, TREE / "python" / "sharpi")


def python_file(tree: Path, name: str) -> Path:
    """The module of that name, outside the command line's."""
    return next(path for path in (tree / "python" / "sharpi").rglob(f"{name}.py") if "cli" not in path.parts)


def draw(tree: Path, python: int, cpp: int, seed: int) -> list[Site]:
    """Draws changes to Python and to C++: a file at random, then a place in it; no line twice."""
    chooser = random.Random(seed)
    sites = []
    for count, files, find in ((python, [python_file(tree, name) for name in PYTHON_TESTS], python_sites),
                               (cpp, sorted(p for glob in CPP_FILES for p in tree.glob(glob)), cpp_sites)):
        found = {path: find(path, tree) for path in files}
        files = [path for path in files if found[path]]
        drawn: list[Site] = []
        while len(drawn) < count:
            site = chooser.choice(found[chooser.choice(files)])
            if all((other.file, other.line) != (site.file, site.line) for other in drawn):
                drawn.append(site)
        sites += drawn
    return sites


def limits() -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def passes(command: list[str], seconds: float = SECONDS) -> bool:
    """Whether a test command succeeds in its time; all that it started ends with it."""
    environment = {**os.environ, "PYTHONPATH": str(TREE / "python"), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(command, cwd=TREE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               stdin=subprocess.DEVNULL, env=environment, preexec_fn=limits)
    try:
        return process.wait(timeout=seconds) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def pytest_file(name: str) -> Path | None:
    return next((TREE / "tests" / "python").glob(f"*/test_{name}.py"), None)


def pytest_passes(name: str) -> bool:
    return passes([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
                   str(pytest_file(name))])


def python_tests(site: Site) -> list[str]:
    names = PYTHON_TESTS[Path(site.file).stem].split()
    return [name for name in names if pytest_file(name) is not None]


def python_killer(site: Site) -> str:
    """The pytest file that notices the change, or nothing."""
    return next((f"test_{name}.py" for name in python_tests(site) if not pytest_passes(name)), "")


def require_sound(sites: list[Site], quick: bool) -> None:
    """Ends the program if tests fail with no change made: they would notice anything."""
    names = sorted({name for site in sites if site.file.endswith(".py") for name in python_tests(site)})
    broken = [name for name in names if not pytest_passes(name)]
    cpp = [site for site in sites if not site.file.endswith(".py")]
    if cpp and not build():
        sys.exit("the unchanged source does not build")
    programs = {name for site in cpp for name in (cpp_tests(site) if quick else cpp_programs())}
    broken += [name for name in sorted(programs) if not cpp_passes(name)]
    if broken:
        sys.exit(f"these tests fail with no change made: {' '.join(broken)}")


def build(*targets: str) -> bool:
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") or "cmake"
    if not (BUILT / "build.ninja").exists():
        subprocess.run([cmake, "-S", str(TREE), "-B", str(BUILT), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
                        "-DSHARPI_PYTHON=OFF", "-DSHARPI_TESTS=ON", "-DSHARPI_CUDA=OFF"], check=True,
                       stdout=subprocess.DEVNULL)
    return subprocess.run([cmake, "--build", str(BUILT), "--target", *(targets or ("all",))], stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL, check=False).returncode == 0


def cpp_programs() -> list[str]:
    return sorted(path.stem for path in (TREE / "tests" / "cpp").glob("test_*.cpp"))


def cpp_passes(name: str) -> bool:
    return passes([str(BUILT / "tests" / "cpp" / name), "--gtest_brief=1"])


def cpp_tests(site: Site) -> list[str]:
    return [f"test_{name}" for name in CPP_TESTS[Path(site.file).stem].split() if f"test_{name}" in cpp_programs()]


def cpp_killer(site: Site, quick: bool) -> str:
    """The C++ test program that notices the change, or nothing."""
    first = cpp_tests(site)
    others = [] if quick else [name for name in cpp_programs() if name not in first]
    for names in (first, others):
        if names and not build(*names):
            return COMPILER
        for name in names:
            if not cpp_passes(name):
                return name
    return ""


def run(site: Site, quick: bool) -> Result | None:
    """What became of a change; `None` if today's source has no such place."""
    path = TREE / site.file
    original = path.read_text(encoding="utf-8")
    changed = site.applied(original)
    if changed is None:
        return None
    started = time.monotonic()
    try:
        path.write_text(changed, encoding="utf-8")
        by = python_killer(site) if site.file.endswith(".py") else cpp_killer(site, quick)
    finally:
        path.write_text(original, encoding="utf-8")
    return Result(site, bool(by), by, time.monotonic() - started)


def save(results: list[Result], path: str | None) -> None:
    if path:
        rows = [{**asdict(r.site), "killed": r.killed, "by": r.by} for r in results]
        Path(path).write_text(json.dumps(rows, indent=1), encoding="utf-8")


def load(path: str, survivors: bool) -> list[Site]:
    rows = json.loads(Path(path).read_text(encoding="utf-8"))
    return [Site(row["file"], row["line"], row["kind"], row["before"], row["after"], row["which"]) for row in rows
            if not (survivors and row["killed"])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=int, default=0, metavar="N", help="changes to Python files")
    parser.add_argument("--cpp", type=int, default=0, metavar="N", help="changes to C++ files")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--base", default="", metavar="REV", help="the commit to change; without it, the work tree")
    parser.add_argument("--save", metavar="FILE", help="write what became of each change")
    parser.add_argument("--replay", metavar="FILE", help="run the changes of such a file")
    parser.add_argument("--only-survivors", action="store_true", help="of --replay, only those that no test noticed")
    parser.add_argument("--quick", action="store_true", help="hold a C++ change against the tests of its file only")
    parser.add_argument("--list", action="store_true", help="show the changes and run nothing")
    options = parser.parse_args()
    make_tree(options.base)
    sites = (load(options.replay, options.only_survivors) if options.replay
             else draw(TREE, options.python, options.cpp, options.seed))
    results: list[Result] = []
    if not options.list:
        require_sound(sites, options.quick)
    for number, site in enumerate(sites, 1):
        if options.list:
            print(site)
            continue
        result = run(site, options.quick)
        if result is None:
            print(f"{number}/{len(sites)} gone      {site}", flush=True)
            continue
        results.append(result)
        noticed = f"{'killed   ' if result.counts else 'refused  '} {site}  [{result.by}]"
        what = noticed if result.killed else f"SURVIVED  {site}"
        print(f"{number}/{len(sites)} {result.seconds:5.0f} s {what}", flush=True)
        save(results, options.save)
    if results:
        print(f"{sum(not r.killed for r in results)} of {sum(r.counts for r in results)} changes survive")
    return 0


if __name__ == "__main__":
    sys.exit(main())
