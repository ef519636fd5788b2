"""A link whose drafter dies, stops, falls silent, lies or is another: every round is answered once,
at once, and the link is back when the drafter is.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from dspark.core.drafts import (
    PROTOCOL_VERSION,
    Draft,
    DrafterCard,
    Faulty,
    Lost,
    NeedContext,
)
from dspark.core.errors import ConfigError, ModelError, Unavailable
from dspark.core.plans import CalibrationTable
from dspark.core.replicas import Replica
from dspark.core.sampling import SamplingMode
from dspark.drafter import BatchingConfig, DrafterOffer, RemoteDrafter
from dspark.drafter.wire_servicer import offer_to_wire
from dspark.v1 import drafting_pb2 as pb
from dspark.v1 import drafting_pb2_grpc as pb_grpc

from ..scheduling.door import Door, Mode
from .wire import (
    CARD,
    PATIENT_S,
    REJECTION,
    Caller,
    ToyDrafter,
    V,
    asking,
    eventually,
    facts,
    linked,
    serving,
    wired,
)

# Seconds in which a silent drafter must be given up on a busy machine; on an idle one 0.35.
SOON_S = 5.0
QUICK = {"refused_retry_s": 0.05, "hello_s": 1.0, "silent_s": 0.3}


async def lost(caller: Caller, *sessions: str) -> list[Lost]:
    begin = time.monotonic()
    answers = await caller.told(*sessions)
    assert time.monotonic() - begin < SOON_S
    told = [answer for answer in answers if isinstance(answer, Lost)]
    assert len(told) == len(answers), answers
    return told


async def works(caller: Caller, round_: int = 100) -> None:
    """The link is there, or comes back, and so is a drafter behind it. On a busy machine a process
    may be out of work long enough to count as lost once more."""
    async with asyncio.timeout(PATIENT_S):
        while True:
            await caller.until(lambda: caller.link.available)
            (answer,) = await caller.ask(asking("again", round_, (1, 2, 3)))
            if not isinstance(answer, Lost):
                assert isinstance(answer, Draft)
                assert answer.round == round_
                return


# --- loss -----------------------------------------------------------------------------------------


async def test_a_cut_loses_what_is_asked_and_the_link_comes_back() -> None:
    toy = ToyDrafter()
    async with serving(toy) as served, Door(served.address) as door, linked(door.address) as caller:
        await caller.draft(asking("x"))
        toy.gate.clear()
        caller.link.ask([asking("x", 1, (3, 4), 2), asking("y", 1)])
        await toy.passing()
        await toy.passing()
        door.turn(Mode.OPEN)
        told = await lost(caller, "x", "y")
        assert [(one.session, one.round) for one in told] == [("x", 1), ("y", 1)]
        toy.gate.set()
        await works(caller)
        # Its sessions went with the stream.
        assert await caller.ask(asking("x", 2, (4, 5), 3)) == [NeedContext("x", 0)]
        assert caller.link.figures.connected == 2
        await eventually(lambda: served.servicer.verifiers == 1)


async def test_a_black_hole_is_noticed_and_got_out_of() -> None:
    """Nothing gets through, nobody is told, and the drafter is well. While the link is down rounds
    are lost at once."""
    async with (
        serving(ToyDrafter()) as served,
        Door(served.address) as door,
        linked(door.address, **QUICK) as caller,
    ):
        await caller.draft(asking("x"))
        door.turn(Mode.SILENT)
        caller.link.ask([asking("x", 1, (3, 4), 2), asking("y", 1)])
        told = await lost(caller, "x", "y")
        assert "said nothing" in told[0].why
        assert not caller.link.available
        caller.link.ask([asking("z")])
        (at_once,) = caller.link.answers()
        assert isinstance(at_once, Lost)
        door.turn(Mode.OPEN)
        await works(caller)


@contextmanager
def process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A drafter of its own, and its address."""
    script = Path(__file__).with_name("ngram_process.py")
    running = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    try:
        yield running, running.stdout.readline().strip()
    finally:
        running.kill()
        running.wait()
        running.stdout.close()


