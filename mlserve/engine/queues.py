"""Who is admitted next: the queues behind the scheduler's admission policies. Plain Python: no torch.

`OrderedQueue` goes by the sequences' own order. `FairQueue` is the virtual token counter (VTC) of Sheng et al.,
'Fairness in Serving Large Language Models' (OSDI '24): it counts the tokens that every flow was served and admits from
the flow that had least, so that a flow with a thousand requests delays one with a single request by one admission.

A sequence's `flow` and `order` must not change while it is in a queue.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from heapq import heappop, heappush
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from mlserve.config import Policy

if TYPE_CHECKING:
    from mlserve.engine.sequence import Flow, Sequence

__all__ = ["DECODE_COST", "PREFILL_COST", "FairQueue", "OrderedQueue", "WaitingQueue", "waiting_queue"]

# What a token of a prompt and a generated one count as service. The paper's weights: providers charge about twice as
# much for a generated token, since a decode leaves most of the hardware's arithmetic idle.
PREFILL_COST = 1
DECODE_COST = 2

_ORDER = attrgetter("order")
_RANK = attrgetter("rank")


class WaitingQueue(Protocol):
    """Sequences that wait for admission."""

    def __len__(self) -> int:
        """How many wait."""

    def push(self, sequence: Sequence) -> None:
        """Queue a new sequence, or one that was preempted."""

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out, wherever it is. False if it isn't here."""

    def candidates(self) -> Iterator[Sequence]:
        """One pass over the waiting sequences, each at most once, in the order in which they should be admitted.

        Before it asks for the next one the caller may `remove` the one that it got, `charge` for it, or `skip_flow` it.
        One that it leaves in the queue is passed over. The order depends on what is charged, so it is only decided as
        the caller asks: a short pass over a long queue is cheap.
        """

    def skip_flow(self, sequence: Sequence) -> None:
        """Yield no more of this sequence's flow in the pass that yielded it, as what it lacks they all lack."""

    def charge(self, query_lens: Mapping[Sequence, int]) -> None:
        """A step computes this many tokens of these sequences, whether they wait or run."""


