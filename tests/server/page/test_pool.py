"""The live view of the block pool."""

from __future__ import annotations

import time
from typing import Any

import pytest
from chat_page import NARROW, ended, send
from http_server import Served
from playwright.sync_api import Page, expect

POOL = {
    "runs": [[2, "in_use", 1, 0, None], [1, "in_use", 3, None, None], [3, "cached", 0, 1, None], [2, "cached", 0, 0, 0],
             [4, "free", 0, None, None]],
    "adapters": [{"digest": "aaaaaaaa", "name": "pirate"}, {"digest": "bbbbbbbb", "name": None}],
    "images": ["cccccccc"],
}  # fmt: skip
IN_WORDS = {
    1: "Block 1: in use by 1 sequence, text, adapter pirate",
    3: "Block 3: in use by 3 sequences, text, base model",
    4: "Block 4: cached, text, adapter bbbbbbbb",
    7: "Block 7: cached, image cccccccc, adapter pirate",
    9: "Block 9: free",
}
CORNERS = """canvas => {  // of each cell a point near its corner, where no sign is
  const side = 24;
  const context = canvas.getContext("2d");
  return Array.from({length: 12}, (_, i) => [...context.getImageData(side * i + 4, 4, 1, 1).data].join());
}"""


def counts(page: Page) -> list[str]:
    return [page.locator(f"#num-{state}").inner_text() for state in ("in-use", "cached", "free")]


def show_pool(page: Page, pool: dict[str, Any]) -> None:
    page.route("**/v1/cache/blocks", lambda route: route.fulfill(json=pool))
    page.reload()
    expect(page.locator("#num-free")).to_have_text("4")


def test_the_pool_is_shown_as_the_api_tells_it(page: Page, server: Served) -> None:
    send(page, "fill some blocks of the pool", max_tokens=200)
    expect(page.locator("#num-in-use")).not_to_have_text("0")
    expect(page.locator("#num-in-use")).not_to_have_text("–")
    page.keyboard.press("Escape")
    ended(page, 1)
    expect(page.locator("#num-in-use")).to_have_text("0")
    runs = server.http().get("/v1/cache/blocks").json()["runs"]
    totals = {state: str(sum(run[0] for run in runs if run[1] == state)) for state in ("in_use", "cached", "free")}
    assert counts(page) == list(totals.values())
    assert int(totals["cached"]) > 8
    rate = server.http().get("/v1/cache").json()["hit_rate"]
    assert page.locator("#hit-rate").inner_text() == f"{round(100 * rate)} %"


def test_cells_are_told_by_their_colours(page: Page) -> None:
    show_pool(page, POOL)
    assert counts(page) == ["3", "5", "4"]
    assert page.locator("#contents li").all_text_contents() == ["base model 1", "bbbbbbbb 3", "pirate 2", "images 2"]
    cells = page.locator("#blocks").evaluate(CORNERS)
    groups = [set(cells[:2]), set(cells[2:3]), set(cells[3:6]), set(cells[6:8]), set(cells[8:])]
    assert [len(group) for group in groups] == [1] * 5
    assert len(set.union(*groups)) == 5
    alpha = [int(cell.split(",")[3]) for cell in cells]
    assert alpha[:3] == [255] * 3  # full
    assert alpha[3:8] == [pytest.approx(0.3 * 255, abs=2)] * 5  # pale
    assert alpha[8:] == [0] * 4  # empty


def test_blocks_are_told_in_words_to_the_mouse_and_to_the_keyboard(page: Page) -> None:
    show_pool(page, POOL)
    blocks, tip = page.get_by_role("slider", name="Blocks"), page.locator("#tip")
    blocks.hover(position={"x": 60, "y": 10})
    expect(tip).to_have_text(IN_WORDS[3])
    page.mouse.move(5, 5)
    expect(tip).to_be_hidden()
    blocks.focus()
    for number in range(1, 10):
        if number in IN_WORDS:
            expect(blocks).to_have_attribute("aria-valuetext", IN_WORDS[number])
            expect(blocks).to_have_attribute("aria-valuenow", str(number))
            expect(tip).to_have_text(IN_WORDS[number])
        page.keyboard.press("ArrowRight")
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    expect(blocks).to_have_attribute("aria-valuenow", "12")
    expect(blocks).to_have_attribute("aria-valuemax", "12")


def test_a_block_that_comes_into_use_is_ringed_for_a_moment(page: Page) -> None:
    show_pool(page, POOL)
    edge = """canvas => {
      const {data} = canvas.getContext("2d").getImageData(24 * 3 + 12, 2, 1, 1);
      return [...data].join();
    }"""
    before = page.locator("#blocks").evaluate(edge)
    used = {**POOL, "runs": [*POOL["runs"][:2], [3, "in_use", 1, 1, None], *POOL["runs"][3:]]}
    page.route("**/v1/cache/blocks", lambda route: route.fulfill(json=used))
    expect(page.locator("#num-in-use")).to_have_text("6")
    ringed = page.locator("#blocks").evaluate(edge)
    time.sleep(1.6)
    after = page.locator("#blocks").evaluate(edge)
    assert len({before, ringed, after}) == 3


def test_nobody_asks_for_the_pool_while_it_is_not_seen(page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/v1/cache" in request.url else None)
    page.set_viewport_size(NARROW)
    expect(page.locator("#pool")).to_be_hidden()
    page.wait_for_timeout(200)
    asked.clear()
    page.wait_for_timeout(2300)
    assert asked == []
    page.get_by_role("button", name="Block pool").click()
    expect(page.get_by_role("heading", name="Block pool")).to_be_visible()
    expect(page.locator("#chat")).to_be_hidden()
    page.wait_for_timeout(200)
    assert asked
