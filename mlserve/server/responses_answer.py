"""Outputs of the engine as answers of /v1/responses, whole or in events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlserve.engine.tokenizer import Tokenizer
from mlserve.request import FinishReason, RequestOutput, SamplingParams, StreamOutput, TokenLogprob
from mlserve.server.chat_answer import OutputParser, image_reports
from mlserve.server.errors import ApiError
from mlserve.server.logprobs import LogprobStream, chat_logprobs
from mlserve.server.protocol.common import usage_of
from mlserve.server.protocol.responses import ResponsesBody
from mlserve.server.response_items import Event, OutputItems, Status
from mlserve.server.sse import event
from mlserve.server.tools.deltas import Content

__all__ = ["ResponseStream", "ResponsesAnswer"]


@dataclass(frozen=True, slots=True)
class ResponsesAnswer:
    """How one request for a response is answered."""

    request_id: str
    created: int  # Unix seconds
    model: str
    body: ResponsesBody
    tokenizer: Tokenizer
    params: SamplingParams
    make_parser: Callable[[], OutputParser]

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The answer in one piece."""
        reader = _Reader(self)
        (completion,) = output.outputs
        reader.read(completion.text, completion.logprobs or [], completion.finish_reason)
        return self.ended(reader.items, output)

    def ended(self, items: OutputItems, output: RequestOutput) -> dict[str, Any]:
        """The response as it is when all has come."""
        (completion,) = output.outputs
        usage = usage_of([output.metrics], len(completion.token_ids))
        status = _status(completion.finish_reason)
        cut = None if status is Status.COMPLETED else {"reason": "max_output_tokens"}
        shown = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        return self.response(status, items, incomplete_details=cut, usage=shown, **image_reports(output.images))

    def response(self, status: Status, items: OutputItems, **more: Any) -> dict[str, Any]:
        """The response as far as it has come."""
        return {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": items.shown(),
            "temperature": self.params.temperature,
            "top_p": self.params.top_p,
            **self.body.echo(),
            "usage": None,
            **more,
        }


class ResponseStream:
    """The events of one answer, numbered. An error is told by the last two."""

    def __init__(self, answer: ResponsesAnswer) -> None:
        self._answer = answer
        self._reader = _Reader(answer)
        self._num_sent = 0

    async def events(self, outputs: AsyncIterator[StreamOutput]) -> AsyncGenerator[bytes]:
        """The whole answer."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event({"type": kind, "response": self._response(Status.IN_PROGRESS)})
        async for output in outputs:
            for body in self._reader.read(output.text, output.logprobs or [], output.finish_reason):
                yield self._event(body)
            if output.completed is not None:
                response = self._answer.ended(self._reader.items, output.completed)
                yield self._event({"type": f"response.{response['status']}", "response": response})

    def failure(self, error: ApiError) -> Iterator[bytes]:
        """An error in the midst of it: the response as far as it came, then what makes the openai package raise."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"  # those that the API has
        response = self._response(Status.FAILED, error={"code": code, "message": str(error)})
        yield self._event({"type": "response.failed", "response": response})
        flat = {"code": error.code or code, "message": str(error), "param": error.param}
        yield self._event({"type": "error", **flat, **error.body})

    def _response(self, status: Status, **more: Any) -> dict[str, Any]:
        return self._answer.response(status, self._reader.items, **more)

    def _event(self, body: Event) -> bytes:
        self._num_sent += 1
        return event({**body, "sequence_number": self._num_sent - 1}, body["type"])


class _Reader:
    """Makes items of what the engine gives."""

    def __init__(self, answer: ResponsesAnswer) -> None:
        self.items = OutputItems(answer.request_id)
        self._tokenizer = answer.tokenizer
        self._parser = answer.make_parser()
        self._logprobs: LogprobStream | None = None
        if answer.params.logprobs is not None:
            self._logprobs = LogprobStream(answer.tokenizer, answer.params.skip_special_tokens)

    def read(self, text: str, entries: Sequence[TokenLogprob], reason: FinishReason | None) -> list[Event]:
        """The answer's next piece, and why it ends there if it does."""
        is_last = reason is not None
        deltas = self._parser.feed(text)
        if is_last:
            deltas += self._parser.finish()
        due = [] if self._logprobs is None else self._logprobs.advance(text, entries, is_last)
        shown = chat_logprobs(due, self._tokenizer)["content"]
        if shown and not deltas:
            deltas = [Content("")]  # for tokens without a text
        events: list[Event] = []
        for delta in deltas:  # one only, if there are logprobs: they exclude tools
            events += self.items.add(delta, shown)
        return [*events, *self.items.finish(_status(reason))] if is_last else events


def _status(reason: FinishReason | None) -> Status:
    return Status.COMPLETED if reason is FinishReason.STOP else Status.INCOMPLETE
