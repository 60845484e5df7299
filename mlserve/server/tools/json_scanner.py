"""Follows a JSON object through a stream of characters, and knows at once where it ends or stops being JSON."""

from __future__ import annotations

import re
from collections.abc import Callable

__all__ = ["MAX_DEPTH", "WHITE_SPACE", "JsonScanner", "NotJsonError"]

MAX_DEPTH = 24  # of objects and lists; `engine/prompt.py` takes 32 levels, of which a call's arguments lie under five
WHITE_SPACE = " \t\r\n"
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_WORD_CHARS = frozenset("0123456789+-.eEtrufalsn")
_WORD = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")


class NotJsonError(ValueError):
    """The characters so far can't begin a JSON object."""


class JsonScanner:
    """A pushdown automaton for one object as in RFC 8259. Its state is the method that takes the next character."""

    def __init__(self) -> None:
        self._brackets: list[str] = []  # that are open, the outermost first
        self._state: Callable[[str], None] = self._object
        self._after_string = self._after_value
        self._hex_digits = 0  # that are still missing of a \uXXXX
        self._word: list[str] = []  # a number, true, false or null

    def feed(self, char: str) -> bool:
        """Take the next character; returns whether the object ends with it. Raises `NotJsonError`."""
        self._state(char)
        return not self._brackets

    def _object(self, char: str) -> None:
        if char != "{":
            raise NotJsonError
        self._push(char)

    def _push(self, bracket: str) -> None:
        if len(self._brackets) == MAX_DEPTH:
            raise NotJsonError
        self._brackets.append(bracket)
        self._state = self._first_key if bracket == "{" else self._first_item

    def _pop(self) -> None:
        self._brackets.pop()
        self._state = self._after_value

    def _first_key(self, char: str) -> None:
        if char == "}":
            self._pop()
        else:
            self._key(char)

    def _key(self, char: str) -> None:
        if char == '"':
            self._state, self._after_string = self._string, self._colon
        elif char not in WHITE_SPACE:
            raise NotJsonError

    def _colon(self, char: str) -> None:
        if char == ":":
            self._state = self._value
        elif char not in WHITE_SPACE:
            raise NotJsonError

    def _first_item(self, char: str) -> None:
        if char == "]":
            self._pop()
        else:
            self._value(char)

    def _value(self, char: str) -> None:
        if char == '"':
            self._state, self._after_string = self._string, self._after_value
        elif char in "{[":
            self._push(char)
        elif char in _WORD_CHARS:
            self._word = [char]
            self._state = self._in_word
        elif char not in WHITE_SPACE:
            raise NotJsonError

    def _after_value(self, char: str) -> None:
        if char == ",":
            self._state = self._key if self._brackets[-1] == "{" else self._value
        elif self._brackets[-1] + char in ("{}", "[]"):
            self._pop()
        elif char not in WHITE_SPACE:
            raise NotJsonError

    def _in_word(self, char: str) -> None:
        if char in _WORD_CHARS:
            self._word.append(char)
        elif _WORD.fullmatch("".join(self._word)):
            self._state = self._after_value
            self._after_value(char)
        else:
            raise NotJsonError

    def _string(self, char: str) -> None:
        if char == '"':
            self._state = self._after_string
        elif char == "\\":
            self._state = self._escape
        elif char < " ":
            raise NotJsonError

    def _escape(self, char: str) -> None:
        if char == "u":
            self._state, self._hex_digits = self._unicode, 4
        elif char in _ESCAPES:
            self._state = self._string
        else:
            raise NotJsonError

    def _unicode(self, char: str) -> None:
        if char not in _HEX:
            raise NotJsonError
        self._hex_digits -= 1
        if self._hex_digits == 0:
            self._state = self._string
