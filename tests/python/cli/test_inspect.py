"""`sharpi inspect` says of every file what `sharpi run` and `sharpi chat` then do with it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

sys.path.append(str(Path(__file__).parents[2] / "fuzz"))
from container import ARRAY, BOOL, F32, I32, STRING, U32, Container, array, scalar, text

from sharpi.cli import main
from sharpi.model import BUNDLED_MODEL


def sharpi(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="sharpi")


@pytest.fixture(scope="module")
def bundled() -> Container:
    return Container.read(BUNDLED_MODEL)


def report(path: Path) -> dict[str, object]:
    done = sharpi("inspect", "--json", str(path))
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_rewritten_model_is_the_original(bundled: Container, tmp_path: Path) -> None:
    """Else the files below fail for another reason than the one they are made for."""
    path = bundled.write(tmp_path / "same.gguf")
    header = bundled.header()
    assert header == BUNDLED_MODEL.read_bytes()[:len(header)]
    assert path.stat().st_size == BUNDLED_MODEL.stat().st_size
    assert report(path)["runs"] is True


NUMBERS = (ARRAY, array(F32, [1.0, 2.0]))
UNFIT = {
    "model is an array": ("tokenizer.ggml.model", NUMBERS),
    "space prefix is an array": ("tokenizer.ggml.add_space_prefix", NUMBERS),
    "begin flag is an array": ("tokenizer.ggml.add_bos_token", (ARRAY, array(I32, [1, 1]))),
    "end flag is an array": ("tokenizer.ggml.add_eos_token", NUMBERS),
    "end flag is a string": ("tokenizer.ggml.add_eos_token", (STRING, text("yes"))),
    "id is a flag": ("tokenizer.ggml.eos_token_id", (BOOL, b"\1")),
    "id is too large": ("tokenizer.ggml.eos_token_id", (U32, scalar(U32, 1 << 31))),
    "tokens are numbers": ("tokenizer.ggml.tokens", NUMBERS),
    "one token only": ("tokenizer.ggml.tokens", (ARRAY, array(STRING, ["a"]))),
    "a merge of nothing": ("tokenizer.ggml.merges", (ARRAY, array(STRING, ["x"]))),
    "a size is an array of strings": ("qwen3moe.rope.freq_base", (ARRAY, array(STRING, ["10000"]))),
    "a size is a long array": ("qwen3moe.rope.freq_base", (ARRAY, array(F32, [1e4] * 5000))),
    "a size is a string": ("qwen3moe.context_length", (STRING, text("512"))),
    "a name is a number": ("general.name", (U32, scalar(U32, 7))),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_value_that_run_refuses_is_refused_alike(case: str, bundled: Container, tmp_path: Path) -> None:
    key, value = UNFIT[case]
    path = bundled.with_value(key, *value).write(tmp_path / "unfit.gguf")
    found = report(path)
    assert found["runs"] is found["chats"] is False
    shown = sharpi("inspect", str(path))
    assert re.search(r"^  runs here +no: ", shown.stdout, re.MULTILINE)
    ran = sharpi("run", "-m", str(path), "-p", "Once", "-n", "1", "--device", "cpu")
    assert ran.exit_code == 2 and "Traceback" not in ran.output
    assert str(found["obstacle"]) in ran.stderr
    # In a list of tokens or merges, one entry is wrong.
    assert key in ran.stderr or case in ("one token only", "a merge of nothing"), ran.stderr


def test_a_file_without_tokenizer_takes_token_ids(bundled: Container, tmp_path: Path) -> None:
    path = bundled.without("tokenizer.").write(tmp_path / "ids.gguf")
    found = report(path)
    assert (found["runs"], found["takes_token_ids"]) == (False, True)
    assert "no tokenizer" in str(found["obstacle"])
    shown = sharpi("inspect", str(path)).stdout
    assert re.search(r"runs here +no: .*no tokenizer", shown) and "token ids" in shown and "bench" in shown
    assert sharpi("run", "-m", str(path), "-p", "Once", "--device", "cpu").exit_code == 2
    from sharpi import Model

    with Model.load(path, device="cpu", context=64) as model:
        assert len(list(model.generate([1, 2, 3], max_tokens=2))) == 2


@pytest.mark.parametrize(("value", "said"), [
    (None, "none, so sharpi chat does not take the file"),
    ((STRING, text("{{ messages")), "no: .*chat template does not parse"),
    (NUMBERS, "no: .*'tokenizer.chat_template' is an array of float32, not a string"),
    ((STRING, text("{{ messages }}")), "yes"),
])
def test_what_becomes_of_the_chat_template(value: tuple[int, bytes] | None, said: str, bundled: Container,
                                           tmp_path: Path) -> None:
    file = bundled.without("tokenizer.chat_template")
    if value is not None:
        file = file.with_value("tokenizer.chat_template", *value)
    path = file.write(tmp_path / "template.gguf")
    found = report(path)
    assert found["runs"] is True and found["chats"] is (said == "yes")
    assert re.search(rf"^  chat template  {said}", sharpi("inspect", str(path)).stdout, re.MULTILINE)