class OrderedQueue:
    """By order of arrival or by priority: as `Sequence.order` says, whatever anybody was served before."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []  # sorted by order
        self._skipped: set[Flow] = set()  # of the current pass

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def first(self) -> Sequence:
        """The one that comes before all others. `IndexError` if the queue is empty."""
        return self._sequences[0]

    def push(self, sequence: Sequence) -> None:
        """See `WaitingQueue`. New arrivals come last: O(log n); one that goes to the front moves the rest in memory."""
        insort(self._sequences, sequence, key=_ORDER)

    def remove(self, sequence: Sequence) -> bool:
        """See `WaitingQueue`. O(log n), and the rest moves in memory."""
        at = bisect_left(self._sequences, sequence.order, key=_ORDER)
        found = at < len(self._sequences) and self._sequences[at] is sequence
        if found:
            del self._sequences[at]
        return found

    def candidates(self) -> Iterator[Sequence]:
        """See `WaitingQueue`."""
        self._skipped.clear()
        at = 0  # [0, at) were passed over
        while at < len(self._sequences):
            sequence = self._sequences[at]
            if sequence.flow not in self._skipped:
                yield sequence
            if at < len(self._sequences) and self._sequences[at] is sequence:
                at += 1

    def skip_flow(self, sequence: Sequence) -> None:
        """See `WaitingQueue`."""
        self._skipped.add(sequence.flow)

    def charge(self, query_lens: Mapping[Sequence, int]) -> None:
        """Does nothing: the order is fixed."""


class _Account:
    """What a flow was served, and what it has waiting."""

    __slots__ = ("counter", "line", "rank")

    def __init__(self) -> None:
        self.counter = 0
        self.line = OrderedQueue()
        self.rank: tuple[int, tuple[int, int, int]]  # where it stands in the ranking; lags behind `true_rank`

    @property
    def true_rank(self) -> tuple[int, tuple[int, int, int]]:
        """Least served first; among equals, by order."""
        return self.counter, self.line.first.order


class FairQueue:
    """The flow that was served least goes first; within a flow, as `Sequence.order` says.

    While two flows both have sequences waiting, their service differs by a bounded amount, however much each of them
    asks for. A flow that had nothing waiting starts at the counter of the least served one that had: what it left
    unused is not saved up. As in the paper, sequences that run don't keep a flow from being raised; otherwise one that
    runs a single long answer would save up credit all the while, and then shut everybody else out with a burst.

    A charge only adds to a counter. The ranking learns of it when the flow comes to its front: counters never fall, so
    that a flow stands there at its rank or before it, never behind it.
    """

    def __init__(self, max_idle_flows: int = 1024) -> None:
        """`max_idle_flows`: how many counters are kept of flows with nothing waiting; the least recently active are
        forgotten, and start anew when they return."""
        self._max_idle_flows = max_idle_flows
        self._accounts: dict[Flow, _Account] = {}  # of flows with sequences waiting
        self._ranking: list[_Account] = []  # the same, sorted by rank
        self._idle: OrderedDict[Flow, _Account] = OrderedDict()  # of others, least recently active first
        self._last_left = _Account()  # of the flow that was the last to have nothing waiting any more
        self._num_waiting = 0
        self._skipped: set[Flow] = set()  # of the current pass

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, sequence: Sequence) -> None:
        """See `WaitingQueue`. O(log n) of the flow's sequences and of the flows."""
        account = self._accounts.get(sequence.flow)
        if account is None:
            account = self._idle.pop(sequence.flow, None) or _Account()
            account.counter = max(account.counter, self._lowest_counter())
            self._accounts[sequence.flow] = account
        elif sequence.order < account.line.first.order:  # one that was preempted returns: the rank may fall
            self._withdraw(account)
        account.line.push(sequence)
        self._num_waiting += 1
        if account.line.first is sequence:
            self._enter(account)

    def remove(self, sequence: Sequence) -> bool:
        """See `WaitingQueue`. O(log n), as `push`."""
        account = self._accounts.get(sequence.flow)
        if account is None or not account.line.remove(sequence):
            return False
        self._num_waiting -= 1
        if not account.line:
            self._withdraw(account)
            self._last_left = account
            self._keep_idle(sequence.flow, self._accounts.pop(sequence.flow))
        return True

    def candidates(self) -> Iterator[Sequence]:
        """See `WaitingQueue`. Of flows that were served the same, those with a sequence passed over go last."""
        self._skipped.clear()
        at = 0  # flows of the ranking: [0, at) first sequence passed over | [at, end) not yet come to
        passed: list[tuple[int, tuple[int, int, int], Sequence, Iterator[Sequence]]] = []  # a heap of the former
        while True:
            self._settle(at)
            if at < len(self._ranking) and not (passed and passed[0][0] < self._ranking[at].counter):
                line = self._ranking[at].line.candidates()
                sequence = next(line)
                yield sequence
                account = self._accounts.get(sequence.flow)
                if account is None or account.line.first is not sequence:
                    continue  # removed: whichever flow is served least now goes next
                at += 1
            elif passed:
                _, _, sequence, line = heappop(passed)
                yield sequence
            else:
                return
            following = next(line, None)
            if following is not None and sequence.flow not in self._skipped:
                counter = self._accounts[sequence.flow].counter
                heappush(passed, (counter, following.order, following, line))

    def skip_flow(self, sequence: Sequence) -> None:
        """See `WaitingQueue`. The pass doesn't touch what it skips."""
        self._skipped.add(sequence.flow)

    def charge(self, query_lens: Mapping[Sequence, int]) -> None:
        """See `WaitingQueue`. O(1) for each. A single token counts as a decode: a token is generated from it."""
        for sequence, query_len in query_lens.items():
            account = self._accounts.get(sequence.flow) or self._idle_account(sequence.flow)
            account.counter += DECODE_COST if query_len == 1 else PREFILL_COST * query_len

    def _lowest_counter(self) -> int:
        """Where a flow starts that had nothing waiting."""
        if not self._ranking:
            return self._last_left.counter
        self._settle(0)
        return self._ranking[0].counter

    def _settle(self, at: int) -> None:
        """Make position `at` of the ranking true, if what stands before it is left as it is."""
        while at < len(self._ranking) and self._ranking[at].rank != self._ranking[at].true_rank:
            self._enter(self._ranking.pop(at))

    def _enter(self, account: _Account) -> None:
        account.rank = account.true_rank
        insort(self._ranking, account, key=_RANK)

    def _withdraw(self, account: _Account) -> None:
        del self._ranking[bisect_left(self._ranking, account.rank, key=_RANK)]

    def _idle_account(self, flow: Flow) -> _Account:
        account = self._idle.pop(flow, None) or _Account()
        self._keep_idle(flow, account)
        return account

    def _keep_idle(self, flow: Flow, account: _Account) -> None:
        self._idle[flow] = account
        if len(self._idle) > self._max_idle_flows:
            self._idle.popitem(last=False)


_QUEUES: Mapping[Policy, Callable[[], WaitingQueue]] = MappingProxyType(
    {Policy.FAIR: FairQueue, Policy.FCFS: OrderedQueue, Policy.PRIORITY: OrderedQueue}
)


def waiting_queue(policy: Policy) -> WaitingQueue:
    """A new queue for this admission policy."""
    return _QUEUES[policy]()
