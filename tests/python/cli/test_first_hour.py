"""The first hour: commands that a new user types, right and wrong, run as they are typed.

Each line goes to a shell, which runs the real program with the bundled model. Whatever is typed, the program ends with
a documented exit code: 0; 1 if `sharpi plan` finds that the model does not fit; 2 and one line for an error; 130 for
Ctrl-C; 141 for a reader that went away. It never shows a traceback.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

import sharpi

BUNDLED = Path(sharpi.__file__).parent / "bundled" / "story.gguf"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
ENDLESS = "-n -1 --logit-bias 0=-inf -t 1"  # without its end token, the bundled model goes on until it is stopped

SLOW = {"SHARPI_CPU_ISA": "scalar"}  # so that Ctrl-C comes before the context is full


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to type in: some files, and the program under its name."""
    folder = tmp_path_factory.mktemp("first hour")
    program = folder / "bin" / "sharpi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m sharpi \"$@\"\n", encoding="utf-8")
    program.chmod(0o755)
    os.symlink(BUNDLED, folder / "story.gguf")
    (folder / "models").mkdir()
    (folder / "prompt.txt").write_text("Once upon a time\n", encoding="utf-8")
    (folder / "latin.txt").write_bytes(b"caf\xe9\n")
    (folder / "notes.gguf").write_text("some words, and no model at all", encoding="utf-8")
    (folder / "empty.gguf").touch()
    (folder / "short.gguf").write_bytes(BUNDLED.read_bytes()[:100_000])
    (folder / "secret.gguf").touch(mode=0o000)
    return folder


