"""Two builds of Sharpi, old and new, on the same files on one machine in one run: is the new one slower anywhere?

Each build is a folder that holds an importable `sharpi` with its native module. Each round of a build runs in a fresh
process; the two builds take turns (old, new, old, new, ...), so a machine that changes changes both.

    python benchmarks/compare_builds.py --old OLD/python --new python MODEL.gguf MODEL.gguf@all,12GiB [--rounds 5]
    python benchmarks/compare_builds.py --show FILE.json ...

Behind a model's `@` stand the amounts of VRAM to measure it with (`all`: no limit). One process makes all measurements
of one build with one model and one amount of VRAM. `--measure` chooses them; `NAME:N` makes one in the first N rounds
only:

* load: seconds of `Model.load`, and from its beginning to the first token after a prompt of 64 tokens;
* decode: tokens/s after a prompt of 64 tokens (greedy; drawn for mixtures of experts, see `Benchmark.decode`);
* prefill: tokens/s of a prompt of --prefill tokens;
* first: milliseconds from a prompt to its first token, in a fresh session, for several lengths of prompts;
* rest: the same, of prompts whose first 512 tokens the session has, for several numbers of further tokens;
* drafts: milliseconds of steps with 1 and 2 drafted tokens, and these relative to plain steps (see `drafts.py`);
* turns: a conversation in one session. Each turn adds 64 tokens to the prompt and draws an answer of 128. Milliseconds
  from each prompt to its first token, and the tokens that were evaluated for it: a build that evaluates the answer's
  tokens again as a part of the next prompt shows it here.

Within a process each measurement is made once to warm up, then --repeat times, and the median counts (load: once;
turns: once, after a short conversation). Prompts are random tokens, others in each repetition, the same for both
builds. The tables have the medians of the rounds, the ratio of these, and the range of each build's rounds. The last
column says where the new build is slower by more than --tolerance, and whether its median is still within the old
build's range. The same folder given twice shows how much of a difference is noise.

Files of random weights should be treated with `skew_routing.py --skew 0` if they have experts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compare_llama_cpp import cpu_name, note, number, warm_page_cache

if TYPE_CHECKING:
    from sharpi import Model
    from sharpi.generation import Timing
    from sharpi.session import Session

BUILDS = ("old", "new")
PROMPT = 64  # tokens before those that are measured
FIRST = (1, 5, 8, 9, 64, 129, 300)  # lengths of prompts
HELD, REST = 512, (1, 8, 16, 33, 64, 100, 128, 200)  # tokens that a session has, and those that it has to compute
TURN_PROMPT, TURN_ANSWER = 64, 128  # tokens
# What --quick makes of the options: enough to see that everything runs.
QUICK = {"decode": 32, "prefill": 256, "draft_steps": 8, "turns": 3, "repeat": 1}


@dataclass(frozen=True)
class Job:
    """A model and the VRAM it may take, None: no limit."""

    model: str
    vram: str | None

    @property
    def title(self) -> str:
        return f"{Path(self.model).stem}, {self.vram or 'no limit of VRAM'}"


# --- In the process that measures one build ------------------------------------------------------------------------

class Prompts:
    """Random prompts: the same ones in every process, and no two alike in one process."""

    def __init__(self, vocabulary: int) -> None:
        import numpy as np

        self._random, self._vocabulary = np.random.default_rng(0), vocabulary

    def next(self, tokens: int) -> list[int]:
        return self._random.integers(0, self._vocabulary, tokens).tolist()


def prompt_timing(session: Session, prompt: list[int]) -> Timing:
    """What a prompt and its first token take."""
    generation = session.generate(prompt, max_tokens=1, temperature=0.0, draft="off")
    for _ in generation:
        pass
    return generation.timing


def first_token(model: Model, prompt: list[int]) -> float:
    """Seconds from a prompt to its first token, in a fresh session."""
    return prompt_timing(model.session(), prompt).prompt_seconds


def medians(repeat: int, *measure: Callable[[], float]) -> list[float]:
    """The medians of what functions return, which are called in turn, once to warm up and then `repeat` times."""
    rows = [[function() for function in measure] for _ in range(repeat + 1)][1:]
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def measure_decode(model: Model, prompts: Prompts, options: argparse.Namespace) -> dict[str, float]:
    from sharpi.benchmark import Benchmark

    benchmark = Benchmark(model)
    seconds, = medians(options.repeat, lambda: benchmark.decode(PROMPT, options.decode))
    return {f"decode of {options.decode}, tokens/s": options.decode / seconds}


def measure_prefill(model: Model, prompts: Prompts, options: argparse.Namespace) -> dict[str, float]:
    seconds, = medians(options.repeat, lambda: first_token(model, prompts.next(options.prefill)))
    return {f"prefill of {options.prefill:,}, tokens/s": options.prefill / seconds}


def measure_first(model: Model, prompts: Prompts, options: argparse.Namespace) -> dict[str, float]:
    # In turn: what one length leaves in a cache of experts meets all others alike.
    found = medians(options.repeat, *(lambda n=n: first_token(model, prompts.next(n)) for n in FIRST))
    return {f"first token after {tokens}, ms": 1e3 * seconds for tokens, seconds in zip(FIRST, found, strict=True)}


def measure_rest(model: Model, prompts: Prompts, options: argparse.Namespace) -> dict[str, float]:
    session, held = model.session(), prompts.next(HELD)

    def timing(tokens: int) -> Timing:
        return prompt_timing(session, held + prompts.next(tokens))

    timing(1)
    found = medians(options.repeat, *(lambda n=n: timing(n).prompt_seconds for n in REST))
    readings = {f"first token after {tokens} more, ms": 1e3 * seconds
                for tokens, seconds in zip(REST, found, strict=True)}
    readings[f"{REST[0]} more, tokens evaluated"] = timing(REST[0]).prompt_tokens
    return readings


def measure_drafts(model: Model, prompts: Prompts, options: argparse.Namespace) -> dict[str, float]:
    from drafts import costs

    asked = argparse.Namespace(prompt=None, depth=PROMPT, tokens=options.draft_steps, runs=options.repeat)
    readings = {}
    for cost in costs(model, asked):
        kind = "plain" if cost.draft == "off" else f"{cost.draft} {cost.tokens}"
        readings[f"step, {kind}, ms"] = cost.milliseconds
        if cost.draft != "off":
            readings[f"step, {kind}, of a plain one"] = cost.ratio
    return readings


def measure_turns(model: Model, prompts: Prompts, options: argparse.Namespace) -> dict[str, float]:
    conversation(model, prompts, 2, 8)
    turns = conversation(model, prompts, options.turns, TURN_ANSWER)
    readings = {f"turn {index}, first token, ms": 1e3 * seconds for index, (seconds, _) in enumerate(turns, 1)}
    if len(turns) > 1:
        seconds, evaluated = (statistics.mean(column) for column in zip(*turns[1:], strict=True))
        readings |= {"later turns, first token, ms": 1e3 * seconds, "later turns, tokens evaluated": evaluated}
    return readings


def conversation(model: Model, prompts: Prompts, turns: int, answer: int) -> list[tuple[float, int]]:
    """For each turn of one session: the seconds to the first token, and the tokens that were evaluated for it."""
    from sharpi.errors import ModelFileError

    try:
        never = {token: float("-inf") for token in model.tokenizer.stop_ids}  # answers of one length
    except ModelFileError:
        never = {}
    session, text, found = model.session(), [], []
    for turn in range(turns):
        text += prompts.next(TURN_PROMPT)
        generation = session.generate(text, max_tokens=answer, temperature=1.0, top_k=40, top_p=1.0, min_p=0.0,
                                      seed=turn, draft="off", logit_bias=never)
        ids = [token.id for token in generation]
        timing = generation.timing
        text += ids[: timing.generated_tokens]  # a rest of text at the end comes with the last id again
        found.append((timing.prompt_seconds, timing.prompt_tokens))
    return found


# Besides "load", with which every process begins.
MEASURES: dict[str, Callable[[Model, Prompts, argparse.Namespace], dict[str, float]]] = {
    "decode": measure_decode, "prefill": measure_prefill, "first": measure_first, "rest": measure_rest,
    "drafts": measure_drafts, "turns": measure_turns}
MEASUREMENTS = ("load", *MEASURES)


def load(options: argparse.Namespace) -> tuple[Model, dict[str, float]]:
    """The model, and what loading took."""
    from sharpi import Model

    context = 256 + max(options.prefill, options.turns * (TURN_PROMPT + TURN_ANSWER),
                        PROMPT + max(options.decode, options.draft_steps), *FIRST, HELD + max(REST))
    started = time.perf_counter()
    model = Model.load(options.models[0], device=options.device, vram=options.vram, context=context,
                       threads=options.threads, profile=options.profile)
    loaded = time.perf_counter()
    first_token(model, Prompts(model.spec.vocab_size).next(PROMPT))
    return model, {"load, s": loaded - started, "load to first token, s": time.perf_counter() - started}


def measure_one(options: argparse.Namespace) -> dict[str, Any]:
    """All measurements of one build, in this process. One that fails does not stop the others."""
    import sharpi
    from sharpi.errors import SharpiError

    asked = options.one.resolve()
    if Path(sharpi.__file__).resolve().parent.parent != asked:
        raise SystemExit(f"{asked} has no sharpi package: {sharpi.__file__} was imported")
    model, loading = load(options)
    with model:
        readings, failed, prompts = loading if "load" in options.measure else {}, {}, Prompts(model.spec.vocab_size)
        for name in options.measure:
            try:
                readings |= MEASURES[name](model, prompts, options) if name in MEASURES else {}
            except SharpiError as error:
                failed[name] = str(error)
        if model.device != "cpu":
            readings["VRAM taken, GiB"] = model.stats()["vram_bytes"] / 2**30
        return {"device": model.device_name, "batch": model.plan.batch, "readings": readings, "failed": failed}


# --- In the process that compares ----------------------------------------------------------------------------------

def jobs(models: list[str]) -> Iterator[Job]:
    """What `FILE[@VRAM,VRAM...]` asks for."""
    for text in models:
        path, at, amounts = text.rpartition("@")
        if not at or Path(text).exists():
            path, amounts = text, "all"
        for amount in amounts.split(","):
            yield Job(path, None if amount == "all" else amount)


def rounds_of(asked: list[str], rounds: int) -> dict[str, int]:
    """In how many rounds each measurement is made: what `NAME` and `NAME:N` ask for."""
    chosen = {}
    for text in asked:
        name, colon, count = text.partition(":")
        if name not in MEASUREMENTS or (colon and not count.isdigit()):
            raise SystemExit(f"--measure takes {', '.join(MEASUREMENTS)}, each with :N or without, not {text!r}")
        chosen[name] = min(rounds, int(count)) if colon else rounds
    return chosen


def fresh(build: Path, job: Job, measure: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """One build's reading of one job, in a process of its own; {"error": ...} if it fails."""
    command = [sys.executable, __file__, "--one", str(build), job.model, "--device", options.device,
               "--measure", *measure]
    for name in ("vram", "threads", "profile", *QUICK):
        value = job.vram if name == "vram" else getattr(options, name)
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    path = os.pathsep.join(filter(None, [str(build), os.environ.get("PYTHONPATH")]))
    started = time.perf_counter()
    try:
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
                              timeout=options.timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {options.timeout:g} s"}
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        return {"error": f"exit code {done.returncode}: {last[0]}"}
    return {**json.loads(done.stdout.splitlines()[-1]), "process_seconds": time.perf_counter() - started}


