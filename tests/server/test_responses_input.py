"""Input items of responses as the messages of a chat."""

from __future__ import annotations

from typing import Any

import pytest

from mlserve.errors import MlserveError
from mlserve.server.protocol.responses import ResponsesBody

URL = "data:image/png;base64,AAAA"


def messages(*items: Any, **more: Any) -> list[dict[str, Any]]:
    return ResponsesBody(input=list(items), **more).chat().conversation()


def call(call_id: str = "c1", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}", **more}


def chat_call(call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_a_text_is_the_users() -> None:
    body = ResponsesBody(input="hello", instructions="be kind").chat()
    assert body.conversation() == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
    ]


def test_messages_with_and_without_a_type() -> None:
    assert messages(
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "phase": None,
            "content": [{"type": "output_text", "text": "c", "annotations": [], "logprobs": []}],
        },
        {"type": "message", "role": "system", "content": "d"},
    ) == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
        {"role": "system", "content": "d"},
    ]


def test_images() -> None:
    parts = [
        {"type": "input_image", "image_url": URL, "detail": "auto", "file_id": None},
        {"type": "input_image", "image_url": URL},
        {"type": "image_embeds", "image_embeds": "AAAA"},
    ]
    image = {"type": "image_url", "image_url": {"url": URL}}
    assert messages({"role": "user", "content": parts}) == [
        {"role": "user", "content": [image, image, {"type": "image_embeds", "image_embeds": "AAAA"}]}
    ]


def test_calls_belong_to_the_assistants_message_before_them() -> None:
    result = {"type": "function_call_output", "call_id": "c1", "output": "3"}
    assert messages(
        {"role": "user", "content": "a"},
        call("c1", id="fc_1", status="completed"),
        call("c2"),
        result,
        {**result, "call_id": "c2", "output": [{"type": "input_image", "image_url": URL}]},
        {"role": "assistant", "content": "b"},
        call("c3"),
    ) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [chat_call("c1"), chat_call("c2")]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "image_url", "image_url": {"url": URL}}]},
        {"role": "assistant", "content": "b", "tool_calls": [chat_call("c3")]},
    ]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"type": "item_reference", "id": "msg_1"}, r"input\[0\] is of type 'item_reference', which isn't served"),
        ({"type": "reasoning", "summary": []}, "is of type 'reasoning'"),
        ({"type": "web_search_call", "id": "1"}, "is of type 'web_search_call'"),
        ({"id": "msg_1"}, "give an object with a type"),
        ({"type": 3}, "give an object with a type"),
        ({"role": "tool", "content": "x"}, "has the role 'tool': give one of user, assistant, system, developer"),
        ({"role": ["user"], "content": "x"}, "has the role"),
        ({"role": "user"}, r"input\[0\].content is None: give a string or a list of parts"),
        ({"role": "user", "content": "x", "name": "me"}, "has 'name', which isn't served"),
        ({"role": "user", "content": ["x"]}, r"input\[0\].content\[0\] is 'x': give an object"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "1"}]}, "is of type 'input_file'"),
        ({"role": "user", "content": [{"type": "text", "text": "x"}]}, "give one of input_text, output_text"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "1"}]}, "has 'file_id', which isn't served"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": {"url": URL}}]}, "has no image_url"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": URL, "detail": "low"}]}, "detail 'low'"),
        ({"type": "function_call_output", "call_id": "c1"}, r"input\[0\].output is None"),
        (call(namespace="n"), "has 'namespace', which isn't served"),
    ],
)
def test_items_that_are_not_served(item: Any, message: str) -> None:
    with pytest.raises(MlserveError, match=message):
        messages(item)


def test_tools() -> None:
    tool = {"type": "function", "name": "f", "parameters": None, "strict": True, "description": "d"}
    body = ResponsesBody(input="x", tools=[tool], tool_choice={"type": "function", "name": "f"}).chat()
    assert body.tools == [{"type": "function", "function": {"name": "f", "strict": True, "description": "d"}}]
    assert body.tool_choice == {"type": "function", "function": {"name": "f"}}
    for kind in ("web_search", "file_search", "mcp", "code_interpreter", "custom"):
        with pytest.raises(MlserveError, match=rf"tools\[0\] is of type '{kind}', which isn't served"):
            ResponsesBody(input="x", tools=[{"type": kind}]).chat()
    with pytest.raises(MlserveError, match="has 'defer_loading'"):
        ResponsesBody(input="x", tools=[{**tool, "defer_loading": True}]).chat()
    for choice in ({"type": "web_search"}, {"type": "allowed_tools", "mode": "auto", "tools": []}, {"name": "f"}):
        with pytest.raises(MlserveError, match="tool_choice is neither"):
            ResponsesBody(input="x", tools=[tool], tool_choice=choice).chat()


def test_options() -> None:
    text = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}
    chat = ResponsesBody(
        input="x", model="m", max_output_tokens=5, top_p=0.5, seed=3, stop="y", text=text, user="u", priority=2
    ).chat()
    assert (chat.model, chat.max_tokens, chat.top_p, chat.seed, chat.stop) == ("m", 5, 0.5, 3, "y")
    assert (chat.user, chat.priority, chat.logprobs) == ("u", 2, None)
    assert chat.response_format is not None
    assert chat.response_format.model_dump(by_alias=True, exclude_none=True) == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
    }
    logprobs = ResponsesBody(input="x", include=["message.output_text.logprobs"], top_logprobs=4).chat()
    assert (logprobs.logprobs, logprobs.top_logprobs) == (True, 4)


def test_every_field_is_served_or_refused() -> None:
    """Setting a field changes the chat or the response, or raises."""
    values: dict[str, Any] = {
        "temperature": 0.5, "stream": True, "parallel_tool_calls": False, "top_k": 3, "min_p": 0.5,
        "repetition_penalty": 2.0, "cache_salt": "s", "image_identity": "exact", "chat_template_kwargs": {"a": 1},
        "instructions": "i", "metadata": {"a": "b"}, "safety_identifier": "s",
    }  # fmt: skip
    plain = ResponsesBody(input="x")
    for name, value in values.items():
        body = ResponsesBody(input="x", **{name: value})
        assert body.chat() != plain.chat() or body.echo() != plain.echo(), name
