"""Bodies of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import Field

from mlserve.request import SamplingParams
from mlserve.server.protocol.common import SamplingBody

__all__ = ["CompletionBody"]

MAX_PROMPTS = 256
MAX_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 16  # OpenAI's

Ids = Annotated[list[int], Field(max_length=2**21)]


class CompletionBody(SamplingBody):
    """OpenAI's completions: one prompt or several, texts or token ids."""

    prompt: (
        str
        | Annotated[list[str], Field(max_length=MAX_PROMPTS)]
        | Ids
        | Annotated[list[Ids], Field(max_length=MAX_PROMPTS)]
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
        return SamplingParams(
            max_tokens=DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
            **{**self.sampling_fields(), **more},
        )
