"""What the largest step takes of a GPU's memory, by running it."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mlserve.model.plan import StepPlan
from mlserve.request import SamplingParams

if TYPE_CHECKING:
    from mlserve.model.positions import RopePositions
    from mlserve.vision.placement import PlacedImage

__all__ = ["Filler", "largest_step", "peak_bytes"]


@dataclass(frozen=True, slots=True, eq=False)
class Filler:
    """A sequence of the base model that means nothing; all of its blocks are block 0, which is never handed out."""

    token_ids: list[int]
    block_table: array[int]
    params: SamplingParams
    num_computed: int = 0
    seed: int = 0
    banned_until_min: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    matcher: None = None
    wants_prompt_logprobs: bool = False
    images: tuple[PlacedImage, ...] = ()
    whole_ranges: tuple[tuple[int, int], ...] = ()
    rope_positions: RopePositions | None = None
    adapter_slot: int | None = None
    adapter_start: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """All are."""
        return len(self.token_ids)


def largest_step(num_tokens: int, num_seqs: int, max_model_len: int, block_size: int) -> StepPlan[Filler]:
    """As many tokens as a step may have, in as many sequences as it may have, each of which gets a token.

    The first sequences are as long as they may be, the others have one token each. num_tokens is at least num_seqs.
    """
    lengths = [1] * num_seqs
    left = num_tokens - num_seqs
    for i in range(num_seqs):
        more = min(left, max_model_len - 1)
        lengths[i] += more
        left -= more
    params = SamplingParams(temperature=1.0, top_k=50, top_p=0.9)  # what takes most memory to sample with
    fillers = [Filler([0] * length, array("i", [0] * -(-length // block_size)), params) for length in lengths]
    return StepPlan(fillers, lengths, list(range(num_seqs)))


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """The most memory that work on a GPU holds at once, what it keeps between two times included."""
    before = torch.cuda.memory_allocated(device)
    work()  # kernels are compiled, and libraries try out what is fastest, which may take more than they use later
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
