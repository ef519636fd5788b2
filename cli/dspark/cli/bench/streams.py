"""An OpenAI-compatible server as an endpoint, over streaming HTTP."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from dspark.cli.bench.load import Ask, Tokens, Usage
from dspark.core.errors import ConfigError, Unavailable

# What to ask a server for, so that its chunks say how many tokens they hold: ours and vLLM list the
# ids, llama.cpp (which calls itself so in `owned_by` of its model) tells its running count.
_LLAMA_CPP = "llamacpp"
_COUNTS: Mapping[str, Any] = {"timings_per_token": True}
_IDS: Mapping[str, Any] = {"return_token_ids": True}

# A stream that says nothing for ten minutes is dead on any machine.
SILENCE_S = 600.0


class ChatStream:
    """`/v1/chat/completions`, greedy and on past the model's end: all answers are equally long.

    model: an object of `/v1/models`.
    """

    def __init__(self, client: httpx.AsyncClient, model: Mapping[str, Any]) -> None:
        self._client = client
        self._fields = {
            "model": model["id"],
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **(_COUNTS if model.get("owned_by") == _LLAMA_CPP else _IDS),
        }

    async def answer(self, ask: Ask) -> AsyncGenerator[Tokens | Usage, None]:
        body = {**self._fields, "messages": list(ask.messages), "max_tokens": ask.max_tokens}
        count = TokenCount()
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    told = (await response.aread()).decode(errors="replace")
                    raise Unavailable(f"HTTP {response.status_code}: {told[:500]}")
                async for event in _events(response):
                    yield Tokens(count.of(event))
                    if event.get("usage"):
                        yield _usage(event)
        except httpx.HTTPError as error:
            raise Unavailable(f"{type(error).__name__}: {error}") from error


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[ChatStream]:
    """A connection for each request: one that is kept may have been dropped by a server that was
    paused, and llama.cpp's now and then drops one as the next request is written to it."""
    client = httpx.AsyncClient(
        base_url=url,
        timeout=httpx.Timeout(SILENCE_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=False,  # a proxy has no part in a measurement
    )
    async with client:
        try:
            listed = (await client.get("/v1/models")).raise_for_status().json()
            stream = ChatStream(client, listed["data"][0])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise Unavailable(
                f"{url}/v1/models does not name a model: {type(error).__name__}: {error}"
            ) from error
        yield stream


def check_loopback(url: str) -> str:
    """The same without a slash at its end, or ConfigError: load goes to this machine only."""
    try:
        parsed = httpx.URL(url)
        here = parsed.host == "localhost" or ipaddress.ip_address(parsed.host).is_loopback
    except (httpx.InvalidURL, ValueError):
        here = False
    if not here or parsed.scheme != "http":
        raise ConfigError(f"url: {url!r} must be http:// and a loopback address, as 127.0.0.1:8000")
    return url.rstrip("/")


@dataclass
class TokenCount:
    """How many tokens each event of one stream brought. By the ids it lists, else by the server's
    running count (llama.cpp's `timings`: an emoji's three tokens come in one chunk), else one
    where there is text."""

    seen: int = 0

    def of(self, event: Mapping[str, Any]) -> int:
        choice: Mapping[str, Any] = next(iter(event.get("choices") or ()), {})
        if isinstance(ids := choice.get("token_ids"), list):
            return len(ids)
        if "predicted_n" in (timings := event.get("timings") or {}):
            before, self.seen = self.seen, timings["predicted_n"]
            return int(self.seen - before)
        return int(bool(choice.get("text") or (choice.get("delta") or {}).get("content")))


def _usage(event: Mapping[str, Any]) -> Usage:
    usage = event["usage"]
    prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    if said := usage.get("speculation"):
        return Usage(prompt, completion, said["rounds"], said["accepted"])
    if "draft_n_accepted" in (timings := event.get("timings") or {}):
        accepted = timings["draft_n_accepted"]
        return Usage(prompt, completion, completion - accepted, accepted)
    return Usage(prompt, completion)


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream of server-sent events. Lines end at line feeds alone: httpx's own
    `aiter_lines` also ends them at characters that may stand inside a JSON string (U+2028)."""
    held = b""
    async for part in response.aiter_raw():
        *lines, held = (held + part).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            event = json.loads(data)
            if error := event.get("error"):
                raise Unavailable(f"the stream ended with an error: {str(error)[:500]}")
            yield event
