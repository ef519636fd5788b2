"""The OpenAI routes: from a body to calls, from the gateway's outputs to a response."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Generic

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dspark.core.errors import InvalidRequest, NotFound
from dspark.core.traces import cleaned
from dspark.gateway.answers import Answer
from dspark.gateway.gateway import Call, Chunk, Gateway, Output, Started, merged
from dspark.gateway.keys import KeyRing, Tenant
from dspark.gateway.openai.body import JSON, read_body
from dspark.gateway.openai.config import HttpConfig
from dspark.gateway.openai.door import Door, DoorState
from dspark.gateway.openai.errors import ClientGone, failure
from dspark.gateway.openai.render import Head, Rendering, Shown, dumps
from dspark.gateway.openai.reply import Reply, attended
from dspark.gateway.openai.schema import Asked, read
from dspark.gateway.openai.tokens import TokenTexts
from dspark.gateway.prompts import Prompt
from dspark.telemetry.logs import about


@dataclass(frozen=True, slots=True)
class Front:
    """What the routes serve from. created: seconds since 1970."""

    gateway: Gateway
    keys: KeyRing
    door: Door
    config: HttpConfig
    texts: TokenTexts
    created: int

    def head(self, id: str) -> Head:
        model = self.gateway.model
        return Head(id, int(time.time()), model.name, model.target_id)

    async def text_of(self, prompt: Prompt) -> str:
        """What `echo` says of it. Its ids were checked."""
        return prompt.text or await self.gateway.decode(prompt.ids or ())

    def caller(self, request: Request) -> Tenant:
        return self.keys.authenticate(request.headers.get("authorization"))

    def check_model(self, name: str | None) -> None:
        served = self.gateway.model.name
        if name not in (None, served):
            raise NotFound(f"model: {name[:100]!r} is not served here; {served!r} is")


class Completions(Generic[Asked]):
    """POST of one kind of completion, an ASGI application. asks: its body. prefix: of its ids."""

    def __init__(
        self, front: Front, asks: type[Asked], rendering: type[Rendering], prefix: str
    ) -> None:
        self._front = front
        self._asks = asks
        self._rendering = rendering
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front, request, id = self._front, Request(scope, receive), secrets.token_hex(12)
        reply = Reply(send, scope["http_version"], {"x-request-id": id}, front.gateway.hand)
        with about(id):
            try:
                await self._serve(request, receive, reply, id)
            except (ClientGone, ClientDisconnect):
                pass
            except Exception as error:
                await reply.fail(failure(error))

    async def _serve(self, request: Request, receive: Receive, reply: Reply, id: str) -> None:
        front, arrived = self._front, self._front.gateway.clock()
        front.door.check()
        caller = front.caller(request)
        with caller.admit():
            asked = await read(self._asks, await read_body(request, front.config))
            front.check_model(asked.model)
            call = Call(
                prompt=Prompt(),
                protocol="http",
                sampling=asked.sampling,
                request_id=id,
                tenant=caller.name,
                priority=caller.priority(asked.priority or 0),
                deadline=None if asked.deadline is None else arrived + asked.deadline,
                floor_tps=asked.floor_tps or 0.0,
                speculation=asked.wishes,
                traceparent=cleaned(request.headers.get("traceparent", "")),
            )
            await attended(self._answer(asked, call, caller, reply), receive, front.door)

    async def _answer(self, asked: Asked, call: Call, caller: Tenant, reply: Reply) -> None:
        front, prompts, sampling = self._front, asked.prompts, asked.sampling
        calls = [replace(call, prompt=prompt) for prompt in prompts]
        if len(calls) > 1:
            calls = [replace(c, request_id=f"{c.request_id}-{i}") for i, c in enumerate(calls)]
        shown = Shown(
            prompts=[()] * len(calls),
            n=sampling.n,
            echo=[""] * len(calls) if asked.echoes else [],
            logprobs=sampling.logprobs,
            token_ids=bool(asked.return_token_ids),
            usage=asked.include_usage,
        )
        head = front.head(f"{self._prefix}-{call.request_id}")
        rendering = self._rendering(head, shown, front.texts)
        streams = [self._outputs(call, i, shown, caller) for i, call in enumerate(calls)]
        try:
            async with aclosing(streams[0] if len(streams) == 1 else merged(streams)) as outputs:
                if asked.stream:
                    await stream(outputs, rendering, reply, len(calls) * sampling.n)
                else:
                    answers = [output async for output in outputs if isinstance(output, Answer)]
                    await reply.json(200, rendering.whole(answers))
        except InvalidRequest as error:
            field = asked.names.get(error.field, error.field)
            raise InvalidRequest(field, error.value, error.limit) from error

    async def _outputs(
        self, call: Call, prompt: int, shown: Shown, caller: Tenant
    ) -> AsyncGenerator[Output, None]:
        """Chunks and answers to one prompt, with the choices' numbers in the whole; what they cost
        is spent."""
        first = prompt * shown.n
        async with aclosing(self._front.gateway.generate(call)) as outputs:
            async for output in outputs:
                if isinstance(output, Started):
                    shown.prompts[prompt] = output.prompt_ids
                    if shown.echo:
                        shown.echo[prompt] = await self._front.text_of(call.prompt)
                    caller.spend(len(output.prompt_ids))
                    continue
                if isinstance(output, Chunk):
                    caller.spend(len(output.ids))
                yield replace(output, choice=first + output.choice) if first else output


async def stream(
    outputs: AsyncGenerator[Output, None], rendering: Rendering, reply: Reply, choices: int
) -> None:
    """One event a step. The response begins with the first, so what fails before has its status."""
    answers: list[Answer] = []
    async for output in outputs:
        if isinstance(output, Answer):
            answers.append(output)
            data = rendering.end(output)
            last = len(answers) == choices
            await reply.events(data + rendering.last(answers) if last else data, last=last)
        elif isinstance(output, Chunk) and (data := rendering.delta(output)):
            await reply.events(data)


class Pages:
    """The routes that only tell: models, health, metrics. Their errors are the application's."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def models(self, request: Request) -> Response:
        self._front.caller(request)
        return page({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._front.caller(request)
        self._front.check_model(request.path_params["model"])
        return page(self._card())

    async def health(self, request: Request) -> Response:
        return page({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        state = self._front.door.state
        return page({"status": state}, 200 if state is DoorState.READY else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._front.gateway.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    def _card(self) -> dict[str, Any]:
        model = self._front.gateway.model
        return {
            "id": model.name,
            "object": "model",
            "created": self._front.created,
            "owned_by": "dspark",
            "max_model_len": model.limits.sequence_tokens,
            "target_id": model.target_id,
            "drafters": [drafter.drafter_id for drafter in model.drafters],
            "gamma": model.gamma,
            "verify": model.verify,
        }


def page(body: object, status: int = 200) -> Response:
    return Response(dumps(body), status, media_type=JSON)
