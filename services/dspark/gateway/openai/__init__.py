"""OpenAI-compatible HTTP on a gateway, with health, readiness and metrics (docs/openai.md)."""

from dspark.gateway.openai.app import make_app
from dspark.gateway.openai.config import HttpConfig
from dspark.gateway.openai.door import Door, DoorState
from dspark.gateway.openai.server import HttpServer, serve_http

__all__ = [
    "Door",
    "DoorState",
    "HttpConfig",
    "HttpServer",
    "make_app",
    "serve_http",
]
