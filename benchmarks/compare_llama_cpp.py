"""Sharpi and llama.cpp side by side on the same GGUF files, in one run, as a markdown table.

A speed means little without a yardstick taken on the same machine in the same minutes, so this runs
both engines in turn on each file and swaps their order from round to round: a machine that warms
up, or that gets busy, then slows both alike.

    python benchmarks/compare_llama_cpp.py --llama-bench llama.cpp/build/bin/llama-bench a.gguf b.gguf
    python benchmarks/compare_llama_cpp.py --llama-bench ... --synth synth_gguf.py --synth-dir files/

With --synth the files are made first (those already in --synth-dir are kept) by calling
`SCRIPT MODEL PATH --quant QUANT [--layers N]`.

What the columns are:

* prefill, decode: tokens a second as each engine's own benchmark reports them, the model loaded and
  warm: `llama-bench -p P -n N -t T -r R` and `sharpi bench --prefill P --decode N --threads T
  --repeat R`. A call counts with the median of its repeats, and several rounds with the median of those.
  llama.cpp decodes from an empty context; so must Sharpi.
* first token: seconds of wall time of a whole process, from exec to exit, that loads the model, runs
  one token of prefill and one of decode, once each, and ends: `llama-bench -p 1 -n 1 -r 1
  --no-warmup` and `sharpi bench --prefill 1 --decode 1 --repeat 1`. That counts what a person waits
  for: starting (Python's start too), mapping, repacking of weights, the first pass and tearing down.
  The smallest of the rounds counts, with the file in the page cache (every file is read once before).
  `sharpi bench --no-warmup` runs one more pass of one token there than llama.cpp, three to its two.
  In brackets stands the first_token_seconds that Sharpi reports: the time from the start of loading to
  the end of the first pass, inside a process that already runs.

Every ratio is written so that above 1 Sharpi is the faster.
"""
from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# model, quantization, layers kept (None: all). The last is a mixture of experts cut to fit small machines.
SYNTHETIC: tuple[tuple[str, str, int | None], ...] = (
    ("qwen3-0.6b", "Q4_K_M", None),
    ("qwen3-0.6b", "Q8_0", None),
    ("smollm2-1.7b", "Q4_K_M", None),
    ("smollm2-1.7b", "Q8_0", None),
    ("qwen3-30b-a3b", "Q4_K_M", 4),
)
QUANT_SUFFIX = re.compile(r"^(?P<model>.+?)[-._](?P<quant>(?:I?Q\d\w*|MXFP4\w*|BF16|F16|F32))$", re.IGNORECASE)


class EngineError(RuntimeError):
    """An engine ended with an error, took too long, or answered something that is not its JSON."""


@dataclass(frozen=True)
class Load:
    """What is asked of both engines: tokens of prefill, tokens of decode, threads, repeats."""

    prefill: int
    decode: int
    threads: int
    repeat: int


@dataclass(frozen=True)
class Engine:
    """One side: its name, how a load becomes a command line, and how its answer becomes a Reading."""

    name: str
    command: Callable[[Path, Load, bool], list[str]]  # the bool: leave the warm-up out, if that is possible
    parse: Callable[[Any, Load], Reading]


@dataclass(frozen=True)
class Reading:
    """One answer of one engine: tokens a second, and what it says of itself."""

    prefill: float
    decode: float
    inner_first_token: float | None = None  # seconds from start of loading to first token, where reported
    about: str = ""


@dataclass
class Samples:
    """All readings of one engine on one file."""

    readings: list[Reading] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)  # seconds, one per first-token process
    inner: list[float] = field(default_factory=list)
    error: str | None = None

    def prefill(self) -> float | None:
        return statistics.median(r.prefill for r in self.readings) if self.readings else None

    def decode(self) -> float | None:
        return statistics.median(r.decode for r in self.readings) if self.readings else None

    def first_token(self) -> float | None:
        return min(self.walls) if self.walls else None


def llama_bench(binary: str, extra: list[str]) -> Engine:
    """llama.cpp through llama-bench; its JSON is a list with one entry per test."""

    def command(model: Path, load: Load, cold: bool) -> list[str]:
        line = [binary, "-m", str(model), "-p", str(load.prefill), "-n", str(load.decode),
                "-t", str(load.threads), "-r", str(load.repeat), "-o", "json"]
        return line + (["--no-warmup"] if cold else []) + extra

    def parse(answer: Any, load: Load) -> Reading:
        def speed(prompt: int, generated: int) -> float:
            for test in answer:
                if (test["n_prompt"], test["n_gen"]) == (prompt, generated):
                    return statistics.median(test["samples_ts"])
            raise KeyError(f"no test with n_prompt {prompt} and n_gen {generated}")

        first = answer[0]
        about = ", ".join(f"{key} {first[key]}" for key in
                          ("build_commit", "build_number", "type_k", "type_v", "flash_attn", "n_ubatch", "use_mmap",
                           "backends", "n_gpu_layers") if key in first)
        return Reading(speed(load.prefill, 0), speed(0, load.decode), about=about)

    return Engine("llama.cpp", command, parse)


