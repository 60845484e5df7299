"""/v1/responses"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from mlserve.server.chat_request import read_chat
from mlserve.server.generation import complete, opened, outputs_of, while_connected
from mlserve.server.protocol.common import answers
from mlserve.server.protocol.responses import ResponsesBody
from mlserve.server.responses_answer import ResponsesAnswer, ResponseStream
from mlserve.server.serving import PrincipalDep, RequestIdDep, ServingDep
from mlserve.server.sse import EventStream

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["responses"])


@router.post("/responses", responses=answers())
async def create_response(
    request: Request, body: ResponsesBody, serving: ServingDep, principal: PrincipalDep, request_id: RequestIdDep
) -> Response:
    """Answer a conversation, in the form of OpenAI's Responses API. The response isn't kept."""
    request.state.user = body.safety_identifier or body.user
    async with AsyncExitStack() as held:
        held.enter_context(serving.gate.enter(principal))
        chat = await read_chat(serving, principal, request_id, body.chat())
        model = body.model or serving.model_name
        answer = ResponsesAnswer(
            request_id, int(time.time()), model, body, serving.tokenizer, chat.job.params, chat.make_parser
        )
        if body.stream:
            stream = ResponseStream(answer)
            outputs = await opened(request, outputs_of(serving, chat.job), held)
            return EventStream(
                stream.events(outputs), held.pop_all(), serving.config.request_timeout, end=b"", on_error=stream.failure
            )
        return JSONResponse(answer.whole(await while_connected(request, complete(serving, chat.job))))
