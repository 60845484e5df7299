"""A browser, a server, and the server's page in the browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import chromium, visit
from chat_page import serve_slowly
from http_server import Served
from playwright.sync_api import Browser, Page, expect

from mlserve.engine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Served]:
    with serve_slowly(tokenizer) as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: Served) -> Iterator[Page]:
    with visit(browser, server.url) as page:
        expect(page.get_by_label("Answer with").locator("option")).to_have_count(3)
        yield page
    server.wait_until_idle()
