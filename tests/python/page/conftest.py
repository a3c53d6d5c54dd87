from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from browser import MISSING, chromium
from fake_server import FakeServer, listening

OpenPage = Callable[..., Any]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with chromium() as found:
        if found is None:
            pytest.skip(MISSING)
        yield found


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def address(server: FakeServer) -> Iterator[str]:
    with listening(server) as found:
        yield found


class Watch:
    """What pages must not do: fail, break the policy, or ask another server than their own."""

    def __init__(self, address: str) -> None:
        self.origin = urlsplit(address).netloc
        self.wrong: list[str] = []

    def on(self, page: Any) -> None:
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("console", self._said)
        page.on("request", self._asked)

    def _said(self, message: Any) -> None:
        # Chromium words every answer that is not 200 as an error, which the page shows in its own words.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.wrong.append(f"console: {message.text}")

    def _asked(self, request: Any) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("blob", "data") and parts.netloc != self.origin:
            self.wrong.append(f"request: {request.url}")


@pytest.fixture
def watch(address: str) -> Iterator[Watch]:
    found = Watch(address)
    yield found
    assert not found.wrong


@pytest.fixture
def context(browser: Any, watch: Watch) -> Iterator[Any]:
    """One reader's browser, with an empty store."""
    made = browser.new_context(viewport={"width": 1200, "height": 800}, color_scheme="light")
    made.set_default_timeout(5000)
    made.add_init_script("addEventListener('securitypolicyviolation',"
                         " (event) => console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`))")
    made.on("page", watch.on)
    yield made
    made.close()


@pytest.fixture
def page(context: Any, address: str) -> Any:
    made = context.new_page()
    made.goto(address)
    made.wait_for_selector("#model option", state="attached")
    return made
