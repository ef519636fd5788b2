"""A verifier's gRPC server, message by message over a real channel (verification.proto)."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from dspark.client.wire_client import ERROR_METADATA
from dspark.core.errors import ConfigError
from dspark.core.replicas import Replica
from dspark.core.requests import Request, Speculation
from dspark.gateway import verifier_client
from dspark.gateway.wire_verifier_client import run_to_wire
from dspark.serving.grpc_server import MIN_PING_INTERVAL_MS
from dspark.v1 import generation_pb2 as nouns
from dspark.v1 import verification_pb2 as pb
from dspark.v1 import verification_pb2_grpc as pb_grpc
from dspark.verifier.servicer import MAX_MESSAGE_BYTES
from dspark.verifier.wire_servicer import request_from_wire

from .served import FOR_EVER, PROMPT, ROOM, RULE, Served, V, answer, engine, right, served
from .toy import (
    HandClock,
    ScriptedDrafter,
    ToyBackend,
    greedy,
    nothing,
    oracle,
    request,
    target_only,
)

LENGTH, ERROR = nouns.FINISH_REASON_LENGTH, nouns.FINISH_REASON_ERROR


def a_run(name: str, tokens: int = 12, **fields: Any) -> pb.Run:
    """A greedy run of the usual prompt."""
    key = pb.RunKey(
        request_id=name, choice=fields.pop("choice", 0), attempt=fields.pop("attempt", 0)
    )
    sampling = nouns.SamplingParams(temperature=0.0, max_tokens=tokens)
    return pb.Run(**{"key": key, "prompt_ids": PROMPT, "sampling": sampling, **fields})


class Stream:
    """A gateway's end of a stream, and what came down it by run."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.ids: dict[tuple[str, int, int], list[int]] = {}
        self.ends: dict[tuple[str, int, int], list[pb.Finished]] = {}
        self.responses: list[pb.RunResponse] = []

    async def send(self, **message: Any) -> None:
        await self.call.write(pb.RunRequest(**message))

    async def run(self, *runs: pb.Run) -> None:
        for run in runs:
            await self.send(run=run)

    async def read(self) -> pb.RunResponse:
        response = await self.call.read()
        assert response is not grpc.aio.EOF, "the stream is over"
        self.responses.append(response)
        for event in response.events:
            which = getattr(event, str(event.WhichOneof("event")))
            key = (which.key.request_id, which.key.choice, which.key.attempt)
            if isinstance(which, pb.Committed):
                ids = self.ids.setdefault(key, [])
                ids.extend(which.ids)
            else:
                self.ends.setdefault(key, []).append(which)
        return response

    async def read_on(self) -> None:
        while True:
            await self.read()

    async def begun(self, *names: str) -> None:
        while not {(name, 0, 0) for name in names} <= set(self.ids):
            await self.read()

    async def end(self, name: str, choice: int = 0, attempt: int = 0) -> pb.Finished:
        key = (name, choice, attempt)
        while key not in self.ends:
            await self.read()
        (end,) = self.ends[key]
        return end


@asynccontextmanager
async def channel_to(of: Served, **options: int) -> AsyncIterator[grpc.aio.Channel]:
    named = [(f"grpc.http2.{name}", value) for name, value in options.items()]
    async with grpc.aio.insecure_channel(of.address, named) as channel:
        yield channel


@asynccontextmanager
async def stream_to(of: Served, *, hello: bool = True, **options: int) -> AsyncIterator[Stream]:
    async with channel_to(of, **options) as channel:
        stream = Stream(pb_grpc.VerificationStub(channel).Run())
        if hello:
            await stream.send(hello=pb.GatewayHello(protocol_version=1, gateway="test"))
        yield stream
        stream.call.cancel()


async def at_base(of: Served) -> None:
    """Wait until nothing runs and nothing is held; every wait is for a real run to end."""
    async with asyncio.timeout(2):
        number = 0
        while not of.at_base:
            number += 1
            await answer(of.runner, request(f"between {number}", PROMPT, greedy(1)))
    of.engine.check_integrity()


# --- runs -----------------------------------------------------------------------------------------


