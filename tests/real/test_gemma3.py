"""Gemma 3 270M, a base model: it continues text, and its layers see windows of 512 tokens, except every sixth.

The expected texts were the likeliest by more than what rounding moves at each token.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sharpi import Model
from sharpi.cli import main

TEXT = Path(__file__).parents[1] / "data" / "river_bank.txt"
WINDOW = 512
SEEING_ALL = 3  # layers without a window
KV_BYTES = 2 * 256 * 2  # of a token in a layer: a key and a value of 256 bfloat16 elements


def continuation(model: Model, ids: list[int], tokens: int) -> str:
    return "".join(token.text for token in model.generate(ids, temperature=0.0, max_tokens=tokens))


@pytest.mark.parametrize("prompt, expected", [
    ("1, 2, 3, 4, 5, 6, 7,", " 8, 9, 10"),
    ("Monday, Tuesday, Wednesday,", " Thursday, Friday, Saturday, Sunday"),
    ("France: Paris\nItaly: Rome\nJapan:", " Tokyo"),
    ("The opposite of hot is cold. The opposite of big is", " small."),
    ("def add(a, b):\n    return", " a + b"),
])
def test_it_continues_sensibly(prompt: str, expected: str, gemma3_model: Model) -> None:
    ids = gemma3_model.tokenize(prompt)
    assert continuation(gemma3_model, ids, len(gemma3_model.tokenize(expected, add_special=False))) == expected


def test_it_knows_what_its_windows_no_longer_see(gemma3_model: Model) -> None:
    """A text that begins again is continued from its first copy, which only the layers without a window see."""
    ids = gemma3_model.tokenize(TEXT.read_text(encoding="utf-8"))
    again = gemma3_model.tokenize("\n\n\n", add_special=False) + ids[1:25]
    first = gemma3_model.detokenize(ids[25:55])
    assert continuation(gemma3_model, ids[:WINDOW + 108] + again, 30) == first
    assert continuation(gemma3_model, ids[:1] + ids[60:WINDOW + 108] + again, 30) != first, "it is not known by heart"


def cli(*arguments: str) -> Result:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == 0, result.output
    return result


def test_inspect_says_that_it_runs_here(gemma3: Path) -> None:
    report = json.loads(cli("inspect", "--json", str(gemma3)).stdout)
    assert report["architecture"] == "gemma3" and report["runs"] is True
    assert report["parameters"] == 268_098_176
    assert {kind["type"] for kind in report["types"]} == {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"}


def test_the_plan_counts_windows(gemma3: Path) -> None:
    """Layers with a window take no more memory when the context is longer."""
    sizes = [json.loads(cli("plan", "--json", "--device", "cpu", "-c", context, "-m", str(gemma3)).stdout)["kv_bytes"]
             for context in ("16384", "32768")]
    assert sizes[1] - sizes[0] == SEEING_ALL * 16384 * KV_BYTES
