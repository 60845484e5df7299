"""Outputs of the engine as answers of /v1/chat/completions, whole or in chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from mlserve.engine.tokenizer import Tokenizer
from mlserve.request import FinishReason, ImageReport, RequestOutput, SamplingParams, StreamOutput, TokenLogprob
from mlserve.server.logprobs import LogprobStream, chat_logprobs
from mlserve.server.protocol.common import usage_of
from mlserve.server.sse import event
from mlserve.server.tools.deltas import CallArguments, CallStart, Content, Delta, join

__all__ = ["ChatAnswer", "OutputParser", "PlainText", "image_reports"]


class OutputParser(Protocol):
    """Tells tool calls in a text from the rest. One for each choice."""

    def feed(self, text: str) -> list[Delta]:
        """What more text makes certain."""
        ...

    def finish(self) -> list[Delta]:
        """What is left at the end."""
        ...


class PlainText:
    """A text without tool calls."""

    def feed(self, text: str) -> list[Delta]:
        return [Content(text)] if text else []

    def finish(self) -> list[Delta]:
        return []


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """How one chat is answered."""

    request_id: str
    created: int  # Unix seconds
    model: str
    tokenizer: Tokenizer
    params: SamplingParams
    make_parser: Callable[[], OutputParser]
    include_usage: bool

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The answer in one piece."""
        choices = []
        for completion in output.outputs:
            choice = _Choice(self, completion.index)
            deltas, entries = choice.advance(completion.text, completion.logprobs or [], is_last=True)
            content, calls = join(deltas)
            message: dict[str, Any] = {
                "role": "assistant",
                "content": content or (None if calls else ""),
                "refusal": None,
            }
            if calls:
                message["tool_calls"] = [
                    {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                    for c in calls
                ]
            choices.append(
                {
                    "index": completion.index,
                    "message": message,
                    "logprobs": None if completion.logprobs is None else chat_logprobs(entries, self.tokenizer),
                    "finish_reason": _reason(completion.finish_reason, bool(calls)),
                }
            )
        num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
        body = self._body("chat.completion", choices)
        body["usage"] = usage_of([output.metrics], num_tokens)
        return body | image_reports(output.images)

    async def events(self, outputs: AsyncIterator[StreamOutput]) -> AsyncGenerator[bytes]:
        """The answer as server-sent events, without the end that every stream has."""
        choices = [_Choice(self, index) for index in range(self.params.n)]
        num_tokens = 0
        for choice in choices:
            yield event(self._chunk(choice.index, {"role": "assistant", "content": ""}))
        async for output in outputs:
            num_tokens += len(output.token_ids)
            for chunk in choices[output.index].chunks(output):
                yield event(chunk)
            if output.completed is not None:
                extra = image_reports(output.completed.images)
                if self.include_usage:
                    usage = usage_of([output.completed.metrics], num_tokens)
                    yield event({**self._body("chat.completion.chunk", []), "usage": usage, **extra})
                elif extra:
                    yield event({**self._body("chat.completion.chunk", []), **extra})

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._body("chat.completion.chunk", [choice])


class _Choice:
    """One sequence of the answer, as far as it has come."""

    def __init__(self, answer: ChatAnswer, index: int) -> None:
        self.index = index
        self._answer = answer
        self._parser = answer.make_parser()
        self._logprobs: LogprobStream | None = None
        if answer.params.logprobs is not None:
            self._logprobs = LogprobStream(answer.tokenizer, answer.params.skip_special_tokens)
        self._has_calls = False

    def advance(
        self, text: str, entries: Iterable[TokenLogprob], *, is_last: bool
    ) -> tuple[list[Delta], list[TokenLogprob]]:
        """Deltas and logprobs that are certain after more text."""
        deltas = self._parser.feed(text)
        if is_last:
            deltas += self._parser.finish()
        self._has_calls |= any(isinstance(delta, CallStart) for delta in deltas)
        due = [] if self._logprobs is None else self._logprobs.advance(text, list(entries), is_last)
        return deltas, due

    def chunks(self, output: StreamOutput) -> list[dict[str, Any]]:
        """What an output adds to the stream."""
        answer = self._answer
        is_last = output.finish_reason is not None
        deltas, due = self.advance(output.text, output.logprobs or [], is_last=is_last)
        logprobs = chat_logprobs(due, answer.tokenizer) if due else None
        chunks = []
        for delta in deltas or ([Content("")] if logprobs else []):
            chunks.append(answer._chunk(self.index, _wire(delta), logprobs))
            logprobs = None
        if is_last:
            chunks.append(answer._chunk(self.index, {}, None, _reason(output.finish_reason, self._has_calls)))
        return chunks


def _wire(delta: Delta) -> dict[str, Any]:
    match delta:
        case Content(text):
            return {"content": text}
        case CallStart(index, id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _reason(reason: FinishReason | None, has_calls: bool) -> str | None:
    if reason is FinishReason.STOP and has_calls:
        return "tool_calls"
    return None if reason is None else reason.value


def image_reports(images: list[ImageReport | None]) -> dict[str, Any]:
    """Which images an answer is about, as an extra field; none for a text."""
    if not images:
        return {}
    reports = [
        None
        if image is None
        else {
            "digest": image.digest.hex(),
            "canonical": image.canonical.hex(),
            "hash": image.hash_name,
            "distance": image.distance,
        }
        for image in images
    ]
    return {"images": reports}
