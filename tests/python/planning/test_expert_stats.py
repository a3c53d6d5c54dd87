"""Expert statistics: what is counted, what a file keeps of it, and what is refused."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from saved_files import LAYERS, PRESENT, random_stats, table
from tiny_models import MODELS, write

from sharpi.errors import InvalidRequestError
from sharpi.files.gguf import GgufFile, fingerprint
from sharpi.planning.expert_stats import COUNTS, ExpertStats, Predictor
from sharpi.storage import require_writable, write_whole


def refused(call: Callable[[], Any]) -> str:
    """The one line that `call` is refused with."""
    with pytest.raises(InvalidRequestError) as caught:
        call()
    message = str(caught.value)
    assert message.isprintable() and message
    return message


def same(one: ExpertStats, other: ExpertStats) -> bool:
    plain = [name for name in ("model", "architecture", "fingerprint", "layers", "present", "predictors", "capacity",
                               "resident") if getattr(one, name) != getattr(other, name)]
    return not plain and all(np.array_equal(getattr(one, name), getattr(other, name))
                             and getattr(other, name).dtype == np.uint64 for name in COUNTS)


# --- what is counted ----------------------------------------------------------------------------------------------


def test_hit_rates_are_hits_of_all_choices() -> None:
    stats = random_stats(hits=table([3, 1], [0] * 8, [1]), computed=table([0, 1, 5], [0] * 8, [1, 1]),
                         fetched=table([2], [0] * 8, [0, 0, 1]))
    assert stats.hit_rates == [4 / 12, None, 1 / 4]
    assert stats.hit_rate == 5 / 16
    nothing = random_stats(**dict.fromkeys(COUNTS, np.zeros((3, 8), np.uint64)))
    assert nothing.hit_rate is None and nothing.hit_rates == [None] * 3


def test_order_names_every_expert_once_the_most_used_first() -> None:
    stats = random_stats()
    order = stats.order()
    assert sorted(order) == [(layer, e) for layer, count in zip(LAYERS, PRESENT, strict=True) for e in range(count)]
    uses = [int(stats.uses[LAYERS.index(layer), expert]) for layer, expert in order]
    assert uses == sorted(uses, reverse=True) and len(set(uses)) == len(uses)


def test_of_equally_used_experts_layers_take_turns() -> None:
    order = random_stats(uses=table([1] * 5, [1] * 7 + [9], [1] * 3)).order()
    assert order[:4] == [(2, 7), (1, 0), (2, 0), (7, 0)]
    assert order[4:7] == [(1, 1), (2, 1), (7, 1)]


def test_the_share_of_the_most_used() -> None:
    stats = random_stats(uses=table([1, 2, 3, 4, 10], [0] * 8, [5, 5, 90]))
    assert stats.top_share(0, 0.1) == 10 / 20  # at least one
    assert stats.top_share(0, 0.4) == 14 / 20
    assert stats.top_share(1, 0.5) is None
    assert stats.top_share(2, 1.0) == 1.0


def test_predictors_are_judged_by_what_they_named_and_by_what_was_wanted() -> None:
    found, silent = random_stats().predictors
    assert (found.accuracy, found.coverage) == (0.37, 0.74)
    assert (silent.accuracy, silent.coverage) == (None, 0.0)
    assert Predictor("x", 0, 0, 0).coverage is None


def test_the_summary_is_plain_and_sums_up() -> None:
    stats = random_stats()
    summary = json.loads(json.dumps(stats.summary()))
    assert summary["slots"] == 7 and summary["resident"] == 6 and summary["hit_rate"] == stats.hit_rate
    for name in COUNTS:
        assert summary[name] == sum(int(count) for row in getattr(stats, name) for count in row)
    assert summary["predictors"]["next-token"]["accuracy"] == 0.37


READ = {"hits": 5, "reads": 2, "bytes": 1000, "waited": 0.5, "ram_capacity": 6, "ram_resident": 4}


def test_from_engine_takes_what_the_core_says() -> None:
    stats = random_stats()
    wider = {name: np.pad(getattr(stats, name), ((0, 0), (0, 4))) for name in COUNTS}
    counts = {"layers": list(LAYERS), "experts": 12, "present": list(PRESENT), **wider, "capacity": 7, "resident": 6,
              "predictors": [tuple(predictor) for predictor in stats.predictors], "disk": {**READ, "bytes": 0}}
    plan = SimpleNamespace(model="tiny", architecture="qwen3moe", fingerprint="9-abc")
    assert same(stats, ExpertStats.from_engine(SimpleNamespace(expert_stats=lambda: counts), plan))
    assert ExpertStats.from_engine(SimpleNamespace(expert_stats=lambda: None), plan) is None
    read = ExpertStats.from_engine(SimpleNamespace(expert_stats=lambda: {**counts, "disk": READ}), plan)
    assert read and read.summary()["disk"] == READ and stats.summary()["disk"] is None


# --- files --------------------------------------------------------------------------------------------------------


def test_a_file_keeps_everything(tmp_path: Path) -> None:
    for seed in range(5):
        stats = random_stats(seed, predictors=()) if seed else random_stats()
        stats.save(tmp_path / "stats.json")
        assert same(stats, ExpertStats.load(tmp_path / "stats.json"))
    assert not same(stats, random_stats(seed + 1))


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stats.json"
    random_stats(1).save(path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        message = refused(lambda: random_stats(2).save(path))
    assert str(path) in message and "No space left" in message
    assert same(random_stats(1), ExpertStats.load(path))
    assert os.listdir(tmp_path) == ["stats.json"]


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(target)
    write_whole(link, b"one")
    assert link.is_symlink() and target.read_bytes() == b"one"

    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, b"two")
    reader.join()
    assert received == [b"two"] and stat.S_ISFIFO(os.stat(pipe).st_mode)


def test_asking_whether_a_path_can_be_written_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    require_writable(path)
    assert os.listdir(tmp_path) == []
    path.write_bytes(b"there")
    require_writable(path)
    assert os.listdir(tmp_path) == ["stats.json"] and path.read_bytes() == b"there"
    require_writable(os.devnull)
    for bad in (tmp_path, tmp_path / "no" / "folder", path / "below", tmp_path / ("x" * 300), ""):
        with pytest.raises(OSError):
            require_writable(bad)
        refused(lambda bad=bad: random_stats().save(bad))
    refused(lambda: random_stats().save("a\0b"))


def test_what_cannot_be_read_is_said_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    assert "cannot read" in refused(lambda: ExpertStats.load(path))
    assert "cannot read" in refused(lambda: ExpertStats.load(tmp_path))
    foreign = [b"", b"\0\xff\xfe", b"GGUF" + bytes(100), b"{", b"[]", b"null", b"{}", b"7", b'{"format": 5}',
               b'{"format": "another"}', b"[" * 100_000, b'{"version": 1, "model": "tiny"}']
    for content in foreign:
        path.write_bytes(content)
        message = refused(lambda: ExpertStats.load(path))
        assert str(path) in message and "no expert statistics" in message, content


def test_another_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    for version in (2, 0, "1", True, 1.0, None, 10**100):
        random_stats().save(path)
        path.write_text(json.dumps({**json.loads(path.read_text()), "version": version}))
        assert "version" in refused(lambda: ExpertStats.load(path))


NONSENSE = (None, -1, 1.5, True, "\x1b[31m", [], [[]], {}, {"a": 1}, 1 << 62, float("nan"), [1, 2])


def test_every_damaged_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    random_stats().save(path)
    good = json.loads(path.read_text())

    def check(data: Any, *named: str) -> None:
        path.write_text(json.dumps(data))
        message = refused(lambda: ExpertStats.load(path))
        assert any(repr(name) in message for name in named), message

    for name in set(good) - {"format", "version"}:
        check({key: value for key, value in good.items() if key != name}, name)
        fine = (str,) if isinstance(good[name], str) else ()
        for value in NONSENSE:
            # An empty list of predictors is a list of predictors.
            if not isinstance(value, fine) and not (name == "predictors" and value == []):
                check({**good, name: value}, name)
    for name in good["layers"][0]:
        for value in (*NONSENSE, [0] * 4, [0.5] * 5, [-1] * 5, [True] * 5):
            check({**good, "layers": [{**good["layers"][0], name: value}, *good["layers"][1:]]}, "layers")
        less = {key: value for key, value in good["layers"][0].items() if key != name}
        check({**good, "layers": [less, *good["layers"][1:]]}, "layers")
    check({**good, "layers": good["layers"][::-1]}, "layers")
    check({**good, "layers": [*good["layers"][:2], {**good["layers"][2], "layer": 1 << 17}]}, "layers")
    check({**good, "layers": good["layers"][:1] * 2}, "layers")
    for name in Predictor._fields:
        check({**good, "predictors": [{**good["predictors"][0], name: -1}]}, "predictors")


def test_damaged_bytes_crash_nothing(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    random_stats().save(path)
    good, random, loaded = np.frombuffer(path.read_bytes(), np.uint8), np.random.default_rng(5), 0
    for case in range(300):
        data = good.copy()
        data[random.integers(len(data))] = random.integers(32, 127)
        path.write_bytes(data[: random.integers(len(data))] if case % 3 == 0 else data)
        try:
            ExpertStats.load(path)
            loaded += 1
        except InvalidRequestError as error:
            assert str(error).isprintable()
    assert 0 < loaded < 200  # a digit for another is no damage that shows, half a file is


# --- whose they are -----------------------------------------------------------------------------------------------


def test_statistics_of_another_model_are_refused(tmp_path: Path) -> None:
    model = MODELS["qwen3moe"]
    files = [GgufFile.open(write(tmp_path / f"{i}.gguf", other, extra=extra)) for i, (other, extra) in enumerate([
        (model, ()), (replace(model, hidden=64), ()), (MODELS["olmoe"], ())])]
    mine = files[0]
    path = tmp_path / "stats.json"
    random_stats(model=mine.name, architecture=mine.architecture, fingerprint=fingerprint(mine)).save(path)
    assert ExpertStats.load(path, mine).fingerprint == fingerprint(mine)
    for other in files[1:]:
        message = refused(lambda other=other: ExpertStats.load(path, other))
        assert str(path) in message and "statistics are of" in message
    named = replace(ExpertStats.load(path), model="\x1b[2Jodd\n")
    named.save(path)
    assert "odd" in refused(lambda: ExpertStats.load(path, mine))


def test_statistics_that_say_nothing_of_slots_have_none() -> None:
    stats = random_stats()
    bare = ExpertStats(stats.model, stats.architecture, stats.fingerprint, stats.layers, stats.present,
                       *(getattr(stats, name) for name in COUNTS))
    assert bare.summary()["slots"] == bare.summary()["resident"] == 0 and bare.summary()["predictors"] == {}