def sharpi_bench(command_words: list[str], extra: list[str]) -> Engine:
    """Sharpi through `sharpi bench --json`."""

    def command(model: Path, load: Load, cold: bool) -> list[str]:
        return [*command_words, "bench", "-m", str(model), "--prefill", str(load.prefill),
                "--decode", str(load.decode), "--threads", str(load.threads),
                "--repeat", str(load.repeat), "--json", *(["--no-warmup"] if cold else []), *extra]

    def parse(answer: Any, load: Load) -> Reading:
        def speed(kind: str, tokens: int) -> float:
            for result in answer["results"]:
                if (result["kind"], result["tokens"]) == (kind, tokens):
                    return float(result["tokens_per_second"]["median"])
            raise KeyError(f"no result for {kind} of {tokens} tokens")

        # first_token_seconds counts from the start of loading, so load_seconds is inside it already.
        return Reading(speed("prefill", load.prefill), speed("decode", load.decode), answer.get("first_token_seconds"))

    return Engine("Sharpi", command, parse)


def run(engine: Engine, model: Path, load: Load, *, cold: bool, timeout: float) -> tuple[Reading, float]:
    """Run an engine once; its reading, and the wall seconds of the process. Raises EngineError."""
    line = engine.command(model, load, cold)
    start = time.perf_counter()
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"{shlex.join(line)}: {error}") from error
    wall = time.perf_counter() - start
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it said nothing"]
        raise EngineError(f"{shlex.join(line)} ended with {done.returncode}: {last[0]}")
    try:
        return engine.parse(json.loads(done.stdout), load), wall
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise EngineError(f"{shlex.join(line)} gave an answer that cannot be read: {error!r}") from error


def warm_page_cache(model: Path) -> None:
    """Read the file once, so that neither engine pays for the disk."""
    with model.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def measure(engines: list[Engine], model: Path, load: Load, rounds: int, timeout: float) -> dict[str, Samples]:
    """All rounds of both engines on one file. An engine that fails is not asked again on this file."""
    warm_page_cache(model)
    samples = {engine.name: Samples() for engine in engines}
    single = Load(prefill=1, decode=1, threads=load.threads, repeat=1)
    for number in range(rounds):
        order = engines if number % 2 == 0 else engines[::-1]
        for cold in (True, False):
            for engine in order:
                mine = samples[engine.name]
                if mine.error:
                    continue
                note(f"{model.stem}: round {number + 1} of {rounds}, {engine.name}, "
                     f"{'first token' if cold else 'speed'}, load average {os.getloadavg()[0]:.2f}")
                try:
                    reading, wall = run(engine, model, single if cold else load, cold=cold, timeout=timeout)
                except EngineError as error:
                    mine.error = str(error)
                    note(f"  {error}")
                    continue
                if not cold:
                    mine.readings.append(reading)
                else:
                    mine.walls.append(wall)
                    if reading.inner_first_token is not None:
                        mine.inner.append(reading.inner_first_token)
    return samples


