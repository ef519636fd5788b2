"""The drafter's half of drafting.proto: hellos, requests and context in, replies out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dspark.core.drafts import (
    MAX_GAMMA,
    MAX_SUPPORT,
    Draft,
    DraftRequest,
    DraftSampling,
    FloatArray,
)
from dspark.core.errors import InvalidRequest
from dspark.core.replicas import Replica
from dspark.core.sampling import SamplingMode
from dspark.drafter.batching import Context, Reply
from dspark.drafter.bfloat16 import from_bfloat16
from dspark.drafter.handshake import (
    ITEM_BYTES,
    MAX_NAME_BYTES,
    DrafterOffer,
    FeatureDtype,
    VerifierFacts,
)
from dspark.scheduling.cards_client import drafter_to_wire, mode_from_wire, table_to_wire
from dspark.v1 import drafting_pb2 as pb

DTYPES: dict[FeatureDtype, pb.FeatureDtype.ValueType] = {
    "": pb.FEATURE_DTYPE_UNSPECIFIED,
    "float32": pb.FEATURE_DTYPE_FLOAT32,
    "bfloat16": pb.FEATURE_DTYPE_BFLOAT16,
}

# Positions are counted in 32 bits here and there.
MAX_POSITION = 2**31 - 1


@dataclass(frozen=True, slots=True)
class BatchRead:
    """One message of a verifier. refused: (session, round, why) of what makes no sense; a context
    has no round."""

    closed: list[str]
    contexts: list[Context] = field(default_factory=list)
    requests: list[DraftRequest] = field(default_factory=list)
    refused: list[tuple[str, int | None, InvalidRequest]] = field(default_factory=list)


def facts_from_wire(hello: pb.VerifierHello) -> VerifierFacts:
    """Raises InvalidRequest for a verifier without a name."""
    return VerifierFacts(
        _name("verifier", hello.verifier),
        hello.epoch,
        hello.target_id,
        hello.vocab_size,
        hello.tokenizer_hash,
        hello.layers,
        hello.protocol_version,
    )


def offer_to_wire(offer: DrafterOffer, replica: Replica) -> pb.DrafterHello:
    return pb.DrafterHello(
        drafter=replica.replica_id,
        epoch=replica.epoch,
        card=drafter_to_wire(offer.card),
        feature_dtype=DTYPES[offer.feature_dtype],
        max_message_bytes=offer.max_message_bytes,
        context_window=offer.context_window,
        calibration=map(table_to_wire, offer.calibration),
    )


def batch_from_wire(batch: pb.DraftBatch, width: int, vocab_size: int) -> BatchRead:
    """width: d of features, 0 for a drafter that reads none."""
    read = BatchRead(list(batch.closed))
    for context in batch.contexts:
        try:
            read.contexts.append(_context_from_wire(context, width, vocab_size))
        except InvalidRequest as error:
            read.refused.append((context.session, None, error))
    for request in batch.requests:
        try:
            read.requests.append(_request_from_wire(request, width, vocab_size))
        except InvalidRequest as error:
            read.refused.append((request.session, request.round, error))
    return read


def replies_to_wire(
    replies: Sequence[Reply], draining: bool, limit: int
) -> Iterator[pb.ProposeResponse]:
    """In one message wherever they fit below `limit` bytes; without replies a sign of life."""
    message, size = pb.DraftReplies(draining=draining), 0
    for reply in replies:
        wire = _reply_to_wire(reply)
        bytes_ = wire.ByteSize() + 8
        if message.replies and size + bytes_ > limit - 64:
            yield pb.ProposeResponse(replies=message)
            message, size = pb.DraftReplies(draining=draining), 0
        message.replies.append(wire)
        size += bytes_
    yield pb.ProposeResponse(replies=message)


def _reply_to_wire(reply: Reply) -> pb.DraftReply:
    if not isinstance(reply, Draft):
        need = pb.NeedContext(session=reply.session, start=reply.start)
        return pb.DraftReply(need_context=need)
    ids, weights = reply.support_ids, reply.support_weights
    return pb.DraftReply(
        draft=pb.Draft(
            session=reply.session,
            round=reply.round,
            ids=reply.ids,
            confidence_logits=reply.confidence_logits.tolist(),
            support_ids=b"" if ids is None else ids.astype("<i4").tobytes(),
            support_weights=b"" if weights is None else weights.astype("<f4").tobytes(),
            looks_back_only=reply.looks_back_only,
        )
    )


def _context_from_wire(wire: pb.DraftContext, width: int, vocab_size: int) -> Context:
    tokens = _tokens(wire.tokens, wire.start, vocab_size)
    features = _features(wire.features, wire.dtype, len(tokens), width)
    return Context(_name("session", wire.session), wire.start, tokens, features)


def _request_from_wire(wire: pb.DraftRequest, width: int, vocab_size: int) -> DraftRequest:
    tokens = _tokens(wire.tokens, wire.start, vocab_size)
    sampling = _sampling(wire.sampling)
    if wire.gamma > MAX_GAMMA:
        raise InvalidRequest("gamma", wire.gamma, f"must be at most {MAX_GAMMA}")
    least = 1 if sampling.mode is SamplingMode.REJECTION else 0
    if not least <= wire.support_m <= MAX_SUPPORT:
        raise InvalidRequest("support_m", wire.support_m, f"must be in [{least}, {MAX_SUPPORT}]")
    if wire.output_position > MAX_POSITION:
        raise InvalidRequest(
            "output_position", wire.output_position, f"must be at most {MAX_POSITION}"
        )
    return DraftRequest(
        session=_name("session", wire.session),
        round=wire.round,
        start=wire.start,
        tokens=tokens,
        features=_features(wire.features, wire.dtype, len(tokens) - 1, width),
        output_position=wire.output_position,
        sampling=sampling,
        gamma=wire.gamma,
        support_m=wire.support_m,
        traceparent=wire.traceparent if len(wire.traceparent) <= MAX_NAME_BYTES else "",
    )


def _name(field: str, value: str) -> str:
    if not 0 < len(value.encode()) <= MAX_NAME_BYTES:
        raise InvalidRequest(field, value, f"must have 1 to {MAX_NAME_BYTES} bytes")
    return value


def _tokens(wire: Iterable[int], start: int, vocab_size: int) -> tuple[int, ...]:
    tokens = tuple(wire)
    if not tokens:
        raise InvalidRequest("tokens", [], "must hold at least one id")
    if start + len(tokens) > MAX_POSITION:
        raise InvalidRequest("start", start, f"and {len(tokens)} ids go beyond {MAX_POSITION}")
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                "tokens", token, f"is not an id of the vocabulary [0, {vocab_size})"
            )
    return tokens


def _features(
    data: bytes, dtype: pb.FeatureDtype.ValueType, count: int, width: int
) -> FloatArray | None:
    """float32 [count, width]."""
    if not width:
        if data:
            raise InvalidRequest("features", f"{len(data)} bytes", "this drafter reads none")
        return None
    if not count and not data:
        return np.zeros((0, width), np.float32)
    if dtype not in (pb.FEATURE_DTYPE_FLOAT32, pb.FEATURE_DTYPE_BFLOAT16):
        raise InvalidRequest("dtype", int(dtype), "is not one of: float32, bfloat16")
    small = dtype == pb.FEATURE_DTYPE_BFLOAT16
    wanted = count * width * ITEM_BYTES["bfloat16" if small else "float32"]
    if len(data) != wanted:
        raise InvalidRequest(
            "features", f"{len(data)} bytes", f"must be [{count}, {width}], {wanted} bytes"
        )
    read = np.frombuffer(data, "<u2" if small else "<f4")
    # A copy: a drafter may hand it to torch, which wants memory that it could write to.
    values = from_bfloat16(read) if small else read.astype(np.float32)
    if not np.isfinite(values).all():
        raise InvalidRequest("features", "NaN or infinity", "must be finite")
    return values.reshape(count, width)


def _sampling(wire: pb.DraftSampling) -> DraftSampling:
    mode = mode_from_wire(wire.mode)
    if mode is not SamplingMode.GREEDY and not 0 < wire.temperature < math.inf:
        raise InvalidRequest("temperature", wire.temperature, "must be above 0 and finite")
    return DraftSampling(mode, wire.temperature, wire.seed, wire.choice)
