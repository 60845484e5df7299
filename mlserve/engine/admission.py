"""From what a caller asks to an `EngineRequest`: everything that can be refused is refused here, before any work."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from mlserve.cache.manager import CacheManager
from mlserve.cache.marks import Mark, MarkKind, salt_mark
from mlserve.config import Policy
from mlserve.engine.constraints import CompiledConstraint, ConstraintCompiler
from mlserve.engine.media import GivenImage, ImageDesk, image_mark, no_images_error
from mlserve.engine.prompt import validate_prompt_ids
from mlserve.engine.sequence import EngineRequest, Sequence
from mlserve.engine.tokenizer import Tokenizer
from mlserve.errors import CapacityError, PromptError, RequestError, SamplingParamsError
from mlserve.request import RequestMetrics, RequestOptions, SamplingParams

if TYPE_CHECKING:
    from mlserve.adapters.host import HostAdapter
    from mlserve.engine.queues import WaitingQueue
    from mlserve.vision.placement import PlacedImage

__all__ = ["Limits", "RequestFactory", "activation_start"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may be, as far as the model and the pool decide it."""

    vocab_size: int
    max_model_len: int  # tokens, prompt plus output
    capacity: int  # tokens that the whole KV pool holds
    eos_token_ids: tuple[int, ...] = ()
    max_step_tokens: int = 2**31  # of one step