def environment(room: Path, **more: str) -> dict[str, str]:
    """A new user's: no switches, caches of its own, and the CPU. Output is buffered, as it is outside of containers."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(("SHARPI_", "PYTHONUNBUFFERED", "NO_COLOR", "HF_"))}
    return {**kept, "PATH": f"{room / 'bin'}:{kept['PATH']}", "HOME": str(room), "XDG_CACHE_HOME": str(room / "cache"),
            "CUDA_VISIBLE_DEVICES": "-1", "TERM": "xterm", "LC_ALL": "C.UTF-8", **more}


def typed(room: Path, line: str) -> subprocess.CompletedProcess[str]:
    # A shell in the background ignores Ctrl-C, and its children inherit that.
    return subprocess.run(["bash", "-c", line], cwd=room, env=environment(room), text=True, encoding="utf-8",
                          capture_output=True, stdin=subprocess.DEVNULL, timeout=300, check=False,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


# --- what is right -------------------------------------------------------------------------------------------------

SPEEDS = r"prompt [\d,]+ tokens?, [\d.,]+ tokens/s; generated [\d,]+ tokens?(, [\d.,]+ tokens/s)?\n"
MEASURING = r"(sharpi: measuring .*\n)?"

# The line; all of standard output; all of standard error.
RIGHT = [
    ("sharpi", r"Usage: sharpi .*Text:.*Examples:.*", ""),
    ("sharpi --help", r"Usage: sharpi .*", ""),
    ("sharpi -h", r"Usage: sharpi .*", ""),
    ("sharpi help", r"Usage: sharpi .*", ""),
    ("sharpi help run", r"Usage: sharpi run .*Sampling:.*Examples:.*", ""),
    ("sharpi run --help", r"Usage: sharpi run .*", ""),
    ("sharpi chat -h", r"Usage: sharpi chat .*", ""),
    ("sharpi version", r"sharpi \S+\n", ""),
    ("sharpi --version", r"sharpi \S+\n", ""),
    ("printf 'no text' | sharpi version", r"sharpi \S+\n", ""),
    ("sharpi completion bash", r".*_SHARPI_COMPLETE=bash_complete.*", ""),
    ("sharpi completion zsh", r"#compdef sharpi.*", ""),
    ("sharpi completion fish", r".*complete .*sharpi.*", ""),
    ('eval "$(sharpi completion bash)"; complete -p sharpi', r"complete .*_sharpi_completion.* sharpi\n", ""),
    ('COMP_WORDS="sharpi ru" COMP_CWORD=1 _SHARPI_COMPLETE=bash_complete sharpi', r"plain,run\n", ""),
    ('sharpi run "Once upon a time" -n 3 --temp 0', r"Once upon a time[^\n]+\n", SPEEDS),
    ("sharpi run -p Once -n 1", r"Once[^\n]*\n", r"prompt 2 tokens, [\d.,]+ tokens/s; generated 1 token\n"),
    ("sharpi run -p Once -n 0", r"Once\n", r"prompt 2 tokens, [\d.,]+ tokens/s; generated 0 tokens\n"),
    ("echo Once | sharpi run -n 2 --temp 0", r"Once upon a\n", SPEEDS),
    ("printf Once | sharpi run - -n 2 --temp 0", r"Once upon a\n", SPEEDS),
    ("sharpi run -n 2 --temp 0 < prompt.txt", r"Once upon a time[^\n]+\n", SPEEDS),
    ("sharpi run -f prompt.txt -n 2 --temp 0 --no-stats", r"Once upon a time[^\n]+\n", ""),
    ("sharpi run -p - -n 2 --no-echo --no-stats --temp 0 < prompt.txt", r"[^\n]+\n", ""),
    ("sharpi run Once -n3 -s1 -t1 --no-stats", r"Once [^\n]+\n", ""),
    ("sharpi run Once -n 3 -s -1 --no-stats", r"Once[^\n]+\n", ""),
    ("sharpi run 'Grüße, 世界 🌍' -n 1 --no-stats", r"Grüße, 世界 🌍.*\n", ""),
    ("sharpi run Once -n 8 --temp 0 --stop time --no-stats", r"Once upon a \n", ""),
    ("sharpi run 'The wolf said' -n 24 --temp 0 --draft ngram", r"The wolf said.*\n", r"prompt .*; drafts: .*\n"),
    ("sharpi run -m story.gguf -c 64 -t 1 Once -n 1 --no-stats", r"Once[^\n]*\n", ""),
    ("sharpi run -c 8 -n -1 --logit-bias 0=-inf Once --no-stats", r"Once.*\n",
     r"sharpi: stopped: the context of 8 tokens is full \(-c sets it\)\n"),
    ("sharpi run -- '-n is an option' -n 2; true", ".*", ".*"),
    ("sharpi run --special Once -n 1 --no-stats", r"Once[^\n]*\n", ""),
    ("sharpi run Once -n 2 --no-stats <&-", r"Once[^\n]*\n", ""),
    ("sharpi run Once -n 2 2>&-", r"Once[^\n]*\n", ""),
    ("SHARPI_KV_DTYPE=fp32 SHARPI_CPU_MOE=1 sharpi run Once -n 1 --no-stats", r"Once[^\n]*\n", ""),
    ("SHARPI_KVDTYPE=fp32 sharpi run Once -n 1 --no-stats", r"Once[^\n]*\n",
     r"sharpi: the environment's SHARPI_KVDTYPE has no effect: did you mean SHARPI_KV_DTYPE\?\n"),
    ("sharpi inspect", r".*architecture   qwen3moe.*runs here      yes.*", ""),
    ("sharpi inspect story.gguf --tensors", r".*token_embd\.weight.*", ""),
    ("sharpi inspect -m story.gguf --json | python3 -m json.tool | head -n 2", r"\{\n    \"name\": .*", ""),
    ("sharpi inspect | head -n 1", r"Sharpi story\n", ""),
    ("sharpi plan", r".*It fits, with .*Predicted:.*", MEASURING),
    ("sharpi plan -m story.gguf --vram 12GiB -v", r".*layer 0 .*It fits.*", MEASURING),
    ("sharpi run --prompt exact -p Once -n 1 --no-stats", r"Once[^\n]*\n", ""),
    ("sharpi run --prompt fast --text Once -n 1 --no-stats", r"Once[^\n]*\n", ""),
    ("sharpi plan --device cpu --prompt fast", r".*Prompts are exact: .*", MEASURING),
    ("sharpi plan --vram 12GiB", r".*Prompts are fast: .*", MEASURING),
    ("sharpi plan --vram 12GiB --prompt exact -b 8", r".*batches of 8 tokens.*Prompts are exact: .*", MEASURING),
    ("sharpi plan --vram 12GiB --device cuda -b 8", r".*batches of 64 tokens.*Prompts are fast: .*",
     MEASURING + r"sharpi: a batch of 8 is rounded up to 64: .*\n"),
    ("sharpi plan --json > plan.json && sharpi run --plan plan.json Once -n 1 --no-stats", r"Once[^\n]*\n", MEASURING),
    ("sharpi bench --prefill 8 --decode 4 --repeat 1 -t 1", r"Sharpi story: 1 thread, .*prefill.*decode.*", ""),
    ("sharpi hardware", r".*GB/s.*Measured .*", MEASURING),
    ("sharpi run Once -n 4 --expert-stats use.json --no-stats && sharpi experts use.json",
     r"Once[^\n]*\nSharpi story .*Heat map: use\.png\n", ""),
]


@pytest.mark.parametrize("line, output, error", RIGHT, ids=[line for line, *_ in RIGHT])
def test_what_is_right(room: Path, line: str, output: str, error: str) -> None:
    done = typed(room, line)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(output, done.stdout, re.DOTALL), done.stdout
    assert re.fullmatch(error, done.stderr, re.DOTALL), done.stderr


# --- what is wrong -------------------------------------------------------------------------------------------------

# The line, and words of the error.
WRONG = [
    # what is not there
    ("sharpi rnu", "did you mean `sharpi run`?"),
    ("sharpi server", "use `sharpi serve`"),
    ("sharpi 'Once upon a time'", "`sharpi run TEXT`"),
    ("sharpi story.gguf", "sharpi chat -m FILE"),
    ("sharpi -m story.gguf -p Once", "a command comes first"),
    ("sharpi help nonsense", "no such command"),
    ("sharpi completion tcsh", "'tcsh' is not one of 'bash', 'zsh', 'fish'"),
    ("sharpi run --promt Once", "did you mean --prompt?"),
    ("sharpi run -prompt Once", "use -p TEXT"),
    ("sharpi run --prompt Once", "as in `sharpi run -p TEXT`"),
    ("sharpi chat --prompt Hello", "as in `sharpi run -p TEXT`"),
    ("sharpi run -temp 0 Once", "did you mean --temp?"),
    # habits
    ("sharpi run -ngl 99 -p Once", "--vram SIZE"),
    ("sharpi run -ctk q8_0 -ctv q8_0 -p Once", "--kv-dtype"),
    ("sharpi run -fa -p Once", "leave it out"),
    ("sharpi run -fa on -p Once", "leave it out"),
    ("sharpi run -st -p Once", "sharpi run --chat"),
    ("sharpi chat -sys 'Be brief.'", "--system TEXT"),
    ("sharpi run -ncmoe 12 -p Once", "--cpu-moe"),
    ("sharpi run -no-cnv -p Once", "leave it out"),
    ("sharpi run -cnv -p Once", "`sharpi chat`"),
    ("sharpi run -i -p Once", "`sharpi chat`"),
    ("sharpi run --mlock -p Once", "leave it out"),
    ("sharpi run --no-mmap -p Once", "always mapped"),
    ("sharpi run -ts 3,1 -p Once", "CUDA_VISIBLE_DEVICES"),
    ("sharpi run -ot exps=CPU -p Once", "--plan FILE"),
    ("sharpi run -ub 512 -p Once", "-b N"),
    ("sharpi run --jinja -p Once", "always on"),
    ("sharpi run --n_gpu_layers=99 -p Once", "--vram SIZE"),
    ("sharpi run --ignore-eos -p Once", "--logit-bias"),
    # prompts
    ("sharpi run", "the prompt is empty"),
    ("sharpi run ''", "the prompt is empty"),
    ("sharpi run -n 5 Once upon a time", "put it in quotes"),
    ("sharpi run Once -p Once", "give one prompt"),
    ("sharpi run -f prompt.txt -p Once", "give one prompt"),
    ("sharpi run story.gguf", "sharpi run -m story.gguf TEXT"),
    ("sharpi run -f missing.txt", "missing.txt: the prompt cannot be read: No such file"),
    ("sharpi run -f models", "Is a directory"),
    ("sharpi run -f latin.txt", "not UTF-8 (byte 3)"),
    ("sharpi run < latin.txt", "standard input: the prompt is not UTF-8"),
    ("sharpi run -f /dev/zero", "longer than 64 MiB"),
    ("sharpi run $'caf\\xe9'", "not valid Unicode"),
    ("sharpi run -p - <&-", "standard input: the prompt cannot be read"),
    ("sharpi run --chat Hello", "no chat template"),
    ("sharpi run --system 'Be brief.' Hello", "--system needs --chat"),
    ("sharpi run --chat --special Hello", "--special"),
    ('sharpi run -f <(yes word | head -n 3000)', "context"),
    # models
    ("sharpi run -m missing.gguf Once", "missing.gguf"),
    ("sharpi run -m models Once", "is a directory"),
    ("sharpi run -m notes.gguf Once", "notes.gguf: "),
    ("sharpi run -m empty.gguf Once", "empty.gguf: "),
    ("sharpi run -m short.gguf Once", "short.gguf: "),
    ("sharpi run -m '' Once", "the name of the model is empty"),
    ("sharpi run -m /dev/null Once", "not a regular file"),
    ("sharpi inspect notes.gguf", "notes.gguf: "),
    ("sharpi inspect story.gguf -m story.gguf", "give one model"),
    ("sharpi chat", "sharpi chat -m "),
    ("sharpi chat -m story.gguf", "no chat template"),
    ("sharpi plan -m models", "is a directory"),
    ("sharpi experts notes.gguf", "no expert statistics"),
    # numbers
    ("sharpi run Once -n five", "'five' is not a valid integer"),
    ("sharpi run Once -n -2", "-2 is not in the range"),
    ("sharpi run Once -c 99999999999999999999999", "more than the model's 1,024"),
    ("sharpi run Once -t 0", "0 is not in the range"),
    ("sharpi run Once -t 99999", "99999 is not in the range"),
    ("sharpi run Once --temp hot", "'hot' is not a valid float"),
    ("sharpi run Once --temp nan", "temperature"),
    ("sharpi run Once --top-k 99999999999999999999999", "0 to 2^31 - 1"),
    ("sharpi run Once --top-p 2", "not in the range"),
    ("sharpi run Once -s 99999999999999999999999", "0 to 2^64 - 1"),
    ("sharpi run Once --logit-bias 999999=1", "outside the vocabulary"),
    ("sharpi run Once --stop ''", "empty"),
    ("sharpi run Once --vram lots", "no amount of VRAM"),
    ("sharpi run Once --device tpu", "'tpu' is not one of"),
    ("sharpi run Once --device cuda", "device cuda: "),
    ("sharpi run Once --draft mtp", "prediction layer"),
    ("sharpi bench --prefill 99999999999", "more than the model's 1,024"),
    # the environment
    ("SHARPI_CPU_MOE=yes sharpi run Once", "SHARPI_CPU_MOE='yes', but its value must be 0 or 1"),
    ("SHARPI_CUDA_PARTIAL_WEIGHT_CACHE=2 sharpi plan", "SHARPI_CUDA_PARTIAL_WEIGHT_CACHE='2', but"),
    ("SHARPI_CUDA_PARTIAL_WEIGHT_CACHE_GB=much sharpi run Once", "a number of GiB"),
    ("SHARPI_KV_DTYPE=int4 sharpi run Once", "SHARPI_KV_DTYPE='int4', but its value must be fp32, bf16 or fp16"),
    ("SHARPI_CUDA_GRAPH=off sharpi bench", "SHARPI_CUDA_GRAPH='off', but"),
    ("SHARPI_CPU_ISA=sse sharpi run Once", "SHARPI_CPU_ISA='sse', but"),
    ("SHARPI_EXPERT_STATS=models sharpi run Once", "models"),
    # output that cannot be written
    ("sharpi run Once -n 1 > /dev/full", "standard output: No space left on device"),
    ("PYTHONUNBUFFERED=1 sharpi run Once -n 1 > /dev/full", "standard output: No space left on device"),
    ("sharpi --help > /dev/full", "standard output: No space left on device"),
    ("PYTHONUNBUFFERED=1 sharpi --help > /dev/full", "standard output: No space left on device"),
    ("sharpi run --help > /dev/full", "standard output: No space left on device"),
    ("sharpi version > /dev/full", "standard output: No space left on device"),
    ("sharpi inspect > /dev/full", "standard output: No space left on device"),
    ("sharpi plan --vram 12GiB --json > /dev/full", "standard output: No space left on device"),
    ("sharpi bench --prefill 1 --decode 0 --repeat 1 > /dev/full", "standard output: No space left on device"),
    ("sharpi run Once -n 1 --no-stats --expert-stats e.json > /dev/null; sharpi experts e.json > /dev/full",
     "standard output: No space left on device"),
    ("sharpi run Once -n 1 >&-", "standard output: Bad file descriptor"),
    ("sharpi inspect >&-", "standard output: Bad file descriptor"),
    ("sharpi --help >&-", "standard output: Bad file descriptor"),
    ("sharpi hardware --save missing/machine.json > /dev/null 2> e; rc=$?; tail -n 1 e >&2; exit $rc",
     "missing/machine.json"),
]


@pytest.mark.parametrize("line, words", WRONG, ids=[line for line, _ in WRONG])
def test_what_is_wrong_is_one_line(room: Path, line: str, words: str) -> None:
    done = typed(room, line)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert re.fullmatch(r"(sharpi: measuring .*\n)?sharpi: error: .*\n", done.stderr), done.stderr
    assert words in done.stderr


@pytest.mark.parametrize(
    "line, code",
    [
        ("sharpi plan --vram 2MiB", 1),
        ("sharpi plan --vram 2MiB --json", 1),
        (f"sharpi run Once {ENDLESS} --no-stats | head -c 20; exit ${{PIPESTATUS[0]}}", 141),
        ("sharpi --help | true; exit ${PIPESTATUS[0]}", 141),
        ("sharpi inspect --tensors | true; exit ${PIPESTATUS[0]}", 141),
        ("sharpi run Once -n 1 2> /dev/full", 2),
        ("sharpi run Once -n 1 <&- >&- 2>&-", 2),
        ("sharpi nonsense 2>&-", 2),
    ],
)
def test_other_exit_codes(room: Path, line: str, code: int) -> None:
    done = typed(room, line)
    assert done.returncode == code, done.stderr
    assert re.fullmatch(MEASURING, done.stderr), done.stderr


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [
    "click.core", "sharpi.cli.text", "numpy._core.multiarray", "tokenizers", "sharpi._core"])
def test_ctrl_c_while_it_starts_says_nothing(room: Path, module: str) -> None:
    """Python tells what it imports, so that Ctrl-C comes while it does."""
    process = subprocess.Popen([sys.executable, "-X", "importtime", "-m", "sharpi", "run", "Once", *ENDLESS.split()],
                               env=environment(room), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert process.stderr is not None
    with process.stderr:
        assert any(line.endswith(f" {module}\n") for line in process.stderr), "it is imported"
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.wait(timeout=60) == 130
    assert all(line.startswith("import time:") for line in rest.splitlines()), rest


@pytest.fixture
def at_terminal(room: Path) -> Iterator:
    """Starts the program at a pseudo-terminal."""
    started: list[pexpect.spawn] = []

    def start(*arguments: str, **more: str) -> pexpect.spawn:
        child = pexpect.spawn(str(room / "bin" / "sharpi"), list(arguments), cwd=str(room), timeout=120,
                              encoding="utf-8", env=environment(room, **more),
                              preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        started.append(child)
        return child

    yield start
    for child in started:
        child.close(force=True)


def ended(child: pexpect.spawn) -> int | None:
    """Its exit code, and in `before` what it said until then."""
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus


def test_ctrl_c_in_run_ends_the_line(at_terminal) -> None:
    child = at_terminal("run", "Once upon a time", *ENDLESS.split(), **SLOW)
    child.expect("Once upon a time.{10}")
    child.sendintr()
    assert ended(child) == 130
    assert child.before.endswith("^C\r\n") and "Traceback" not in child.before


# --- at a terminal ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def talker(room: Path) -> str:
    """The bundled model with a chat template. It does not answer well."""
    path = room / "talker.gguf"
    subprocess.run([sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--chat-template", TEMPLATE, BUNDLED, path],
                   check=True, capture_output=True)
    return str(path)


def test_run_at_a_terminal_asks_for_a_prompt(at_terminal) -> None:
    child = at_terminal("run")
    assert ended(child) == 2
    assert "give a prompt: sharpi run" in child.before


def test_a_chat(at_terminal, talker: str) -> None:
    child = at_terminal("chat", "-m", talker, "-n", "12", "--temp", "0", "-t", "1", "--logit-bias", "0=-inf")
    child.expect("/help lists the commands.")
    child.expect("> ")
    child.sendline("Who are you?")
    child.expect(r"prompt \d+ tokens, [\d.,]+ tokens/s; generated 12 tokens, ")
    child.expect("> ")
    for typed_line, said in (("/help", "/reset  forget"), ("/rest", "not a command"), ("", "> ")):
        child.sendline(typed_line)
        child.expect(said)
    child.sendline("/exit")
    assert ended(child) == 0


@pytest.mark.parametrize("variables, escapes", [
    ({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"NO_COLOR": ""}, True)])
def test_escape_codes_only_where_they_are_wanted(at_terminal, talker: str, variables: dict[str, str],
                                                 escapes: bool) -> None:
    child = at_terminal("chat", "-m", talker, "-n", "3", "-t", "1", **variables)
    child.logfile_read = seen = io.StringIO()
    child.expect("> ")
    child.sendline("Hello")
    child.expect("generated")
    child.expect("> ")
    child.sendeof()
    assert ended(child) == 0
    assert ("\x1b" in seen.getvalue()) == escapes, seen.getvalue()


def test_a_chat_goes_on_when_the_context_is_full(at_terminal, talker: str) -> None:
    child = at_terminal("chat", "-m", talker, "-c", "96", "--temp", "0", "-t", "1", "--logit-bias", "0=-inf")
    child.expect("> ")
    child.sendline("Tell me of the wolf.")
    child.expect("sharpi: stopped: the context of 96 tokens is full")
    for _ in range(3):
        child.expect("> ")
        child.sendline("And the fox?")
        child.expect("sharpi: the context of 96 tokens is nearly full: the oldest turn was dropped")
        child.expect("sharpi: stopped: the context of 96 tokens is full")
    child.expect("> ")
    child.sendline("word " * 200)
    child.expect("sharpi: error: .*context")
    child.expect("> ")
    child.sendeof()
    assert ended(child) == 0


def test_ctrl_c_in_a_chat(at_terminal, talker: str) -> None:
    child = at_terminal("chat", "-m", talker, "-t", "1", "--logit-bias", "0=-inf", "--no-stats", **SLOW)
    child.expect("> ")
    child.sendline("Hello")
    child.expect("Hello\r\n.{20}")
    child.sendintr()
    child.expect("> ")
    child.sendline("/exit")
    assert ended(child) == 0


@pytest.mark.parametrize("line, answers", [
    ("sharpi run -m talker.gguf --chat Hello -n 4 -t 1", 1),
    ("sharpi run -m talker.gguf --chat --system 'Be brief.' --no-thinking Hello -n 4 -t 1", 1),
    ("printf 'Hello\\nAgain\\n' | sharpi chat -m talker.gguf -n 4 -t 1", 2),
    ("printf 'caf\\xe9\\n' | sharpi chat -m talker.gguf -n 4 -t 1", 1),
])
def test_answers_in_a_pipe(room: Path, talker: str, line: str, answers: int) -> None:
    done = typed(room, line)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr and len(done.stderr.splitlines()) == answers
    assert re.fullmatch(r"(prompt .*; generated .*\n)+", done.stderr), done.stderr


def test_a_chat_whose_input_is_closed(room: Path, talker: str) -> None:
    done = typed(room, "sharpi chat -m talker.gguf <&-")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "sharpi: error: standard input: Bad file descriptor\n"


def test_the_installed_program_is_the_one_that_is_tested() -> None:
    pyproject = Path(__file__).parents[3] / "pyproject.toml"
    assert 'sharpi = "sharpi.__main__:main"' in pyproject.read_text(encoding="utf-8")
    program = Path(sys.executable).with_name("sharpi")
    if program.exists():
        done = subprocess.run([program, "version"], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("sharpi ")


def test_there_are_many() -> None:
    assert len(RIGHT) + len(WRONG) >= 120
    assert shutil.which("bash")