def compare(job: Job, options: argparse.Namespace, until: float,
            keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All rounds of both builds. Ends early if a round would not be over at `until` (`time.monotonic`), and if a
    process fails. `keep` is called with what was found so far."""
    if not options.in_memory:
        warm_page_cache(Path(job.model))
    found: dict[str, Any] = {**asdict(job), "title": job.title, "old": [], "new": []}
    chosen, longest = rounds_of(options.measure, options.rounds), 0.0
    for index in range(options.rounds):
        started = time.monotonic()
        if started + longest > until:
            over = f"{index} of {options.rounds} rounds: the time was over"
            found["note"] = "; ".join(filter(None, [found.get("note"), over]))
            break
        measure = [name for name, rounds in chosen.items() if index < rounds]
        for side in BUILDS:
            reading = fresh(getattr(options, side).resolve(), job, measure, options)
            if failed := reading.get("failed") or reading.get("error"):
                found["note"] = f"the {side} build failed: {failed}"
                note(f"{job.title}: {found['note']}")
            if "error" in reading:
                keep(found)
                return found
            found[side].append(reading)
            note(f"{job.title}: round {index + 1} of {options.rounds}, {side}, {reading['process_seconds']:.1f} s")
            keep(found)
        longest = max(longest, time.monotonic() - started)
    keep(found)
    return found


def values(readings: list[dict[str, Any]], name: str) -> list[float]:
    return [reading["readings"][name] for reading in readings if name in reading["readings"]]


def judgement(name: str, old: list[float], new: list[float], tolerance: float) -> str:
    """Whether the new build's median is worse by more than `tolerance`."""
    before, after = statistics.median(old), statistics.median(new)
    if not name.endswith((", s", ", ms", ", tokens/s")):
        return ""  # no measure of speed
    speed = name.endswith("tokens/s")
    slower = (before / after if speed else after / before) if before and after else 1.0
    if slower <= 1 + tolerance:
        return ""
    within = after >= min(old) if speed else after <= max(old)
    return "slower, within old's range" if within else "slower"


def span(found: list[float]) -> str:
    """The range of a build's rounds."""
    return f"{number(min(found))}..{number(max(found))}" if len(found) > 1 else "one round"


def table(found: dict[str, Any], tolerance: float) -> str:
    """One job's comparison as Markdown."""
    old, new = found["old"], found["new"]
    lines = [f"**{found['title']}**" + (f" ({found['note']})" if "note" in found else "")]
    if not old or not new:
        return lines[0]
    batches = sorted({reading["batch"] for reading in [*old, *new]})
    lines += ["", f"{new[0]['device']}; rounds: {len(new)}; batches of {' or '.join(map(str, batches))} rows", "",
              "| | old | new | new/old | old's range | new's range | |", "| --- |" + " ---: |" * 5 + " --- |"]
    names = dict.fromkeys(name for reading in [*old, *new] for name in reading["readings"])
    for name in names:
        before, after = values(old, name), values(new, name)
        if not before or not after:
            continue
        middle = statistics.median(before), statistics.median(after)
        ratio = f"{middle[1] / middle[0]:.3f}" if middle[0] else "–"
        lines.append(f"| {name} | {number(middle[0])} | {number(middle[1])} | {ratio} | {span(before)} | {span(after)}"
                     f" | {judgement(name, before, after, tolerance)} |")
    return "\n".join(lines)


def compare_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every job's comparison; what is there so far is in the JSON file at any time."""
    until = time.monotonic() + options.limit
    done: list[dict[str, Any]] = []

    def keep(found: dict[str, Any]) -> None:
        if options.json:
            report = {"cpu": cpu_name(), "old": str(options.old), "new": str(options.new), "jobs": [*done, found]}
            options.json.write_text(json.dumps(report, indent=1))

    for job in jobs(options.models):
        done.append(compare(job, options, until, keep))
    return done


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="FILE[@VRAM,...]")
    parser.add_argument("--old", type=Path, help="the folder that holds the old build's sharpi package")
    parser.add_argument("--new", type=Path, help="the new build's")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE.json", help="print these; measure nothing")
    parser.add_argument("--measure", nargs="+", default=list(MEASUREMENTS), metavar="NAME[:ROUNDS]")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=3, help="repetitions within a process, after the warm-up")
    parser.add_argument("--decode", type=int, default=128, help="tokens")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens")
    parser.add_argument("--draft-steps", type=int, default=32, help="tokens that each kind of drafting generates")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="few tokens, once: to see that everything runs")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--threads", type=int, help="the CPU's; all by default")
    parser.add_argument("--profile", help="a hardware profile for both builds' plans: see `sharpi hardware --save`")
    parser.add_argument("--in-memory", action="store_true", help="the files are in memory: do not read them first")
    parser.add_argument("--tolerance", type=float, default=0.02, help="part by which the new build may be slower")
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="SECONDS",
                        help="begin no round that would not be over by then")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one process may take")
    parser.add_argument("--json", type=Path, help="where to keep every reading")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--vram", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not (options.show or options.one or (options.old and options.new and options.models)):
        parser.error("name --old, --new and the models")
    for name, value in QUICK.items() if options.quick else ():
        setattr(options, name, value)
    return options


def main() -> None:
    """See the top of the file."""
    options = parse_arguments()
    if options.one:
        print(json.dumps(measure_one(options)))
        return
    found = ([job for file in options.show for job in json.loads(file.read_text())["jobs"]] if options.show
             else compare_all(options))
    print("\n\n".join(table(job, options.tolerance) for job in found))
    if any("failed" in job.get("note", "") for job in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
