#!/usr/bin/env python3
"""Feeds damaged files to everything in Sharpi that reads one, and stops at the first that gets out of hand.

    python tests/fuzz/fuzz.py --seed 7 --count 10000                  # 10,000 inputs for each target
    python tests/fuzz/fuzz.py --target template --first 4711 --count 1 --seed 7
    python tests/fuzz/fuzz.py --replay failing-template-7-4711.bin     # a saved input again

Every input ends in success or in a SharpiError of one printable line. Anything else is a failure: another exception, a
crash, more than 20 seconds, more than 1 GiB of memory. Inputs run in a child process, which a crash
may take with it; the failing one is saved with its bytes halved again and again as long as it fails, and the program
exits with 1. It prints the seed, so that a run can be repeated, and how many inputs ended in what.
"""

from __future__ import annotations

import argparse
import collections
import mmap
import os
import random
import re
import resource
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import inputs
from inputs import Input

SECONDS = 20
MEMORY = 1 << 30  # beyond what the process starts with
TOKENS = 40
CHUNK = 10_000  # inputs of one process


def use_model(path: Path) -> str:
    """Does with a file what `sharpi inspect`, `run` and `chat` do before the weights are read."""
    from sharpi.cli.commands.inspect import _as_json, _as_text, _judge
    from sharpi.files.gguf import GgufFile
    from sharpi.planning.planner import make_plan

    file = GgufFile.open(path)
    verdict, files = _judge(file), [str(part) for part in file.paths]
    _as_json(file, verdict, files)
    _as_text(file, verdict, files, with_tensors=True)
    if verdict.tokenizer is not None:
        use_tokenizer(verdict.tokenizer)
    if verdict.template is not None:
        verdict.template.render([{"role": "user", "content": "Hi"}])
    if verdict.spec is None:
        return "the model is refused"
    make_plan(file, verdict.spec, device="cpu", context=64, threads=1)
    return "the model runs" if verdict.runs else "the tokenizer is refused"


def use_tokenizer(tokenizer: object) -> None:
    dice = random.Random(1)
    for _ in range(3):
        text = "".join(dice.choices(inputs.TOKEN_PARTS + inputs.TEXTS[:12], k=12))
        try:
            ids = tokenizer.encode(text, parse_special=True)
        except ValueError:  # InvalidRequestError: there is no token for a byte
            ids = [dice.randrange(tokenizer.vocab_size) for _ in range(TOKENS)]
        assert all(0 <= token < tokenizer.vocab_size for token in ids)
        tokenizer.decode(ids, skip_special=False)


def use_template(path: Path) -> str:
    from sharpi.text.chat import ChatTemplate

    template = ChatTemplate(path.read_bytes().decode("utf-8", "replace"), "<s>", "</s>", path)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello <b>"}]
    template.render(messages, tools=[{"a": [1]}])
    return "rendered"


def use_plan(path: Path) -> str:
    from fake_weights import FakeWeights

    from sharpi.planning.plan import load_plan

    model = FakeWeights()
    load_plan(path, model, model).to_dict()
    return "read"


USES: dict[str, Callable[[Path], str]] = {"model": use_model, "template": use_template, "plan": use_plan}


class Failure(Exception):
    """An input got out of hand; the message says how."""


def judge(given: Input, folder: Path) -> str:
    """What became of one input, in a few words. Raises Failure."""
    from sharpi.errors import InternalError, SharpiError

    path = folder / f"input.{given.kind}"
    given.write(path)
    try:
        return USES[given.kind](path)
    except InternalError as error:
        raise Failure(f"InternalError: {error}") from error
    except SharpiError as error:
        message = str(error)
        if not message.isprintable() or len(message) > 2000:
            raise Failure(f"an error of {len(message)} characters, or unprintable: {message!r:.300}") from None
        return shape_of(message.replace(str(path), "FILE"))
    except BaseException as error:
        raise Failure("".join(traceback.format_exception(error)[-6:])) from error


def shape_of(message: str) -> str:
    """A message without its particulars, so that messages can be counted."""
    message = re.sub(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", "…", message)
    return " ".join(re.sub(r"\[[^]]*\]|[\d,.]*\d", "N", message).split()[:9])


def limit_memory() -> None:
    with open("/proc/self/statm") as stream:
        now = int(stream.read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))


