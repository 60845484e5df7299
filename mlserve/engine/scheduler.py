"""Which sequences run in the next step, and how many tokens of each. Plain Python: no torch.

Continuous batching with chunked prefill, as in Orca (OSDI '22) and Sarathi-Serve (OSDI '24): every running decode gets
its token, then prefills share what is left of the token budget, then waiting sequences are admitted into the rest. When
blocks run out, the sequence that would be admitted last gives its blocks back and waits; the prefix cache makes its
return cheap.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from operator import attrgetter

from mlserve.adapters.slot_table import SlotTable
from mlserve.cache.manager import CacheManager, Hit
from mlserve.config import Policy, SchedulerConfig
from mlserve.engine.queues import waiting_queue
from mlserve.engine.sequence import Sequence
from mlserve.model.plan import SlotLoad, StepPlan, StepResult, TokenMatcher
from mlserve.request import FinishReason

__all__ = ["Scheduler"]

_LOOKAHEAD = 16  # sequences that lack blocks and are passed over in one step, in search of one that fits
_SLOT_LOOKAHEAD = 1024  # the same for adapters that lack a slot: each costs one look-up
_ORDER = attrgetter("order")
_NO_HIT = Hit((), 0, 0)


class Scheduler:
    """Owns the waiting and the running sequences; asks the cache manager for blocks and the table for adapter slots."""

    def __init__(self, config: SchedulerConfig, cache: CacheManager, slots: SlotTable) -> None:
        self.config = config
        self.cache = cache
        self.slots = slots
        self.waiting = waiting_queue(config.policy) if isinstance(config.policy, Policy) else config.policy()
        self.running: list[Sequence] = []  # sorted by order; the last one is preempted first

    @property
    def _max_slot_skips(self) -> int:
        return min(self.config.max_skips, self.config.max_num_seqs)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.push(sequence)

    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.running or len(self.waiting))

    def plan(self) -> StepPlan[Sequence]:
        """Choose the next step. Takes blocks for it; changes nothing else that `commit` would have to undo."""
        chosen: dict[Sequence, int] = {}
        num_running = len(self.running)
        budget = self._continue_running(chosen)
        self.waiting.charge(chosen)
        preempted = len(self.running) < num_running  # then blocks are short: admitting would only preempt again
        loads: list[SlotLoad] = []
        if len(self.waiting) and budget > 0 and not preempted:
            self._admit_waiting(chosen, budget, loads)
        plan = StepPlan(list(chosen), list(chosen.values()), loads=loads)
        plan.sampled = [
            row
            for row, (sequence, query_len) in enumerate(chosen.items())
            if sequence.num_computed + query_len == len(sequence.token_ids) and sequence.params.max_tokens
        ]
        return plan

    def commit(self, plan: StepPlan[Sequence], result: StepResult) -> None:
        """Take a step's result over: name the blocks that were written, append tokens, end what has ended."""
        block_size = self.cache.block_size
        for row, query_len in enumerate(plan.query_lens):
            sequence = plan.sequences[row]
            if row in result.errors:
                self._fail(sequence, result.errors[row], plan)
                continue
            computed = sequence.num_computed
            sequence.num_computed = computed + query_len
            if computed // block_size != (computed + query_len) // block_size:
                self.cache.commit(sequence.blocks, sequence.num_computed)
            if sequence.wants_prompt_logprobs and sequence.has_prefilled:
                # Delivered: recomputation after a preemption needn't repeat them.
                sequence.wants_prompt_logprobs = False
            token = result.token_ids.get(row)
            if token is not None:
                self._append(sequence, token)
            elif sequence.num_computed == len(sequence.token_ids):  # max_tokens 0: only the prompt was wanted
                self.finish(sequence, FinishReason.LENGTH)

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End a sequence, wherever it is, and give its blocks back. Ending it twice does nothing."""
        if sequence.is_finished:
            return
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        sequence.matcher = None  # a grammar's state may take megabytes
        at = bisect_left(self.running, sequence.order, key=_ORDER)
        if at < len(self.running) and self.running[at] is sequence:
            del self.running[at]
            self._let_go(sequence)
        else:
            self.waiting.remove(sequence)

    def _fail(self, sequence: Sequence, error: str, plan: StepPlan[Sequence]) -> None:
        adapter = sequence.adapter
        if adapter is not None and any(load.adapter is adapter for load in plan.loads):
            self.slots.forget(adapter.digest)  # perhaps it was never written
        sequence.error = error
        self.finish(sequence, FinishReason.ERROR)

    def _let_go(self, sequence: Sequence) -> None:
        """Give back what a running sequence holds: its blocks and its adapter's slot."""
        self.cache.release(sequence.blocks)
        if sequence.adapter is not None:
            self.slots.release(sequence.adapter.digest)
            sequence.adapter_slot = None

    def _append(self, sequence: Sequence, token: int) -> None:
        sequence.token_ids.append(token)
        num_output = len(sequence.token_ids) - sequence.num_prompt_tokens
        if token in sequence.stop_ids and num_output >= sequence.params.min_tokens:
            self.finish(sequence, FinishReason.STOP, token if token in sequence.params.stop_token_ids else None)
            return
        if sequence.matcher is not None:
            self._match(sequence, sequence.matcher, token)
        if len(sequence.token_ids) >= sequence.max_total_tokens:
            self.finish(sequence, FinishReason.LENGTH)

    def _match(self, sequence: Sequence, matcher: TokenMatcher, token: int) -> None:
        matcher.advance(token)
        if matcher.error is not None:
            sequence.error = matcher.error
            self.finish(sequence, FinishReason.ERROR)
        elif matcher.is_complete:
            self.finish(sequence, FinishReason.STOP)

    def _continue_running(self, chosen: dict[Sequence, int]) -> int:
        """Decodes first, so that no long prefill holds them up; then prefills. Returns what is left of the budget."""
        budget = self.config.max_num_batched_tokens
        block_size = self.cache.block_size
        prefills = []
        for sequence in list(self.running):
            computed = sequence.num_computed
            if len(sequence.token_ids) - computed > 1:
                prefills.append(sequence)
            elif computed < len(sequence.blocks.table) * block_size or self._grow(sequence, computed + 1, chosen):
                chosen[sequence] = 1
        budget -= len(chosen)
        for sequence in prefills:
            query_len = sequence.chunk_len(sequence.num_computed, budget)
            if query_len == 0 and budget > 0:
                return 0  # it needs more of a step than is left: admit nobody, so that there will be
            if query_len > 0 and self._grow(sequence, sequence.num_computed + query_len, chosen):
                chosen[sequence] = query_len
                budget -= query_len
        return budget

    def _grow(self, sequence: Sequence, num_tokens: int, chosen: dict[Sequence, int]) -> bool:
        """Make the sequence's table hold `num_tokens`, preempting from the end of the queue. False if it was itself
        preempted (now or earlier in this plan)."""
        while sequence.blocks.table and not self.cache.can_extend(sequence.blocks, num_tokens):
            victim = self.running[-1]
            chosen.pop(victim, None)
            self._preempt(victim)
        if not sequence.blocks.table:
            return False
        self.cache.extend(sequence.blocks, num_tokens)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._let_go(sequence)
        sequence.num_computed = 0
        sequence.request.metrics.preemptions += 1
        self.waiting.push(sequence)

    def _admit_waiting(self, chosen: dict[Sequence, int], budget: int, loads: list[SlotLoad]) -> None:
        """Admit in the queue's order. One that lacks blocks may be overtaken by later, smaller ones, but only
        `max_skips` times: from then on everybody behind it waits, so that the pool drains until it fits.

        One whose next block is just being written by a prefill waits for it: it will hit that block, so that requests
        which arrive together compute what they share once.

        One whose adapter finds all slots in use holds nobody up. But once it has been overtaken by as many sequences
        with adapters as run at once (or `max_skips`, if that is less), the adapter with the fewest running sequences
        gets no more of them, so that its slot is freed; the others go on.
        """
        being_written = {self.cache.upcoming_key(s.blocks) for s, query_len in chosen.items() if query_len > 1}
        being_written.discard(None)
        blocked: Sequence | None = None
        without_slot: Sequence | None = None
        draining: bytes | None = None  # the adapter that is to free its slot
        num_blocked = num_without_slot = 0
        for sequence in self.waiting.candidates():
            if budget <= 0 or len(self.running) >= self.config.max_num_seqs:
                return
            if blocked is not None and blocked.overtaken >= self.config.max_skips:
                return
            if _waits_for_sibling(sequence):
                continue
            if sequence.adapter is not None:
                if without_slot is not None and without_slot.overtaken >= self._max_slot_skips:
                    draining = draining or self.slots.soonest_free()
                    if sequence.adapter.digest == draining:
                        self.waiting.skip_flow(sequence)
                        continue
                if not self.slots.can_take(sequence.adapter.digest):
                    without_slot = without_slot or sequence
                    num_without_slot += 1
                    if num_without_slot > _SLOT_LOOKAHEAD:
                        return
                    self.waiting.skip_flow(sequence)
                    continue
            hit = self._find(sequence)
            if hit is not _NO_HIT and self.cache.missing_key(sequence.blocks, hit) in being_written:
                continue
            if not self.cache.can_admit(hit, len(sequence.token_ids)):
                blocked = blocked or sequence
                num_blocked += 1
                if num_blocked > _LOOKAHEAD:
                    return
                continue
            query_len = sequence.chunk_len(hit.num_tokens, budget)
            if query_len == 0:
                return  # it goes first in a later step
            if blocked is not None:
                blocked.overtaken += 1
            if without_slot is not None and sequence.adapter is not None:
                without_slot.overtaken += 1
            self._admit(sequence, hit, query_len, loads)
            chosen[sequence] = query_len
            if not sequence.request.metrics.preemptions:  # what it repeats was charged before
                self.waiting.charge({sequence: query_len})
            budget -= query_len
            being_written.add(self.cache.upcoming_key(sequence.blocks))
            being_written.discard(None)

    def _admit(self, sequence: Sequence, hit: Hit, query_len: int, loads: list[SlotLoad]) -> None:
        self.cache.admit(sequence.blocks, hit, hit.num_tokens + query_len)
        if sequence.adapter is not None:
            sequence.adapter_slot, must_write = self.slots.take(sequence.adapter.digest)
            if must_write:
                loads.append(SlotLoad(sequence.adapter_slot, sequence.adapter))
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_ORDER)
        sequence.num_computed = hit.num_tokens
        sequence.overtaken = 0
        metrics = sequence.request.metrics
        if sequence.index == 0 and metrics.scheduled is None:
            metrics.scheduled = time.monotonic()
            sequence.record_hit(hit.num_tokens)

    def _find(self, sequence: Sequence) -> Hit:
        """What needn't be computed: a sibling's prompt or a cached prefix. Prompt logprobs need every position."""
        if sequence.wants_prompt_logprobs:
            return _NO_HIT
        for sibling in sequence.request.sequences:
            if sibling is not sequence and sibling.blocks.table and sibling.has_prefilled:
                return self.cache.find_sibling(sibling.blocks, sequence.blocks, sequence.num_prompt_tokens)
        return self.cache.find(sequence.blocks)


def _waits_for_sibling(sequence: Sequence) -> bool:
    """The first of `n` sequences computes the prompt; the others share its blocks once it has."""
    leader = sequence.request.sequences[0]
    return leader is not sequence and not leader.is_finished and not leader.has_prefilled
