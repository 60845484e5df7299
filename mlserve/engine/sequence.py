"""A request inside the engine, and the `n` sequences it is answered with."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlserve.cache.manager import SequenceBlocks
from mlserve.cache.marks import Mark
from mlserve.model.plan import TokenMatcher
from mlserve.request import FinishReason, RequestMetrics, RequestOptions, SamplingParams

if TYPE_CHECKING:
    from mlserve.adapters.host import HostAdapter
    from mlserve.adapters.registry import AdapterLease
    from mlserve.model.positions import RopePositions
    from mlserve.vision.placement import PlacedImage

__all__ = ["EngineRequest", "Flow", "Sequence"]

# Who is served fairly against whom: an adapter's digest (None: the base model) and a tenant (None: nobody known).
Flow = tuple[bytes | None, str | None]


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's sequences: its tokens, its blocks, and how far it is.

    token_ids:  [0 ... num_prompt_tokens) prompt | [num_prompt_tokens ...) output
                [0 ... num_computed) KV is written | the rest is still to be computed
    """

    request: EngineRequest
    index: int
    token_ids: list[int]
    blocks: SequenceBlocks  # those of its adapter's KV once that is known, see `RequestFactory.use_adapter`
    seed: int
    max_total_tokens: int  # prompt plus output may not grow beyond this
    order: tuple[int, int, int]  # (priority, arrival, index): lower goes first
    params: SamplingParams = field(init=False)
    num_prompt_tokens: int = field(init=False)
    stop_ids: frozenset[int] = frozenset()  # tokens that end it
    banned_until_min: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    matcher: TokenMatcher | None = None  # has taken over all tokens of the output; None: no constraint, or ended
    wants_prompt_logprobs: bool = False
    num_computed: int = 0
    overtaken: int = 0  # how often a later sequence was admitted while this one waited for blocks or for a slot
    whole_ranges: tuple[tuple[int, int], ...] = ()  # of the prompt, ascending: no step may end within one
    adapter: HostAdapter | None = None
    adapter_start: int = 0  # the first token that the adapter acts on
    adapter_slot: int | None = None  # the device slot that it holds while it runs
    flow: Flow = (None, None)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self.params = self.request.params
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def block_table(self) -> array[int]:
        """Blocks that hold the tokens, in order."""
        return self.blocks.table

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """The images in its prompt."""
        return self.request.images

    @property
    def rope_positions(self) -> RopePositions | None:
        """Its tokens' positions, if they aren't their indices."""
        return self.request.rope_positions

    def chunk_len(self, start: int, limit: int) -> int:
        """How many of the tokens from `start` on can be one step's, at most `limit`; 0 if that is too few."""
        end = min(start + limit, len(self.token_ids))
        for first, last in self.whole_ranges:
            if first < end < last:
                return max(first - start, 0)
        return end - start

    def record_hit(self, num_tokens: int) -> None:
        """Note that the first `num_tokens` tokens came from the prefix cache, and of which kind they are."""
        metrics = self.request.metrics
        metrics.cached_tokens = num_tokens
        adapted_from = num_tokens if self.adapter is None else min(self.adapter_start, num_tokens)
        metrics.cached_adapter_tokens = num_tokens - adapted_from
        for image in self.images:
            start, end = image.span
            metrics.cached_image_tokens += max(min(end, num_tokens) - start, 0)
            metrics.cached_adapter_tokens -= max(min(end, num_tokens) - max(start, adapted_from), 0)

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.finish_reason is not None

    @property
    def has_prefilled(self) -> bool:
        """Whether the whole prompt's KV is in its blocks."""
        return self.num_computed >= self.num_prompt_tokens


@dataclass(slots=True, eq=False)
class EngineRequest:
    """What was asked, as token ids and marks."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    metrics: RequestMetrics
    prompt: str | None = None
    options: RequestOptions = field(default_factory=RequestOptions)
    marks: tuple[Mark, ...] = ()
    images: tuple[PlacedImage, ...] = ()
    rope_positions: RopePositions | None = None
    sequences: list[Sequence] = field(default_factory=list)
    lease: AdapterLease | None = None  # keeps its adapter in memory