def set_clock(seconds: float) -> None:
    """Ends the process after so much processor time, which a busy machine does not stretch, or if it waits for long."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(int(20 * seconds))


def ready(scale: int) -> None:
    """Imports what takes memory and time once, and lowers the limits of templates, so that more of them are tried."""
    import sharpi.model
    import sharpi.text.chat  # noqa: F401
    from sharpi.text import template_limits

    template_limits.MAX_STEPS //= scale
    template_limits.MAX_MADE //= scale
    inputs.originals()
    inputs.make("plan", 0, 0)
    inputs.make("template", 0, 0)


def run_child(target: str, seed: int, first: int, count: int, at: mmap.mmap, out: int) -> None:
    """Runs inputs, noting the number of the one at hand where the parent sees it; writes the counts, or the failure."""
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        for index in range(first, first + count):
            at[:8] = struct.pack("<Q", index)
            set_clock(SECONDS)
            try:
                counts[judge(inputs.make(target, seed, index), Path(folder))] += 1
            except Failure as failure:
                os.write(out, f"!{failure}".encode()[:60000])
                return
            set_clock(0)
    os.write(out, "\n".join(f"{number}\t{what}" for what, number in counts.most_common()).encode()[:60000])


def in_child(work: Callable[[int], None]) -> tuple[str, str]:
    """Runs `work` in a process of its own; what it wrote, and how it failed, if it did."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 3
        try:
            os.close(reading)
            limit_memory()
            work(writing)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with open(reading, encoding="utf-8", errors="replace") as stream:
        written = stream.read()
    status = os.waitpid(child, 0)[1]
    if written.startswith("!"):
        return "", written[1:]
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        slow = number in (signal.SIGPROF, signal.SIGALRM)
        return "", f"more than {SECONDS} seconds" if slow else f"killed by {signal.Signals(number).name}"
    return written, f"ended with {os.WEXITSTATUS(status)}" if os.WEXITSTATUS(status) else ""


def fails(given: Input) -> str:
    """How an input fails, in a process of its own; empty if it does not."""
    def work(out: int) -> None:
        set_clock(SECONDS)
        with tempfile.TemporaryDirectory() as folder:
            try:
                judge(given, Path(folder))
            except Failure as failure:
                os.write(out, f"!{failure}".encode()[:60000])

    return in_child(work)[1]


def minimized(given: Input, tries: int = 200) -> Input:
    """The input with pieces left out, the largest first, as long as it fails."""
    content, size = given.content, len(given.content) // 2
    while size >= 1 and tries > 0:
        start = 0
        while start < len(content) and tries > 0:
            shorter, tries = content[:start] + content[start + size:], tries - 1
            if fails(Input(given.kind, shorter, given.zeros)):
                content = shorter
            else:
                start += size
        size //= 2
    return Input(given.kind, content, given.zeros)


def run_target(target: str, seed: int, first: int, count: int, save: Path) -> bool:
    """Runs a target's inputs, and says what became of them; whether all went well."""
    at, failure = mmap.mmap(-1, 8), ""
    counts: collections.Counter[str] = collections.Counter()
    for start in range(first, first + count, CHUNK):
        some = min(CHUNK, first + count - start)
        written, failure = in_child(lambda out: run_child(target, seed, start, some, at, out))  # noqa: B023
        if failure:
            break
        for line in written.splitlines():
            number, _, what = line.partition("\t")
            counts[what] += int(number)
        print(f"{target}: {counts.total():,} inputs from {first} with seed {seed}, none out of hand", flush=True)
    print("".join(f"  {number}  {what}\n" for what, number in counts.most_common()), flush=True)
    if not failure:
        return True
    index = struct.unpack("<Q", at[:8])[0]
    given = inputs.make(target, seed, index)
    path = save / f"failing-{target}-{seed}-{index}.bin"
    given = minimized(given) if fails(given) else given
    path.write_bytes(f"{given.kind} {given.zeros}\n".encode() + given.content)
    print(f"{target}: input {index} with seed {seed} is out of hand, saved as {path}\n{failure}", flush=True)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="the run to repeat (default: another each time)")
    parser.add_argument("--count", type=int, default=1000, help="inputs for each target")
    parser.add_argument("--first", type=int, default=0, help="the number of the first input")
    parser.add_argument("--target", action="append", choices=list(inputs.TARGETS), help="default: all")
    parser.add_argument("--save", type=Path, default=Path(), help="the folder for failing inputs")
    parser.add_argument("--replay", type=Path, help="try a saved input again")
    options = parser.parse_args()
    ready(scale=1 if options.replay else 500)
    if options.replay:
        head, _, content = options.replay.read_bytes().partition(b"\n")
        kind, zeros = head.decode().split()
        print(failure := fails(Input(kind, content, int(zeros))))
        return int(bool(failure))
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    good = [run_target(target, seed, options.first, options.count, options.save)
            for target in options.target or inputs.TARGETS]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
