"""Debian's Chromium without a window, through playwright."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

HINT = "needs Chromium (Debian: apt-get install chromium) and playwright; REQUIRE_CHROMIUM=1 makes this a failure"

DELAYED = "ResizeObserver loop completed with undelivered notifications"
"""What a browser that is short of time reports as an error, though the page has only to wait for its next frame."""


def chromium_path() -> str:
    """Where Chromium is; the test is skipped without it, or without playwright."""
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


@dataclass
class Opened:
    """A page of a browser, and what it complained of."""

    page: "Page"
    errors: list[str] = field(default_factory=list)
    """Of its console and its scripts, with the address that each is about."""


@contextmanager
def opened_page(width: int = 1600, height: int = 1000) -> Iterator[Opened]:
    """Open an empty page; `page.goto` takes it anywhere."""
    path = chromium_path()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        opened = Opened(browser.new_page(viewport={"width": width, "height": height}))

        def note(complaint: str) -> None:
            if DELAYED not in complaint:
                opened.errors.append(complaint)

        opened.page.on("console", lambda said: note(f"{said.text} {said.location['url']}") if said.type == "error" else None)
        opened.page.on("pageerror", lambda error: note(str(error)))
        try:
            yield opened
        finally:
            browser.close()
