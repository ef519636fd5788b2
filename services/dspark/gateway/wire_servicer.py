"""Calls of generation.proto as the gateway's nouns, and what it says as messages."""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, AsyncIterator, Callable

from dspark.client.wire_client import (
    figures_to_wire,
    logprobs_to_wire,
    reason_to_wire,
    sampling_from_wire,
    speculation_from_wire,
    usage_to_wire,
)
from dspark.core.drafts import PROTOCOL_VERSION
from dspark.core.errors import InvalidRequest
from dspark.core.traces import cleaned
from dspark.gateway.answers import Answer
from dspark.gateway.gateway import Call, Chunk, Gateway, Output, Started
from dspark.gateway.keys import Tenant
from dspark.gateway.prompts import Prompt
from dspark.v1 import generation_pb2 as pb


def prompt_from_wire(wire: pb.Prompt) -> Prompt:
    match wire.WhichOneof("input"):
        case "text":
            return Prompt(text=wire.text)
        case "token_ids":
            return Prompt(ids=tuple(wire.token_ids.ids))
        case "chat":
            messages = wire.chat.messages
            return Prompt(chat=tuple({"role": m.role, "content": m.content} for m in messages))
    return Prompt()


def call_from_wire(
    wire: pb.GenerateRequest,
    tenant: Tenant,
    request_id: str,
    *,
    now: float,
    time_left_s: float | None,
    traceparent: str = "",
) -> Call:
    """request_id: the wire's, or one that was made up. now: on the gateway's clock. time_left_s: of
    the gRPC call's own deadline, which holds beside deadline_s. Raises InvalidRequest for what the
    nouns could not hold."""
    left = math.inf if time_left_s is None else time_left_s
    if wire.HasField("deadline_s"):
        if not wire.deadline_s > 0:
            raise InvalidRequest("deadline_s", wire.deadline_s, "must be above 0 seconds")
        left = min(left, wire.deadline_s)
    if not (math.isfinite(wire.floor_tps) and wire.floor_tps >= 0):
        raise InvalidRequest("floor_tps", wire.floor_tps, "must be a number of at least 0")
    resume: dict[int, tuple[int, ...]] = {}
    for held in wire.resume:
        if held.choice in resume:
            raise InvalidRequest("resume", held.choice, "is a choice that was given before")
        resume[held.choice] = tuple(held.ids)
    return Call(
        prompt=prompt_from_wire(wire.prompt),
        protocol="grpc",
        sampling=sampling_from_wire(
            wire.sampling, n=wire.n if wire.HasField("n") else 1, stop=wire.stop
        ),
        request_id=request_id,
        attempt=wire.attempt,
        tenant=tenant.name,
        priority=tenant.priority(wire.priority),
        deadline=now + left if math.isfinite(left) else None,
        floor_tps=wire.floor_tps,
        speculation=speculation_from_wire(wire.speculation),
        resume=resume,
        traceparent=cleaned(traceparent),
    )


async def responses(
    outputs: AsyncIterable[Output],
    *,
    model: str,
    with_prompt_ids: bool,
    spend: Callable[[int], None],
) -> AsyncIterator[pb.GenerateResponse]:
    """What a gateway says, as messages. spend: told of the prompt's and the answer's tokens.

    Text that comes without ids goes out with the choice's `end`, so that whoever holds the ids of
    every chunk has all text before the end, and no more: that is what a resume builds on.
    """
    tails: dict[int, str] = {}
    async for output in outputs:
        if isinstance(output, Started):
            spend(len(output.prompt_ids))
            started = pb.GenerationStarted(
                protocol_version=PROTOCOL_VERSION,
                request_id=output.request_id,
                model=model,
                prompt_tokens=len(output.prompt_ids),
                prompt_ids=output.prompt_ids if with_prompt_ids else (),
            )
            yield pb.GenerateResponse(started=started)
        elif isinstance(output, Answer):
            tail = tails.pop(output.choice, "")
            yield pb.GenerateResponse(chunk=_end_to_wire(output, tail))
        elif not output.ids:
            tails[output.choice] = tails.get(output.choice, "") + output.text
        else:
            spend(len(output.ids))
            yield pb.GenerateResponse(chunk=_chunk_to_wire(output))


def _chunk_to_wire(chunk: Chunk) -> pb.GenerationChunk:
    return pb.GenerationChunk(
        choice=chunk.choice,
        index=chunk.index,
        ids=chunk.ids,
        text=chunk.text,
        logprobs=logprobs_to_wire(chunk.logprobs),
    )


def _end_to_wire(answer: Answer, text: str) -> pb.GenerationChunk:
    return pb.GenerationChunk(
        choice=answer.choice,
        index=len(answer.token_ids),
        text=text,
        end=pb.GenerationEnd(
            reason=reason_to_wire(answer.finish_reason),
            usage=usage_to_wire(answer.usage),
            speculation=figures_to_wire(answer.speculation),
        ),
    )


def model_to_wire(gateway: Gateway) -> pb.ModelInfoResponse:
    model, tokenizer = gateway.model, gateway.tokenizer
    return pb.ModelInfoResponse(
        protocol_version=PROTOCOL_VERSION,
        model=model.name,
        target_id=model.target_id,
        tokenizer_hash=tokenizer.tokenizer_hash,
        vocab_size=model.limits.vocab_size,
        sequence_tokens=model.limits.sequence_tokens,
        eos_ids=tokenizer.eos_ids,
        has_chat_template=tokenizer.has_chat_template,
        drafters=[
            pb.DrafterInfo(drafter_id=card.drafter_id, kind=card.kind, gamma=card.gamma)
            for card in model.drafters
        ],
        verify=model.verify,
        couple_unseeded=model.couple_unseeded,
    )
