"""The prefix cache: its figures, a map of its blocks, and forgetting it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from mlserve.cache.pool_map import pool_map
from mlserve.engine.engine import Engine
from mlserve.server.protocol.common import error_responses
from mlserve.server.routes.status import engine_stats
from mlserve.server.serving import AdminDep, ObserverDep, ServingDep

__all__ = ["router"]

router = APIRouter(prefix="/v1/cache", tags=["cache"], responses=error_responses(403, 503))
SHORT = 8  # hexadecimal digits that tell adapters and images apart on a screen


@router.get("")
async def cache_stats(serving: ServingDep, _: ObserverDep) -> dict[str, Any]:
    """Figures of the pool and of the prefix cache."""
    stats = (await engine_stats(serving)).cache
    return {**asdict(stats), "hit_rate": stats.hit_rate}


@router.post("/reset")
async def reset_cache(serving: ServingDep, _: AdminDep) -> dict[str, str]:
    """Forget all cached KV. Running requests go on."""
    await serving.engine.call(Engine.reset_prefix_cache)
    return {"status": "ok"}


@router.get("/blocks")
async def cache_blocks(serving: ServingDep, _: ObserverDep) -> dict[str, Any]:
    """A map of the pool, block by block, as runs of equal ones: `[count, state, references, adapter, image]`.

    Adapters and images are numbers, or null: places in the lists of digests that come with it.
    """
    views = await serving.engine.call(lambda engine: pool_map(engine.cache))
    names = {info.digest: info.name for info in serving.adapters.list() if info.digest is not None}
    adapters, images = _numbered(view.adapter for view in views), _numbered(view.image for view in views)
    return {
        "runs": [
            [len(list(run)), view.state.value, view.references, _at(adapters, view.adapter), _at(images, view.image)]
            for view, run in itertools.groupby(views)
        ],
        "adapters": [{"digest": digest.hex()[:SHORT], "name": names.get(digest)} for digest in adapters],
        "images": [digest.hex()[:SHORT] for digest in images],
    }


def _numbered(digests: Iterable[bytes | None]) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    for digest in digests:
        if digest is not None:
            found.setdefault(digest, len(found))
    return found


def _at(numbers: dict[bytes, int], digest: bytes | None) -> int | None:
    return None if digest is None else numbers[digest]
