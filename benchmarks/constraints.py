"""What constraints cost: a mask, a grammar's compilation, and the preparation of a vocabulary of 150,000 tokens.

    python benchmarks/constraints.py            the figures
    python benchmarks/constraints.py --schemas 1000    also: random answers to that many random schemas, each checked
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

TESTS = Path(__file__).parents[1] / "tests" / "python"
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "constraints")]

from constrained import gpt2, mask_of, walk  # noqa: E402
from test_grammars import random_schema  # noqa: E402
from vocabularies import CONTROL, NORMAL, byte_level_metadata, tokenizer_of  # noqa: E402

from sharpi.constraints.answers import AnswerRules  # noqa: E402
from sharpi.constraints.grammar import compile_format  # noqa: E402
from sharpi.constraints.tokens import Tokens  # noqa: E402
from sharpi.serve.turns import OutputFormat, Tool  # noqa: E402
from sharpi.text.answers.formats import HERMES  # noqa: E402

_SCHEMA = {"type": "object", "required": ["name", "tags"], "additionalProperties": False, "properties": {
    "name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}},
    "address": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"pattern": "^[0-9]{5}$",
                                                                                       "type": "string"}}}}}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=0)
    arguments = parser.parse_args()
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
