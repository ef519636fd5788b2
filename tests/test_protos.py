"""The wire contract: generated code is current, enums are regular, nothing of core is missing, and
a stream carries arrays bit for bit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor

from dspark.core import drafts, requests, sampling
from dspark.scheduler.step_cost import StepCost
from dspark.v1 import (
    drafting_pb2,
    drafting_pb2_grpc,
    generation_pb2,
    scheduling_pb2,
    verification_pb2,
)

PROTOS = Path(__file__).resolve().parents[1] / "protos"
FILES: dict[str, FileDescriptor] = {
    "generation": generation_pb2.DESCRIPTOR,
    "verification": verification_pb2.DESCRIPTOR,
    "drafting": drafting_pb2.DESCRIPTOR,
    "scheduling": scheduling_pb2.DESCRIPTOR,
}


def test_generated_code_is_current(tmp_path: Path) -> None:
    subprocess.run([sys.executable, PROTOS / "generate.py", tmp_path], check=True)
    fresh = {path.name: path.read_bytes() for path in (tmp_path / "dspark" / "v1").iterdir()}
    committed = {path.name: path.read_bytes() for path in (PROTOS / "dspark/v1").glob("*_pb2*")}
    assert sorted(fresh) == sorted(committed)
    stale = [name for name, text in fresh.items() if text != committed[name]]
    assert stale == [], "run `make protos` and commit what it writes"


def test_every_proto_file_is_looked_at() -> None:
    assert {path.stem for path in (PROTOS / "dspark/v1").glob("*.proto")} == set(FILES)


def enums(file: FileDescriptor) -> Iterator[EnumDescriptor]:
    yield from file.enum_types_by_name.values()
    for message in file.message_types_by_name.values():
        yield from message.enum_types


@pytest.mark.parametrize("name", FILES)
def test_enum_values_carry_their_enum_and_zero_says_nothing(name: str) -> None:
    for enum in enums(FILES[name]):
        words = "".join(f"_{c}" if c.isupper() else c.upper() for c in enum.name).lstrip("_")
        assert enum.values_by_number[0].name == f"{words}_UNSPECIFIED"
        assert [v.name for v in enum.values if not v.name.startswith(f"{words}_")] == []


# Our nouns and the messages that carry them.
CARRIED: list[tuple[type, list[Descriptor]]] = [
    (requests.Request, [verification_pb2.Run.DESCRIPTOR]),
    (requests.Speculation, [generation_pb2.SpeculationOptions.DESCRIPTOR]),
    (requests.Limits, [verification_pb2.Limits.DESCRIPTOR]),
    (requests.TokenLogprob, [generation_pb2.TokenLogprob.DESCRIPTOR]),
    (requests.SpeculationFigures, [generation_pb2.SpeculationFigures.DESCRIPTOR]),
    (requests.Usage, [generation_pb2.Usage.DESCRIPTOR]),
    (requests.Committed, [verification_pb2.Committed.DESCRIPTOR]),
    (requests.Finished, [verification_pb2.Finished.DESCRIPTOR]),
    # Stop strings and n are the gateway's business and end there.
    (
        sampling.SamplingParams,
        [generation_pb2.SamplingParams.DESCRIPTOR, generation_pb2.GenerateRequest.DESCRIPTOR],
    ),
    (drafts.DraftSampling, [drafting_pb2.DraftSampling.DESCRIPTOR]),
    (drafts.DraftRequest, [drafting_pb2.DraftRequest.DESCRIPTOR]),
    (drafts.Draft, [drafting_pb2.Draft.DESCRIPTOR]),
    (drafts.NeedContext, [drafting_pb2.NeedContext.DESCRIPTOR]),
    (drafts.DrafterCard, [drafting_pb2.DrafterCard.DESCRIPTOR]),
    (StepCost, [scheduling_pb2.StepCost.DESCRIPTOR]),
]


def carried_names(messages: list[Descriptor]) -> set[str]:
    """Field names, with and without a unit of seconds; a RunKey's count as the message's own."""
    names = {name for message in messages for name in message.fields_by_name}
    if "key" in names:
        names |= set(verification_pb2.RunKey.DESCRIPTOR.fields_by_name)
    return names | {name.removesuffix("_s") for name in names}


@pytest.mark.parametrize(("noun", "messages"), CARRIED, ids=[noun.__name__ for noun, _ in CARRIED])
def test_no_field_is_missing_on_the_wire(noun: type, messages: list[Descriptor]) -> None:
    assert {field.name for field in fields(noun)} - carried_names(messages) == set()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (sampling.SamplingMode, drafting_pb2.SamplingMode.DESCRIPTOR),
        (requests.FinishReason, generation_pb2.FinishReason.DESCRIPTOR),
    ],
)
def test_enums_of_core_have_the_same_members_on_the_wire(
    ours: type[sampling.SamplingMode] | type[requests.FinishReason], theirs: EnumDescriptor
) -> None:
    named = {value.name for value in theirs.values if value.number != 0}
    prefix = theirs.values_by_number[0].name.removesuffix("UNSPECIFIED")
    assert named == {prefix + member.name for member in ours}


# What the interfaces promise of messages that have no noun in core yet.
PROMISED: list[tuple[Descriptor, str]] = [
    (
        generation_pb2.GenerateRequest.DESCRIPTOR,
        "prompt sampling n stop resume speculation priority deadline_s floor_tps",
    ),
    (generation_pb2.GenerationChunk.DESCRIPTOR, "choice index ids text logprobs end"),
    (drafting_pb2.DraftRequest.DESCRIPTOR, "dtype"),
    (
        scheduling_pb2.Report.DESCRIPTOR,
        "verifier epoch seen_through requests prefill_tokens context step_residual_s free_blocks "
        "queue tenants",
    ),
    (
        scheduling_pb2.TenantReport.DESCRIPTOR,
        "tenant active queued tokens survivals verdicts",
    ),
    (
        scheduling_pb2.Plan.DESCRIPTOR,
        "epoch seen_through ttl_ms requests capacity caps draft_budgets calibration",
    ),
    (scheduling_pb2.Calibration.DESCRIPTOR, "version tables"),
]


@pytest.mark.parametrize(
    ("message", "names"), PROMISED, ids=[message.name for message, _ in PROMISED]
)
def test_promised_fields_are_there(message: Descriptor, names: str) -> None:
    assert set(names.split()) - set(message.fields_by_name) == set()


STATES_ITS_VERSION: list[Descriptor] = [
    generation_pb2.GenerateRequest.DESCRIPTOR,
    generation_pb2.GenerationStarted.DESCRIPTOR,
    generation_pb2.CountTokensRequest.DESCRIPTOR,
    generation_pb2.ModelInfoRequest.DESCRIPTOR,
    generation_pb2.ModelInfoResponse.DESCRIPTOR,
    verification_pb2.GatewayHello.DESCRIPTOR,
    verification_pb2.DescribeRequest.DESCRIPTOR,
    verification_pb2.DescribeResponse.DESCRIPTOR,
    drafting_pb2.VerifierHello.DESCRIPTOR,
    drafting_pb2.DrafterCard.DESCRIPTOR,
    scheduling_pb2.RegisterRequest.DESCRIPTOR,
    scheduling_pb2.RegisterResponse.DESCRIPTOR,
]


@pytest.mark.parametrize("message", STATES_ITS_VERSION, ids=lambda message: message.name)
def test_every_peer_states_its_protocol_version(message: Descriptor) -> None:
    assert "protocol_version" in message.fields_by_name


class Echo(drafting_pb2_grpc.DraftingServicer):
    """Says hello, then drafts each request's own features back as the support's weights."""

    async def Propose(  # gRPC's name
        self, request_iterator: AsyncIterator[drafting_pb2.ProposeRequest], context: object
    ) -> AsyncIterator[drafting_pb2.ProposeResponse]:
        async for message in request_iterator:
            if message.WhichOneof("message") == "hello":
                card = drafting_pb2.DrafterCard(drafter_id="echo", layer_ids=[-1, 3])
                hello = drafting_pb2.DrafterHello(card=card)
                yield drafting_pb2.ProposeResponse(hello=hello)
                continue
            replies = drafting_pb2.DraftReplies()
            for request in message.batch.requests:
                replies.replies.add().draft.CopyFrom(
                    drafting_pb2.Draft(
                        session=request.session,
                        round=request.round,
                        ids=request.tokens,
                        support_weights=request.features,
                    )
                )
            yield drafting_pb2.ProposeResponse(replies=replies)


async def test_a_stream_carries_floats_bit_for_bit() -> None:
    features = np.array([[0.1, -0.0, np.inf], [np.nan, 1e-45, 3.0]], dtype="<f4").tobytes()
    request = drafting_pb2.DraftRequest(
        session="s",
        round=7,
        tokens=[5, 6, 2**31 - 1],
        features=features,
        dtype=drafting_pb2.FEATURE_DTYPE_FLOAT32,
    )

    async def verifier() -> AsyncIterator[drafting_pb2.ProposeRequest]:
        yield drafting_pb2.ProposeRequest(hello=drafting_pb2.VerifierHello())
        batch = drafting_pb2.DraftBatch(requests=[request])
        yield drafting_pb2.ProposeRequest(batch=batch)

    server = grpc.aio.server()
    drafting_pb2_grpc.add_DraftingServicer_to_server(Echo(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: drafting_pb2_grpc.DraftingAsyncStub = drafting_pb2_grpc.DraftingStub(channel)
            hello, answer = [message async for message in stub.Propose(verifier(), timeout=10)]
    finally:
        await server.stop(None)

    assert list(hello.hello.card.layer_ids) == [-1, 3]
    (reply,) = answer.replies.replies
    assert (reply.draft.session, reply.draft.round) == ("s", 7)
    assert list(reply.draft.ids) == [5, 6, 2**31 - 1]
    assert reply.draft.support_weights == features


def test_zero_is_told_from_unset_where_it_matters() -> None:
    """A temperature, seed or capacity of 0 is a wish of its own."""
    params = generation_pb2.SamplingParams(temperature=0.0, seed=0)
    back = generation_pb2.SamplingParams.FromString(params.SerializeToString())
    assert back.HasField("temperature")
    assert back.HasField("seed")
    assert not back.HasField("max_tokens")
    plan = scheduling_pb2.Plan.FromString(scheduling_pb2.Plan(capacity=0).SerializeToString())
    assert plan.HasField("capacity")
