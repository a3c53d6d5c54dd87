from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from browser import MISSING, Watch, chromium
from page_server import FakeServer, listening


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with chromium() as found:
        if found is None:
            pytest.skip(MISSING)
        yield found


@pytest.fixture(scope="session")
def one_server() -> Iterator[tuple[FakeServer, str]]:
    server = FakeServer()
    with listening(server) as address:
        yield server, address


@pytest.fixture
def server(one_server: tuple[FakeServer, str]) -> FakeServer:
    """The server, as it is before its first request."""
    one_server[0].reset()
    return one_server[0]


@pytest.fixture(scope="session")
def address(one_server: tuple[FakeServer, str]) -> str:
    return one_server[1]


@contextmanager
def reader(browser: Any, address: str) -> Iterator[Any]:
    """One reader's browser, with an empty store."""
    watch = Watch(address)
    made = browser.new_context(viewport={"width": 1200, "height": 800}, color_scheme="light")
    made.set_default_timeout(5000)
    made.add_init_script("addEventListener('securitypolicyviolation',"
                         " (event) => console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`))")
    made.on("page", watch.on)
    yield made
    made.close()
    assert not watch.wrong


def opened(context: Any, address: str) -> Any:
    page = context.new_page()
    page.goto(address)
    page.wait_for_selector("#model option", state="attached")
    return page


@pytest.fixture
def context(browser: Any, server: FakeServer, address: str) -> Iterator[Any]:
    with reader(browser, address) as made:
        yield made


@pytest.fixture
def page(context: Any, address: str) -> Any:
    return opened(context, address)


@pytest.fixture(scope="module")
def lasting_page(browser: Any, address: str) -> Iterator[Any]:
    """A page for tests that leave nothing behind."""
    with reader(browser, address) as made:
        yield opened(made, address)
