"""Grammars of constraints: what they admit, what is refused and how soon, and what is kept."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import EOS
from vocabularies import sentence_piece_fields, write_gguf

from mlserve.constraint import Constraint
from mlserve.engine import constraints
from mlserve.engine.constraints import ConstraintCompiler, GrammarMatcher
from mlserve.engine.tokenizer import Tokenizer, load_tokenizer
from mlserve.errors import SamplingParamsError


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_gguf(tmp_path_factory.mktemp("gguf") / "spm.gguf", sentence_piece_fields()))


@pytest.fixture(scope="module", params=["tokenizer", "sentence_piece"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def compiler(tokenizer: Tokenizer) -> ConstraintCompiler:
    return ConstraintCompiler(tokenizer, tokenizer.vocab_size, (EOS,))


def mask(matcher: GrammarMatcher) -> list[int]:
    """The tokens that may follow."""
    words = np.empty((1, matcher.masks.num_words), np.int32)
    matcher.masks.write([matcher], words)
    assert matcher.error is None, matcher.error
    return np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist()


def follow(matcher: GrammarMatcher, tokens: list[int]) -> bool:
    """Whether the matcher lets these tokens come, one by one."""
    for token in tokens:
        if matcher.is_complete or token not in mask(matcher):
            return False
        matcher.advance(token)
    return True


def admits(compiler: ConstraintCompiler, constraint: Constraint, text: str, tokenizer: Tokenizer) -> bool:
    """Whether a text is an answer: its tokens may come, and then the end."""
    matcher = compiler.compile(constraint).matcher()
    fits = follow(matcher, tokenizer.encode_pieces([0, text])[1:])
    return fits and (matcher.is_complete or EOS in mask(matcher))


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHOICES = ["yes", "yes, sir", 'a/"b"\\n', "世\n"]
ADMITTED: list[tuple[Constraint, list[str], list[str]]] = [
    (
        Constraint.json_object(),
        ['{"a": [1, {"b": null}]}', '{ }', '{\n  "é世😀": "\\n"\n}', '{"a":-1.5e3}'],
        ["[1]", '"a"', '{"a"}', "{'a': 1}", '{"a": 01}', '{"a": NaN}', '{"a": "\n"}', '{"a":     1}', '{\n\n}', '{}\n'],
    ),
    (
        Constraint.json_schema(PERSON),
        ['{"name": "John", "age": 31}', '{"name":"世","age":0}'],
        ['{"name": "John"}', '{"age": 31, "name": "John"}', '{"name": "J", "age": 151}', '{"name": "J", "age": 1.5}'],
    ),
    (Constraint.json_schema({"type": "integer"}), ["1", "-20"], ["a", "1.0", "01", ""]),
    (Constraint.regex(r"[a-c]{2}\d?"), ["ab", "cc7"], ["a", "ad", "ab77", "ab "]),
    (Constraint.regex("^é+$"), ["é", "éé"], ["e", "éa", ""]),
    (Constraint.choice(CHOICES), CHOICES, ["ye", "no", "yes,"]),
    (Constraint.grammar('start: item ("," item)*\nitem: /[0-9]+/'), ["1", "1,22,3"], ["1,", ",1", "1;2"]),
]  # fmt: skip


@pytest.mark.parametrize("case", ADMITTED, ids=[case[0].kind + case[0].source[:20] for case in ADMITTED])
def test_what_is_admitted(any_tokenizer: Tokenizer, case: tuple[Constraint, list[str], list[str]]) -> None:
    compiler = ConstraintCompiler(any_tokenizer, any_tokenizer.vocab_size, (EOS,))
    constraint, good, bad = case
    assert [text for text in good if not admits(compiler, constraint, text, any_tokenizer)] == []
    assert [text for text in bad if admits(compiler, constraint, text, any_tokenizer)] == []


def test_nothing_is_built_before_the_first_constraint(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    spelling = Tokenizer.token_bytes
    monkeypatch.setattr(Tokenizer, "token_bytes", lambda self, i: asked.append(i) or spelling(self, i))
    compiler = ConstraintCompiler(tokenizer, 300, ())
    assert asked == []
    compiler.compile(Constraint.json_object())
    compiler.compile(Constraint.regex("a"))
    assert asked == list(range(320))


def test_the_mask_has_the_end_where_the_grammar_may_end(compiler: ConstraintCompiler) -> None:
    digits = [*range(ord("0"), ord("9") + 1)]
    matcher = compiler.compile(Constraint.regex("[0-9]{1,2}")).matcher()
    assert mask(matcher) == digits
    matcher.advance(ord("5"))
    assert mask(matcher) == [*digits, EOS]
    assert mask(matcher) == [*digits, EOS]  # asking changes nothing
    assert not matcher.is_complete
    matcher.advance(ord("5"))
    assert matcher.is_complete
    assert matcher.error is None


def test_a_matcher_that_may_not_end_goes_on(compiler: ConstraintCompiler) -> None:
    matcher = compiler.compile(Constraint.regex("[01]+")).matcher(may_end=False)
    assert follow(matcher, [ord("0")] * 5)
    assert mask(matcher) == [ord("0"), ord("1")]


@pytest.mark.parametrize("eos", [(), (EOS,), (EOS, 300, 319), (EOS, 9999)])
@pytest.mark.parametrize("vocab_size", [200, 320, 500])  # fewer than the tokenizer's 320, as many, more
def test_any_ends_and_any_size_of_vocabulary(tokenizer: Tokenizer, eos: tuple[int, ...], vocab_size: int) -> None:
    matcher = ConstraintCompiler(tokenizer, vocab_size, eos).compile(Constraint.regex("a*")).matcher()
    assert matcher.masks.num_words * 32 > max(vocab_size, 320)
    assert [token for token in mask(matcher) if token < max(vocab_size, 320)] == [
        ord("a"),
        *(e for e in eos if e < 9999),
    ]


def test_special_tokens_come_only_if_the_grammar_names_them(compiler: ConstraintCompiler, tokenizer: Tokenizer) -> None:
    assert not set(mask(compiler.compile(Constraint.regex("(.|\n)+")).matcher())) & tokenizer.special_ids
    named = compiler.compile(Constraint.grammar('start: "a" <|im_start|> "b"')).matcher()
    assert follow(named, [ord("a"), tokenizer.token_id("<|im_start|>"), ord("b")])
    assert named.is_complete


def test_a_token_that_may_not_follow_fails_the_matcher(compiler: ConstraintCompiler) -> None:
    matcher = compiler.compile(Constraint.choice(["yes", "no"])).matcher()
    matcher.advance(ord("x"))
    assert matcher.error is not None
    assert matcher.error.startswith("the answer can't follow its constraint any further: ")
    assert "\n" not in matcher.error


def test_matchers_are_independent(compiler: ConstraintCompiler) -> None:
    compiled = compiler.compile(Constraint.choice(["yes", "no"]))
    first, second = compiled.matcher(), compiled.matcher()
    first.advance(ord("y"))
    assert mask(first) == [ord("e")]
    assert mask(second) == [ord("n"), ord("y")]


def test_as_many_choices_as_may_be_given(compiler: ConstraintCompiler, tokenizer: Tokenizer) -> None:
    choices = [f"{i * 7919 % 1000:03} {i}" for i in range(1000)]
    constraint = Constraint.choice(choices)
    assert all(admits(compiler, constraint, text, tokenizer) for text in choices[::50])
    assert not admits(compiler, constraint, "000 1", tokenizer)


def test_an_object_of_many_properties(compiler: ConstraintCompiler, tokenizer: Tokenizer) -> None:
    constraint = Constraint.json_schema(
        {
            "type": "object",
            "properties": {f"p{i}": {"type": "null"} for i in range(1000)},
            "additionalProperties": False,
        }
    )
    assert admits(compiler, constraint, '{"p7": null, "p800": null}', tokenizer)
    assert not admits(compiler, constraint, '{"p1000": null}', tokenizer)


# Kept


def test_equal_constraints_are_compiled_once(compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiler.compile(Constraint.json_schema(PERSON))
    monkeypatch.setattr(constraints, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compiler.compile(Constraint.json_schema(PERSON)) is compiled


def test_few_are_kept_and_those_that_somebody_holds(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "MAX_CACHED", 2)
    held = compiler.compile(Constraint.regex("held"))
    first = weakref.ref(compiler.compile(Constraint.regex("first")))
    for text in ("second", "third"):
        compiler.compile(Constraint.regex(text))
    gc.collect()
    assert first() is None
    assert compiler.compile(Constraint.regex("held")) is held


def test_many_threads_at_once(compiler: ConstraintCompiler) -> None:
    found: list[Any] = []

    def work(i: int) -> None:
        found.append((i % 4, compiler.compile(Constraint.regex(f"[ab]{{{i % 4 + 1}}}"))))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len({id(compiled) for _, compiled in found}) == 4
    assert all(follow(compiled.matcher(), [ord("a")] * (i + 1)) for i, compiled in found)


# Refused


def doubling(levels: int, keyword: str) -> dict[str, Any]:
    """Each definition refers to the next one twice."""
    refs = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    return {"$defs": {**refs, f"d{levels}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def branching(levels: int) -> dict[str, Any]:
    """The branches of all levels multiply."""
    schema: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}}
    for i in range(levels):
        either = [{"properties": {f"{letter}{i}": {"type": "string"}}} for letter in "ab"]
        schema = {"allOf": [schema, {"anyOf": either}]}
    return schema


REFUSED: dict[str, tuple[Constraint, str]] = {
    "remote reference": (Constraint.json_schema({"$ref": "http://example.com/s"}), "Resource 'http://example.com/s'"),
    "reference to a file": (Constraint.json_schema({"$ref": "file:///etc/passwd"}), "Resource 'file:///etc/passwd'"),
    "remote, in a grammar": (Constraint.grammar('start: %json {"$ref":"http://a/b"}'), "Resource 'http://a/b'"),
    "missing definition": (Constraint.json_schema({"$ref": "#/$defs/a"}), "Pointer '/$defs/a' does not exist"),
    "refers to itself": (Constraint.json_schema({"$ref": "#"}), "NoExtension"),
    "unknown type": (Constraint.json_schema({"type": "strin"}), "Invalid type: strin"),
    "unknown format": (Constraint.json_schema({"type": "string", "format": "xyz"}), "Unknown format: xyz"),
    "unsupported keyword": (Constraint.json_schema({"type": "array", "uniqueItems": True}), '["uniqueItems"]'),
    "contradiction": (Constraint.json_schema({"allOf": [{"type": "string"}, {"type": "integer"}]}), "Unsatisfiable"),
    "branches": (Constraint.json_schema(branching(16)), "schema too large"),
    "many properties": (
        Constraint.json_schema({"type": "object", "properties": {f"p{i}": {} for i in range(2000)}}),
        "Current row has",
    ),
    "lone surrogate": (Constraint.json_schema({"const": "\ud800"}), "unexpected end of hex escape"),
    "huge number": (Constraint.json_schema({"const": 10**400}), "number out of range"),
    "look-ahead": (Constraint.regex("(?=a)a"), "look-around"),
    "back-reference": (Constraint.regex(r"(a)\1"), "backreferences are not supported"),
    "open group": (Constraint.regex("(a"), "unclosed group"),
    "deep groups": (Constraint.regex("(" * 3000 + "a" + ")" * 3000), "invalid regex"),
    "intersections": (
        Constraint.grammar(r"start: /.*a.{15}b.*/ & /.*c.{15}d.*/ & /.*e.{15}f.*/"),
        "",
    ),
    "empty answer only": (Constraint.regex("a{0}"), "allows the empty answer only"),
    "no answer": (Constraint.grammar("start: a\na: b\nb: a"), "NoExtension"),
    "unknown rule": (Constraint.grammar("start: foo"), 'unknown name: "foo"'),
    "no grammar": (Constraint.grammar("hello"), ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason_and_soon(compiler: ConstraintCompiler, name: str) -> None:
    constraint, message = REFUSED[name]
    start = time.thread_time()
    with pytest.raises(SamplingParamsError, match=rf"^the constraint {constraint.kind.value} ") as caught:
        compiler.compile(constraint)
    assert time.thread_time() - start < 2
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


HOSTILE: dict[str, Constraint] = {
    "doubling anyOf": Constraint.json_schema(doubling(40, "anyOf")),
    "doubling allOf": Constraint.json_schema(doubling(40, "allOf")),
    "recursion": Constraint.json_schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
    "a huge enum": Constraint.json_schema({"enum": [f"{i * 7919 % 10**7:07}" for i in range(6000)]}),
    "a long enum": Constraint.json_schema({"enum": ["x" * 15_000]}),
    "many items": Constraint.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 10**6}),
    "a long string": Constraint.json_schema({"type": "string", "minLength": 10**9}),
    "repeated repeats": Constraint.json_schema({"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}),
    "exponential automaton": Constraint.regex("(a|b)*a(a|b){20}c"),
    "backtracking": Constraint.regex("(a|a)*(a|a)*(a|a)*b"),
    "many dots": Constraint.regex("|".join(f"(.*{letter}.{{15}})" for letter in "abcdefghij")),
    "ambiguous": Constraint.grammar('start: e\ne: e e e | e e | "a" | "b"'),
    "nullable": Constraint.grammar('start: e\ne: e e | "a" | ""'),
    "repeats": Constraint.grammar('start: a{1,1000}\na: b{1,1000}\nb: "x" | "y"'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_hostile_takes_bounded_time_at_every_step(compiler: ConstraintCompiler, name: str) -> None:
    """It is refused, or goes on, or fails later; each step's own time stays small."""
    start = time.thread_time()
    try:
        matcher = compiler.compile(HOSTILE[name]).matcher()
    except SamplingParamsError:
        return
    finally:
        assert time.thread_time() - start < 2
    rng = np.random.default_rng(0)
    words = np.empty((1, matcher.masks.num_words), np.int32)
    for _ in range(60):
        start = time.thread_time()
        matcher.masks.write([matcher], words)
        if matcher.error is None:
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0]
            allowed = allowed[allowed < EOS]
            if not allowed.size:
                return
            matcher.advance(int(rng.choice(allowed)))
        assert time.thread_time() - start < 0.5
        if matcher.is_complete or matcher.error is not None:
            return


@pytest.mark.slow
def test_the_embedded_vocabulary_is_built_soon() -> None:
    from mlserve.config import EMBEDDED_MODEL
    from mlserve.model.sources import find_model

    tokenizer = load_tokenizer(Path(find_model(EMBEDDED_MODEL)))
    start = time.process_time()
    compiler = ConstraintCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    compiler.compile(Constraint.json_object())
    assert time.process_time() - start < 3  # 0.3 s when the machine is idle
