"""A verifier behind gRPC answers as an engine in this process would, and where it cannot, its runs
end in one status: both ends are real, and so is the wire between them."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from dspark.core.errors import (
    Cancelled,
    DeadlineExceeded,
    DsparkError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from dspark.core.replicas import Replica
from dspark.core.requests import Finished, FinishReason, Request, Speculation
from dspark.core.sampling import SamplingParams
from dspark.gateway.verifier_client import VerificationClient
from dspark.serving import TlsFiles
from dspark.verifier.runner import EngineRunner

from ..verifier.served import (
    FOR_EVER,
    PROMPT,
    ROOM,
    RULE,
    Served,
    V,
    Wire,
    answer,
    begun,
    card_of,
    engine,
    error_of,
    rest_of,
    right,
    served,
)
from ..verifier.toy import (
    HandClock,
    ScriptedDrafter,
    ToyBackend,
    choices,
    greedy,
    nothing,
    oracle,
    request,
    target_only,
)
from .toy_front import certificate, needs_openssl


async def at_base(of: Served) -> None:
    """Wait until nothing runs and nothing is held; every wait is for a real run to end."""
    async with asyncio.timeout(2):
        number = 0
        while not of.at_base:
            number += 1
            await answer(of.runner, request(f"between {number}", PROMPT, greedy(1)))
    of.engine.check_integrity()


async def fate(target: VerificationClient, asked: Request) -> Exception | None:
    """How a run failed, whether it was sent or not: a stream may be lost a moment later."""
    try:
        return error_of(await answer(target, asked))
    except DsparkError as error:
        return error


# --- the same as without a wire -------------------------------------------------------------------

KINDS: dict[str, Request] = {
    "greedy": request("a", PROMPT, greedy(40)),
    "seeded": request("a", PROMPT, SamplingParams(temperature=1.3, seed=2**64 - 1, max_tokens=40)),
    "unseeded": request("a", PROMPT, SamplingParams(temperature=0.7, top_p=0.9, max_tokens=40)),
    "penalized": request("a", PROMPT, greedy(40, frequency_penalty=0.4, repetition_penalty=1.3)),
    "logprobs": request("a", PROMPT, greedy(20, logprobs=True, top_logprobs=3)),
    "biased": request("a", PROMPT, greedy(20, logit_bias={3: 9.5, 7: -100.0}, min_tokens=7)),
    "stops": request("a", PROMPT, greedy(400, stop_ids=tuple(range(40, V)))),
    "ends": request("a", PROMPT, greedy(400, ignore_eos=True)),
    "plain": request("a", PROMPT, greedy(20), speculation=Speculation(drafter="none")),
    "short drafts": request("a", PROMPT, greedy(20), speculation=Speculation(None, 2, "fixed:1")),
    "replay": request("a", PROMPT, greedy(40), committed_ids=tuple(target_only(RULE, PROMPT, 9))),
    "choice": request("a", PROMPT, SamplingParams(seed=4, max_tokens=20), choice=3, attempt=70_000),
    "too long": request("a", range(V), greedy(None), deadline=0.0),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_run_over_the_wire_tells_what_the_runner_tells(kind: str) -> None:
    """Event by event, each of two engines with the same randomness."""
    near = engine(eos_ids=(11,))
    async with EngineRunner(near) as runner:
        bare = [event async for event in runner.run(KINDS[kind])]
    async with (
        served(engine(eos_ids=(11,))) as of,
        VerificationClient(of.address, clock=HandClock()) as target,
    ):
        wired = [event async for event in target.run(KINDS[kind])]
    if kind == "too long":
        (bare_end,), (end,) = bare, wired
        assert isinstance(bare_end, Finished)
        assert isinstance(end, Finished)
        assert str(end.error) == str(bare_end.error)
        assert isinstance(end.error, DeadlineExceeded)
    else:
        assert wired == bare
        assert isinstance(wired[-1], Finished)
        assert wired[-1].error is None


async def test_many_at_once_and_choices_of_one() -> None:
    async with served(engine(max_sequences=4)) as of, VerificationClient(of.address) as target:
        asked = [request(str(i), PROMPT, greedy(5 + i)) for i in range(30)]
        told = await asyncio.gather(*(answer(target, a) for a in asked))
        assert all(right(one, 5 + i) for i, one in enumerate(told))
        one = request("n", PROMPT, replace(greedy(12), temperature=2.0, seed=4, n=4))
        four = await asyncio.gather(*(answer(target, a) for a in choices(one, 4)))
        assert len({tuple(a.ids) for a in four}) == 4
        for choice, a in enumerate(four):
            assert a.ids == target_only(RULE, PROMPT, 12, temperature=2.0, seed=4, choice=choice)


@needs_openssl
async def test_tls_on_both_ends_and_nothing_without_it(tmp_path: Path) -> None:
    file, key = certificate(tmp_path, "verifier")
    root = file.read_bytes()
    other, other_key = (file.read_bytes() for file in certificate(tmp_path, "stranger"))
    knows = grpc.ssl_channel_credentials(root, key.read_bytes(), root)
    async with served(engine(), tls=TlsFiles(file, key, file)) as of:
        async with VerificationClient(of.address, credentials=knows) as target:
            assert right(await answer(target, request("a", PROMPT, greedy(20))), 20)
        for stranger in (
            None,
            grpc.ssl_channel_credentials(root),
            grpc.ssl_channel_credentials(root, other_key, other),
        ):
            async with VerificationClient(of.address, credentials=stranger) as target:
                with pytest.raises(Unavailable, match=of.address):
                    await answer(target, request("b", PROMPT, greedy(20)))


async def test_describe_comes_back_as_nouns() -> None:
    running, replica = engine(heartbeat_s=0.5), Replica("v1", "host:1", 3)
    async with served(running, replica) as of, VerificationClient(of.address) as target:
        said = await target.describe()
        assert said.card == card_of(running)
        assert (said.replica, said.draining, said.heartbeat_s) == (replica, False, 0.5)
        assert said.drafters == tuple(drafter.card for drafter in running.drafters.values())


async def test_a_replay_goes_on_without_repeating() -> None:
    async with served(engine()) as of, AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(VerificationClient(of.address)) for _ in range(2)
        ]
        old = first.run(request("a", PROMPT, greedy(FOR_EVER)))
        given = (await begun(old)).ids
        new = request("a", PROMPT, greedy(60), attempt=1, committed_ids=given)
        told = await answer(second, new)
        assert told.commits[0].index == len(given)
        assert [*given, *told.ids] == target_only(RULE, PROMPT, 60)
        over = error_of(await rest_of(old))
        assert isinstance(over, Cancelled)
        assert "attempt 1 took over" in str(over)


# --- ends from this side --------------------------------------------------------------------------


async def test_an_early_close_cancels_and_frees() -> None:
    drafter = ScriptedDrafter(oracle(RULE))
    async with served(engine(None, drafter)) as of, VerificationClient(of.address) as target:
        events = target.run(request("a", PROMPT, greedy(FOR_EVER)))
        await begun(events)
        await events.aclose()
        await at_base(of)
        assert not drafter.sessions
        assert of.engine.figures.committed_tokens < FOR_EVER


async def test_the_same_request_can_be_asked_again_at_once() -> None:
    """Late words of the run that was left are not taken for the new one's."""
    async with served(engine()) as of, VerificationClient(of.address) as target:
        asked = request("a", PROMPT, greedy(600))
        for _ in range(5):
            events = target.run(asked)
            await begun(events)
            await events.aclose()
        assert right(await answer(target, asked), 600)