def synthesize(script: Path, folder: Path, python: str) -> list[Path]:
    """Make the SYNTHETIC files that are not there yet; the paths of all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for model, quant, layers in SYNTHETIC:
        path = folder / f"{model}{f'-{layers}l' if layers else ''}-{quant}.gguf"
        paths.append(path)
        if path.exists():
            continue
        # A file half written must not pass for a whole one in the next run.
        partial = path.with_suffix(".partial")
        line = [python, str(script), model, str(partial), "--quant", quant]
        note(f"making {path}")
        subprocess.run(line + (["--layers", str(layers)] if layers else []), check=True, stderr=subprocess.DEVNULL)
        partial.rename(path)
    return paths


def name_and_quant(model: Path) -> tuple[str, str]:
    """'qwen3-0.6b-Q4_K_M.gguf' is ('qwen3-0.6b', 'Q4_K_M'); without such an ending the quant is '?'."""
    match = QUANT_SUFFIX.match(model.stem)
    return (match["model"], match["quant"]) if match else (model.stem, "?")


def number(value: float | None, unit: str = "") -> str:
    """Three or more significant digits, the unit after it; a dash if there is no value."""
    if value is None:
        return "–"
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 10 else 2}f}{unit}"


def ratio(over: float | None, under: float | None) -> str:
    """over / under to three significant digits, a dash if one of them is missing."""
    return f"{over / under:#.3g}".rstrip(".") if over is not None and under else "–"


def table(results: dict[Path, dict[str, Samples]], load: Load) -> str:
    """The markdown table, one row a file."""
    head = ["model", "quant"]
    for what in (f"prefill {load.prefill}, tok/s", f"decode {load.decode}, tok/s", "first token"):
        head += [f"{what}: Sharpi", "llama.cpp", "ratio"]
    lines = ["| " + " | ".join(head) + " |", "| --- | --- |" + " ---: |" * (len(head) - 2)]
    for model, samples in results.items():
        ours, theirs = samples["Sharpi"], samples["llama.cpp"]
        inner = f" ({min(ours.inner):.2f} s)" if ours.inner else ""
        cells = [*name_and_quant(model),
                 number(ours.prefill()), number(theirs.prefill()), ratio(ours.prefill(), theirs.prefill()),
                 number(ours.decode()), number(theirs.decode()), ratio(ours.decode(), theirs.decode()),
                 number(ours.first_token(), " s") + inner, number(theirs.first_token(), " s"),
                 ratio(theirs.first_token(), ours.first_token())]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def conditions(load: Load, rounds: int, loads: list[float], results: dict[Path, dict[str, Samples]]) -> str:
    """Where and how it was measured, in a few lines to stand above the table."""
    lines = [f"{cpu_name()}, {os.cpu_count()} logical CPUs; {load.threads} threads; rounds: {rounds}, "
             f"repeats in each: {load.repeat}; load average before each file: "
             + ", ".join(f"{value:.2f}" for value in loads)]
    for samples in results.values():
        abouts = [reading.about for reading in samples["llama.cpp"].readings]
        if abouts:
            lines.append(f"llama.cpp: {abouts[0]}")
            break
    return "\n\n".join(lines)


def cpu_name() -> str:
    """The processor as the system calls it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def note(text: str) -> None:
    """Progress goes to stderr, so that stdout is the table alone."""
    print(text, file=sys.stderr, flush=True)


def as_json(results: dict[Path, dict[str, Samples]]) -> dict[str, Any]:
    """Every single reading, for whoever wants to see the spread."""
    return {model.stem: {name: {"prefill": [r.prefill for r in s.readings], "decode": [r.decode for r in s.readings],
                                "first_token_wall": s.walls, "first_token_inner": s.inner, "error": s.error}
                         for name, s in samples.items()}
            for model, samples in results.items()}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="GGUF files to measure")
    parser.add_argument("--llama-bench", required=True, help="path of llama.cpp's llama-bench")
    parser.add_argument("--sharpi", default="sharpi", help="the command that starts Sharpi, words split as in a shell")
    parser.add_argument("--synth", type=Path, help="script that writes synthetic GGUF files")
    parser.add_argument("--synth-dir", type=Path, default=Path("bench-files"), help="where those files lie")
    parser.add_argument("--synth-python", default=sys.executable, help="a Python with what that script needs")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3, help="repeats within one call of an engine")
    parser.add_argument("--rounds", type=int, default=2, help="calls of each engine per file, alternating")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds one call may take")
    parser.add_argument("--llama-args", default="", help="more arguments for llama-bench")
    parser.add_argument("--sharpi-args", default="", help="more arguments for sharpi bench")
    parser.add_argument("--json", type=Path, help="also write every reading here")
    arguments = parser.parse_args(argv)
    if not arguments.files and not arguments.synth:
        parser.error("give GGUF files, or --synth with the script that makes some")
    if min(arguments.threads, arguments.prefill, arguments.decode, arguments.repeat, arguments.rounds) < 1:
        parser.error("threads, prefill, decode, repeat and rounds must be at least 1")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    load = Load(arguments.prefill, arguments.decode, arguments.threads, arguments.repeat)
    engines = [llama_bench(arguments.llama_bench, shlex.split(arguments.llama_args)),
               sharpi_bench(shlex.split(arguments.sharpi), shlex.split(arguments.sharpi_args))]
    files = list(arguments.files)
    if arguments.synth:
        files += synthesize(arguments.synth, arguments.synth_dir, arguments.synth_python)
    results: dict[Path, dict[str, Samples]] = {}
    loads: list[float] = []
    for model in files:
        loads.append(os.getloadavg()[0])
        results[model] = measure(engines, model, load, arguments.rounds, arguments.timeout)
    print(conditions(load, arguments.rounds, loads, results), table(results, load), sep="\n\n")
    failures = [f"{name} on {model.name}: {samples.error}" for model, both in results.items()
                for name, samples in both.items() if samples.error]
    if failures:
        print("\n" + "\n".join(f"- failed: {failure}" for failure in failures))
    if arguments.json:
        arguments.json.write_text(json.dumps(as_json(results), indent=1), encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