async def test_runs_of_one_stream_end_each_once_with_what_was_asked() -> None:
    async with served(engine()) as of, stream_to(of) as stream:
        await stream.run(*(a_run(str(i), 5 + i) for i in range(9)))
        for i in range(9):
            end = await stream.end(str(i))
            assert end.reason == LENGTH
            assert not end.HasField("error")
            assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (10, 5 + i)
            assert stream.ids[str(i), 0, 0] == target_only(RULE, PROMPT, 5 + i)
        figures = [end.speculation for (end,) in stream.ends.values()]
        assert all(f.drafted >= f.verified >= f.accepted > 0 for f in figures)


async def test_one_message_a_step_holds_the_events_of_all_runs() -> None:
    async with served(engine(None, nothing(), max_sequences=8)) as of, stream_to(of) as stream:
        await stream.run(*(a_run(str(i), 40) for i in range(8)))
        for i in range(8):
            await stream.end(str(i))
    told = [r for r in stream.responses if r.events]
    steps = [r.steps for r in told]
    assert steps == sorted(set(steps)), "a step in two messages"
    assert max(len(r.events) for r in told) >= 8


async def test_unset_fields_take_the_defaults_of_the_nouns() -> None:
    async with served(engine()) as of, stream_to(of) as stream:
        seeded = nouns.SamplingParams(seed=5, max_tokens=9)
        await stream.run(a_run("a", sampling=seeded), a_run("b", sampling=seeded))
        await stream.end("a")
        await stream.end("b")
    text = target_only(RULE, PROMPT, 9, temperature=1.0, seed=5)
    assert stream.ids["a", 0, 0] == stream.ids["b", 0, 0] == text


async def test_a_cancel_is_answered_once_and_frees_what_the_run_held() -> None:
    drafter = ScriptedDrafter(oracle(RULE))
    async with served(engine(None, drafter)) as of, stream_to(of) as stream:
        await stream.run(a_run("a", FOR_EVER), a_run("b", FOR_EVER))
        await stream.begun("a", "b")
        for name in ("a", "never heard of"):
            await stream.send(cancel=pb.Cancel(key=pb.RunKey(request_id=name)))
        assert (await stream.end("a")).error.code == nouns.ERROR_CODE_CANCELLED
        await stream.send(cancel=pb.Cancel(key=pb.RunKey(request_id="a")))
        await stream.send(cancel=pb.Cancel(key=pb.RunKey(request_id="b")))
        await stream.end("b")
        await at_base(of)
        assert not drafter.sessions
        assert len(stream.ends["a", 0, 0]) == 1


async def test_a_cancel_of_an_older_attempt_leaves_the_newer_alone() -> None:
    async with served(engine()) as of, stream_to(of) as stream:
        await stream.run(a_run("a", FOR_EVER))
        await stream.begun("a")
        await stream.run(a_run("a", 30, attempt=1))
        await stream.send(cancel=pb.Cancel(key=pb.RunKey(request_id="a")))
        assert (await stream.end("a", attempt=1)).reason == LENGTH
        assert "attempt 1 took over" in (await stream.end("a")).error.message


async def test_a_newer_attempt_on_another_stream_ends_the_older() -> None:
    async with served(engine()) as of, stream_to(of) as old, stream_to(of) as new:
        await old.run(a_run("a", FOR_EVER))
        await old.begun("a")
        given = old.ids["a", 0, 0][:5]
        await new.run(a_run("a", 40, attempt=65_536, committed_ids=given))
        assert (await new.end("a", attempt=65_536)).reason == LENGTH
        assert given + new.ids["a", 0, 65_536] == target_only(RULE, PROMPT, 40)
        end = await old.end("a")
        assert (end.reason, end.error.code) == (ERROR, nouns.ERROR_CODE_CANCELLED)
        await new.run(a_run("b", FOR_EVER, attempt=2))
        await new.read()
        await old.run(a_run("b", attempt=1))
        late = (await old.end("b", attempt=1)).error
        assert (late.code, late.field) == (nouns.ERROR_CODE_INVALID_REQUEST, "attempt")


async def test_the_same_run_twice_is_refused_and_the_first_goes_on() -> None:
    async with served(engine()) as of, stream_to(of) as stream:
        await stream.run(a_run("a", 300), a_run("a", 300))
        while len(stream.ends.get(("a", 0, 0), ())) < 2:
            await stream.read()
        refused, first = stream.ends["a", 0, 0]
        assert (refused.error.field, first.reason) == ("attempt", LENGTH)
        assert stream.ids["a", 0, 0] == target_only(RULE, PROMPT, 300)


