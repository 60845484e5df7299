"""/v1/models: the base model, and each adapter as a model of its own."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter

from mlserve.server.protocol.common import error_responses
from mlserve.server.serving import Serving, ServingDep

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["models"], responses=error_responses())


@router.get("/models")
async def list_models(serving: ServingDep) -> dict[str, Any]:
    """All that the `model` field of a request may say."""
    names = await asyncio.to_thread(serving.adapters.names)
    return {"object": "list", "data": [_base(serving), *(_adapter(serving, name) for name in names)]}


@router.get("/models/{model:path}", responses=error_responses(404))
async def retrieve_model(model: str, serving: ServingDep) -> dict[str, Any]:
    """One of them."""
    adapter = await asyncio.to_thread(serving.adapter_of, model)
    return _base(serving) if adapter is None else _adapter(serving, adapter)


def _base(serving: Serving) -> dict[str, Any]:
    card = _card(serving, serving.model_name, None)
    return {**card, "max_model_len": serving.limits.max_model_len, "takes_images": serving.images is not None}


def _adapter(serving: Serving, name: str) -> dict[str, Any]:
    return _card(serving, name, serving.model_name)


def _card(serving: Serving, name: str, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "mlserve",
        "root": serving.model_name,
        "parent": parent,
    }
