"""The SDK on the tiny model."""

from __future__ import annotations

import gc
import typing
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparing import GREEDY, assert_eq, cold
from streaming import completed, joined, live_state
from tiny import IM_END

from mlserve import (
    LLM,
    ConfigError,
    FinishReason,
    ModelNotFoundError,
    PromptError,
    RequestOptions,
    SamplingParams,
    SamplingParamsError,
)
from mlserve.config import OPTION_PARTS
from mlserve.llm import PROGRESS_FROM, Options

OPTIONS: dict[str, Any] = {"block_size": 4, "num_blocks": 64}


@pytest.fixture
def llm(tiny_model_dir: Path) -> Iterator[LLM]:
    """An SDK that a test leaves idle."""
    llm = LLM(str(tiny_model_dir), **OPTIONS)
    yield llm
    assert not any(live_state(llm.engine).values()), live_state(llm.engine)
    assert not llm._mailboxes
    llm.engine.cache.check()


def test_generate_takes_a_text_or_its_ids(llm: LLM, tiny_model_dir: Path) -> None:
    reference = cold(tiny_model_dir, list(b"abcdef"))
    (by_text,) = llm.generate("abcdef", GREEDY)
    (by_ids,) = llm.generate(tuple(b"abcdef"), GREEDY)
    assert_eq(by_text, reference)
    assert_eq(by_ids, reference)
    assert (by_text.prompt, by_ids.prompt) == ("abcdef", None)
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids == list(b"abcdef")


def test_outputs_stand_in_the_prompts_order(llm: LLM, tiny_model_dir: Path) -> None:
    """Later prompts end sooner."""
    prompts = ["first one", [1, 2, 3], "third"]
    params = [replace(GREEDY, max_tokens=9 - 3 * i) for i in range(3)]
    outputs = llm.generate(prompts, params)
    assert [o.prompt for o in outputs] == ["first one", None, "third"]
    for prompt, each, output in zip(prompts, params, outputs, strict=True):
        ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
        assert_eq(output, cold(tiny_model_dir, ids, each))
    assert len({o.request_id for o in outputs}) == 3


def test_default_sampling_is_greedy(llm: LLM, tiny_model_dir: Path) -> None:
    (output,) = llm.generate([5, 6, 7])
    assert output.outputs[0].token_ids == cold(tiny_model_dir, [5, 6, 7], SamplingParams()).outputs[0].token_ids
    assert output.outputs[0].logprobs is None
    assert len(output.outputs[0].token_ids) == SamplingParams().max_tokens


def test_metrics(llm: LLM) -> None:
    prompt = list(range(10))
    llm.generate(prompt, GREEDY)
    metrics = llm.generate(prompt, GREEDY)[0].metrics
    assert (metrics.prompt_tokens, metrics.cached_tokens, metrics.preemptions) == (10, 8, 0)
    assert metrics.first_token is not None
    assert metrics.finished is not None
    assert metrics.arrival < metrics.first_token < metrics.finished
    assert metrics.time_to_first_token == metrics.first_token - metrics.arrival


def test_a_refusal_names_the_prompt_and_nothing_runs(llm: LLM) -> None:
    with pytest.raises(PromptError, match=r"^prompt 2: prompt token 1 is 999, the vocabulary has 320"):
        llm.generate(["fine", [1], [1, 999]], GREEDY)
    with pytest.raises(PromptError, match=r"^prompt token 1 is 999"):
        llm.generate([1, 999], GREEDY)
    with pytest.raises(SamplingParamsError, match=r"^prompt 1: stop_token_ids has token 400"):
        llm.generate(["a", "b"], [GREEDY, replace(GREEDY, stop_token_ids=[400])])
    with pytest.raises(ConfigError, match="2 sampling_params for 3 prompts"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])
    assert llm.cache_stats().query_tokens == 0


@pytest.mark.parametrize("prompt", [None, 7, 1.5, {"text": "a"}, np.array([1, 2]), [[1, 2], 7], [[1, 2], None]])
def test_what_is_no_prompt_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(PromptError, match="give a text or a list of token ids"):
        llm.generate(prompt, GREEDY)


@pytest.mark.parametrize("count", [PROGRESS_FROM - 1, PROGRESS_FROM])
def test_a_progress_bar_on_long_batches(
    llm: LLM, count: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[i, i + 1] for i in range(count)]
    one = replace(GREEDY, max_tokens=1)
    llm.generate(prompts, one)
    assert capsys.readouterr().err == ""  # standard error is no terminal here
    llm.generate(prompts, one, progress=True)
    assert f"{count}/{count}" in capsys.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    llm.generate(prompts, one, progress=False)
    assert capsys.readouterr().err == ""
    llm.generate(prompts, one)
    assert (f"{count}/{count}" in capsys.readouterr().err) is (count >= PROGRESS_FROM)


