"""Adapters over HTTP: what is served to everybody, changes to administrators, from allowed folders only."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field

from mlserve.adapters.registry import AdapterInfo
from mlserve.errors import AdapterNotFoundError
from mlserve.server.errors import ApiError
from mlserve.server.protocol.common import PLAIN_TEXT, Body, error_responses
from mlserve.server.serving import AdminDep, Serving, ServingDep

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["adapters"], responses=error_responses(403, 404, 409, 503))


class AdapterBody(Body):
    """How an adapter is to be served."""

    path: str | None = Field(None, max_length=4096, description="Default: the folder that it was read from before")
    pinned: bool = Field(False, description="Never put out of host memory")


class LoadBody(Body):
    """As vLLM's clients send it."""

    lora_name: str = Field(max_length=256)
    lora_path: str = Field(max_length=4096)


class UnloadBody(Body):
    """As vLLM's clients send it."""

    lora_name: str = Field(max_length=256)


@router.get("/adapters")
async def list_adapters(serving: ServingDep) -> dict[str, Any]:
    """The adapters that were asked for or loaded, and the names of those that can be."""
    infos, names = await asyncio.to_thread(lambda: (serving.adapters.list(), serving.adapters.names()))
    return {"object": "list", "data": [_shown(info) for info in infos], "names": names}


@router.get("/adapters/{name:path}")
async def retrieve_adapter(name: str, serving: ServingDep) -> dict[str, Any]:
    """One adapter that was asked for or loaded."""
    for info in await asyncio.to_thread(serving.adapters.list):
        if info.name == name:
            return _shown(info)
    raise AdapterNotFoundError(f"no adapter {name!r} was loaded: load it, or ask for it once")


@router.put("/adapters/{name:path}")
async def load_adapter(name: str, body: AdapterBody, serving: ServingDep, _: AdminDep) -> dict[str, Any]:
    """Read an adapter, and serve it under this name from now on. Requests that run keep what they have."""
    return _shown(await _load(serving, name, body.path, body.pinned))


@router.delete("/adapters/{name:path}")
async def unload_adapter(name: str, serving: ServingDep, _: AdminDep) -> dict[str, Any]:
    """Serve a name no longer. Requests that run finish."""
    await _unload(serving, name)
    return {"name": name, "deleted": True}


@router.post("/load_lora_adapter", response_class=Response, responses=PLAIN_TEXT)
async def load_lora_adapter(body: LoadBody, serving: ServingDep, _: AdminDep) -> PlainTextResponse:
    """The same in vLLM's form."""
    await _load(serving, body.lora_name, body.lora_path, pinned=False)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/unload_lora_adapter", response_class=Response, responses=PLAIN_TEXT)
async def unload_lora_adapter(body: UnloadBody, serving: ServingDep, _: AdminDep) -> PlainTextResponse:
    """The same in vLLM's form."""
    await _unload(serving, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _load(serving: Serving, name: str, path: str | None, pinned: bool) -> AdapterInfo:
    if name == serving.model_name:
        raise ApiError(409, f"{name!r} is the name of the base model: choose another", code="name_taken")
    if path is None:
        return await asyncio.to_thread(serving.adapters.load, name, pinned=pinned)
    root = await asyncio.to_thread(_root_of, serving, path)
    return await asyncio.to_thread(serving.adapters.load, name, path, pinned=pinned, root=root)


async def _unload(serving: Serving, name: str) -> None:
    await asyncio.to_thread(serving.adapters.unload, name)
    serving.metrics.forget_model(name)


def _root_of(serving: Serving, path: str) -> Path:
    """The allowed folder that a path lies in. What lies elsewhere is refused, whether it exists or not."""
    try:
        real = Path(path).resolve()
    except (OSError, ValueError, RuntimeError):
        real = None
    for root in serving.adapter_roots:
        if real is not None and real.is_relative_to(root):
            return root
    raise ApiError(
        403, "the path is outside the folders that adapters may be loaded from: see the option adapter_roots",
        param="path", code="forbidden",
    )  # fmt: skip


def _shown(info: AdapterInfo) -> dict[str, Any]:
    """Without the path, which is the server's own affair."""
    shown = asdict(info)
    del shown["path"]
    return {**shown, "digest": None if info.digest is None else info.digest.hex(), "object": "adapter"}