async def test_a_request_that_is_running_is_not_run_beside_itself() -> None:
    async with served(engine()) as of, VerificationClient(of.address) as target:
        asked = request("a", PROMPT, greedy(600))
        events = target.run(asked)
        first = await begun(events)
        with pytest.raises(InvalidRequest, match="attempt: 0 is running already"):
            await answer(target, asked)
        assert right(await rest_of(events, [first]), 600)


async def test_a_deadline_is_told_as_the_seconds_left() -> None:
    """The two clocks do not agree."""
    near, far = HandClock(500.0), HandClock(9000.0)
    async with (
        served(engine(clock=far)) as of,
        VerificationClient(of.address, clock=near) as target,
    ):
        events = target.run(request("a", PROMPT, greedy(FOR_EVER), deadline=504.0))
        first = await begun(events)
        far.now = 9003.9
        assert right(await answer(target, request("b", PROMPT, greedy(9), deadline=504.0)), 9)
        far.now = 9004.0
        assert isinstance(error_of(await rest_of(events, [first])), DeadlineExceeded)
        late = await answer(target, request("c", PROMPT, greedy(9), deadline=499.0))
        assert isinstance(error_of(late), DeadlineExceeded)


async def test_a_refusal_comes_with_its_reason() -> None:
    waiting = engine(max_waiting=1, max_sequences=1, retry_after_s=2.5, buffered_events=FOR_EVER)
    async with (
        served(waiting) as of,
        VerificationClient(of.address, buffered_events=FOR_EVER) as target,
    ):
        bad = error_of(await answer(target, request("bad", (1, V), greedy(5))))
        assert isinstance(bad, InvalidRequest)
        assert (bad.field, str(bad)) == (
            "prompt_ids",
            f"prompt_ids: {V} is not a token id of the vocabulary [0, {V})",
        )
        events = target.run(request("a", PROMPT, greedy(FOR_EVER)))
        await begun(events)
        behind = [asyncio.create_task(answer(target, request(n, PROMPT, greedy(5)))) for n in "bc"]
        (done,), (waits,) = await asyncio.wait(behind, return_when=asyncio.FIRST_COMPLETED)
        refused = error_of(done.result())
        assert isinstance(refused, Overloaded)
        assert refused.retry_after_s == 2.5
        await events.aclose()
        assert right(await waits, 5)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (request("a", [V - 1] * (4 * 2**20), greedy(5)), "prompt: '4194304 tokens'"),
        (request("a", [2**40], greedy(5)), "out of range"),
        (request("a", PROMPT, greedy(5), attempt=-1), "out of range"),
        (request("\ud800", PROMPT, greedy(5)), "out of range"),
    ],
    ids=["large", "wide", "negative", "surrogate"],
)
async def test_what_cannot_be_sent_costs_its_caller_only(asked: Request, says: str) -> None:
    async with served(engine()) as of, VerificationClient(of.address) as target:
        events = target.run(request("other", PROMPT, greedy(300)))
        first = await begun(events)
        with pytest.raises(InvalidRequest, match=says):
            await answer(target, asked)
        assert right(await rest_of(events, [first]), 300)