async def test_a_stopped_process_is_noticed_and_comes_back() -> None:
    """SIGSTOP: the connection stays, and its kernel even takes new ones."""
    with process() as (running, address):
        async with linked(address, **QUICK) as caller:
            await works(caller)
            running.send_signal(signal.SIGSTOP)
            caller.link.ask([asking("x", 1, (3, 4), 2)])
            await lost(caller, "x")
            assert not caller.link.available
            running.send_signal(signal.SIGCONT)
            await works(caller)


async def test_a_killed_process_is_noticed() -> None:
    with process() as (running, address):
        async with linked(address, **QUICK) as caller:
            await works(caller)
            running.kill()
            await caller.until(lambda: not caller.link.available)
            caller.link.ask([asking("x", 1, (3, 4), 2)])
            await lost(caller, "x")


async def test_a_long_pass_is_not_silence() -> None:
    """The drafter says that it lives, however long its pass takes."""
    toy = ToyDrafter()
    async with wired(toy, silent_s=0.5) as caller:
        toy.gate.clear()
        caller.link.ask([asking("x")])
        await toy.passing()
        await asyncio.sleep(1.2)  # more than twice the bound on silence
        assert caller.link.answers() == []
        toy.gate.set()
        (draft,) = await caller.told("x")
        assert isinstance(draft, Draft)
        assert caller.link.figures.connected == 1


async def test_a_loop_that_stood_still_has_not_listened() -> None:
    """It blames nobody for what it did not hear."""
    async with wired(ToyDrafter(), silent_s=0.6) as caller:
        caller.link.ask([asking("x")])
        await asyncio.sleep(0)
        time.sleep(1.2)  # the loop itself stands
        (draft,) = await caller.told("x")
        assert isinstance(draft, Draft)
        assert caller.link.figures.connected == 1


async def test_a_drafter_that_drains_says_so() -> None:
    async with serving(ToyDrafter(), drain_s=20.0) as served, linked(served.address) as caller:
        await caller.draft(asking("x"))
        assert not caller.link.draining
        draining = asyncio.create_task(served.server.drain(20.0))
        await eventually(lambda: caller.link.draining)
        assert caller.link.available
        assert (await caller.draft(asking("x", 1, (3, 4), 2))).ids
        caller.link.close("x")
        await caller.until(lambda: not caller.link.available)
        async with asyncio.timeout(PATIENT_S):
            await draining


async def test_leaving_loses_what_is_asked() -> None:
    toy = ToyDrafter()
    async with serving(toy) as served:
        async with linked(served.address) as caller:
            toy.gate.clear()
            caller.link.ask([asking("x")])
            await toy.passing()
        (told,) = caller.link.answers()
        assert isinstance(told, Lost)
        assert "closed" in told.why
        caller.link.ask([asking("y")])
        (told,) = caller.link.answers()
        assert isinstance(told, Lost)
        toy.gate.set()


async def test_a_newer_round_makes_the_older_unwanted() -> None:
    toy = ToyDrafter()
    async with wired(toy) as caller:
        toy.gate.clear()
        caller.link.ask([asking("x", 1)])
        await toy.passing()
        caller.link.ask([asking("x", 2)])
        toy.gate.set()
        (draft,) = await caller.told("x")
        assert isinstance(draft, Draft)
        assert draft.round == 2
        await caller.draft(asking("y"))
        assert caller.early == caller.link.answers() == []


async def test_what_cannot_be_said_is_lost() -> None:
    """A number that its field cannot hold, features that are not read: no harm to its mates."""
    async with wired(ToyDrafter()) as caller:
        answers = await caller.ask(
            asking("a", -1),
            asking("b", tokens=(1, 2**40)),
            asking("c", features=np.zeros((2, 3), np.float32)),
            asking("s" * 513),
            asking("good"),
        )
        assert [type(answer) for answer in answers] == [Lost, Lost, Lost, Lost, Draft]


