"""The nouns of generation.proto and back, for every servicer and client that speaks them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc

from dspark.core.errors import (
    Cancelled,
    DeadlineExceeded,
    DsparkError,
    Fenced,
    InvalidRequest,
    ModelError,
    NotFound,
    Overloaded,
    Unauthenticated,
    Unavailable,
)
from dspark.core.requests import (
    FinishReason,
    Speculation,
    SpeculationFigures,
    TokenLogprob,
    Usage,
)
from dspark.core.sampling import SamplingParams
from dspark.v1 import generation_pb2 as pb

# Trailing metadata of a refused call: a serialized `Error`.
ERROR_METADATA = "dspark-error-bin"

# The one place where an error becomes a status. Order matters: the first class that fits.
_STATUS: tuple[tuple[type[BaseException], pb.ErrorCode.ValueType, grpc.StatusCode], ...] = (
    (InvalidRequest, pb.ERROR_CODE_INVALID_REQUEST, grpc.StatusCode.INVALID_ARGUMENT),
    (Overloaded, pb.ERROR_CODE_OVERLOADED, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (DeadlineExceeded, pb.ERROR_CODE_DEADLINE_EXCEEDED, grpc.StatusCode.DEADLINE_EXCEEDED),
    (Cancelled, pb.ERROR_CODE_CANCELLED, grpc.StatusCode.CANCELLED),
    (Unavailable, pb.ERROR_CODE_UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
    (Unauthenticated, pb.ERROR_CODE_UNAUTHENTICATED, grpc.StatusCode.UNAUTHENTICATED),
    (NotFound, pb.ERROR_CODE_NOT_FOUND, grpc.StatusCode.NOT_FOUND),
    (Fenced, pb.ERROR_CODE_FENCED, grpc.StatusCode.ABORTED),
    (ModelError, pb.ERROR_CODE_MODEL, grpc.StatusCode.FAILED_PRECONDITION),
    (BaseException, pb.ERROR_CODE_INTERNAL, grpc.StatusCode.INTERNAL),
)

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}


def error_to_wire(error: BaseException) -> pb.Error:
    """An unexpected error keeps its text to itself: it may hold what is not the caller's."""
    code = next(code for kind, code, _ in _STATUS if isinstance(error, kind))
    told = str(error) if isinstance(error, DsparkError) else "internal error"
    wire = pb.Error(code=code, message=told)
    if isinstance(error, InvalidRequest):
        wire.field, wire.value, wire.limit = error.field, repr(error.value)[:80], error.limit
    if isinstance(error, Overloaded):
        wire.retry_after_s = error.retry_after_s
    return wire


def error_from_wire(wire: pb.Error) -> DsparkError:
    """The same error on the other side, with the same text."""
    kind = next((kind for kind, code, _ in _STATUS if code == wire.code), BaseException)
    if kind is InvalidRequest:
        return _Retold(wire)
    if kind is Overloaded:
        return Overloaded(wire.message, wire.retry_after_s)
    if issubclass(kind, DsparkError):
        return kind(wire.message)
    return DsparkError(wire.message or "internal error")


def error_from_rpc(rpc: grpc.RpcError) -> DsparkError:
    """What a failed call says: the server's own error from its metadata, else gRPC's status."""
    metadata: Any = rpc.trailing_metadata() or ()
    for name, value in metadata:
        if name == ERROR_METADATA:
            return error_from_wire(pb.Error.FromString(value))
    status, told = rpc.code(), rpc.details() or ""
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in told:
        return _Retold(pb.Error(field="message", message=f"the message is too large: {told}"))
    wire = pb.Error(message=f"{status.name}: {told}", retry_after_s=1.0)
    codes = [code for _, code, known in _STATUS if known is status]
    wire.code = codes[0] if codes else pb.ERROR_CODE_INTERNAL
    return error_from_wire(wire)


class _Retold(InvalidRequest):
    """An InvalidRequest told by another process: its value is text already."""

    def __init__(self, wire: pb.Error) -> None:
        super().__init__(wire.field, wire.value, wire.limit)
        self.args = (wire.message,)


def status_of(error: BaseException) -> grpc.StatusCode:
    return next(status for kind, _, status in _STATUS if isinstance(error, kind))


def sampling_to_wire(params: SamplingParams) -> pb.SamplingParams:
    """Without n and stop strings, which are the gateway's (see generation.proto)."""
    return pb.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias),
        seed=None if params.seed is None else params.seed % 2**64,
        stop_ids=params.stop_ids,
        min_tokens=params.min_tokens,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        top_logprobs=params.top_logprobs,
    )


def sampling_from_wire(
    wire: pb.SamplingParams, n: int = 1, stop: Iterable[str] = ()
) -> SamplingParams:
    """Unset fields take the defaults; values are checked later, by `check_request`."""
    default = SamplingParams()

    def given(name: str) -> bool:
        return wire.HasField(name)  # type: ignore[arg-type]

    return SamplingParams(
        temperature=wire.temperature if given("temperature") else default.temperature,
        top_k=wire.top_k,
        top_p=wire.top_p if given("top_p") else default.top_p,
        min_p=wire.min_p,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        repetition_penalty=(
            wire.repetition_penalty if given("repetition_penalty") else default.repetition_penalty
        ),
        logit_bias=dict(wire.logit_bias),
        seed=wire.seed if given("seed") else None,
        n=n,
        stop=tuple(stop),
        stop_ids=tuple(wire.stop_ids),
        min_tokens=wire.min_tokens,
        max_tokens=wire.max_tokens if given("max_tokens") else None,
        ignore_eos=wire.ignore_eos,
        logprobs=wire.logprobs,
        top_logprobs=wire.top_logprobs,
    )


def speculation_to_wire(wish: Speculation) -> pb.SpeculationOptions:
    return pb.SpeculationOptions(drafter=wish.drafter, gamma=wish.gamma, verify=wish.verify)


def speculation_from_wire(wire: pb.SpeculationOptions) -> Speculation:
    return Speculation(
        drafter=wire.drafter if wire.HasField("drafter") else None,
        gamma=wire.gamma if wire.HasField("gamma") else None,
        verify=wire.verify if wire.HasField("verify") else None,
    )


def figures_to_wire(figures: SpeculationFigures) -> pb.SpeculationFigures:
    return pb.SpeculationFigures(
        rounds=figures.rounds,
        drafted=figures.drafted,
        verified=figures.verified,
        accepted=figures.accepted,
    )


def figures_from_wire(wire: pb.SpeculationFigures) -> SpeculationFigures:
    return SpeculationFigures(wire.rounds, wire.drafted, wire.verified, wire.accepted)


def usage_to_wire(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def usage_from_wire(wire: pb.Usage) -> Usage:
    return Usage(wire.prompt_tokens, wire.completion_tokens, wire.cached_tokens)


def logprobs_to_wire(logprobs: Iterable[TokenLogprob]) -> list[pb.TokenLogprob]:
    return [
        pb.TokenLogprob(
            logprob=token.logprob,
            top=[pb.TopLogprob(id=id, logprob=logprob) for id, logprob in token.top],
        )
        for token in logprobs
    ]


def logprobs_from_wire(wire: Iterable[pb.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(token.logprob, tuple((top.id, top.logprob) for top in token.top))
        for token in wire
    )


def reason_to_wire(reason: FinishReason) -> pb.FinishReason.ValueType:
    return _REASONS[reason]


def reason_from_wire(wire: pb.FinishReason.ValueType) -> FinishReason:
    reasons = {theirs: ours for ours, theirs in _REASONS.items()}
    return reasons.get(wire, FinishReason.ERROR)
