"""`benchmarks/decode_rows.py`: that it measures steps that texts share, and what it reads in llama.cpp's table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sharpi.model import BUNDLED_MODEL

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import decode_rows  # noqa: E402
from decode_rows import Steps  # noqa: E402

LLAMA_OUTPUT = """
main: n_kv_max = 4608, n_batch = 2048, n_ubatch = 512, flash_attn = 1, is_pp_shared = 0, n_gpu_layers = 99

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   256 |     32 |    1 |    288 |    0.025 | 10240.00 |    0.320 |   100.00 |    0.345 |   834.78 |
|   256 |     32 |   16 |   4608 |    0.204 | 20078.43 |    0.640 |   800.00 |    0.844 |  5459.72 |

llama_perf_context_print:        load time =     821.61 ms
"""


def test_llamas_table_is_read_by_the_names_of_its_columns():
    expected = [Steps(1, 10.0, 100.0), Steps(16, 20.0, 800.0)]
    assert decode_rows.llama_steps(LLAMA_OUTPUT, 32) == expected
    turned = "\n".join("|".join(["", *reversed(line.strip("|").split("|")), ""]) if line.startswith("|") else line
                       for line in LLAMA_OUTPUT.splitlines())
    assert decode_rows.llama_steps(turned, 32) == expected
    with pytest.raises(SystemExit, match="no table"):
        decode_rows.llama_steps("error: unknown argument", 32)


def test_llama_measures_the_same_rows_at_the_same_depth():
    arguments = decode_rows.arguments_of(["-m", "a.gguf", "--rows", "1", "16", "--depth", "300", "--steps", "20",
                                          "--llama-batched-bench", "bench"])
    command = " ".join(decode_rows.llama_command(arguments))
    assert command == "bench -m a.gguf -npp 300 -ntg 20 -npl 1,16 -ngl 99 -fa 1 -c 5120"
    arguments.device, arguments.threads = "cpu", 2
    command = " ".join(decode_rows.llama_command(arguments))
    assert command == "bench -m a.gguf -npp 300 -ntg 20 -npl 1,16 -ngl 0 -fa 1 -t 2 -tb 2 -c 5120"


def test_the_table_has_a_line_for_each_number_of_rows():
    ours = [Steps(1, 5.0, 200.0), Steps(16, 8.0, 2000.0), Steps(128, 40.0, 3200.0)]
    assert decode_rows.table(ours, []).splitlines()[2:] == [
        "| 1 | 5.00 | 1.00 | 200 |", "| 16 | 8.00 | 1.60 | 2000 |", "| 128 | 40.00 | 8.00 | 3200 |"]
    beside = decode_rows.table(ours, decode_rows.llama_steps(LLAMA_OUTPUT, 32)).splitlines()[2:]
    assert beside == ["| 1 | 5.00 | 1.00 | 200 | 10.00 | 100 | 2.00 |",
                      "| 16 | 8.00 | 1.60 | 2000 | 20.00 | 800 | 2.50 |", "| 128 | 40.00 | 8.00 | 3200 | | | |"]


def test_steps_of_several_texts_are_measured(tmp_path, capsys):
    file = tmp_path / "figures.json"
    decode_rows.main(["-m", str(BUNDLED_MODEL), "--device", "cpu", "--threads", "1", "--rows", "1", "3", "--depth", "7",
                      "--steps", "2", "--json", str(file)])
    assert len(capsys.readouterr().out.splitlines()) == 4
    figures = json.loads(file.read_text())
    assert [steps["rows"] for steps in figures["sharpi"]] == [1, 3] and not figures["llama_cpp"]
    for steps in figures["sharpi"]:
        assert steps["milliseconds"] > 0
        assert steps["tokens_per_second"] == pytest.approx(1e3 * steps["rows"] / steps["milliseconds"])
