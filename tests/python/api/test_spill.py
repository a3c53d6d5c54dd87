"""What a scheduler computes of prompts outlives the cache's memory, and the process, and changes no answer."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from texts_and_prompts import LONGER, PROMPT, said

from sharpi import InvalidRequestError, Model
from sharpi.files.gguf import GgufFile
from sharpi.files.identity import weights_identity
from sharpi.loading.description import BUNDLED_MODEL


def loaded(**given: Any) -> Model:
    return Model.load(**{"path": None, "device": "cpu", "context": 512, "threads": 1, **given})


@pytest.fixture(scope="module")
def cold() -> Iterator[dict[str, list[Any]]]:
    with loaded() as model, model.scheduler(spill_bytes=0) as scheduler:
        found = {"prompt": said(scheduler, PROMPT)}
    with loaded() as model, model.scheduler(spill_bytes=0) as scheduler:
        found["longer"] = said(scheduler, LONGER)
    assert all(reused == 0 for _, reused in found.values())
    yield {name: tokens for name, (tokens, _) in found.items()}


def test_a_directory_outlives_the_model(tmp_path: Path, cold: dict[str, list[Any]]) -> None:
    folder = tmp_path / "cache" / "of prompts"
    with loaded() as model, model.scheduler(cache_dir=folder) as scheduler:
        assert said(scheduler, PROMPT) == (cold["prompt"], 0)
    assert len(list(folder.rglob("*.page"))) >= 3
    with loaded() as model, model.scheduler(cache_dir=str(folder)) as scheduler:
        assert said(scheduler, PROMPT) == (cold["prompt"], 192)
        assert said(scheduler, LONGER) == (cold["longer"], 192)
        counts = scheduler.counts()
        assert counts["restored_pages"] == 3 == counts["loaded_copies"]
        assert counts["adopted_tokens"] == 384
    with loaded() as model, model.scheduler(cache_dir=folder) as scheduler:
        assert said(scheduler, PROMPT, salt="mine")[1] == 0
        assert said(scheduler, LONGER) == (cold["longer"], 192)


def test_a_process_goes_on_with_what_another_has_left(tmp_path: Path, cold: dict[str, list[Any]]) -> None:
    script = f"""
from sharpi import Model
with Model.load(device="cpu", context=512, threads=1) as model:
    scheduler = model.scheduler(cache_dir={str(tmp_path)!r})
    scheduler.submit({PROMPT}, max_tokens=2).text()  # and the interpreter closes it
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    with loaded() as model, model.scheduler(cache_dir=tmp_path) as scheduler:
        assert said(scheduler, LONGER) == (cold["longer"], 192)


def test_what_the_cache_gives_up_comes_back(cold: dict[str, list[Any]]) -> None:
    with loaded() as model, model.scheduler() as scheduler:
        assert said(scheduler, PROMPT) == (cold["prompt"], 0)
        said(scheduler, [3] * 480)
        counts = scheduler.counts()
        assert counts["spilled_pages"] > 0 and counts["spill_bytes"] > 0
        assert said(scheduler, LONGER) == (cold["longer"], 192)
        assert scheduler.counts()["restored_pages"] > 0


@pytest.mark.parametrize("other", [{"kv_dtype": "fp32"}, {"kv_dtype": "fp16"}, {"rope_freq_base": 9000.0}])
def test_another_format_is_not_used(tmp_path: Path, other: dict[str, Any]) -> None:
    with loaded() as model, model.scheduler(cache_dir=tmp_path) as scheduler:
        said(scheduler, PROMPT)
    with loaded(**other) as model:
        with model.scheduler() as scheduler:
            plain = said(scheduler, PROMPT)
        with model.scheduler(cache_dir=tmp_path) as scheduler:
            assert said(scheduler, PROMPT) == plain
    with loaded(context=300) as model, model.scheduler(cache_dir=tmp_path) as scheduler:
        assert said(scheduler, PROMPT)[1] == 192, "the room for tokens changes no bits"


def test_another_file_is_not_used(tmp_path: Path) -> None:
    model_path = tmp_path / "model.gguf"
    shutil.copy(BUNDLED_MODEL, model_path)
    with loaded(path=model_path) as model, model.scheduler(cache_dir=tmp_path / "cache") as scheduler:
        said(scheduler, PROMPT)
    with loaded(path=model_path) as model, model.scheduler(cache_dir=tmp_path / "cache") as scheduler:
        assert said(scheduler, PROMPT)[1] == 192
    with loaded() as model, model.scheduler(cache_dir=tmp_path / "cache") as scheduler:
        assert said(scheduler, PROMPT)[1] == 0


def test_the_identity_of_weights_sees_where_they_differ(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copyfile(BUNDLED_MODEL, path)
    file, time = GgufFile.open(path), path.stat().st_mtime_ns
    before = weights_identity(file)
    assert weights_identity(GgufFile.open(path)) == before
    for tensor in (file.tensors[0], file.tensors[-1]):
        for place in (tensor.offset, tensor.offset + tensor.nbytes // 2, tensor.offset + tensor.nbytes - 1):
            data = bytearray(path.read_bytes())
            data[place] ^= 1
            path.write_bytes(data)
            os.utime(path, ns=(time, time))
            assert weights_identity(file) != before
            data[place] ^= 1
            path.write_bytes(data)
            os.utime(path, ns=(time, time))
            assert weights_identity(file) == before
    os.utime(path, ns=(time, time + 1))
    assert weights_identity(file) != before


def test_damaged_files_are_told_and_not_used(tmp_path: Path, cold: dict[str, list[Any]],
                                             caplog: pytest.LogCaptureFixture) -> None:
    with loaded() as model, model.scheduler(cache_dir=tmp_path) as scheduler:
        said(scheduler, PROMPT)
    for path in tmp_path.rglob("*.page"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 8
        path.write_bytes(data)
    with caplog.at_level(logging.WARNING, "sharpi"), loaded() as model, \
            model.scheduler(cache_dir=tmp_path) as scheduler:
        assert said(scheduler, PROMPT) == (cold["prompt"], 0)
    [line] = caplog.messages
    assert line.startswith(str(tmp_path)) and line.endswith(".page is damaged; it is not used")


def test_what_is_kept_is_bounded(tmp_path: Path) -> None:
    with loaded() as model, model.scheduler(cache_dir=tmp_path) as scheduler:
        said(scheduler, PROMPT)
    sizes = [path.stat().st_size for path in tmp_path.rglob("*.page")]
    with loaded() as model, model.scheduler(cache_dir=tmp_path, cache_dir_bytes=4 * sizes[0]) as scheduler:
        for token in range(4):
            said(scheduler, [token] * 300)
    assert 1 <= len(list(tmp_path.rglob("*.page"))) <= 4


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with loaded() as model:
        for options, message in (({"spill_bytes": -1}, "spill_bytes must not be negative"),
                                 ({"spill_bytes": "1GiB"}, "spill_bytes must be a whole number"),
                                 ({"cache_dir": 3}, "cache_dir must be a path"),
                                 ({"cache_dir": tmp_path, "cache_dir_bytes": -1}, "cache_dir_bytes must not be"),
                                 ({"cache_dir": file}, "the cache directory .*file cannot be used: ")):
            with pytest.raises(InvalidRequestError, match=message):
                model.scheduler(**options)
