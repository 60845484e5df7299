"""The chat page: a few static files, which load nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import Response

__all__ = ["router"]

router = APIRouter(include_in_schema=False)

FOLDER = files("mlserve.server") / "static"
CONTENT_TYPES = {"page.css": "text/css", "page.js": "text/javascript", "pool.js": "text/javascript"}
POLICY = "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"


@router.get("/")
async def page() -> Response:
    """The page itself."""
    return _file("page.html", "text/html; charset=utf-8")


@router.get("/static/{name}")
async def static(name: str) -> Response:
    """A part of it."""
    if name not in CONTENT_TYPES:
        return Response(status_code=404)
    return _file(name, CONTENT_TYPES[name])


def _file(name: str, content_type: str) -> Response:
    headers = {"Content-Type": content_type, "Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
    return Response((FOLDER / name).read_bytes(), headers=headers)
