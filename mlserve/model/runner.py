"""Runs one planned step on the model: inputs, forward pass, logits, sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mlserve.adapters.linear import StepAdapters
from mlserve.adapters.slots import AdapterSlots, Projection
from mlserve.kernels import kv_pool
from mlserve.model.decoder import Decoder
from mlserve.model.graphs import DecodeGraphs, GraphOptions
from mlserve.model.inputs import ImageRows, StepInputs, image_pieces, image_rows, step_inputs, upload
from mlserve.model.plan import SequenceT, StepPlan, StepResult
from mlserve.model.sampler import Sampler, prompt_logprobs
from mlserve.model.staging import uploads_for
from mlserve.request import TokenLogprob
from mlserve.vision.encoding import ImageEncoder

__all__ = ["ModelRunner"]

LOGIT_ROWS_AT_ONCE = 256  # prompt logprobs need [rows, vocabulary] float32: 256 rows of 150k tokens are 150 MB


class ModelRunner:
    """Owns the KV memory and the adapters' slots. The only part of the engine that touches tensors."""

    def __init__(
        self,
        decoder: Decoder,
        num_blocks: int,
        block_size: int,
        kv_dtype: torch.dtype,
        adapters: AdapterSlots,
        images: ImageEncoder | None = None,
        graphs: GraphOptions | None = None,
    ) -> None:
        """`images`: None for a model that takes none. `graphs`: None runs decode steps as all others."""
        config = decoder.config
        self.decoder = decoder
        self.adapters = adapters
        self.images = images
        self.block_size = block_size
        self.device = decoder.device
        self.sampler = Sampler()
        self._uploads = uploads_for(decoder.device)
        self.kv = kv_pool(
            num_blocks, config.num_layers, block_size, config.num_kv_heads, config.head_dim, kv_dtype, self.device
        )
        self._graphs = None if graphs is None else DecodeGraphs(decoder, self.kv, block_size, adapters, graphs)

    @torch.inference_mode()
    def run(self, plan: StepPlan[SequenceT]) -> StepResult:
        """Compute the plan's tokens, write their KV, and sample where the plan says so.

        Writes nothing but KV, and that to slots which no finished block shares, so a step can be run again.
        """
        spans = dict(_prompt_logprob_spans(plan))
        ends = list(accumulate(plan.query_lens))
        sampled_rows = [ends[row] - 1 for row in plan.sampled]
        wanted = sorted({*sampled_rows, *(i for span in spans.values() for i in span)})
        for load in plan.loads:
            self.adapters.write(load.slot, load.adapter)
        inputs, images = step_inputs(plan, wanted, self.block_size), self._image_rows(plan)
        result = StepResult()
        if self._graphs is not None and images is None and not spans:
            logits = self._graphs.logits(inputs)
            if logits is not None:
                if sampled_rows:
                    self._sample(plan, logits, result)
                return result
        hidden = self._forward(inputs, images)
        at = {token_row: i for i, token_row in enumerate(wanted)}
        for row, span in spans.items():
            if span:
                rows = range(at[span[0]], at[span[-1]] + 1)  # a span's rows are consecutive
                result.prompt_logprobs[row] = self._prompt_logprobs(plan, row, hidden, rows)
        if sampled_rows:
            self._sample(plan, hidden.logits([at[i] for i in sampled_rows]), result)
        return result

    def _forward(self, inputs: StepInputs, images: ImageRows | None) -> Hidden:
        batch = upload(inputs, self._uploads, self.adapters, self.decoder.ops, images)
        self._uploads.send()
        return Hidden(self.decoder, self.decoder.forward(batch, self.kv), batch.logit_adapters)

    def _image_rows(self, plan: StepPlan[SequenceT]) -> ImageRows | None:
        if self.images is None:
            return None
        pieces = image_pieces(plan)
        if not pieces:
            return None
        return image_rows(pieces, self.images.embeddings(pieces), self._uploads)

    def _sample(self, plan: StepPlan[SequenceT], logits: Tensor, result: StepResult) -> None:
        sampled = self.sampler.sample(logits, [plan.sequences[row] for row in plan.sampled])
        for i, row in enumerate(plan.sampled):
            if i in sampled.errors:
                result.errors[row] = sampled.errors[i]
                continue
            result.token_ids[row] = sampled.token_ids[i]
            logprob = sampled.logprobs[i]
            if logprob is not None:
                result.logprobs[row] = logprob

    def _prompt_logprobs(self, plan: StepPlan[SequenceT], row: int, hidden: Hidden, rows: range) -> list[TokenLogprob]:
        sequence = plan.sequences[row]
        first = sequence.num_computed + 1
        targets = sequence.token_ids[first : first + len(rows)]
        top = sequence.params.prompt_logprobs or 0
        found = []
        for at in range(0, len(targets), LOGIT_ROWS_AT_ONCE):
            logits = hidden.logits(rows[at : at + LOGIT_ROWS_AT_ONCE])
            found += prompt_logprobs(logits, targets[at : at + LOGIT_ROWS_AT_ONCE], top)
        return found


@dataclass(frozen=True, slots=True)
class Hidden:
    """Hidden states of the rows whose logits are wanted, and how logits are made of them."""

    decoder: Decoder
    states: Tensor  # [R, H]
    adapters: StepAdapters | None  # of these rows

    def logits(self, rows: Sequence[int]) -> Tensor:
        """`[len(rows), V]` float32."""
        if len(rows) == len(self.states):
            return self.decoder.logits(self.states, self.adapters)
        adapters = self.adapters
        if adapters is not None:
            adapters = adapters.select(rows) if adapters.changes(Projection.LM_HEAD) else None
        return self.decoder.logits(self.states[list(rows)], adapters)


def _prompt_logprob_spans(plan: StepPlan[SequenceT]) -> Iterator[tuple[int, range]]:
    """For each row that wants them: the step's token rows which predict a prompt token."""
    end = 0
    for row, (sequence, query_len) in enumerate(zip(plan.sequences, plan.query_lens, strict=True)):
        start, end = end, end + query_len
        if sequence.wants_prompt_logprobs:
            predicting = min(query_len, sequence.num_prompt_tokens - 1 - sequence.num_computed)
            yield row, range(start, start + max(predicting, 0))