async def test_a_round_that_cannot_be_said_still_makes_the_older_unwanted() -> None:
    toy = ToyDrafter()
    async with wired(toy) as caller:
        toy.gate.clear()
        caller.link.ask([asking("x", 1)])
        await toy.passing()
        (told,) = await caller.ask(asking("x", 2, tokens=(2**40,)))
        assert isinstance(told, Lost)
        toy.gate.set()
        await caller.draft(asking("y"))
        assert caller.early == caller.link.answers() == []


WIDE = replace(CARD, layer_ids=(0, 2), feature_id="f", feature_width=1024)


async def test_more_than_may_wait_for_a_drafter_costs_rounds_and_not_the_link() -> None:
    """Five windows of 512 KiB where 1 MiB may wait: what is over is lost alone, and the next tries
    bring everyone's."""
    features = np.ones((256, 1024), np.float32)
    tokens = [i % V for i in range(257)]
    async with (
        serving(ToyDrafter(WIDE), feature_dtype="bfloat16") as served,
        linked(served.address, max_unsent_bytes=2**20) as caller,
    ):
        missing = [f"s{i}" for i in range(5)]
        for round_ in range(5):
            asked = [asking(s, round_, tokens, features=features) for s in missing]
            answers = await caller.ask(*asked)
            told = [answer for answer in answers if isinstance(answer, Lost)]
            assert round_ or len(told) == 3
            assert all("the limit is 1048576" in one.why for one in told)
            missing = [one.session for one in told]
            if not missing:
                break
        assert not missing
        assert caller.link.figures.connected == 1


async def test_a_window_larger_than_the_bound_is_sent_all_the_same() -> None:
    features = np.ones((256, 1024), np.float32)
    async with (
        serving(ToyDrafter(WIDE)) as served,
        linked(served.address, max_unsent_bytes=1000) as caller,
    ):
        assert (await caller.draft(asking("x", 1, [1] * 257, features=features))).ids
        assert (await caller.draft(asking("y", 1, [1] * 257, features=features))).ids


async def test_to_send_features_does_not_hold_up_the_event_loop() -> None:
    """64 MiB of them in one step, to a drafter that throws them away. Counted in this thread's own
    processor time, so a busy machine fails nobody."""
    script = Script()
    script.hello = Script.well(WIDE, feature_dtype=2, max_message_bytes=4 * 2**20)
    features = np.ones((1024, 1024), np.float32)
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        then = time.thread_time()
        while True:
            await asyncio.sleep(0.005)
            now = time.thread_time()
            longest, then = max(longest, now - then), now

    async with scripted(script) as address, linked(address) as caller:
        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0.02)
        asked = [asking(f"s{i}", 1, [1] * 1025, features=features) for i in range(32)]
        answers = await caller.ask(*asked)
        assert all(isinstance(answer, Draft) for answer in answers)
        ticking.cancel()
    assert 0 < longest < 0.05  # all in one go 0.1 and more


async def test_connections_leave_nothing_behind() -> None:
    """A hundred verifiers come, ask and go: sessions, tasks and descriptors are as before."""
    toy = ToyDrafter()
    async with serving(toy) as served:

        async def visit(n: int) -> None:
            async with linked(served.address, facts(verifier=f"v{n % 3}", epoch=n)) as caller:
                assert (await caller.draft(asking(f"x{n}"))).ids

        def descriptors() -> int:
            return len(os.listdir("/proc/self/fd"))

        for n in range(10):
            await visit(n)
        await eventually(lambda: not toy.held and not served.runner.lines)
        gc.collect()
        before, tasks = descriptors(), len(asyncio.all_tasks())
        for n in range(10, 110):
            await visit(n)
        await eventually(lambda: not toy.held and not served.runner.lines)
        gc.collect()
        # Some of gRPC's own come and go; a hundred visits must not leave one each.
        await eventually(lambda: descriptors() <= before + 5)
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks + 5)
        assert served.servicer.verifiers == 0


