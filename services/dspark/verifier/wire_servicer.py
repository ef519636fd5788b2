"""The verifier's half of verification.proto: runs in, events and cards out."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dspark.client.wire_client import (
    error_to_wire,
    figures_to_wire,
    logprobs_to_wire,
    reason_to_wire,
    sampling_from_wire,
    speculation_from_wire,
    usage_to_wire,
)
from dspark.core.drafts import PROTOCOL_VERSION
from dspark.core.errors import InvalidRequest
from dspark.core.replicas import Described
from dspark.core.requests import Committed, Event, FinishReason, Request, Usage
from dspark.scheduling.cards_client import drafter_to_wire, replica_to_wire, verifier_to_wire
from dspark.v1 import verification_pb2 as pb
from dspark.verifier.lines import Batch, Name, Refused, Run

# Events of one message. One holds 65 tokens at most (γ = 64 and the bonus token), a token with 20
# alternatives takes 332 bytes: 2.8 MB, below the limit of 4 MiB.
EVENTS_PER_MESSAGE = 128


def name_from_wire(key: pb.RunKey) -> Name:
    return key.request_id, key.choice, key.attempt


def request_from_wire(run: pb.Run, now: float) -> Request:
    """now: on the engine's clock. Values are checked later: by `check_run`, and by the engine."""
    return Request(
        request_id=run.key.request_id,
        choice=run.key.choice,
        attempt=run.key.attempt,
        lease=run.lease,
        epoch=run.epoch,
        drafter=run.drafter.replica_id,
        prompt_ids=tuple(run.prompt_ids),
        committed_ids=tuple(run.committed_ids),
        sampling=sampling_from_wire(run.sampling),
        speculation=speculation_from_wire(run.speculation),
        deadline=now + run.deadline_s if run.HasField("deadline_s") else None,
        tenant=run.tenant,
        priority=run.priority,
        floor_tps=run.floor_tps,
        traceparent=run.traceparent,
    )


def check_run(run: pb.Run) -> None:
    """Raise InvalidRequest for what the engine does not look at."""
    if not run.key.request_id:
        raise InvalidRequest("key.request_id", "", "is empty: a run needs a name")
    if math.isnan(run.deadline_s):
        raise InvalidRequest("deadline_s", run.deadline_s, "is not a number of seconds")
    if not 0 <= run.floor_tps < math.inf:
        raise InvalidRequest("floor_tps", run.floor_tps, "must be at least 0 and finite")


def responses(batch: Batch) -> Iterator[pb.RunResponse]:
    """A step's events, in one message wherever they fit; one without events is a sign of life."""
    events = [_event_to_wire(run, event) for run, event in batch.events]
    for start in range(0, max(len(events), 1), EVENTS_PER_MESSAGE):
        yield pb.RunResponse(events=events[start : start + EVENTS_PER_MESSAGE], steps=batch.steps)


def _event_to_wire(run: Run, event: Event | Refused) -> pb.RunEvent:
    request = run.request
    key = pb.RunKey(request_id=request.request_id, choice=request.choice, attempt=request.attempt)
    if isinstance(event, Committed):
        return pb.RunEvent(
            committed=pb.Committed(
                key=key,
                index=event.index,
                ids=event.ids,
                logprobs=logprobs_to_wire(event.logprobs),
                speculation=figures_to_wire(event.speculation),
                cached_tokens=event.cached_tokens,
            )
        )
    if isinstance(event, Refused):
        usage = Usage(len(request.prompt_ids), len(request.committed_ids))
        return pb.RunEvent(
            finished=pb.Finished(
                key=key,
                reason=reason_to_wire(FinishReason.ERROR),
                usage=usage_to_wire(usage),
                error=error_to_wire(event.error),
            )
        )
    return pb.RunEvent(
        finished=pb.Finished(
            key=key,
            reason=reason_to_wire(event.reason),
            usage=usage_to_wire(event.usage),
            speculation=figures_to_wire(event.speculation),
            error=None if event.error is None else error_to_wire(event.error),
        )
    )


def described_to_wire(described: Described) -> pb.DescribeResponse:
    return pb.DescribeResponse(
        protocol_version=PROTOCOL_VERSION,
        replica=replica_to_wire(described.replica),
        card=verifier_to_wire(described.card),
        drafters=map(drafter_to_wire, described.drafters),
        draining=described.draining,
        heartbeat_ms=max(round(described.heartbeat_s * 1000), 1),
    )
