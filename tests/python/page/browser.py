"""Chromium by playwright, where both are installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