async def test_a_replay_of_a_whole_answer_ends_at_once() -> None:
    ids = target_only(RULE, PROMPT, 6)
    async with served(engine()) as of, stream_to(of) as stream:
        await stream.run(a_run("a", 6, attempt=1, committed_ids=ids))
        end = await stream.end("a", attempt=1)
        assert (end.reason, end.usage.completion_tokens) == (LENGTH, 6)
        assert not stream.ids


async def test_a_deadline_counts_from_the_receipt() -> None:
    clock = HandClock(1000.0)
    async with served(engine(clock=clock)) as of, stream_to(of) as stream:
        await stream.run(a_run("late", deadline_s=0.0), a_run("a", FOR_EVER, deadline_s=5.0))
        assert (await stream.end("late")).error.code == nouns.ERROR_CODE_DEADLINE_EXCEEDED
        await stream.begun("a")
        clock.now = 1004.9
        await stream.run(a_run("b", deadline_s=5.0))
        assert (await stream.end("b")).reason == LENGTH
        clock.now = 1005.0
        end = await stream.end("a")
        assert end.error.code == nouns.ERROR_CODE_DEADLINE_EXCEEDED
        assert end.usage.completion_tokens == len(stream.ids["a", 0, 0])


def test_a_run_means_the_same_on_both_sides() -> None:
    sent = Request(
        "r", (1, 2), greedy(5), choice=1, attempt=2, committed_ids=(3,), deadline=7.0, lease="l",
        epoch=4, drafter="d1", tenant="t", priority=-1, floor_tps=2.5,
        speculation=Speculation("dspark", 3, "fixed:2"), traceparent="00-x",
    )  # fmt: skip
    run = run_to_wire(sent, now=5.0)
    assert run.drafter == pb.Replica(replica_id="d1")
    assert request_from_wire(run, now=5.0) == sent
    unnamed = run_to_wire(replace(sent, drafter=""), now=5.0)
    assert not unnamed.HasField("drafter")


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"key": pb.RunKey()}, "key.request_id"),
        ({"prompt_ids": []}, "prompt"),
        ({"prompt_ids": [1, V]}, "prompt_ids"),
        ({"committed_ids": [-1]}, "prompt_ids"),
        ({"sampling": nouns.SamplingParams(temperature=math.nan)}, "temperature"),
        ({"sampling": nouns.SamplingParams(max_tokens=0)}, "max_tokens"),
        ({"sampling": nouns.SamplingParams(top_logprobs=10**6)}, "top_logprobs"),
        ({"speculation": nouns.SpeculationOptions(drafter="eagle")}, "speculation.drafter"),
        ({"speculation": nouns.SpeculationOptions(verify="fixed")}, "verify"),
        ({"deadline_s": math.nan}, "deadline_s"),
        ({"floor_tps": -1.0}, "floor_tps"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_bad_field_is_named_and_costs_its_run_only(
    fields: dict[str, Any], field: str
) -> None:
    async with served(engine()) as of, stream_to(of) as stream:
        await stream.run(a_run("good", 30), a_run("bad", **fields))
        name = "" if field == "key.request_id" else "bad"
        end = await stream.end(name)
        assert (end.reason, end.error.code) == (ERROR, nouns.ERROR_CODE_INVALID_REQUEST)
        assert field in end.error.field
        assert end.error.limit
        assert (await stream.end("good")).reason == LENGTH


async def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    waiting = engine(max_waiting=2, max_sequences=1, retry_after_s=2.5)
    async with served(waiting) as of, stream_to(of) as stream:
        await stream.run(a_run("runs", FOR_EVER))
        await stream.begun("runs")
        await stream.run(*(a_run(str(i)) for i in range(2)))
        await stream.run(a_run("late"))
        error = (await stream.end("late")).error
        assert error.code == nouns.ERROR_CODE_OVERLOADED
        assert error.retry_after_s == 2.5
        await stream.send(cancel=pb.Cancel(key=pb.RunKey(request_id="runs")))
        for i in range(2):
            assert (await stream.end(str(i))).reason == LENGTH


async def test_what_piles_up_during_a_step_is_bounded() -> None:
    backend = HangingBackend()
    async with served(engine(backend, max_waiting=3)) as of, stream_to(of) as stream:
        await stream.run(a_run("runs"))
        await asyncio.to_thread(backend.hangs.wait)
        await stream.run(*(a_run(str(i)) for i in range(9)))
        for i in range(3, 9):
            assert (await stream.end(str(i))).error.code == nouns.ERROR_CODE_OVERLOADED
        backend.go_on.set()
        for i in range(3):
            assert (await stream.end(str(i))).reason == LENGTH


async def test_another_epoch_is_unavailable() -> None:
    replica = Replica("v1", "host:1", epoch=7)
    async with served(engine(), replica) as of, stream_to(of) as stream:
        await stream.run(a_run("mine", epoch=7), a_run("any"), a_run("old", epoch=6))
        error = (await stream.end("old")).error
        assert error.code == nouns.ERROR_CODE_UNAVAILABLE
        assert "6" in error.message
        assert "7" in error.message
        assert (await stream.end("mine")).reason == (await stream.end("any")).reason == LENGTH


async def test_every_epoch_of_this_process_is_welcome() -> None:
    """A store that was emptied makes it register again: leases of before name its earlier epoch,
    and a gateway may hear of the next one before the verifier does."""
    async with served(engine(), Replica("v1", "host:1")) as of, stream_to(of) as stream:
        of.servicer.begin_life(7)
        of.servicer.begin_life(9)
        epochs = (6, 7, 9, 11)
        await stream.run(*(a_run(str(epoch), epoch=epoch) for epoch in epochs))
        ends = [await stream.end(str(epoch)) for epoch in epochs]
        assert ends[0].error.code == nouns.ERROR_CODE_UNAVAILABLE
        assert [end.reason for end in ends[1:]] == [LENGTH] * 3


@pytest.mark.parametrize("first", [{}, {"run": a_run("a")}, None], ids=["empty", "run", "nothing"])
async def test_a_stream_without_hello_ends_with_a_clear_status(
    first: dict[str, Any] | None,
) -> None:
    async with served(engine()) as of, stream_to(of, hello=False) as stream:
        if first is None:
            await stream.call.done_writing()
        else:
            await stream.send(**first)
        with pytest.raises(grpc.aio.AioRpcError, match="hello") as refused:
            await stream.call.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        metadata: dict[str, Any] = dict(refused.value.trailing_metadata() or ())  # type: ignore[arg-type]
        assert nouns.Error.FromString(metadata[ERROR_METADATA]).field == "hello"
        assert of.at_base


async def test_a_message_that_says_nothing_ends_the_stream_behind_its_runs() -> None:
    async with served(engine()) as of, stream_to(of) as stream:
        await stream.run(a_run("a", 40))
        await stream.send()
        assert (await stream.end("a")).reason == LENGTH
        with pytest.raises(grpc.aio.AioRpcError, match="message: None must be one of"):
            await stream.call.read()


async def test_a_gateway_that_says_no_more_gets_its_answers_and_the_end() -> None:
    async with served(engine()) as of, stream_to(of) as stream:
        await stream.run(a_run("a", 40))
        await stream.call.done_writing()
        assert (await stream.end("a")).reason == LENGTH
        assert await stream.call.read() is grpc.aio.EOF
        assert await stream.call.code() is grpc.StatusCode.OK


async def test_a_message_over_the_limit_costs_its_stream_only() -> None:
    async with served(engine()) as of, stream_to(of) as other, stream_to(of) as stream:
        await other.run(a_run("other", 400))
        await stream.run(a_run("a", FOR_EVER))
        await stream.run(a_run("big", prompt_ids=[1] * (MAX_MESSAGE_BYTES + 1)))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.read_on()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await other.end("other")).reason == LENGTH
        await at_base(of)


