"""tool_choice, and the schema of a required call: what a grammar library makes of it, and what the parser reads."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import llguidance
import pytest

from mlserve.errors import SamplingParamsError
from mlserve.server.tools.choice import ToolChoice, ToolMode, call_schema, read_tool_choice
from mlserve.server.tools.definitions import Tool
from mlserve.server.tools.deltas import join
from mlserve.server.tools.formats import JSON_ANSWER
from mlserve.server.tools.parser import CallParser

# Its definitions and its root are referred to; what looks like a reference in data or as a property's name is none.
TREE = Tool(
    "tree",
    "",
    {
        "type": "object",
        "properties": {
            "colour": {"$ref": "#/$defs/colour"},
            "child": {"$ref": "#"},
            "$ref": {"type": "string", "enum": ["#/a"]},
            "fixed": {"const": {"$ref": "#/b"}},
        },
        "required": ["colour"],
        "additionalProperties": False,
        "$defs": {"colour": {"enum": ["red", "blue"]}},
    },
)
NOW = Tool("now")


def test_modes() -> None:
    tools = (TREE, NOW)
    assert read_tool_choice(None, tools) == ToolChoice(ToolMode.AUTO, tools)
    assert read_tool_choice("auto", tools) == ToolChoice(ToolMode.AUTO, tools)
    assert read_tool_choice("none", tools) == ToolChoice(ToolMode.NONE, ())
    assert read_tool_choice("required", tools) == ToolChoice(ToolMode.REQUIRED, tools)
    named = {"type": "function", "function": {"name": "now"}}
    assert read_tool_choice(named, tools) == ToolChoice(ToolMode.REQUIRED, (NOW,))


@pytest.mark.parametrize("given", [None, "none", "auto"])
def test_without_tools(given: object) -> None:
    assert read_tool_choice(given, ()) == ToolChoice(ToolMode.NONE, ())


@pytest.mark.parametrize(
    ("given", "tools", "message"),
    [
        ("required", (), "tool_choice is 'required', and there are no tools"),
        ({"type": "function", "function": {"name": "now"}}, (), "there are no tools"),
        ({"type": "function", "function": {"name": "other"}}, (NOW,), "names 'other', which is none of the tools"),
        ("any", (NOW,), "is neither"),
        (1, (NOW,), "is neither"),
        ([], (NOW,), "is neither"),
        ({"type": "function"}, (NOW,), "is neither"),
        ({"type": "function", "function": "now"}, (NOW,), "is neither"),
        ({"type": "custom", "function": {"name": "now"}}, (NOW,), "is neither"),
    ],
)
def test_what_is_refused(given: object, tools: tuple[Tool, ...], message: str) -> None:
    with pytest.raises(SamplingParamsError, match=message):
        read_tool_choice(given, tools)


def call(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments, **more}


@pytest.mark.parametrize("tools", [(TREE,), (NOW, TREE)], ids=["one", "two"])
def test_schema_allows_calls_and_nothing_else(tools: tuple[Tool, ...]) -> None:
    schema = jsonschema_rs.validator_for(call_schema(tools))
    for arguments in (
        {"colour": "red"},
        {"colour": "red", "child": {"colour": "blue", "child": {"colour": "red"}}},
        {"colour": "red", "$ref": "#/a"},
        {"colour": "red", "fixed": {"$ref": "#/b"}},
    ):
        assert schema.is_valid(call("tree", arguments))
    for wrong in (
        call("tree", {}),
        call("tree", {"colour": "green"}),
        call("tree", {"colour": "red", "child": {"colour": "green"}}),
        call("tree", {"colour": "red", "fixed": {"$ref": "#/properties/arguments/b"}}),
        call("tree", {"colour": "red"}, more=1),
        call("other", {"colour": "red"}),
        {"name": "tree"},
        [call("tree", {"colour": "red"})],
    ):
        assert not schema.is_valid(wrong)


def test_a_tool_without_parameters_takes_no_arguments() -> None:
    schema = jsonschema_rs.validator_for(call_schema([NOW]))
    assert schema.is_valid(call("now", {}))
    assert not schema.is_valid(call("now", {"a": 1}))


def byte_matcher(schema: dict[str, Any]) -> llguidance.LLMatcher:
    """The grammar library over a vocabulary of single bytes and one token that ends the answer."""

    class Bytes:
        eos_token_id = 256
        bos_token_id = 256
        tokens = [bytes([i]) for i in range(256)] + [b"\xff<eos>"]
        special_token_ids = [256]  # noqa: RUF012

        def __call__(self, text: str) -> list[int]:
            return list(text.encode())

    wrapper = llguidance.TokenizerWrapper(Bytes())
    tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=257)
    return llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_json_schema(schema))


@pytest.mark.parametrize("tools", [(TREE,), (NOW, TREE)], ids=["one", "two"])
def test_a_constrained_answer_is_a_call_from_its_name_on(tools: tuple[Tool, ...]) -> None:
    """The name stands first, so that it can be given out while the arguments are still written."""
    schema = call_schema(tools)
    good = json.dumps(call("tree", {"colour": "red", "child": {"colour": "blue"}}))
    matcher = byte_matcher(schema)
    assert matcher.try_consume_tokens(list(good.encode())) == len(good)
    assert matcher.is_accepting()
    assert byte_matcher(schema).try_consume_tokens(list(b'{"arguments"')) < len('{"arguments"')
    bad = json.dumps(call("tree", {"colour": "green"}))
    assert byte_matcher(schema).try_consume_tokens(list(bad.encode())) == bad.index("green")

    parser = CallParser(JSON_ANSWER, tool_names=[tool.name for tool in tools])
    content, calls = join([delta for char in good for delta in parser.feed(char)] + parser.finish())
    assert (content, calls[0].name, calls[0].arguments) == (
        "",
        "tree",
        '{"colour": "red", "child": {"colour": "blue"}}',
    )
