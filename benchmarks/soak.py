"""Thousands of requests, a third of them cancelled at random moments: what is left afterwards.

    python benchmarks/soak.py [-m MODEL] [--device cpu] [--requests 10000] [--streams 16] [--seed 1]

Prompts are random, half of them with one of three common beginnings; answers have 1 to 80 tokens, greedy or sampled,
with and without drafts, scores and deadlines. The cache has room for a few of the requests that run, so
they are paused, too. It fails if a request is lost or fails, if the scheduler still has something to do at the end, or
if the cache is not whole again: a prompt as long as the cache must then fit. It prints the process's memory after a
tenth of the requests and at the end, and how much was computed again.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from pathlib import Path

from sharpi import BusyError, Model, Scheduler
from sharpi.benchmark import again_share
from sharpi.model import BUNDLED_MODEL


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * 4096


async def one(scheduler: Scheduler, draw: random.Random, beginnings: list[list[int]], vocabulary: int) -> str:
    begin = draw.choice(beginnings) if draw.random() < 0.5 else []
    prompt = [*begin, *(draw.randrange(vocabulary) for _ in range(draw.randrange(1, 40)))]
    cancelled_after = draw.random() * 0.2 if draw.random() < 1 / 3 else None
    options = {"max_tokens": draw.randrange(1, 81), "temperature": draw.choice([0.0, 0.9]), "seed": draw.randrange(99),
               "draft": draw.choice(["off", "ngram"]), "scores": draw.choice([None, 0, 5]),
               "timeout": draw.choice([None, None, None, 30.0]), "priority": draw.randrange(3),
               "key": draw.choice("abc"), "salt": draw.choice(["", "", "x"])}
    while True:
        try:
            answer = scheduler.submit(prompt, **options)
            break
        except BusyError:
            await asyncio.sleep(0.005)
    if cancelled_after is not None:
        asyncio.get_running_loop().call_later(cancelled_after, answer.cancel)
    async for _ in answer:
        pass
    return str(answer.finish_reason)


async def soak(model: Model, arguments: argparse.Namespace) -> Counter[str]:
    draw, ended = random.Random(arguments.seed), Counter[str]()
    vocabulary = model.spec.vocab_size
    beginnings = [[draw.randrange(vocabulary) for _ in range(64 * pages)] for pages in (1, 2, 3)]
    left = arguments.requests
    with model.scheduler(queue=64) as scheduler:
        async def client() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                ended[await one(scheduler, draw, beginnings, vocabulary)] += 1
                if ended.total() == arguments.requests // 10:
                    print(f"after {ended.total():,} requests: {resident_bytes() / 2**20:.1f} MiB", flush=True)

        await asyncio.gather(*(client() for _ in range(3 * arguments.streams)))
        counts = scheduler.counts()
    assert counts["waiting"] == counts["preparing"] == counts["writing"] == 0, counts
    print(f"{counts['pauses']:,} pauses, {counts['adopted_tokens']:,} tokens of prompts adopted,"
          f" {again_share(counts):.1%} of the time of passes for {counts['again_tokens']:,} tokens computed again")
    return ended


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(given)
    room = 32 * arguments.streams
    with Model.load(arguments.model, device=arguments.device, context=room, cache_tokens=room,
                    sequences=arguments.streams + 2) as model:
        started = time.perf_counter()
        ended = asyncio.run(soak(model, arguments))
        seconds = time.perf_counter() - started
        whole = model.logits([1] * room)
        assert len(whole) == room
    print(f"{ended.total():,} requests in {seconds:.0f} s: {dict(ended)}; {resident_bytes() / 2**20:.1f} MiB")
    if ended.total() != arguments.requests or set(ended) - {"end", "length", "context", "cancelled", "timeout"}:
        sys.exit("requests were lost")


if __name__ == "__main__":
    main()
