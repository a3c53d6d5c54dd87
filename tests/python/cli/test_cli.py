"""The commands: what they print where, their exit codes, and how they end when something goes wrong."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import Result
from fake_model import CONTROL_TOKEN, SLOW_PROGRAM, SUPPORT, FakeModel, Script, cli_runner, install
from gguf import GGUFWriter

from sharpi.benchmark import Benchmark
from sharpi.cli import habits, main
from sharpi.cli.text import closing_line, printable
from sharpi.errors import InvalidRequestError, ModelFileError, OutOfMemoryError
from sharpi.machine.hardware import Gpu
from sharpi.words import size


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    monkeypatch.delenv("SHARPI_KV_DTYPE", raising=False)
    return install(monkeypatch)


def sharpi(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return cli_runner().invoke(main, arguments, input=stdin, catch_exceptions=False, prog_name="sharpi")


def start_slow(*arguments: str) -> subprocess.Popen:
    """The command as a program of its own, with a fake model that takes its time."""
    return subprocess.Popen([sys.executable, "-c", SLOW_PROGRAM, str(SUPPORT), *arguments], text=True,
                            encoding="utf-8", stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed_ctrl_c)


def heed_ctrl_c() -> None:
    """What a shell starts in the background ignores Ctrl-C, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


# --- the group ---------------------------------------------------------------------------------------------------


def test_alone_it_shows_help() -> None:
    result = sharpi()
    assert result.exit_code == 0
    assert all(name in result.stdout for name in ("run", "chat", "inspect", "plan", "bench", "--version"))


def test_version() -> None:
    result = sharpi("--version")
    assert result.exit_code == 0 and re.fullmatch(r"sharpi \S.*\n", result.stdout)


@pytest.mark.parametrize("command", ["run", "chat", "inspect", "plan", "bench"])
def test_every_command_has_help(command: str) -> None:
    result = sharpi(command, "--help")
    assert result.exit_code == 0 and result.stdout.startswith(f"Usage: sharpi {command}")


@pytest.mark.parametrize("error", [
    ModelFileError.about("x.gguf", "the file is truncated"),
    InvalidRequestError("the prompt is empty"),
    OutOfMemoryError("4.0 GiB more are needed"),
])
def test_an_error_is_one_line_and_code_2(script: Script, error: Exception) -> None:
    def fail(_arguments: dict) -> None:
        raise error

    script.on_load = fail
    result = sharpi("run", "-p", "Once")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == f"sharpi: error: {error}\n"


def test_an_error_of_several_lines_is_put_on_one(script: Script) -> None:
    def fail(_arguments: dict) -> None:
        raise ModelFileError("first\nsecond  word")

    script.on_load = fail
    assert sharpi("run", "-p", "Once").stderr == "sharpi: error: first second  word\n"


def test_running_out_of_memory_is_said(script: Script) -> None:
    def fail(_arguments: dict) -> None:
        raise MemoryError

    script.on_load = fail
    result = sharpi("run", "-p", "Once")
    assert result.exit_code == 2 and result.stderr.startswith("sharpi: error: out of memory")


