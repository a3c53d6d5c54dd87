"""Model and Session as people use them: generation, its options, what is refused, and files that cannot be run.

Generation runs on the bundled model, whose text is fluent enough for stop texts and penalties to mean something.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_model import cli_runner
from fake_weights import MACHINE, fields_of
from tiny_models import HYBRIDS, MODELS, write

from sharpi import Model, _core
from sharpi.benchmark import Benchmark
from sharpi.cli import main
from sharpi.errors import InternalError, InvalidRequestError, ModelFileError, OutOfMemoryError, SharpiError
from sharpi.machine.hardware import Gpu
from sharpi.planning.expert_stats import COUNTS, ExpertStats
from sharpi.planning.planner import make_plan

PROMPT = "Once upon a time"
GREEDY = {"max_tokens": 40, "temperature": 0.0}


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model.load(device="cpu", context=256) as loaded:
        yield loaded


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf", MODELS["llama"])


def text_of(model: Model, prompt: str | list[int] = PROMPT, **options) -> str:
    return "".join(token.text for token in model.generate(prompt, **options))


def refused(call, error: type[SharpiError] = InvalidRequestError) -> str:
    """The one line that `call` is refused with."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def test_greedy_text_is_reproducible_and_is_what_the_logits_say(model: Model) -> None:
    tokens = list(model.generate(PROMPT, **GREEDY))
    assert tokens == list(model.generate(PROMPT, **GREEDY))
    assert len("".join(token.text for token in tokens)) > 40
    ids = model.tokenize(PROMPT)
    rows = model.logits(ids + [token.id for token in tokens])[len(ids) - 1 : -1]
    assert rows.argmax(axis=1).tolist() == [token.id for token in tokens]


def test_text_does_not_depend_on_threads_or_batch(model: Model) -> None:
    expected = text_of(model, **GREEDY)
    for threads, batch in ((1, 512), (3, 2)):
        with Model.load(device="cpu", context=256, threads=threads, batch=batch) as other:
            assert text_of(other, **GREEDY) == expected


