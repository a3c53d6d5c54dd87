#!/usr/bin/env python3
"""A mixture of experts that is larger than the RAM it may use: tokens a second and bytes that a token reads from the
disk, beside llama.cpp's mapped file under the same limit.

    sudo python benchmarks/experts/larger_than_ram.py model.gguf --limit 2GiB --threads 2
    sudo python benchmarks/experts/larger_than_ram.py model.gguf --left 30GiB --device cuda --vram 12GiB \\
        --llama-bench "llama-bench -ngl 99 -ncmoe 20 -fa 1"

--limit is a control group's, so it needs the right to make one; page cache counts against it. --left holds RAM in
another process until so much of it is free. The page cache is dropped before each engine runs, in a process of its own:
the file's pages, or all of it if the right is there. First comes what the disk gives: random blocks of 1 MiB past the
page cache, 1, 16 and 32 at a time. A virtual machine's disk may be served from its host's memory.

llama.cpp is llama-cpp-python's, if it is installed, or the program that --llama-bench names, with its options for
placement. That program gives one speed for a prompt and one for decode.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import mmap
import multiprocessing
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PROMPT = [1000 + i * 7919 % 90000 for i in range(64)]
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


def bytes_of(text: str) -> int:
    from sharpi.planning.planner import parse_vram

    return parse_vram(text) or 0


def read_bytes(process: int | str = "self") -> int:
    """What a process has read from disks."""
    lines = Path(f"/proc/{process}/io").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def group_of(process: int) -> Path:
    return (V1 if V1.is_dir() else V2) / f"larger-than-ram-{process}"


def limit_this_process(most: int) -> None:
    group = group_of(os.getpid())
    group.mkdir()
    (group / ("memory.limit_in_bytes" if V1.is_dir() else "memory.max")).write_text(str(most), encoding="ascii")
    (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")


def drop(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")


def hold(left: int, held: Any) -> None:
    """Takes RAM until `left` bytes are free, and keeps it. A machine's RAM may grow meanwhile."""
    from sharpi.machine.hardware import free_ram_bytes

    Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")  # if RAM runs out, this is what ends
    kept, step = [], 256 << 20
    waits = 0
    while waits < 10:
        if free_ram_bytes() < left + step:
            waits += 1
            time.sleep(0.2)
            continue
        waits = 0
        kept.append(mmap.mmap(-1, step))
        kept[-1].write(b"\x01" * step)
    held.set()
    time.sleep(1e6)


def measure(name: str, tokens: Callable[[list[int]], Iterator[object]], count: int) -> None:
    """A prompt and its answer, twice: the second time caches are warm."""
    for what in ("cold", "warm"):
        begin, read = time.perf_counter(), read_bytes()
        steps = tokens(PROMPT if what == "cold" else PROMPT[:5])
        next(steps)
        first, prompt_read = time.perf_counter() - begin, read_bytes() - read
        begin, read = time.perf_counter(), read_bytes()
        made = sum(1 for _, _ in zip(range(count), steps, strict=False))
        seconds, read = time.perf_counter() - begin, read_bytes() - read
        print(f"{name:<10} {what}: first token {first:6.2f} s ({prompt_read / 1e6:6,.0f} MB), then"
              f" {made / seconds:7.3f} tokens/s, {read / made / 1e6:8,.1f} MB a token,"
              f" {read / seconds / 1e6:6,.0f} MB/s", flush=True)


def sharpi(path: Path, limit: int | None, threads: int, count: int, options: dict[str, Any]) -> None:
    if limit:
        limit_this_process(limit)
    from sharpi import Model

    with Model.load(path, threads=threads, context=2048, **options) as model:
        plan = model.plan
        said = (f"{plan.ram_slots / 2**30:,.2f} GiB of slots in RAM, {plan.expert_slots / 2**30:,.2f} GiB in VRAM"
                if plan.device == "cuda" else
                f"{plan.expert_slots / 2**30:,.2f} GiB of slots for {plan.disk_bytes / 2**30:.2f} GiB of experts")
        predicted = f"; decode predicted: {plan.decode.tokens_per_second:.2f} tokens/s" if plan.decode else ""
        print(said + predicted, flush=True)
        measure("Sharpi", lambda prompt: iter(model.generate(prompt, max_tokens=count + 1, temperature=0)), count)
        print(model.stats()["experts"]["disk"], flush=True)


