"""Contexts beyond the file's: options that replace the file's scaling of the rotary embedding.

The oracle is a second file that has in its metadata what the options say, run by the engine (the same bits are
expected) and by numpy.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_model import cli_runner
from numpy_model import NumpyModel, relative_error
from tiny_models import HYBRIDS, MODELS, TinyModel, write

from sharpi import InvalidRequestError, Model
from sharpi.cli import main
from sharpi.files.gguf import GgufFile
from sharpi.files.metadata import Metadata
from sharpi.files.rope import RopeScaling

SHORT = replace(MODELS["llama"], context=64)
YARN = replace(SHORT, scaling_type="yarn", scaling=(("factor", 4.0),), original_context=64, context=256)
LINEAR = replace(SHORT, scaling_type="linear", scaling=(("factor", 4.0),), context=256)
TOKENS = np.random.default_rng(5).integers(0, 96, 200).tolist()  # three times what the short model was made for


def logits(path: Path, **options: Any) -> np.ndarray:
    with Model.load(path, device="cpu", kv_dtype="fp32", threads=1, **options) as model:
        return model.logits(TOKENS)


@pytest.mark.parametrize(("file", "options", "same_as"), [
    (SHORT, {"rope_scaling": "yarn", "rope_scale": 4}, YARN),
    (SHORT, {"rope_scaling": "yarn", "rope_freq_scale": 0.25}, YARN),
    (replace(SHORT, context=32), {"rope_scaling": "yarn", "rope_scale": 4, "yarn_orig_ctx": 64}, YARN),
    (replace(YARN, scaling=(("factor", 2.0),)), {"rope_scale": 4}, YARN),
    (LINEAR, {"rope_scaling": "yarn", "yarn_orig_ctx": 64}, YARN),
    (SHORT, {"rope_scale": 4}, LINEAR),
    (SHORT, {"rope_scaling": "linear", "rope_freq_scale": 0.25}, LINEAR),
    (replace(YARN, original_context=256), {"rope_scaling": "none"}, replace(SHORT, context=256)),
    (SHORT, {"rope_freq_base": 80000.0}, replace(SHORT, rope_base=80000.0, context=256)),
    (replace(SHORT, rope_factors=True), {"rope_scale": 4}, replace(LINEAR, rope_factors=True)),
])
def test_an_option_does_what_metadata_do(file: TinyModel, options: dict[str, Any], same_as: TinyModel,
                                         tmp_path: Path) -> None:
    plain, stretched = write(tmp_path / "plain.gguf", file), write(tmp_path / "stretched.gguf", same_as)
    found = logits(plain, context=200, **options)
    assert np.array_equal(found, logits(stretched, context=200))
    # The bound of the tests that hold models with such metadata against numpy.
    assert relative_error(found, NumpyModel(stretched).logits(TOKENS)) < 1e-5


def test_the_ways_of_stretching_differ(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", replace(SHORT, context=256))
    ways: list[dict[str, Any]] = [{}, {"rope_scale": 4}, {"rope_scale": 3}, {"rope_scaling": "yarn", "rope_scale": 4},
                                  {"rope_freq_base": 80000.0},
                                  {"rope_scaling": "yarn", "rope_scale": 4, "yarn_orig_ctx": 64}]
    found = [logits(path, context=200, **way) for way in ways]
    assert all(relative_error(one, other) > 1e-3 for i, one in enumerate(found) for other in found[:i])


@pytest.mark.parametrize(("file", "options", "longest"), [
    (SHORT, {"rope_scale": 4}, 256),
    (SHORT, {"rope_scale": 2.5}, 160),
    (SHORT, {"rope_freq_scale": 0.1}, 640),
    (SHORT, {"rope_scaling": "yarn", "rope_scale": 8, "yarn_orig_ctx": 32}, 256),
    (YARN, {"rope_scale": 8}, 512),
    (YARN, {"rope_scaling": "none"}, 64),
    # 32 elements of a head turn: the slowest of the 16 pairs takes 8 ^ (30 / 32) = 7.02 times as long.
    (SHORT, {"rope_freq_base": 80000.0}, 449),
    (SHORT, {"rope_freq_base": 5000.0}, 64),
    (YARN, {"rope_freq_base": 10000.0}, 256),
    (HYBRIDS["qwen35"], {"rope_scaling": "yarn", "rope_scale": 4}, 2048),
])
def test_the_longest_context_grows(file: TinyModel, options: dict[str, Any], longest: int, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", file)
    with Model.load(path, device="cpu", context=longest, threads=1, **options) as model:
        assert (model.context, model.spec.context_length, model.plan.model_context) == (longest, longest, longest)
    with Model.load(path, device="cpu", context=0, threads=1, **options) as model:
        assert model.context == longest, "0 is all that there is"
    with pytest.raises(InvalidRequestError, match=f"more than the model's {longest:,}"):
        Model.load(path, device="cpu", context=longest + 1, threads=1, **options)


def test_a_context_beyond_the_model_s_names_the_way_out(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", SHORT)
    result = cli_runner().invoke(main, ["run", "-m", str(path), "--device", "cpu", "-c", "65", "-p", "a"])
    assert result.exit_code == 2 and result.stdout == "" and result.stderr.count("\n") == 1
    assert "model's 64" in result.stderr and "--rope-scaling yarn --rope-scale N" in result.stderr


@pytest.mark.parametrize(("options", "said"), [
    ({"rope_scaling": "yarn"}, "needs a rope_scale"),
    ({"rope_scaling": "linear"}, "needs a rope_scale"),
    ({"rope_scaling": "none", "rope_scale": 2}, "does not scale"),
    ({"rope_scale": 2, "rope_freq_scale": 0.5}, "leave one of the two out"),
    ({"rope_scale": 2, "yarn_orig_ctx": 64}, "yarn alone"),
    ({"yarn_orig_ctx": 64}, "yarn alone"),
    ({"rope_scale": 0.5}, "rope_scale must be"),
    ({"rope_freq_scale": 2}, "rope_freq_scale must be"),
    ({"rope_freq_base": 1.0}, "rope_freq_base must be"),
])
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", SHORT)
    with pytest.raises(InvalidRequestError, match=said):
        Model.load(path, device="cpu", **options)


def test_nothing_asked_is_no_scaling() -> None:
    assert RopeScaling.asked() is None
    assert RopeScaling.asked(rope_scaling="none") == RopeScaling("none")


def test_a_saved_plan_keeps_the_scaling(tmp_path: Path) -> None:
    path, plan = write(tmp_path / "m.gguf", SHORT), tmp_path / "plan.json"
    switches = ["--rope-scaling", "yarn", "--rope-scale", "4", "--kv-dtype", "fp32"]
    planned = cli_runner().invoke(main, ["plan", "-m", str(path), "--device", "cpu", "-c", "200", "-t", "1", "--json",
                                         *switches])
    assert planned.exit_code == 0, planned.stderr
    plan.write_text(planned.stdout, encoding="utf-8")
    with Model.load(path, plan=plan) as model:
        assert model.plan.rope == RopeScaling("yarn", 4.0) and model.context == 200
        assert np.array_equal(model.logits(TOKENS), logits(path, context=200, rope_scaling="yarn", rope_scale=4))

    with pytest.raises(InvalidRequestError, match="rope_scale already"):
        Model.load(path, plan=plan, rope_scale=4)
    for switch in (["--rope-scaling", "yarn"], ["--rope-scale", "4"], ["--rope-freq-base", "9e4"],
                   ["--rope-freq-scale", "0.25"], ["--yarn-orig-ctx", "64"]):
        result = cli_runner().invoke(main, ["run", "-m", str(path), "--plan", str(plan), "-p", "a", *switch])
        assert result.exit_code == 2 and f"--plan says what {switch[0]} would" in result.stderr

    for changed, said in (({"context": 257}, "more than the model's"), ({"rope": {"rope_scale": 4}}, "'rope'"),
                          ({"rope": 5}, "'rope'"), ({"rope": {**json.loads(planned.stdout)["rope"], "rope_scale": -1}},
                                                    "'rope'")):
        plan.write_text(json.dumps(json.loads(planned.stdout) | changed), encoding="utf-8")
        with pytest.raises(InvalidRequestError, match=said):
            Model.load(path, plan=plan)


def test_switches_reach_the_model(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", SHORT)
    for switches, longest in ((["--rope-scale", "4"], 256),
                              (["--rope-scaling", "linear", "--rope-freq-scale", "0.5"], 128),
                              (["--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "100"], 400),
                              (["--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "0"], 256),
                              (["--rope-freq-base", "80000"], 449)):
        common = ["-m", str(path), "--device", "cpu", "--json", *switches]
        prefill = "200" if longest > 200 else "100"
        for command in (["plan"], ["bench", "--prefill", prefill, "--decode", "0", "--repeat", "1"]):
            result = cli_runner().invoke(main, [*command, *common])
            assert result.exit_code == 0, result.stderr
            if command == ["plan"]:
                assert json.loads(result.stdout)["model_context"] == longest


def test_metadata_of_a_file_are_checked(tmp_path: Path) -> None:
    file = GgufFile.open(write(tmp_path / "m.gguf", SHORT))
    for key, value in (("llama.rope.scaling.factor", "much"), ("llama.context_length", 0),
                       ("llama.rope.scaling.type", 3), ("llama.rope.scaling.original_context_length", -5),
                       *(("llama.rope.scaling.factor", factor) for factor in (math.inf, math.nan, 0.0, -4.0)),
                       *(("llama.rope.freq_base", base) for base in (0.0, 1e-300, -1.0, math.inf, math.nan))):
        damaged = replace(file, metadata=Metadata(file.paths[0], {**file.metadata, key: value}))
        with pytest.raises(Exception, match=key.removeprefix("llama.")) as caught:
            RopeScaling(rope_freq_base=1e5).metadata(damaged)
        assert type(caught.value).__name__ == "ModelFileError"
