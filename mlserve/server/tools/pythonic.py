"""Calls written as a Python list, `[get_weather(city="Oslo", days=3)]`, and their arguments as JSON.

Nothing is evaluated: values are literals, read by `ast.literal_eval`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Generator
from typing import NoReturn

from mlserve.server.tools.grammar import CallSink, Mismatch, Scan, expect, skip_space, space, word
from mlserve.server.tools.json_scanner import MAX_DEPTH

__all__ = ["python_calls"]

_CLOSING = {"(": ")", "[": "]", "{": "}"}
_ESCAPES = "\\'\"abfnrtvxu"  # Python warns of others


def python_calls(sink: CallSink, char: str) -> Scan:
    """Use a list of calls from its bracket, which is the given first character, up to the closing one."""
    expect(char, "[")
    char = yield from space()
    while True:
        yield from _call(sink, char)
        char = yield from space()
        if char == "]":
            return
        expect(char, ",")
        char = yield from space()


def _call(sink: CallSink, char: str) -> Scan:
    name, char = yield from word(char)
    expect(char, "(")
    sink.begin(name)
    fields: dict[str, str] = {}  # argument -> JSON text of its value
    char = yield from space()
    while char != ")":
        key, char = yield from word(char)
        char = yield from skip_space(char)
        if char != "=" or key in fields:
            raise Mismatch
        text, char = yield from _value((yield from space()))
        fields[key] = _as_json(text)
        if char == ",":
            char = yield from space()
    sink.add("{" + ", ".join(f"{json.dumps(key)}: {text}" for key, text in fields.items()) + "}")
    sink.end()


def _value(char: str) -> Generator[None, str, tuple[str, str]]:
    """Use a literal; returns its text and the comma or bracket behind it, which is not used."""
    text: list[str] = []
    closing: list[str] = []  # the brackets that are still to come, the last one first
    while closing or char not in ",)":
        text.append(char)
        if char in "\"'":
            yield from _rest_of_string(text, char)
        elif char in _CLOSING:
            closing.append(_CLOSING[char])
        elif char in ")]}" and (not closing or char != closing.pop()):
            raise Mismatch
        if len(closing) > MAX_DEPTH:
            raise Mismatch
        char = yield
    return "".join(text), char


def _rest_of_string(text: list[str], quote: str) -> Scan:
    char = ""
    while char != quote:
        char = yield
        text.append(char)
        if char < " ":
            raise Mismatch
        if char == "\\":
            char = yield
            expect(char, _ESCAPES)
            text.append(char)
            char = ""


def _as_json(text: str) -> str:
    """A literal of JSON stands as the model wrote it, `true` included; one of Python is written anew."""
    try:
        json.loads(text, parse_constant=_refuse)
        return text.strip()
    except ValueError:
        pass
    try:
        written = json.dumps(ast.literal_eval(text.strip()), ensure_ascii=False, allow_nan=False)
        written.encode()
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise Mismatch from error
    return written


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
