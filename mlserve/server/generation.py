"""One request to the engine, from the gate to its last output."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request

from mlserve.engine.media import GivenImage
from mlserve.errors import StepError
from mlserve.request import RequestOptions, RequestOutput, SamplingParams, StreamOutput
from mlserve.server.errors import ClientGoneError
from mlserve.server.serving import Serving

__all__ = ["Job", "complete", "opened", "outputs_of", "while_connected"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What the engine is asked."""

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    options: RequestOptions
    images: Sequence[GivenImage] = ()


async def outputs_of(serving: Serving, job: Job) -> AsyncGenerator[StreamOutput]:
    """The job's outputs. Closing the generator aborts it.

    Raises a `RequestError` if the engine refuses it, `StepError` if it fails, `TimeoutError` if it takes too long.
    """
    recorder = serving.metrics.begin(job.options.adapter or serving.model_name)
    deadline = asyncio.get_running_loop().time() + serving.config.request_timeout
    stream = serving.engine.stream(job.request_id, job.prompt_ids, job.params, job.options, job.images)
    async with aclosing(stream):
        while True:
            async with asyncio.timeout_at(deadline):
                output = await anext(stream)
            recorder.saw(output)
            if output.error is not None:
                raise StepError(output.error)
            if output.completed is not None and serving.config.log_prompts:
                _log(serving, output.completed)
            yield output
            if output.completed is not None:
                return


def _log(serving: Serving, output: RequestOutput) -> None:
    prompt = serving.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    answers = [completion.text for completion in output.outputs]
    logger.info(
        "request %s", output.request_id, extra={"request_id": output.request_id, "prompt": prompt, "answer": answers}
    )


async def complete(serving: Serving, job: Job) -> RequestOutput:
    """The job's whole output. Raises as `outputs_of` does."""
    async with aclosing(outputs_of(serving, job)) as outputs:
        async for output in outputs:
            if output.completed is not None:
                return output.completed
    raise StepError("the engine ended a request without its output: try again")


async def opened(request: Request, outputs: AsyncGenerator[T], held: AsyncExitStack) -> AsyncGenerator[T]:
    """The same outputs, once it is sure that there are any: before, errors can still be answered with their status.

    `outputs` is closed when `held` is left. Raises what `outputs` does, and `ClientGoneError`.
    """
    held.push_async_callback(outputs.aclose)
    return _with_first(await while_connected(request, anext(outputs)), outputs)


async def _with_first(first: T, rest: AsyncGenerator[T]) -> AsyncGenerator[T]:
    yield first
    async for output in rest:
        yield output


async def while_connected(request: Request, awaitable: Awaitable[T]) -> T:
    """What is awaited, unless the client goes away first: then it is cancelled, and `ClientGoneError` raised."""
    task = asyncio.ensure_future(awaitable)
    watcher = asyncio.ensure_future(_disconnection(request))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for pending in (task, watcher):
            if not pending.done():
                pending.cancel()
                with suppress(asyncio.CancelledError, StopAsyncIteration):
                    await pending


async def _disconnection(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
