"""A model without arithmetic that drives the real engine, and checks what the engine gives it."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from mlserve.model.plan import SequenceT, StepPlan, StepResult


class ContextRunner:
    """Keeps token ids, and which adapter acted on them, in place of KV; the next token is a hash of all that a sequence
    reads through its block table.

    A block that is shared wrongly, not yet written, or overwritten changes every later token (and raises here), and so
    does a slot that holds another adapter.
    """

    def __init__(self, vocab_size: int, block_size: int) -> None:
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.kv: dict[int, tuple[int, bytes | None]] = {}  # KV slot -> token id, digest of the adapter
        self.adapters: dict[int, bytes] = {}  # adapter slot -> digest
        self.steps: list[list[tuple[int, int]]] = []  # per step: (context length before it, query length) of each row
        self.tokens_computed = 0

    def run(self, plan: StepPlan[SequenceT]) -> StepResult:
        self.steps.append([(s.num_computed, n) for s, n in zip(plan.sequences, plan.query_lens, strict=True)])
        self.tokens_computed += plan.num_tokens
        self.adapters.update((load.slot, load.adapter.digest) for load in plan.loads)
        for sequence, query_len in zip(plan.sequences, plan.query_lens, strict=True):
            for position in range(sequence.num_computed, sequence.num_computed + query_len):
                self.kv[self._slot(sequence, position)] = (
                    sequence.token_ids[position],
                    self._acting(sequence, position),
                )
        result = StepResult()
        for row, (sequence, query_len) in enumerate(zip(plan.sequences, plan.query_lens, strict=True)):
            end = sequence.num_computed + query_len
            context = [self.kv[self._slot(sequence, position)] for position in range(end)]
            digest = None if sequence.adapter is None else sequence.adapter.digest
            wanted = [digest if position >= sequence.adapter_start else None for position in range(end)]
            assert context == list(zip(sequence.token_ids[:end], wanted, strict=True)), "the blocks hold something else"
            if row in plan.sampled:
                read = [token if digest is None else (token, digest) for token, digest in context]
                result.token_ids[row] = self.next_token(read, sequence.seed if sequence.params.temperature else 0)
        return result

    def _acting(self, sequence: SequenceT, position: int) -> bytes | None:
        adapted = sequence.adapter_slot is not None and position >= sequence.adapter_start
        return self.adapters[sequence.adapter_slot] if adapted else None

    def next_token(self, context: Sequence[int | tuple[int, bytes]], seed: int = 0) -> int:
        """What follows a context: token ids, with the digest of the adapter that acts on them if there is one."""
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
