"""A drafter's gRPC server, message by message: who fits is let in, what makes no sense costs
itself, and no verifier can reach another's sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dspark.core.drafts import Draft, DrafterCard, DraftRequest, NeedContext
from dspark.core.errors import ConfigError
from dspark.core.plans import CalibrationTable
from dspark.core.replicas import Replica
from dspark.core.sampling import SamplingMode
from dspark.drafter import BatchingConfig, DrafterOffer
from dspark.v1 import drafting_pb2 as pb

from .wire import (
    CARD,
    ToyDrafter,
    V,
    asking,
    eventually,
    facts,
    linked,
    raw,
    serving,
    wire_request,
)

REFUSED = grpc.StatusCode.FAILED_PRECONDITION
INVALID = grpc.StatusCode.INVALID_ARGUMENT
READS = DrafterCard(
    "toy-2", "toy", 4, V, "target-1", "tokens-1", (0, 2), feature_id="f" * 16, feature_width=3
)


async def test_the_hello_says_all_that_a_verifier_needs() -> None:
    table = CalibrationTable("toy-2", SamplingMode.COUPLED, (1.5, 2.0), (-0.5, 1 / 3))
    toy = ToyDrafter(READS, context_window=77, calibration=(table,))
    options: dict[str, Any] = {"feature_dtype": "bfloat16", "max_message_bytes": 123_456}
    async with serving(toy, **options) as served, raw(served.address) as stream:
        hello = await stream.hello()
    assert (hello.drafter, hello.epoch) == ("d1", 7)
    assert hello.card.drafter_id == "toy-2"
    assert list(hello.card.layer_ids) == [0, 2]
    assert (hello.card.feature_id, hello.card.feature_width) == ("f" * 16, 3)
    assert hello.feature_dtype == pb.FEATURE_DTYPE_BFLOAT16
    assert (hello.max_message_bytes, hello.context_window) == (123_456, 77)
    (said,) = hello.calibration
    assert (said.drafter_id, said.mode) == ("toy-2", pb.SAMPLING_MODE_COUPLED)
    assert list(said.temperatures) == [1.5, 2.0]


@pytest.mark.parametrize(
    ("changes", "both"),
    [
        ({"protocol_version": 0}, ("protocol_version", "1", "0")),
        ({"target_id": "another"}, ("target_id", "'target-1'", "'another'")),
        ({"vocab_size": 161}, ("vocab_size", "160", "161")),
        ({"tokenizer_hash": "other"}, ("tokenizer_hash", "'tokens-1'", "'other'")),
        ({"layers": 3}, ("layer_ids", "[0, 2]", "3 layers")),
    ],
)
async def test_a_verifier_that_does_not_fit_is_refused_with_both_values(
    changes: dict[str, Any], both: tuple[str, ...]
) -> None:
    async with serving(ToyDrafter(READS)) as served, raw(served.address) as stream:
        status, told = await stream.refused(facts(**changes))
        assert status is REFUSED
        assert all(value in told for value in both), told
        assert served.runner.lines == 0
        async with raw(served.address) as right:
            assert (await right.hello()).drafter == "d1"


async def test_what_nobody_says_fits_everything() -> None:
    """Prompt lookup has no vocabulary, target or tokenizer; a verifier may not know its own."""
    anybody = ToyDrafter(DrafterCard("any", "ngram", 4))
    async with serving(anybody) as served, raw(served.address) as stream:
        assert (await stream.hello(facts(target_id="whatever"))).drafter == "d1"
    async with serving(ToyDrafter()) as served, raw(served.address) as stream:
        assert (await stream.hello(facts(target_id="", tokenizer_hash=""))).drafter == "d1"


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([{"batch": pb.DraftBatch()}], "hello"),
        ([{}], "hello"),
        ([{"hello": pb.VerifierHello(protocol_version=1)}], "verifier"),
        ([{"hello": pb.VerifierHello(verifier="v" * 513)}], "verifier"),
    ],
)
async def test_a_stream_begins_with_a_hello(messages: list[dict[str, Any]], told: str) -> None:
    async with serving(ToyDrafter()) as served, raw(served.address) as stream:
        for message in messages:
            await stream.send(**message)
        status, why = await stream.status()
        assert status is INVALID
        assert told in why


@pytest.mark.parametrize("message", [{"hello": pb.VerifierHello(verifier="v1")}, {}])
async def test_a_stream_that_makes_no_sense_ends_alone(message: dict[str, Any]) -> None:
    toy = ToyDrafter()
    async with serving(toy) as served, linked(served.address, facts(verifier="v2")) as other:
        await other.draft(asking("x"))
        async with raw(served.address) as stream:
            await stream.hello()
            await stream.send(batch=pb.DraftBatch(requests=[wire_request("x")]))
            await stream.replies()
            await stream.send(**message)
            assert (await stream.status())[0] is INVALID
        await eventually(lambda: len(toy.held) == 1)
        assert (await other.draft(asking("x", 1, (3, 4), 2))).ids
        assert other.link.figures.connected == 1


async def test_bytes_that_are_no_message_end_their_stream_only() -> None:
    toy = ToyDrafter()
    async with serving(toy) as served, linked(served.address) as other:
        async with grpc.aio.insecure_channel(served.address) as channel:
            call: Any = channel.stream_stream("/dspark.v1.Drafting/Propose")()
            await call.write(b"\xff\xff\xff garbage")
            assert await call.code() is INVALID
        assert (await other.draft(asking("x"))).ids


async def test_a_message_over_the_limit_ends_its_stream_only() -> None:
    toy = ToyDrafter()
    async with (
        serving(toy, max_message_bytes=10_000) as served,
        linked(served.address, facts(verifier="v2")) as other,
        raw(served.address) as stream,
    ):
        await stream.hello()
        await stream.send(batch=pb.DraftBatch(requests=[wire_request("x", range(12_000))]))
        status, told = await stream.status()
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "10000" in told
        assert (await other.draft(asking("x"))).ids


FEATURES = np.ones((2, 3), "<f4").tobytes()
SAMPLED = {"mode": pb.SAMPLING_MODE_REJECTION, "temperature": 1.0}
MALFORMED: dict[str, dict[str, Any]] = {
    "no tokens": {"tokens": []},
    "an id outside the vocabulary": {"tokens": [1, 2, V]},
    "a negative id": {"tokens": [1, -2, 3]},
    "a position out of range": {"start": 2**32 - 1},
    "features of another length": {"features": FEATURES[:-4]},
    "features of another width": {"features": FEATURES + FEATURES},
    "no features": {"features": b""},
    "an unknown dtype": {"dtype": 9},
    "no dtype": {"dtype": 0},
    "NaN": {"features": np.full((2, 3), np.nan, "<f4").tobytes()},
    "infinity": {"features": np.full((2, 3), -np.inf, "<f4").tobytes()},
    "gamma": {"gamma": 65},
    "no mode": {"sampling": pb.DraftSampling()},
    "an unknown mode": {"sampling": pb.DraftSampling(mode=17)},  # type: ignore[arg-type]
    "temperature 0": {"sampling": pb.DraftSampling(mode=pb.SAMPLING_MODE_COUPLED)},
    "temperature below 0": {"sampling": pb.DraftSampling(**{**SAMPLED, "temperature": -1.0})},
    "temperature NaN": {"sampling": pb.DraftSampling(**{**SAMPLED, "temperature": float("nan")})},
    "temperature ∞": {"sampling": pb.DraftSampling(**{**SAMPLED, "temperature": float("inf")})},
    "support 0": {"sampling": pb.DraftSampling(**SAMPLED), "support_m": 0},
    "support 129": {"sampling": pb.DraftSampling(**SAMPLED), "support_m": 129},
    "output position": {"output_position": 2**31},
    "no session": {"session": ""},
    "a long session": {"session": "s" * 513},
}


def reading(session: str, **fields: Any) -> pb.DraftRequest:
    return wire_request(
        **{
            "session": session,
            "features": FEATURES,
            "dtype": pb.FEATURE_DTYPE_FLOAT32,
            **fields,
        }
    )


@pytest.mark.parametrize("what", MALFORMED)
async def test_a_malformed_request_costs_itself(what: str) -> None:
    """Its round gets an empty draft, the drafter never sees it, its mate is drafted."""
    toy = ToyDrafter(READS)
    async with serving(toy) as served, raw(served.address) as stream:
        await stream.hello()
        bad = reading(**{"session": "bad", "round": 5, **MALFORMED[what]})
        await stream.send(batch=pb.DraftBatch(requests=[bad, reading("good")]))
        told: dict[str, pb.Draft] = {}
        while len(told) < 2:
            told |= {r.draft.session: r.draft for r in (await stream.replies()).replies}
        assert (told[bad.session].round, list(told[bad.session].ids)) == (5, [])
        assert len(told["good"].ids) == 4
        assert [request.session for request in toy.requests] == ["1:good"]
        (refused,) = served.runner.figures.refused.items()
        assert refused[0].startswith("malformed: ")
        assert refused[1] == 1


async def test_features_have_no_place_where_none_are_read() -> None:
    async with serving(ToyDrafter()) as served, raw(served.address) as stream:
        await stream.hello()
        await stream.send(batch=pb.DraftBatch(requests=[wire_request("x", features=FEATURES)]))
        (reply,) = (await stream.replies()).replies
        assert list(reply.draft.ids) == []


async def test_malformed_context_is_missed_by_the_request_that_builds_on_it() -> None:
    toy = ToyDrafter()
    async with serving(toy) as served, raw(served.address) as stream:
        await stream.hello()
        context = pb.DraftContext(session="x", tokens=[1, V])
        request = wire_request("x", (3, 4), start=2)
        await stream.send(batch=pb.DraftBatch(contexts=[context], requests=[request]))
        (reply,) = (await stream.replies()).replies
        assert (reply.need_context.session, reply.need_context.start) == ("x", 0)


async def test_sessions_of_one_name_are_two_sessions() -> None:
    """Each verifier sees its own ids, and closes its own."""
    toy = ToyDrafter()
    async with (
        serving(toy) as served,
        linked(served.address) as a,
        linked(served.address, facts(verifier="v2")) as b,
    ):
        assert (await a.draft(asking("x", 0, range(10)))).ids[0] == 10
        assert (await b.draft(asking("x", 0, range(3)))).ids[0] == 3
        b.link.close("x")
        await eventually(lambda: len(toy.held) == 1)
        assert (await a.draft(asking("x", 1, (7, 8), 9))).ids[0] == 11


async def test_a_newer_life_of_a_verifier_ends_the_older_one() -> None:
    """Its sessions go with it, and it cannot come back."""
    toy = ToyDrafter()
    async with serving(toy) as served, raw(served.address) as old:
        await old.hello(facts(epoch=5))
        await old.send(batch=pb.DraftBatch(requests=[wire_request("x")]))
        await old.replies()
        async with raw(served.address) as new:
            await new.hello(facts(epoch=6))
            status, told = await old.status()
            assert status is grpc.StatusCode.ABORTED
            assert "epoch 6" in told
            await eventually(lambda: not toy.held)
            await new.send(batch=pb.DraftBatch(requests=[wire_request("x")]))
            await new.replies()
        await eventually(lambda: served.runner.lines == 0)
        async with raw(served.address) as zombie:
            status, told = await zombie.refused(facts(epoch=5))
        assert status is grpc.StatusCode.ABORTED
        assert "epoch 5" in told
        assert "6" in told


async def test_a_verifier_that_reconnects_ends_its_own_older_stream() -> None:
    """Whose loss the drafter has not noticed yet."""
    async with serving(ToyDrafter()) as served, raw(served.address) as old:
        await old.hello()
        async with raw(served.address) as new:
            await new.hello()
            # Not as one that is fenced: whichever of its streams is left may try again.
            assert (await old.status())[0] is grpc.StatusCode.UNAVAILABLE
            assert served.servicer.verifiers == 1


async def test_a_lost_stream_leaves_nothing() -> None:
    toy = ToyDrafter()
    async with serving(toy) as served:
        async with raw(served.address) as stream:
            await stream.hello()
            await stream.send(batch=pb.DraftBatch(requests=[wire_request("x"), wire_request("y")]))
            await stream.replies()
            assert (len(toy.held), served.servicer.verifiers) == (2, 1)
        await eventually(lambda: not toy.held)
        assert (served.servicer.verifiers, served.runner.lines) == (0, 0)


async def test_verifiers_are_bounded() -> None:
    async with serving(ToyDrafter(), max_verifiers=1) as served, raw(served.address) as first:
        await first.hello()
        async with raw(served.address) as second:
            status, _ = await second.refused(facts(verifier="v2"))
            assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
        await first.send(batch=pb.DraftBatch(requests=[wire_request("x")]))
        await first.replies()


async def test_a_verifier_that_does_not_read_holds_up_nobody() -> None:
    """Its replies pile up to the bound, and no further; another's go on."""
    toy = ToyDrafter(DrafterCard("toy-3", "toy", 64))
    big = BatchingConfig(max_queue=4096)
    async with (
        serving(toy, batching=big, max_unread=300) as served,
        linked(served.address, facts(verifier="v2")) as other,
        raw(served.address) as stream,
    ):
        await stream.hello()
        requests = [wire_request(f"{i:0512}", gamma=64) for i in range(300)]
        rounds = 0
        while not served.runner.figures.refused["unread"]:
            for request in requests:
                request.round = rounds
            await stream.send(batch=pb.DraftBatch(requests=requests))
            rounds += 1
            assert (await other.draft(asking("x", rounds))).ids
            assert rounds < 1000, "nothing was ever dropped"
        assert (await other.draft(asking("x", rounds + 1))).ids
        # What it reads at last is still in order, and the newest of it is there.
        last = await stream.replies()
        assert last.replies


