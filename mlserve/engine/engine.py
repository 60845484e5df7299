"""The engine: requests in, one step at a time, tokens out."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from typing import Protocol

from mlserve.cache.manager import CacheManager, CacheStats
from mlserve.config import SchedulerConfig
from mlserve.engine.admission import Limits, RequestFactory
from mlserve.engine.outputs import OutputProcessor
from mlserve.engine.scheduler import Scheduler
from mlserve.engine.sequence import EngineRequest, Sequence
from mlserve.engine.tokenizer import Tokenizer
from mlserve.errors import RequestError
from mlserve.model.plan import StepPlan, StepResult
from mlserve.request import FinishReason, SamplingParams, StreamOutput

__all__ = ["Engine", "Runner"]

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Computes a plan. It may be asked to run the same rows again after it raised."""

    def run(self, plan: StepPlan[Sequence]) -> StepResult:
        """Write the plan's KV and choose its tokens."""
        ...


class Engine:
    """Not thread-safe: one thread adds, steps and aborts (`AsyncEngine` does so for many callers)."""

    def __init__(
        self, runner: Runner, tokenizer: Tokenizer, cache: CacheManager, scheduler: SchedulerConfig, limits: Limits
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.cache = cache
        self.limits = limits
        self.scheduler = Scheduler(scheduler, cache)
        self._requests: dict[str, EngineRequest] = {}
        self._factory = RequestFactory(tokenizer, cache, limits, scheduler.policy)
        self._outputs = OutputProcessor(tokenizer, self.scheduler.finish)
        self._unsent: list[StreamOutput] = []  # outputs of requests that ended when they were submitted

    def prepare(
        self,
        request_id: str,
        prompt: str | Seq[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> EngineRequest:
        """Tokenise and check a request, for `submit`. Raises a `RequestError` if it can't be served; keeps nothing.

        priority: lower goes first; needs the priority policy.
        cache_salt: requests share cached KV only with requests of the same salt.
        """
        return self._factory.make(request_id, prompt, params, priority=priority, cache_salt=cache_salt)

    def submit(self, request: EngineRequest) -> None:
        """Queue a prepared request."""
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use: give every request its own")
        self._requests[request.request_id] = request
        self._outputs.open(request)
        if request.params.max_tokens == 0 and request.params.prompt_logprobs is None:
            self._unsent += self._end(request, FinishReason.LENGTH)  # nothing to compute
            return
        for sequence in request.sequences:
            self.scheduler.add(sequence)

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._unsent) or self.scheduler.has_work()

    def step(self) -> list[StreamOutput]:
        """Plan, run, commit; returns what that added to each sequence."""
        plan = self.scheduler.plan()
        outputs, self._unsent = self._unsent, []
        if plan.sequences:
            result = self._run(plan)
            self.scheduler.commit(plan, result)
            outputs += self._outputs.process(plan, result)
        for output in outputs:
            if output.completed is not None:
                self._requests.pop(output.request_id, None)
        return outputs

    def abort(self, request_id: str) -> list[StreamOutput]:
        """End a request now, and give its blocks back; its id is free again. An unknown or finished id does nothing.

        Returns the last output of each sequence that had not ended. No step returns anything of it any more.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return []
        self._unsent = [output for output in self._unsent if output.request_id != request_id]
        return self._end(request, FinishReason.ABORT)

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV. Running requests go on undisturbed; nothing computed before is ever hit again."""
        self.cache.reset()

    def stats(self) -> CacheStats:
        """Figures of the KV pool and of the prefix cache."""
        return self.cache.stats()

    def _end(self, request: EngineRequest, reason: FinishReason) -> list[StreamOutput]:
        outputs = []
        for sequence in request.sequences:
            self.scheduler.finish(sequence, reason)
            if self._outputs.is_open(sequence):
                outputs.append(self._outputs.close(sequence))
        return outputs

    def _run(self, plan: StepPlan[Sequence]) -> StepResult:
        try:
            return self.runner.run(plan)
        except Exception:
            logger.exception("a step of %d sequences raised: running them one by one", len(plan.sequences))
            return self._run_apart(plan)

    def _run_apart(self, plan: StepPlan[Sequence]) -> StepResult:
        """Each row alone: those that raise again fail, the others get their tokens. They write the same KV again."""
        total = StepResult()
        for row in range(len(plan.sequences)):
            try:
                total.absorb(self.runner.run(plan.only(row)), row)
            except Exception as error:
                total.errors[row] = f"the model raised {type(error).__name__} while it ran this request: {error}"
        return total
