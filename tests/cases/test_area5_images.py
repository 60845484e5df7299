"""Rows of area 3 of the public bug reports, as clients of the server meet them."""

from __future__ import annotations

import base64
import io
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_files import safetensors_bytes
from http_answers import error_of
from http_server import MODEL, Served, served
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save
from tiny import IMAGE
from tiny_adapters import quiet
from tiny_vision import write_tiny_vlm

from mlserve import LLM
from mlserve.server.logs import JsonFormatter

IMAGE_TOKENS = 16
RED = Image.new("RGB", (56, 56), (220, 20, 20))
BLUE = Image.new("RGB", (56, 56), (20, 20, 220))
CHECKERS = Image.fromarray((np.indices((56, 56)).sum(0) // 7 % 2 * 255).astype(np.uint8)).convert("RGB")
Part = str | Image.Image | dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with quiet():
        return write_tiny_vlm(tmp_path_factory.mktemp("llava"), "llava")


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Served]:
    llm = LLM(str(model), block_size=4, num_blocks=512, image_hosts="images.example")
    with served(llm.engine) as server:
        yield server


@pytest.fixture
def server(running: Served) -> Served:
    """With no KV cached."""
    running.engine.reset_prefix_cache()
    return running


@pytest.fixture(scope="module")
def cold(model: Path) -> Iterator[Served]:
    llm = LLM(str(model), block_size=4, num_blocks=512, enable_prefix_caching=False, embedding_cache_memory=0)
    with served(llm.engine) as server:
        yield server


def data_url(picture: Image.Image, form: str = "PNG") -> str:
    file = io.BytesIO()
    picture.save(file, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def shown(part: Part) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": data_url(part)}} if isinstance(part, Image.Image) else part


def body(*parts: Part, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": [shown(part) for part in parts]}]
    return {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0, "logprobs": True, **more}


def ask(server: Served, *parts: Part, **more: Any) -> dict[str, Any]:
    response = server.http().post("/v1/chat/completions", json=body(*parts, **more))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refused(server: Served, *parts: Part, **more: Any) -> str:
    message = None
    for stream in (False, True):
        response = server.http().post("/v1/chat/completions", json=body(*parts, stream=stream, **more))
        message = str(error_of(response, 400)["message"])
    assert message is not None
    return message


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def assert_eq(answer: dict[str, Any], reference: dict[str, Any]) -> None:
    mine, its = (each["choices"][0]["logprobs"]["content"] for each in (answer, reference))
    assert [entry["bytes"] for entry in mine] == [entry["bytes"] for entry in its]
    assert [entry["logprob"] for entry in mine] == pytest.approx([entry["logprob"] for entry in its], abs=1e-4)


BEFORE = len("<|im_start|>") and (1 + len("user\nwhat is ")) // 4 * 4  # tokens in full blocks before the image


def test_3_01_each_image_has_its_own_kv(server: Served, cold: Served) -> None:
    answers = [ask(server, "what is ", picture, " here?") for picture in (RED, CHECKERS, RED)]
    assert cached(answers[0]) == 0
    assert cached(answers[1]) == BEFORE
    assert cached(answers[2]) > BEFORE + IMAGE_TOKENS
    for answer, picture in zip(answers, (RED, CHECKERS, RED), strict=True):
        assert_eq(answer, ask(cold, "what is ", picture, " here?"))
    assert answers[0]["images"][0]["digest"] != answers[1]["images"][0]["digest"]
    assert answers[0]["images"] == answers[2]["images"]


def test_3_06_typed_placeholders_are_text(server: Served, cold: Served) -> None:
    for parts in (("a <image> b", RED), (RED, "a <image> b"), ("a <image> b",), ("<|im_end|><image>", RED, "<image>")):
        plain = [part.replace("<image>", "<imago>") if isinstance(part, str) else part for part in parts]
        answer = ask(server, *parts)
        assert answer["usage"]["prompt_tokens"] == ask(server, *plain)["usage"]["prompt_tokens"]
        assert_eq(answer, ask(cold, *parts))


class Inner(BaseHTTPRequestHandler):
    """Notes who asks."""

    hits: list[str]

    def do_GET(self) -> None:
        self.hits.append(self.path)
        self.send_response(302)
        self.send_header("Location", "http://169.254.169.254/")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


def test_3_09_no_url_leads_inside(server: Served, cold: Served) -> None:
    inner = HTTPServer(("127.0.0.1", 0), type("Handler", (Inner,), {"hits": []}))
    threading.Thread(target=inner.serve_forever, args=(0.01,), daemon=True).start()
    try:
        for url in (
            f"http://127.0.0.1:{inner.server_port}/",
            f"http://localhost:{inner.server_port}/",
            f"http://2130706433:{inner.server_port}/",
            "http://169.254.169.254/",
            "http://[::1]/",
            "file:///etc/hostname",
            "/etc/hostname",
            "ftp://images.example/",
            "http://images.example@127.0.0.1/",
            "data:text/plain,x",
            "",
        ):
            for where in (server, cold):  # one that fetches from one host, one that doesn't fetch
                message = refused(where, {"type": "image_url", "image_url": {"url": url}})
                assert "hostname" not in message
                assert len(message) < 500
        assert inner.RequestHandlerClass.hits == []  # type: ignore[attr-defined]
    finally:
        inner.shutdown()
        inner.server_close()


@pytest.mark.parametrize("value", [None, 5, {}, {"url": None}, {"url": 5}, {"url": []}, [], "data:image/png;base64,!!"])
def test_3_09_what_is_no_url(server: Served, value: object) -> None:
    refused(server, {"type": "image_url", "image_url": value})
    for kind in ("image", "image_embeds"):
        refused(server, {"type": kind, kind: value})


@pytest.mark.parametrize("size", [12_000, 13_000])
def test_3_10_a_small_file_of_a_huge_image(server: Served, size: int) -> None:
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    handler.setFormatter(JsonFormatter())
    logging.getLogger().addHandler(handler)
    try:
        url = data_url(Image.new("1", (size, size)))
        assert len(url) < 200_000
        assert f"{size}" in refused(server, "see", {"type": "image_url", "image_url": {"url": url}})
    finally:
        logging.getLogger().removeHandler(handler)
    assert url[30:60] not in log.getvalue()
    assert "base64" not in log.getvalue()


def test_3_11_a_name_from_the_client_means_nothing(server: Served, cold: Served) -> None:
    pictures = [
        Image.new("RGB", (28, 28), "red"),
        Image.new("RGB", (56, 56), "red"),
        Image.new("RGB", (56, 56), "blue"),
    ]
    for salt in (None, "a", "b"):
        for picture in pictures:
            part = {**shown(picture), "id": "u1", "uuid": "u1"}
            answer = ask(server, part, cache_salt=salt)
            assert cached(answer) <= 8
            assert_eq(answer, ask(cold, picture))


def test_3_12_parts_stay_in_their_order(server: Served, cold: Served) -> None:
    first, swapped = ask(server, "1:", RED, "2:", BLUE), ask(server, "1:", BLUE, "2:", RED)
    assert cached(swapped) == (1 + len("user\n1:")) // 4 * 4
    assert_eq(first, ask(cold, "1:", RED, "2:", BLUE))
    assert_eq(swapped, ask(cold, "1:", BLUE, "2:", RED))
    assert first["choices"][0]["logprobs"] != swapped["choices"][0]["logprobs"]


@pytest.mark.parametrize("prompt", [[5, IMAGE, 6], "one <image> and <image>"])
def test_3_13_placeholders_without_images(server: Served, prompt: Any) -> None:
    """Only chats take images: a placeholder in a raw prompt has none, and what is typed in a chat is text."""
    for stream in (False, True):
        response = server.http().post("/v1/completions", json={"prompt": prompt, "stream": stream})
        assert "image placeholder" in (message := error_of(response, 400)["message"])
        assert "0 images" in message
    answer = ask(server, RED, "fine")
    assert answer["choices"][0]["finish_reason"] == "length"


def test_embeddings_of_an_image_come_as_safetensors(server: Served, cold: Served) -> None:
    """Those that the tower makes of a picture stand for it; those of a wrong shape are refused."""

    def raw(data: bytes) -> dict[str, Any]:
        return {"type": "image_embeds", "image_embeds": base64.b64encode(data).decode()}

    def part(**tensors: torch.Tensor) -> dict[str, Any]:
        return raw(save(tensors))

    rows = torch.linspace(-1, 1, IMAGE_TOKENS * 64).reshape(IMAGE_TOKENS, 64)
    answers = [ask(server, "what is ", part(x=rows)), ask(server, "what is ", part(x=rows + 1))]
    assert cached(answers[1]) == BEFORE
    assert_eq(answers[0], ask(cold, "what is ", part(x=rows)))
    assert_eq(answers[1], ask(cold, "what is ", part(x=rows + 1)))
    assert answers[0]["images"] == [None]
    half = ask(server, "what is ", part(x=rows.to(torch.bfloat16)))
    assert half["usage"]["prompt_tokens"] == answers[0]["usage"]["prompt_tokens"]
    for wrong in (
        part(x=rows, y=rows.clone()),
        part(),
        part(x=rows.to(torch.complex64)),
        raw(b"\xff" * 40),
        raw(safetensors_bytes({"x": {"dtype": "F4", "shape": [2, 64], "data_offsets": [0, 64]}}, bytes(64))),
        raw(safetensors_bytes({"x": {"dtype": "F32", "shape": [2**40, 64], "data_offsets": [0, 64]}}, bytes(64))),
        raw(safetensors_bytes({"x": {"dtype": "Q9", "shape": [2, 64], "data_offsets": [0, 64]}}, bytes(64))),
        part(x=rows[:, :5].contiguous()),
        part(x=rows[0].clone()),
        part(x=rows[:0].clone()),
        part(x=rows * float("nan")),
        {"type": "image_embeds", "image_embeds": "é"},
        {"type": "image_embeds", "image_embeds": ""},
    ):
        refused(server, wrong)


def test_images_in_the_figures(server: Served) -> None:
    def figures() -> dict[str, float]:
        families = text_string_to_metric_families(server.http().get("/metrics").text)
        return {
            sample.name + "".join(sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }

    before = figures()
    for _ in range(2):
        ask(server, "what is ", CHECKERS, " now?")
    gained = {name: value - before.get(name, 0) for name, value in figures().items()}
    assert gained["mlserve_cached_prompt_tokens_totalimage"] == IMAGE_TOKENS
    assert gained["mlserve_cached_prompt_tokens_totaltext"] >= BEFORE
    assert gained["mlserve_embedding_cache_hits_total"] + gained["mlserve_embedding_cache_misses_total"] >= 1
    assert server.http().get("/v1/models").json()["data"][0]["takes_images"] is True


def test_a_streamed_answer_reports_its_images(server: Served) -> None:
    whole = ask(server, RED, "x")
    response = server.http().post("/v1/chat/completions", json=body(RED, "x", stream=True))
    *_, last, done = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]
    assert done == "[DONE]"
    assert (json.loads(last)["images"], json.loads(last)["choices"]) == (whole["images"], [])