async def test_replies_that_are_too_long_for_a_message_come_in_several() -> None:
    """Supports of 64 positions and 128 ids are 65 KB a session."""

    class Wide(ToyDrafter):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | NeedContext]:
            ids, weights = np.zeros((64, 128), np.int32), np.ones((64, 128), np.float32)
            block, logits = (0,) * 64, np.zeros(64, np.float32)
            return [Draft(r.session, r.round, block, logits, ids, weights) for r in requests]

    sampled = pb.DraftSampling(**SAMPLED)
    async with serving(Wide()) as served, raw(served.address) as stream:
        await stream.hello()
        requests = [
            wire_request(str(i), gamma=64, support_m=128, sampling=sampled) for i in range(40)
        ]
        await stream.send(batch=pb.DraftBatch(requests=requests))
        told: list[str] = []
        while len(told) < 40:
            replies = await stream.replies()
            assert replies.ByteSize() <= 2**20
            told += [reply.draft.session for reply in replies.replies]
        assert sorted(told) == sorted(map(str, range(40)))


async def test_a_drain_is_said_refuses_the_new_and_ends_with_the_sessions() -> None:
    async with serving(ToyDrafter()) as served, raw(served.address) as stream:
        await stream.hello()
        await stream.send(batch=pb.DraftBatch(requests=[wire_request("x")]))
        assert not (await stream.replies()).draining
        await served.server.refuse_new()
        assert (await stream.read()).replies.draining
        async with grpc.aio.insecure_channel(served.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            health = await stub.Check(health_pb2.HealthCheckRequest())
            assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        async with raw(served.address) as late:
            status, _ = await late.refused(facts(verifier="v2"))
            assert status is grpc.StatusCode.UNAVAILABLE
        draining = asyncio.create_task(served.server.drain(30.0))
        await stream.send(batch=pb.DraftBatch(requests=[wire_request("x", round=1)]))
        replies = await stream.replies()
        assert replies.draining
        assert list(replies.replies[0].draft.ids), "who is here is served on"
        await stream.send(batch=pb.DraftBatch(closed=["x"]))
        assert (await stream.status())[0] is grpc.StatusCode.OK
        async with asyncio.timeout(20):
            await draining


async def test_a_drain_ends_at_its_grace() -> None:
    async with serving(ToyDrafter()) as served, raw(served.address) as stream:
        await stream.hello()
        await stream.send(batch=pb.DraftBatch(requests=[wire_request("x")]))
        await stream.replies()
        await served.server.drain(0.0)
        assert (await stream.status())[0] is grpc.StatusCode.UNAVAILABLE


async def test_a_life_that_begins_again_is_told() -> None:
    async with serving(ToyDrafter(), replica=Replica("d1", epoch=1)) as served:
        served.servicer.begin_life(9)
        async with raw(served.address) as stream:
            assert (await stream.hello()).epoch == 9


def test_a_limit_below_one_position_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="max_message_bytes: 100 must be at least"):
        DrafterOffer.of(ToyDrafter(CARD), max_message_bytes=100)
