"""Drives a `CacheManager` as a scheduler would, by random operations, and watches everything.

Each block has a simulated memory. Whoever computes a token writes down which prefix that token ends, and whoever reads
checks that each position holds the KV of its own prefix. So a wrong hit, a block that is written while others read it,
and a block that is named before it is written all show, whatever the cache believes of itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from radix_oracle import RadixOracle

from mlserve.cache.block_pool import BlockPool
from mlserve.cache.hashing import BlockHash, BlockHasher, BlockKey
from mlserve.cache.manager import CacheManager, Hit, SequenceBlocks
from mlserve.cache.marks import Mark, MarkKind, salt_mark

BLOCK_SIZE = 4
MARKS: tuple[tuple[Mark, ...], ...] = (
    (),
    (Mark(MarkKind.ADAPTER, b"a" * 16, 0, None),),
    (Mark(MarkKind.ADAPTER, b"b" * 16, 6, None), salt_mark("tenant", 4)),
    (Mark(MarkKind.IMAGE, b"a" * 16, 2, 11),),
    (Mark(MarkKind.IMAGE, b"a" * 16, 0, 4), Mark(MarkKind.IMAGE, b"c" * 16, 4, 8)),
)


class Op(Enum):
    """What a scheduler does."""

    OPEN = auto()
    FORK = auto()
    ADMIT = auto()
    RUN = auto()
    RAISE = auto()
    PREEMPT = auto()
    FINISH = auto()
    RESET = auto()


# A reset is rare, because it ends what eviction and sharing have built up.
WEIGHTED = (Op.OPEN, Op.ADMIT, Op.RUN, Op.RUN, Op.FINISH) * 30 + (Op.FORK, Op.RAISE, Op.PREEMPT) * 12 + (Op.RESET,)


@dataclass(eq=False)
class Running:
    """One sequence of the driver."""

    blocks: SequenceBlocks
    num_prompt_tokens: int
    parent: Running | None = None  # whose prompt it shares
    num_computed: int = 0


class CacheWorld:
    """A manager, its simulated memory, and (if given) an oracle that has to agree after every operation."""

    def __init__(self, num_blocks: int, block_hash: str | BlockHash | None, oracle: RadixOracle | None = None) -> None:
        hasher = BlockHasher(block_hash, b"model", "float32", BLOCK_SIZE) if block_hash is not None else None
        self.manager = CacheManager(BlockPool(num_blocks), hasher, BLOCK_SIZE)
        self.capacity = num_blocks - 1
        self.oracle = oracle
        self.memory: dict[int, int] = {}  # slot -> the prefix that the token there ends
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self._prefixes: dict[tuple[int, object], int] = {}
        self._prefix_of_key: dict[BlockKey, int] = {}

    def apply(self, op: Op, number: int) -> None:
        """Do one operation; `number` makes its choices. One that has nothing to act on does nothing."""
        choices = random.Random(number)
        if op is Op.OPEN:
            self._open(choices)
        elif op is Op.RESET:
            self._reset()
        elif op is Op.ADMIT and self.waiting:
            self._admit(choices.choice(self.waiting), choices)
        elif op not in (Op.OPEN, Op.RESET, Op.ADMIT) and self.running:
            seq = choices.choice(self.running)
            {Op.FORK: self._fork, Op.RUN: self._run, Op.RAISE: self._raise}.get(op, self._stop)(seq, choices)
            if op is Op.PREEMPT:
                self.waiting.append(seq)
        self.check()

    def finish_all(self) -> None:
        """Everything ends: no block may be left with a reference."""
        for seq in list(self.running):
            self._stop(seq)
        self.check()
        assert self.manager.stats().num_referenced == 0

    def check(self) -> None:
        self.manager.check()
        if self.oracle is None:
            return
        pool = self.manager.pool
        assert pool.num_free == self.oracle.num_free()
        keys = [pool.key_of(block_id) for block_id in range(self.capacity + 1)]
        assert {self._prefix_of_key[key] for key in keys if key is not None} == self.oracle.cached()
        queue = [keys[block_id] for block_id in pool.free_ids()]
        assert [self._prefix_of_key[key] for key in queue if key is not None] == self.oracle.eviction_order()

    def _open(self, choices: random.Random) -> None:
        if len(self.waiting) >= 8:
            return
        length = choices.randint(1, min(20, self.capacity * BLOCK_SIZE - 4))
        shared = choices.choice((0, 4, 8, 12, length))
        tokens = [7] * min(shared, length)  # many prompts begin alike, and repeat their own blocks
        tokens += [choices.randint(0, 1) for _ in range(length - len(tokens))]
        self.waiting.append(Running(self.manager.open(tokens, choices.choice(MARKS)), length))

    def _fork(self, seq: Running, choices: random.Random) -> None:
        prompt = list(seq.blocks.token_ids[: seq.num_prompt_tokens])
        if len(self.waiting) < 8 and seq.num_computed >= len(prompt):
            self.waiting.append(Running(self.manager.open(prompt, seq.blocks.marks), len(prompt), parent=seq))

    def _admit(self, seq: Running, choices: random.Random) -> None:
        sibling = seq.parent if seq.parent in self.running else None
        if sibling is not None:
            hit = self.manager.find_sibling(sibling.blocks, seq.blocks, seq.num_prompt_tokens)
        else:
            hit = self.manager.find(seq.blocks)
        num_tokens = len(seq.blocks.token_ids)
        chunk = choices.randint(hit.num_tokens + 1, num_tokens)
        can_admit = self.manager.can_admit(hit, chunk)
        if self.oracle is not None:
            self._admit_to_oracle(seq, sibling, hit, chunk, can_admit)
        if can_admit:
            self.manager.admit(seq.blocks, hit, chunk)
            self.waiting.remove(seq)
            self.running.append(seq)
            seq.num_computed = hit.num_tokens

    def _admit_to_oracle(self, seq: Running, sibling: Running | None, hit: Hit, chunk: int, can_admit: bool) -> None:
        assert self.oracle is not None
        limit = (len(seq.blocks.token_ids) - 1) // BLOCK_SIZE
        if sibling is not None:
            whole = min(limit, sibling.num_computed // BLOCK_SIZE, seq.num_prompt_tokens // BLOCK_SIZE)
            path = self.oracle.tables[sibling][:whole]
        else:
            path = self.oracle.find(self._block_prefixes(seq)[:limit])
        assert hit.num_tokens == len(path) * BLOCK_SIZE
        assert hit.num_free == sum(not page.references for page in path)
        num_pages = -(-chunk // BLOCK_SIZE)
        assert can_admit == (num_pages - len(path) <= self.oracle.num_free() - hit.num_free)
        if can_admit:
            self.oracle.admit(seq, path, num_pages)

    def _run(self, seq: Running, choices: random.Random) -> None:
        todo = len(seq.blocks.token_ids) - seq.num_computed
        computed = seq.num_computed + choices.randint(min(todo, 1), todo)
        if not self.manager.can_extend(seq.blocks, computed):
            return
        self.manager.extend(seq.blocks, computed)
        self._compute(seq, computed)
        self.manager.commit(seq.blocks, computed)
        seq.num_computed = computed
        num_full = computed // BLOCK_SIZE
        if self.oracle is not None:
            self.oracle.extend(seq, -(-computed // BLOCK_SIZE))
            self.oracle.insert(seq, self._block_prefixes(seq)[:num_full])
        if computed == len(seq.blocks.token_ids) and computed < self.capacity * BLOCK_SIZE:
            seq.blocks.token_ids.append(choices.randint(0, 1))

    def _raise(self, seq: Running, choices: random.Random) -> None:
        """A step takes blocks and raises before anything is written; the request fails."""
        computed = len(seq.blocks.token_ids)
        if self.manager.can_extend(seq.blocks, computed):
            self.manager.extend(seq.blocks, computed)
            if self.oracle is not None:
                self.oracle.extend(seq, -(-computed // BLOCK_SIZE))
        self._stop(seq)

    def _stop(self, seq: Running, choices: random.Random | None = None) -> None:
        self.manager.release(seq.blocks)
        seq.num_computed = 0
        self.running.remove(seq)
        if self.oracle is not None:
            self.oracle.release(seq)

    def _reset(self) -> None:
        is_empty = self.manager.reset()
        assert is_empty == (not self.running)
        assert self.manager.stats().num_cached == 0
        if self.oracle is not None:
            self.oracle.reset()

    def _compute(self, seq: Running, computed: int) -> None:
        table = seq.blocks.table
        slots = [table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(computed)]
        prefixes = self._token_prefixes(seq)[:computed]
        for at in range(seq.num_computed, computed):
            assert sum(table[at // BLOCK_SIZE] in other.blocks.table for other in self.running) == 1, (
                "shared, yet written"
            )
            self.memory[slots[at]] = prefixes[at]
        assert [self.memory.get(slot) for slot in slots] == prefixes, "a table holds another prefix's KV"

    def _token_prefixes(self, seq: Running) -> list[int]:
        """A number for each prefix of the sequence: equal for equal tokens with the same marks acting on them."""
        numbers, number = [], 0
        for at, token in enumerate(seq.blocks.token_ids):
            step = (number, (token, what_acts(seq.blocks.marks, at)))
            number = self._prefixes.setdefault(step, len(self._prefixes) + 1)
            numbers.append(number)
        return numbers

    def _block_prefixes(self, seq: Running) -> list[int]:
        prefixes = self._token_prefixes(seq)[BLOCK_SIZE - 1 :: BLOCK_SIZE]
        for key, prefix in zip(seq.blocks.keys, prefixes, strict=False):
            assert self._prefix_of_key.setdefault(key, prefix) == prefix, "two prefixes have one key"
        return prefixes


def what_acts(marks: Sequence[Mark], at: int) -> frozenset[tuple[object, ...]]:
    """What changes the token at a position, in plain words: the meaning that `encode_marks` must keep."""
    found: set[tuple[object, ...]] = set()
    for mark in marks:
        if mark.start <= at and (mark.end is None or at < mark.end):
            is_medium = mark.kind in (MarkKind.IMAGE, MarkKind.EMBEDS)
            found.add(
                (mark.kind, mark.digest, (at - mark.start, mark.end and mark.end - mark.start) if is_medium else ())
            )
    return frozenset(found)