async def test_a_million_ids_fit() -> None:
    """They are one too many for this engine, and its answer says so."""
    async with served(engine()) as of, stream_to(of) as stream:
        await stream.run(a_run("a", prompt_ids=[V - 1] * 1_000_000, attempt=3))
        error = (await stream.end("a", attempt=3)).error
        assert (error.code, error.field) == (nouns.ERROR_CODE_INVALID_REQUEST, "prompt")
    widest = pb.Run(prompt_ids=[2**28 - 1] * 1_000_000)
    assert widest.ByteSize() < MAX_MESSAGE_BYTES


# --- gateways that go away ------------------------------------------------------------------------


async def test_a_hundred_runs_whose_gateway_vanishes_leave_nothing() -> None:
    drafter = ScriptedDrafter(oracle(RULE, wrong_every=4))
    async with served(engine(None, drafter)) as of:
        async with stream_to(of) as stays, channel_to(of) as channel:
            await stays.run(a_run("stays", 200))
            stream = Stream(pb_grpc.VerificationStub(channel).Run())
            await stream.send(hello=pb.GatewayHello())
            names = [str(i) for i in range(100)]
            await stream.run(*(a_run(name, FOR_EVER) for name in names))
            await stream.begun(*names[:64])  # max_sequences; the others wait
            await channel.close()
            await at_base(of)
            assert not drafter.sessions
            assert (await stays.end("stays")).reason == LENGTH
        assert right(await answer(of.runner, request("next", PROMPT, greedy(20))), 20)


