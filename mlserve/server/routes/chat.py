"""/v1/chat/completions"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from mlserve.server.chat_answer import ChatAnswer, PlainText, with_first
from mlserve.server.chat_request import chat_job
from mlserve.server.generation import Job, complete, outputs_of, while_connected
from mlserve.server.protocol.chat import ChatBody
from mlserve.server.protocol.common import error_responses
from mlserve.server.serving import PrincipalDep, RequestIdDep, Serving, ServingDep
from mlserve.server.sse import EventStream

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["chat"])


@router.post("/chat/completions", responses=error_responses(404, 429, 500, 503, 504))
async def create_chat_completion(
    request: Request, body: ChatBody, serving: ServingDep, principal: PrincipalDep, request_id: RequestIdDep
) -> Response:
    """Answer a conversation."""
    request.state.user = body.user
    async with AsyncExitStack() as held:
        held.enter_context(serving.gate.enter(principal))
        params = body.sampling(serving.limits.max_model_len)
        job = await asyncio.to_thread(chat_job, serving, principal, request_id, body, params)
        answer = ChatAnswer(
            request_id,
            int(time.time()),
            body.model or serving.model_name,
            serving.tokenizer,
            job.params,
            PlainText,
            body.includes_usage,
        )
        if body.stream:
            return await stream_chat(request, serving, job, answer, held)
        return JSONResponse(answer.whole(await while_connected(request, complete(serving, job))))


async def stream_chat(request: Request, serving: Serving, job: Job, answer: Any, held: AsyncExitStack) -> EventStream:
    """The answer as a stream, once it is sure that there will be one."""
    outputs = outputs_of(serving, job)
    held.push_async_callback(outputs.aclose)
    first = await while_connected(request, anext(outputs))
    return EventStream(answer.events(with_first(first, outputs)), held.pop_all())
