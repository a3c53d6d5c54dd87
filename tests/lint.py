#!/usr/bin/env python3
"""Checks the sources without running them: clang-format, ruff, and clang-tidy over the C++ that is no test.

    python tests/lint.py BUILD    # BUILD: a folder that CMake has configured

The programs are those of the Python that runs this; pyproject.toml names their versions (`pip install .[lint]`). Types
are checked by pytest: see tests/python/api/test_typing.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ("python", "tests", "benchmarks")
CPP = ("cpp", "cuda", "tests/cpp", "tests/emulator", "benchmarks")
CPP_SUFFIXES = (".cpp", ".h", ".cu", ".cuh")


def said(name: str, *arguments: str | Path) -> str:
    """What a program says if it finds something, and nothing if it does not."""
    program = Path(sysconfig.get_path("scripts")) / name
    if not program.exists():
        return f"{name} is not installed beside {sys.executable}: pip install .[lint]\n"
    done = subprocess.run([program, *arguments], cwd=ROOT, check=False, capture_output=True, text=True)
    return done.stdout + done.stderr if done.returncode else ""


def format_check() -> str:
    files = sorted(path for folder in CPP for path in (ROOT / folder).rglob("*") if path.suffix in CPP_SUFFIXES)
    assert files
    return said("clang-format", "--dry-run", "-Werror", *files)


def ruff() -> str:
    return said("ruff", "check", "--quiet", *PYTHON)


def production_commands(build: Path) -> list[dict[str, str]]:
    """How the build compiles each C++ source of the product: once for each file, whatever it is compiled for."""
    commands = json.loads((build / "compile_commands.json").read_text(encoding="utf-8"))
    product = (f"{ROOT / 'cpp'}/", f"{ROOT / 'cuda'}/")
    found = {entry["file"]: entry for entry in commands
             if entry["file"].startswith(product) and entry["file"].endswith(".cpp")}
    return [found[file] for file in sorted(found)]


def clang_tidy(build: Path) -> str:
    """All files, as many at once as there are cores."""
    commands = production_commands(build)
    assert commands, f"{build} compiles nothing of the product"
    folder = build / "lint"
    folder.mkdir(exist_ok=True)
    (folder / "compile_commands.json").write_text(json.dumps(commands), encoding="utf-8")
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return "".join(threads.map(lambda entry: said("clang-tidy", "-p", folder, "--quiet", entry["file"]), commands))


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        sys.exit(__doc__)
    build = Path(arguments[0]).resolve()
    checks: dict[str, Callable[[], str]] = {
        "clang-format": format_check, "ruff": ruff, "clang-tidy": lambda: clang_tidy(build)}
    failed = []
    for name, check in checks.items():
        started = time.monotonic()
        found = check()
        print(f"{name}: {'FAILED' if found else 'sound'}, {time.monotonic() - started:.0f} s", flush=True)
        if found:
            print(found, flush=True)
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