def llama_cpp(path: Path, limit: int | None, threads: int, count: int, _options: dict[str, Any]) -> None:
    if limit:
        limit_this_process(limit)
    import llama_cpp as package

    usual = package.llama_cpp.llama_model_default_params

    def without_repacking() -> object:  # it would copy the weights to memory that is not there
        parameters = usual()
        parameters.use_extra_bufts = False
        return parameters

    package.llama_cpp.llama_model_default_params = without_repacking
    model = package.Llama(str(path), n_ctx=2048, n_threads=threads, n_batch=256, verbose=False)

    def tokens(prompt: list[int]) -> Iterator[int]:
        model.reset()
        model.eval(prompt)
        while True:
            token = model.sample(temp=0.0)
            yield token
            model.eval([token])

    measure("llama.cpp", tokens, count)


def llama_bench(words: str, path: Path, threads: int, count: int) -> None:
    """The program's speeds, and what it read from the disk in all."""
    command = [*shlex.split(words), "-m", str(path), "-t", str(threads), "-p", "64", "-n", str(count), "-r", "1",
               "-o", "json"]
    begin, read = time.perf_counter(), 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as program:
        while program.poll() is None:
            with contextlib.suppress(OSError, StopIteration):
                read = read_bytes(program.pid)
            time.sleep(0.1)
        told = json.loads(program.communicate()[0] or "[]")
    for run in told:
        print(f"llama.cpp  {run['n_prompt']} + {run['n_gen']} tokens: {run['avg_ts']:7.3f} tokens/s", flush=True)
    print(f"llama.cpp  read {read / 1e6:,.0f} MB in {time.perf_counter() - begin:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--limit", type=bytes_of, help="memory that each engine may use: 2GiB")
    parser.add_argument("--left", type=bytes_of, help="RAM that is left free for them: 30GiB")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--vram", help="that Sharpi may use: 12GiB")
    parser.add_argument("--llama-bench", help="llama.cpp's program, with its options for placement")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tokens", type=int, default=24)
    given = parser.parse_args()
    if not given.limit and not given.left:
        parser.error("say how much RAM there is to be: --limit or --left")
    from sharpi.machine.disk import disk_bytes_per_second
    from sharpi.machine.hardware import free_ram_bytes

    for readers in (1, 16, 32):
        rate = disk_bytes_per_second(given.model, readers)
        print(f"disk, {readers} at a time: {'unknown' if rate is None else f'{rate / 1e6:,.0f} MB/s'}", flush=True)
    context = multiprocessing.get_context("spawn")
    if given.left:
        held = context.Event()
        context.Process(target=hold, args=(given.left, held), daemon=True).start()
        held.wait()
        print(f"{free_ram_bytes() / 2**30:.1f} GiB of RAM are free", flush=True)
    options = {"device": given.device, **({"batch": 256} if given.device == "cpu" else {"vram": given.vram})}
    engines = [sharpi, llama_cpp] if importlib.util.find_spec("llama_cpp") else [sharpi]
    for engine in engines:
        drop(given.model)
        # llama.cpp takes seconds for a token.
        count = given.tokens if engine is sharpi else max(2, given.tokens // 6)
        child = context.Process(target=engine, args=(given.model, given.limit, given.threads, count, options))
        child.start()
        child.join()
        if child.pid and group_of(child.pid).is_dir():
            group_of(child.pid).rmdir()
    if given.llama_bench:
        drop(given.model)
        llama_bench(given.llama_bench, given.model, given.threads, max(2, given.tokens // 6))


if __name__ == "__main__":
    main()
