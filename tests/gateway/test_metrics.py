"""Calls of both protocols in one set of figures: real calls, and what /metrics says of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dspark.gateway.keys import KeyRing
from dspark.gateway.openai import Door, make_app, serve_http
from dspark.v1 import generation_pb2 as pb
from dspark.v1 import generation_pb2_grpc as pb_grpc

from .toy_front import FOR_EVER, Front, front

GENERATE = "/dspark.v1.Generation/Generate"


@dataclass
class Both:
    """A gateway behind its two servers. url: of HTTP."""

    served: Front
    grpc: pb_grpc.GenerationAsyncStub
    url: str

    async def generate(self, **fields: Any) -> list[pb.GenerateResponse]:
        request = asked(**fields)
        return [response async for response in self.grpc.Generate(request)]

    async def complete(self, **fields: Any) -> httpx.Response:
        async with httpx.AsyncClient() as client:
            body = {"prompt": "Hello", "temperature": 0, "max_tokens": 9, **fields}
            return await client.post(f"{self.url}/v1/completions", json=body)

    async def figures(self) -> Figures:
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"{self.url}/metrics")).text
        return Figures(
            {
                (sample.name, frozenset(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
        )


@dataclass
class Figures:
    seen: dict[tuple[str, frozenset[tuple[str, str]]], float]

    def at(self, name: str, **labels: str) -> float:
        """0 for what nobody counted yet."""
        return self.seen.get((f"dspark_{name}", frozenset(labels.items())), 0.0)

    def calls(self, status: str, route: str = GENERATE, protocol: str = "grpc") -> float:
        return self.at("requests_total", protocol=protocol, route=route, status=status)

    def first_tokens(self, protocol: str) -> float:
        return self.at("time_to_first_token_seconds_count", protocol=protocol)

    def further_tokens(self, protocol: str) -> float:
        return self.at("time_per_output_token_seconds_count", protocol=protocol)


def asked(n: int = 1, max_tokens: int = 9, **fields: Any) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return pb.GenerateRequest(prompt=pb.Prompt(text="Hello"), sampling=sampling, n=n, **fields)


@asynccontextmanager
async def both() -> AsyncIterator[Both]:
    async with front() as served:
        door = Door()
        app = make_app(served.gateway, KeyRing(), door)
        async with (
            serve_http(app, door) as http,
            grpc.aio.insecure_channel(served.address) as channel,
        ):
            door.open()
            yield Both(served, pb_grpc.GenerationStub(channel), f"http://{http.address}")


async def test_an_answer_is_measured_the_same_whatever_it_came_by() -> None:
    async with both() as of:
        await of.generate(n=3)
        await of.generate(max_tokens=1)
        told = await of.figures()
        assert (told.first_tokens("grpc"), told.further_tokens("grpc")) == (4, 3)
        assert (told.first_tokens("http"), told.further_tokens("http")) == (0, 0)
        assert told.at("time_to_first_token_seconds_sum", protocol="grpc") > 0
        assert (await of.complete(n=2)).status_code == 200
        told = await of.figures()
        assert (told.first_tokens("grpc"), told.first_tokens("http")) == (4, 2)
        assert told.further_tokens("http") == 2


async def test_tokens_that_a_client_held_already_are_not_measured() -> None:
    async with both() as of:
        whole = [id for response in await of.generate() for id in response.chunk.ids]
        for held in (8, 9):
            await of.generate(resume=[pb.Resume(choice=0, ids=whole[:held])], attempt=held)
        told = await of.figures()
        assert (told.first_tokens("grpc"), told.further_tokens("grpc")) == (2, 1)


async def test_calls_are_counted_by_how_they_ended() -> None:
    async with both() as of:
        await of.generate()
        await of.grpc.CountTokens(pb.CountTokensRequest(prompt=pb.Prompt(text="Hello")))
        await of.grpc.ModelInfo(pb.ModelInfoRequest())
        for fields in ({"n": 0}, {"model": "gpt"}):
            with pytest.raises(grpc.aio.AioRpcError):
                await of.generate(**fields)
        assert (await of.complete(n=0)).status_code == 400
        call: Any = of.grpc.Generate(asked(max_tokens=FOR_EVER))
        await call.read()
        assert (await of.figures()).at("requests_in_flight", protocol="grpc") == 1
        call.cancel()
        await of.served.freed()
        while (told := await of.figures()).at("requests_in_flight", protocol="grpc"):
            pass
        for status in ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "CANCELLED"):
            assert told.calls(status) == 1, status
        for method in ("CountTokens", "ModelInfo"):
            assert told.calls("OK", f"/dspark.v1.Generation/{method}") == 1
        assert told.calls("400", "/v1/completions", "http") == 1


async def test_what_a_stop_ends_is_counted_as_unavailable() -> None:
    async with both() as of:
        call: Any = of.grpc.Generate(asked(max_tokens=FOR_EVER))
        await call.read()
        await of.served.server.drain(0)
        assert (await of.figures()).calls("UNAVAILABLE") == 1