async def test_a_gateway_that_never_reads_holds_up_nobody() -> None:
    """Its events fill what gRPC buffers, then its runs' buffers; then they pause, and end."""
    clock = HandClock()
    one_by_one = engine(None, nothing(), clock=clock, buffered_events=8)
    window = {"bdp_probe": 0, "lookahead_bytes": 65_536}  # else it grows to 5 MB first
    async with served(one_by_one) as of, stream_to(of, **window) as deaf, stream_to(of) as stream:
        many = nouns.SamplingParams(
            temperature=0.0, max_tokens=4000, logprobs=True, top_logprobs=20
        )
        await deaf.run(*(a_run(f"deaf {i}", sampling=many) for i in range(8)))
        number = 0
        while not (len(of.engine.running) == 8 and all(s.paused for s in of.engine.running)):
            number += 1
            await stream.run(a_run(f"well {number}", 100))
            assert (await stream.end(f"well {number}")).reason == LENGTH
        clock.now = 30.0
        await at_base(of)
        for i in range(8):
            end = await deaf.end(f"deaf {i}")
            assert end.error.code == nouns.ERROR_CODE_OVERLOADED
            assert "took nothing for 30 s" in end.error.message
            assert end.usage.completion_tokens == len(deaf.ids[f"deaf {i}", 0, 0]) < 4000


async def test_a_run_that_is_paused_waits_and_goes_on() -> None:
    async with served(engine(None, nothing(), heartbeat_s=0.01)) as of, stream_to(of) as stream:
        await stream.run(a_run("a", 600))
        await stream.begun("a")
        await stream.send(pause=pb.Pause(key=pb.RunKey(request_id="a"), paused=True))
        (sequence,) = of.engine.running
        told = await stream.read()
        # A sign of life of now: everything that was committed has been told.
        while not sequence.paused or told.events or told.steps < of.engine.figures.steps:
            told = await stream.read()
        held = len(stream.ids["a", 0, 0])
        for _ in range(3):
            response = await stream.read()
            assert not response.events
            assert response.steps == told.steps
        await stream.send(pause=pb.Pause(key=pb.RunKey(request_id="a")))
        assert (await stream.end("a")).reason == LENGTH
        assert held < 600
        assert stream.ids["a", 0, 0] == target_only(RULE, PROMPT, 600)


# --- the server -----------------------------------------------------------------------------------


class HangingBackend(ToyBackend):
    """Stands still in its second forward until it is told to go on."""

    def __init__(self) -> None:
        super().__init__(RULE, V, context_length=ROOM)
        self.hangs = threading.Event()
        self.go_on = threading.Event()

    def forward(self, batch: Any) -> Any:
        if self.forwards == 1:
            self.hangs.set()
            self.go_on.wait()
        return super().forward(batch)


async def test_describe_says_what_is_served() -> None:
    running = engine(heartbeat_s=0.25)
    replica = Replica("v1", "host:1", epoch=7)
    async with served(running, replica) as of, channel_to(of) as channel:
        said = await pb_grpc.VerificationStub(channel).Describe(pb.DescribeRequest())
    assert (said.protocol_version, said.heartbeat_ms, said.draining) == (1, 250, False)
    assert (said.replica.replica_id, said.replica.epoch) == ("v1", 7)
    assert (said.card.model, said.card.limits.vocab_size) == ("toy", V)
    assert said.card.limits.kv_tokens == ROOM
    assert [card.drafter_id for card in said.drafters] == ["scripted"]


