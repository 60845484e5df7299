"""Whether the model may, must or mustn't call tools, and the schema that makes it call one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mlserve.errors import SamplingParamsError
from mlserve.server.tools.definitions import Tool

__all__ = ["ToolChoice", "ToolMode", "call_schema", "read_tool_choice"]

_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # name -> schema
_DATA = ("const", "enum", "default", "examples")  # what looks like a schema in there isn't one


class ToolMode(Enum):
    """How many tools the model calls."""

    NONE = "none"  # tools are left out of the prompt, and nothing in the answer is a call
    AUTO = "auto"  # the model decides
    REQUIRED = "required"  # exactly one: the answer is constrained to `call_schema`


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """A mode, and the tools that are open to the model in it."""

    mode: ToolMode
    tools: tuple[Tool, ...]


def read_tool_choice(given: object, tools: tuple[Tool, ...]) -> ToolChoice:
    """Check the `tool_choice` of a request: 'none', 'auto', 'required', or a function by name.

    Absent, it is 'auto' if there are tools. Raises `SamplingParamsError`.
    """
    if given is None or given in ("none", "auto"):
        mode = ToolMode.AUTO if given != "none" and tools else ToolMode.NONE
        return ToolChoice(mode, tools if mode is ToolMode.AUTO else ())
    if not tools:
        raise SamplingParamsError(f"tool_choice is {given!r}, and there are no tools: give tools, or leave it out")
    if given == "required":
        return ToolChoice(ToolMode.REQUIRED, tools)
    function = given.get("function") if isinstance(given, Mapping) and given.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None:
        raise SamplingParamsError(
            "tool_choice is neither 'none', 'auto', 'required' nor "
            "{'type': 'function', 'function': {'name': ...}}: give one of them"
        )
    chosen = tuple(tool for tool in tools if tool.name == name)
    if not chosen:
        known = ", ".join(tool.name for tool in tools[:10])
        raise SamplingParamsError(f"tool_choice names {name!r}, which is none of the tools: give one of {known}")
    return ToolChoice(ToolMode.REQUIRED, chosen)


def call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """A JSON schema of one call of any of the tools, `{"name": ..., "arguments": {...}}`, the name first.

    References within a tool's parameters are made to point to where these stand now.
    """
    if len(tools) == 1:
        return _call(tools[0], "#/properties/arguments")
    return {"anyOf": [_call(tool, f"#/anyOf/{i}/properties/arguments") for i, tool in enumerate(tools)]}


def _call(tool: Tool, place: str) -> dict[str, Any]:
    arguments = _moved(tool.parameters, place)
    if not tool.parameters.get("properties"):
        arguments = {"additionalProperties": False, **arguments}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """The schema with references to its own root turned into references to `place`."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[key] = place + value[1:]
        elif key in _SCHEMA_MAPS and isinstance(value, Mapping):
            moved[key] = {name: _moved(item, place) for name, item in value.items()}
        else:
            moved[key] = value if key in _DATA else _moved(value, place)
    return moved
