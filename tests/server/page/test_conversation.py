"""Conversations on the chat page."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from chat_page import CHATS, answer_with, ended, piece, prompt, send, text_of, usage, watch_bodies
from http_server import MODEL, Served
from playwright.sync_api import Page, expect


def test_an_answer_is_the_one_that_the_api_gives(page: Page, server: Served) -> None:
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    send(page, "hello")
    first = ended(page, 1)
    expected = server.client().chat.completions.create(model=MODEL, messages=messages, max_tokens=9, temperature=0)
    assert text_of(first) == expected.choices[0].message.content
    messages += [{"role": "assistant", "content": text_of(first)}, {"role": "user", "content": "more"}]
    send(page, "more")
    expected = server.client().chat.completions.create(model=MODEL, messages=messages, max_tokens=9, temperature=0)
    assert text_of(ended(page, 2)) == expected.choices[0].message.content


def test_an_answer_says_what_was_measured(page: Page) -> None:
    send(page, "how fast is this")
    ended(page, 1)
    page.get_by_role("button", name="New chat").click()
    send(page, "how fast is this")
    cached, first, rate, end = ended(page, 1).locator(".measured span:not(.share)").all_inner_texts()
    match = re.fullmatch(r"(\d+) of (\d+) prompt tokens cached", cached)
    assert match is not None, cached
    assert int(match[1]) == (int(match[2]) - 1) // 4 * 4  # all whole blocks but of the last token
    assert re.fullmatch(r"first token after (\d+ ms|\d\.\d s)", first)
    assert re.fullmatch(r"\d+\.\d tokens/s", rate)
    assert end == "ended at 9 tokens, the most it may have"


def test_stop_frees_everything_and_keeps_what_came(page: Page, server: Served) -> None:
    send(page, "go on for long", max_tokens=400)
    expect(page.locator(".answer .text")).not_to_be_empty()
    assert server.serving.gate.num_requests == 1
    page.get_by_role("button", name="Stop").click()
    server.wait_until_idle(1.5)  # 400 tokens take longer
    expect(ended(page, 1).locator(".measured")).to_have_text("stopped")
    expect(prompt(page)).to_be_focused()
    bodies = watch_bodies(page)
    send(page, "and now")
    ended(page, 2)
    assert [message["role"] for message in bodies[0]["messages"]] == ["user", "assistant", "user"]


def test_a_new_chat_stops_the_answer_that_runs(page: Page, server: Served) -> None:
    bodies = watch_bodies(page)
    send(page, "go on for long", max_tokens=400)
    expect(page.locator(".answer .text")).not_to_be_empty()
    page.get_by_role("button", name="New chat").click()
    server.wait_until_idle(1.5)
    expect(page.locator("article")).to_have_count(0)
    expect(page.get_by_text("What would you like to ask?")).to_be_visible()
    send(page, "hello")
    ended(page, 1)
    assert bodies[1]["messages"] == [{"role": "user", "content": "hello"}]


def test_a_question_that_is_stopped_before_anything_came_goes_back(page: Page) -> None:
    page.route(CHATS, lambda route: None)  # no answer ever
    send(page, "anybody there?")
    page.keyboard.press("Escape")
    expect(prompt(page)).to_have_value("anybody there?")
    expect(page.locator("article")).to_have_count(0)
    expect(page.get_by_role("alert")).to_have_count(0)


def test_each_message_goes_to_whom_is_picked_and_takes_the_history_along(page: Page) -> None:
    bodies = watch_bodies(page)
    answers = []
    for number, name in enumerate(["pirate", MODEL, "butler"], 1):
        page.get_by_label("Answer with").select_option(name)
        send(page, f"question {number}")
        answer = ended(page, number)
        assert answer.get_by_role("heading").inner_text() == name
        answers.append(text_of(answer))
    assert [body["model"] for body in bodies] == ["pirate", MODEL, "butler"]
    assert [message["content"] for message in bodies[2]["messages"]] == [
        "question 1", answers[0], "question 2", answers[1], "question 3"
    ]  # fmt: skip
    hues = page.locator(".answer").evaluate_all("all => all.map(each => getComputedStyle(each).borderLeftColor)")
    assert len(set(hues)) == 3


def test_settings_go_with_each_message(page: Page) -> None:
    bodies = watch_bodies(page)
    page.get_by_text("Settings").click()
    page.get_by_label("System message").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Max tokens").fill("3")
    page.keyboard.press("Escape")
    expect(page.get_by_label("System message")).to_be_hidden()
    prompt(page).fill("hello")
    page.get_by_role("button", name="Send").click()
    ended(page, 1)
    assert bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (bodies[0]["temperature"], bodies[0]["max_tokens"]) == (0.5, 3)
    page.locator("#temperature").evaluate("field => (field.value = 7)")
    prompt(page).fill("again")
    prompt(page).press("Enter")
    expect(page.get_by_label("Temperature")).to_be_focused()  # with what is wrong beside it
    expect(prompt(page)).to_have_value("again")
    assert len(bodies) == 1


def test_an_error_is_shown_and_the_message_kept(page: Page, server: Served) -> None:
    too_long = ("long " * 200).strip()
    send(page, too_long)
    body = {"messages": [{"role": "user", "content": too_long}], "max_tokens": 9}
    refused = server.http().post("/v1/chat/completions", json=body)
    expect(page.get_by_role("alert")).to_have_text(refused.json()["error"]["message"])
    expect(prompt(page)).to_have_value(too_long)
    expect(page.locator("article")).to_have_count(0)
    bodies = watch_bodies(page)
    send(page, "short")
    ended(page, 1)
    assert len(bodies[0]["messages"]) == 1
    expect(page.get_by_role("alert")).to_have_count(0)


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([piece("half an"), {"error": {"message": "the step failed"}}], "the step failed"),
        ([piece("half an")], "The connection broke before the answer was whole."),
    ],
    ids=["error", "end"],
)
def test_an_answer_that_breaks_off_keeps_what_came(page: Page, events: list[Any], problem: str) -> None:
    answer_with(page, *events)
    send(page, "hello")
    expect(page.get_by_role("alert")).to_have_text(problem)
    answer = ended(page, 1)
    assert text_of(answer) == "half an"
    expect(answer.locator(".measured")).to_have_text("broken off")


def test_a_server_that_is_gone_is_named(page: Page) -> None:
    page.route(CHATS, lambda route: route.abort())
    send(page, "hello")
    expect(page.get_by_role("alert")).to_have_text("The server can't be reached.")
    expect(prompt(page)).to_have_value("hello")


def test_texts_are_never_markup(page: Page) -> None:
    bad = "<img src=x onerror=\"document.title='bad'\"><b>bold</b>\n\n  &amp; é 漢 🙂"
    answer_with(page, piece(bad[:9]), piece(bad[9:], "stop"), usage(8, 4, 2), "[DONE]")
    prompt(page).fill(bad)
    page.get_by_role("button", name="Send").click()
    answer = ended(page, 1)
    assert text_of(answer) == bad
    assert text_of(page.locator(".question")) == bad
    assert page.locator("#log b, .text img").count() == 0
    assert page.title() == f"{MODEL} · mlserve"
    assert "4 of 8 prompt tokens cached" in answer.locator(".measured").inner_text()


STREAM = """async pieces => {
  const { streamAnswer } = await import("/static/stream.js");
  const body = new ReadableStream({
    async start(controller) {
      for (const piece of pieces) {
        await new Promise(resolve => setTimeout(resolve, 100));
        controller.enqueue(Uint8Array.from(piece));
      }
      controller.close();
    },
  });
  const texts = [];
  const answer = await streamAnswer({ fetch: async () => ({ status: 200, body }) }, {}, null, text => texts.push(text));
  return { ...answer, texts };
}"""


def test_a_stream_may_be_cut_anywhere_and_is_timed(page: Page) -> None:
    events = [piece("é漢"), piece(" 🙂\n\ndata: x"), piece("", "stop"), usage(8, 4, 5), "[DONE]"]
    lines = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in events]
    data = b": hello\r\n\r\n" + b"".join(f"data: {line}\r\n\r\n".encode() for line in lines)
    cuts = [0, *sorted(data.index(each.encode()) + 1 for each in ("hello", "漢", "🙂", "stop")), len(data)]
    pieces = [list(data[start:end]) for start, end in itertools.pairwise(cuts)]
    answer = page.evaluate(STREAM, pieces)
    assert answer["texts"] == ["é漢", " 🙂\n\ndata: x"]
    assert answer["reason"] == "stop"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    assert 300 <= answer["firstMs"] < 1000  # the first text is whole with the third piece
    assert answer["tokensPerSecond"] == pytest.approx(4 / 0.2, rel=0.3)  # and the end with the fifth
