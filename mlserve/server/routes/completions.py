"""/v1/completions"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from mlserve.engine.engine import Engine
from mlserve.errors import RequestError, SamplingParamsError
from mlserve.request import RequestOutput, SamplingParams
from mlserve.server.auth import Principal
from mlserve.server.completion_answer import CompletionAnswer
from mlserve.server.generation import Job, complete, opened, outputs_of, while_connected
from mlserve.server.merging import merge
from mlserve.server.protocol.common import answers
from mlserve.server.protocol.completions import CompletionBody
from mlserve.server.serving import PrincipalDep, RequestIdDep, Serving, ServingDep
from mlserve.server.sse import EventStream

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["completions"])


@router.post("/completions", responses=answers())
async def create_completion(
    request: Request, body: CompletionBody, serving: ServingDep, principal: PrincipalDep, request_id: RequestIdDep
) -> Response:
    """Go on from a prompt, or from each of several."""
    request.state.user = body.user
    async with AsyncExitStack() as held:
        held.enter_context(serving.gate.enter(principal))
        params = body.sampling()
        if body.stream and body.echo and params.logprobs is not None:
            raise SamplingParamsError(
                "echo with logprobs can't be streamed: leave out one of stream, echo and logprobs"
            )
        prompts = body.prompts()
        jobs = await asyncio.to_thread(_jobs, serving, principal, request_id, body, params)
        if len(jobs) > 1:
            await serving.engine.call(lambda engine: _check_all(engine, jobs))
        answer = CompletionAnswer(
            request_id,
            int(time.time()),
            body.model or serving.model_name,
            serving.tokenizer,
            params,
            prompts,
            bool(body.echo),
            body.includes_usage,
        )
        if not body.stream:
            return JSONResponse(answer.whole(await while_connected(request, _complete_all(serving, jobs))))
        outputs = await opened(request, merge([outputs_of(serving, job) for job in jobs]), held)
        return EventStream(answer.events(outputs), held.pop_all(), serving.config.request_timeout)


def _jobs(
    serving: Serving, principal: Principal, request_id: str, body: CompletionBody, params: SamplingParams
) -> list[Job]:
    options = serving.options(principal, body.model, body.cache_salt, body.priority)
    jobs = []
    for number, prompt in enumerate(body.prompts()):
        ids = serving.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        jobs.append(Job(f"{request_id}-{number}", ids, params, options))
    return jobs


def _check_all(engine: Engine, jobs: Sequence[Job]) -> None:
    """Raises a `RequestError` if one of them would be refused, before any has begun."""
    for number, job in enumerate(jobs):
        try:
            engine.prepare(job.request_id, job.prompt_ids, replace(job.params, n=1), job.options)
        except RequestError as error:
            raise type(error)(f"prompt {number}: {error}") from None


async def _complete_all(serving: Serving, jobs: Sequence[Job]) -> list[RequestOutput]:
    """All or none: if one is refused or fails, the others are aborted."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(complete(serving, job)) for job in jobs]
    except* Exception as errors:
        raise _first(errors) from None
    return [task.result() for task in tasks]


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
