"""The scanner of JSON objects, against Python's own parser."""

from __future__ import annotations

import json
from typing import NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlserve.server.tools.json_scanner import MAX_DEPTH, JsonScanner, NotJsonError

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)
OBJECTS = st.dictionaries(st.text(), VALUES)


def end_of_object(text: str) -> int | None:
    """How many characters the scanner takes for an object at the beginning of the text; None if they are none."""
    scanner = JsonScanner()
    for at, char in enumerate(text, start=1):
        try:
            if scanner.feed(char):
                return at
        except NotJsonError:
            return None
    return None


def is_object(text: str) -> bool:
    """Python's opinion."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(constant)

    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict)
    except ValueError:
        return False


@settings(max_examples=60, deadline=None)
@given(OBJECTS, st.booleans(), st.sampled_from([None, 1]), st.text())
def test_objects_end_where_they_end(value: object, ascii_only: bool, indent: int | None, behind: str) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert end_of_object(text + behind) == len(text)


@settings(max_examples=60, deadline=None)
@given(OBJECTS, st.data())
def test_damaged_objects_are_taken_just_as_python_takes_them(value: object, data: st.DataObject) -> None:
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text)))
    piece = data.draw(st.text(alphabet='{}[],:"\\ 0e+-.tn\n', max_size=2))
    damaged = (text[:at] + piece + text[at + data.draw(st.integers(0, 2)) :]).lstrip()
    end = end_of_object(damaged)
    if end is None:
        assert not is_object(damaged)
    else:
        assert is_object(damaged[:end])


@pytest.mark.parametrize(
    "text",
    ['[1]', '"a"', '{"a": 01}', '{"a": .5}', '{"a": 1.}', '{"a": NaN}', '{"a": tru}', '{"a": nulll}', '{"a": +1}',
     '{"a": 1,}', '{"a": [1,]}', '{,}', '{"a"}', '{"a": }', "{'a': 1}", '{"a": "\n"}', '{"a": "\\x"}',
     '{"a": "\\u12g4"}', '{"a": [}', '{"a": [1}}', '{"a": 1 2}', ' {}'],
)  # fmt: skip
def test_no_objects(text: str) -> None:
    assert end_of_object(text) is None


def test_depth_is_bounded() -> None:
    def nested(depth: int) -> str:
        return '{"a": ' * (depth - 1) + "{}" + "}" * (depth - 1)

    assert end_of_object(nested(MAX_DEPTH)) == len(nested(MAX_DEPTH))
    assert end_of_object(nested(MAX_DEPTH + 1)) is None
