"""What constraints cost: a mask, a grammar's compilation, and the preparation of a vocabulary of 150,000 tokens.

    python benchmarks/constraints.py            the figures
    python benchmarks/constraints.py --schemas 1000    also: random answers to that many random schemas, each checked
    python benchmarks/constraints.py --speed [-m MODEL] [--device cpu] [--threads 1] [--streams 1 8] [--rounds 9]
                                                only: the speed of answers by a JSON schema beside free text
    python benchmarks/constraints.py --calls 500 [--device cpu]    only: forced tool calls over HTTP, each checked

With --speed both are asked of one scheduler in turn. Their ratio is the median of the pairs' ratios, once by the clock
and once by the processor time of all threads, which other work on the machine changes less. The schema asks for more
than the 128 tokens that each answer has, and free text goes on after an end token. All is greedy, without drafts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TESTS = Path(__file__).parents[1] / "tests" / "python"
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "constraints")]

from constrained import gpt2, mask_of, walk  # noqa: E402
from test_grammars import random_schema  # noqa: E402
from traffic.chat_model import write_chat_model  # noqa: E402
from traffic.forced_calls import MOST_TOKENS, check_calls, request_of  # noqa: E402
from traffic.server_process import ServerProcess  # noqa: E402
from vocabularies import CONTROL, NORMAL, byte_level_metadata, tokenizer_of  # noqa: E402

from sharpi import Model, Scheduler  # noqa: E402
from sharpi.constraints.answers import AnswerRules  # noqa: E402
from sharpi.constraints.grammar import compile_format  # noqa: E402
from sharpi.constraints.tokens import Tokens  # noqa: E402
from sharpi.model import BUNDLED_MODEL  # noqa: E402
from sharpi.serve.turns import OutputFormat, Tool  # noqa: E402
from sharpi.text.answers.formats import HERMES  # noqa: E402

_SCHEMA = {"type": "object", "required": ["name", "tags"], "additionalProperties": False, "properties": {
    "name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}},
    "address": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"pattern": "^[0-9]{5}$",
                                                                                       "type": "string"}}}}}
_TOKENS = 128  # of each answer whose speed is measured
_LONG_SCHEMA = {"type": "array", "minItems": 1000, "items": _SCHEMA}


def large_vocabulary() -> Tokens:
    """GPT-2's tokens, and as many again of two of them joined as make 150,000."""
    tokenizer, _ = gpt2()
    texts = [tokenizer.token_text(token) for token in range(tokenizer.vocab_size - 2)]
    known, rng = set(texts), random.Random(1)
    while len(known) < 150_000:
        known.add(rng.choice(texts) + rng.choice(texts))
    values = byte_level_metadata("gpt-2", [])
    values["tokenizer.ggml.tokens"] = [*texts, *sorted(known - set(texts)), "<|endoftext|>"]
    values["tokenizer.ggml.token_type"] = [NORMAL] * 150_000 + [CONTROL]
    values["tokenizer.ggml.eos_token_id"] = 150_000
    return Tokens(tokenizer_of(values))


def measure_masks(constraint: Any, tokens: Tokens, seed: int) -> list[float]:
    """Microseconds of each mask of an answer of at most 300 tokens, with accept()."""
    rng, took = random.Random(seed), []
    words = np.zeros(tokens.width, np.uint32)
    for _ in range(300):
        if constraint.ended():
            break
        began = time.perf_counter()
        filled = constraint.fill(words)
        took.append((time.perf_counter() - began) * 1e6)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:tokens.count]
        token = int(rng.choice(np.flatnonzero(bits))) if filled else 5
        if token in tokens.end_ids:
            break
        constraint.accept(token)
    return took


def report_masks(tokens: Tokens) -> None:
    tools = [Tool("look_up", "", _SCHEMA)]
    cases: dict[str, Any] = {
        "json_object": lambda: compile_format(OutputFormat("json_object"), tokens).start,
        "json_schema": lambda: compile_format(OutputFormat("json_schema", _SCHEMA), tokens).start,
        "regex": lambda: compile_format(OutputFormat("regex", r"(\w+ ){50,60}"), tokens).start,
        "forced call": lambda: AnswerRules(tokens, HERMES, begins="outside", tools=tools, choice="required").begin,
        "tools, no call": lambda: AnswerRules(tokens, HERMES, begins="outside", tools=tools).begin}
    for name, compiled in cases.items():
        began = time.perf_counter()
        begin = compiled()
        compile_ms = (time.perf_counter() - began) * 1e3
        took = sorted(micros for seed in range(8) for micros in measure_masks(begin(), tokens, seed))
        print(f"{name:15} compile {compile_ms:6.1f} ms   mask: median {statistics.median(took):6.1f} us, "
              f"99th of 100 {took[len(took) * 99 // 100]:7.1f} us, worst {took[-1]:8.1f} us")


