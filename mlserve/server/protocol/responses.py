"""Bodies of /v1/responses. No response is kept, so whatever refers to an earlier one is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from mlserve.errors import SamplingParamsError
from mlserve.server.errors import ApiError
from mlserve.server.protocol.chat import MAX_MESSAGES, MAX_TOP_LOGPROBS, ChatBody, JsonSchema, ResponseFormat
from mlserve.server.protocol.common import Body, Stops
from mlserve.server.protocol.response_input import read_input, read_tool_choice, read_tools

__all__ = ["ResponsesBody"]

LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16
_NOT_KEPT = "no response is kept here: send the whole conversation as input"
_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {  # field -> values that say what is so anyway, and a remedy
    "background": ((False,), "leave it out, and wait for the answer or stream it"),
    "conversation": ((), _NOT_KEPT),
    "max_tool_calls": ((), "leave it out: no tools run here"),
    "previous_response_id": ((), _NOT_KEPT),
    "prompt": ((), "give instructions and input: no prompts are kept here"),
    "prompt_cache_key": ((), "leave it out: cached beginnings are found without it, and cache_salt keeps them apart"),
    "reasoning": ((), "leave it out, or give chat_template_kwargs if the model's chat template takes some"),
    "service_tier": (("auto", "default"), "leave it out, or give priority"),
    "store": ((False,), "set it to false: no response is kept here"),
    "truncation": (("disabled",), "send a shorter input"),
}
# What is called the same in chats.
_AS_IN_CHATS = (
    "model", "temperature", "top_p", "stream", "parallel_tool_calls", "user", "seed", "stop", "top_k", "min_p",
    "repetition_penalty", "cache_salt", "priority", "image_identity", "chat_template_kwargs",
)  # fmt: skip


class PlainFormat(Body):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(JsonSchema):
    """JSON that follows a schema."""

    type: Literal["json_schema"]


class TextConfig(Body):
    """What the text of the answer must be."""

    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(Body):
    """How events are sent."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(Body):
    """OpenAI's responses, without what they keep on the server and the tools that it runs; and what we have besides."""

    model: str | None = Field(
        None, max_length=1024, description="The base model or an adapter; default: the base model"
    )
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES - 1)]
    instructions: str | None = Field(None, description="A system message before the input")
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextConfig | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[str], Field(max_length=16)] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        None, max_length=MAX_METADATA, description="Comes back with the answer"
    )
    user: str | None = Field(None, max_length=1024, description="Whom the request is for, as the log will say")
    safety_identifier: str | None = Field(None, max_length=1024, description="The same; wins over `user`")

    background: Any = Field(None, description="Not served but false")
    conversation: Any = Field(None, description="Not served")
    max_tool_calls: Any = Field(None, description="Not served")
    previous_response_id: Any = Field(None, description="Not served")
    prompt: Any = Field(None, description="Not served")
    prompt_cache_key: Any = Field(None, description="Not served")
    reasoning: Any = Field(None, description="Not served")
    service_tier: Any = Field(None, description="Not served but 'auto' and 'default'")
    store: Any = Field(None, description="Not served but false, which is the default here")
    truncation: Any = Field(None, description="Not served but 'disabled'")

    seed: int | None = None
    stop: str | Stops | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    cache_salt: str | None = Field(None, max_length=1024, description="Cached KV is shared with equal salts only")
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    image_identity: Literal["exact", "perceptual"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self) -> ChatBody:
        """The chat that this asks for. Raises a `RequestError`, or `ApiError` for what isn't served."""
        self._check()
        return ChatBody(
            messages=read_input(self.input, self.instructions),  # type: ignore[arg-type]  # validated there
            max_tokens=self.max_output_tokens,
            logprobs=self._wants_logprobs or None,
            top_logprobs=self.top_logprobs,
            tools=read_tools(self.tools),
            tool_choice=read_tool_choice(self.tool_choice),
            response_format=self._response_format(),
            **{name: getattr(self, name) for name in _AS_IN_CHATS},
        )

    def echo(self) -> dict[str, Any]:
        """What a response repeats of its request."""
        wanted = None if self.text is None else self.text.format
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "text": {
                "format": {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
            },
            "tool_choice": "auto" if self.tool_choice is None else self.tool_choice,
            "tools": self.tools or [],
            "top_logprobs": self.top_logprobs or 0,
            "truncation": "disabled",
            "user": self.user,
            "safety_identifier": self.safety_identifier,
        }

    @property
    def _wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def _check(self) -> None:
        for name, (allowed, remedy) in _REFUSED.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise ApiError(400, f"{name} isn't served: {remedy}", param=name, code="unsupported_parameter")
        unknown = set(self.include or ()) - {LOGPROBS}
        if unknown:
            raise ApiError(
                400, f"include has {min(unknown)[:100]!r}, which isn't served: give {LOGPROBS!r} or nothing",
                param="include", code="unsupported_parameter",
            )  # fmt: skip
        if self.top_logprobs is not None and not self._wants_logprobs:
            raise SamplingParamsError(f"top_logprobs is given, and include hasn't {LOGPROBS!r}: add it there")
        if self._wants_logprobs and self.tools and self.tool_choice != "none":
            raise SamplingParamsError(
                f"include has {LOGPROBS!r}, which calls of tools don't have: leave the tools out, or tool_choice 'none'"
            )
        if self.stream_options is not None and not self.stream:
            raise SamplingParamsError("stream_options is given without stream: set stream, or leave the options out")

    def _response_format(self) -> ResponseFormat | None:
        wanted = None if self.text is None else self.text.format
        if isinstance(wanted, SchemaFormat):
            schema = JsonSchema(**wanted.model_dump(exclude={"type"}))
            return ResponseFormat(type=wanted.type, json_schema=schema)
        return None if wanted is None else ResponseFormat(type=wanted.type)
