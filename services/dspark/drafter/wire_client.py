"""The verifier's half of drafting.proto: hellos, requests and context out, replies in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from dspark.core.drafts import MAX_SUPPORT, Draft, DraftRequest, NeedContext
from dspark.core.errors import InvalidRequest, ModelError
from dspark.core.replicas import Replica
from dspark.core.sampling import SamplingMode
from dspark.drafter.bfloat16 import to_bfloat16
from dspark.drafter.handshake import (
    ENVELOPE_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_NAME_BYTES,
    DrafterOffer,
    FeatureDtype,
    VerifierFacts,
    check_offer,
    row_bytes,
)
from dspark.drafter.rounds import Asked
from dspark.scheduling.cards_client import drafter_from_wire, mode_to_wire, table_from_wire
from dspark.v1 import drafting_pb2 as pb

DTYPES: dict[FeatureDtype, pb.FeatureDtype.ValueType] = {
    "": pb.FEATURE_DTYPE_UNSPECIFIED,
    "float32": pb.FEATURE_DTYPE_FLOAT32,
    "bfloat16": pb.FEATURE_DTYPE_BFLOAT16,
}

# Of a message's field that holds another: its tag and its length.
FIELD_BYTES = 8


Part = pb.DraftContext | pb.DraftRequest


def facts_to_wire(facts: VerifierFacts) -> pb.ProposeRequest:
    return pb.ProposeRequest(
        hello=pb.VerifierHello(
            protocol_version=facts.protocol_version,
            verifier=facts.verifier,
            epoch=facts.epoch,
            target_id=facts.target_id,
            vocab_size=facts.vocab_size,
            tokenizer_hash=facts.tokenizer_hash,
            layers=facts.layers,
        )
    )


def offer_from_wire(hello: pb.DrafterHello) -> tuple[Replica, DrafterOffer]:
    """Raises ModelError for what no drafter can mean."""
    dtypes = {wire: dtype for dtype, wire in DTYPES.items()}
    if hello.feature_dtype not in dtypes:
        raise ModelError(f"feature_dtype: {hello.feature_dtype} is none of float32, bfloat16")
    try:
        tables = tuple(map(table_from_wire, hello.calibration))
    except InvalidRequest as error:
        raise ModelError(f"calibration: {error}") from error
    offer = DrafterOffer(
        card=drafter_from_wire(hello.card),
        feature_dtype=dtypes[hello.feature_dtype],
        max_message_bytes=hello.max_message_bytes or MAX_MESSAGE_BYTES,
        context_window=hello.context_window,
        calibration=tables,
    )
    check_offer(offer)
    return Replica(hello.drafter, epoch=hello.epoch), offer


def request_to_wire(request: DraftRequest, offer: DrafterOffer) -> Iterator[Part]:
    """A request, after as much of its context as no single message has room for. Each part's
    features are converted when it is asked for.

    Raises InvalidRequest for features that the drafter does not read, and ValueError for a number
    that its field cannot hold.
    """
    if len(request.session.encode()) > MAX_NAME_BYTES:
        limit = f"must have at most {MAX_NAME_BYTES} bytes"
        raise InvalidRequest("session", request.session, limit)
    count, width = len(request.tokens) - 1, offer.card.feature_width
    features = request.features
    if (None if features is None else features.shape) != ((count, width) if width else None):
        shape = None if features is None else features.shape
        raise InvalidRequest("features", shape, f"must be {[count, width] if width else None}")

    def data(first: int, end: int) -> bytes:
        return b"" if features is None else _features(features[first:end], offer.feature_dtype)

    item = 0
    most = (offer.max_message_bytes - ENVELOPE_BYTES) // row_bytes(offer.card, offer.feature_dtype)
    while count - item > most:
        yield pb.DraftContext(
            session=request.session,
            start=request.start + item,
            tokens=request.tokens[item : item + most],
            features=data(item, item + most),
            dtype=DTYPES[offer.feature_dtype],
        )
        item += most
    sampling = request.sampling
    yield pb.DraftRequest(
        session=request.session,
        round=request.round,
        start=request.start + item,
        tokens=request.tokens[item:],
        features=data(item, count),
        dtype=DTYPES[offer.feature_dtype],
        output_position=request.output_position,
        sampling=pb.DraftSampling(
            mode=mode_to_wire(sampling.mode),
            temperature=sampling.temperature,
            seed=sampling.seed % 2**64,
            choice=sampling.choice,
        ),
        gamma=request.gamma,
        support_m=request.support_m,
        traceparent=request.traceparent[:MAX_NAME_BYTES],
    )


def wire_bytes(request: DraftRequest, offer: DrafterOffer) -> int:
    """Of a request on the wire, about."""
    return ENVELOPE_BYTES + len(request.tokens) * row_bytes(offer.card, offer.feature_dtype)


def step_to_wire(
    closed: Sequence[str],
    requests: Iterable[DraftRequest],
    offer: DrafterOffer,
    refused: Callable[[DraftRequest, Exception], None],
) -> Iterator[pb.ProposeRequest]:
    """A step's worth, each message made when it is asked for. refused: told of a request that
    cannot be said."""

    def parts() -> Iterator[Part]:
        for request in requests:
            try:
                yield from request_to_wire(request, offer)
            except (InvalidRequest, ValueError, TypeError) as error:
                refused(request, error)

    return _batches(closed, parts(), offer.max_message_bytes)


def _batches(
    closed: Sequence[str], parts: Iterable[Part], limit: int
) -> Iterator[pb.ProposeRequest]:
    """In one message wherever it fits below `limit` bytes, and in order: of a message context is
    read before requests, so a session may come in one request only."""
    batch, size = pb.DraftBatch(), 0
    for part in itertools.chain(closed, parts):
        added = FIELD_BYTES + (len(part.encode()) if isinstance(part, str) else part.ByteSize())
        if size and size + added > limit - 2 * FIELD_BYTES:
            yield pb.ProposeRequest(batch=batch)
            batch, size = pb.DraftBatch(), 0
        if isinstance(part, str):
            batch.closed.append(part)
        elif isinstance(part, pb.DraftContext):
            batch.contexts.append(part)
        else:
            batch.requests.append(part)
        size += added
    if size:
        yield pb.ProposeRequest(batch=batch)


def draft_from_wire(wire: pb.Draft, asked: Asked, vocab_size: int) -> Draft:
    """looks_back_only is never believed: a drafter that lies about it would bend the distribution
    of unseeded requests. Raises InvalidRequest for what is no draft of this round."""
    count = len(wire.ids)
    if count > asked.gamma:
        raise InvalidRequest("ids", f"{count} of them", f"must be at most {asked.gamma}")
    if len(wire.confidence_logits) != count:
        raise InvalidRequest(
            "confidence_logits", f"{len(wire.confidence_logits)} of them", f"must be {count}"
        )
    for token in wire.ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest("ids", token, f"is not an id of the vocabulary [0, {vocab_size})")
    ids = weights = None
    if wire.support_ids or wire.support_weights:
        if asked.mode is not SamplingMode.REJECTION:
            raise InvalidRequest("support_ids", "a support", f"has no place in {asked.mode} mode")
        width, rest = divmod(len(wire.support_ids), 4 * count) if count else (0, 1)
        if (
            rest
            or not 1 <= width <= min(asked.support_m, MAX_SUPPORT)
            or len(wire.support_weights) != len(wire.support_ids)
        ):
            raise InvalidRequest(
                "support_ids",
                f"{len(wire.support_ids)} bytes beside {len(wire.support_weights)} of weights",
                f"must be [{count}, M] with M in [1, {min(asked.support_m, MAX_SUPPORT)}]",
            )
        ids = np.frombuffer(wire.support_ids, "<i4").astype(np.int32).reshape(count, width)
        weights = np.frombuffer(wire.support_weights, "<f4").astype(np.float32)
        weights = weights.reshape(count, width)
    return Draft(
        wire.session,
        wire.round,
        tuple(wire.ids),
        np.array(wire.confidence_logits, np.float32),
        ids,
        weights,
    )


def need_from_wire(wire: pb.NeedContext) -> NeedContext:
    return NeedContext(wire.session, wire.start)


def _features(features: np.ndarray[tuple[int, ...], np.dtype[np.float32]], dtype: str) -> bytes:
    small = dtype == "bfloat16"
    return (to_bfloat16(features).astype("<u2") if small else features.astype("<f4")).tobytes()
