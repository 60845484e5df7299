"""What a constraint may be, before any grammar is made of it."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import pytest

from mlserve.constraint import Constraint, ConstraintKind
from mlserve.errors import SamplingParamsError
from mlserve.request import SamplingParams


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def test_each_kind_keeps_its_source() -> None:
    assert Constraint.json_object() == Constraint(ConstraintKind.JSON_OBJECT, "")
    assert Constraint.json_schema({"type": "array"}) == Constraint(ConstraintKind.JSON_SCHEMA, '{"type":"array"}')
    assert Constraint.regex("[ab]+") == Constraint(ConstraintKind.REGEX, "[ab]+")
    assert Constraint.choice(["a", "é"]) == Constraint(ConstraintKind.CHOICE, '["a","\\u00e9"]')
    assert Constraint.grammar('start: "a"') == Constraint(ConstraintKind.GRAMMAR, 'start: "a"')


def test_a_schema_is_the_same_however_it_was_spaced_and_its_order_stays() -> None:
    schema = {"properties": {"b": {}, "a": {}}, "type": "object"}
    assert Constraint.json_schema(schema) == Constraint.json_schema(json.dumps(schema, indent=3))
    assert Constraint.json_schema(schema).source == '{"properties":{"b":{},"a":{}},"type":"object"}'
    assert len({Constraint.json_schema(schema), Constraint.json_schema(json.dumps(schema))}) == 1


def test_a_schema_that_is_changed_later_does_not_change_the_constraint() -> None:
    schema: dict[str, Any] = {"type": "object"}
    constraint = Constraint.json_schema(schema)
    schema["type"] = "array"
    assert constraint.source == '{"type":"object"}'
    with pytest.raises(dataclasses.FrozenInstanceError):
        constraint.source = ""  # type: ignore[misc]


circular: dict[str, Any] = {}
circular["properties"] = circular

REFUSED: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "schema is a list": (Constraint.json_schema, ([1],), "json_schema is [1]: give a JSON object"),
    "schema is a list's text": (Constraint.json_schema, ("[1]",), "json_schema is [1]: give a JSON object"),
    "schema is a boolean": (Constraint.json_schema, ("true",), "json_schema is True: give a JSON object"),
    "schema is no JSON": (Constraint.json_schema, ('{"a":',), "json_schema isn't JSON (Expecting value"),
    "schema holds NaN as text": (Constraint.json_schema, ('{"a":NaN}',), "NaN is no number of JSON"),
    "schema holds NaN": (Constraint.json_schema, ({"a": float("nan")},), "json_schema can't be written as JSON"),
    "schema holds a set": (Constraint.json_schema, ({"enum": {1}},), "json_schema can't be written as JSON"),
    "schema holds itself": (Constraint.json_schema, (circular,), "json_schema can't be written as JSON"),
    "schema is empty text": (Constraint.json_schema, ("",), "json_schema is '': give a text that isn't empty"),
    "schema is deep": (Constraint.json_schema, (nested(61),), "json_schema is nested deeper than 60 levels"),
    "schema is very deep": (Constraint.json_schema, ('{"a":' * 9000 + "1" + "}" * 9000,), "json_schema isn't JSON ("),
    "schema is large": (Constraint.json_schema, ({"x": "y" * 65536},), "json_schema has 65544 characters, limit 65536"),
    "huge integer": (Constraint.json_schema, ('{"a":' + "9" * 5000 + "}",), "json_schema isn't JSON ("),
    "regex is empty": (Constraint.regex, ("",), "regex is '': give a text that isn't empty"),
    "regex is no text": (Constraint.regex, (5,), "regex is 5: give a text"),
    "regex is long": (Constraint.regex, ("a" * 16385,), "regex has 16385 characters, limit 16384: shorten it"),
    "regex isn't Unicode": (Constraint.regex, ("\ud800",), "regex isn't valid Unicode (surrogates not allowed)"),
    "one choice": (Constraint.choice, ("abc",), "choice is 'abc': give a list of strings"),
    "no choice": (Constraint.choice, ([],), "choice is []: give a list of 1 to 1000 strings"),
    "many choices": (Constraint.choice, (["a"] * 1001,), "give a list of 1 to 1000 strings"),
    "an empty choice": (Constraint.choice, (["a", ""],), "an entry of choice is '': give strings of 1 to 1000"),
    "a long choice": (Constraint.choice, (["a" * 1001],), "give strings of 1 to 1000 characters"),
    "a choice is a number": (Constraint.choice, (["a", 3],), "an entry of choice is 3: give strings"),
    "a choice isn't Unicode": (Constraint.choice, (["\udfff"],), "an entry of choice isn't valid Unicode"),
    "choices are large": (
        Constraint.choice,
        (["a" * 997 + str(i) for i in range(100, 200)],),
        "choice has 100301 char",
    ),
    "grammar is empty": (Constraint.grammar, ("",), "grammar is '': give a text that isn't empty"),
    "grammar is large": (Constraint.grammar, ("#" * 65537,), "grammar has 65537 characters, limit 65536"),
    "kind is a string": (Constraint, ("regex", "a"), "the kind of a constraint is 'regex': give a ConstraintKind"),
    "object with a source": (Constraint, (ConstraintKind.JSON_OBJECT, "{}"), "json_object has no source"),
    "schema's source": (Constraint, (ConstraintKind.JSON_SCHEMA, "[]"), "json_schema is []: give a JSON object"),
    "choice's source": (Constraint, (ConstraintKind.CHOICE, "[1]"), "an entry of choice is 1: give strings"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, arguments, message = REFUSED[name]
    start = time.process_time()
    with pytest.raises(SamplingParamsError) as caught:
        make(*arguments)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 200
    assert time.process_time() - start < 0.5


def test_the_largest_are_taken() -> None:
    assert Constraint.json_schema(nested(60)).source.count("items") == 59
    Constraint.choice([f"{i:0>50}" for i in range(1000)])
    Constraint.regex("a" * 16384)


@pytest.mark.parametrize("wrong", [{"type": "object"}, "json_object", ConstraintKind.JSON_OBJECT, True])
def test_params_take_constraints_only(wrong: Any) -> None:
    assert SamplingParams(constraint=Constraint.json_object()).constraint == Constraint.json_object()
    with pytest.raises(SamplingParamsError, match=r"constraint is .*: give a Constraint, or None"):
        SamplingParams(constraint=wrong)