CONVERSATION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
RENDERED = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n"


def test_chat_lays_out_one_conversation(llm: LLM) -> None:
    (answer,) = llm.chat(CONVERSATION, GREEDY)
    assert llm.engine.tokenizer.decode(answer.prompt_token_ids, skip_special_tokens=False) == RENDERED
    assert answer.prompt_token_ids.count(IM_END) == 2
    (same,) = llm.generate(RENDERED, GREEDY)
    assert_eq(answer, same)


def test_chat_answers_several_conversations(llm: LLM) -> None:
    answers = llm.chat([CONVERSATION, CONVERSATION[1:]], [GREEDY, replace(GREEDY, max_tokens=3)])
    assert [len(a.outputs[0].token_ids) for a in answers] == [8, 3]
    assert_eq(answers[0], llm.chat(CONVERSATION, GREEDY)[0])
    with pytest.raises(PromptError, match=r"^prompt 1: message 0 has the role 7"):
        llm.chat([CONVERSATION, [{"role": 7, "content": ""}]], GREEDY)


@pytest.mark.parametrize("messages", ["Hello?", [], 7, None, {"role": "user", "content": "Hello?"}, [7], ["Hello?"]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(PromptError, match=r"^(messages are|message 0 is) .*: give "):
        llm.chat(messages, GREEDY)


def test_a_stream_joins_to_the_whole(llm: LLM, tiny_model_dir: Path) -> None:
    reference = cold(tiny_model_dir, list(b"abcdef")).outputs[0]
    for prompt in ("abcdef", list(b"abcdef")):
        outputs = list(llm.stream(prompt, GREEDY))
        assert len(outputs) == 8
        assert joined(outputs) == {0: (reference.text, reference.token_ids)}
        assert [o.finish_reason for o in outputs] == [None] * 7 + [FinishReason.LENGTH]
        assert completed(outputs).outputs[0].token_ids == reference.token_ids
    assert completed(list(llm.stream(CONVERSATION, GREEDY))).prompt_token_ids == list(
        llm.engine.tokenizer.encode(RENDERED)
    )


def test_two_streams_read_in_turn(llm: LLM, tiny_model_dir: Path) -> None:
    prompts = [[1, 2, 3], list(range(30, 41))]
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    outputs = list(zip(*streams, strict=True))
    for prompt, mine in zip(prompts, zip(*outputs, strict=True), strict=True):
        assert_eq(completed(mine), cold(tiny_model_dir, prompt))


def test_generate_while_a_stream_is_half_read(llm: LLM, tiny_model_dir: Path) -> None:
    stream = llm.stream([1, 2, 3], GREEDY)
    first = next(stream)
    (whole,) = llm.generate([4, 5], replace(GREEDY, max_tokens=30))
    assert_eq(whole, cold(tiny_model_dir, [4, 5], replace(GREEDY, max_tokens=30)))
    assert_eq(completed([first, *stream]), cold(tiny_model_dir, [1, 2, 3]))


def test_a_stream_left_early_is_aborted(llm: LLM) -> None:
    for output in llm.stream([1, 2, 3], SamplingParams(max_tokens=400)):
        assert len(output.token_ids) == 1
        assert llm.cache_stats().num_referenced > 0
        break
    gc.collect()
    assert llm.cache_stats().num_referenced == 0
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=400, n=3))
    next(stream)
    stream.close()  # type: ignore[attr-defined]


def test_a_stream_that_is_never_read_costs_nothing(llm: LLM) -> None:
    unread = llm.stream([1, 2, 3], SamplingParams(max_tokens=400))
    assert not llm.engine.has_work()
    with pytest.raises(PromptError):  # but a prompt that can't be served is refused at once
        llm.stream([], GREEDY)
    del unread


@pytest.mark.parametrize("at", [0, 1, 5])
def test_an_interrupt_leaves_nothing_behind(
    llm: LLM, tiny_model_dir: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, steps = llm.engine.runner.run, iter(range(100))

    def interrupted(plan: Any) -> Any:
        if next(steps) == at:
            raise KeyboardInterrupt
        return run(plan)

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.runner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2, 3], [1, 2, 3], list(range(60))], replace(GREEDY, n=2))
    assert not any(live_state(llm.engine).values())
    assert_eq(llm.generate([1, 2, 3], GREEDY)[0], cold(tiny_model_dir, [1, 2, 3]))


