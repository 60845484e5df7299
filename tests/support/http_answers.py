"""Reading what the server answers, with the openai package's types or as it stands on the wire."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

HELLO = [{"role": "user", "content": "hello"}]
PROMPT = "Your answer: Yes"
POST_ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize",
    "/detokenize",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)


@dataclass
class Joined:
    """What a stream said of one choice."""

    text: str = ""
    reasons: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


def joined(chunks: Iterable[Any]) -> dict[int, Joined]:
    """A stream of chats or of completions, by the index of the choice."""
    found: dict[int, Joined] = defaultdict(Joined)
    for chunk in chunks:
        for choice in chunk.choices:
            mine = found[choice.index]
            delta = getattr(choice, "delta", None)
            mine.text += (choice.text if delta is None else delta.content) or ""
            mine.reasons += [choice.finish_reason] if choice.finish_reason else []
            mine.logprobs += [choice.logprobs] if choice.logprobs else []
    return found


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream, decoded but for the `[DONE]` at its end; nothing but events may be in it."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, rest = response.text.split("\n\n")
    assert rest == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    datas = [block.removeprefix("data: ") for block in blocks]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


def error_of(response: httpx.Response, status: int) -> Mapping[str, Any]:
    """The error that a response holds, whose form is that of OpenAI's API."""
    assert response.status_code == status, response.text
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    return error
