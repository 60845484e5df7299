"""Bodies of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import Field, StrictInt

from mlserve.errors import SamplingParamsError
from mlserve.request import SamplingParams
from mlserve.server.protocol.common import MAX_IDS, SamplingBody

__all__ = ["CompletionBody"]

MAX_PROMPTS = 256
MAX_ANSWERS = 1024  # prompts times n
MAX_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 16  # OpenAI's

Ids = Annotated[list[StrictInt], Field(max_length=MAX_IDS, fail_fast=True)]


class CompletionBody(SamplingBody):
    """OpenAI's completions: one prompt or several, texts or token ids."""

    prompt: (
        str
        | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | Ids
        | Annotated[list[Ids], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def prompts(self) -> list[str | list[int]]:
        """Each prompt. One that is empty is left to whoever checks prompts."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and not isinstance(self.prompt[0], int):
            return cast(list[str | list[int]], self.prompt)
        return [cast(list[int], self.prompt)]

    def sampling(self, **more: Any) -> SamplingParams:
        """How tokens are chosen."""
        self.check_stream()
        num_answers = len(self.prompts()) * (self.n or 1)
        if num_answers > MAX_ANSWERS:
            raise SamplingParamsError(
                f"the prompts have {num_answers} answers, limit {MAX_ANSWERS}: lower n or send fewer prompts"
            )
        return SamplingParams(
            max_tokens=DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
            **{**self.sampling_fields(), **more},
        )
