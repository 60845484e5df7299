"""The engine over a fake model whose tokens depend on everything that is read through the block tables."""

from __future__ import annotations

import random

import pytest
from engines import generate, make_engine, run, step, submit
from fakes import ContextRunner, CountingRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from mlserve.engine.engine import Engine
from mlserve.engine.tokenizer import Tokenizer
from mlserve.errors import CapacityError, PromptError, RequestError, SamplingParamsError
from mlserve.request import FinishReason, SamplingParams

VOCAB = 256


def context_engine(tokenizer: Tokenizer, **options: object) -> Engine:
    return make_engine(ContextRunner(VOCAB, int(options.get("block_size", 4))), tokenizer, **options)


def expected(prompt: list[int], count: int) -> list[int]:
    """What the context model says, without any engine."""
    model, context = ContextRunner(VOCAB, 4), list(prompt)
    for _ in range(count):
        context.append(model.next_token(context))
    return context[len(prompt) :]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [6, 64])
def test_mixed_batch_equals_alone(tokenizer: Tokenizer, caching: bool, budget: int) -> None:
    engine = context_engine(tokenizer, caching=caching, max_num_batched_tokens=budget, max_num_seqs=6)
    prompts = {f"r{i}": list(range(i, i + 3 * i + 1)) for i in range(8)}
    for name, prompt in prompts.items():
        submit(engine, name, prompt, SamplingParams(max_tokens=9))
    for name, output in run(engine).items():
        assert output.outputs[0].token_ids == expected(prompts[name], 9)
        assert output.outputs[0].finish_reason is FinishReason.LENGTH


def test_second_request_takes_the_prefix_from_the_cache(tokenizer: Tokenizer) -> None:
    engine = context_engine(tokenizer)
    prompt = list(range(18))
    assert generate(engine, prompt, SamplingParams(max_tokens=2)).metrics.cached_tokens == 0
    again = generate(engine, prompt, SamplingParams(max_tokens=2))
    assert again.metrics.cached_tokens == 16
    assert again.outputs[0].token_ids == expected(prompt, 2)


def test_answers_are_cached_too(tokenizer: Tokenizer) -> None:
    """A next turn that holds the first one's prompt and answer computes only what is new."""
    engine = context_engine(tokenizer)
    first = generate(engine, list(range(10)), SamplingParams(max_tokens=7))
    history = [*range(10), *first.outputs[0].token_ids]
    assert generate(engine, [*history, 1, 2], SamplingParams(max_tokens=1)).metrics.cached_tokens == 16


def test_equal_prompts_in_one_step_compute_the_prefix_once(tokenizer: Tokenizer) -> None:
    engine = context_engine(tokenizer)
    shared = list(range(16))
    for i in range(4):
        submit(engine, f"r{i}", [*shared, 100 + i], SamplingParams(max_tokens=3))
    outputs = run(engine)
    assert [outputs[f"r{i}"].metrics.cached_tokens for i in range(4)] == [0, 16, 16, 16]
    assert [outputs[f"r{i}"].outputs[0].token_ids for i in range(4)] == [
        expected([*shared, 100 + i], 3) for i in range(4)
    ]
    assert engine.runner.tokens_computed == 16 + 4 + 4 * 2


def test_decodes_go_on_while_a_long_prompt_is_prefilled(tokenizer: Tokenizer) -> None:
    engine = context_engine(tokenizer, max_num_batched_tokens=8, max_num_seqs=4)
    submit(engine, "short", [1, 2], SamplingParams(max_tokens=12))
    step(engine)
    submit(engine, "long", list(range(40)), SamplingParams(max_tokens=1))
    for _ in range(5):
        assert [o.request_id for o in step(engine) if o.token_ids].count("short") == 1
    run(engine)


def test_siblings_share_their_prompts_blocks(tokenizer: Tokenizer) -> None:
    for caching in (True, False):
        engine = context_engine(tokenizer, caching=caching)
        submit(engine, "r", list(range(10)), SamplingParams(n=3, max_tokens=6, temperature=1.0, seed=7))
        step(engine)
        step(engine)
        tables = [s.block_table for s in engine.scheduler.running]
        assert len(tables) == 3
        assert {tuple(table[:2]) for table in tables} == {tuple(tables[0][:2])}
        assert len({table[2] for table in tables}) == 3
        outputs = run(engine)["r"].outputs
        assert [o.index for o in outputs] == [0, 1, 2]
        assert len({tuple(o.token_ids) for o in outputs}) == 3
        assert engine.runner.tokens_computed == 10 + 2 * 2 + 3 * 5  # two siblings recompute two prompt tokens each


