"""Tools and response formats in chats, as the openai package asks for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from engines import make_engine
from fakes import ScriptedRunner
from http_server import MODEL, Served, served

from mlserve import LLM
from mlserve.engine.tokenizer import Tokenizer

ASKED: list[Any] = [{"role": "user", "content": "2 + 2?"}]
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"n1": {"type": "integer", "maximum": 9}, "n2": {"type": "boolean"}},
            "required": ["n1", "n2"],
            "additionalProperties": False,
        },
    },
}
ARGUMENTS = '{"n1": 2, "n2": true}'
CALL = f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>'
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tiny(tiny_model_dir: Path) -> Iterator[Served]:
    """A model that knows nothing: what is right in its answers comes of the constraint."""
    llm = LLM(str(tiny_model_dir), block_size=4, num_blocks=512, max_model_len=512)
    with served(llm.engine) as server:
        yield server


def says(text: str, tokenizer: Tokenizer, **config: Any) -> Any:
    """A server whose model says just that, and ends."""
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    runner = ScriptedRunner([*text.encode(), end])
    how: Any = {"num_blocks": 1024, "max_model_len": 2048, "vocab_size": tokenizer.vocab_size}
    engine = make_engine(runner, tokenizer, **how, eos=(end,))
    return served(engine, tool_call_format="hermes", **config)


def called(stream: openai.Stream[Any]) -> tuple[str, list[list[str]], str]:
    """Content, each call's id, name and arguments, and the reason for the end, from a stream."""
    content, calls, reason = "", list[list[str]](), ""
    for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                calls.append([call.id, call.function.name, ""])
            calls[call.index][2] += call.function.arguments or ""
    return content, calls, reason


def test_5_09_a_call_in_the_models_own_form(tokenizer: Tokenizer) -> None:
    with says(f"Let me see.\n{CALL}", tokenizer) as server:
        create = server.client().chat.completions.create
        choice = create(model=MODEL, messages=ASKED, tools=[ADD]).choices[0]
        (call,) = choice.message.tool_calls or ()
        assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
        assert (call.function.name, call.function.arguments) == ("add", ARGUMENTS)
        content, calls, reason = called(create(model=MODEL, messages=ASKED, tools=[ADD], stream=True))
        assert (content, reason) == ("Let me see.", "tool_calls")
        assert [found[1:] for found in calls] == [["add", ARGUMENTS]]


def test_one_call_at_a_time(tokenizer: Tokenizer) -> None:
    with says(CALL + CALL, tokenizer) as server:
        create = server.client().chat.completions.create
        for parallel, count in ((True, 2), (False, 1)):
            asked: Any = {"model": MODEL, "messages": ASKED, "tools": [ADD], "parallel_tool_calls": parallel}
            assert len(create(**asked).choices[0].message.tool_calls) == count
            assert len(called(create(**asked, stream=True))[1]) == count


def test_without_tools_nothing_is_a_call(tokenizer: Tokenizer) -> None:
    with says(CALL, tokenizer) as server:
        create = server.client().chat.completions.create
        for how in ({}, {"tools": [ADD], "tool_choice": "none"}):
            choice = create(model=MODEL, messages=ASKED, **how).choices[0]
            assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")


def test_a_result_goes_back(tokenizer: Tokenizer) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
    messages: list[Any] = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "4"},
    ]
    with says("4", tokenizer) as server:
        create = server.client().chat.completions.create
        assert create(model=MODEL, messages=messages, tools=[ADD]).choices[0].message.content == "4"
        messages[1]["tool_calls"][0]["function"]["arguments"] = "{"
        with pytest.raises(openai.BadRequestError, match="arguments that aren't JSON"):
            create(model=MODEL, messages=messages, tools=[ADD])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_must_call_does(tiny: Served, choice: Any, stream: bool) -> None:
    create = tiny.client().chat.completions.create
    asked: Any = {"model": MODEL, "messages": ASKED, "tools": [ADD], "tool_choice": choice, "seed": 3}
    if stream:
        content, calls, reason = called(create(**asked, stream=True))
        ((_, name, arguments),) = calls
        assert content == ""
    else:
        found = create(**asked).choices[0]
        (call,) = found.message.tool_calls
        name, arguments, reason = call.function.name, call.function.arguments, found.finish_reason
    given = json.loads(arguments)
    assert (name, reason, [*given]) == ("add", "tool_calls", ["n1", "n2"])
    assert isinstance(given["n1"], int)
    assert isinstance(given["n2"], bool)


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema_is_followed(tiny: Served, stream: bool) -> None:
    create = tiny.client().chat.completions.create
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    asked: Any = {"model": MODEL, "messages": ASKED, "response_format": wanted, "seed": 1, "n": 2}
    texts = ["", ""]
    if stream:
        for chunk in create(**asked, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        texts = [choice.message.content for choice in create(**asked).choices]
    for text in texts:
        person = json.loads(text)
        assert [*person] == ["name", "old"]
        assert isinstance(person["old"], bool)
        assert len(person["name"]) <= 5


def test_a_json_object_is_one(tiny: Served) -> None:
    create = tiny.client().chat.completions.create
    asked: Any = {"response_format": {"type": "json_object"}, "seed": 5, "max_tokens": 300}
    choice = create(model=MODEL, messages=ASKED, **asked).choices[0]
    if choice.finish_reason == "stop":  # a model that knows nothing may not come to an end
        assert isinstance(json.loads(choice.message.content or ""), dict)
    assert (choice.message.content or "").startswith("{")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tools": [ADD]}, "it isn't known how this model writes calls"),
        ({"tools": [ADD], "tool_choice": "required", "response_format": {"type": "json_object"}}, "leave one of them"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "a b"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "none of the tools"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls is given without tools"),
        ({"response_format": {"type": "json_schema"}}, "without a schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
            "json_schema",
        ),
    ],
)
def test_what_cannot_be_met_is_refused(tiny: Served, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        tiny.client().chat.completions.create(model=MODEL, messages=ASKED, **asked)