class RequestFactory:
    """Makes engine requests; numbers them in order of arrival."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        cache: CacheManager,
        limits: Limits,
        policy: Policy | Callable[[], WaitingQueue],
        constraints: ConstraintCompiler,
        images: ImageDesk | None = None,
    ) -> None:
        self.limits = limits
        self._images = images
        self._policy = policy
        self._constraints = constraints
        self._tokenizer = tokenizer
        self._cache = cache
        self._arrivals = 0
        self._random = random.SystemRandom()

    def make(
        self,
        request_id: str,
        prompt: str | Seq[int],
        params: SamplingParams,
        options: RequestOptions,
        images: Seq[GivenImage] = (),
    ) -> EngineRequest:
        """Check everything, tokenise, and lay out the sequences.

        A constraint that hasn't been compiled is compiled here. Raises `PromptError`, `SamplingParamsError` or
        `CapacityError`; nothing is kept of a refused request.
        """
        if options.priority and self._policy in (Policy.FAIR, Policy.FCFS):
            raise RequestError(
                f"priority is {options.priority}, but admission is {self._policy}: set policy='priority'"
            )
        if not isinstance(prompt, str | Seq):
            raise PromptError(f"the prompt is of type {type(prompt).__name__}: give a text or a list of token ids")
        prompt_ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        validate_prompt_ids(prompt_ids, self.limits.vocab_size)
        prompt_ids, placed = self._place(prompt_ids, images)
        self._check_length(len(prompt_ids))
        self._check_images(placed)
        self._check_token_ids(params)
        constraint = None if params.constraint is None else self._constraints.compile(params.constraint)
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt_ids,
            params=params,
            metrics=RequestMetrics(arrival=time.monotonic(), prompt_tokens=len(prompt_ids)),
            prompt=prompt if isinstance(prompt, str) else None,
            options=options,
            marks=(
                *(() if options.cache_salt is None else (salt_mark(options.cache_salt),)),
                *map(image_mark, placed),
            ),
            images=tuple(placed),
            rope_positions=None if self._images is None else self._images.rope_positions(len(prompt_ids), placed),
        )
        self._arrivals += 1
        self._add_sequences(request, constraint)
        return request

    def use_adapter(self, request: EngineRequest, adapter: HostAdapter) -> None:
        """Let an adapter answer a request that hasn't been queued yet: its KV is marked with what the adapter contains.

        An activated LoRA acts from the last place on where the prompt has its invocation tokens; if they are nowhere,
        the base model answers, as in PEFT.
        """
        start = activation_start(request.prompt_token_ids, adapter.invocation_tokens)
        if start is None:
            return
        request.marks = (*request.marks, Mark(MarkKind.ADAPTER, adapter.digest, start, None))
        for sequence in request.sequences:
            sequence.adapter, sequence.adapter_start = adapter, start
            sequence.flow = (adapter.digest, request.options.tenant)
            sequence.blocks = self._cache.open(sequence.token_ids, request.marks)

    def _place(self, prompt_ids: list[int], images: Seq[GivenImage]) -> tuple[list[int], list[PlacedImage]]:
        if self._images is not None:
            return self._images.place(prompt_ids, images)
        if images:
            raise no_images_error(len(images))
        return prompt_ids, []

    def _check_length(self, num_tokens: int) -> None:
        limits = self.limits
        if num_tokens >= limits.max_model_len:
            raise PromptError(
                f"the prompt has {num_tokens} tokens, the model takes {limits.max_model_len} with the answer: "
                "shorten it or raise max_model_len"
            )
        if num_tokens >= limits.capacity:
            raise CapacityError(
                f"the prompt has {num_tokens} tokens, the whole KV pool holds {limits.capacity} with the answer: "
                "shorten it or raise num_blocks or kv_memory"
            )

    def _check_images(self, images: Seq[PlacedImage]) -> None:
        for image in images:
            longest = max((last - first for first, last in image.whole_ranges), default=0)
            if longest > self.limits.max_step_tokens:
                raise CapacityError(
                    f"an image is {longest} tokens, which this model computes in one step, and a step holds "
                    f"{self.limits.max_step_tokens}: raise max_num_batched_tokens"
                )

    def _check_token_ids(self, params: SamplingParams) -> None:
        size = self.limits.vocab_size
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            beyond = [token for token in getattr(params, name) or () if token >= size]
            if beyond:
                raise SamplingParamsError(
                    f"{name} has token {beyond[0]}, the vocabulary has {size}: give ids below {size}"
                )

    def _add_sequences(self, request: EngineRequest, constraint: CompiledConstraint | None) -> None:
        params, limits = request.params, self.limits
        eos = () if params.ignore_eos else limits.eos_token_ids
        num_prompt = len(request.prompt_token_ids)
        max_total = min(num_prompt + params.max_tokens, limits.max_model_len, limits.capacity)
        seed = self._random.getrandbits(64) if params.seed is None else params.seed
        bad_words = self._bad_words_ids(params)
        whole_ranges = tuple(part for image in request.images for part in image.whole_ranges)
        for index in range(params.n):
            token_ids = list(request.prompt_token_ids)
            request.sequences.append(
                Sequence(
                    request=request,
                    index=index,
                    token_ids=token_ids,
                    blocks=self._cache.open(token_ids, request.marks),
                    seed=seed if index == 0 else _mix(seed, index),
                    max_total_tokens=max_total,
                    order=(request.options.priority, self._arrivals, index),
                    stop_ids=frozenset((*eos, *params.stop_token_ids)),
                    banned_until_min=(*limits.eos_token_ids, *params.stop_token_ids),
                    bad_words_ids=bad_words,
                    matcher=None if constraint is None else constraint.matcher(may_end=not params.ignore_eos),
                    wants_prompt_logprobs=params.prompt_logprobs is not None and index == 0,
                    flow=(None, request.options.tenant),
                    whole_ranges=whole_ranges,
                )
            )

    def _bad_words_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """A word's token ids at the start of a text and, since they differ there, after a space."""
        spellings = [spelling for word in params.bad_words for spelling in (word, f" {word.lstrip()}")]
        encoded = {tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in spellings}
        return tuple(sorted(ids for ids in encoded if ids))


def activation_start(prompt_ids: Seq[int], invocation_tokens: tuple[int, ...] | None) -> int | None:
    """The first token that an adapter acts on: 0 for a plain one, None if an activated one isn't invoked."""
    if invocation_tokens is None:
        return 0
    first, count = invocation_tokens[0], len(invocation_tokens)
    for start in range(len(prompt_ids) - count, -1, -1):
        if prompt_ids[start] == first and tuple(prompt_ids[start : start + count]) == invocation_tokens:
            return start
    return None


def _mix(seed: int, index: int) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed, index))
