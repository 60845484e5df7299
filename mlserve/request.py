"""What a caller asks for and what comes back. Plain data: no torch, no text processing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from mlserve.errors import SamplingParamsError

__all__ = [
    "CompletionOutput",
    "FinishReason",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StreamOutput",
    "TokenLogprob",
]

MAX_N = 128
MAX_LOGPROBS = 64
MAX_STOP_STRINGS = 64
MAX_SEED = 2**64 - 1
GREEDY_BELOW = 1e-3


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens, or the model's longest context
    ABORT = "abort"  # the caller gave up
    ERROR = "error"  # the model raised while it ran this request


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Defaults are those of the OpenAI API, except `temperature=0` (greedy) and `max_tokens`.

    Raises `SamplingParamsError` for values out of range and for contradictions.
    """

    n: int = 1
    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # divides positive logits of seen tokens, multiplies negative ones (CTRL paper)
    presence_penalty: float = 0.0  # subtracted once for each token that was generated
    frequency_penalty: float = 0.0  # subtracted for each time that a token was generated
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # how many of the likeliest tokens to report beside the chosen one
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if isinstance(self.bad_words, str):
            object.__setattr__(self, "bad_words", (self.bad_words,))
        _check_ranges(self)
        _check_lists(self)
        if self.min_tokens > self.max_tokens:
            raise SamplingParamsError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}: lower it or raise max_tokens"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether always the likeliest token is chosen.

        At temperatures below 1e-3 draws would only tell apart logits that differ by less than their rounding does from
        batch to batch, so such temperatures mean greedy.
        """
        return self.temperature < GREEDY_BELOW


def _require(holds: bool, name: str, value: object, want: str) -> None:
    if not holds:
        raise SamplingParamsError(f"{name} is {value!r}: give {want}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_ranges(p: SamplingParams) -> None:
    _require(_is_int(p.n) and 1 <= p.n <= MAX_N, "n", p.n, f"an integer from 1 to {MAX_N}")
    _require(_is_int(p.max_tokens) and p.max_tokens >= 0, "max_tokens", p.max_tokens, "an integer, 0 or more")
    _require(_is_int(p.min_tokens) and p.min_tokens >= 0, "min_tokens", p.min_tokens, "an integer, 0 or more")
    finite_from_0 = _is_finite(p.temperature) and p.temperature >= 0
    _require(finite_from_0, "temperature", p.temperature, "a finite number, 0 (greedy) or more")
    _require(_is_finite(p.top_p) and 0 < p.top_p <= 1, "top_p", p.top_p, "a number above 0, at most 1")
    _require(
        p.top_k is None or (_is_int(p.top_k) and p.top_k >= 1), "top_k", p.top_k, "an integer from 1, or None for all"
    )
    _require(_is_finite(p.min_p) and 0 <= p.min_p <= 1, "min_p", p.min_p, "a number from 0 to 1")
    positive = _is_finite(p.repetition_penalty) and p.repetition_penalty > 0
    _require(positive, "repetition_penalty", p.repetition_penalty, "a finite number above 0")
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(p, name)
        _require(_is_finite(value) and -2 <= value <= 2, name, value, "a number from -2 to 2")
    seed_fits = p.seed is None or (_is_int(p.seed) and 0 <= p.seed <= MAX_SEED)
    _require(seed_fits, "seed", p.seed, "an integer from 0 to 2**64 - 1, or None")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(p, name)
        fits = value is None or (_is_int(value) and 0 <= value <= MAX_LOGPROBS)
        _require(fits, name, value, f"an integer from 0 to {MAX_LOGPROBS}, or None")


def _check_lists(p: SamplingParams) -> None:
    _require(len(p.stop) <= MAX_STOP_STRINGS, "the number of stop strings", len(p.stop), f"at most {MAX_STOP_STRINGS}")
    for name in ("stop", "bad_words"):
        for text in getattr(p, name):
            _require(isinstance(text, str) and text != "", name, text, "strings that are not empty")
    for token in p.stop_token_ids:
        _require(_is_int(token) and token >= 0, "stop_token_ids", token, "token ids, 0 or more")
    for token, bias in p.logit_bias.items():
        _require(_is_int(token) and token >= 0, "logit_bias token", token, "token ids, 0 or more")
        _require(_is_finite(bias) and -100 <= bias <= 100, "logit_bias", bias, "a number from -100 to 100")
    if p.allowed_token_ids is not None:
        _require(len(p.allowed_token_ids) > 0, "allowed_token_ids", p.allowed_token_ids, "at least one id, or None")
        for token in p.allowed_token_ids:
            _require(_is_int(token) and token >= 0, "allowed_token_ids", token, "token ids, 0 or more")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a chosen (or prompt) token, and of the likeliest ones in its place.

    Values are those of the model itself: before temperature, penalties and masks.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first


@dataclass(slots=True)
class RequestMetrics:
    """Times are `time.monotonic()` seconds."""

    arrival: float
    first_token: float | None = None
    finished: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache when the request was first admitted
    preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` sequences."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token id that ended it


@dataclass(slots=True)
class RequestOutput:
    """A request's state: partial while it streams, complete when `finished`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprob | None] | None = None  # one per prompt token; the first is None
    finished: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StreamOutput:
    """What one step added to one sequence of a request."""

    request_id: str
    index: int
    text: str  # new text only; empty while a character or a possible stop string is incomplete
    token_ids: list[int]  # new tokens only
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None  # set on the sequence's last one
    stop_reason: str | int | None = None
    error: str | None = None
    completed: RequestOutput | None = None  # the whole request, on its very last one