def check_schemas(count: int) -> None:
    import jsonschema

    tokenizer, tokens = gpt2()
    for seed in range(count):
        rng = random.Random(seed)
        schema = random_schema(rng)
        text = tokenizer.decode(walk(compile_format(OutputFormat("json_schema", schema), tokens).start(), tokens, rng))
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    print(f"{count} answers to {count} schemas are valid")


class Cost(NamedTuple):
    """Seconds a token: by the clock, and of the processor."""

    clock: float
    processor: float


async def cost(scheduler: Scheduler, prompts: list[list[int]], begin: Callable[[], Any]) -> Cost:
    """Of answers to all prompts at once. Raises `RuntimeError` if one ends early."""
    async def one(prompt: list[int]) -> int:
        answer = scheduler.submit(prompt, max_tokens=_TOKENS, temperature=0.0, draft="off", ignore_end=True,
                                  constraint=begin())
        return len([token async for token in answer])

    clock, processor = time.perf_counter(), time.process_time()
    counts = await asyncio.gather(*map(one, prompts))
    if set(counts) != {_TOKENS}:
        raise RuntimeError(f"the answers have {counts} tokens, not {_TOKENS}")
    return Cost((time.perf_counter() - clock) / sum(counts), (time.process_time() - processor) / sum(counts))


async def compared(scheduler: Scheduler, prompts: list[list[int]], rounds: int,
                   begin: Callable[[], Any]) -> list[tuple[Cost, Cost]]:
    """What free text and constrained answers cost, after one round that warms up. Which goes first alternates."""
    pairs = []
    for number in range(rounds + 1):
        costs = {}
        for held in (False, True) if number % 2 else (True, False):
            costs[held] = await cost(scheduler, prompts, begin if held else lambda: None)
        pairs.append((costs[False], costs[True]))
    return pairs[1:]


def report_speed(arguments: argparse.Namespace) -> None:
    most, each = max(arguments.streams), 32 + _TOKENS + 64
    print("| streams | free text, tokens/s | JSON schema, tokens/s | ratio | ratio of processor time |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    with Model.load(arguments.model, device=arguments.device, threads=arguments.threads, context=each,
                    cache_tokens=most * each, sequences=most + 2) as model, model.scheduler() as scheduler:
        rules = AnswerRules(Tokens(model.tokenizer), HERMES, begins="outside",
                            wanted=OutputFormat("json_schema", _LONG_SCHEMA))
        draw = random.Random(1)
        prompts = [[draw.randrange(model.spec.vocab_size) for _ in range(32)] for _ in range(most)]
        for streams in arguments.streams:
            pairs = asyncio.run(compared(scheduler, prompts[:streams], arguments.rounds, rules.begin))
            print(speed_row(streams, pairs), flush=True)


def speed_row(streams: int, pairs: list[tuple[Cost, Cost]]) -> str:
    free, held = (1 / statistics.median(cost.clock for cost in costs) for costs in zip(*pairs, strict=True))
    clock = statistics.median(free.clock / held.clock for free, held in pairs)
    processor = statistics.median(free.processor / held.processor for free, held in pairs)
    return f"| {streams} | {free:.0f} | {held:.0f} | {clock:.1%} | {processor:.1%} |"


def report_calls(arguments: argparse.Namespace) -> None:
    """Exits with the first faults, if there are any."""
    requests = [request_of(seed, random_schema) for seed in range(arguments.calls)]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "story.gguf"
        write_chat_model(model, 2 * MOST_TOKENS)
        options = ["-m", str(model), "--device", arguments.device, "-c", str(2 * MOST_TOKENS), "--cache-tokens",
                   str(8 * MOST_TOKENS)]
        began = time.perf_counter()
        with ServerProcess(options, Path(folder) / "log") as server:
            wrong = asyncio.run(check_calls(server.url, requests))
    if wrong:
        sys.exit("\n".join([*wrong[:20], f"{len(wrong)} faults in {len(requests)} forced calls"]))
    print(f"{len(requests)} forced calls in {time.perf_counter() - began:.0f} s: streamed as whole, and valid")


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=0)
    parser.add_argument("--calls", type=int, default=0)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("-m", "--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 8))
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args(given)
    if arguments.speed:
        return report_speed(arguments)
    if arguments.calls:
        return report_calls(arguments)
    tokens = large_vocabulary()
    began = time.perf_counter()
    tokens.prepare()
    print(f"{tokens.count} tokens prepared in {time.perf_counter() - began:.2f} s")
    compile_format(OutputFormat("regex", "a"), tokens)  # starts the process of trials
    mask_of(compile_format(OutputFormat("json_object"), tokens).start(), tokens)
    report_masks(tokens)
    if arguments.schemas:
        check_schemas(arguments.schemas)


if __name__ == "__main__":
    main()
