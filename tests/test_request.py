"""What a request may ask for; each refusal names the field, the value and what to give instead."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from typing import Any

import pytest

from mlserve.errors import RequestError, SamplingParamsError
from mlserve.request import RequestMetrics, SamplingParams

NAN, INF = math.nan, math.inf


def refusal(**params: Any) -> str:
    with pytest.raises(SamplingParamsError) as caught:
        SamplingParams(**params)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RequestError)
    return str(caught.value)


NUMBERS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], str]] = {
    # field: good values, bad values, what the message tells to give
    "n": ((1, 128), (0, -1, 129, 1_000_000, 1.0, True, "1", None), "an integer from 1 to 128"),
    "max_tokens": ((0, 10**9), (-1, 1.5, NAN, None, False), "an integer from 0"),
    "min_tokens": ((0, 128), (-1, 0.0, None), "an integer from 0"),
    "top_k": ((1, 10**9, None), (0, -1, 2.0, True), "an integer from 1, or None"),
    "seed": ((0, 2**64 - 1, None), (-1, 2**64, 1.0, "7"), "an integer from 0 to 2**64 - 1, or None"),
    "logprobs": ((0, 64, None), (-1, 65, 1_000_000, True), "an integer from 0 to 64, or None"),
    "prompt_logprobs": ((0, 64, None), (-1, 65, 1.0), "an integer from 0 to 64, or None"),
    "temperature": ((0, 1e-12, 0.7, 1e6), (NAN, INF, -1, -1e-9, 1e7, 10**400, "1", None, True), "a number from 0"),
    "top_p": ((1e-4, 1, 1.0), (0, -0.1, 1.0001, NAN, INF, None), "a number above 0, at most 1"),
    "min_p": ((0, 1, 0.05), (-0.1, 1.1, NAN, None), "a number from 0 to 1"),
    "repetition_penalty": ((0.01, 1, 100), (0, -1, NAN, INF, 1e-30, 101), "a number from 0.01 to 100"),
    "presence_penalty": ((-2, 2.0), (-2.1, 2.1, NAN, None), "a number from -2 to 2"),
    "frequency_penalty": ((-2, 2.0), (-2.1, 2.1, -INF), "a number from -2 to 2"),
    "ignore_eos": ((True, False), (0, 1, None, "yes"), "True or False"),
    "include_stop_str_in_output": ((True,), (1,), "True or False"),
    "skip_special_tokens": ((False,), (0,), "True or False"),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (good, _, _) in NUMBERS.items() for value in good])
def test_good_values(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value", "want"), [(name, value, want) for name, (_, bad, want) in NUMBERS.items() for value in bad]
)
def test_bad_values(name: str, value: Any, want: str) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"{name} is ")
    assert f": give {want}" in message


LISTS = [
    ({"stop": ["a", ""]}, "an entry of stop is '': give strings of 1 to 1000 characters"),
    ({"stop": ""}, "an entry of stop is ''"),
    ({"stop": ["a", 7]}, "an entry of stop is 7"),
    ({"stop": ["x" * 1001]}, "an entry of stop is 'xxxxxxxxxxxx...xxxxxxxxxxxxx'"),
    ({"stop": ["x"] * 65}, "the number of strings in stop is 65: give at most 64"),
    ({"stop": None}, "stop is None: give a list"),
    ({"stop": b"x"}, "stop is b'x': give a list"),
    ({"stop": {"x"}}, "stop is {'x'}: give a list"),
    ({"bad_words": [""]}, "an entry of bad_words is ''"),
    ({"bad_words": ["x"] * 65}, "the number of strings in bad_words is 65"),
    ({"stop_token_ids": [-1]}, "a token of stop_token_ids is -1: give token ids, 0 or more"),
    ({"stop_token_ids": [True]}, "a token of stop_token_ids is True"),
    ({"stop_token_ids": [1.0]}, "a token of stop_token_ids is 1.0"),
    ({"stop_token_ids": 5}, "stop_token_ids is 5: give a list"),
    ({"stop_token_ids": "5"}, "stop_token_ids is '5': give a list"),
    ({"allowed_token_ids": []}, "allowed_token_ids is []: give at least one id, or None for all"),
    ({"allowed_token_ids": [-3]}, "a token of allowed_token_ids is -3"),
    ({"allowed_token_ids": "abc"}, "allowed_token_ids is 'abc': give a list"),
    ({"logit_bias": {-1: 1.0}}, "a token of logit_bias is -1"),
    ({"logit_bias": {"5": 1.0}}, "a token of logit_bias is '5'"),
    ({"logit_bias": {5: NAN}}, "a value of logit_bias is nan: give numbers from -100 to 100"),
    ({"logit_bias": {5: -100.5}}, "a value of logit_bias is -100.5"),
    ({"logit_bias": [(5, 1.0)]}, "logit_bias is [(5, 1.0)]: give a mapping"),
    ({"logit_bias": None}, "logit_bias is None: give a mapping"),
]


@pytest.mark.parametrize(("params", "message"), LISTS, ids=[message[:40] for _, message in LISTS])
def test_bad_lists(params: dict[str, Any], message: str) -> None:
    assert message in refusal(**params)


def test_contradiction() -> None:
    assert refusal(min_tokens=9, max_tokens=8) == "min_tokens 9 is above max_tokens 8: lower it or raise max_tokens"
    SamplingParams(min_tokens=8, max_tokens=8)


def test_one_string_is_a_list_of_one() -> None:
    params = SamplingParams(stop="END", bad_words="darn")
    assert (params.stop, params.bad_words) == (("END",), ("darn",))


def test_lists_are_copied() -> None:
    stop, bias, ids = ["a"], {1: 2.0}, [3]
    params = SamplingParams(stop=stop, logit_bias=bias, stop_token_ids=ids, allowed_token_ids=range(2))
    stop.append("")
    bias[-5] = NAN
    ids.append(-1)
    assert (params.stop, params.logit_bias, params.stop_token_ids) == (("a",), {1: 2.0}, (3,))
    assert params.allowed_token_ids == (0, 1)


def test_params_cant_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]
    assert dataclasses.replace(SamplingParams(stop="x"), n=2).stop == ("x",)


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (0.0, True), (1e-12, True), (1e-4, True), (1e-3, False), (0.7, False)]
)
def test_is_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is greedy


def test_case_5_08_huge_requests_are_refused_at_once() -> None:
    start = time.process_time()
    refusal(n=1_000_000)
    refusal(logprobs=1_000_000)
    message = refusal(stop=["x"] * 100_000)
    refusal(stop=["x" * 10_000_000])
    assert time.process_time() - start < 0.1
    assert len(message) < 200


def test_messages_are_short_whatever_was_sent() -> None:
    assert len(refusal(stop_token_ids={"a" * 10**6})) < 200
    assert len(refusal(logit_bias="a" * 10**6)) < 200
    assert re.search(r"n is 1000+\.\.\.0+: give", refusal(n=10**300))


def test_time_to_first_token() -> None:
    metrics = RequestMetrics(arrival=10.0)
    assert metrics.time_to_first_token is None
    metrics.first_token = 10.25
    assert metrics.time_to_first_token == 0.25