def test_a_request_that_fails_disturbs_no_other(
    llm: LLM, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = llm.engine.runner.run

    def fails(plan: Any) -> Any:
        if any(s.token_ids[0] == 66 for s in plan.sequences):
            raise RuntimeError("boom")
        return run(plan)

    monkeypatch.setattr(llm.engine.runner, "run", fails)
    bad, good = llm.generate([[66, 1], [1, 2, 3]], GREEDY)
    assert bad.outputs[0].finish_reason is FinishReason.ERROR
    assert bad.error == "the model raised RuntimeError while it ran this request: boom"
    assert good.error is None
    assert_eq(good, cold(tiny_model_dir, [1, 2, 3]))


def test_cache_stats_and_reset(llm: LLM) -> None:
    prompt, one = list(range(12)), replace(GREEDY, max_tokens=1)
    llm.generate(prompt, one)
    llm.generate(prompt, one)
    stats = llm.cache_stats()
    assert (stats.num_blocks, stats.num_free, stats.num_referenced, stats.num_cached) == (64, 64, 0, 3)
    assert (stats.query_tokens, stats.hit_tokens) == (24, 8)
    assert stats.hit_rate == 8 / 24
    llm.reset_prefix_cache()
    assert llm.cache_stats().num_cached == 0
    assert llm.generate(prompt, one)[0].metrics.cached_tokens == 0


def test_caching_can_be_off(tiny_model_dir: Path) -> None:
    llm = LLM(str(tiny_model_dir), enable_prefix_caching=False, **OPTIONS)
    for _ in range(2):
        assert llm.generate(list(range(12)), GREEDY)[0].metrics.cached_tokens == 0
    assert llm.cache_stats().num_cached == 0


@pytest.mark.parametrize("way", ["generate", "chat", "stream"])
def test_priority_reaches_the_scheduler(tiny_model_dir: Path, way: str) -> None:
    llm = LLM(str(tiny_model_dir), policy="priority", max_num_seqs=1, **OPTIONS)
    runs = llm.stream([1, 2], GREEDY, priority=5)
    next(runs)
    llm.engine.submit(llm.engine.prepare("waits", [3, 4], GREEDY, RequestOptions(priority=-1)))
    ask = getattr(llm, way)
    assert list(ask(CONVERSATION if way == "chat" else [5, 6], GREEDY, priority=-2))
    assert [s.request.request_id for s in llm.engine.scheduler.waiting.candidates()] == ["waits"]  # it had come first
    assert len(list(runs)) == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blok_size": 8}, "there is no option 'blok_size': do you mean 'block_size'?"),
        ({"zzz": 8}, "there is no option 'zzz': remove it"),
        ({"block_size": 0}, "block_size is 0: give a number above 0"),
        ({"num_blocks": -1}, "num_blocks is -1"),
        ({"kv_memory": 0.0}, "kv_memory is 0.0"),
        ({"kv_memory": 1e-9}, "raise kv_memory or lower block_size"),
        ({"num_blocks": 10**12}, "a KV pool of 1000000000000 blocks takes 7629394.5 GiB"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens is 32, below max_num_seqs 64"),
        ({"max_skips": -1}, "max_skips is -1"),
        ({"policy": "random"}, "policy is 'random': give one of fair, fcfs, priority"),
        ({"dtype": "int8"}, "dtype is 'int8': give one of float32, bfloat16, float16"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"kernels": "magic"}, "kernels is 'magic'"),
        ({"block_hash": "md5"}, "md5"),
        ({"max_model_len": 513}, "max_model_len is 513"),
    ],
)
def test_wrong_options(tiny_model_dir: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(tiny_model_dir), **options)
    assert message in str(caught.value)


def test_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))


def test_the_typed_options_are_the_fields_of_the_config() -> None:
    """Every option of the parts is an option of `LLM`, of the same type; `model` is its first argument."""
    known = {option.name: option for part in OPTION_PARTS.values() for option in fields(part)}
    assert {*Options.__annotations__} == {*known} - {"model"}
    exact = {"dtype": "DType", "lora_dtype": "DType | None", "policy": "Policy | Callable[[], WaitingQueue]"}
    typed = {name: annotation.__forward_arg__ for name, annotation in Options.__annotations__.items()}
    for name, annotation in typed.items():
        assert known[name].type in (annotation, exact.get(name)), name
    assert typing.is_typeddict(Options)
