"""Turns tokens of a step into text, stream outputs, and finally a request's whole output."""

from __future__ import annotations

import time
from collections.abc import Callable

from mlserve.engine.detokenize import IncrementalDetokenizer
from mlserve.engine.media import image_report
from mlserve.engine.sequence import EngineRequest, Sequence
from mlserve.engine.tokenizer import Tokenizer
from mlserve.model.plan import StepPlan, StepResult
from mlserve.request import CompletionOutput, FinishReason, RequestOutput, StreamOutput, TokenLogprob

__all__ = ["OutputProcessor"]

Finish = Callable[[Sequence, FinishReason, str | int | None], None]


class OutputProcessor:
    """Keeps, for each live request, the text and logprobs so far; nothing once the request has ended."""

    def __init__(self, tokenizer: Tokenizer, finish: Finish) -> None:
        self._tokenizer = tokenizer
        self._finish = finish  # the scheduler's: ends a sequence whose text holds a stop string
        self._outputs: dict[str, RequestOutput] = {}
        self._detokenizers: dict[Sequence, IncrementalDetokenizer] = {}

    def __len__(self) -> int:
        """Live requests."""
        return len(self._outputs)

    def open(self, request: EngineRequest) -> None:
        """Begin to collect a request's output."""
        wants_logprobs = request.params.logprobs is not None
        self._outputs[request.request_id] = RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[CompletionOutput(s.index, "", [], [] if wants_logprobs else None) for s in request.sequences],
            metrics=request.metrics,
            prompt_logprobs=None if request.params.prompt_logprobs is None else [None],
            images=[image_report(image) for image in request.images],
        )
        for sequence in request.sequences:
            self._detokenizers[sequence] = IncrementalDetokenizer(self._tokenizer, request.params)

    def is_open(self, sequence: Sequence) -> bool:
        """Whether its last output is still to come."""
        return sequence in self._detokenizers

    def process(self, plan: StepPlan[Sequence], result: StepResult) -> list[StreamOutput]:
        """Outputs of a step that the scheduler has committed."""
        now = time.monotonic()
        outputs = []
        for row, prompt_logprobs in result.prompt_logprobs.items():
            sequence = plan.sequences[row]
            first = sequence.num_computed - plan.query_lens[row] + 1  # a prefill that starts anew repeats itself
            collected = self._outputs[sequence.request.request_id].prompt_logprobs
            if collected is not None:
                collected[first:] = prompt_logprobs
        for row, token in result.token_ids.items():
            outputs.append(self._token(plan.sequences[row], token, result.logprobs.get(row), now))
        for row, sequence in enumerate(plan.sequences):
            if row not in result.token_ids and sequence.is_finished:
                outputs.append(self.close(sequence))
        return outputs

    def close(self, sequence: Sequence) -> StreamOutput:
        """The last output of a sequence that ended without a token: aborted, failed, or only its prompt was wanted."""
        return self._emit(sequence, "", [], None, time.monotonic())

    def _token(self, sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float) -> StreamOutput:
        metrics = sequence.request.metrics
        if metrics.first_token is None:
            metrics.first_token = now
        detokenizer = self._detokenizers[sequence]
        text = detokenizer.append([token])
        if detokenizer.stop_string is not None:
            self._finish(sequence, FinishReason.STOP, detokenizer.stop_string)
            sequence.finish_reason = FinishReason.STOP  # also if the same token was the last one allowed
            sequence.stop_reason = detokenizer.stop_string
        return self._emit(sequence, text, [token], None if logprob is None else [logprob], now)

    def _emit(
        self, sequence: Sequence, text: str, token_ids: list[int], logprobs: list[TokenLogprob] | None, now: float
    ) -> StreamOutput:
        request = sequence.request
        collected = self._outputs[request.request_id]
        completion = collected.outputs[sequence.index]
        if sequence.is_finished:
            text += self._detokenizers.pop(sequence).finish()
            completion.finish_reason, completion.stop_reason = sequence.finish_reason, sequence.stop_reason
            collected.error = collected.error or sequence.error
        completion.text += text
        completion.token_ids += token_ids
        if completion.logprobs is not None and logprobs is not None:
            completion.logprobs += logprobs
        if sequence.is_finished and all(s.is_finished and s not in self._detokenizers for s in request.sequences):
            del self._outputs[request.request_id]
            request.metrics.finished = now
            collected.finished = True
        return StreamOutput(
            request_id=request.request_id,
            index=sequence.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            error=sequence.error,
            completed=collected if collected.finished else None,
        )