# --- what does not fit ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "both"),
    [
        ({"vocab_size": 99}, ("vocab_size", "160", "99")),
        ({"target_id": "another"}, ("target_id", "target-1", "another")),
        ({"tokenizer_hash": "other"}, ("tokenizer_hash", "tokens-1", "other")),
        ({"protocol_version": 0}, ("protocol_version", "1", "0")),
    ],
)
async def test_a_drafter_that_does_not_fit_is_refused_with_both_values(
    changes: dict[str, Any], both: tuple[str, ...]
) -> None:
    async with serving(ToyDrafter()) as served:
        with pytest.raises(ModelError) as refused:
            async with linked(served.address, facts(**changes)):
                pass
        assert all(value in str(refused.value) for value in both), refused.value
        await eventually(lambda: served.runner.lines == 0)


async def test_a_newer_peer_speaks_what_the_older_one_does() -> None:
    """Fields are only added: a rollout stops no drafts, whichever side is first."""
    async with serving(ToyDrafter()) as served:
        newer = facts(protocol_version=PROTOCOL_VERSION + 1)
        async with linked(served.address, newer) as caller:
            assert (await caller.draft(asking("x"))).ids
    script = Script()
    script.hello = Script.well(replace(CARD, protocol_version=PROTOCOL_VERSION + 1))
    async with scripted(script) as address, linked(address) as caller:
        assert (await caller.draft(asking("x"))).ids


async def test_a_bug_in_a_links_task_costs_one_stream(caplog: pytest.LogCaptureFixture) -> None:
    rung: list[None] = []

    def bell() -> None:
        rung.append(None)
        if len(rung) == 1:
            raise ZeroDivisionError("a bug")

    async with serving(ToyDrafter()) as served:
        link = RemoteDrafter(Replica("d1", served.address), facts(), bell, silent_s=PATIENT_S)
        async with link:
            await eventually(lambda: link.figures.connected == 2 and link.available)
            await works(Caller(link, asyncio.Event()))
    assert "its link has failed" in caplog.text


async def test_nobody_there_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="'d1' at 127"):
        async with linked("127.0.0.1:9", connect_s=0.3):
            pass
    with pytest.raises(ConfigError, match="silent_s: 0 must be above 0"):
        async with linked("127.0.0.1:9", silent_s=0):
            pass


class Script(pb_grpc.DraftingServicer):
    """A drafter that says what it is told to: its hello, and to each batch some replies."""

    def __init__(self) -> None:
        self.hello: pb.ProposeResponse | bytes = self.well()
        self.answer: Callable[[pb.DraftBatch], list[Any]] = lambda batch: [
            replies(*[draft(request) for request in batch.requests])
        ]
        self.streams = 0

    @staticmethod
    def well(card: DrafterCard = CARD, name: str = "d1", **changes: Any) -> pb.ProposeResponse:
        hello = offer_to_wire(DrafterOffer(card), Replica(name))
        for field, value in changes.items():
            setattr(hello, field, value)
        return pb.ProposeResponse(hello=hello)

    async def propose(self, messages: Any, context: Any) -> AsyncIterator[bytes]:
        self.streams += 1
        async for message in messages:
            said = pb.ProposeRequest.FromString(message)
            for one in [self.hello] if said.HasField("hello") else self.answer(said.batch):
                yield one if isinstance(one, bytes) else one.SerializeToString()


def replies(*all_: pb.DraftReply) -> pb.ProposeResponse:
    return pb.ProposeResponse(replies=pb.DraftReplies(replies=all_))


