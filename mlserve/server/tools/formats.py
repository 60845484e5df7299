"""The forms in which families of models write calls, by name.

    hermes       Qwen 2, 2.5, 3, SmolLM2, SmolLM3      <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
    llama3_json  Llama 3.1, 3.2, 3.3                   {"name": "f", "parameters": {"a": 1}}
    mistral      Mistral 7B v0.3 and later             [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]
                                                       [TOOL_CALLS]f[ARGS]{"a": 1}
    pythonic     Llama 3.2 as Meta also prompts it     [f(a=1)]
    json         any, where the answer is constrained  {"name": "f", "arguments": {"a": 1}}

Gemma 3 was trained on no form and its template takes no tools. Google's guide describes them in the prompt and asks for
a form, of which the one it shows first is `pythonic`: name that format to serve such a model with tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mlserve.errors import ConfigError
from mlserve.server.tools.grammar import CallSink, Scan, arguments, expect, json_calls, literal, skip_space, space, word
from mlserve.server.tools.pythonic import python_calls

__all__ = ["FORMATS", "JSON_ANSWER", "ToolFormat", "format_named"]

NamedArguments = tuple[str, Mapping[str, Any]]


class ToolFormat(Protocol):
    """One form of calls.

    A *marked* call begins with a literal that nothing else means. A *bare* one begins like ordinary text, so it counts
    only at the very beginning of an answer, and only if it names a tool of the request.
    """

    @property
    def name(self) -> str:
        """What it is called in options."""

    @property
    def opener(self) -> str:
        """The literal that begins marked calls; empty if there are none."""

    @property
    def bare(self) -> str:
        """Characters that may begin a bare call."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Every literal of the form: where one is a special token, the parser needs special tokens kept in the text."""

    @property
    def streams_arguments(self) -> bool:
        """Whether what began as a call is certain to be one, so that its arguments can be given out as they come."""

    def calls(self, sink: CallSink) -> Scan:
        """Reads what follows the opener; or a bare call, from its first character on."""

    def write(self, calls: Sequence[NamedArguments]) -> str:
        """Names and arguments in this form."""


class Hermes:
    """SmolLM2 writes a list of calls between the marks, the others one call."""

    name = "hermes"
    opener = "<tool_call>"
    bare = ""
    markers = ("<tool_call>", "</tool_call>")
    streams_arguments = False

    def calls(self, sink: CallSink) -> Scan:
        yield from json_calls(sink, (yield from space()))
        sink.may_end("</tool_call>")
        yield from literal((yield from space()), "</tool_call>")

    def write(self, calls: Sequence[NamedArguments]) -> str:
        return "\n".join(f"<tool_call>\n{_json_call(call)}\n</tool_call>" for call in calls)


class Llama3Json:
    """Several calls stand behind one another, with semicolons between."""

    name = "llama3_json"
    opener = "<|python_tag|>"
    bare = "{"
    markers = ("<|python_tag|>",)
    streams_arguments = False

    def calls(self, sink: CallSink) -> Scan:
        yield from json_calls(sink, (yield from space()))
        while True:
            sink.may_end(";")
            expect((yield from space()), ";")
            yield from json_calls(sink, (yield from space()))

    def write(self, calls: Sequence[NamedArguments]) -> str:
        return "; ".join(_json_call(call, "parameters") for call in calls)


class Mistral:
    """The list came first; newer models write the mark again before each call, perhaps with an id behind the name."""

    name = "mistral"
    opener = "[TOOL_CALLS]"
    bare = ""
    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    streams_arguments = False

    def calls(self, sink: CallSink) -> Scan:
        char = yield from space()
        if char in "[{":
            yield from json_calls(sink, char)
            return
        name, char = yield from word(char)
        sink.begin(name)
        if char == "[":
            char = yield
            if char == "C":
                yield from literal(char, "CALL_ID]")
                _, char = yield from word((yield from space()))
                expect(char, "[")
                char = yield
            yield from literal(char, "ARGS]")
            char = yield
        yield from arguments(sink, (yield from skip_space(char)))
        sink.end()

    def write(self, calls: Sequence[NamedArguments]) -> str:
        return f"[TOOL_CALLS] [{', '.join(map(_json_call, calls))}]"


class Pythonic:
    """A list of Python calls with named arguments, whose values are literals."""

    name = "pythonic"
    opener = "<|python_tag|>"
    bare = "["
    markers = ("<|python_tag|>",)
    streams_arguments = False

    def calls(self, sink: CallSink) -> Scan:
        yield from python_calls(sink, (yield from space()))

    def write(self, calls: Sequence[NamedArguments]) -> str:
        written = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls)
        return f"[{', '.join(written)}]"


class JsonAnswer:
    """The whole answer is one call: what a model is constrained to write when it has to call a tool."""

    name = "json"
    opener = ""
    bare = "{"
    markers = ()
    streams_arguments = True

    def calls(self, sink: CallSink) -> Scan:
        yield from json_calls(sink, (yield from space()))

    def write(self, calls: Sequence[NamedArguments]) -> str:
        return "\n".join(map(_json_call, calls))


JSON_ANSWER: ToolFormat = JsonAnswer()
FORMATS: Mapping[str, ToolFormat] = {form.name: form for form in (Hermes(), Llama3Json(), Mistral(), Pythonic())}


def format_named(name: str) -> ToolFormat:
    """Look a format up. Raises `ConfigError` for an unknown name."""
    if name not in FORMATS:
        raise ConfigError(f"there is no tool-call format {name!r}: use one of {', '.join(FORMATS)}")
    return FORMATS[name]


def _json_call(call: NamedArguments, key: str = "arguments") -> str:
    name, given = call
    return json.dumps({"name": name, key: given}, ensure_ascii=False)
