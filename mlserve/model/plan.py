"""What one step is to do, and what came of it. Plain data, no torch: the scheduler writes it, the runner reads it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from mlserve.request import SamplingParams, TokenLogprob

if TYPE_CHECKING:
    import numpy as np

    from mlserve.adapters.host import HostAdapter
    from mlserve.model.positions import RopePositions
    from mlserve.vision.placement import PlacedImage

__all__ = ["MaskWriter", "PlannedSequence", "SamplingRow", "SlotLoad", "StepPlan", "StepResult", "TokenMatcher"]


class TokenMatcher(Protocol):
    """How far a sequence is in the grammar that it must follow; the engine's `GrammarMatcher` is one."""

    @property
    def masks(self) -> MaskWriter[Self]:
        """Writes the masks of all matchers of an engine."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether no token may follow."""
        ...

    @property
    def error(self) -> str | None:
        """Why it can't go on."""
        ...

    def advance(self, token_id: int) -> None:
        """Take over a token that was chosen. Sets `error` if it isn't one that may follow."""
        ...


MatcherT = TypeVar("MatcherT", contravariant=True)


class MaskWriter(Protocol[MatcherT]):
    """Says which tokens may follow, for many sequences at once."""

    @property
    def num_words(self) -> int:
        """Length of a mask."""
        ...

    def write(self, matchers: Sequence[MatcherT], masks: np.ndarray) -> None:
        """Fill `masks: [len(matchers), num_words]` int32: bit `i % 32` of word `i // 32` says whether token i may
        follow. A matcher that fails has its `error` set, and its mask says nothing. Changes no matcher's place."""
        ...


class SamplingRow(Protocol):
    """What sampling must know of a sequence; the engine's `Sequence` is one."""

    @property
    def params(self) -> SamplingParams:
        """How its tokens are chosen."""
        ...

    @property
    def token_ids(self) -> list[int]:
        """Prompt, then output."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Where the output begins."""
        ...

    @property
    def seed(self) -> int:
        """64 bits; its own for each of a request's sequences."""
        ...

    @property
    def banned_until_min(self) -> Sequence[int]:
        """Tokens that would end it, not to be chosen before it has `min_tokens` tokens."""
        ...

    @property
    def bad_words_ids(self) -> Sequence[tuple[int, ...]]:
        """Token sequences that must not come up."""
        ...

    @property
    def matcher(self) -> TokenMatcher | None:
        """How far it is in its grammar, if it must follow one."""
        ...


class PlannedSequence(SamplingRow, Protocol):
    """What the runner must know of a sequence; the engine's `Sequence` is one.

    token_ids:  [0 ... num_computed) KV is written | [num_computed, num_computed + query_len) this step | later
    """

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is written."""
        ...

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logprobs of its prompt are still to be delivered."""
        ...

    @property
    def block_table(self) -> array[int]:
        """Blocks that hold the tokens, in order."""
        ...

    @property
    def images(self) -> Sequence[PlacedImage]:
        """The images in its prompt."""
        ...

    @property
    def whole_ranges(self) -> Sequence[tuple[int, int]]:
        """Ranges of the prompt whose tokens see each other; each is computed in one step."""
        ...

    @property
    def rope_positions(self) -> RopePositions | None:
        """Its tokens' positions, if they aren't their indices."""
        ...

    @property
    def adapter_slot(self) -> int | None:
        """The device slot that holds its adapter; None for the base model."""
        ...

    @property
    def adapter_start(self) -> int:
        """The first token that the adapter acts on."""
        ...


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """An adapter that must be written into a device slot before the step runs."""

    slot: int
    adapter: HostAdapter


SequenceT = TypeVar("SequenceT", bound=PlannedSequence)


@dataclass(slots=True)
class StepPlan(Generic[SequenceT]):
    """Sequences of one step, and how many tokens of each are computed."""

    sequences: list[SequenceT] = field(default_factory=list)
    query_lens: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)  # rows of `sequences` that get a token, in order
    loads: list[SlotLoad] = field(default_factory=list)  # to be done first; doing one again is harmless

    @property
    def num_tokens(self) -> int:
        """Tokens computed by this step."""
        return sum(self.query_lens)

    def only(self, row: int) -> StepPlan[SequenceT]:
        """The same step for one row alone."""
        sequence = self.sequences[row]
        sampled = [0] if row in self.sampled else []
        loads = [load for load in self.loads if load.slot == sequence.adapter_slot]
        return StepPlan([sequence], [self.query_lens[row]], sampled, loads)


@dataclass(slots=True)
class StepResult:
    """What the runner made of a plan. Keys are rows of `plan.sequences`."""

    token_ids: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)  # rows that failed; they have no token

    def absorb(self, result: StepResult, row: int) -> None:
        """Take over what came of `plan.only(row)`."""
        self.token_ids.update((row, token) for token in result.token_ids.values())
        self.logprobs.update((row, logprob) for logprob in result.logprobs.values())
        self.prompt_logprobs.update((row, logprobs) for logprobs in result.prompt_logprobs.values())
        self.errors.update((row, error) for error in result.errors.values())
