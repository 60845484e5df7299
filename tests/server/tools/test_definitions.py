"""Tools that clients offer: what is taken and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from mlserve.errors import PromptError
from mlserve.server.tools.definitions import MAX_TOOLS, Tool, read_tools


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def test_a_tool_is_read() -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    given = [function(description="Weather", parameters=parameters, strict=True)]
    tools = read_tools(given)
    assert tools == (Tool("f", "Weather", parameters),)
    assert tools[0].for_template() == function(description="Weather", parameters=parameters)


@pytest.mark.parametrize("fields", [{}, {"description": None, "parameters": None, "strict": None}])
def test_what_is_absent_or_null_has_a_default(fields: dict[str, Any]) -> None:
    expected = function(description="", parameters={"type": "object", "properties": {}})
    assert [tool.for_template() for tool in read_tools([function(**fields)])] == [expected]


def test_parameters_without_a_type_are_an_object() -> None:
    assert read_tools([function(parameters={})])[0].parameters == {"type": "object"}


def test_no_tools() -> None:
    assert read_tools(None) == ()
    assert read_tools([]) == ()


def test_as_many_tools_as_allowed() -> None:
    tools = [function(name=f"a-Z_{i:03}" + "x" * 57) for i in range(MAX_TOOLS)]
    assert len(read_tools(tools)) == MAX_TOOLS
    with pytest.raises(PromptError, match="there are 129 tools, the limit is 128"):
        read_tools([*tools, function()])


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth - 1):
        schema = {"type": "object", "x": schema}
    return schema


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("f", "tools are a str"),
        ({"f": {}}, "tools are a dict"),
        (["f"], r"tools\[0\] is no function"),
        ([function(), {"type": "web_search"}], r"tools\[1\] is no function"),
        ([{"type": "function", "function": None}], "is no function"),
        ([{"type": "function", "name": "f"}], "is no function"),
        ([function(name="")], "has the name ''"),
        ([function(name="a b")], "has the name 'a b'"),
        ([function(name="é")], "has the name 'é'"),
        ([function(name="f\n")], "has the name"),
        ([function(name="x" * 65)], "has the name 'x+"),
        ([function(name=None)], "has the name None"),
        ([function(name=1)], "has the name 1"),
        ([function(), function()], "two tools are named 'f'"),
        ([function(description=1)], "has the description 1"),
        ([function(parameters=[])], r"has the parameters \[\]"),
        ([function(parameters="{}")], "has the parameters '{}'"),
        ([function(parameters={"type": "array"})], "has the parameters {'type': 'array'}"),
        ([function(parameters=nested(25))], "nested more than 24 deep"),
        ([function(description="x" * 65536)], "tool 'f' has 65[0-9]+ characters, the limit is 65536"),
        ([function(name=f"f{i}", description="x" * 60000) for i in range(9)], "the tools have 54[0-9]+ characters"),
    ],
)
def test_what_is_refused(given: object, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        read_tools(given)


def test_as_deep_as_allowed() -> None:
    assert read_tools([function(parameters=nested(24))])[0].parameters == nested(24)
