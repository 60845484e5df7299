"""The application: routes, and what every request passes on its way to them."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from mlserve import __version__
from mlserve.server.errors import add_error_handlers
from mlserve.server.middleware import Guard
from mlserve.server.routes import adapters, cache, chat, completions, models, page, responses, status, tokens
from mlserve.server.serving import Serving

__all__ = ["create_app"]


def create_app(serving: Serving) -> FastAPI:
    """An ASGI application over a running engine. Closing the engine is up to whoever made it."""
    app = FastAPI(
        title="mlserve",
        version=__version__,
        description="An OpenAI-compatible API over many LoRA adapters and images on one base model.",
        docs_url=None,  # its page loads scripts from elsewhere; the document itself is at /openapi.json
        redoc_url=None,
    )
    app.state.serving = serving
    for part in (chat, completions, responses, models, adapters, cache, tokens, status, page):
        app.include_router(part.router)
    add_error_handlers(app)
    app.add_middleware(Guard, keys=serving.keys, max_body_bytes=serving.config.max_body_bytes)
    if serving.config.allowed_origins is not None:  # outermost: browsers ask it before they send a key
        origins = [origin.strip() for origin in serving.config.allowed_origins.split(",")]
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app
