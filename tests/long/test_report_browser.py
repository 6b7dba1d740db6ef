"""report.html in Debian's Chromium: it fits a phone, shows all parts without scripts, and requests no other file."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers.verdicts.report_pages import exhibits, occasion

from stages.report.page import write_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HINT = "needs Chromium (Debian: apt-get install chromium) and playwright; REQUIRE_CHROMIUM=1 makes this a failure"


def chromium_path() -> str:
    """Return Chromium's path. Skips the test if Chromium or playwright is missing."""
    path = shutil.which("chromium")
    try:
        import playwright.sync_api  # noqa: F401
    except ModuleNotFoundError:
        path = None
    if path is None:
        if os.environ.get("REQUIRE_CHROMIUM") == "1":
            pytest.fail(HINT)
        pytest.skip(HINT)
    return path


@contextmanager
def launch_browser() -> Iterator["Browser"]:
    """Launch Chromium and yield the browser."""
    path = chromium_path()
    from playwright.sync_api import sync_playwright

    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=path, args=["--no-sandbox"]) as browser,
    ):
        yield browser


def collect_messages(page: "Page", *kinds: str) -> list[str]:
    """Return a list that collects the page's console messages of these kinds, with their URLs, and its exceptions."""
    messages: list[str] = []

    def add(message: Any) -> None:
        if message.type in kinds:
            messages.append(f"{message.text} {message.location['url']}")

    page.on("console", add)
    page.on("pageerror", lambda error: messages.append(str(error)))
    return messages


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with launch_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of three policies."""
    folder = tmp_path_factory.mktemp("report")
    shown = exhibits(folder)
    return write_page(folder / "report.html", shown, occasion(folder, shown, champion="fp8"))


@contextmanager
def open_page(browser: "Browser", path: Path, **options: Any) -> Iterator["Page"]:
    """Open the page, and assert that it makes no further request and writes no warning or error to the console."""
    requests: list[str] = []
    with browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options}) as context:
        page, url = context.new_page(), path.as_uri()
        messages = collect_messages(page, "error", "warning")
        context.on("request", lambda request: requests.append(request.url))
        context.route("**/*", lambda route: route.continue_() if route.request.url == url else route.abort())
        page.goto(url)
        yield page
        assert requests == [url], "the page requested another file"
        assert messages == []


def count_visible(page: "Page", selector: str) -> int:
    return page.locator(f"{selector} >> visible=true").count()


@pytest.mark.parametrize("width", [360, 390])
def test_nothing_is_wider_than_a_phone(browser: "Browser", report: Path, width: int) -> None:
    with open_page(browser, report, viewport={"width": width, "height": 800}) as page:
        for details in page.locator("details").all():
            details.evaluate("element => element.open = true")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        cut = page.evaluate(
            """[...document.querySelectorAll('tbody th')].filter((e) => e.scrollWidth > e.clientWidth + 1)
               .map((e) => e.innerText)"""
        )
        assert cut == [], "row headers are not cut off"
        outside = page.evaluate(
            """[...document.querySelectorAll("main *")].filter((e) => !e.closest(".scroll, svg") && e.checkVisibility()
               && e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 80))"""
        )
        assert outside == []


def test_charts_answers_and_checks_are_visible_without_scripts(browser: "Browser", report: Path) -> None:
    with open_page(browser, report, java_script_enabled=False) as page:
        assert count_visible(page, ".checks tbody tr") > 10
        page.locator(".answers >> visible=true").first.locator("summary").first.click()
        assert count_visible(page, "article") > 12
        assert count_visible(page, "figure svg") == 3
