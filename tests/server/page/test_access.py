"""The page without a mouse, for screen readers, on small screens and in the dark."""

from __future__ import annotations

from typing import Any

import pytest
from chat_page import NARROW, ended, limit, png, prompt, send, text_of, with_images
from playwright.sync_api import Page, expect

NEEDS_NAME = {"button", "link", "textbox", "combobox", "slider", "spinbutton", "dialog", "log", "region", "option"}


def test_a_conversation_needs_no_mouse(page: Page) -> None:
    expect(prompt(page)).to_be_focused()
    for _ in range(4):  # back past the log, New chat and Settings
        page.keyboard.press("Shift+Tab")
    expect(page.get_by_role("link", name="Skip to the message box")).to_be_focused()
    page.keyboard.press("Enter")
    expect(prompt(page)).to_be_focused()
    limit(page, 9)
    page.keyboard.type("two")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines")
    page.keyboard.press("Tab")
    expect(page.get_by_label("Answer with")).to_be_focused()
    page.keyboard.type("pir")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Send")).to_be_focused()
    page.keyboard.press("Enter")
    answer = ended(page, 1)
    assert answer.get_by_role("heading").inner_text() == "pirate"
    assert text_of(page.locator(".question")) == "two\nlines"
    expect(prompt(page)).to_be_focused()


def test_every_control_has_a_name(page: Page) -> None:
    with_images(page)
    page.get_by_label("Attach images").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": png(9, 9)})
    page.get_by_text("Settings").click()
    page.set_viewport_size(NARROW)  # with the buttons that switch views
    page.evaluate("document.querySelector('#pool').style.display = 'flex'")
    nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    shown = [node for node in nodes if not node["ignored"]]
    roles = {node["role"]["value"] for node in shown}
    named = [node for node in shown if node["role"]["value"] in NEEDS_NAME]
    nameless = [node["role"]["value"] for node in named if not node["name"]["value"].strip()]
    assert nameless == []
    assert {"main", "banner", "navigation", "log", "region", "slider", "combobox", "spinbutton"} <= roles
    assert page.locator("img:not([alt])").count() == 0


CONTRASTS = """() => {
  const parse = colour => (colour.match(/[\\d.]+/g) ?? []).map(Number);
  const over = ([r, g, b, a = 1], below) => [r, g, b].map((part, i) => part * a + below[i] * (1 - a));
  const background = element => {
    const below = element.parentElement ? background(element.parentElement) : [255, 255, 255];
    return over(parse(getComputedStyle(element).backgroundColor), below);
  };
  const luminance = colour => {
    const [r, g, b] = colour.map(part => part / 255)
      .map(c => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const hasText = element => [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
  return [...document.body.querySelectorAll("*")]
    .filter(element => (hasText(element) || element.matches("input, select, textarea")) && element.checkVisibility())
    .map(element => {
      const behind = background(element);
      const [low, high] = [luminance(over(parse(getComputedStyle(element).color), behind)), luminance(behind)].sort();
      return [element.textContent.trim().slice(0, 30) || element.id, (high + 0.05) / (low + 0.05)];
    });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_on_both_schemes(page: Page, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    send(page, "hello")
    ended(page, 1)
    send(page, "long " * 200)
    expect(page.get_by_role("alert")).to_be_visible()
    page.get_by_text("Settings").click()
    page.wait_for_timeout(250)  # colours change softly
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 25
    assert [(text, ratio) for text, ratio in contrasts if ratio < 4.5] == []


def test_a_narrow_screen_has_no_sideways_scrolling(page: Page) -> None:
    page.set_viewport_size(NARROW)
    send(page, "averyveryverylongword" * 5)
    ended(page, 1)
    for view in ("Chat", "Block pool"):
        page.get_by_role("button", name=view, exact=True).click()
        assert page.evaluate("document.documentElement.scrollWidth") == NARROW["width"]
        outside = """all => all.filter(each => each.getBoundingClientRect().right > 360.5 && each.checkVisibility()
            && !each.closest('.unseen')).map(each => each.outerHTML.slice(0, 80))"""
        assert page.locator("body *").evaluate_all(outside) == []
