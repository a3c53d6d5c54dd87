"""Sessions and engines are collected without stopping other Python threads, whatever they have to wait for.

Another thread counts. Two statements with no call between them hold the GIL throughout, so the count moves between them
only if the object collected there releases it. Whether the other thread takes the GIL at that moment is chance, so each
test makes many attempts, and one success is enough.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from standing import standing

from sharpi import Model

ATTEMPTS = 200


@contextmanager
def counting() -> Iterator[list[int]]:
    """A list of one number, which another thread counts up."""
    count, done = [0], threading.Event()

    def run() -> None:
        while not done.is_set():
            count[0] += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield count
    finally:
        done.set()
        thread.join()


def test_a_session_that_is_collected_waits_for_no_pass() -> None:
    with Model.load(context=1024, threads=1, device="cpu") as model:
        sessions = [model.session() for _ in range(20)]
        for session in sessions:
            list(session.generate([1, 2, 3], max_tokens=2))
        del session
        with standing() as stop:
            answer = model.submit([1, 2, 3], max_tokens=2, constraint=stop)
            stop.reached.wait()
            sessions.clear()
        list(answer)
        assert not stop.is_late, "the pass went on before the sessions had gone"


def test_others_go_on_while_an_engine_is_collected() -> None:
    with counting() as count:
        for _ in range(ATTEMPTS):
            with Model.load(context=64, threads=2, device="cpu") as loaded:
                engine = loaded.engine
            before = count[0]
            del engine
            after = count[0]
            if after > before:
                return
    pytest.fail("no other thread ran while an engine was collected")


def test_the_last_session_takes_the_engine_with_it() -> None:
    with counting() as count:
        for _ in range(ATTEMPTS):
            with Model.load(context=64, threads=2, device="cpu") as loaded:
                session = loaded.session()
                list(session.generate([1], max_tokens=2))
            del loaded
            before = count[0]
            del session
            after = count[0]
            if after > before:
                return
    pytest.fail("no other thread ran while an engine went with its session")
