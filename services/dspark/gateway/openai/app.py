"""The HTTP application: OpenAI's routes on a gateway, health, readiness and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dspark.core.errors import DsparkError
from dspark.gateway.gateway import Gateway
from dspark.gateway.keys import KeyRing
from dspark.gateway.openai.config import HttpConfig
from dspark.gateway.openai.counted import Counted
from dspark.gateway.openai.door import Door
from dspark.gateway.openai.errors import Failure, Refused, failure
from dspark.gateway.openai.render import ChatRendering, CompletionRendering
from dspark.gateway.openai.routes import Completions, Front, Pages, page
from dspark.gateway.openai.schema import ChatRequest, CompletionRequest
from dspark.gateway.openai.tokens import TokenTexts

# By which requests are counted.
ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/models/",
    "/healthz",
    "/readyz",
    "/metrics",
)


def make_app(
    gateway: Gateway,
    keys: KeyRing,
    door: Door,
    config: HttpConfig | None = None,
) -> FastAPI:
    """keys: who may call. door: whether anybody may now; whoever serves opens it."""
    texts = TokenTexts(gateway.tokenizer)
    front = Front(gateway, keys, door, config or HttpConfig(), texts, int(time.time()))
    pages = Pages(front)
    chat = Completions(front, ChatRequest, ChatRendering, "chatcmpl")
    completions = Completions(front, CompletionRequest, CompletionRendering, "cmpl")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(gateway.metrics.watch_loop())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    # No generated pages: they would describe bodies that are read by hand, and load scripts from
    # elsewhere.
    app = FastAPI(
        title="dspark",
        openapi_url=None,
        lifespan=lifespan,
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", pages.models),
            Route("/v1/models/{model:path}", pages.model),
            Route("/healthz", pages.health),
            Route("/readyz", pages.ready),
            Route("/metrics", pages.metrics),
        ],
        exception_handlers={
            DsparkError: told,
            Exception: told,
            HTTPException: told_by_router,
        },
    )
    app.add_middleware(Counted, metrics=gateway.metrics, routes=ROUTES)
    return app


async def told(_: Request, error: Exception) -> Response:
    return respond(failure(error))


async def told_by_router(request: Request, error: Exception) -> Response:
    """No such route, or not with this method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method[:20]} {request.url.path[:200]}"
    told = "is not known here" if error.status_code == 404 else str(error.detail)
    refused = failure(Refused(error.status_code, f"{what}: {told}", "unknown_url"))
    response = respond(refused)
    response.headers.update(error.headers or {})
    return response


def respond(failed: Failure) -> Response:
    response = page(failed.body, failed.status)
    response.headers.update(failed.headers)
    return response
