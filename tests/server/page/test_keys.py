"""The page of a server that needs API keys."""

from __future__ import annotations

import re
from pathlib import Path

from browser import visit
from chat_page import ended, send, serve_slowly
from playwright.sync_api import Browser, expect

from mlserve.engine.tokenizer import Tokenizer
from mlserve.server.auth import Principal, create_key


def test_a_key_is_asked_for_and_kept_in_the_tab_only(browser: Browser, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = create_key(path, Principal("someone"))
    with serve_slowly(tokenizer, api_keys=str(path)) as server, visit(browser, server.url) as page:
        dialog = page.get_by_role("dialog", name="This server needs an API key")
        dialog.get_by_label("API key").fill("wrong")
        dialog.get_by_label("API key").press("Enter")
        expect(dialog.get_by_role("alert")).to_have_text("The server does not know that key.")
        dialog.get_by_label("API key").fill(key)
        dialog.get_by_role("button", name="Continue").click()
        expect(dialog).to_be_hidden()
        send(page, "hello")
        ended(page, 1)
        expect(page.locator("#pool-problem")).to_have_text("The map needs an administrator's API key.")
        assert page.evaluate("Object.values(sessionStorage)") == [key]
        assert page.evaluate("localStorage.length + document.cookie.length") == 0
        assert key not in page.evaluate("document.documentElement.outerHTML + document.querySelector('#key').value")


def test_without_a_key_the_message_is_kept_until_there_is_one(
    browser: Browser, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    key = create_key(path, Principal("boss", is_admin=True))
    with serve_slowly(tokenizer, api_keys=str(path)) as server, visit(browser, server.url) as page:
        page.get_by_role("button", name="Cancel").click()
        expect(page.get_by_role("alert")).to_have_text("This server needs an API key.")
        send(page, "hello")
        page.get_by_role("dialog").get_by_label("API key").fill(key)
        page.keyboard.press("Enter")
        ended(page, 1)
        expect(page.locator("#num-cached")).not_to_have_text(re.compile("^[0–]$"))  # an administrator sees the pool


def test_files_come_with_a_policy_and_need_no_key(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    create_key(path, Principal("someone"))
    with serve_slowly(tokenizer, api_keys=str(path)) as server:
        http = server.http()
        html = http.get("/")
        assert html.headers["content-type"] == "text/html; charset=utf-8"
        names = re.findall(r'(?:src|href)="(/[^"]+)"', html.text)
        assert len(names) >= 6
        for name in names:
            response = http.get(name)
            assert response.status_code == 200
            assert "default-src 'self'" in response.headers["content-security-policy"]
        assert http.get("/v1/models").status_code == 401
        assert http.get("/static/page.html").status_code == 401
    assert not re.search(r"<style|<script(?! type=\"module\" src=)| style=| on\w+=|https?://", html.text)
