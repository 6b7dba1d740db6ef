"""Debian's Chromium, run headless through playwright."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HINT = "needs Chromium (Debian: apt-get install chromium) and playwright; REQUIRE_CHROMIUM=1 makes this a failure"


def chromium_path() -> str:
    """Return Chromium's path. Skips the test if Chromium or playwright is missing."""
    found = shutil.which("chromium")
    try:
        import playwright.sync_api  # noqa: F401
    except ModuleNotFoundError:
        found = None
    if found is None:
        if os.environ.get("REQUIRE_CHROMIUM") == "1":
            pytest.fail(HINT)
        pytest.skip(HINT)
    return found


@contextmanager
def launched() -> Iterator["Browser"]:
    """Launch Chromium and yield the browser."""
    path = chromium_path()
    from playwright.sync_api import sync_playwright

    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=path, args=["--no-sandbox"]) as browser,
    ):
        yield browser


def complaints(page: "Page", *kinds: str) -> list[str]:
    """Return a list that collects the page's console messages of the given kinds, with their URLs, and its exceptions."""
    said: list[str] = []
    page.on("console", lambda one: said.append(f"{one.text} {one.location['url']}") if one.type in kinds else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    return said
