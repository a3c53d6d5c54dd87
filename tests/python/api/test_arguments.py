"""Values of the wrong type: each public argument refuses them with an `InvalidRequestError` that names it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sharpi import InvalidRequestError, Model
from sharpi.files.metadata import Metadata
from sharpi.settings.generation_options import DEFAULT_OPTIONS

HELLO = [{"role": "user", "content": "Hello"}]
NO_WHOLE: list[Any] = ["3", 1.5, True, [1], object(), np.float32(2)]
NO_NUMBER: list[Any] = ["hot", None, True, [1.0], 1j, object(), 10**400]
NO_FLAG: list[Any] = [2, -1, 1.0, "yes", [], object()]
NO_TEXT: list[Any] = [3, b"ab", ["a"], object()]
NO_PATH: list[Any] = [3, b"ab", ["a"], object()]
NO_IDS: list[Any] = [None, 7, [-1], [1.5], ["a"], [[1]], [True], [2**31], {1: 2}, object()]

LOAD: dict[str, list[Any]] = {
    "path": NO_PATH, "device": [None, 1, "tpu", ["cpu"]], "vram": [1.5, True, [1], object(), "much"],
    **dict.fromkeys(("context", "threads", "batch", "sequences", "cache_tokens"), NO_WHOLE),
    **dict.fromkeys(("ram_budget", "spill_bytes"), [*NO_WHOLE, -1]),
    "kv_dtype": [3, "int3", ["bf16"], b"bf16"], "prompt": [3, "quick", "", ["exact"], b"exact", True],
    **dict.fromkeys(("cpu_moe", "mtp"), NO_FLAG),
    "plan": NO_PATH, "profile": NO_PATH, "warm": NO_PATH, "expert_stats": NO_PATH,
    "progress": ["aloud", 3], "notice": ["aloud", 3],
    "rope_scaling": [3, "twice", ["yarn"], b"yarn"],
    **dict.fromkeys(("rope_scale", "rope_freq_base", "rope_freq_scale"),
                    [*filter(lambda value: value is not None, NO_NUMBER), 0, -1, float("nan"), float("inf")]),
    "yarn_orig_ctx": [*NO_WHOLE, 0, -1],
}
OPTIONS: dict[str, list[Any]] = {
    "max_tokens": [*NO_WHOLE, -1], "seed": [*NO_WHOLE, -1, 2**64], "top_k": [*NO_WHOLE, None, -1, 2**40],
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
                    NO_NUMBER),
    "logit_bias": [3, "5=1", [(1, 2.0)], {"1": 1.0}, {1: "x"}, {1: None}, {True: 1.0}, {-1: 1.0}, {2**40: 1.0}],
    "stop": [3, None, [3], [None], "", ["a", ""], {"a": 1}, b"ab", {"a"}],
    "draft": [3, "guess", ["ngram"], True], "draft_tokens": [*NO_WHOLE, 0, 8],
}
CHAT: dict[str, list[Any]] = {
    "messages": [None, "Hello", 3, {}, HELLO[0], [], ["Hello"], [3], [{"role": "user"}], [{"content": "a"}],
                 [{"role": 3, "content": "a"}], [{"role": "user", "content": 3}], [{"role": "user", "content": ["a"]}]],
    "system": NO_TEXT, "thinking": NO_FLAG,
    "tools": [3, "add", {"name": "add"}, ["add"], [{"name": object()}], [{"name": {1, 2}}]],
}


def cases(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model.load(device="cpu", context=64, threads=1) as loaded:
        template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        metadata = {**loaded.file.metadata, "tokenizer.chat_template": template}
        loaded.file = replace(loaded.file, metadata=Metadata(loaded.file.paths[0], metadata))
        yield loaded


def refusal(call: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def names(message: str, argument: str) -> bool:
    """Whether a message names an argument, in whichever of the usual spellings."""
    said = message.lower().replace("-", "_").replace(" ", "_")
    return argument in said or {"kv_dtype": "kv_element_type"}.get(argument, argument) in said


def test_the_tables_leave_no_argument_out() -> None:
    assert set(OPTIONS) == set(DEFAULT_OPTIONS)
    assert set(CHAT) == set(inspect.signature(Model.chat).parameters) - {"self", *OPTIONS}
    assert set(LOAD) == set(inspect.signature(Model.load).parameters)


@pytest.mark.parametrize(("name", "value"), cases(LOAD))
def test_load(name: str, value: Any) -> None:
    arguments = {"device": "cpu", name: value}
    if name == "vram":
        arguments["device"] = "auto"
    assert names(refusal(lambda: Model.load(**arguments).close()), name)


@pytest.mark.parametrize(("name", "value"), cases(OPTIONS))
def test_options_of_a_generation(model: Model, name: str, value: Any) -> None:
    for call in (lambda: model.generate("Once", **{name: value}), lambda: model.chat(HELLO, **{name: value}),
                 lambda: model.session().generate([1], **{name: value})):
        assert names(refusal(call), name)


@pytest.mark.parametrize(("name", "value"), cases(CHAT))
def test_chat(model: Model, name: str, value: Any) -> None:
    for target in (model, model.session()):
        assert names(refusal(lambda target=target: target.chat(**{"messages": HELLO, name: value})), name)


@pytest.mark.parametrize("value", NO_IDS)
def test_tokens(model: Model, value: Any) -> None:
    assert names(refusal(lambda: model.generate(value)), "prompt")
    assert names(refusal(lambda: model.logits(value)), "tokens")
    assert names(refusal(lambda: model.detokenize(value)), "ids")
    assert names(refusal(lambda: model.logits([1, 2], chunks=value)), "chunks")


@pytest.mark.parametrize("value", [None, *NO_TEXT, "", "answer", "Prompt"])
def test_kinds(model: Model, value: Any) -> None:
    assert names(refusal(lambda: model.logits([1, 2], kind=value)), "kind")


@pytest.mark.parametrize("value", [None, *NO_TEXT])
def test_text(model: Model, value: Any) -> None:
    assert names(refusal(lambda: model.tokenize(value)), "text")


@pytest.mark.parametrize("value", [None, *NO_FLAG])
def test_flags_of_tokenize(model: Model, value: Any) -> None:
    for name in ("add_special", "parse_special"):
        assert names(refusal(lambda name=name: model.tokenize("a", **{name: value})), name)


def test_numpy_values_are_welcome(model: Model) -> None:
    ids = np.array(model.tokenize("Once upon a time"))
    options = {"max_tokens": np.int64(3), "temperature": np.float32(0.0), "top_k": np.int32(5), "seed": np.uint64(3),
               "logit_bias": {np.int64(5): np.float64(-1.0)}}
    assert len(list(model.generate(ids, **options))) == 3
    assert model.logits(ids, chunks=np.array([2, 2])).shape[0] == len(ids)
    assert model.detokenize(ids) == model.detokenize(ids.tolist())
