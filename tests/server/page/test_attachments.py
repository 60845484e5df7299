"""Images that go with a message."""

from __future__ import annotations

import base64
import io

from chat_page import answer_with, ended, piece, png, prompt, send, usage, with_images
from PIL import Image
from playwright.sync_api import Page, expect


def image_of(url: str) -> bytes:
    kind, data = url.split(",")
    assert kind == "data:image/png;base64"
    return base64.b64decode(data)


def test_images_are_attached_by_file_by_drop_and_by_paste(page: Page) -> None:
    with_images(page)
    bodies = answer_with(page, piece("I see", "stop"), usage(8, 4, 2), "[DONE]")
    content = png(30, 20)
    page.get_by_label("Attach images").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": content})
    transfer = page.evaluate_handle(
        """encoded => {
          const bytes = Uint8Array.from(atob(encoded), each => each.charCodeAt());
          const transfer = new DataTransfer();
          transfer.items.add(new File([bytes], "b.png", {type: "image/png"}));
          return transfer;
        }""",
        base64.b64encode(content).decode(),
    )
    page.locator("#chat").dispatch_event("drop", {"dataTransfer": transfer})
    paste = "(field, data) => field.dispatchEvent(new ClipboardEvent('paste', {clipboardData: data, bubbles: true}))"
    prompt(page).evaluate(paste, transfer)
    previews = page.get_by_role("list", name="Attached images").get_by_role("img")
    expect(previews).to_have_count(3)
    expect(previews.first).to_have_attribute("alt", "Attached image a.png")
    page.get_by_role("button", name="Remove a.png").click()
    expect(previews).to_have_count(2)
    send(page, "what is it")
    ended(page, 1)
    expect(previews).to_have_count(0)
    expect(page.locator(".question img")).to_have_count(2)
    *images, text = bodies[0]["messages"][0]["content"]
    assert text == {"type": "text", "text": "what is it"}
    assert [image_of(image["image_url"]["url"]) for image in images] == [content, content]
    assert {image["type"] for image in images} == {"image_url"}


def test_large_images_are_made_smaller_and_others_refused(page: Page) -> None:
    with_images(page)
    bodies = answer_with(page, piece("I see", "stop"), usage(8, 4, 2), "[DONE]")
    large = {"name": "large.png", "mimeType": "image/png", "buffer": png(3000, 30)}
    broken = {"name": "broken.png", "mimeType": "image/png", "buffer": b"no image"}
    page.get_by_label("Attach images").set_input_files([large, broken])
    expect(page.get_by_role("alert")).to_have_text("broken.png can't be read as an image.")
    page.get_by_role("button", name="Send").click()
    ended(page, 1)
    [part] = bodies[0]["messages"][0]["content"]
    assert Image.open(io.BytesIO(image_of(part["image_url"]["url"]))).size == (2048, 20)


def test_images_are_not_offered_where_they_are_not_taken(page: Page) -> None:
    expect(page.locator(".attach")).to_be_hidden()
