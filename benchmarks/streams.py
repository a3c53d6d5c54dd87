"""Many requests at once: tokens a second in all, time to first token and gaps between tokens, by number of streams.

    python benchmarks/streams.py -m MODEL [--vram SIZE] [--streams 1 4 8 16 32 64] [--prompt 256] [--tokens 256]
        [--long 16384] [--json FILE]

Each stream asks for --tokens tokens after a prompt of --prompt random ones, all at the same moment, with `Scheduler`.
Tokens a second count from the first request to the last token, prompts included. A gap is the time between two tokens
of a stream as its reader sees them. With --long, another request with a prompt of so many tokens comes while the
streams are being written: its column says what the gaps are then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from sharpi import Model, ModelFileError, Scheduler

STREAMS = (1, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Measured:
    """Of one number of streams. Seconds; `steps` are passes over answers, and `rows` their mean size."""

    streams: int
    tokens_per_second: float
    first_token_median: float
    first_token_p99: float
    gap_median: float
    gap_p99: float
    gap_largest: float
    rows: float


@dataclass
class Stream:
    """When a stream's tokens came, seconds since it was asked for."""

    times: list[float]

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


def part(values: list[float], share: float) -> float:
    """The value that this share of them does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


async def read(scheduler: Scheduler, prompt: list[int], tokens: int, never: dict[int, float]) -> Stream:
    started, times = time.perf_counter(), []
    async for _ in scheduler.submit(prompt, max_tokens=tokens, temperature=0.0, logit_bias=never):
        times.append(time.perf_counter() - started)
    return Stream(times)


async def measured(model: Model, streams: int, arguments: argparse.Namespace) -> Measured:
    draw = random.Random(streams)
    try:
        never = dict.fromkeys(model.tokenizer.stop_ids, -math.inf)
    except ModelFileError:  # a file without a tokenizer has no end tokens either
        never = {}
    prompt = [[draw.randrange(model.spec.vocab_size) for _ in range(arguments.prompt)] for _ in range(streams)]
    long = [draw.randrange(model.spec.vocab_size) for _ in range(arguments.long)]
    with model.scheduler(queue=streams + 1) as scheduler:
        started = time.perf_counter()
        tasks = [asyncio.create_task(read(scheduler, ids, arguments.tokens, never)) for ids in prompt]
        if long:
            await asyncio.sleep(0)  # until all have asked
            while scheduler.counts()["waiting"] + scheduler.counts()["preparing"]:
                await asyncio.sleep(0.001)
            tasks.append(asyncio.create_task(read(scheduler, long, 1, never)))
        read_all = (await asyncio.gather(*tasks))[:streams]
        seconds, counts = time.perf_counter() - started, scheduler.counts()
    first, gaps = [one.times[0] for one in read_all], [gap for one in read_all for gap in one.gaps]
    return Measured(streams, streams * arguments.tokens / seconds, part(first, 0.5), part(first, 0.99), part(gaps, 0.5),
                    part(gaps, 0.99), max(gaps), counts["step_tokens"] / max(counts["steps"], 1))


def table(rows: list[Measured]) -> str:
    lines = ["| streams | tokens/s | first token, ms (p99) | gap, ms (p99) | largest gap | rows a step |",
             "| ---: | ---: | ---: | ---: | ---: | ---: |"]
    for row in rows:
        lines.append(f"| {row.streams} | {row.tokens_per_second:.0f} | {1e3 * row.first_token_median:.0f}"
                     f" ({1e3 * row.first_token_p99:.0f}) | {1e3 * row.gap_median:.1f} ({1e3 * row.gap_p99:.1f}) |"
                     f" {1e3 * row.gap_largest:.0f} | {row.rows:.1f} |")
    return "\n".join(lines)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True, type=Path)
    parser.add_argument("--vram")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--long", type=int, default=0, help="tokens of one more prompt that comes later")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(given)
    most, each = max(arguments.streams), arguments.prompt + arguments.tokens + 64
    with Model.load(arguments.model, vram=arguments.vram, device=arguments.device, threads=arguments.threads,
                    context=max(each, arguments.long + 64), cache_tokens=most * each + arguments.long + 64,
                    sequences=max(4, most + 2)) as model:
        asyncio.run(measured(model, min(4, most), arguments))  # kernels are loaded, and steps recorded
        rows = [asyncio.run(measured(model, streams, arguments)) for streams in arguments.streams]
    print(table(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
