"""A real Chromium for tests of the chat page, and what must be true of every visit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Response, sync_playwright

SYSTEM_NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDE = {"width": 1280, "height": 800}


@contextmanager
def chromium() -> Iterator[Browser]:
    """The system's, or Playwright's own. Without one the test is skipped."""
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        found = next(filter(None, map(shutil.which, SYSTEM_NAMES)), own if Path(own).exists() else None)
        if found is None:
            pytest.skip("there is no Chromium: install it, or run `playwright install chromium`")
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def visit(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """A page at `url`. When it is left, it has logged no error but of responses, got all its files, and asked no
    other server.
    """
    context = browser.new_context(**{"viewport": WIDE, **options})
    page = context.new_page()
    page.set_default_timeout(5000)
    problems: list[str] = []

    def on_console(message: ConsoleMessage) -> None:
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            problems.append(message.text)

    def on_response(response: Response) -> None:
        if response.status >= 400 and not urlsplit(response.url).path.startswith("/v1/"):
            problems.append(f"{response.status} {response.url}")

    def on_request(request: Request) -> None:
        if not request.url.startswith((url, "data:", "blob:")):
            problems.append(f"a request to {request.url}")

    page.on("console", on_console)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("response", on_response)
    page.on("request", on_request)
    try:
        page.goto(url)
        yield page
    finally:
        context.close()
    assert not problems, problems
