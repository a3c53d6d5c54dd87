"""`sharpi bench --streams`: that it serves the requests together, and that its figures fit together."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_model import cli_runner

from sharpi.benchmark.streams import part
from sharpi.cli import main

CPU = ("--device", "cpu", "-t", "1")
FAST = (*CPU, "--tokens", "40")


def run(*arguments: str) -> Any:
    return cli_runner().invoke(main, ["bench", *arguments], prog_name="sharpi")


def test_a_share_of_the_values_does_not_exceed_it() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert [part(values, share) for share in (0.01, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert part([7.0], 0.99) == 7.0


@pytest.mark.parametrize("long", [(), ("--long-prompt", "200")])
def test_streams_are_measured(long: tuple[str, ...]) -> None:
    # Answers long enough that the first request is not half done before the last has been submitted.
    said = run("--streams", "1", "--streams", "6", "--tokens", "300", "--json", *CPU, *long)
    assert said.exit_code == 0, said.output
    one, six = json.loads(said.stdout)["streams"]
    assert (one["streams"], six["streams"]) == (1, 6)
    most = 2 if long else 1  # the long prompt has a token of answer too
    assert 1.0 <= one["rows"] <= most and 3.0 < six["rows"] <= 7.0
    for figures in (one, six):
        assert (figures["prompt_tokens"], figures["answer_tokens"]) == (150, 150)
        assert 0 < figures["first_token_median"] <= figures["first_token_p99"]
        assert 0 < figures["gap_median"] <= figures["gap_p99"] <= figures["gap_largest"]
        assert figures["tokens_per_second"] > 0
        assert 0 < figures["host"] < figures["gap_largest"]
        assert figures["hidden"] == 0, "the CPU is the device"
        assert 0 <= figures["again"] < 0.5


def test_the_table_has_a_line_for_each_number_of_streams() -> None:
    lines = run("--streams", "2", "--streams", "3", *FAST).stdout.splitlines()
    assert "requests of 20 + 20 tokens, all at once" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["streams", "2", "3"]
    assert lines[1].endswith("host a step  hidden   again")
    assert [line.split()[-3:-1] for line in lines[2:]] == 2 * [["µs", "0%"]]


@pytest.mark.parametrize(("arguments", "said"), [
    (("--tokens", "64"), "--tokens needs --streams"),
    (("--long-prompt", "64"), "--long-prompt needs --streams"),
    (("--streams", "2", "--decode", "5"), "--decode times single requests"),
    (("--draft-tokens", "2"), "--draft-tokens needs --draft mtp or --draft ngram"),
    (("--streams", "2", "-c", "256"), "requests of 512 tokens do not fit into a context of 256: -c sets it"),
    (("--streams", "2", "--tokens", "40", "-c", "64", "--long-prompt", "64"),
     "a prompt of 64 tokens and its answer do not fit into a context of 64: -c sets it"),
])
def test_options_that_would_be_ignored_are_refused(arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and said in result.output
