"""What a caller asks for and what comes back. Plain data: no torch, no text processing."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from mlserve.constraint import Constraint
from mlserve.errors import SamplingParamsError

__all__ = [
    "CompletionOutput",
    "FinishReason",
    "ImageReport",
    "RequestMetrics",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
    "StreamOutput",
    "TokenLogprob",
]

MAX_N = 128
MAX_LOGPROBS = 64
MAX_STRINGS = 64  # stop strings, bad words
MAX_STRING_LENGTH = 1000  # characters of one of them
MAX_SEED = 2**64 - 1
GREEDY_BELOW = 1e-3
MAX_TEMPERATURE = 1e6  # far beyond where all tokens are equally likely; float32 must hold it


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens, or the model's longest context
    ABORT = "abort"  # the caller gave up
    ERROR = "error"  # the model raised while it ran this request


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Defaults are those of the OpenAI API, except `temperature=0` (greedy) and `max_tokens`.

    Raises `SamplingParamsError` for values of the wrong type or out of range, and for contradictions. Lists are copied.
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
    constraint: Constraint | None = None  # what the answer must look like

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words", "stop_token_ids", "allowed_token_ids"):
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        _require(
            isinstance(self.logit_bias, Mapping), "logit_bias", self.logit_bias, "a mapping from token ids to numbers"
        )
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        _check_numbers(self)
        _check_lists(self)
        fits = self.constraint is None or isinstance(self.constraint, Constraint)
        _require(fits, "constraint", self.constraint, "a Constraint, or None")
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
        raise SamplingParamsError(f"{name} is {reprlib.repr(value)}: give {want}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    """Whether it is a number that a float holds: 10**400 isn't."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _as_tuple(name: str, value: object) -> tuple[object, ...] | None:
    """A list as a tuple; one string, for a field of strings, is a list of one."""
    if value is None and name == "allowed_token_ids":
        return None
    if isinstance(value, str) and name in ("stop", "bad_words"):
        return (value,)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(value)
    raise SamplingParamsError(f"{name} is {reprlib.repr(value)}: give a list")


def _check_numbers(p: SamplingParams) -> None:
    def integer(name: str, low: int, high: float, want: str, *, optional: bool = False) -> None:
        value = getattr(p, name)
        fits = (optional and value is None) or (_is_int(value) and low <= value <= high)
        _require(fits, name, value, f"an integer {want}{', or None' if optional else ''}")

    def number(name: str, fits: Callable[[float], bool], want: str) -> None:
        value = getattr(p, name)
        _require(_is_finite(value) and fits(value), name, value, f"a number {want}")

    integer("n", 1, MAX_N, f"from 1 to {MAX_N}")
    integer("max_tokens", 0, math.inf, "from 0")
    integer("min_tokens", 0, math.inf, "from 0")
    integer("top_k", 1, math.inf, "from 1", optional=True)
    integer("seed", 0, MAX_SEED, "from 0 to 2**64 - 1", optional=True)
    integer("logprobs", 0, MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}", optional=True)
    integer("prompt_logprobs", 0, MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}", optional=True)
    number("temperature", lambda value: 0 <= value <= MAX_TEMPERATURE, f"from 0 (greedy) to {MAX_TEMPERATURE:.0e}")
    number("top_p", lambda value: 0 < value <= 1, "above 0, at most 1")
    number("min_p", lambda value: 0 <= value <= 1, "from 0 to 1")
    number("repetition_penalty", lambda value: 0.01 <= value <= 100, "from 0.01 to 100")
    number("presence_penalty", lambda value: -2 <= value <= 2, "from -2 to 2")
    number("frequency_penalty", lambda value: -2 <= value <= 2, "from -2 to 2")
    for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
        _require(isinstance(getattr(p, name), bool), name, getattr(p, name), "True or False")


def _check_lists(p: SamplingParams) -> None:
    for name in ("stop", "bad_words"):
        texts = getattr(p, name)
        _require(len(texts) <= MAX_STRINGS, f"the number of strings in {name}", len(texts), f"at most {MAX_STRINGS}")
        for text in texts:
            fits = isinstance(text, str) and 1 <= len(text) <= MAX_STRING_LENGTH
            _require(fits, f"an entry of {name}", text, f"strings of 1 to {MAX_STRING_LENGTH} characters")
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for token in getattr(p, name) or ():
            _require(_is_int(token) and token >= 0, f"a token of {name}", token, "token ids, 0 or more")
    for bias in p.logit_bias.values():
        _require(_is_finite(bias) and -100 <= bias <= 100, "a value of logit_bias", bias, "numbers from -100 to 100")
    _require(p.allowed_token_ids != (), "allowed_token_ids", [], "at least one id, or None for all")


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """All that a request says besides its prompt and how to sample."""

    adapter: str | None = None  # name of the LoRA adapter that answers; None: the base model
    priority: int = 0  # lower goes first; needs the priority policy
    cache_salt: str | None = None  # cached KV is shared only with requests of the same salt
    tenant: str | None = None  # who is served fairly against others, for each adapter; must come from an authority


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
    scheduled: float | None = None  # when it was first admitted to a step
    first_token: float | None = None
    finished: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache when the request was first admitted
    cached_image_tokens: int = 0  # of them, those of images
    cached_adapter_tokens: int = 0  # and those, not of images, that an adapter acted on
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


@dataclass(frozen=True, slots=True)
class ImageReport:
    """Which image a request was about. The two digests differ if a near-duplicate stood in for the request's own."""

    digest: bytes  # of the request's own pixels
    canonical: bytes  # of the image that was used
    hash_name: str | None = None  # the perceptual hash that found it
    distance: int | None = None  # bits in which these hashes differ


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
    images: list[ImageReport | None] = field(default_factory=list)  # of the prompt, in order; None: embeddings


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
