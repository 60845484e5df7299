"""Constrained answers through the whole engine, over a model whose logits are random: the grammar alone makes sense."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from engines import generate, make_engine, run, step, submit
from fakes import ScriptedRunner
from random_logits import RandomLogitsRunner
from tiny import EOS, IM_END, VOCABULARY
from vocabularies import sentence_piece_fields, write_gguf

from mlserve.constraint import Constraint
from mlserve.engine import constraints
from mlserve.engine.async_engine import AsyncEngine
from mlserve.engine.engine import Engine
from mlserve.engine.tokenizer import Tokenizer, load_tokenizer
from mlserve.errors import SamplingParamsError
from mlserve.llm import LLM
from mlserve.model.plan import StepPlan, StepResult
from mlserve.request import FinishReason, RequestOutput, SamplingParams

SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "member": {"type": "boolean"},
        },
        "required": ["name", "age", "member"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "place": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Oslo", "Łódź", "東京"]},
                    "zip": {"type": "string", "pattern": "^\\d{5}$"},
                },
                "required": ["city", "zip"],
                "additionalProperties": False,
            },
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 1, "maxItems": 3},
        },
        "required": ["place", "tags"],
        "additionalProperties": False,
    },
    "either": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"const": 7}, "minItems": 2, "maxItems": 2}]},
    "date": {"type": "string", "format": "date"},
    "reference": {
        "$defs": {
            "pair": {
                "type": "array",
                "prefixItems": [{"type": "boolean"}, {"type": "null"}],
                "minItems": 2,
                "maxItems": 2,
            }
        },
        "type": "object",
        "properties": {"first": {"$ref": "#/$defs/pair"}, "second": {"$ref": "#/$defs/pair"}},
        "required": ["first", "second"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_gguf(tmp_path_factory.mktemp("gguf") / "spm.gguf", sentence_piece_fields()))


@pytest.fixture(scope="module", params=["tokenizer", "sentence_piece"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def random_engine(tokenizer: Tokenizer, favours: dict[int, float] | None = None, **options: Any) -> Engine:
    """Its model's vocabulary is wider than the tokenizer's."""
    vocab_size = tokenizer.vocab_size + 30
    runner = RandomLogitsRunner(vocab_size, favours)
    return make_engine(runner, tokenizer, vocab_size=vocab_size, **{"eos": tokenizer.eos_token_ids, **options})


def asked(constraint: Constraint, **params: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 200, "temperature": 1.0, "constraint": constraint, **params})


def alone(tokenizer: Tokenizer, prompt: list[int], params: SamplingParams, **options: Any) -> RequestOutput:
    return generate(random_engine(tokenizer, **options), prompt, params)


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_follow_their_schema(any_tokenizer: Tokenizer, name: str) -> None:
    engine = random_engine(any_tokenizer, num_blocks=400)
    constraint = Constraint.json_schema(SCHEMAS[name])
    for seed in range(6):
        submit(engine, str(seed), [5, 6, seed], asked(constraint, seed=seed))
    texts = set()
    for output in run(engine).values():
        assert (output.error, output.outputs[0].finish_reason) == (None, FinishReason.STOP)
        texts.add(output.outputs[0].text)
        jsonschema_rs.validate(SCHEMAS[name], json.loads(output.outputs[0].text), validate_formats=True)
    assert len(texts) > 1


def test_any_object(any_tokenizer: Tokenizer) -> None:
    """A random model hardly ever ends an object, unless its characters are made likelier."""
    favours = {any_tokenizer.encode_pieces([0, char])[1]: 9.0 for char in '"}'}
    output = alone(any_tokenizer, [5], asked(Constraint.json_object(), seed=1), favours=favours)
    assert output.outputs[0].finish_reason is FinishReason.STOP
    assert isinstance(json.loads(output.outputs[0].text), dict)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_kinds(any_tokenizer: Tokenizer, temperature: float) -> None:
    def text(constraint: Constraint) -> str:
        output = alone(any_tokenizer, [5], asked(constraint, temperature=temperature, seed=3)).outputs[0]
        assert output.finish_reason is FinishReason.STOP
        assert output.stop_reason is None
        return output.text

    assert re.fullmatch("[a-f]{5}-[0-9]{3}", text(Constraint.regex("[a-f]{5}-[0-9]{3}")))
    assert text(Constraint.choice(["blue", "green", "紫 😀"])) in ("blue", "green", "紫 😀")
    assert re.fullmatch("(ab){1,9}c", text(Constraint.grammar('start: "ab"{1,9} "c"')))


def test_where_more_may_follow_the_model_ends_the_answer(tokenizer: Tokenizer) -> None:
    engine = random_engine(tokenizer, favours={IM_END: 3.0})
    output = generate(engine, [5], asked(Constraint.regex("[0-9]+"))).outputs[0]
    assert output.finish_reason is FinishReason.STOP
    assert output.text.isdigit()
    assert output.token_ids[-1] in (EOS, IM_END)


def test_mixed_batch_equals_alone(any_tokenizer: Tokenizer) -> None:
    params = {
        "greedy": SamplingParams(max_tokens=12),
        "free": SamplingParams(max_tokens=12, temperature=1.0, seed=4),
        "schema": asked(Constraint.json_schema(SCHEMAS["flat"]), seed=1),
        "greedy schema": asked(Constraint.json_schema(SCHEMAS["flat"]), temperature=0.0, max_tokens=30),
        "choice": asked(Constraint.choice(["blue", "black"]), seed=2),
        "edited": asked(Constraint.regex("[a-z]{20}"), seed=5, repetition_penalty=1.3, top_k=3, logit_bias={9: 2.0}),
        "logprobs": asked(Constraint.regex("[a-z]{5}"), seed=5, top_p=0.9),
    }
    engine = random_engine(any_tokenizer)
    for i, (name, own) in enumerate(params.items()):
        submit(engine, name, [5, i], own)
    for name, output in run(engine).items():
        single = alone(any_tokenizer, [5, list(params).index(name)], params[name])
        assert output.outputs[0].token_ids == single.outputs[0].token_ids, name
        assert output.outputs[0].finish_reason is single.outputs[0].finish_reason


def test_preempted_answers_are_the_same(tokenizer: Tokenizer) -> None:
    engine = random_engine(tokenizer, num_blocks=22)
    params = [asked(Constraint.json_schema(SCHEMAS["flat"]), seed=i) for i in range(5)]
    for i, own in enumerate(params):
        submit(engine, str(i), [5, 6, i], own)
    outputs = run(engine)
    assert sum(output.metrics.preemptions for output in outputs.values()) > 0
    for i, own in enumerate(params):
        assert outputs[str(i)].outputs[0].token_ids == alone(tokenizer, [5, 6, i], own).outputs[0].token_ids


def test_each_of_n_has_its_own_place(tokenizer: Tokenizer) -> None:
    output = alone(tokenizer, [5], asked(Constraint.json_schema(SCHEMAS["flat"]), n=3, seed=7))
    texts = [completion.text for completion in output.outputs]
    assert len(set(texts)) == 3
    for text in texts:
        jsonschema_rs.validate(SCHEMAS["flat"], json.loads(text))


def test_the_same_seed_gives_the_same_answer(tokenizer: Tokenizer) -> None:
    def text(seed: int) -> str:
        return alone(tokenizer, [5], asked(Constraint.json_schema(SCHEMAS["nested"]), seed=seed)).outputs[0].text

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_a_matcher_is_given_up_at_the_end(tokenizer: Tokenizer) -> None:
    engine = random_engine(tokenizer)
    request = engine.prepare("r", [5], asked(Constraint.choice(["a"]), n=2))
    engine.submit(request)
    assert all(sequence.matcher is not None for sequence in request.sequences)
    run(engine)
    assert all(sequence.matcher is None for sequence in request.sequences)


# With other settings


def finished(
    tokenizer: Tokenizer, constraint: Constraint, favours: dict[int, float] | None = None, **params: Any
) -> Any:
    output = alone(
        tokenizer, [5], asked(constraint, **{"temperature": 0.0, "max_tokens": 20, **params}), favours=favours
    )
    return output.outputs[0].text, output.outputs[0].finish_reason, output.error


def test_max_tokens_cuts(tokenizer: Tokenizer) -> None:
    text, reason, _ = finished(tokenizer, Constraint.regex("[ab]{9}"), max_tokens=4)
    assert re.fullmatch("[ab]{4}", text)
    assert reason is FinishReason.LENGTH


def test_the_last_token_allowed_may_complete_it(tokenizer: Tokenizer) -> None:
    assert finished(tokenizer, Constraint.choice(["abcd"]), max_tokens=4) == ("abcd", FinishReason.STOP, None)


def test_a_complete_answer_ends_below_min_tokens(tokenizer: Tokenizer) -> None:
    assert finished(tokenizer, Constraint.choice(["abc"]), min_tokens=9) == ("abc", FinishReason.STOP, None)


def test_min_tokens_keeps_the_model_from_ending(tokenizer: Tokenizer) -> None:
    likely_end = {EOS: 50.0}
    assert finished(tokenizer, Constraint.regex("[ab]+"), likely_end)[0] in ("a", "b")
    text, reason, _ = finished(tokenizer, Constraint.regex("[ab]+"), likely_end, min_tokens=5)
    assert (len(text), reason) == (5, FinishReason.STOP)


def test_ignore_eos_goes_on_as_long_as_the_grammar_does(tokenizer: Tokenizer) -> None:
    text, reason, _ = finished(tokenizer, Constraint.regex("[ab]+"), {EOS: 50.0}, ignore_eos=True)
    assert (len(text), reason) == (20, FinishReason.LENGTH)
    text, reason, _ = finished(tokenizer, Constraint.regex("[ab]{2,7}"), {EOS: 50.0}, ignore_eos=True)
    assert (len(text), reason) == (7, FinishReason.STOP)


def test_a_stop_string_cuts(tokenizer: Tokenizer) -> None:
    assert finished(tokenizer, Constraint.choice(["one, two"]), stop=",") == ("one", FinishReason.STOP, None)


def test_a_stop_token_of_the_grammar_ends_it(tokenizer: Tokenizer) -> None:
    assert finished(tokenizer, Constraint.choice(["abc"]), stop_token_ids=[ord("b")])[:2] == ("ab", FinishReason.STOP)


def test_bias_and_bans_choose_among_what_may_follow(tokenizer: Tokenizer) -> None:
    either = Constraint.choice(["xx", "yy", "zz"])
    assert finished(tokenizer, either, logit_bias={ord("y"): 50.0})[0] == "yy"
    assert finished(tokenizer, either, logit_bias={ord("a"): 100.0})[0] in ("xx", "yy", "zz")
    assert finished(tokenizer, either, bad_words=["x", "y"])[0] == "zz"
    assert finished(tokenizer, either, allowed_token_ids=[ord("x"), ord("a")])[0] == "xx"


@pytest.mark.parametrize("other", [{"allowed_token_ids": [ord("a")]}, {"bad_words": ["x", "y"]}])
def test_a_contradiction_fails_its_request_only(tokenizer: Tokenizer, other: dict[str, Any]) -> None:
    engine = random_engine(tokenizer)
    submit(engine, "wrong", [5], asked(Constraint.choice(["xx", "yy"]), **other))
    submit(engine, "right", [5], asked(Constraint.choice(["xx", "yy"])))
    outputs = run(engine)
    assert outputs["right"].outputs[0].text in ("xx", "yy")
    assert outputs["wrong"].outputs[0].finish_reason is FinishReason.ERROR
    assert outputs["wrong"].error is not None
    assert outputs["wrong"].error.startswith("no token is left to choose: constraint, allowed_token_ids")


# What goes wrong


def test_a_grammar_that_grows_too_complex_fails_its_request_only(tokenizer: Tokenizer) -> None:
    engine = random_engine(tokenizer, max_model_len=512, num_blocks=300)
    submit(engine, "wrong", [5], asked(Constraint.grammar('start: e\ne: e e e | e e | "a" | "b"'), ignore_eos=True))
    submit(engine, "right", [5], asked(Constraint.regex("[ab]{200}")))
    outputs = run(engine)
    assert len(outputs["right"].outputs[0].text) == 200
    assert outputs["wrong"].outputs[0].finish_reason is FinishReason.ERROR
    assert "can't follow its constraint any further: " in str(outputs["wrong"].error)
    assert len(outputs["wrong"].outputs[0].token_ids) > 10


def test_a_token_outside_the_grammar_fails_its_request(tokenizer: Tokenizer) -> None:
    output = generate(make_engine(ScriptedRunner([97, 98, 99]), tokenizer), [5], asked(Constraint.regex("a+c")))
    assert output.outputs[0].finish_reason is FinishReason.ERROR
    assert output.outputs[0].token_ids == [97, 98]
    assert "can't follow its constraint" in str(output.error)


class FailingOnceRunner(RandomLogitsRunner):
    """Raises after the tokens of its third step were chosen."""

    def run(self, plan: StepPlan[Any]) -> StepResult:
        result = super().run(plan)
        if self.num_steps == 3:
            raise RuntimeError("out of luck")
        return result


def test_a_step_that_is_run_again_advances_once(tokenizer: Tokenizer) -> None:
    runner = FailingOnceRunner(VOCABULARY)
    engine = make_engine(runner, tokenizer, vocab_size=VOCABULARY)
    for i in range(2):
        submit(engine, str(i), [5, i], asked(Constraint.regex("[a-z]{6}"), seed=i))
    outputs = run(engine)
    assert runner.num_steps == 6 + 2
    assert all(re.fullmatch("[a-z]{6}", output.outputs[0].text) for output in outputs.values())


def test_refused_when_the_request_is_made(tokenizer: Tokenizer) -> None:
    engine = random_engine(tokenizer)
    with pytest.raises(SamplingParamsError, match=r"the constraint regex isn't served: .*unclosed group"):
        submit(engine, "r", [5], asked(Constraint.regex("(a")))
    assert not engine.has_work()


# Many callers, and whole models


def test_compiled_ahead_in_a_thread(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = random_engine(tokenizer)
    constraint = Constraint.json_schema(SCHEMAS["flat"])

    async def answer(service: AsyncEngine) -> str:
        held = await asyncio.to_thread(engine.constraints.compile, constraint)
        monkeypatch.setattr(constraints, "_compile", lambda *_: pytest.fail("compiled again"))
        pieces = [output.text async for output in service.stream("r", [5], asked(constraint, seed=2))]
        assert held is not None
        return "".join(pieces)

    with AsyncEngine(engine) as service:
        jsonschema_rs.validate(SCHEMAS["flat"], json.loads(asyncio.run(answer(service))))


def test_unconstrained_requests_build_nothing(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "_Vocabulary", lambda *_: pytest.fail("built"))
    engine = random_engine(tokenizer)
    submit(engine, "r", [5], SamplingParams(max_tokens=3))
    step(engine)
    assert len(run(engine)["r"].outputs[0].token_ids) == 3


def test_a_tiny_model_generates_and_streams(tiny_model_dir: Path) -> None:
    llm = LLM(str(tiny_model_dir), num_blocks=64)
    prompts = ["one", "two", "three"]
    params = [
        SamplingParams(max_tokens=300, temperature=1.5, seed=1, constraint=Constraint.json_schema(schema))
        for schema in (SCHEMAS["flat"], SCHEMAS["nested"])
    ]
    free = SamplingParams(max_tokens=9, logprobs=2)
    together = llm.generate(prompts, [*params, free])
    for schema, output in zip((SCHEMAS["flat"], SCHEMAS["nested"]), together, strict=False):
        jsonschema_rs.validate(schema, json.loads(output.outputs[0].text))
    assert together[2].outputs[0].token_ids == llm.generate("three", free)[0].outputs[0].token_ids
    streamed = list(llm.stream("two", params[1]))
    assert "".join(output.text for output in streamed) == together[1].outputs[0].text
    assert streamed[-1].finish_reason is FinishReason.STOP


def test_logprobs_are_those_of_the_model_itself(tiny_model_dir: Path) -> None:
    """Not of the masked logits, of which those of one choice would all be 0."""
    llm = LLM(str(tiny_model_dir), num_blocks=64)
    params = SamplingParams(max_tokens=9, logprobs=1, constraint=Constraint.choice(["abc"]))
    logprobs = llm.generate("one", params)[0].outputs[0].logprobs
    assert logprobs is not None
    assert [entry.token_id for entry in logprobs] == [97, 98, 99]
    assert all(entry.logprob < -0.01 for entry in logprobs)
    assert all(entry.top[0][1] >= entry.logprob for entry in logprobs)


@pytest.mark.slow
def test_the_embedded_model_follows_schemas() -> None:
    llm = LLM(num_blocks=200)
    questions = {
        "flat": "Describe a member named Zoë, who is 31.",
        "nested": "Where is the palace? Give the place and tags.",
        "either": "Say nothing, or seven twice.",
        "date": "When did the war end?",
        "reference": "Give two pairs.",
    }
    params = [
        SamplingParams(
            max_tokens=150, temperature=float(name != "flat"), seed=5, constraint=Constraint.json_schema(SCHEMAS[name])
        )
        for name in questions
    ]
    outputs = llm.chat([[{"role": "user", "content": text}] for text in questions.values()], params)
    for name, output in zip(questions, outputs, strict=True):
        assert output.outputs[0].finish_reason is FinishReason.STOP, output.outputs[0].text
        jsonschema_rs.validate(SCHEMAS[name], json.loads(output.outputs[0].text), validate_formats=True)
    flat = json.loads(outputs[0].outputs[0].text)
    assert (flat["name"], flat["age"]) == ("Zoë", 31)