def test_preempted_requests_lose_nothing(tokenizer: Tokenizer) -> None:
    for caching in (True, False):
        engine = context_engine(tokenizer, num_blocks=10, caching=caching)
        prompts = {f"r{i}": [i * 10 + j for j in range(8)] for i in range(4)}
        for name, prompt in prompts.items():
            submit(engine, name, prompt, SamplingParams(max_tokens=16))
        outputs = run(engine)
        assert sum(o.metrics.preemptions for o in outputs.values()) > 0
        for name, output in outputs.items():
            assert output.outputs[0].token_ids == expected(prompts[name], 16)


def test_priority_goes_first_and_is_never_preempted_for_others(tokenizer: Tokenizer) -> None:
    engine = context_engine(tokenizer, max_num_seqs=1, policy="priority")
    for name, priority in (("low", 5), ("high", -1), ("mid", 0)):
        submit(engine, name, [1, 2, 3], SamplingParams(max_tokens=2), priority=priority)
    assert list(run(engine)) == ["high", "mid", "low"]


def test_priority_without_its_policy_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="priority is 3, but admission is fair"):
        submit(context_engine(tokenizer), "r", [1], SamplingParams(), priority=3)


def test_abort_frees_at_any_time(tokenizer: Tokenizer) -> None:
    engine = context_engine(tokenizer, max_num_seqs=1)
    submit(engine, "runs", [1, 2, 3], SamplingParams(max_tokens=50))
    submit(engine, "waits", [4, 5, 6], SamplingParams(max_tokens=50, n=2))
    step(engine)
    ended = engine.abort("waits") + engine.abort("runs")
    assert engine.abort("runs") == engine.abort("never seen") == []
    assert [(o.request_id, o.finish_reason) for o in ended] == [
        ("waits", FinishReason.ABORT), ("waits", FinishReason.ABORT), ("runs", FinishReason.ABORT),
    ]  # fmt: skip
    assert [o.completed is not None for o in ended] == [False, True, True]
    assert not engine.has_work()
    assert engine.cache.stats().num_referenced == 0
    assert len(engine._outputs) == 0


def test_an_aborted_requests_id_is_free_again(tokenizer: Tokenizer) -> None:
    engine = context_engine(tokenizer)
    for params in (SamplingParams(max_tokens=50), SamplingParams(max_tokens=0)):
        submit(engine, "r", [1, 2, 3], params)
        engine.abort("r")
        submit(engine, "r", [4, 5], SamplingParams(max_tokens=3))
        outputs = step(engine)
        assert [(o.request_id, len(o.token_ids), o.finish_reason) for o in outputs] == [("r", 1, None)]
        assert run(engine)["r"].outputs[0].token_ids == expected([4, 5], 3)


