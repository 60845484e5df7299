"""/v1/chat/completions"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from mlserve.server.chat_answer import ChatAnswer
from mlserve.server.chat_request import read_chat
from mlserve.server.generation import complete, opened, outputs_of, while_connected
from mlserve.server.protocol.chat import ChatBody
from mlserve.server.protocol.common import answers
from mlserve.server.serving import PrincipalDep, RequestIdDep, ServingDep
from mlserve.server.sse import EventStream

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["chat"])


@router.post("/chat/completions", responses=answers())
async def create_chat_completion(
    request: Request, body: ChatBody, serving: ServingDep, principal: PrincipalDep, request_id: RequestIdDep
) -> Response:
    """Answer a conversation."""
    request.state.user = body.user
    async with AsyncExitStack() as held:
        held.enter_context(serving.gate.enter(principal))
        chat = await read_chat(serving, principal, request_id, body)
        answer = ChatAnswer(
            request_id,
            int(time.time()),
            body.model or serving.model_name,
            serving.tokenizer,
            chat.job.params,
            chat.make_parser,
            body.includes_usage,
        )
        if body.stream:
            outputs = await opened(request, outputs_of(serving, chat.job), held)
            return EventStream(answer.events(outputs), held.pop_all(), serving.config.request_timeout)
        return JSONResponse(answer.whole(await while_connected(request, complete(serving, chat.job))))
