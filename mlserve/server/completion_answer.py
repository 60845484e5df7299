"""Outputs of the engine as answers of /v1/completions, whole or in chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlserve.engine.tokenizer import Tokenizer
from mlserve.request import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams, StreamOutput, TokenLogprob
from mlserve.server.logprobs import CompletionLogprobs, LogprobStream
from mlserve.server.protocol.common import usage_of
from mlserve.server.sse import event

__all__ = ["CompletionAnswer"]


@dataclass(frozen=True, slots=True)
class CompletionAnswer:
    """How one body with one prompt or several is answered. Choice p * n + i is the i-th of prompt p."""

    request_id: str
    created: int  # Unix seconds
    model: str
    tokenizer: Tokenizer
    params: SamplingParams
    prompts: Sequence[str | list[int]]
    echo: bool
    include_usage: bool

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer in one piece."""
        choices = []
        for number, output in enumerate(outputs):
            choices += [self._choice(number, output, completion) for completion in output.outputs]
        num_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        return {**self._body(choices), "usage": usage_of([output.metrics for output in outputs], num_tokens)}

    async def events(self, outputs: AsyncIterator[tuple[int, StreamOutput]]) -> AsyncGenerator[bytes]:
        """The answer as server-sent events; `outputs` says which prompt each output is of."""
        n = self.params.n
        choices = [_Choice(self, number) for number in range(len(self.prompts)) for _ in range(n)]
        num_tokens, metrics = 0, list[RequestMetrics]()
        async for number, output in outputs:
            num_tokens += len(output.token_ids)
            index = number * n + output.index
            chunk = choices[index].chunk(index, output)
            if chunk is not None:
                yield event(self._body([chunk]))
            if output.completed is not None:
                metrics.append(output.completed.metrics)
        if self.include_usage:
            yield event({**self._body([]), "usage": usage_of(metrics, num_tokens)})

    def echoed(self, number: int) -> str:
        """The text of a prompt."""
        prompt = self.prompts[number]
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt, skip_special_tokens=False)

    def _choice(self, number: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        choice = _Choice(self, number)
        index = number * self.params.n + completion.index
        logprobs = choice.logprobs(output, completion.text, completion.logprobs or [], is_last=True)
        reason = None if completion.finish_reason is None else completion.finish_reason.value
        text = (self.echoed(number) if self.echo else "") + completion.text
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self.request_id}",
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


class _Choice:
    """One sequence of the answer, as far as it has come."""

    def __init__(self, answer: CompletionAnswer, number: int) -> None:
        self._answer = answer
        self._number = number
        self._has_begun = False
        self._stream: LogprobStream | None = None
        if answer.params.logprobs is not None:
            self._stream = LogprobStream(answer.tokenizer, answer.params.skip_special_tokens)
        self._list = CompletionLogprobs(answer.tokenizer)

    def logprobs(
        self, output: RequestOutput | None, text: str, entries: Sequence[TokenLogprob], *, is_last: bool
    ) -> dict[str, Any] | None:
        """Those that are due; with `output`, whose prompt's are known by then, the prompt's first."""
        if self._stream is None:
            return None
        if output is not None and self._answer.echo:
            for token_id, entry in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True):
                self._list.add(token_id, entry)
        for due in self._stream.advance(text, entries, is_last):
            self._list.add(due.token_id, due)
        return self._list.take()

    def chunk(self, index: int, output: StreamOutput) -> dict[str, Any] | None:
        """What an output adds to the stream, if anything."""
        is_last = output.finish_reason is not None
        logprobs = self.logprobs(None, output.text, output.logprobs or [], is_last=is_last)
        text = output.text
        if self._answer.echo and not self._has_begun:
            text = self._answer.echoed(self._number) + text
        self._has_begun = True
        reason = None if output.finish_reason is None else output.finish_reason.value
        if not text and reason is None and not (logprobs and logprobs["tokens"]):
            return None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
