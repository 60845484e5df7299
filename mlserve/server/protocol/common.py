"""What bodies have in common. Fields that OpenAI's API doesn't have are ours, and named as in `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator

from mlserve.errors import SamplingParamsError
from mlserve.request import MAX_STRINGS, RequestMetrics

__all__ = ["MAX_IDS", "PLAIN_TEXT", "Body", "SamplingBody", "StreamOptions", "answers", "error_responses", "usage_of"]

MAX_FIELDS = 256  # of a body
MAX_LIST = 1024
MAX_IDS = 2**21  # of a prompt
MAX_DIGITS = 20  # of a number that JSON has as a key
# Long lists fail at the first wrong entry: to tell of each of a million would hold up everybody.
Stops = Annotated[list[str], Field(max_length=MAX_STRINGS, fail_fast=True)]
TokenIds = Annotated[list[StrictInt], Field(max_length=MAX_LIST, fail_fast=True)]


class Body(BaseModel):
    """A field that isn't known is refused, rather than ignored."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, body: Any) -> Any:
        """Each unknown field is an error of its own, and a body has room for millions."""
        if isinstance(body, dict) and len(body) > MAX_FIELDS:
            raise ValueError(f"an object has {len(body)} fields, more than {MAX_FIELDS}: send fewer")
        return body


class StreamOptions(Body):
    """What a stream has besides the answer."""

    include_usage: bool = False  # one more chunk at the end, with the whole request's usage


class SamplingBody(Body):
    """Fields of chats and of completions alike."""

    model: str | None = Field(
        None, max_length=1024, description="The base model or an adapter; default: the base model"
    )
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | Stops | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LIST)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=1024, description="Whom the request is for, as the log will say")

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Stops | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = Field(None, max_length=1024, description="Cached KV is shared with equal salts only")
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_fields(self) -> dict[str, Any]:
        """What of `SamplingParams` the body says; OpenAI's default temperature."""
        given = {name: getattr(self, name) for name in _SAMPLING}
        fields = {name: value for name, value in given.items() if value is not None}
        fields.setdefault("temperature", 1.0)
        if self.logit_bias is not None:
            fields["logit_bias"] = _by_token(self.logit_bias)
        return fields

    def check_stream(self) -> None:
        """Raises `SamplingParamsError` for stream options without a stream."""
        if self.stream_options is not None and not self.stream:
            raise SamplingParamsError("stream_options is given without stream: set stream, or leave the options out")


_SAMPLING = (
    "temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty", "top_k", "min_p",
    "repetition_penalty", "min_tokens", "stop_token_ids", "allowed_token_ids", "bad_words", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip


def _by_token(biases: Mapping[str, float]) -> dict[int, float]:
    """JSON's keys are strings."""
    wrong = [token for token in biases if not token.isdecimal() or len(token) > MAX_DIGITS]
    if wrong:
        raise SamplingParamsError(f"logit_bias has the key {wrong[0][:32]!r}: give token ids")
    return {int(token): bias for token, bias in biases.items()}


def usage_of(metrics: list[RequestMetrics], num_completion_tokens: int) -> dict[str, Any]:
    """The `usage` of an answer to one prompt or to several."""
    num_prompt = sum(m.prompt_tokens for m in metrics)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(m.cached_tokens for m in metrics)},
    }


class _Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error."""

    error: _Error


Status = Literal[400, 401, 403, 404, 409, 413, 429, 500, 503, 504]


def error_responses(*statuses: Status) -> dict[int | str, dict[str, Any]]:
    """For the OpenAPI document: errors that a route may answer with. All others below 500 look the same."""
    return {status: {"model": ErrorBody} for status in (400, 401, 413, *statuses, "4XX")}


PLAIN_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


def answers() -> dict[int | str, dict[str, Any]]:
    """For the OpenAPI document: responses of what a model answers, in one piece or as a stream."""
    stream = {"schema": {"type": "string"}}
    return {200: {"content": {"text/event-stream": stream}}, **error_responses(404, 429, 500, 503, 504)}
