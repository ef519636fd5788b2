"""Reading a request's body within its bounds."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from dspark.gateway.openai.config import HttpConfig
from dspark.gateway.openai.errors import Refused

JSON = "application/json"


async def read_body(request: Request, config: HttpConfig) -> bytes:
    """The bytes of a JSON body, which is never held beyond its limit. Raises Refused."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != JSON:
        raise Refused(415, f"content-type: {media_type[:100]!r} must be {JSON}", "bad_media_type")
    coding = request.headers.get("content-encoding", "identity").lower()
    if coding != "identity":
        raise Refused(415, f"content-encoding: {coding[:100]!r} is not read here", "bad_media_type")
    if int(request.headers.get("content-length", 0)) > config.body_bytes:
        raise _too_large(config)
    body = bytearray()
    try:
        async with asyncio.timeout(config.body_s):
            async for part in request.stream():
                body += part
                if len(body) > config.body_bytes:
                    raise _too_large(config)
    except TimeoutError:
        told = f"the request's body did not come within {config.body_s:g} s"
        raise Refused(408, told, "body_timeout", close=True) from None
    return bytes(body)


def _too_large(config: HttpConfig) -> Refused:
    told = f"the request's body is above the limit of {config.body_bytes} bytes"
    return Refused(413, told, "body_too_large")
