"""Pieces of grammars for calls, written as generators that ask for one character at a time.

`char = yield` is the next character of the answer. A generator either uses the characters up to the end of its form, or
returns the first one that it didn't use; its docstring says which. One that meets a character that can't be part of its
form raises `Mismatch`, without having used that character. So a form is read the same way however a text is cut.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Protocol

from mlserve.server.tools.json_scanner import WHITE_SPACE, JsonScanner, NotJsonError

__all__ = [
    "TOOL_NAME",
    "CallSink",
    "Mismatch",
    "Scan",
    "Text",
    "arguments",
    "expect",
    "json_calls",
    "literal",
    "skip_space",
    "space",
    "word",
]

Scan = Generator[None, str, None]
Text = Generator[None, str, str]

TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_IGNORED_KEYS = frozenset({"id", "type"})  # some models write them; their values are strings
_WORD_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_MAX_WORD = 64
_MAX_SHORT_STRING = 128  # characters of a key, a name or an id in JSON


class Mismatch(Exception):  # noqa: N818  (it is no error: most text is no call)
    """This character can't be part of the form."""


class CallSink(Protocol):
    """Takes the calls that a grammar finds: `begin`, then `add` any number of times, then `end`."""

    def begin(self, name: str) -> None:
        """A call with this name begins. Raises `Mismatch` if no tool can have the name."""

    def add(self, text: str) -> None:
        """The next piece of the JSON text of its arguments."""

    def end(self) -> None:
        """The call is complete with the character that was used last."""

    def may_end(self, rest: str) -> None:
        """No call is left open; if the answer ends now or within `rest`, then only the end of the form is missing."""


def expect(char: str, allowed: str) -> None:
    """Raise `Mismatch` unless it is one of the allowed characters."""
    if char not in allowed:
        raise Mismatch


def space() -> Text:
    """Use white space, if there is any; returns the character behind it, which is not used."""
    return (yield from skip_space((yield)))


def skip_space(char: str) -> Text:
    """`space` from a character on that was looked at already."""
    while char in WHITE_SPACE:
        char = yield
    return char


def word(char: str) -> Generator[None, str, tuple[str, str]]:
    """Use the letters, digits, `_` and `-` of a name; returns it and the character behind it, which is not used."""
    text: list[str] = []
    while char in _WORD_CHARS and len(text) <= _MAX_WORD:
        text.append(char)
        char = yield
    if not 1 <= len(text) <= _MAX_WORD:
        raise Mismatch
    return "".join(text), char


def literal(char: str, text: str) -> Scan:
    """Use `text`, of which `char` is the first character."""
    for i, wanted in enumerate(text):
        if i > 0:
            char = yield
        expect(char, wanted)


def arguments(sink: CallSink | None, char: str) -> Text:
    """Use a JSON object, whose first character is given, up to its closing brace; returns its text.

    The sink, if there is one, gets the text as it comes.
    """
    scanner, text = JsonScanner(), []
    while True:
        try:
            is_complete = scanner.feed(char)
        except NotJsonError as error:
            raise Mismatch from error
        text.append(char)
        if sink is not None:
            sink.add(char)
        if is_complete:
            return "".join(text)
        char = yield


def json_calls(sink: CallSink, char: str) -> Scan:
    """Use one JSON call or a list of them, from the given first character on."""
    if char != "[":
        yield from _json_call(sink, char)
        return
    char = yield from space()
    if char == "]":
        return
    while True:
        yield from _json_call(sink, char)
        char = yield from space()
        if char == "]":
            return
        expect(char, ",")
        char = yield from space()


def _json_call(sink: CallSink, char: str) -> Scan:
    """`{"name": "f", "arguments": {"a": 1}}`; the arguments may be called parameters, stand first, or be missing."""
    expect(char, "{")
    name: str | None = None
    given: str | None = None
    keys = {"name", *_ARGUMENT_KEYS, *_IGNORED_KEYS}  # that may still come
    while char != "}":
        key = yield from _short_string((yield from space()))
        if key not in keys:
            raise Mismatch
        keys -= _ARGUMENT_KEYS if key in _ARGUMENT_KEYS else {key}
        expect((yield from space()), ":")
        char = yield from space()
        if key == "name":
            name = yield from _short_string(char)
            sink.begin(name)
            if given is not None:
                sink.add(given)
        elif key in _ARGUMENT_KEYS:
            given = yield from arguments(None if name is None else sink, char)
        else:
            yield from _short_string(char)
        char = yield from space()
        expect(char, ",}")
    if name is None:
        raise Mismatch
    if given is None:
        sink.add("{}")
    sink.end()


def _short_string(char: str) -> Text:
    """Use a JSON string without escapes, from its opening to its closing quote; returns what it says."""
    expect(char, '"')
    text: list[str] = []
    while (char := (yield)) != '"':
        if char < " " or char == "\\" or len(text) == _MAX_SHORT_STRING:
            raise Mismatch
        text.append(char)
    return "".join(text)
