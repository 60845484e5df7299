"""The chat page: a few static files, which load nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

__all__ = ["PATHS", "router"]

router = APIRouter(include_in_schema=False)

FOLDER = files("mlserve.server") / "static"
TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
ASSETS = frozenset(path.name for path in FOLDER.iterdir() if Path(path.name).suffix in TYPES)
PATHS = frozenset({"/", *(f"/static/{name}" for name in ASSETS)})
POLICY = "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"


@router.get("/")
async def page() -> Response:
    """The page itself."""
    return _file("page.html", "text/html; charset=utf-8")


@router.get("/static/{name}")
async def static(name: str) -> Response:
    """A part of it."""
    if name not in ASSETS:
        return Response(status_code=404)
    return _file(name, TYPES[Path(name).suffix])


def _file(name: str, content_type: str) -> Response:
    headers = {"Content-Type": content_type, "Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
    return Response((FOLDER / name).read_bytes(), headers=headers)