async def test_health_and_reflection() -> None:
    async with served(engine()) as of, channel_to(of) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for name in ("", "dspark.v1.Verification"):
            status = (await check(health_pb2.HealthCheckRequest(service=name))).status
            assert status == health_pb2.HealthCheckResponse.SERVING

        def reflect() -> tuple[list[str], list[str]]:
            with grpc.insecure_channel(of.address) as blocking:
                known = ProtoReflectionDescriptorDatabase(blocking)
                file = known.FindFileContainingSymbol("dspark.v1.Verification")
                return list(known.get_services()), [m.name for m in file.service[0].method]

        services, methods = await asyncio.to_thread(reflect)
        assert {"dspark.v1.Verification", "grpc.health.v1.Health"} <= set(services)
        assert methods == ["Run", "Describe"]


async def test_a_drain_refuses_new_runs_and_lets_the_others_finish() -> None:
    backend = HangingBackend()
    async with served(engine(backend)) as of, stream_to(of) as stream, channel_to(of) as channel:
        await stream.run(a_run("runs", 200))
        await asyncio.to_thread(backend.hangs.wait)
        await of.server.refuse_new()
        await stream.run(a_run("late"))
        error = (await stream.end("late")).error
        assert error.code == nouns.ERROR_CODE_UNAVAILABLE
        assert "draining" in error.message
        said = await pb_grpc.VerificationStub(channel).Describe(pb.DescribeRequest())
        assert said.draining
        health = health_pb2_grpc.HealthStub(channel)
        status = (await health.Check(health_pb2.HealthCheckRequest())).status
        assert status == health_pb2.HealthCheckResponse.NOT_SERVING
        backend.go_on.set()
        assert (await stream.end("runs")).reason == LENGTH


async def test_stopping_waits_for_runs_and_then_closes_their_streams() -> None:
    backend = HangingBackend()
    async with served(engine(backend)) as of, stream_to(of) as stream, stream_to(of) as idle:
        await idle.run(a_run("short", 1))
        await idle.end("short")
        await stream.run(a_run("runs", 200))
        await asyncio.to_thread(backend.hangs.wait)
        stopping = asyncio.create_task(of.server.drain(20))
        assert await idle.call.read() is grpc.aio.EOF
        backend.go_on.set()
        assert (await stream.end("runs")).reason == LENGTH
        assert await stream.call.read() is grpc.aio.EOF
        assert await stream.call.code() is grpc.StatusCode.OK
        await stopping


async def test_a_stop_without_grace_ends_what_runs() -> None:
    async with served(engine()) as of, stream_to(of) as stream:
        await stream.run(a_run("a", FOR_EVER))
        await stream.begun("a")
        await of.server.drain(0)
        with pytest.raises(grpc.aio.AioRpcError, match="this verifier has stopped") as told:
            await stream.read_on()
        assert told.value.code() is grpc.StatusCode.UNAVAILABLE
        await at_base(of)


async def test_a_port_in_use_is_an_error_that_names_it() -> None:
    async with served(engine()) as of:
        with pytest.raises(ConfigError, match=str(of.server.port)):
            async with served(engine(), port=of.server.port):
                pass


async def test_signs_of_life_come_while_a_run_is_open_and_stop_with_a_hanging_engine() -> None:
    backend = HangingBackend()
    running = engine(backend, heartbeat_s=0.02)
    async with served(running) as of, stream_to(of) as stream:
        await stream.run(a_run("a", 30))
        await asyncio.to_thread(backend.hangs.wait)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.read_on(), 0.2)
        backend.go_on.set()


async def test_who_pings_too_often_is_told_to_go_and_nobody_else() -> None:
    hasty = {
        "grpc.keepalive_time_ms": 20,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.max_pings_without_data": 0,
    }
    async with served(engine()) as of, stream_to(of) as other:
        async with grpc.aio.insecure_channel(of.address, list(hasty.items())) as channel:
            stream = Stream(pb_grpc.VerificationStub(channel).Run())
            await stream.send(hello=pb.GatewayHello())
            with pytest.raises(grpc.aio.AioRpcError, match="Too many pings") as told:
                await stream.read()
            assert told.value.code() is grpc.StatusCode.UNAVAILABLE
        await other.run(a_run("other"))
        assert (await other.end("other")).reason == LENGTH


def test_gateways_may_ping_as_often_as_they_do() -> None:
    assert dict(verifier_client.OPTIONS)["grpc.keepalive_time_ms"] > MIN_PING_INTERVAL_MS
