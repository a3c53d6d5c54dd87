"""What HTTP costs: a stream over `sharpi serve` beside the same answers from a scheduler in this process.

    python benchmarks/http_cost.py [-m MODEL] [--streams 1 8] [--tokens 256] [--requests 20] [--json FILE]

The same prompts are answered greedily, first in this process and then over HTTP by a server of its own, both with the
same settings. Times to the first token are those of one request after another, medians of --requests. Tokens a second
are those of --streams requests at once. Processor time a token is that of all threads, with the model's. Beside it
stands that of the main thread alone, which does all but run the model: here it takes tokens and makes them text, in the
server it also speaks HTTP. So the difference is what HTTP takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from sharpi import Model, Scheduler
from sharpi.model import BUNDLED_MODEL


@dataclass(frozen=True)
class Measured:
    """first_token: seconds. processor, main_thread: seconds a token, of all threads and of the main thread."""

    where: str
    streams: int
    first_token: float
    tokens_per_second: float
    processor: float
    main_thread: float


def main_thread_seconds(process: int) -> float:
    """What the process's main thread has used of the processor."""
    return int(Path(f"/proc/{process}/task/{process}/schedstat").read_text(encoding="ascii").split()[0]) / 1e9


def prompts(count: int, vocabulary: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(64)] for _ in range(count)]


class InProcess:
    """Asks a scheduler of this process."""

    def __init__(self, scheduler: Scheduler, never: dict[int, float]) -> None:
        self._scheduler = scheduler
        self._never = never

    async def tokens(self, prompt: list[int], count: int) -> AsyncIterator[None]:
        answer = self._scheduler.submit(prompt, max_tokens=count, temperature=0.0, logit_bias=self._never)
        async for _ in answer:
            yield None

    def processor(self) -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    def main_thread(self) -> float:
        return main_thread_seconds(os.getpid())


class OverHttp:
    """Asks a server, with one connection for each stream."""

    def __init__(self, client: httpx.AsyncClient, never: dict[int, float], server: int) -> None:
        self._client = client
        self._never = {str(token): -100 for token in never}
        self._server = server

    async def tokens(self, prompt: list[int], count: int) -> AsyncIterator[None]:
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "stream": True, "logit_bias": self._never}
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for piece in response.aiter_bytes():
                for _ in range(piece.count(b'"text"')):
                    yield None

    def processor(self) -> float:
        fields = Path(f"/proc/{self._server}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def main_thread(self) -> float:
        return main_thread_seconds(self._server)


async def first_token(asked: InProcess | OverHttp, requests: list[list[int]]) -> float:
    seconds = []
    for prompt in requests:
        started = time.perf_counter()
        async for _ in asked.tokens(prompt, 2):
            seconds.append(time.perf_counter() - started)
            break
    return statistics.median(seconds)


async def measured(where: str, asked: InProcess | OverHttp, streams: int, tokens: int, vocabulary: int,
                   requests: int) -> Measured:
    async def all_of(prompt: list[int]) -> None:
        async for _ in asked.tokens(prompt, tokens):
            pass

    first = await first_token(asked, prompts(requests, vocabulary, 1))
    before, main_before, started = asked.processor(), asked.main_thread(), time.perf_counter()
    await asyncio.gather(*map(all_of, prompts(streams, vocabulary, 2)))
    seconds = time.perf_counter() - started
    return Measured(where, streams, first, streams * tokens / seconds,
                    (asked.processor() - before) / (streams * tokens),
                    (asked.main_thread() - main_before) / (streams * tokens))


async def served(arguments: argparse.Namespace, model: Path, never: dict[int, float],
                 vocabulary: int) -> list[Measured]:
    each = 64 + arguments.tokens + 64
    command = [sys.executable, "-m", "sharpi", "serve", "-m", str(model), "--device", arguments.device, "--port", "0",
               "-c", str(each), "--cache-tokens", str(each * max(arguments.streams)), "-np",
               str(max(arguments.streams))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stderr is not None
            address = next(found[0] for line in server.stderr if (found := re.search(r"http://[\d.:]+", line)))
            async with httpx.AsyncClient(base_url=address, timeout=600) as client:
                while (await client.get("/health")).status_code != 200:
                    await asyncio.sleep(0.1)
                asked = OverHttp(client, never, server.pid)
                await first_token(asked, prompts(3, vocabulary, 0))
                return [await measured("HTTP", asked, streams, arguments.tokens, vocabulary, arguments.requests)
                        for streams in arguments.streams]
        finally:
            server.terminate()


async def here(arguments: argparse.Namespace, model: Model, never: dict[int, float]) -> list[Measured]:
    with model.scheduler() as scheduler:
        asked = InProcess(scheduler, never)
        await first_token(asked, prompts(3, model.spec.vocab_size, 0))
        return [await measured("scheduler", asked, streams, arguments.tokens, model.spec.vocab_size,
                               arguments.requests) for streams in arguments.streams]


def table(rows: list[Measured]) -> str:
    lines = ["| | streams | first token, ms | tokens/s | processor, us a token | of it the main thread |",
             "| --- | ---: | ---: | ---: | ---: | ---: |"]
    lines += [f"| {row.where} | {row.streams} | {1e3 * row.first_token:.2f} | {row.tokens_per_second:.0f} |"
              f" {1e6 * row.processor:.0f} | {1e6 * row.main_thread:.1f} |" for row in rows]
    return "\n".join(lines)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 8))
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--requests", type=int, default=20, help="for times to the first token")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(given)
    most, each = max(arguments.streams), 64 + arguments.tokens + 64
    with Model.load(arguments.model, device=arguments.device, context=each, cache_tokens=most * each,
                    sequences=most + 2) as model:
        never: dict[Any, float] = dict.fromkeys(model.tokenizer.stop_ids, float("-inf"))
        vocabulary = model.spec.vocab_size
        rows = asyncio.run(here(arguments, model, never))
    rows += asyncio.run(served(arguments, Path(arguments.model), never, vocabulary))
    print(table(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
