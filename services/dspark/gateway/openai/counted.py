"""HTTP requests as the figures count them."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark.gateway.metrics import Metrics
from dspark.gateway.openai.errors import CLIENT_GONE


class Counted:
    """ASGI middleware: counts requests by route and status. routes: those that have a name of their
    own; a path ends in "/" for all below it. Others are together, since anybody can invent paths.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: tuple[str, ...]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = self._route(scope["path"])
        with self._metrics.request("http", route, str(CLIENT_GONE)) as responding:

            async def watched(message: Message) -> None:
                if message["type"] == "http.response.start":
                    responding.status = str(message["status"])
                await send(message)

            await self._app(scope, receive, watched)

    def _route(self, path: str) -> str:
        for route in self._routes:
            if path == route or (route.endswith("/") and path.startswith(route)):
                return route
        return "other"
