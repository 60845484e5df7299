"""Whether the server lives and serves, what it is, and its figures."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_PLAIN_1_0_0

from mlserve import __version__
from mlserve.engine.engine import Engine
from mlserve.engine.stats import EngineStats
from mlserve.server.errors import ApiError
from mlserve.server.protocol.common import PLAIN_TEXT, error_responses
from mlserve.server.serving import ObserverDep, Serving, ServingDep

__all__ = ["engine_stats", "router"]

router = APIRouter(tags=["status"], responses=error_responses())


@router.get("/health")
async def health() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/ready", responses=error_responses(503))
async def ready(serving: ServingDep) -> dict[str, str]:
    """Requests are served: 503 if the engine has ended."""
    if not serving.engine.is_running:
        raise ApiError(503, "the engine has ended: start the server anew", kind="server_error")
    return {"status": "ready"}


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of mlserve."""
    return {"version": __version__}


@router.get("/metrics", response_class=Response, responses=error_responses(403, 503) | PLAIN_TEXT)
async def metrics(serving: ServingDep, _: ObserverDep) -> Response:
    """For Prometheus."""
    return Response(
        serving.metrics.exposition(await engine_stats(serving)), headers={"Content-Type": CONTENT_TYPE_PLAIN_1_0_0}
    )


async def engine_stats(serving: Serving) -> EngineStats:
    """The engine's figures, between two steps."""
    return await serving.engine.call(Engine.stats)
