"""Chromium by playwright, where both are installed, and what its pages must not do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = "needs playwright and Chromium: pip install playwright && python -m playwright install chromium"


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser, or `None` if there is none on this machine."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        yield None
        return
    with sync_playwright() as playwright:
        installed = next((path for path in map(shutil.which, NAMES) if path), None)
        try:
            # A container's user may not make namespaces, which the sandbox needs; the page is our own.
            browser = playwright.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        except Error:
            yield None
            return
        yield browser
        browser.close()


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
