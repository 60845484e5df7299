"""Bodies of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mlserve.errors import SamplingParamsError
from mlserve.request import SamplingParams
from mlserve.server.protocol.common import Body, SamplingBody

__all__ = ["ChatBody", "ChatMessage", "ResponseFormat"]

MAX_MESSAGES = 4096
MAX_TOP_LOGPROBS = 20


class ChatMessage(BaseModel):
    """A message; what else it has, such as `name` or `tool_calls`, goes to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(max_length=64)
    content: str | list[dict[str, Any]] | None = None


class JsonSchema(BaseModel):
    """A schema that the answer follows."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    name: str = Field(max_length=64)
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None  # answers always follow the schema


class ResponseFormat(Body):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatBody(SamplingBody):
    """OpenAI's chat completions, and what mlserve has besides."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None

    image_identity: Literal["exact", "perceptual"] | None = Field(
        None, description="Whether images that look alike are the same; default: as the server is set"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables that the chat template reads")

    def sampling(self, max_model_len: int, **more: Any) -> SamplingParams:
        """How tokens are chosen; without a limit of tokens up to the longest context."""
        self.check_stream()
        if self.top_logprobs is not None and not self.logprobs:
            raise SamplingParamsError("top_logprobs is given without logprobs: set logprobs, or leave it out")
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return SamplingParams(
            max_tokens=min(limits, default=max_model_len),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            **{**self.sampling_fields(), **more},
        )

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as they came."""
        return [message.model_dump(exclude_unset=True) for message in self.messages]