# --- readers that are slow ------------------------------------------------------------------------


async def test_a_reader_that_stands_still_is_paused_and_ends_with_one_status() -> None:
    clock = HandClock()
    one_by_one = engine(None, nothing(), clock=clock, buffered_events=16)
    async with (
        served(one_by_one) as of,
        VerificationClient(of.address, buffered_events=8) as target,
    ):
        slow = target.run(request("slow", PROMPT, greedy(FOR_EVER)))
        first = await begun(slow)
        for number in range(64):
            assert right(await answer(target, request(f"well {number}", PROMPT, greedy(100))), 100)
            if any(sequence.paused for sequence in of.engine.running):
                break
        (paused,) = of.engine.running
        assert paused.paused
        ahead = paused.state.outputs
        assert right(await answer(target, request("another", PROMPT, greedy(300))), 300)
        assert paused.state.outputs == ahead
        clock.now = 30.0
        await at_base(of)
        told = await rest_of(slow, [first])
        assert isinstance(error_of(told), Overloaded)
        assert "took nothing for 30 s" in str(error_of(told))
        assert right(told, ahead)


async def test_a_reader_that_comes_back_gets_everything() -> None:
    """Through many pauses, on both sides of the wire."""
    one_by_one = engine(None, nothing(), buffered_events=4)
    async with (
        served(one_by_one) as of,
        VerificationClient(of.address, buffered_events=2) as target,
    ):
        slow = target.run(request("slow", PROMPT, greedy(200)))
        commits = [await begun(slow)]
        for number in range(20):
            await answer(target, request(f"well {number}", PROMPT, greedy(20)))
            commits += [await begun(slow) for _ in range(7)]
        assert right(await rest_of(slow, commits), 200)


# --- verifiers that are lost ----------------------------------------------------------------------


async def test_nobody_there_is_unavailable_at_once() -> None:
    async with served(engine()) as of:
        address = of.address
    async with VerificationClient(address) as target, asyncio.timeout(5):
        for _ in range(3):
            with pytest.raises(Unavailable, match=address):
                await answer(target, request("a", PROMPT, greedy(5)))
        told = await asyncio.gather(
            *(answer(target, request(str(i), PROMPT, greedy(5))) for i in range(20)),
            return_exceptions=True,
        )
        assert all(isinstance(error, Unavailable) for error in told)


async def test_a_verifier_killed_in_mid_run_ends_its_runs_and_frees_theirs() -> None:
    async with served(engine()) as of, Wire(of.address) as wire:
        async with VerificationClient(wire.address) as target:
            runs = [target.run(request(str(i), PROMPT, greedy(FOR_EVER))) for i in range(5)]
            firsts = [await begun(events) for events in runs]
            wire.cut()
            for events, first in zip(runs, firsts, strict=True):
                told = await rest_of(events, [first])
                assert isinstance(error_of(told), Unavailable)
                assert "the stream is lost" in str(error_of(told))
                assert right(told)
                assert told.finished is not None
                assert told.finished.usage.prompt_tokens == len(PROMPT)
                assert told.finished.usage.completion_tokens == len(told.ids)
            assert isinstance(await fate(target, request("b", PROMPT, greedy(5))), Unavailable)
        await at_base(of)


