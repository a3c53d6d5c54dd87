#!/usr/bin/env python3
"""A mixture of experts that is larger than the RAM it may use: tokens a second and bytes that a token reads from the
disk, beside llama.cpp's mapped file (if llama-cpp-python is installed) under the same limit.

    sudo python benchmarks/experts/larger_than_ram.py model.gguf --limit 2GiB --threads 2

The limit is a control group's, so it needs the right to make one. Page cache counts against it. The file is dropped
from the page cache before each engine runs, in a process of its own. First comes what the disk gives: random blocks of
1 MiB past the page cache, 16 at a time. A virtual machine's disk may be served from its host's memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROMPT = [1000 + i * 7919 % 90000 for i in range(64)]
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


def bytes_of(text: str) -> int:
    from sharpi.planning.planner import parse_vram

    return parse_vram(text) or 0


def read_bytes() -> int:
    """What this process has read from disks."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
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


def sharpi(path: Path, limit: int, threads: int, count: int) -> None:
    limit_this_process(limit)
    from sharpi import Model

    with Model.load(path, device="cpu", threads=threads, context=2048, batch=256) as model:
        plan = model.plan
        print(f"{plan.expert_slots / 2**20:,.0f} MiB of slots for {plan.disk_bytes / 2**30:.2f} GiB of experts")
        measure("Sharpi", lambda prompt: iter(model.generate(prompt, max_tokens=count + 1, temperature=0)), count)


def llama_cpp(path: Path, limit: int, threads: int, count: int) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--limit", required=True, type=bytes_of, help="memory that each engine may use: 2GiB")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tokens", type=int, default=24)
    given = parser.parse_args()
    from sharpi.machine.disk import disk_bytes_per_second

    rate = disk_bytes_per_second(given.model)
    print(f"disk: {'unknown' if rate is None else f'{rate / 1e6:,.0f} MB/s'}", flush=True)
    engines = [sharpi, llama_cpp] if importlib.util.find_spec("llama_cpp") else [sharpi]
    for engine in engines:
        drop(given.model)
        # llama.cpp takes seconds for a token.
        count = given.tokens if engine is sharpi else max(2, given.tokens // 6)
        child = multiprocessing.get_context("spawn").Process(target=engine,
                                                             args=(given.model, given.limit, given.threads, count))
        child.start()
        child.join()
        if child.pid and group_of(child.pid).is_dir():
            group_of(child.pid).rmdir()


if __name__ == "__main__":
    main()
