"""A model without arithmetic that drives the real engine, and checks what the engine gives it."""

from __future__ import annotations

import xxhash

from mlserve.model.plan import SequenceT, StepPlan, StepResult


class ContextRunner:
    """Keeps token ids in place of KV; the next token is a hash of all that a sequence reads through its block table.

    A block that is shared wrongly, not yet written, or overwritten changes every later token (and raises here).
    """

    def __init__(self, vocab_size: int, block_size: int) -> None:
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.kv: dict[int, int] = {}  # slot -> token id
        self.steps: list[list[tuple[int, int]]] = []  # per step: (context length before it, query length) of each row
        self.tokens_computed = 0

    def run(self, plan: StepPlan[SequenceT]) -> StepResult:
        self.steps.append([(s.num_computed, n) for s, n in zip(plan.sequences, plan.query_lens, strict=True)])
        self.tokens_computed += plan.num_tokens
        for sequence, query_len in zip(plan.sequences, plan.query_lens, strict=True):
            for position in range(sequence.num_computed, sequence.num_computed + query_len):
                self.kv[self._slot(sequence, position)] = sequence.token_ids[position]
        result = StepResult()
        for row, (sequence, query_len) in enumerate(zip(plan.sequences, plan.query_lens, strict=True)):
            end = sequence.num_computed + query_len
            context = [self.kv[self._slot(sequence, position)] for position in range(end)]
            assert context == sequence.token_ids[:end], "the blocks hold other tokens than the sequence's"
            if row in plan.sampled:
                result.token_ids[row] = self.next_token(context, sequence.seed if sequence.params.temperature else 0)
        return result

    def next_token(self, context: list[int], seed: int = 0) -> int:
        """What follows a context."""
        return xxhash.xxh3_64_intdigest(repr(context).encode(), seed=seed) % self.vocab_size

    def _slot(self, sequence: SequenceT, position: int) -> int:
        block = sequence.block_table[position // self.block_size]
        assert block != 0, "block 0 is never handed out"
        return block * self.block_size + position % self.block_size


class CountingRunner:
    """The next token is the last one plus one."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def run(self, plan: StepPlan[SequenceT]) -> StepResult:
        return StepResult({row: (plan.sequences[row].token_ids[-1] + 1) % self.vocab_size for row in plan.sampled})


class ScriptedRunner:
    """Each sequence gets the next id of a fixed list, whatever it reads."""

    def __init__(self, script: list[int]) -> None:
        self.script = script

    def run(self, plan: StepPlan[SequenceT]) -> StepResult:
        chosen = {}
        for row in plan.sampled:
            sequence = plan.sequences[row]
            chosen[row] = self.script[len(sequence.token_ids) - sequence.num_prompt_tokens]
        return StepResult(chosen)
