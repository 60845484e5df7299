"""What people do on the chat page, and a fake model behind it."""

from __future__ import annotations

import io
import json
import time
from contextlib import AbstractContextManager
from typing import Any

from engines import make_engine
from fake_adapters import FakeRegistry, fake_adapter
from fakes import ContextRunner
from http_server import MODEL, Served, served
from PIL import Image
from playwright.sync_api import Locator, Page, Route, expect

from mlserve.engine.tokenizer import Tokenizer
from mlserve.model.plan import SequenceT, StepPlan, StepResult

CHATS = "**/v1/chat/completions"
NARROW = {"width": 360, "height": 640}


class SlowRunner(ContextRunner):
    """Slow enough to be stopped."""

    def run(self, plan: StepPlan[SequenceT]) -> StepResult:
        time.sleep(0.01)
        return super().run(plan)


def serve_slowly(tokenizer: Tokenizer, **config: Any) -> AbstractContextManager[Served]:
    """A server with the adapters butler and pirate."""
    adapters = FakeRegistry(butler=fake_adapter("butler"), pirate=fake_adapter("pirate"))
    size = tokenizer.vocab_size
    engine = make_engine(SlowRunner(128, 4), tokenizer, num_blocks=256, vocab_size=size, adapters=adapters)
    return served(engine, **config)


def prompt(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Message", exact=True)


def limit(page: Page, max_tokens: int) -> None:
    page.locator("#max-tokens").evaluate("(field, value) => (field.value = value)", max_tokens)


def send(page: Page, text: str, *, max_tokens: int = 9) -> None:
    limit(page, max_tokens)
    prompt(page).fill(text)
    prompt(page).press("Enter")


def ended(page: Page, num_answers: int) -> Locator:
    """The last answer, once it has ended."""
    expect(page.locator(".answer .measured")).to_have_count(num_answers)
    return page.locator(".answer").last


def text_of(message: Locator) -> str | None:
    return message.locator(".text").text_content()


def watch_bodies(page: Page) -> list[dict[str, Any]]:
    """The bodies of requests for answers, as they come; they go on to the server."""
    bodies: list[dict[str, Any]] = []

    def keep(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        route.continue_()

    page.route(CHATS, keep)
    return bodies


def answer_with(page: Page, *events: dict[str, Any] | str) -> list[dict[str, Any]]:
    """Answer in the server's place; returns the bodies that came."""
    bodies: list[dict[str, Any]] = []
    lines = [each if isinstance(each, str) else json.dumps(each) for each in events]

    def fulfil(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        route.fulfill(content_type="text/event-stream", body="".join(f"data: {line}\n\n" for line in lines))

    page.route(CHATS, fulfil)
    return bodies


def piece(text: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]}


def usage(prompt: int, cached: int, completion: int) -> dict[str, Any]:
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **details}}


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG")
    return file.getvalue()


def with_images(page: Page) -> None:
    """Have the base model take images."""
    model = {"id": MODEL, "parent": None, "takes_images": True}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [model]}))
    page.reload()
    expect(page.get_by_label("Attach images")).to_have_count(1)
