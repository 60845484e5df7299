"""The engine: requests in, one step at a time, tokens out."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from typing import Protocol

from mlserve.adapters.registry import AdapterRegistry
from mlserve.adapters.slot_table import SlotTable
from mlserve.cache.manager import CacheManager
from mlserve.config import SchedulerConfig
from mlserve.engine.admission import Limits, RequestFactory
from mlserve.engine.arrivals import Arrivals
from mlserve.engine.constraints import ConstraintCompiler
from mlserve.engine.media import GivenImage, ImageDesk
from mlserve.engine.outputs import OutputProcessor
from mlserve.engine.scheduler import Scheduler
from mlserve.engine.sequence import EngineRequest, Sequence
from mlserve.engine.stats import EngineStats
from mlserve.engine.tokenizer import Tokenizer
from mlserve.errors import AdapterError, RequestError
from mlserve.model.plan import StepPlan, StepResult
from mlserve.request import FinishReason, RequestOptions, SamplingParams, StreamOutput

__all__ = ["Engine", "Runner"]

logger = logging.getLogger(__name__)

_LOADING_POLL = 0.005  # seconds that a step waits for an adapter when there is nothing else to do
_DEFAULTS = RequestOptions()


class Runner(Protocol):
    """Computes a plan. It may be asked to run the same rows again after it raised."""

    def run(self, plan: StepPlan[Sequence]) -> StepResult:
        """Write the plan's KV and choose its tokens."""
        ...


class Engine:
    """Not thread-safe: one thread adds, steps and aborts (`AsyncEngine` does so for many callers).

    `adapters` is: whoever manages adapters calls it from any thread. So is `constraints`.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        cache: CacheManager,
        scheduler: SchedulerConfig,
        limits: Limits,
        adapters: AdapterRegistry,
        slots: SlotTable,
        images: ImageDesk | None = None,
    ) -> None:
        """`images` is None for a model that takes none."""
        self.runner = runner
        self.tokenizer = tokenizer
        self.cache = cache
        self.limits = limits
        self.adapters = adapters
        self.images = images
        self.constraints = ConstraintCompiler(tokenizer, limits.vocab_size, limits.eos_token_ids)
        self.scheduler = Scheduler(scheduler, cache, slots)
        self._arrivals = Arrivals()
        self._requests: dict[str, EngineRequest] = {}
        self._factory = RequestFactory(tokenizer, cache, limits, scheduler.policy, self.constraints, images)
        self._outputs = OutputProcessor(tokenizer, self.scheduler.finish)
        self._unsent: list[StreamOutput] = []  # outputs of requests that ended when they were submitted

    def prepare(
        self,
        request_id: str,
        prompt: str | Seq[int],
        params: SamplingParams,
        options: RequestOptions = _DEFAULTS,
        images: Seq[GivenImage] = (),
    ) -> EngineRequest:
        """Tokenise and check a request, for `submit`. Raises a `RequestError` if it can't be served; keeps nothing.

        images: one for each image placeholder in the prompt, in order; `Engine.images` makes them of what callers send.
        """
        if options.adapter is not None:
            self.adapters.require(options.adapter)
        return self._factory.make(request_id, prompt, params, options, images)

    def submit(self, request: EngineRequest) -> None:
        """Queue a prepared request. If its adapter must be read first, it waits for that without holding up others.

        Raises a `RequestError` if its id is in use, or its adapter was unloaded meanwhile.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use: give every request its own")
        if request.options.adapter is not None:
            request.lease = self.adapters.lease(request.options.adapter)
        self._requests[request.request_id] = request
        self._outputs.open(request)
        if request.params.max_tokens == 0 and request.params.prompt_logprobs is None:
            self._unsent += self._end(request, FinishReason.LENGTH)  # nothing to compute
            return
        if request.lease is None:
            self._queue(request)
        else:
            self._arrivals.add(request)
            self._queue_arrivals()

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._unsent) or self.scheduler.has_work() or len(self._arrivals) > 0

    def step(self) -> list[StreamOutput]:
        """Plan, run, commit; returns what that added to each sequence."""
        if self._arrivals:
            if not self._unsent and not self.scheduler.has_work():
                self.adapters.wait(_LOADING_POLL)
            self._queue_arrivals()
        plan = self.scheduler.plan()
        outputs, self._unsent = self._unsent, []
        if plan.sequences:
            result = self._run(plan)
            self.scheduler.commit(plan, result)
            outputs += self._outputs.process(plan, result)
        for output in outputs:
            if output.completed is not None:
                request = self._requests.pop(output.request_id, None)
                if request is not None and request.lease is not None:
                    request.lease.close()
        return outputs

    def abort(self, request_id: str) -> list[StreamOutput]:
        """End a request now, and give its blocks back; its id is free again. An unknown or finished id does nothing.

        Returns the last output of each sequence that had not ended. No step returns anything of it any more.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return []
        self._unsent = [output for output in self._unsent if output.request_id != request_id]
        self._arrivals.remove(request_id)
        outputs = self._end(request, FinishReason.ABORT)
        if request.lease is not None:
            request.lease.close()
        return outputs

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV. Running requests go on undisturbed; nothing computed before is ever hit again."""
        self.cache.reset()

    def stats(self) -> EngineStats:
        """Figures of all parts."""
        return EngineStats(
            cache=self.cache.stats(),
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_loading=len(self._arrivals),
            adapter_swaps=self.scheduler.slots.num_writes,
            embeddings=None if self.images is None else self.images.encoder.cache.stats(),
        )

    def _queue(self, request: EngineRequest) -> None:
        for sequence in request.sequences:
            self.scheduler.add(sequence)

    def _queue_arrivals(self) -> None:
        for request, adapter in self._arrivals.take():
            if isinstance(adapter, AdapterError):
                for sequence in request.sequences:
                    sequence.error = str(adapter)
                self._unsent += self._end(request, FinishReason.ERROR)
            else:
                self._factory.use_adapter(request, adapter)
                self._queue(request)

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