def test_a_defect_behind_the_model_leaves_nothing(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences had ended for the scheduler when making their outputs raised."""
    engine = context_engine(tokenizer)
    submit(engine, "r", [1, 2, 3], SamplingParams(max_tokens=1, n=2))

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(engine._outputs, "process", fails)
        with pytest.raises(ZeroDivisionError):
            step(engine)
    assert [o.index for o in engine.abort("r")] == [0, 1]
    assert not engine.has_work()
    assert engine.cache.stats().num_referenced == 0
    assert len(engine._outputs) == 0


class FailingRunner(ContextRunner):
    """Raises whenever a sequence whose prompt starts with the poison is in the step."""

    def run(self, plan):  # type: ignore[no-untyped-def]
        if any(sequence.token_ids[0] == 66 for sequence in plan.sequences):
            raise RuntimeError("boom")
        return super().run(plan)


def test_a_failing_step_fails_only_whom_it_must(tokenizer: Tokenizer) -> None:
    engine = make_engine(FailingRunner(VOCAB, 4), tokenizer)
    submit(engine, "good", list(range(9)), SamplingParams(max_tokens=4))
    submit(engine, "bad", [66, *range(9)], SamplingParams(max_tokens=4))
    outputs = run(engine)
    assert outputs["good"].outputs[0].token_ids == expected(list(range(9)), 4)
    assert outputs["bad"].outputs[0].finish_reason is FinishReason.ERROR
    assert "RuntimeError" in (outputs["bad"].error or "")
    assert "boom" in (outputs["bad"].error or "")
    assert generate(engine, list(range(9)), SamplingParams(max_tokens=4)).metrics.cached_tokens == 8


def test_bad_requests_are_refused_and_the_engine_goes_on(tokenizer: Tokenizer) -> None:
    engine = context_engine(tokenizer, num_blocks=8, max_model_len=64)
    for prompt, params, error, message in (
        ([], SamplingParams(), PromptError, "empty"),
        ("", SamplingParams(), PromptError, "empty"),
        ([1, 256], SamplingParams(), PromptError, "256"),
        ([-1], SamplingParams(), PromptError, "-1"),
        ([1.0], SamplingParams(), PromptError, "1.0"),
        (list(range(64)), SamplingParams(), PromptError, "64 tokens"),
        (list(range(40)), SamplingParams(), CapacityError, "the whole KV pool holds 32"),
        ([1], SamplingParams(stop_token_ids=[256]), SamplingParamsError, "stop_token_ids has token 256"),
        ([1], SamplingParams(logit_bias={999: 1.0}), SamplingParamsError, "logit_bias has token 999"),
        ([1], SamplingParams(allowed_token_ids=[3, 300]), SamplingParamsError, "allowed_token_ids has token 300"),
    ):
        with pytest.raises(error, match=message):
            submit(engine, "r", prompt, params)
    submit(engine, "r", [1, 2], SamplingParams(max_tokens=3))
    with pytest.raises(RequestError, match="'r' is in use"):
        submit(engine, "r", [1, 2], SamplingParams())
    assert run(engine)["r"].outputs[0].token_ids == expected([1, 2], 3)


def test_end_of_sequence_stop_ids_and_min_tokens(tokenizer: Tokenizer) -> None:
    def ids(params: SamplingParams) -> tuple[list[int], FinishReason | None, object]:
        output = generate(make_engine(CountingRunner(VOCAB), tokenizer, eos=(14,)), [10], params).outputs[0]
        return output.token_ids, output.finish_reason, output.stop_reason

    assert ids(SamplingParams(max_tokens=9)) == ([11, 12, 13, 14], FinishReason.STOP, None)
    assert ids(SamplingParams(max_tokens=9, stop_token_ids=[12])) == ([11, 12], FinishReason.STOP, 12)
    assert ids(SamplingParams(max_tokens=6, ignore_eos=True))[1] is FinishReason.LENGTH
    assert ids(SamplingParams(max_tokens=2)) == ([11, 12], FinishReason.LENGTH, None)


def test_no_tokens_wanted(tokenizer: Tokenizer) -> None:
    output = generate(context_engine(tokenizer), [1, 2, 3], SamplingParams(max_tokens=0))
    assert output.finished
    assert output.outputs[0].token_ids == []
    assert output.outputs[0].finish_reason is FinishReason.LENGTH


def test_reset_prefix_cache_while_requests_run(tokenizer: Tokenizer) -> None:
    engine = context_engine(tokenizer)
    submit(engine, "r", list(range(9)), SamplingParams(max_tokens=8))
    step(engine)
    engine.reset_prefix_cache()
    assert run(engine)["r"].outputs[0].token_ids == expected(list(range(9)), 8)
    assert generate(engine, list(range(9)), SamplingParams(max_tokens=1)).metrics.cached_tokens == 0


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_traffic_equals_alone(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Random arrivals, aborts, resets, preemption, chunking, caching: every answer is that of the model alone."""
    seed = data.draw(st.integers(0, 2**32))
    rng = random.Random(seed)
    engine = context_engine(
        tokenizer,
        num_blocks=rng.choice([8, 12, 30]),
        block_size=rng.choice([1, 3, 4]),
        caching=rng.random() < 0.8,
        max_num_batched_tokens=rng.choice([5, 9, 40]),
        max_num_seqs=rng.choice([1, 3, 5]),
        max_skips=rng.choice([0, 2, 50]),
    )
    stems = [[rng.randrange(4) for _ in range(20)] for _ in range(3)]
    wanted, completed = {}, {}
    for number in range(rng.randrange(1, 14)):
        prompt = rng.choice(stems)[: rng.randrange(1, 8)] + [rng.randrange(4) for _ in range(rng.randrange(3))]
        count = rng.randrange(1, 8)
        try:
            submit(engine, str(number), prompt, SamplingParams(max_tokens=count, n=rng.choice([1, 1, 2])))
        except CapacityError:
            continue
        wanted[str(number)] = (prompt, min(count, engine.limits.capacity - len(prompt)))
        for _ in range(rng.randrange(3)):
            for output in step(engine):
                if output.completed:
                    completed[output.request_id] = output.completed
        if rng.random() < 0.1:
            engine.abort(victim := rng.choice(list(wanted)))
            if victim not in completed:
                del wanted[victim]
        if rng.random() < 0.05:
            engine.reset_prefix_cache()
    completed |= run(engine)
    for name, (prompt, count) in wanted.items():
        for output in completed[name].outputs:
            assert output.token_ids == expected(prompt, count)