def draft(request: pb.DraftRequest, **changes: Any) -> pb.DraftReply:
    said: dict[str, Any] = {
        "session": request.session,
        "round": request.round,
        "ids": [1, 2],
        "confidence_logits": [0.5, 0.25],
    }
    return pb.DraftReply(draft=pb.Draft(**{**said, **changes}))


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[str]:
    """Its address. Bytes go out as they are, so nothing is too wrong to be said."""
    handler = grpc.stream_stream_rpc_method_handler(script.propose)
    server = grpc.aio.server()
    name = "dspark.v1.Drafting"
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(name, {"Propose": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


READS = replace(CARD, layer_ids=(0, 2), feature_id="f", feature_width=8)


@pytest.mark.parametrize(
    ("hello", "told"),
    [
        (Script.well(name="d2"), ["'d2'", "'d1'"]),
        (Script.well(replace(CARD, vocab_size=77)), ["vocab_size", "77", "160"]),
        (Script.well(replace(CARD, target_id="t9")), ["target_id", "t9", "target-1"]),
        (Script.well(replace(CARD, tokenizer_hash="h9")), ["tokenizer_hash", "h9", "tokens-1"]),
        (Script.well(replace(CARD, protocol_version=0)), ["protocol_version", "0", "1"]),
        (Script.well(replace(READS, layer_ids=(0, 3)), feature_dtype=1), ["[0, 3]", "4 layers"]),
        (Script.well(replace(READS, layer_ids=(-2,)), feature_dtype=1), ["[-2]", "4 layers"]),
        (Script.well(replace(CARD, gamma=65)), ["gamma", "65", "64"]),
        (Script.well(READS), ["feature_id", "'none'"]),
        (Script.well(replace(READS, feature_width=0), feature_dtype=1), ["feature_width of 0"]),
        (Script.well(READS, feature_dtype=2, max_message_bytes=100), ["100", "max_message_bytes"]),
        (Script.well(feature_dtype=9), ["feature_dtype", "9"]),
    ],
)
async def test_a_hello_that_does_not_fit_is_refused_by_the_verifier(
    hello: pb.ProposeResponse, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the drafter thinks of it."""
    script = Script()
    script.hello = hello
    async with scripted(script) as address:
        with pytest.raises(ModelError) as refused:
            async with linked(address):
                pass
    assert all(value in str(refused.value) for value in told), refused.value
    assert sum("no drafts" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("first", [replies(), pb.ProposeResponse(), b"\xff\xff\xff"])
async def test_what_is_no_hello_is_unavailable(first: Any) -> None:
    script = Script()
    script.hello = first
    async with scripted(script) as address:
        with pytest.raises(Unavailable):
            async with linked(address, connect_s=0.5):
                pass


async def test_another_drafter_in_the_same_place_is_not_taken_for_the_first() -> None:
    """Its features and calibration would be another's. The right one is taken when it is back."""
    script = Script()
    async with scripted(script) as address, linked(address, **QUICK) as caller:
        await works(caller)
        script.hello = Script.well(replace(CARD, drafter_id="toy-9"))
        script.answer = lambda batch: [b"\xff\xff"]
        caller.link.ask([asking("x", 1)])
        await lost(caller, "x")
        seen = script.streams
        await eventually(lambda: script.streams >= seen + 2)
        assert not caller.link.available
        script.hello, script.answer = Script.well(), Script().answer
        await works(caller)
        assert caller.link.card == CARD


async def test_tables_that_cannot_be_applied_are_left_out() -> None:
    good = CalibrationTable("toy-1", SamplingMode.GREEDY, (1.5,))
    tables = (
        good,
        CalibrationTable("toy-1", SamplingMode.COUPLED, (0.0,)),
        CalibrationTable("toy-1", SamplingMode.REJECTION, (float("nan"),)),
        CalibrationTable("toy-1", SamplingMode.REJECTION, ()),
        CalibrationTable("another", SamplingMode.REJECTION, (1.0,)),
    )
    async with wired(ToyDrafter(calibration=tables)) as caller:
        assert caller.link.calibration == (good,)


# --- lies -----------------------------------------------------------------------------------------

ONE = np.ones(4, "<f4").tobytes()
LIES: dict[str, dict[str, Any]] = {
    "more ids than asked": {"ids": [1] * 5, "confidence_logits": [0.0] * 5},
    "an id outside the vocabulary": {"ids": [1, V]},
    "a negative id": {"ids": [1, -1]},
    "too few confidences": {"confidence_logits": [0.5]},
    "no confidences": {"confidence_logits": []},
    "half a support": {"support_ids": b"\0" * 16},
    "a ragged support": {"support_ids": b"\0" * 12, "support_weights": b"\0" * 12},
    "a support without ids": {
        "ids": [], "confidence_logits": [], "support_ids": ONE, "support_weights": ONE,
    },
    "a support that is too wide": {
        "support_ids": b"\0" * 2 * 4 * 129, "support_weights": b"\0" * 2 * 4 * 129,
    },
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
async def test_a_reply_that_is_none_costs_its_round(lie: str) -> None:
    script = Script()
    script.answer = lambda batch: [
        replies(*[draft(r, **LIES[lie] if r.session == "x" else {}) for r in batch.requests])
    ]
    async with scripted(script) as address, linked(address) as caller:
        wrong, right = await caller.ask(
            asking("x", 1, sampling=REJECTION), asking("y", 1, sampling=REJECTION)
        )
        assert isinstance(wrong, Faulty)
        assert isinstance(right, Draft)
        assert (wrong.session, wrong.round) == ("x", 1)
        assert caller.link.figures.connected == 1


async def test_a_support_where_none_is_asked_for_is_no_draft() -> None:
    script = Script()
    support = {"support_ids": b"\0" * 16, "support_weights": ONE}
    script.answer = lambda batch: [replies(*[draft(r, **support) for r in batch.requests])]
    async with scripted(script) as address, linked(address) as caller:
        (wrong,) = await caller.ask(asking("x", 1))
        assert isinstance(wrong, Faulty)
        (right,) = await caller.ask(asking("x", 2, sampling=REJECTION))
        assert isinstance(right, Draft)
        assert right.support_ids is not None
        assert right.support_ids.shape == (2, 2)


async def test_nobody_is_believed_that_it_looks_back_only() -> None:
    script = Script()
    script.hello = Script.well(replace(CARD, kind="ngram"))
    script.answer = lambda batch: [
        replies(*[draft(r, looks_back_only=True) for r in batch.requests])
    ]
    async with scripted(script) as address, linked(address) as caller:
        assert not (await caller.draft(asking("x"))).looks_back_only


async def test_replies_that_nobody_waits_for_are_dropped() -> None:
    """Stale, unknown, twice, and a wish for what was just sent."""
    script = Script()
    script.answer = lambda batch: [
        replies(
            draft(batch.requests[0], round=9),
            draft(batch.requests[0], session="nobody"),
            pb.DraftReply(need_context=pb.NeedContext(session="x", start=4)),
            pb.DraftReply(),
        ),
        replies(draft(batch.requests[0]), draft(batch.requests[0])),
    ]
    async with scripted(script) as address, linked(address) as caller:
        assert (await caller.draft(asking("x", 3, (1, 2), 4))).round == 3
        script.answer = Script().answer
        await caller.draft(asking("after it"))
        assert caller.link.answers() == []


@pytest.mark.parametrize("said", [b"\xff\xff\xff", pb.ProposeResponse(), Script.well()])
async def test_a_message_that_is_none_ends_the_stream_and_not_the_link(said: Any) -> None:
    script, right = Script(), Script().answer
    script.answer = lambda batch: [said]
    async with scripted(script) as address, linked(address) as caller:
        caller.link.ask([asking("x", 1), asking("y", 1)])
        await lost(caller, "x", "y")
        script.answer = right
        await works(caller)


async def test_a_drafter_that_ends_its_stream_is_asked_again() -> None:
    class Brief(Script):
        async def propose(self, messages: Any, context: Any) -> AsyncIterator[bytes]:
            async for one in super().propose(messages, context):
                yield one
                if self.streams < 4:
                    return

    script = Brief()
    async with scripted(script) as address, linked(address) as caller:
        await eventually(lambda: script.streams >= 4)
        await works(caller)


async def test_the_queue_of_a_busy_drafter_is_answered() -> None:
    """Above its bound with empty drafts, at once."""
    toy = ToyDrafter()
    async with wired(toy, batching=BatchingConfig(max_queue=1)) as caller:
        toy.gate.clear()
        caller.link.ask([asking("first")])
        await toy.passing()
        caller.link.ask([asking("x", 1), asking("y", 1)])
        (empty,) = await caller.told("y")
        assert isinstance(empty, Draft)
        assert empty.ids == ()
        toy.gate.set()
        first, x = await caller.told("first", "x")
        assert isinstance(first, Draft)
        assert isinstance(x, Draft)
        assert first.ids
        assert x.ids
