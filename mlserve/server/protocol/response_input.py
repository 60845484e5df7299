"""Input items, tools and tool choices of OpenAI's Responses API, as chats have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlserve.errors import PromptError, SamplingParamsError

__all__ = ["read_input", "read_tool_choice", "read_tools"]

Object = Mapping[str, Any]

_ROLES = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
}  # templates have no fourth
# What may stand in each kind of item and of part; what comes back from an earlier answer has more than what is new.
_ITEMS = {
    "message": frozenset({"type", "role", "content", "id", "status"}),
    "function_call": frozenset({"type", "call_id", "name", "arguments", "id", "status"}),
    "function_call_output": frozenset({"type", "call_id", "output", "id", "status"}),
}
_PARTS = {
    "input_text": frozenset({"type", "text"}),
    "output_text": frozenset({"type", "text", "annotations", "logprobs", "parsed"}),
    "input_image": frozenset({"type", "image_url", "detail"}),
    "image_embeds": frozenset({"type", "image_embeds"}),  # ours
}
_TOOLS = {"function": frozenset({"type", "name", "description", "parameters", "strict"})}


def read_input(given: str | Sequence[Object], instructions: str | None) -> list[dict[str, Any]]:
    """The messages of a chat. Calls become part of the assistant's message before them, as they were when they were
    made; what the developer says is the system's. Raises `PromptError` for items that aren't served.
    """
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for i, item in enumerate(given):
        where = f"input[{i}]"
        is_untyped = item.get("type") is None and "role" in item
        item = _served({**item, "type": "message"} if is_untyped else item, _ITEMS, where)
        match item["type"]:
            case "message":
                messages.append(_message(item, where))
            case "function_call":
                _add_call(messages, item)
            case _:
                content = _content(item.get("output"), f"{where}.output")
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    return messages


def read_tools(given: Sequence[Object] | None) -> list[dict[str, Any]] | None:
    """Functions, the way chats have them. Raises `PromptError` for other tools: those that a server runs itself."""
    if given is None:
        return None
    tools = [_served(tool, _TOOLS, f"tools[{i}]") for i, tool in enumerate(given)]
    return [{"type": "function", "function": {key: tool[key] for key in tool if key != "type"}} for tool in tools]


def read_tool_choice(given: str | Object | None) -> str | dict[str, Any] | None:
    """The same choice, the way chats have it. Raises `SamplingParamsError`."""
    if given is None or isinstance(given, str):
        return given
    if given.get("type") != "function" or not isinstance(given.get("name"), str) or len(given) > 2:
        raise SamplingParamsError(
            "tool_choice is neither 'none', 'auto', 'required' nor {'type': 'function', 'name': ...}: give one of them"
        )
    return {"type": "function", "function": {"name": given["name"]}}


def _message(item: Object, where: str) -> dict[str, Any]:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise PromptError(f"{where} has the role {_short(role)}: give one of {', '.join(_ROLES)}")
    return {"role": _ROLES[role], "content": _content(item.get("content"), f"{where}.content")}


def _add_call(messages: list[dict[str, Any]], item: Object) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    messages[-1].setdefault("tool_calls", []).append(
        {"id": item.get("call_id"), "type": "function", "function": function}
    )


def _content(given: object, where: str) -> str | list[dict[str, Any]]:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise PromptError(f"{where} is {_short(given)}: give a string or a list of parts")
    return [_part(_served(part, _PARTS, f"{where}[{i}]"), f"{where}[{i}]") for i, part in enumerate(given)]


def _part(part: Object, where: str) -> dict[str, Any]:
    if part["type"] == "image_embeds":
        return dict(part)
    if part["type"] != "input_image":
        return {"type": "text", "text": part.get("text")}
    if not isinstance(part.get("image_url"), str):
        raise PromptError(f"{where} has no image_url: give a URL, or the image itself as a data URL")
    if part.get("detail", "auto") != "auto":
        raise PromptError(f"{where} has the detail {_short(part['detail'])}: leave it out, each model has its own")
    return {"type": "image_url", "image_url": {"url": part["image_url"]}}


def _served(given: object, kinds: Mapping[str, frozenset[str]], where: str) -> dict[str, Any]:
    """What is given of it, if that is of a kind that is served, and has nothing that isn't."""
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(kind, str):
        raise PromptError(f"{where} is {_short(given)}: give an object with a type, one of {', '.join(kinds)}")
    if kind not in kinds:
        raise PromptError(f"{where} is of type {_short(kind)}, which isn't served: give one of {', '.join(kinds)}")
    found = {key: value for key, value in given.items() if value is not None}
    if unknown := found.keys() - kinds[kind]:
        raise PromptError(f"{where} has {_short(min(unknown))}, which isn't served: leave it out")
    return found


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
