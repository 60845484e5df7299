"""Where the client connects to, with which key, what it tries again, and what importing it costs."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2 as httpx
import openai
import pytest
from tree import run_python

from mlserve.client import AsyncClient, Client

CHAT = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": "tiny",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}],
}


class Scripted(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Answers requests with what it was given, in turn."""

    def __init__(self, *responses: httpx.Response) -> None:
        self.responses = list(responses)
        self.requests: list[httpx.Request] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return self.responses.pop(0)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self.handle_request(request)


def busy(status: int, **headers: str) -> httpx.Response:
    headers = {"Retry-After": "0.01", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return httpx.Response(status, headers=headers, json={"error": {"message": "come back", "code": "busy"}})


def client_over(transport: Scripted, **options: Any) -> Client:
    return Client(http_client=openai.DefaultHttpxClient(transport=transport), **options)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_is_busy_is_asked_again(status: int) -> None:
    transport = Scripted(busy(status), busy(status), httpx.Response(200, json=CHAT))
    with client_over(transport) as client:
        assert client.ask("hello", adapter="tiny").text == "yes"
    assert len(transport.requests) == 3
    assert len({request.content for request in transport.requests}) == 1


def test_async_what_is_busy_is_asked_again() -> None:
    transport = Scripted(busy(503), httpx.Response(200, json=CHAT))

    async def main() -> str:
        async with AsyncClient(http_client=openai.DefaultAsyncHttpxClient(transport=transport)) as client:
            return (await client.ask("hello", adapter="tiny")).text

    assert asyncio.run(main()) == "yes"
    assert len(transport.requests) == 2


def test_retry_after_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    transport = Scripted(busy(429, Retry_After="7"), httpx.Response(200, json=CHAT))
    with client_over(transport) as client:
        client.ask("hello", adapter="tiny")
    assert waits == [7.0]


def test_no_retries_when_there_are_to_be_none() -> None:
    transport = Scripted(busy(429))
    with client_over(transport, max_retries=0) as client, pytest.raises(openai.RateLimitError, match="come back"):
        client.ask("hello", adapter="tiny")
    assert len(transport.requests) == 1


def test_errors_of_the_caller_are_not_tried_again() -> None:
    transport = Scripted(httpx.Response(400, json={"error": {"message": "wrong", "param": "top_p"}}))
    with client_over(transport) as client, pytest.raises(openai.BadRequestError, match="wrong") as raised:
        client.ask("hello", adapter="tiny", top_p=9)
    assert raised.value.param == "top_p"
    assert len(transport.requests) == 1


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_address_and_key_come_from_the_environment(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLSERVE_URL", "MLSERVE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):  # for another server
        monkeypatch.setenv(name, "https://other.example/v1")
    assert address(kind()) == ("http://127.0.0.1:8000/v1/", "none")
    assert address(kind(base_url=None, api_key=None)) == ("http://127.0.0.1:8000/v1/", "none")
    monkeypatch.setenv("MLSERVE_URL", "http://there:1/v1")
    monkeypatch.setenv("MLSERVE_API_KEY", "mls-secret")
    assert address(kind()) == ("http://there:1/v1/", "mls-secret")
    assert address(kind(base_url="http://here:2/v1", api_key="own")) == ("http://here:2/v1/", "own")
    monkeypatch.setenv("MLSERVE_URL", "")
    assert address(kind())[0] == "http://127.0.0.1:8000/v1/"


def address(client: Any) -> tuple[str, str]:
    return str(client.base_url), client.api_key


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_copies_with_other_options(kind: type[Any]) -> None:
    client = kind(base_url="http://here:2/v1", api_key="own", timeout=None).with_options(max_retries=9)
    assert isinstance(client, kind)
    assert address(client) == ("http://here:2/v1/", "own")
    assert (client.max_retries, client.timeout) == (9, None)


def test_importing_the_client_imports_neither_torch_nor_the_engine() -> None:
    parts = ("engine", "model", "server", "cache", "vision", "kernels", "adapters", "llm")
    heavy = ["torch", "transformers", *(f"mlserve.{part}" for part in parts)]
    result = run_python(f"import sys, mlserve.client; print([name for name in {heavy} if name in sys.modules])")
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
