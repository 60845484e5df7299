"""Conversations with tools, from what clients send to what chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from mlserve.errors import PromptError
from mlserve.server.tools.definitions import Tool
from mlserve.server.tools.formats import ToolFormat
from mlserve.server.tools.grammar import TOOL_NAME
from mlserve.server.tools.templates import template_use

__all__ = ["prepare_messages", "prepare_prompt"]

Message = Mapping[str, Any]


def prepare_prompt(
    messages: Sequence[Message], tools: Sequence[Tool], *, chat_template: str, form: ToolFormat | None
) -> tuple[list[Message], dict[str, Any]]:
    """The messages, and the variables, to give to `render_chat`.

    A template that takes no tools gets them in its system message; one that lays out no calls gets earlier ones as
    content. Both need the form in which the model is to write its calls.
    Raises `PromptError` for malformed messages, and where the form is needed and unknown.
    """
    prepared = prepare_messages(messages)
    use = template_use(chat_template)
    if not use.calls:
        prepared = [_calls_as_content(message, form) for message in prepared]
    if not tools:
        return prepared, {}
    described = [tool.for_template() for tool in tools]
    if use.tools is not None:
        return prepared, {use.tools: described}
    if form is None:
        raise PromptError(
            "the model's chat template takes no tools: name a tool-call format, or use a model trained on tools"
        )
    return _with_instructions(prepared, _instructions(described, form)), {}


def prepare_messages(messages: Sequence[Message]) -> list[Message]:
    """Turn the arguments of assistants' calls from JSON text into objects, and check calls and results.

    Raises `PromptError` for malformed ones; what has to do with no tools is left for `render_chat` to check.
    """
    return [
        _prepared(message, f"message {i}") if isinstance(message, Mapping) else message
        for i, message in enumerate(messages)
    ]


def _prepared(message: Message, where: str) -> Message:
    if message.get("role") == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise PromptError(f"{where} is a tool's result without tool_call_id: give the id of the call that it answers")
    if "tool_calls" not in message:
        return message
    calls = message["tool_calls"]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    if not calls and isinstance(calls, list | None):  # templates take an empty list for calls
        return rest
    if message.get("role") != "assistant" or not isinstance(calls, list):
        raise PromptError(f"{where} has tool_calls that can't be: give an assistant a list of calls")
    return {**rest, "tool_calls": [_prepared_call(call, where) for call in calls]}


def _prepared_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(name, str):
        raise PromptError(f"{where} has a malformed call: give {{'id', 'type', 'function': {{'name', 'arguments'}}}}")
    if not TOOL_NAME.fullmatch(name):
        raise PromptError(f"{where} calls {name[:60]!r}: a tool's name has 1 to 64 of a-z, A-Z, 0-9, _ and -")
    if not isinstance(call.get("id"), str):
        raise PromptError(f"{where} has a call of {name!r} without id: give the id that the call had")
    arguments = _arguments(function.get("arguments"), name, where)
    return {"id": call["id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(given: object, name: str, where: str) -> dict[str, Any]:
    if isinstance(given, str):
        try:
            given = json.loads(given, parse_constant=_refuse) if given.strip() else {}  # some send "" for no arguments
        except (ValueError, RecursionError) as error:
            raise PromptError(
                f"{where} calls {name!r} with arguments that aren't JSON ({error}): correct them"
            ) from error
    if not isinstance(given, dict):
        raise PromptError(f"{where} calls {name!r} with a {type(given).__name__} for arguments: give a JSON object")
    return given


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _calls_as_content(message: Message, form: ToolFormat | None) -> Message:
    if "tool_calls" not in message:
        return message
    if form is None:
        raise PromptError("the model's chat template lays out no tool calls: name a tool-call format")
    functions = [call["function"] for call in message["tool_calls"]]
    written = form.write([(function["name"], function["arguments"]) for function in functions])
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return _extended(rest, written)


def _instructions(described: Sequence[Mapping[str, Any]], form: ToolFormat) -> str:
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in described)
    example = form.write([("function_name", {"argument_name": "value"})])
    return (
        f"You can call these functions:\n{listed}\n\n"
        f"To call one, answer with nothing but its name and arguments in this form:\n{example}"
    )


def _with_instructions(messages: list[Message], instructions: str) -> list[Message]:
    if messages and isinstance(messages[0], Mapping) and messages[0].get("role") == "system":
        return [_extended(messages[0], instructions), *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


def _extended(message: Message, text: str) -> Message:
    """The message with a paragraph more."""
    content = message.get("content")
    if isinstance(content, list) and content:
        return {**message, "content": [*content, {"type": "text", "text": f"\n\n{text}"}]}
    return {**message, "content": f"{content}\n\n{text}" if content else text}