def test_seeds(model: Model) -> None:
    texts = [text_of(model, max_tokens=30, temperature=1.0, seed=seed) for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3
    assert len({text_of(model, max_tokens=30, temperature=1.0) for _ in range(3)}) > 1


def test_sampling_options_narrow_the_choice(model: Model) -> None:
    greedy = text_of(model, **GREEDY)
    for option in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert text_of(model, max_tokens=40, temperature=1.5, seed=4, **option) == greedy


def test_max_tokens(model: Model) -> None:
    assert list(model.generate(PROMPT, max_tokens=0)) == []
    for count in (1, 7):
        assert len(list(model.generate(PROMPT, max_tokens=count, temperature=0.0))) == count
        assert model.stats()["generated_tokens"] == count


def test_stop_texts_never_show_and_what_is_before_is_complete(model: Model) -> None:
    full = text_of(model, **GREEDY)
    # From inside of a token, across tokens, one that never comes, and several of which the first to come counts.
    for stop in ([full[10:12]], [full[10:30]], [full[-9:]], ["\x00never"], [full[30:36], full[20:25]], [full[:3]]):
        places = [full.find(text) for text in stop if text in full]
        expected = full[: min(places)] if places else full
        assert text_of(model, stop=stop, **GREEDY) == expected, stop


def test_one_stop_text_needs_no_list(model: Model) -> None:
    full = text_of(model, **GREEDY)
    assert text_of(model, stop=full[10:30], **GREEDY) == full[: full.find(full[10:30])]


def test_text_held_back_for_a_stop_text_comes_after_all(model: Model) -> None:
    full = text_of(model, **GREEDY)
    assert text_of(model, stop=[full[-4:] + "\x00"], **GREEDY) == full


def test_a_session_reuses_what_prompts_share(model: Model) -> None:
    session = model.session()
    ids = model.tokenize(PROMPT)
    answer = [token.id for token in session.generate(ids, **GREEDY)]
    longer = ids + answer + model.tokenize(" The end. Then", add_special=False)
    found = [token.id for token in session.generate(longer, **GREEDY)]
    stats = model.stats()
    # The last token that was drawn need not have been evaluated.
    assert stats["reused_tokens"] in (len(ids + answer) - 1, len(ids + answer))
    assert stats["prompt_tokens"] == len(longer) - stats["reused_tokens"]
    assert found == [token.id for token in model.session().generate(longer, **GREEDY)]
    assert model.stats()["reused_tokens"] in (0, 64), "at most full pages that another session has computed"

    # Another ending of the same conversation, the same prompt again, and one that shares nothing.
    for prompt in (longer[:-3] + ids[-2:], longer[:-3] + ids[-2:], list(reversed(longer))):
        found = [token.id for token in session.generate(prompt, **GREEDY)]
        assert session.tokens[: len(prompt)] == prompt
        assert found == [token.id for token in model.session().generate(prompt, **GREEDY)]
    session.reset()
    assert session.tokens == []
    assert [token.id for token in session.generate(ids, **GREEDY)] == answer


def test_sessions_do_not_disturb_each_other(model: Model) -> None:
    prompts = [PROMPT, "The dog", "One day, a girl"]
    expected = [list(model.generate(prompt, **GREEDY)) for prompt in prompts]
    running = [model.session().generate(prompt, **GREEDY) for prompt in prompts]
    found = list(zip(*running, strict=True))
    assert [list(tokens) for tokens in zip(*found, strict=True)] == expected


def test_logit_bias(model: Model) -> None:
    used = {token.id for token in model.generate(PROMPT, **GREEDY)}
    forbidden = dict.fromkeys(used, float("-inf"))
    for options in (GREEDY, {"max_tokens": 40, "temperature": 1.5, "seed": 1}):
        assert not used & {token.id for token in model.generate(PROMPT, logit_bias=forbidden, **options)}
    wanted = next(iter(used))
    assert {token.id for token in model.generate(PROMPT, logit_bias={wanted: 1e6}, **GREEDY)} == {wanted}


@pytest.mark.parametrize("penalty", [{"repetition_penalty": 1.5}, {"presence_penalty": 5.0},
                                     {"frequency_penalty": 2.0}])
def test_penalties_make_repetition_rarer(model: Model, penalty: dict[str, float]) -> None:
    def distinct(**options) -> float:
        ids = [token.id for token in model.generate(PROMPT, max_tokens=120, temperature=0.0, **options)]
        return len(set(ids)) / len(ids)

    assert distinct(**penalty) > distinct()


def test_closing_the_iterator_stops_the_work(model: Model) -> None:
    session = model.session()
    tokens = session.generate(PROMPT, temperature=0.0)
    first = [next(tokens) for _ in range(5)]
    tokens.close()
    assert model.stats()["generated_tokens"] == 5
    assert len(session.tokens) < len(model.tokenize(PROMPT)) + 5 + 1
    with pytest.raises(StopIteration):
        next(tokens)
    assert list(session.generate(PROMPT, max_tokens=5, temperature=0.0)) == first


def test_generation_ends_where_the_context_is_full(tiny: Path) -> None:
    with Model.load(tiny, device="cpu", context=16) as model:
        # A file without a tokenizer, and so without an end token. The last token needs no room.
        assert len(list(model.generate([1, 2, 3], temperature=0.0))) == 14
        assert len(list(model.generate(list(range(16)), temperature=0.0))) == 1
        message = refused(lambda: list(model.generate(list(range(17)))))
        assert "17" in message and "16" in message
        refused(lambda: model.logits(list(range(17))))


def test_what_is_refused(model: Model, tiny: Path) -> None:
    def load(**options) -> None:
        Model.load(tiny, **{"device": "cpu", **options}).close()

    load()
    assert "empty" in refused(lambda: list(model.generate([], max_tokens=1)))
    refused(lambda: model.logits([]))
    for tokens in ([-1], [model.spec.vocab_size], [2**31], [2**70], [0.5], ["a"], [[1]], "ab"):
        refused(lambda tokens=tokens: model.logits(tokens))
    assert "512" in refused(lambda: load(context=513))
    for options in ({"context": -1}, {"context": -5}, {"kv_dtype": "int3"}, {"threads": 0}, {"threads": -1},
                    {"threads": 10**6}, {"batch": 0}, {"batch": -1}, {"device": "tpu"}, {"vram": "1GiB"},
                    {"cpu_moe": "yes"}, {"cpu_moe": 2},
                    {"vram": "much", "device": "auto"}, {"vram": 0, "device": "auto"}, {"vram": 1.5, "device": "auto"}):
        refused(lambda options=options: load(**options))
    for options in ({"max_tokens": -1}, {"stop": [""]}, {"seed": -1}, {"seed": 2**64}, {"temperature": -1.0},
                    {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": 2.0},
                    {"repetition_penalty": 0.0}, {"presence_penalty": float("inf")},
                    {"logit_bias": {model.spec.vocab_size: 1.0}}, {"logit_bias": {1: float("nan")}},
                    {"logit_bias": {1: float("inf")}}, {"logit_bias": {2**40: 1.0}}, {"top_k": 2**40},
                    {"top_k": 1.5}, {"temperature": "hot"}):
        refused(lambda options=options: list(model.generate(PROMPT, **{"max_tokens": 1, **options})))


def test_a_refusal_leaves_a_session_usable(model: Model) -> None:
    session = model.session()
    expected = list(session.generate(PROMPT, **GREEDY))
    refused(lambda: list(session.generate([1] * 300)))
    refused(lambda: list(session.generate([1, 2, 10**6])))
    assert list(session.generate(PROMPT, **GREEDY)) == expected


def test_a_generation_cannot_go_on_after_another_began(model: Model) -> None:
    session = model.session()
    first = session.generate(PROMPT, **GREEDY)
    next(first)
    expected = list(model.generate([5, 6], **GREEDY))
    assert list(session.generate([5, 6], **GREEDY)) == expected
    assert "something else" in refused(lambda: next(first))
    second = session.generate(PROMPT, **GREEDY)
    next(second)
    session.reset()
    assert "something else" in refused(lambda: next(second))


def test_a_forked_process_is_told_so(tiny: Path) -> None:
    script = ("import os, sys\nfrom sharpi import InvalidRequestError, Model\n"
              "model = Model.load(sys.argv[1], threads=2, device='cpu')\nmodel.logits([1, 2])\n"
              "child = os.fork()\n"
              "if child == 0:\n"
              "    try:\n        model.logits([1, 2])\n"
              "    except InvalidRequestError:\n        os._exit(7)\n"
              "    os._exit(0)\n"
              "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n")
    done = subprocess.run([sys.executable, "-c", script, str(tiny)], timeout=60, check=False)
    assert done.returncode == 7


def test_a_closed_model_says_so(tiny: Path) -> None:
    model = Model.load(tiny, device="cpu")
    model.close()
    model.close()
    for call in (lambda: model.logits([1]), lambda: list(model.generate([1])), model.session, model.stats):
        assert "closed" in refused(call)


def test_stats_and_progress(tiny: Path) -> None:
    seen: list[tuple[int, int]] = []
    with Model.load(tiny, device="cpu", threads=1, progress=lambda *bytes_done: seen.append(bytes_done)) as model:
        assert seen[-1] == (tiny.stat().st_size,) * 2
        list(model.generate([1, 2, 3], max_tokens=4))
        stats = model.stats()
        assert (stats["prompt_tokens"], stats["generated_tokens"], stats["threads"]) == (3, 4, 1)
        assert stats["weights_bytes"] == model.file.total_bytes == model.plan.weights_bytes
        for key in ("kv_bytes", "scratch_bytes"):  # the plan counts whole pages of memory
            assert stats[key] > 0 and abs(getattr(model.plan, key) - stats[key]) <= 4096
        assert (stats["device"], stats["vram_bytes"], model.kernels_per_step) == ("cpu", 0, 0)
        assert stats["device_name"] == model.device_name and model.device == "cpu"
        holdings = stats["holdings"]
        assert list(holdings.values()) == sorted(holdings.values(), reverse=True) and all(holdings.values())
        assert (holdings["KV cache"], holdings["working memory"]) == (stats["kv_bytes"], stats["scratch_bytes"])
        assert holdings["output_norm.weight"] > 0 and "output.weight" not in holdings, "the mapped file is not counted"
        assert json.dumps(model.plan.to_dict()) and json.dumps(stats)


@pytest.mark.parametrize("kind", [OutOfMemoryError, InvalidRequestError, InternalError, ModelFileError])
def test_a_gpu_that_fails_at_loading_leaves_auto_on_the_cpu(kind: type[SharpiError], tiny: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake GPU that has room, and a core that then cannot open the model there. A bad file is bad on the CPU too."""
    monkeypatch.setattr("sharpi.planning.planner.gpu", lambda: Gpu("Some GPU", 0, "9.0", 132, 80 << 30, 79 << 30))
    make_engine = _core.Engine

    def engine(spec: _core.Description, paths: list[str], options: _core.EngineOptions) -> _core.Engine:
        if options.device == "cuda":
            raise kind("another process was quicker")
        return make_engine(spec, paths, options)

    monkeypatch.setattr(_core, "Engine", engine)
    if kind is ModelFileError:
        assert "quicker" in refused(lambda: Model.load(tiny), kind)
        return
    with Model.load(tiny) as model:
        assert (model.device, model.plan.why) == ("cpu", "another process was quicker")
        assert model.logits([1, 2]).shape == (2, 96)
    assert "quicker" in refused(lambda: Model.load(tiny, device="cuda"), kind)
    with Model.load(tiny, device="cpu") as model:
        assert model.plan.why == ""


class FakeGpuEngine:
    """Stands in for an engine on a GPU: remembers what it was asked for, and has something to say."""

    notes = ("5 MiB of the file could not be pinned",)
    trace = ()
    weight_bytes = kv_bytes = state_bytes = scratch_bytes = pinned_bytes = 0
    device_name = "Some GPU"
    counts = None

    def __init__(self, spec: _core.Description, paths: list[str], options: _core.EngineOptions) -> None:
        type(self).options = options

    def expert_stats(self) -> dict | None:
        return self.counts

    def holdings(self) -> dict[str, int]:
        return {}

    def placement(self) -> dict:
        return {"vram": 1, "direct": 2, "cpu": 1, "ranges": [(0, 0, 3, "vram")]}


def test_a_model_that_does_not_fit_whole_is_loaded_as_planned(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharpi.planning.planner.gpu", lambda: Gpu("Some GPU", 2, "9.0", 132, 80 << 30, 79 << 30))
    monkeypatch.setattr("sharpi.planning.planner.current_profile", lambda measure, announce=None, gpu_index=0: MACHINE)
    monkeypatch.setattr(_core, "Engine", FakeGpuEngine)
    monkeypatch.setenv("SHARPI_CUDA_PARTIAL_WEIGHT_CACHE", "0")
    said: list[str] = []
    with Model.load(tiny, device="cuda", notice=said.append) as model:
        assert fields_of(FakeGpuEngine.options) == {
            "context": 512,
            "cache_tokens": 0,
            "batch": 512,
            "threads": model.threads,
            "kv_dtype": "bf16",
            "prompt": "fast",
            "sequences": 4,
            "device": "cuda",
            "ordinal": 2,
            "vram": 0,
            "homes": list(model.plan.homes),
            "expert_slot_bytes": 0,
            "expert_ram_bytes": 0,
            "expert_rates": (0.0, 0.0),
            "warm": [],
            "tight": False,
        }
        assert not model.plan.resident and model.plan.decode
        assert said == ["5 MiB of the file could not be pinned"]
        stats = model.stats()
        assert stats["notes"] == said and stats["placement"]["ranges"] == [(0, 0, 3, "vram")]
    monkeypatch.delenv("SHARPI_CUDA_PARTIAL_WEIGHT_CACHE")
    with Model.load(tiny, device="cuda", vram="1GiB") as model:
        assert (FakeGpuEngine.options.vram, FakeGpuEngine.options.homes) == (1 << 30, list(model.plan.homes))
        assert model.plan.resident and len(model.plan.homes) == len(model.file.tensors)
        assert model.plan.decode is None, "no prediction was needed"


def test_a_model_that_finds_less_memory_than_planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its plan, its statistics and its notice are of what was loaded."""
    monkeypatch.setattr("sharpi.planning.planner.gpu", lambda: Gpu("Some GPU", 0, "9.0", 132, 80 << 30, 79 << 30))
    monkeypatch.setattr("sharpi.planning.planner.current_profile", lambda measure, announce=None, gpu_index=0: MACHINE)
    there = 90 << 20

    class ShortEngine(FakeGpuEngine):
        def __init__(self, spec: _core.Description, paths: list[str], options: _core.EngineOptions) -> None:
            wanted = sum(count for _, count in spec.memory_lines(options))
            if wanted > there:
                error = OutOfMemoryError(f"it needs {wanted} bytes")
                error.available, error.wanted = there, wanted
                raise error
            super().__init__(spec, paths, options)

    path = write(tmp_path / "m.gguf", replace(MODELS["llama"], layers=20, hidden=4096, context=512))
    monkeypatch.setattr(_core, "Engine", ShortEngine)
    said: list[str] = []
    with Model.load(path, device="cuda", notice=said.append) as model:
        assert not model.plan.resident and 0 < model.plan.total_bytes <= there == model.plan.available_bytes
        assert ShortEngine.options.homes == list(model.plan.homes)
        assert said == [said[0], *FakeGpuEngine.notes] == model.stats()["notes"]
        assert said[0].startswith("only 90 MiB of VRAM are free: ")


@pytest.mark.parametrize("prompt, batch, rows", [(None, 8, 64), ("fast", 64, 64), ("exact", 8, 8)])
def test_the_gpu_is_told_how_to_compute_prompts(prompt: str | None, batch: int, rows: int, tiny: Path, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharpi.planning.planner.gpu", lambda: Gpu("Some GPU", 0, "9.0", 132, 80 << 30, 79 << 30))
    monkeypatch.setattr(_core, "Engine", FakeGpuEngine)
    monkeypatch.setattr(FakeGpuEngine, "notes", ())
    said: list[str] = []

    def check(model: Model) -> None:
        assert FakeGpuEngine.options.prompt == model.plan.prompt == model.stats()["prompt"] == (prompt or "fast")
        assert FakeGpuEngine.options.batch == model.plan.batch == rows

    with Model.load(tiny, device="cuda", prompt=prompt, batch=batch, notice=said.append) as model:
        check(model)
        assert [line.split(":")[0] for line in said] == (
            [f"a batch of {batch} is rounded up to 64"] if rows != batch else [])
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(model.plan.to_dict()), encoding="utf-8")
    with Model.load(tiny, plan=saved) as model:
        check(model)


def test_on_the_cpu_prompts_are_exact_whatever_is_asked(tiny: Path) -> None:
    rows = []
    for prompt in (None, "exact", "fast"):
        with Model.load(tiny, device="cpu", prompt=prompt) as model:
            assert model.plan.prompt == model.stats()["prompt"] == "exact"
            rows.append(model.logits(list(range(40))))
    assert np.array_equal(rows[0], rows[1]) and np.array_equal(rows[0], rows[2])


def test_on_the_cpu_all_weights_are_in_ram(tiny: Path) -> None:
    with Model.load(tiny, device="cpu") as model:
        placement, weights = model.stats()["placement"], sum(tensor.nbytes for tensor in model.file.tensors)
        assert set(placement) == {"vram", "ram", "direct", "slots", "cpu", "ranges", "cache"}
        assert placement["ram"] == placement["cpu"] == weights
        assert placement["vram"] == placement["direct"] == placement["slots"] == 0
        assert {home for *_, home in placement["ranges"]} == {"ram"}
        assert placement["cache"] == {"kept": 0, "candidates": 0, "bytes": 0, "candidate_bytes": 0, "seconds": None}


def test_the_trace_of_the_cpu_speaks_of_ram(tiny: Path) -> None:
    script = "import sys\nfrom sharpi import Model\nModel.load(sys.argv[1], device='cpu').close()\n"
    for switch in ("1", "0"):
        done = subprocess.run([sys.executable, "-c", script, tiny], text=True, capture_output=True, check=False,
                              env={**os.environ, "SHARPI_TRACE_VRAM": switch})
        assert done.returncode == 0 and done.stdout == "", done.stderr
        assert "vram" not in done.stderr
        lines = done.stderr.splitlines()
        assert [line.split(":")[0] for line in lines] == (["ram"] * (len(lines) - 2) + ["weights"] * 2
                                                          if switch == "1" else [])
        assert switch == "0" or any("KV cache" in line for line in lines)


def test_notes_are_lines_on_standard_error(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_engine = _core.Engine

    class Noting(make_engine):
        notes = ("less than planned", "and slower")

    monkeypatch.setattr(_core, "Engine", Noting)
    result = cli_runner().invoke(main, ["run", "-p", "Once", "-n", "1", "--no-stats", "--device", "cpu"])
    assert result.exit_code == 0
    assert result.stderr == "sharpi: less than planned\nsharpi: and slower\n"


def test_too_little_vram_is_said_before_anything_is_loaded(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharpi.planning.planner.gpu", lambda: Gpu("Some GPU", 0, "9.0", 132, 80 << 30, 79 << 30))
    monkeypatch.setattr(_core, "Engine", None)
    message = refused(lambda: Model.load(tiny, device="cuda", vram="1MiB"), OutOfMemoryError)
    assert "tiny" in message and "missing" in message and "--device cpu" in message


# --- experts ------------------------------------------------------------------------------------------------------


@pytest.fixture
def moe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("SHARPI_EXPERT_STATS", raising=False)
    return write(tmp_path / "moe.gguf", MODELS["qwen3moe"])


def saved_uses(moe: Path, path: Path) -> ExpertStats:
    """Statistics of the model at `moe`, at `path` too, with uses that order its experts in a way of their own."""
    with Model.load(moe, device="cpu", expert_stats=path) as model:
        model.logits([1, 2, 3])
    saved = ExpertStats.load(path)
    saved = replace(saved, uses=np.random.default_rng(8).permutation(saved.uses.size).astype(np.uint64).reshape(
        saved.uses.shape))
    saved.save(path)
    return saved


@pytest.mark.parametrize("name", ["qwen3moe", "mixtral", "olmoe"])
def test_every_choice_of_an_expert_is_counted(name: str, tmp_path: Path) -> None:
    tiny = MODELS[name]
    saved = tmp_path / "stats.json"
    with Model.load(write(tmp_path / "m.gguf", tiny), device="cpu", batch=32, expert_stats=saved) as model:
        assert model.stats()["experts"]["uses"] == 0
        model.logits(list(range(70)))
        assert len(list(model.generate([1, 2, 3], max_tokens=6, temperature=0.0))) == 6
        rows = 70 + 3 + 5  # the last token is not evaluated
        experts = model.stats()["experts"]
        assert experts["uses"] == rows * tiny.experts_used * tiny.layers
        assert (experts["hit_rate"], experts["slots"]) == (None, 0)
        assert not saved.exists(), "it is written at the end"
    stats = ExpertStats.load(saved, model.file)
    assert stats.uses.sum(axis=1).tolist() == [rows * tiny.experts_used] * tiny.layers
    assert stats.layers == tuple(range(tiny.layers)) and stats.present == (tiny.experts,) * tiny.layers
    # Each row chooses an expert once at most, and random routers choose more than a few.
    assert stats.uses.max() <= rows and (stats.uses > 0).sum() > tiny.experts_used * tiny.layers


def test_expert_stats_are_written_however_it_ends(moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stats.json"
    for ending in (KeyboardInterrupt, RuntimeError):
        with pytest.raises(ending), Model.load(moe, device="cpu", expert_stats=path) as model:
            model.logits([1, 2])
            raise ending
        assert ExpertStats.load(path).uses.sum() == 2 * 3 * 2
        path.unlink()
    model.close()
    assert not path.exists(), "a closed model has nothing more to write"

    monkeypatch.setenv("SHARPI_EXPERT_STATS", str(path))
    Model.load(moe, device="cpu", expert_stats=tmp_path / "other.json").close()
    assert not path.exists() and ExpertStats.load(tmp_path / "other.json").uses.sum() == 0
    Model.load(moe, device="cpu").close()
    assert ExpertStats.load(path)
    monkeypatch.setenv("SHARPI_EXPERT_STATS", "")
    Model.load(moe, device="cpu").close()


def test_statistics_that_cannot_be_written_are_said_before_loading(moe: Path, tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "Engine", None)
    for path in (tmp_path, tmp_path / "no" / "stats.json", moe / "below", "a\0b"):
        message = refused(lambda path=path: Model.load(moe, device="cpu", expert_stats=path))
        assert "statistics" in message and "written" in message
    assert os.listdir(tmp_path) == ["moe.gguf"]


def test_statistics_that_cannot_be_written_any_more_hide_no_error(moe: Path, tmp_path: Path) -> None:
    def loaded(**options) -> Model:
        folder = tmp_path / "folder"
        folder.mkdir()
        model = Model.load(moe, device="cpu", expert_stats=folder / "stats.json", **options)
        folder.rmdir()
        return model

    model = loaded()
    assert "stats.json" in refused(model.close)
    assert "closed" in refused(model.session)
    model.close()

    said: list[str] = []
    with pytest.raises(KeyError, match="inside"), loaded(notice=said.append):
        raise KeyError("inside")
    assert len(said) == 1 and "stats.json" in said[0]

    def without_notice() -> None:
        with loaded():
            raise KeyError("inside")

    assert "stats.json" in refused(without_notice), "there is no other way to say it"


def test_a_model_without_experts_has_no_statistics(tiny: Path, tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "stats.json"
    with Model.load(tiny, device="cpu", expert_stats=path, notice=said.append) as model:
        assert model.stats()["experts"] is None
    assert len(said) == 1 and "no experts" in said[0] and not path.exists()


def test_warmth_is_of_the_same_model_and_is_handed_to_the_gpu(moe: Path, tiny: Path, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stats.json"
    saved = saved_uses(moe, path)
    assert "the model is" in refused(lambda: Model.load(tiny, device="cpu", warm=path))
    assert "the model is" in refused(lambda: Model.load(tiny, device="cpu", warm=saved))
    assert "cannot read" in refused(lambda: Model.load(moe, device="cpu", warm=tmp_path / "none.json"))

    said: list[str] = []
    with Model.load(moe, device="cpu", warm=path, notice=said.append) as model:
        assert model.logits([1]).shape == (1, 96)
    assert len(said) == 1 and "nothing is warmed" in said[0]

    counts = {name: getattr(saved, name) for name in COUNTS}
    monkeypatch.setattr("sharpi.planning.planner.gpu", lambda: Gpu("Some GPU", 0, "9.0", 132, 80 << 30, 79 << 30))
    monkeypatch.setattr(_core, "Engine", FakeGpuEngine)
    monkeypatch.setattr(FakeGpuEngine, "counts", {
        "layers": saved.layers, "present": saved.present, **counts, "predictors": [("next-token", 8, 2, 4)],
        "capacity": 4, "resident": 3,
        "disk": {"hits": 5, "reads": 2, "bytes": 1000, "waited": 0.5, "ram_capacity": 6, "ram_resident": 6}})
    for warm in (path, saved):
        with Model.load(moe, device="cuda", warm=warm, notice=said.append) as model:
            assert FakeGpuEngine.options.warm == saved.order() and saved.order() != sorted(saved.order())
            experts = model.stats()["experts"]
            assert (experts["slots"], experts["resident"]) == (4, 3)
            assert (experts["disk"]["reads"], experts["disk"]["waited"]) == (2, 0.5)
            assert experts["predictors"]["next-token"]["accuracy"] == 0.25
    assert "nothing is warmed" not in "".join(said[1:])
    monkeypatch.setattr("sharpi.loading.request.make_plan", lambda *a, **b: replace(
        make_plan(*a, **b), expert_slots=5 << 20, expert_rates=(1e9, 2e9)))
    with Model.load(moe, device="cuda"):
        told = FakeGpuEngine.options
        assert (told.expert_slot_bytes, told.expert_rates, told.warm) == (5 << 20, (1e9, 2e9), [])


def test_plans_are_predicted_with_warmth(moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, seen = saved_uses(moe, tmp_path / "stats.json"), []

    def seeing_warmth(*arguments, **options):
        seen.append(options["warm"])
        return make_plan(*arguments, **options)

    monkeypatch.setattr("sharpi.loading.request.make_plan", seeing_warmth)
    Model.load(moe, device="cpu", warm=saved).close()
    Model.load(moe, device="cpu").close()
    assert seen == [saved, None]


def test_decode_is_timed_with_other_experts_each_time(moe: Path) -> None:
    with Model.load(moe, device="cpu") as model:
        benchmark, seen = Benchmark(model), [model.engine.expert_stats()["uses"]]
        for _ in range(3):
            benchmark.decode(1, 20)
            seen.append(model.engine.expert_stats()["uses"])
        first, *others = (after - before for before, after in zip(seen, seen[1:], strict=False))
        assert all(not np.array_equal(first, other) for other in others)


def broken(path: Path, **options) -> str:
    write(path, **{"model": MODELS["qwen3"], **options})
    message = refused(lambda: Model.load(path, device="cpu").close(), ModelFileError)
    assert path.name in message
    return message


def test_files_that_cannot_be_run(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    assert "nosuch" in broken(path, model=replace(MODELS["llama"], arch="nosuch"))
    for name in ("token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.1.attn_k_norm.weight",
                 "blk.1.ffn_down.weight"):
        assert name in broken(path, skip=name)
        assert name in broken(path, change=lambda n, data, name=name: data[..., :-1].copy() if n == name else data)
    assert "blk.0.surprise" in broken(path, extra=(("blk.0.surprise", np.ones(4, np.float32)),))
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
                "attention.layer_norm_rms_epsilon"):
        assert key in broken(path, leave_out_key=key)
    moe = MODELS["qwen3moe"]
    assert "expert" in broken(path, model=replace(moe, experts_used=moe.experts + 1))
    assert "ffn_down_exps" in broken(path, model=moe, skip="blk.1.ffn_down_exps.weight")
    assert "head_count" in broken(path, model=replace(MODELS["qwen3"], kv_heads=3))
    assert "block_count" in broken(path, model=replace(MODELS["qwen3"], layers=0))
    assert "blk.1" in broken(path, change=lambda n, data: data[:-1].copy() if n == "blk.1.attn_v.weight" else data)
    hybrid = HYBRIDS["qwen35moe"]
    for name in ("blk.0.ssm_conv1d.weight", "blk.1.ssm_a", "blk.2.ssm_out.weight", "blk.3.attn_q.weight",
                 "blk.0.ffn_gate_inp_shexp.weight", "blk.4.nextn.eh_proj.weight", "blk.4.post_attention_norm.weight"):
        assert name in broken(path, model=hybrid, skip=name)
        assert name in broken(path, model=hybrid,
                              change=lambda n, data, name=name: data[..., :-1].copy() if n == name else data)
    for key in ("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"):
        assert key in broken(path, model=hybrid, leave_out_key=key)
    # Without this key the prediction layer would be one like the others.
    assert "blk.4" in broken(path, model=hybrid, leave_out_key="nextn_predict_layers")


def test_numbers_that_are_none_do_no_harm(tmp_path: Path) -> None:
    def poison(name: str, data: np.ndarray) -> np.ndarray:
        data = data.copy()
        data.flat[0] = np.nan
        data.flat[-1] = np.inf
        return data

    for name, model in {**MODELS, **HYBRIDS}.items():
        if name not in ("llama", "qwen3moe", "qwen35", "qwen35moe"):
            continue
        path = write(tmp_path / f"{name}.gguf", model, change=poison)
        with Model.load(path, device="cpu") as model:
            assert model.logits(list(range(60))).shape == (60, 96)
            assert np.isnan(model.logits([1, 2])).all()
            for temperature in (0.0, 1.0):
                options = {"max_tokens": 4, "temperature": temperature, "seed": 1}
                generation = model.generate([1, 2], **options)
                assert "damaged" in refused(lambda generation=generation: list(generation))


CRASH_SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from sharpi import Model
from sharpi.errors import SharpiError

good, header, cases, seed = Path(sys.argv[1]).read_bytes(), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
path, random = Path(sys.argv[1] + ".damaged.gguf"), np.random.default_rng(seed)
ran = refused = 0
for case in range(cases):
    data = np.frombuffer(good, np.uint8).copy()
    for at in random.integers(0, header, random.integers(1, 4)):
        # A flipped bit, or a byte of those that tell most in counts and sizes.
        data[at] = data[at] ^ (1 << random.integers(8)) if random.random() < 0.6 else random.choice([0, 1, 2, 127, 255])
    path.write_bytes(data[: random.integers(1, len(data))] if random.random() < 0.1 else data)
    print("case", case, flush=True)
    try:
        with Model.load(path, device="cpu", threads=1, context=None if case % 4 else 8, batch=16) as model:
            if model.spec.vocab_size:
                model.logits([0, 1, 2][: model.context])
                list(model.generate([0], max_tokens=2, seed=1))
        ran += 1
    except SharpiError as error:
        assert str(error) and "\\n" not in str(error), error
        refused += 1
print("ran", ran, "refused", refused)
"""


@pytest.mark.parametrize("name", ["llama-yarn", "qwen3moe", "qwen35", "qwen35moe"])
def test_damaged_files_crash_nothing(name: str, tmp_path: Path) -> None:
    """Bytes before the first tensor's data are damaged; what the reader lets pass must not crash the engine."""
    path = write(tmp_path / "m.gguf", {**MODELS, **HYBRIDS}[name])
    with Model.load(path, device="cpu") as model:
        header = min(tensor.offset for tensor in model.file.tensors)
    cases = 2000 if os.environ.get("SHARPI_LONG_TESTS") == "1" else 150
    done = subprocess.run([sys.executable, "-c", CRASH_SCRIPT, path, str(header), str(cases), "9"], text=True,
                          capture_output=True, check=False, timeout=600)
    # A signal shows as a negative code, anything but a SharpiError as 1; the last case begun is the one to look at.
    assert done.returncode == 0, (done.returncode, done.stdout[-20:], done.stderr[-2000:])
    ran, refused_count = (int(word) for word in done.stdout.split()[-3::2])
    assert ran > 0 and refused_count > cases // 4
