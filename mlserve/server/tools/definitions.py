"""The tools that a client offers to the model, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlserve.errors import PromptError
from mlserve.server.tools.grammar import TOOL_NAME

__all__ = ["MAX_TOOLS", "Tool", "read_tools"]

MAX_TOOLS = 128
MAX_TOOL_CHARS = 65536  # of one tool as JSON
MAX_TOOLS_CHARS = 524288  # of all of them
MAX_DEPTH = 24  # of parameters; `engine/prompt.py` takes 32 levels, of which parameters lie under three


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})  # JSON schema

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it. The same tool gives the same text, whatever else the client sent."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def read_tools(given: object) -> tuple[Tool, ...]:
    """Check the `tools` of a request: `{"type": "function", "function": {"name": ..., "parameters": ...}}` each.

    `strict` is accepted: where a call is required, its arguments always follow the parameters' schema.
    Raises `PromptError`.
    """
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        raise PromptError(f"tools are a {type(given).__name__}: give a list")
    if len(given) > MAX_TOOLS:
        raise PromptError(f"there are {len(given)} tools, the limit is {MAX_TOOLS}: give fewer")
    tools = tuple(_read_tool(item, f"tools[{i}]") for i, item in enumerate(given))
    names: set[str] = set()
    for tool in tools:
        if tool.name in names:
            raise PromptError(f"two tools are named {tool.name!r}: give each another name")
        names.add(tool.name)
    size = sum(_size(tool) for tool in tools)
    if size > MAX_TOOLS_CHARS:
        raise PromptError(
            f"the tools have {size} characters, the limit is {MAX_TOOLS_CHARS}: give fewer or shorter ones"
        )
    return tools


def _read_tool(item: object, where: str) -> Tool:
    if not isinstance(item, dict) or item.get("type") != "function" or not isinstance(item.get("function"), dict):
        raise PromptError(f"{where} is no function: give {{'type': 'function', 'function': {{'name': ...}}}}")
    function = item["function"]
    name = function.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise PromptError(f"{where} has the name {_short(name)}: give 1 to 64 of a-z, A-Z, 0-9, _ and -")
    description = function.get("description")
    if not isinstance(description, str | None):
        raise PromptError(f"tool {name!r} has the description {_short(description)}: give a string")
    tool = Tool(name, description or "", **_read_parameters(function.get("parameters"), name))
    size = _size(tool)
    if size > MAX_TOOL_CHARS:
        raise PromptError(
            f"tool {name!r} has {size} characters, the limit is {MAX_TOOL_CHARS}: describe it more briefly"
        )
    return tool


def _read_parameters(given: object, name: str) -> dict[str, Any]:
    """The keyword for `Tool`, or none if the function takes no arguments."""
    if given is None:
        return {}
    if not isinstance(given, dict) or given.get("type", "object") != "object":
        raise PromptError(f"tool {name!r} has the parameters {_short(given)}: give a JSON schema of type 'object'")
    _check_depth(given, name, MAX_DEPTH)
    return {"parameters": given if "type" in given else {"type": "object", **given}}


def _check_depth(value: object, name: str, levels: int) -> None:
    if not isinstance(value, dict | list):
        return
    if levels == 0:
        raise PromptError(f"the parameters of tool {name!r} are nested more than {MAX_DEPTH} deep: give flatter ones")
    inner: Sequence[object] = list(value.values()) if isinstance(value, dict) else value
    for item in inner:
        _check_depth(item, name, levels - 1)


def _size(tool: Tool) -> int:
    return len(json.dumps(tool.for_template(), ensure_ascii=False))


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
