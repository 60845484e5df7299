"""/tokenize and /detokenize"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field, StrictInt

from mlserve.engine.prompt import render_chat
from mlserve.errors import PromptError
from mlserve.server.protocol.chat import MAX_MESSAGES, ChatMessage
from mlserve.server.protocol.common import MAX_IDS, Body, error_responses
from mlserve.server.serving import PrincipalDep, Serving, ServingDep

__all__ = ["router"]

router = APIRouter(tags=["tokens"], responses=error_responses())


class TokenizeBody(Body):
    """A text, or a conversation as the chat template lays it out."""

    model: str | None = Field(None, max_length=1024)
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True  # of a text: what the model expects at its beginning
    add_generation_prompt: bool = True  # of a conversation: what opens the answer


class DetokenizeBody(Body):
    """Token ids."""

    model: str | None = Field(None, max_length=1024)
    tokens: Annotated[list[StrictInt], Field(max_length=MAX_IDS, fail_fast=True)]


@router.post("/tokenize", responses=error_responses(404, 429))
async def tokenize(body: TokenizeBody, serving: ServingDep, principal: PrincipalDep) -> dict[str, Any]:
    """Token ids of a text or of a conversation."""
    serving.adapter_of(body.model)
    with serving.gate.enter(principal):
        tokens = await asyncio.to_thread(_encode, serving, body)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": serving.limits.max_model_len}


@router.post("/detokenize", responses=error_responses(404, 429))
async def detokenize(body: DetokenizeBody, serving: ServingDep, principal: PrincipalDep) -> dict[str, str]:
    """The text of token ids, special ones included."""
    serving.adapter_of(body.model)
    wrong = [token for token in body.tokens if not 0 <= token < serving.limits.vocab_size]
    if wrong:
        size = serving.limits.vocab_size
        raise PromptError(f"token {wrong[0]} is out of range, the vocabulary has {size}: give ids from 0 to {size - 1}")
    with serving.gate.enter(principal):
        text = await asyncio.to_thread(serving.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return {"prompt": text}


def _encode(serving: Serving, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise PromptError("prompt and messages are both given or both missing: give one of them")
    if body.prompt is not None:
        return serving.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    messages = [message.model_dump(exclude_unset=True) for message in body.messages or ()]
    return render_chat(messages, serving.tokenizer, add_generation_prompt=body.add_generation_prompt)