async def test_a_run_goes_on_elsewhere_with_what_it_had() -> None:
    """What a gateway with two verifiers does: nothing is repeated, nothing is missing."""
    asked = request("a", PROMPT, SamplingParams(temperature=1.1, seed=8, max_tokens=400))
    async with (
        served(engine()) as of,
        served(engine()) as other,
        Wire(of.address) as wire,
        VerificationClient(wire.address) as first,
        VerificationClient(other.address) as second,
    ):
        events = first.run(asked)
        told = [await begun(events)]
        wire.cut()
        had = (await rest_of(events, told)).ids
        again = replace(asked, attempt=1, committed_ids=tuple(had))
        ids = had + (await answer(second, again)).ids
    assert ids == target_only(RULE, PROMPT, 400, temperature=1.1, seed=8)


async def test_later_runs_find_the_verifier_that_came_back() -> None:
    async with VerificationClient(f"127.0.0.1:{await free_port()}") as target:
        port = int(target.address.rpartition(":")[2])
        for _ in range(2):
            async with served(engine(), port=port), asyncio.timeout(20):
                told = None
                number = 0
                while told is None:
                    number += 1
                    try:
                        told = await answer(target, request(str(number), PROMPT, greedy(9)))
                    except Unavailable:
                        continue
                assert right(told, 9)


async def free_port() -> int:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = int(server.sockets[0].getsockname()[1])
    server.close()
    await server.wait_closed()
    return port


async def test_a_verifier_that_stops_lets_runs_finish_and_is_unavailable_then() -> None:
    async with served(engine()) as of, VerificationClient(of.address) as target:
        events = target.run(request("a", PROMPT, greedy(400)))
        first = await begun(events)
        stopping = asyncio.create_task(of.server.drain(20))
        assert right(await rest_of(events, [first]), 400)
        await stopping
        assert isinstance(await fate(target, request("b", PROMPT, greedy(9))), Unavailable)


class HangingBackend(ToyBackend):
    """Stands still in its third forward until it is told to go on."""

    def __init__(self) -> None:
        super().__init__(RULE, V, context_length=ROOM)
        self.go_on = threading.Event()

    def forward(self, batch: Any) -> Any:
        if self.forwards == 2:
            self.go_on.wait()
        return super().forward(batch)


async def test_an_engine_that_hangs_is_a_verifier_that_is_lost() -> None:
    backend = HangingBackend()
    hanging = engine(backend, heartbeat_s=0.1)
    async with served(hanging) as of, VerificationClient(of.address) as target:
        told = await answer(target, request("a", PROMPT, greedy(FOR_EVER)))
        assert isinstance(error_of(told), Unavailable)
        assert "said nothing for 3 heartbeats" in str(error_of(told))
        assert right(told)
        backend.go_on.set()
        await at_base(of)
        # On a stream of its own: the first one is given up.
        assert right(await answer(target, request("b", PROMPT, greedy(9))), 9)


async def test_a_wire_that_falls_silent_is_noticed() -> None:
    async with (
        served(engine(heartbeat_s=0.1)) as of,
        Wire(of.address) as wire,
        VerificationClient(wire.address) as target,
    ):
        events = target.run(request("a", PROMPT, greedy(FOR_EVER)))
        first = await begun(events)
        wire.fall_silent()
        told = await rest_of(events, [first])
        assert "said nothing for 3 heartbeats" in str(error_of(told))


async def test_a_verifier_that_only_waits_is_not_lost() -> None:
    """A run behind a reader that stands still: no tokens, but signs of life."""
    async with (
        served(engine(None, nothing(), heartbeat_s=0.1, buffered_events=2)) as of,
        Wire(of.address) as wire,
        VerificationClient(wire.address, buffered_events=2) as target,
    ):
        slow = target.run(request("slow", PROMPT, greedy(200)))
        first = await begun(slow)
        await wire.heard(8)
        (sequence,) = of.engine.running
        assert sequence.paused
        assert right(await rest_of(slow, [first]), 200)


async def test_closing_the_client_ends_its_runs() -> None:
    async with served(engine()) as of:
        async with VerificationClient(of.address) as target:
            events = target.run(request("a", PROMPT, greedy(FOR_EVER)))
            first = await begun(events)
        told = await rest_of(events, [first])
        assert isinstance(error_of(told), Unavailable)
        assert told.reason is FinishReason.ERROR
        await at_base(of)
