"""Models are loaded once, when they are asked for, and put away without cutting an answer short."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fake_loader import FakeLoader, model_files

from sharpi.errors import ModelFileError, OutOfMemoryError
from sharpi.serve.errors import ApiError
from sharpi.serve.models.catalog import ModelFile
from sharpi.serve.models.loading import ModelLoader, default_runner
from sharpi.serve.models.store import ModelStore
from sharpi.serve.settings import ServerSettings


@pytest.fixture
def loader() -> FakeLoader:
    return FakeLoader()


async def soon(condition: Callable[[], object]) -> None:
    """Returns when it is true, and fails if that never comes."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it has not come")


async def settled() -> None:
    """After everything that could go on by itself has gone on."""
    for _ in range(5):
        await asyncio.sleep(0.01)


async def use(store: ModelStore, name: str | None, until: asyncio.Event | None = None) -> None:
    async with store.lease(name) as lease:
        assert name in (None, lease.name)
        if until is not None:
            await until.wait()


async def refusal(work: Awaitable[None]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await work
    return caught.value


def test_requests_that_come_together_wait_for_one_load(tmp_path: Path, loader: FakeLoader) -> None:
    async def scenario() -> None:
        store = ModelStore(model_files(tmp_path, "a"), loader)
        loader.hold.clear()
        waiting = [asyncio.create_task(use(store, name)) for name in ("a", None, "a")]
        await soon(lambda: store.loading == ["a"])
        assert not store.card("a").loaded
        loader.hold.set()
        await asyncio.gather(*waiting)
        assert loader.events == ["open a"] and store.card("a").loaded and store.loading == []

    asyncio.run(scenario())


def test_a_request_that_gives_up_does_not_stop_the_load_of_others(tmp_path: Path, loader: FakeLoader) -> None:
    async def scenario() -> None:
        store = ModelStore(model_files(tmp_path, "a"), loader)
        loader.hold.clear()
        first, second = (asyncio.create_task(use(store, "a")) for _ in range(2))
        await soon(lambda: store.loading)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        loader.hold.set()
        await second
        assert loader.events == ["open a"]

    asyncio.run(scenario())


def test_without_a_budget_one_model_is_loaded_at_a_time(tmp_path: Path, loader: FakeLoader) -> None:
    async def scenario() -> None:
        store = ModelStore(model_files(tmp_path, "a", "b"), loader)
        for name in ("a", "b", "b", "a"):
            await use(store, name)
        assert loader.events == ["open a", "close a", "open b", "close b", "open a"]

    asyncio.run(scenario())


def test_the_model_goes_that_was_not_used_for_the_longest_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        loader = FakeLoader({"a": 4, "b": 4, "c": 3, "huge": 99})
        store = ModelStore(model_files(tmp_path, "a", "b", "c", "huge"), loader, memory=10)
        for name in ("a", "b", "a", "c"):  # b goes, though it came later than a
            await use(store, name)
        assert loader.events == ["open a", "open b", "close b", "open c"]
        await use(store, "huge")  # more than the budget, so alone
        assert loader.events[4:] == ["close a", "close c", "open huge"]

    asyncio.run(scenario())


def test_an_idle_model_goes_before_one_with_requests(tmp_path: Path) -> None:
    async def scenario() -> None:
        loader = FakeLoader({"a": 4, "b": 4, "c": 4})
        store, end = ModelStore(model_files(tmp_path, "a", "b", "c"), loader, memory=10), asyncio.Event()
        busy = asyncio.create_task(use(store, "a", end))
        await soon(lambda: store.card("a").loaded)
        await use(store, "b")
        await asyncio.wait_for(use(store, "c"), 20)
        assert loader.events == ["open a", "open b", "close b", "open c"]
        end.set()
        await busy

    asyncio.run(scenario())


def test_requests_finish_before_their_model_goes_and_later_ones_wait_for_it(tmp_path: Path, loader: FakeLoader) -> None:
    async def scenario() -> None:
        store, end = ModelStore(model_files(tmp_path, "a", "b"), loader), asyncio.Event()
        running = asyncio.create_task(use(store, "a", end))
        await soon(lambda: store.card("a").loaded)
        other = asyncio.create_task(use(store, "b"))
        await settled()
        later = asyncio.create_task(use(store, "a"))  # must not keep b waiting
        await settled()
        assert loader.events == ["open a"] and not other.done() and not later.done()
        assert not store.card("a").loaded, "it takes no requests any more"
        end.set()
        await asyncio.gather(running, other, later)
        assert loader.events == ["open a", "close a", "open b", "close b", "open a"]

    asyncio.run(scenario())


def test_many_requests_for_three_models_all_get_theirs(tmp_path: Path, loader: FakeLoader) -> None:
    async def one(store: ModelStore, index: int) -> None:
        async with store.lease("abc"[index % 3]) as lease:
            assert [loaded.name for loaded in store.loaded()] == [lease.name]
            await asyncio.sleep(0.001 * (index % 4))
            assert [loaded.name for loaded in store.loaded()] == [lease.name]

    async def scenario() -> None:
        store = ModelStore(model_files(tmp_path, "a", "b", "c"), loader)
        await asyncio.wait_for(asyncio.gather(*(one(store, index) for index in range(90))), 20)
        await store.close()
        opened, closed = (sorted(event[-1] for event in loader.events if event.startswith(kind))
                          for kind in ("open", "close"))
        assert opened == closed and set(opened) == {"a", "b", "c"}

    asyncio.run(scenario())


def test_an_unknown_name_is_a_404(tmp_path: Path, loader: FakeLoader) -> None:
    async def scenario() -> None:
        store = ModelStore(model_files(tmp_path, "a", "user:Q4"), loader)
        error = await refusal(use(store, "gpt-4"))
        assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
        async with store.lease("USER:q4") as lease:
            assert lease.name == "user:Q4"
        with pytest.raises(ApiError):
            store.card("none")

    asyncio.run(scenario())


@pytest.mark.parametrize(("failure", "status", "code"), [
    (ModelFileError("{path}: is damaged"), 500, "model_file_error"),
    (OutOfMemoryError("3 GiB are missing"), 503, "out_of_memory"),
])
def test_a_model_that_cannot_be_loaded_is_an_error_of_its_requests(
        tmp_path: Path, loader: FakeLoader, failure: Exception, status: int, code: str) -> None:
    async def scenario() -> None:
        files = model_files(tmp_path, "a", "b")
        store = ModelStore(files, loader)
        loader.failures["a"] = type(failure)(str(failure).format(path=files[0].path))
        both = await asyncio.gather(refusal(use(store, "a")), refusal(use(store, "a")))
        for error in both:
            assert (error.status, error.code) == (status, code)
            assert str(tmp_path) not in error.message, "clients need not know where files are"
        assert list(store.failures) == ["a"]
        await use(store, "b")
        del loader.failures["a"]
        await use(store, "a")  # tried again
        assert store.failures == {}

    asyncio.run(scenario())


def test_a_file_that_is_gone_is_one_clear_error(tmp_path: Path, loader: FakeLoader) -> None:
    async def scenario() -> None:
        files = model_files(tmp_path, "a")
        store = ModelStore(files, loader)
        files[0].path.unlink()
        error = await refusal(use(store, "a"))
        assert error.status == 500
        assert error.message == "the model 'a' cannot be loaded: a: the file is gone"

    asyncio.run(scenario())


def test_an_ending_store_refuses_and_closes_everything(tmp_path: Path, loader: FakeLoader) -> None:
    async def scenario() -> None:
        store, end = ModelStore(model_files(tmp_path, "a", "b"), loader), asyncio.Event()
        running = asyncio.create_task(use(store, "a", end))
        await soon(lambda: store.card("a").loaded)
        await settled()  # it has its model
        store.end()
        assert (await refusal(use(store, "a"))).status == 503
        assert (await refusal(use(store, "b"))).code == "server_ending"
        await store.close()
        assert loader.events == ["open a", "close a"]
        end.set()
        await running

    asyncio.run(scenario())


def test_a_load_that_is_under_way_at_the_end_is_closed_too(tmp_path: Path, loader: FakeLoader) -> None:
    async def scenario() -> None:
        store = ModelStore(model_files(tmp_path, "a"), loader)
        loader.hold.clear()
        waiting = asyncio.create_task(use(store, "a"))
        await soon(lambda: store.loading)
        closing = asyncio.create_task(store.close())
        await settled()
        assert not closing.done()
        loader.hold.set()
        await closing
        for found in await asyncio.gather(waiting, return_exceptions=True):
            assert found is None or (isinstance(found, ApiError) and found.status == 503)
        assert loader.events == ["open a", "close a"]

    asyncio.run(scenario())


def test_what_a_real_model_needs_is_what_it_then_takes() -> None:
    from sharpi.loading.description import BUNDLED_MODEL

    file = ModelFile("story", BUNDLED_MODEL)
    def loader_of(spill: str) -> ModelLoader:
        settings = ServerSettings(device="cpu", threads=1, context=128, spill=spill)
        return ModelLoader(settings,
                           lambda model, scheduler, settings, name: None)  # type: ignore[arg-type, return-value]

    loader = loader_of("0")
    loaded = loader.open(file)
    try:
        assert loaded.scheduler.counts()["waiting"] == 0
        # Beside what is counted beforehand, the engine keeps small tables.
        assert loader.needs(file) <= loaded.bytes <= 1.1 * loader.needs(file)
        assert loader_of("3MiB").needs(file) == loader.needs(file) + (3 << 20), "copies of pages are in the same RAM"
    finally:
        loaded.close()
    assert callable(default_runner)
