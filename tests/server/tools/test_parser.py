"""Calls and content in answers, however these are cut."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlserve.server.tools.deltas import Call, CallArguments, CallStart, Content, Delta, join
from mlserve.server.tools.formats import FORMATS, JSON_ANSWER
from mlserve.server.tools.parser import CallParser, new_call_id

FORMS = {**FORMATS, JSON_ANSWER.name: JSON_ANSWER}


def new_parser(form: str, **options: Any) -> CallParser:
    ids = (f"id{i}" for i in itertools.count())
    settings: dict[str, Any] = {"tool_names": ["f", "g"], "end_of_turn": ["", "<|im_end|>"], "new_id": ids.__next__}
    return CallParser(FORMS[form], **settings | options)


def deltas(form: str, pieces: Iterable[str], **options: Any) -> list[Delta]:
    parser = new_parser(form, **options)
    return [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()


def read(form: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    """Content, and names and arguments, of an answer in one piece: which are the same however it is cut in two."""
    whole = join(deltas(form, [text]))
    for at in range(len(text) + 1):
        assert join(deltas(form, [text[:at], text[at:]])) == whole, f"cut at {at}"
    assert join(deltas(form, text)) == whole
    content, calls = whole
    assert [call.id for call in calls] == [f"id{i}" for i in range(len(calls))]
    return content, [(call.name, call.arguments) for call in calls]


# Whole calls

NESTED = '{"a": {"b": [1, {"c": "}"}]}, "d": "<tool_call> [TOOL_CALLS] \\" \\\\", "e": "\\u00e9 é 😀"}'


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'),
        ("hermes", '<tool_call>{"arguments":%s,"name":"f"}</tool_call>'),
        ("hermes", '<tool_call>[\n{"name": "f", "arguments": %s}\n]</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "parameters": %s}'),
        ("llama3_json", '{"name": "f", "parameters": %s}'),
        ("llama3_json", '\n{"type": "function", "name": "f", "parameters": %s}\n'),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": %s}'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": %s}]'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": %s, "id": "123456789"}]'),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": %s}'),
        ("mistral", "[TOOL_CALLS]f[ARGS]%s"),
        ("mistral", "[TOOL_CALLS] f[CALL_ID]123456789[ARGS] %s"),
        ("mistral", "[TOOL_CALLS]f%s"),
        ("json", '{"name": "f", "arguments": %s}'),
        ("json", '{"arguments": %s, "name": "f"}'),
    ],
)
@pytest.mark.parametrize("arguments", ["{}", '{"n1": 2, "n2": 2}', NESTED, '{ "spaced" :\n[ ] }'])
@pytest.mark.parametrize("end", ["", "<|im_end|>"])
def test_arguments_come_out_as_they_were_written(form: str, text: str, arguments: str, end: str) -> None:
    assert read(form, text % arguments + end) == ("", [("f", arguments)])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g", "arguments": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f"}<tool_call>{"name": "g", "arguments": {"a": 1}}'),
        ("hermes", '<tool_call>[{"name": "f"}, {"name": "g", "arguments": {"a": 1}}]</tool_call>\n'),
        ("hermes", '<tool_call>[{"name": "f"}, {"name": "g", "arguments": {"a": 1}}'),
        ("llama3_json", '{"name": "f"}; {"name": "g", "parameters": {"a": 1}};'),
        ("mistral", '[TOOL_CALLS] [{"name": "f"}, {"name": "g", "arguments": {"a": 1}}]'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{"a": 1}'),
        ("pythonic", "[f(), g(a=1)]"),
        ("pythonic", "<|python_tag|>[ f( ) ,g( a = 1, ) ] "),
    ],
)  # fmt: skip
def test_several_calls(form: str, text: str) -> None:
    assert read(form, text) == ("", [("f", "{}"), ("g", '{"a": 1}')])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("'it\\'s'", '"it\'s"'),
        ('"a, b) ]"', '"a, b) ]"'),
        ("True", "true"),
        ("true", "true"),
        ("None", "null"),
        ("-1.50", "-1.50"),
        ("1_000", "1000"),
        ("[1, (2, 3), {'k': None}]", '[1, [2, 3], {"k": null}]'),
        ('{"k": [true, 1.0]}', '{"k": [true, 1.0]}'),
        ("'\\x41é'", '"Aé"'),
    ],
)
def test_python_literals_become_json(value: str, expected: str) -> None:
    text = f"[f(a={value}, class='x')]"
    assert read("pythonic", text) == ("", [("f", f'{{"a": {expected}, "class": "x"}}')])


def test_content_around_calls() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert read("hermes", f"I'll look.\n\n{call}") == ("I'll look.", [("f", "{}")])
    assert read("hermes", f"\n\n{call}\n\nDone. \n") == ("\n\nDone. \n", [("f", "{}")])
    assert read("hermes", f"a {call} b {call} ") == ("a b", [("f", "{}"), ("f", "{}")])
    assert read("llama3_json", '{"name": "f"} is what I called') == (" is what I called", [("f", "{}")])
    assert read("hermes", "<tool_call>[]</tool_call>") == ("", [])  # SmolLM2: no call is needed


# What isn't a call


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", ""),
        ("hermes", "  \n"),
        ("hermes", "plain < text <tool_ call> and <|im_start|> 1 < 2 <"),
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>oops</tool_call> <tool_call> more"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "other": 1}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "no name", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "name": "g"}</tool_call>'),
        ("hermes", f'<tool_call>{{"name": "{"f" * 65}"}}</tool_call>'),
        ("hermes", '{"name": "f", "arguments": {}}'),
        ("llama3_json", '{"answer": {"name": "f"}}'),
        ("llama3_json", '{"name": "Bob", "parameters": {}}'),
        ("llama3_json", 'Call {"name": "f", "parameters": {}}'),
        ("llama3_json", '[{"name": "f", "parameters": {}}]'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS]I can't call"),
        ("mistral", "[TOOL_CALLS]f[ARGS]none"),
        ("mistral", "[TOOL_CALLS]f[CALL_ID][ARGS]{}"),
        ("mistral", "[1] [TOOL_RESULTS] [T"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[f](http://example.org)"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(a=b)]"),
        ("pythonic", "[f(a=1+2)]"),
        ("pythonic", "[f(a=[True, 1e999])]"),
        ("pythonic", "[f(a=b'x')]"),
        ("pythonic", "[f(a={1})]"),
        ("pythonic", "[f(a=1, a=2)]"),
        ("pythonic", "[f(a='\\d')]"),
        ("pythonic", "[f(a='\\ud800')]"),
        ("pythonic", "[f(a=[1)]"),
        ("pythonic", f"[f(a={'[' * 1000}"),
        ("pythonic", "[f(a=__import__('os'))]"),
        ("pythonic", "[h(a=1)]"),
        ("pythonic", "see [f(a=1)]"),
        ("json", "I can't"),
        ("json", '{"name": "h", "arguments": {}}'),
    ],
)
def test_what_is_no_call_is_content_unchanged(form: str, text: str) -> None:
    assert read(form, text) == (text, [])


def test_a_failed_call_hides_no_later_one() -> None:
    bad = '<tool_call>{"name": "f", "arguments": {"a": {"b": 1}'
    good = '<tool_call>{"name": "g"}</tool_call>'
    assert read("hermes", f"{bad}</tool_call>\n{good}") == (f"{bad}</tool_call>", [("g", "{}")])
    assert read("hermes", bad + good) == (bad, [("g", "{}")])
    assert read("mistral", "[TOOL_CALLS][TOOL_CALLS]g[ARGS]{}") == ("[TOOL_CALLS]", [("g", "{}")])
    assert read("hermes", '<tool_call>[{"name": "f"}, {"name": 1}]</tool_call>') == (
        ', {"name": 1}]</tool_call>',
        [("f", "{}")],
    )


def test_what_a_model_quotes_in_a_string_never_becomes_a_call() -> None:
    for end in ("", "\n", "<|im_end|>"):
        text = '[TOOL_CALLS]f[ARGS]{"text": "he wrote [TOOL_CALLS]g[ARGS]{} to me'
        assert read("mistral", text + end) == ((text + end).removesuffix("<|im_end|>"), [])


def test_marked_calls_may_name_unknown_tools() -> None:
    """The client decides what to make of it; a bare object is too little of a sign."""
    assert read("hermes", '<tool_call>{"name": "unknown"}</tool_call>') == ("", [("unknown", "{}")])
    assert read("llama3_json", '<|python_tag|>{"name": "unknown"}') == ("", [("unknown", "{}")])


# End of turn


def test_the_end_of_turn_is_left_out_at_the_end_only() -> None:
    assert read("hermes", "Hello <|im_end|>") == ("Hello ", [])
    assert read("hermes", "<|im_end|>") == ("", [])
    assert read("hermes", "the token <|im_end|> ends") == ("the token <|im_end|> ends", [])
    assert read("hermes", "<|im_end|> <|im_end|>") == ("<|im_end|> ", [])
    assert read("hermes", "cut off <|im_e") == ("cut off <|im_e", [])
    assert read("hermes", '<tool_call>{"name": "f"<|im_end|>') == ('<tool_call>{"name": "f"', [])


# When deltas come


def test_content_is_held_back_only_while_it_may_be_a_mark() -> None:
    parser = new_parser("hermes")
    assert parser.feed("Hi there") == [Content("Hi there")]
    assert parser.feed(" ") == []
    assert parser.feed("a <tool") == [Content(" a")]
    assert parser.feed("box") == [Content(" <toolbox")]
    assert parser.feed("<tool_call>x") == [Content("<tool_call>x")]
    assert parser.finish() == []


def test_json_that_is_no_call_is_given_out_at_its_first_foreign_key() -> None:
    parser = new_parser("llama3_json")
    assert parser.feed('{"answ') == []
    assert parser.feed('er":') == [Content('{"answer":')]
    assert parser.feed(" 42}") == [Content(" 42}")]


def test_a_name_is_waited_for_so_long_only() -> None:
    parser = new_parser("llama3_json")
    assert parser.feed('{"' + "x" * 128) == []
    assert parser.feed("xx") == [Content('{"' + "x" * 130)]


def test_a_free_call_is_given_out_when_it_is_complete() -> None:
    parser = new_parser("hermes")
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a": 1}') == []
    assert parser.num_calls == 0
    assert parser.feed("}") == [CallStart(0, "id0", "f"), CallArguments(0, '{"a": 1}')]
    assert parser.num_calls == 1
    assert parser.feed("\n</tool_call>") == []
    assert parser.finish() == []


def test_a_constrained_call_is_given_out_as_it_comes() -> None:
    parser = new_parser("json")
    assert parser.feed('{"name": "f') == []
    assert parser.feed('", "argum') == [CallStart(0, "id0", "f")]
    assert parser.feed('ents": {"a": "x') == [CallArguments(0, '{"a": "x')]
    assert parser.feed('y"}') == [CallArguments(0, 'y"}')]
    assert parser.feed("}") == []
    assert parser.finish() == []


@pytest.mark.parametrize("text", ['{"name": "f"', '{"name": "f", "arg', '{"name": "f", "arguments": '])
def test_a_constrained_call_that_is_cut_off_has_its_arguments_so_far(text: str) -> None:
    assert read("json", text) == ("", [("f", "")])
    whole = '{"name": "f", "arguments": {"a": "x'
    assert read("json", whole) == ("", [("f", '{"a": "x')])


def test_ids_suit_every_template() -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(made) == 9 and made.isascii() and made.isalnum() for made in ids)


def test_long_calls_take_linear_time() -> None:
    arguments = json.dumps({"text": "x\n" * 100_000})
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    start = time.perf_counter()
    found = deltas("hermes", (text[i : i + 4] for i in range(0, len(text), 4)))
    assert time.perf_counter() - start < 5.0  # 0.3 s here; a quadratic parser takes minutes
    assert join(found) == ("", (Call("id0", "f", arguments),))


# Any text, cut anywhere

PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|im_end|>", "f", "g(",
     '{"name": "f"', ', "arguments": ', '{"a": "b"}', "}", "[", "]", "{", '"', "\\", ";", ",", " ", "\n", "f(a=1)", ")",
     '{"name": "g", "parameters": {}}', "é", "text"]
)  # fmt: skip


EMPTY_LIST = re.compile(r"(<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>)\s*\[\s*\]")


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = "".join(draw(st.lists(PIECES | st.text(max_size=3), max_size=16)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return text, [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=200, deadline=None)
@given(cut=cut_texts())
def test_cuts_change_nothing(form: str, cut: tuple[str, list[str]]) -> None:
    text, pieces = cut
    content, calls = join(deltas(form, [text]))
    assert join(deltas(form, pieces)) == (content, calls)
    assert join(deltas(form, text)) == (content, calls)
    if not calls:  # then nothing is lost
        assert content in (text, text.removesuffix("<|im_end|>")) or EMPTY_LIST.search(text)
    if form != "json":
        assert all(isinstance(json.loads(call.arguments), dict) for call in calls)


@settings(max_examples=200, deadline=None)
@given(cut=cut_texts())
def test_indexes_count_up(cut: tuple[str, list[str]]) -> None:
    def starts(found: Iterable[Delta]) -> Iterator[int]:
        for delta in found:
            if isinstance(delta, CallStart):
                yield delta.index

    for form in FORMS:
        found = deltas(form, cut[1])
        indexes = list(starts(found))
        assert indexes == list(range(len(indexes)))
        assert all(delta.text for delta in found if not isinstance(delta, CallStart))
        begun = -1
        for delta in found:
            begun = delta.index if isinstance(delta, CallStart) else begun
            assert not isinstance(delta, CallArguments) or delta.index == begun


JSON_ARGUMENTS = st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.text()))


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "json"])
@settings(max_examples=50, deadline=None)
@given(given_arguments=st.lists(JSON_ARGUMENTS, min_size=1, max_size=3), size=st.integers(1, 9))
def test_what_a_format_writes_is_what_it_reads(name: str, given_arguments: list[dict[str, Any]], size: int) -> None:
    if name == "json":
        given_arguments = given_arguments[:1]
    text = FORMS[name].write([("f", arguments) for arguments in given_arguments])
    content, calls = join(deltas(name, (text[i : i + size] for i in range(0, len(text), size))))
    assert content == ""
    assert [json.loads(call.arguments) for call in calls] == given_arguments


def test_what_the_pythonic_format_writes_is_what_it_reads() -> None:
    arguments = {"a": 'it\'s "x"\n', "b": [True, None, {"c": 1.5}]}
    content, calls = join(deltas("pythonic", [FORMATS["pythonic"].write([("f", arguments), ("g", {})])]))
    assert content == ""
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("f", arguments), ("g", {})]
