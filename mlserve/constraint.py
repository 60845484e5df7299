"""What an answer must look like, as a caller says it. Plain data: the engine makes a grammar of it."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

from mlserve.errors import SamplingParamsError

__all__ = ["Constraint", "ConstraintKind"]

MAX_SOURCE = 64 * 1024  # characters of a schema, of a grammar, or of all choices
MAX_REGEX = 16 * 1024  # characters
MAX_CHOICES = 1000
MAX_CHOICE = 1000  # characters of one
MAX_NESTING = 60  # of a schema's JSON


class ConstraintKind(StrEnum):
    """In which language a constraint is written."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the whole answer must match. Made by one of the class methods, which raise `SamplingParamsError` for what is
    malformed or too large; whether a schema, an expression or a grammar is one that is served, the engine finds out.

    The answer ends, with the reason `stop`, when nothing may follow: a complete JSON object ends it at once, even below
    `min_tokens`. Where more may follow (digits of a number), the model chooses the end; with `ignore_eos` it can't.
    Whatever else restricts tokens (`allowed_token_ids`, `bad_words`, `logit_bias`) holds too; if nothing is left to
    choose, the request ends with the reason `error`. A stop string or `max_tokens` may cut an answer short.
    """

    kind: ConstraintKind
    source: str = ""  # by kind: nothing, a JSON object, a regular expression, a JSON list of strings, a Lark grammar

    def __post_init__(self) -> None:
        if not isinstance(self.kind, ConstraintKind):
            raise SamplingParamsError(f"the kind of a constraint is {reprlib.repr(self.kind)}: give a ConstraintKind")
        if self.kind is ConstraintKind.JSON_OBJECT:
            if self.source:
                raise SamplingParamsError("a constraint json_object has no source: leave it out, or use json_schema")
            return
        _check_text(self.kind.value, self.source, MAX_REGEX if self.kind is ConstraintKind.REGEX else MAX_SOURCE)
        if self.kind is ConstraintKind.JSON_SCHEMA:
            _check_schema(_parsed("json_schema", self.source))
        elif self.kind is ConstraintKind.CHOICE:
            _check_choices(_parsed("choice", self.source))

    @classmethod
    def json_object(cls) -> Constraint:
        """Any JSON object."""
        return cls(ConstraintKind.JSON_OBJECT)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Constraint:
        """JSON that a schema describes, given as a dict or as JSON text. Properties come in the schema's order.

        Between tokens stands a space, or a new line with its indentation, or nothing. Keywords of JSON Schema that the
        grammar can't express, such as `uniqueItems`, are refused by the engine; so are references to other documents.
        Options of llguidance may stand under the key `x-guidance`.
        """
        value = _parsed("json_schema", schema) if isinstance(schema, str) else schema
        if not isinstance(value, Mapping):
            raise SamplingParamsError(f"json_schema is {reprlib.repr(value)}: give a JSON object")
        return cls(ConstraintKind.JSON_SCHEMA, _written("json_schema", dict(value)))

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """Text that a regular expression matches from end to end, in the syntax of Rust's `regex`: no look-around."""
        return cls(ConstraintKind.REGEX, pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Constraint:
        """One of several texts."""
        if not isinstance(choices, Sequence) or isinstance(choices, str | bytes):
            raise SamplingParamsError(f"choice is {reprlib.repr(choices)}: give a list of strings")
        _check_choices(list(choices))
        return cls(ConstraintKind.CHOICE, _written("choice", list(choices)))

    @classmethod
    def grammar(cls, lark: str) -> Constraint:
        """Text that a context-free grammar derives from `start`, in llguidance's variant of Lark's syntax.

        Its attributes that ask for another way to sample, such as `temperature`, have no effect.
        """
        return cls(ConstraintKind.GRAMMAR, lark)


def _check_text(name: str, text: object, limit: int) -> None:
    if not isinstance(text, str) or not text:
        raise SamplingParamsError(f"{name} is {reprlib.repr(text)}: give a text that isn't empty")
    if len(text) > limit:
        raise SamplingParamsError(f"{name} has {len(text)} characters, limit {limit}: shorten it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SamplingParamsError(f"{name} isn't valid Unicode ({error.reason}): give valid text") from None


def _parsed(name: str, text: str) -> Any:
    _check_text(name, text, MAX_SOURCE)
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise SamplingParamsError(f"{name} isn't JSON ({error}): give valid JSON") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _written(name: str, value: object) -> str:
    """As JSON without spaces, so that equal schemas are equal texts."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SamplingParamsError(f"{name} can't be written as JSON ({error}): give plain values") from None


def _check_schema(schema: object) -> None:
    if not isinstance(schema, dict):
        raise SamplingParamsError(f"json_schema is {reprlib.repr(schema)}: give a JSON object")
    level: list[object] = [schema]
    for _ in range(MAX_NESTING):
        level = [part for value in level for part in _parts(value)]
    if level:
        raise SamplingParamsError(f"json_schema is nested deeper than {MAX_NESTING} levels: flatten it, or use $defs")


def _parts(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


def _check_choices(choices: object) -> None:
    if not isinstance(choices, list) or not 1 <= len(choices) <= MAX_CHOICES:
        raise SamplingParamsError(f"choice is {reprlib.repr(choices)}: give a list of 1 to {MAX_CHOICES} strings")
    for choice in choices:
        if not isinstance(choice, str) or not 1 <= len(choice) <= MAX_CHOICE:
            raise SamplingParamsError(
                f"an entry of choice is {reprlib.repr(choice)}: give strings of 1 to {MAX_CHOICE} characters"
            )
        _check_text("an entry of choice", choice, MAX_CHOICE)