@pytest.mark.parametrize("arguments", [
    ["nonsense"], ["--nonsense"], ["run", "--nonsense"], ["run", "-p", "a", "-f", "b"],
    ["run", "-p", "a", "-n", "-2"], ["run", "-p", "a", "--temp", "-1"], ["run", "-p", "a", "--top-p", "1.5"],
    ["run", "-p", "a", "-t", "0"], ["run", "-p", "a", "-b", "0"], ["run", "-p", "a", "--device", "tpu"],
    ["run", "-p", "a", "--kv-dtype", "int3"], ["run", "-p", "a", "--sequences", "0"], ["bench", "--draft", "off"],
    ["run", "-p", "a", "--draft", "guess"], ["chat", "--draft-tokens", "8"], ["bench", "--draft-tokens", "0"],
    ["run", "-p", "a", "--logit-bias", "5"], ["run", "-p", "a", "--logit-bias", "x=1"],
    ["run", "-p", "a", "--logit-bias", "5=nan"], ["bench", "--repeat", "0"], ["inspect", "a", "-m", "b"],
])
def test_wrong_use_is_one_line_and_code_2(script: Script, arguments: list[str]) -> None:
    result = sharpi(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.fullmatch(r"sharpi: error: .*--help\)\n", result.stderr)
    assert script.loads == []


# --- run ---------------------------------------------------------------------------------------------------------


def test_run_prints_text_on_stdout_and_speed_on_stderr(script: Script) -> None:
    result = sharpi("run", "-p", "Once upon a time")
    assert result.exit_code == 0
    assert result.stdout == "Once upon a time there was a fox.\n"
    assert result.stderr == "prompt 16 tokens, 1,234 tokens/s; generated 17 tokens, 67.9 tokens/s\n"


def test_run_without_echo_and_stats(script: Script) -> None:
    result = sharpi("run", "-p", "Once upon a time", "--no-echo", "--no-stats")
    assert (result.stdout, result.stderr) == (" there was a fox.\n", "")


def test_run_hands_its_switches_on(script: Script) -> None:
    sharpi("run", "-m", "a.gguf", "-c", "77", "-t", "2", "--device", "cuda", "--vram", "12GiB", "-b", "64",
           "--kv-dtype", "fp16", "--prompt", "exact",
           "--cpu-moe", "--sequences", "9", "--no-mtp", "--profile", "machine.json", "-p", "Once",
           "-n", "5", "--temp", "0.5", "--top-k", "3", "--top-p", "0.7", "--min-p", "0.1", "--repeat-penalty", "1.5",
           "--presence-penalty", "0.25", "--frequency-penalty", "-0.5", "--logit-bias", "7=-inf",
           "--logit-bias", "8=2", "--seed", "11", "--stop", "fox", "--stop", "hen", "--draft", "ngram",
           "--draft-tokens", "3")
    (load,) = script.loads
    assert {k: load[k] for k in ("path", "context", "threads", "batch", "device", "vram", "kv_dtype", "cpu_moe",
                                 "sequences", "prompt", "mtp", "plan", "profile")} == {
        "path": "a.gguf", "context": 77, "threads": 2, "batch": 64, "device": "cuda", "vram": "12GiB",
        "kv_dtype": "fp16", "cpu_moe": True, "sequences": 9, "prompt": "exact", "mtp": False, "plan": None,
        "profile": "machine.json"}
    assert load.get("progress") is None  # standard error is no terminal here
    assert script.requests == [{
        "max_tokens": 5, "temperature": 0.5, "top_k": 3, "top_p": 0.7, "min_p": 0.1, "repetition_penalty": 1.5,
        "presence_penalty": 0.25, "frequency_penalty": -0.5, "logit_bias": {7: float("-inf"), 8: 2.0}, "seed": 11,
        "stop": ("fox", "hen"), "draft": "ngram", "draft_tokens": 3}]


@pytest.mark.parametrize("arguments", [["-p", "fast"], ["--text", "fast"], ["fast"], ["--text=fast"]])
@pytest.mark.parametrize("mode", [None, "exact", "fast"])
def test_the_text_of_a_prompt_and_how_it_is_computed_are_two_things(script: Script, arguments: list[str],
                                                                    mode: str | None) -> None:
    assert sharpi("run", *arguments, *(["--prompt", mode] if mode else [])).exit_code == 0
    assert script.prompts == ["fast"] and script.loads[0]["prompt"] == mode


@pytest.mark.parametrize("text", ["Once upon a time", "Exact", "", "a" * 5000, "\n", "-p"])
@pytest.mark.parametrize("command", ["run", "chat", "bench", "plan"])
def test_a_text_after_prompt_is_refused_and_told_where_it_belongs(script: Script, command: str, text: str) -> None:
    result = sharpi(command, "--prompt", text)
    assert result.exit_code == 2 and result.stdout == "" and script.loads == []
    assert result.stderr.count("\n") == 1 and len(result.stderr) < 300
    assert (
        "is no prompt mode: give exact or fast" in result.stderr
        and "after -p, as in `sharpi run -p TEXT`" in result.stderr
    )


def test_run_hands_a_plan_on_and_shows_notices(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARPI_KV_DTYPE", "fp16")
    script.on_load = lambda arguments: arguments["notice"]("less than \x1b[31mplanned")
    result = sharpi("run", "--plan", "plan.json", "-p", "Once", "--no-stats")
    assert result.stderr == "sharpi: less than \\x1b[31mplanned\n"
    (load,) = script.loads
    assert (load["plan"], load["kv_dtype"], load["context"]) == ("plan.json", None, None)


def test_what_the_environment_says_is_left_to_the_plan(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARPI_KV_DTYPE", "fp16")
    sharpi("run", "-p", "Once")
    assert script.loads[0]["kv_dtype"] is None, "not said: the environment's is what the plan asks"
    assert script.loads[0]["cpu_moe"] is None, "not said: the environment's is what the plan asks"
    assert script.loads[0]["mtp"] is None, "not said: where the file has a prediction layer"


@pytest.mark.parametrize("limit, said", [("-1", True), ("100", True), ("7", False), ("5", False)])
def test_run_says_when_the_context_ended_it(script: Script, limit: str, said: bool) -> None:
    script.context = 10
    script.answer = "x" * 20  # of which seven fit: the last need not be held
    result = sharpi("run", "-p", "Once", "-n", limit)
    assert script.requests[0]["max_tokens"] == (None if limit == "-1" else int(limit))
    assert ("context of 10 tokens is full" in result.stderr) == said


@pytest.mark.parametrize("arguments", [["-p", "-"], ["-f", "-"]])
@pytest.mark.parametrize("text, prompt", [("Öne\n", "Öne"), ("a\n\n", "a\n"), ("a\r\n", "a"), ("a", "a")])
def test_run_reads_standard_input(script: Script, arguments: list[str], text: str, prompt: str) -> None:
    assert sharpi("run", *arguments, stdin=text.encode()).exit_code == 0
    assert script.prompts == [prompt]


def test_run_reads_a_file(script: Script, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("Zwölf Hühner\n".encode())
    assert sharpi("run", "-f", str(file)).stdout == "Zwölf Hühner there was a fox.\n"


@pytest.mark.parametrize("content", [None, b"caf\xe9"])
def test_an_unreadable_prompt_is_said(script: Script, tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "prompt.txt"
    if content is not None:
        file.write_bytes(content)
    result = sharpi("run", "-f", str(file))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"sharpi: error: {file}: ") and result.stderr.count("\n") == 1


def test_run_chat_uses_the_template_and_shows_the_answer_alone(script: Script) -> None:
    result = sharpi("run", "--chat", "-p", "Hello")
    assert script.prompts == ["<user>Hello\n<assistant>"]
    assert result.stdout == " there was a fox.\n"


def test_run_chat_without_template_is_an_error(script: Script) -> None:
    script.template = None
    result = sharpi("run", "--chat", "-p", "Hello")
    assert result.exit_code == 2 and "no chat template" in result.stderr


def test_ctrl_c_ends_quietly_with_the_text_so_far(script: Script) -> None:
    def interrupt(index: int) -> None:
        if index == 6:
            raise KeyboardInterrupt

    script.on_token = interrupt
    result = sharpi("run", "-p", "Once")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "Once there\n", "")
    assert script.stopped == 1


def test_text_the_terminal_cannot_show_does_not_end_it(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    script.answer = " ein Fräulein"
    with pytest.raises(SystemExit) as end:
        main(["run", "-p", "Es war", "--no-stats"], prog_name="sharpi")
    narrow.flush()
    assert end.value.code == 0
    assert narrow.buffer.getvalue() == b"Es war ein Fr?ulein\n"


def test_a_real_ctrl_c_ends_quietly() -> None:
    process = start_slow("run", "-p", "Once", "-n", "-1")
    start = process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    rest, error = process.communicate(timeout=60)
    assert rest.endswith("\n") and (start + rest).strip() in "Once" + "abcdefghij" * 49, "all text so far, and no more"
    assert (process.returncode, error) == (130, "")


def test_a_closed_pipe_ends_quietly() -> None:
    process = start_slow("run", "-p", "Once", "-n", "-1")
    assert process.stdout.read(5) == "Oncea"
    process.stdout.close()
    with process.stderr:
        error = process.stderr.read()
    assert (process.wait(timeout=60), error) == (141, "")


def test_inspect_into_a_closed_pipe_ends_quietly(odd_file: Path) -> None:
    program = "from sharpi.cli import main; main(prog_name='sharpi')"
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run([sys.executable, "-c", program, "inspect", str(odd_file)], stdout=pipe, timeout=60,
                              stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, b"")


# --- with the bundled model ----------------------------------------------------------------------------------------


def test_the_bundled_model_tells_a_story() -> None:
    arguments = ("run", "-p", "Once upon a time", "-n", "40", "--logit-bias", "0=-inf", "--seed", "1", "-t", "2")
    first, again = sharpi(*arguments), sharpi(*arguments)
    assert first.exit_code == 0
    assert first.stdout.startswith("Once upon a time") and len(first.stdout.split()) > 12
    assert re.fullmatch(r"prompt \d+ tokens, [\d.,]+ tokens/s; generated 40 tokens, [\d.,]+ tokens/s\n", first.stderr)
    assert again.stdout == first.stdout, "same seed, same text"


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "notes.gguf"
    file.write_text("not a model at all, just some words in a file")
    for command in (["run", "-p", "x", "-m"], ["chat", "-m"], ["plan", "-m"], ["inspect"], ["bench", "-m"]):
        result = sharpi(*command, str(file))
        assert result.exit_code == 2, command
        assert result.stderr.startswith(f"sharpi: error: {file}: ") and result.stderr.count("\n") == 1
        assert result.stdout == ""


@pytest.mark.parametrize("arguments, word", [
    (["-p", ""], "empty"),
    (["-p", "word " * 5000], "context"),
    (["-p", "x", "-c", "100000000"], "context"),
])
def test_impossible_requests_are_said(arguments: list[str], word: str) -> None:
    result = sharpi("run", "-t", "2", *arguments)
    assert result.exit_code == 2
    assert word in result.stderr and result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize("arguments, word", [
    (["--vram", "some"], "no amount of VRAM"),
    (["--vram", "1GiB", "--device", "cpu"], "means nothing"),
])
def test_impossible_budgets_are_said(arguments: list[str], word: str) -> None:
    result = sharpi("run", "-p", "x", "-n", "1", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert word in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["run", "-p", "x"], ["chat"], ["bench"]])
def test_a_gpu_that_is_not_there_is_said(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharpi.planning.planner.gpu", lambda: "there is no usable GPU: no NVIDIA driver is installed")
    result = sharpi(*command, "--device", "cuda")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == ("sharpi: error: device cuda: there is no usable GPU: no NVIDIA driver is installed\n")


def test_a_gpu_with_too_little_room_is_said_and_the_cpu_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharpi.planning.planner.gpu", lambda: Gpu("Some GPU", 0, "9.0", 132, 80 << 30, 260 << 20))
    result = sharpi("run", "-p", "Once", "-n", "2", "--no-stats")
    assert result.exit_code == 0 and result.stdout.startswith("Once")
    assert re.fullmatch(
        r"sharpi: on the CPU: Sharpi story needs .* of VRAM.* and there are .* are missing.*\n", result.stderr
    )


def run_without_a_gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = "from sharpi.cli import main; main(prog_name='sharpi')"
    return subprocess.run([sys.executable, "-c", program, *arguments], text=True, timeout=120, capture_output=True,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}, check=False)


def test_a_driver_that_shows_no_gpu_is_said() -> None:
    """With nothing made up: this machine's own reason, or the one for a GPU that is hidden."""
    done = run_without_a_gpu("run", "-p", "x", "--device", "cuda")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"sharpi: error: device cuda: \S.*\n", done.stderr)


def test_auto_runs_on_the_cpu_where_no_gpu_is() -> None:
    done = run_without_a_gpu("run", "-p", "Once", "-n", "2", "--temp", "0")
    assert done.returncode == 0 and done.stdout.startswith("Once"), done.stderr


# --- inspect ------------------------------------------------------------------------------------------------------


@pytest.fixture
def odd_file(tmp_path: Path) -> Path:
    """A sound GGUF file of an unknown architecture, whose texts try to control the terminal."""
    path = tmp_path / "odd.gguf"
    writer = GGUFWriter(path, "spiral")
    writer.add_name("odd \x1b[31m one")
    writer.add_string("spiral.motto", "round " * 40)
    writer.add_float32("spiral.eps", float("nan"))
    writer.add_bool("spiral.turns", True)
    writer.add_array("spiral.numbers", list(range(100)))
    writer.add_array("tokenizer.ggml.tokens", ["a\n", "b", "c"])
    writer.add_tensor("first.weight", np.ones((4, 256), dtype=np.float32))
    writer.add_tensor("second.weight", np.ones((2, 64), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_inspect_shows_a_file_that_cannot_run(odd_file: Path) -> None:
    result = sharpi("inspect", str(odd_file), "--tensors")
    assert result.exit_code == 0
    text = result.stdout
    assert "\x1b" not in text and "odd \\x1b[31m one" in text
    assert re.search(r"architecture +spiral\n", text)
    assert re.search(r"runs here +no: .*spiral", text)
    assert re.search(r"parameters +1,152\n", text)
    assert "spiral.numbers = [0, 1, 2, 3, 4, 5, 6, 7, …] (100 elements)\n" in text
    assert "(240 characters)\n" in text
    assert "tokenizer.ggml.tokens = [a\\n, b, c]\n" in text
    assert re.search(r"F32 +1 +1,024 +4\.0 KiB +32\.00\n", text)
    assert re.search(r"second\.weight +F16 +256 B +64 × 2$", text, re.MULTILINE)


def test_an_unknown_architecture_is_refused_in_one_line(odd_file: Path) -> None:
    for command in (["run", "-p", "x"], ["chat"], ["plan"], ["bench"]):
        result = sharpi(*command, "-m", str(odd_file))
        assert result.exit_code == 2 and result.stdout == "", command
        assert result.stderr.count("\n") == 1 and "unknown architecture 'spiral'" in result.stderr


def test_inspect_lists_tensors_only_when_asked(odd_file: Path) -> None:
    assert "second.weight" not in sharpi("inspect", "-m", str(odd_file)).stdout


def test_inspect_json(odd_file: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    report = json.loads(sharpi("inspect", "--json", str(odd_file)).stdout, parse_constant=refuse)
    assert report["architecture"] == "spiral" and report["version"] == 3
    assert report["parameters"] == 1152 and report["bytes"] == 4096 + 256
    assert report["runs"] is False and "spiral" in report["obstacle"]
    assert report["metadata"]["spiral.numbers"] == {"length": 100, "first": list(range(8))}
    assert report["metadata"]["spiral.turns"] is True
    assert report["types"][0] == {"type": "F32", "tensors": 1, "elements": 1024, "bytes": 4096}
    assert report["tensors"][1] == {"name": "second.weight", "type": "F16", "shape": [64, 2], "bytes": 256}


def test_inspect_knows_the_bundled_model() -> None:
    report = json.loads(sharpi("inspect", "--json").stdout)
    assert report["architecture"] == "qwen3moe" and report["runs"] is True and report["obstacle"] is None


# --- bench --------------------------------------------------------------------------------------------------------


@pytest.fixture
def timed(script: Script, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Gives the fake its two timers, whose runs take 4 s, 1 s, 2 s, … in turn; returns the list of runs."""
    runs: list[tuple[str, int]] = []

    def seconds(kind: str, tokens: int) -> float:
        runs.append((kind, tokens))
        same = sum(1 for run in runs if run == (kind, tokens))
        return [4.0, 1.0, 2.0, 8.0][(same - 1) % 4]

    monkeypatch.setattr(Benchmark, "prefill", lambda self, tokens: seconds("prefill", tokens))
    monkeypatch.setattr(Benchmark, "decode", lambda self, depth, tokens: seconds("decode", tokens))
    return runs


def test_bench_json_has_exactly_this_shape(timed: list[tuple[str, int]], script: Script) -> None:
    report = json.loads(sharpi("bench", "--json", "--prefill", "32", "--decode", "16").stdout)
    first = report.pop("first_token_seconds")
    assert isinstance(first, float) and 0 < first < 60
    assert report == {
        "model": "fake", "device": "cpu", "device_name": "avx2", "prompt": "exact", "threads": 3, "isa": "avx2",
        "load_seconds": 0.25, "experts": None,
        "results": [
            {"kind": "prefill", "tokens": 32, "tokens_per_second": {"median": 16.0, "min": 4.0, "max": 32.0}},
            {"kind": "decode", "tokens": 16, "tokens_per_second": {"median": 8.0, "min": 2.0, "max": 16.0}},
        ]}
    assert timed.count(("prefill", 32)) == timed.count(("decode", 16)) == 4  # one to warm up, three timed
    assert script.loads[0]["context"] == 32


def test_bench_takes_several_sizes_and_none(timed: list[tuple[str, int]]) -> None:
    result = sharpi("bench", "--prefill", "8", "--prefill", "24", "--decode", "0", "--repeat", "1")
    assert result.exit_code == 0
    assert [line.split()[:2] for line in result.stdout.splitlines()[2:]] == [["prefill", "8"], ["prefill", "24"]]
    assert not any(kind == "decode" for kind, _ in timed)


def test_bench_on_a_gpu_compares_replay_with_launches(timed: list[tuple[str, int]],
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"device": "cuda", "device_name": "Some GPU", "graphs": True, "kernels_per_step": 99}.items():
        monkeypatch.setattr(FakeModel, name, value, raising=False)
    arguments = ("bench", "--prefill", "0", "--decode", "16", "--depth", "500")
    report = json.loads(sharpi(*arguments, "--json").stdout)
    assert report["device"] == "cuda" and report["device_name"] == "Some GPU"
    assert [(entry["graphs"], entry["kernels_per_token"], entry["depth"]) for entry in report["results"]] == [
        (True, 99, 500), (False, 99, 500)]
    table = sharpi(*arguments).stdout
    assert "fake: Some GPU, exact prompts, loaded" in table
    assert "after 500 tokens, with graphs, 99 kernels a token" in table and "without graphs" in table
    monkeypatch.setattr(FakeModel, "graphs", False)
    assert [entry["graphs"] for entry in json.loads(sharpi(*arguments, "--json").stdout)["results"]] == [False]


def test_bench_of_a_plan_takes_its_context(timed: list[tuple[str, int]], script: Script) -> None:
    assert sharpi("bench", "--plan", "plan.json", "--prefill", "0", "--decode", "0").exit_code == 0
    assert (script.loads[0]["context"], script.loads[0]["plan"]) == (None, "plan.json")
    assert sharpi("bench", "--prefill", "0", "--decode", "0").exit_code == 0 and script.loads[1]["context"] == 1


def test_bench_makes_room_for_the_depth(timed: list[tuple[str, int]], script: Script) -> None:
    sharpi("bench", "--prefill", "32", "--decode", "16", "--depth", "500")
    assert script.loads[0]["context"] == 516


def test_bench_runs_the_bundled_model() -> None:
    result = sharpi("bench", "--prefill", "16", "--decode", "4", "--repeat", "2", "--json", "-t", "2",
                    "--device", "cpu")
    report = json.loads(result.stdout)
    assert [entry["kind"] for entry in report["results"]] == ["prefill", "decode"] and report["device"] == "cpu"
    for entry in report["results"]:
        spread = entry["tokens_per_second"]
        assert 0 < spread["min"] <= spread["median"] <= spread["max"]
    assert report["first_token_seconds"] >= report["load_seconds"] > 0


# --- wording ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count, text", [
    (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1048575, "1.0 MiB"), (15 << 20, "15.0 MiB"),
    (3 << 29, "1.50 GiB"), (5 << 40, "5.00 TiB"),
])
def test_size(count: int, text: str) -> None:
    assert size(count) == text


def test_closing_line_tells_what_was_kept() -> None:
    stats = {"prompt_tokens": 3, "prompt_tokens_per_second": 10.0, "generated_tokens": 0,
             "generation_tokens_per_second": 0.0, "reused_tokens": 20}
    assert closing_line(stats) == ("prompt 3 tokens, 10.0 tokens/s (20 more kept from before); "
                                   "generated 0 tokens, 0.0 tokens/s")


def test_the_help_of_plan_says_which_switches_it_makes_void() -> None:
    said = " ".join(sharpi("run", "--help").stdout.split())
    said = said[said.index("--plan FILE"):said.index("--profile FILE")]
    for name in ("SHARPI_CUDA_PARTIAL_WEIGHT_CACHE,", "SHARPI_CUDA_PARTIAL_WEIGHT_CACHE_GB,", "SHARPI_CUDA_ROW_SPLIT",
                 "SHARPI_CPU_MOE"):
        assert name in said, name
    assert "no effect" in said


def test_printable_keeps_letters_and_spells_controls_out() -> None:
    assert printable("Grüße\t\x1b]0;x\x07\ud800") == "Grüße\\t\\x1b]0;x\\x07\\ud800"


# --- help and habits ------------------------------------------------------------------------------------------------


def every_command() -> dict[str, click.Command]:
    return {"": main, **main.commands}


@pytest.mark.parametrize("name", every_command())
def test_help_is_whole_at_80_columns(name: str) -> None:
    text = sharpi(*filter(None, (name,)), "--help").stdout
    assert max(map(len, text.splitlines())) <= 80 and "..." not in text.replace("[ARGS]...", "").replace("NAME...", "")
    command = every_command()[name]
    for option in (parameter for parameter in command.params if isinstance(parameter, click.Option)):
        assert re.search(rf"^  .*{option.opts[-1]}\b", text, re.MULTILINE), option.opts
        assert all(word in text for word in (option.help or "").split() if word.isalpha()), option.help


def test_every_command_is_in_a_section() -> None:
    placed = [name for names in main.sections.values() for name in names]
    assert sorted(placed + ["version", "completion", "help"]) == sorted(main.commands)


def test_hints_name_what_there_is() -> None:
    options = {name for command in every_command().values() for parameter in command.params
               for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    for hint in (*habits._OPTION_HINTS.values(), *habits._COMMAND_HINTS.values()):
        assert set(re.findall(r"(?<![\w=-])--?[a-z][\w-]*", hint)) <= options, hint
        assert set(re.findall(r"`sharpi (\w+)", hint)) <= set(main.commands), hint


@pytest.mark.parametrize("option", habits._OPTION_HINTS)
def test_an_option_of_llama_cpp_is_known_or_answered(script: Script, option: str) -> None:
    """Whatever follows it, it is never read as several short options."""
    known = {name for parameter in main.commands["run"].params for name in parameter.opts}
    for rest in ((), ("on",), ("8",)):
        result = sharpi("run", option, *rest, "-p", "Once")
        if option in known:
            assert option in ("-hf", "--hf-repo")
        else:
            assert (result.exit_code, result.stdout, script.loads) == (2, "", [])
            assert result.stderr.startswith(f"sharpi: error: no such option: {option}; "), result.stderr


@pytest.mark.parametrize("arguments, error", [
    (["-pn", "5"], "no such option: -pn"), (["-np5", "x"], "no such option: -np5"), (["-hv"], "no such option: -hv"),
    (["-n5x", "x"], "no such option: -n5x"), (["-fprompt.txt"], "no such option: -fprompt.txt"),
    (["--stat", "x"], "did you mean --stats?"), (["--max_tokens", "5"], "did you mean --max-tokens?"),
])
def test_short_options_are_not_clustered(script: Script, arguments: list[str], error: str) -> None:
    result = sharpi("run", *arguments)
    assert (result.exit_code, result.stdout, script.loads) == (2, "", []) and error in result.stderr


def test_values_may_look_like_options(script: Script) -> None:
    assert sharpi("run", "-p", "-ngl", "--stop", "--mlock", "-n5", "-s-1", "--seed=3").exit_code == 0
    assert script.prompts == ["-ngl"]
    assert [script.requests[0][name] for name in ("stop", "max_tokens", "seed")] == [("--mlock",), 5, 3]
    assert sharpi("run", "-n", "5", "--", "-ngl").exit_code == 0 and script.prompts[1] == "-ngl"


def test_a_random_seed_is_none(script: Script) -> None:
    for arguments in ((), ("-s", "-1"), ("--seed=-1",)):
        assert sharpi("run", "Once", *arguments).exit_code == 0
    assert [request["seed"] for request in script.requests] == [None] * 3


def test_control_tokens_are_read_if_asked_for(script: Script) -> None:
    for arguments in ((), ("--special",)):
        assert sharpi("run", f"a{CONTROL_TOKEN}b", *arguments).exit_code == 0
    assert script.prompts == [f"a{CONTROL_TOKEN}b", "a\0b"]


def test_run_chat_has_a_system_message(script: Script) -> None:
    assert sharpi("run", "--chat", "--system", "Be brief.", "--no-thinking", "Hello").exit_code == 0
    assert script.prompts == ["<system>Be brief.\n<user>Hello\n<assistant><think></think>"]


def test_an_interrupted_line_is_ended_once(script: Script) -> None:
    script.answer = " there.\n"
    assert sharpi("run", "Once").stdout == "Once there.\n"
    script.answer = ""
    assert sharpi("run", "Once", "--no-echo").stdout == ""


def test_an_error_that_has_no_file_is_not_taken_for_another(script: Script) -> None:
    def fail(_arguments: dict) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    script.on_load = fail
    assert sharpi("run", "Once").stderr == "sharpi: error: input or output: Cannot allocate memory\n"


def test_a_bug_is_not_hidden(script: Script) -> None:
    def fail(_arguments: dict) -> None:
        raise ZeroDivisionError

    script.on_load = fail
    with pytest.raises(ZeroDivisionError):
        sharpi("run", "Once")


def test_an_error_does_not_drive_the_terminal() -> None:
    result = cli_runner().invoke(main, ["run", "-f", "no\x1b[2Jsuch\nfile"])
    assert result.exit_code == 2 and result.stderr.startswith("sharpi: error: no\\x1b[2Jsuch file: ")
    assert all(line.isprintable() for line in result.stderr.splitlines())
