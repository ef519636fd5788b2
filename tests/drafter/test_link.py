"""A verifier's link to a drafter over real gRPC: what it drafts is what the drafter drafts in
process, whatever it loses comes back, and whoever lies on the other side costs drafts only.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dspark.core.drafts import Draft, Drafter, DraftSampling, NeedContext
from dspark.core.replicas import Replica
from dspark.drafter import RemoteDrafter
from dspark.drafter.bfloat16 import from_bfloat16, to_bfloat16
from dspark.models.drafters import NgramDrafter
from dspark.models.drafters.drafting import ModelDrafter

from ..models.drafters.scene import GAMMA, KINDS, Talk, tiny, tiny_drafter
from .wire import (
    COUPLED,
    GREEDY,
    PATIENT_S,
    REJECTION,
    REPLICA,
    ToyDrafter,
    asking,
    eventually,
    facts,
    linked,
    serving,
    wired,
)

MODELS = {name: tiny_drafter(name) for name in KINDS}


def drafter(name: str, **options: Any) -> ModelDrafter:
    rng = np.random.default_rng(5)
    return tiny(name, model=MODELS[name], **{"rng": rng, "candidates": 16, **options})


def same(ours: object, theirs: object) -> None:
    """Bit for bit, but that nobody believes a remote drafter that it looks back only."""
    if not isinstance(theirs, Draft):
        assert ours == theirs
        return
    assert isinstance(ours, Draft)
    assert (ours.session, ours.round, ours.ids) == (theirs.session, theirs.round, theirs.ids)
    for mine, other in (
        (ours.confidence_logits, theirs.confidence_logits),
        (ours.support_ids, theirs.support_ids),
        (ours.support_weights, theirs.support_weights),
    ):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            assert mine.dtype == other.dtype
            np.testing.assert_array_equal(mine, other)
    assert not ours.looks_back_only


def rounded(talk: Talk) -> Talk:
    """With features as they come off the wire in bfloat16."""
    talk.features = from_bfloat16(to_bfloat16(talk.features))
    return talk


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sampling", [GREEDY, REJECTION, COUPLED], ids=lambda s: s.mode)
@pytest.mark.parametrize("name", ["gated", "reduced", "eagle3"])
async def test_drafts_are_the_same_as_in_process(
    name: str, sampling: DraftSampling, dtype: str
) -> None:
    """Three sessions in one step, four rounds, one that must be told again, one asked twice."""
    near = drafter(name)
    talks = [Talk(f"session {i}", 60, seed=i) for i in range(3)]
    told = [rounded(Talk(f"session {i}", 60, seed=i)) for i in range(3)]
    if dtype == "float32":
        told = talks
    rounds = [(0, 20), (20, 24), (30, 33), (24, 33), (24, 33), (33, 40)]
    async with wired(drafter(name), feature_dtype=dtype) as caller:
        for n, (start, anchor) in enumerate(rounds):
            fields = {"sampling": sampling, "support_m": 12, "round_": min(n, 3) + n // 5}
            theirs = near.propose([talk.ask(start, anchor, **fields) for talk in told])
            ours = await caller.ask(*[talk.ask(start, anchor, **fields) for talk in talks])
            for mine, other in zip(ours, theirs, strict=True):
                same(mine, other)
            if n == 2:
                assert all(isinstance(answer, NeedContext) for answer in ours)


async def test_ngram_drafts_are_the_same_as_in_process() -> None:
    """It reads no features, and its word that it looks back only is not taken."""
    near, ids = NgramDrafter(GAMMA), (5, 6, 7, 8, 5, 6, 7, 8, 5, 6)
    async with wired(NgramDrafter(GAMMA)) as caller:
        for n, (start, stop) in enumerate([(0, 6), (5, 8), (7, 10)]):
            request = asking("s", n, ids[start:stop], start, output_position=n, sampling=REJECTION)
            (theirs,) = near.propose([request])
            assert isinstance(theirs, Draft)
            assert theirs.looks_back_only
            same(await caller.draft(request), theirs)
        assert len((await caller.draft(asking("s", 3, ids[9:], 9))).ids) == 4


async def test_what_a_drafter_forgot_is_asked_for_and_drafted_right() -> None:
    """Evicted by another session, then by the drafter's own restart."""
    talk, other = Talk("a", 60), Talk("b", 60, seed=1)
    near = drafter("gated")

    async def told_again(caller: Any, start: int, anchor: int, round_: int) -> None:
        (need,) = await caller.ask(talk.ask(start, anchor, round_))
        assert need == NeedContext("a", 0)
        ours = await caller.draft(talk.ask(need.start, anchor, round_))
        (theirs,) = near.propose([talk.ask(0, anchor, round_)])
        same(ours, theirs)

    async with serving(drafter("gated", max_sessions=1)) as served:
        port = served.server.port
        async with linked(served.address) as caller:
            await caller.draft(talk.ask(0, 20))
            await caller.draft(other.ask(0, 20))
            await told_again(caller, 20, 23, 1)
            await served.server.drain(0.0)
            await caller.until(lambda: not caller.link.available)
            async with serving(drafter("gated"), port=port, replica=replace(REPLICA, epoch=8)):
                await caller.until(lambda: caller.link.available)
                await told_again(caller, 23, 30, 2)


@pytest.mark.parametrize("make", [lambda: drafter("gated"), lambda: drafter("eagle3")])
async def test_a_long_prompt_comes_in_pieces(make: Callable[[], ModelDrafter]) -> None:
    """A message holds 30 positions of features here: 250 take several, in order, and what comes of
    it is what comes of one."""
    talk, far, near = Talk("a", 300), make(), make()
    (theirs,) = near.propose([talk.ask(0, 250)])
    assert isinstance(theirs, Draft)
    async with (
        serving(far, max_message_bytes=10_000) as served,
        linked(served.address) as caller,
    ):
        before = caller.link.figures.messages_sent
        ours = await caller.draft(talk.ask(0, 250))
        assert caller.link.figures.messages_sent - before == 9
        assert caller.link.figures.bytes_sent > 250 * 64 * 4
        assert ours.ids == theirs.ids
        np.testing.assert_allclose(ours.confidence_logits, theirs.confidence_logits, atol=1e-5)
        # The next round is one message again, and the session is whole.
        ours = await caller.draft(talk.ask(250, 255, 1))
        assert caller.link.figures.messages_sent - before == 10
        (theirs,) = near.propose([talk.ask(250, 255, 1)])
        assert isinstance(theirs, Draft)
        assert ours.ids == theirs.ids


async def test_an_engines_thread_asks_and_hears() -> None:
    """As it is meant to be used: the link on an event loop, its caller in another thread, which
    waits on a bell of its own."""
    async with serving(ToyDrafter()) as served:
        bell = threading.Event()
        replica = Replica("d1", served.address)
        link = RemoteDrafter(replica, facts(), bell.set, silent_s=PATIENT_S)

        def engine() -> list[tuple[str, int]]:
            told: list[tuple[str, int]] = []
            for n in range(20):
                link.ask([asking(session, n) for session in "abc"])
                heard = 0
                while heard < 3:
                    assert bell.wait(PATIENT_S)
                    bell.clear()
                    for answer in link.answers():
                        assert isinstance(answer, Draft), answer
                        told.append((answer.session, answer.round))
                        heard += 1
            link.close("a")
            return told

        async with link:
            told = await asyncio.to_thread(engine)
            await eventually(lambda: served.runner.sessions == 2)
    assert sorted(told) == [(session, n) for session in "abc" for n in range(20)]


async def test_a_request_arrives_as_it_was_asked() -> None:
    """Every field, each with a value that no default has."""
    toy = ToyDrafter()
    asked = asking(
        "tenant/request/0/1",
        2**32 - 1,
        range(150, 160),
        output_position=77,
        sampling=COUPLED,
        gamma=3,
        support_m=9,
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )
    async with wired(toy) as caller:
        assert (await caller.draft(asked)).ids
    (arrived,) = toy.requests
    assert replace(arrived, session=asked.session) == asked


async def test_two_verifiers_share_a_pass() -> None:
    toy = ToyDrafter()
    async with (
        serving(toy) as served,
        linked(served.address) as a,
        linked(served.address, facts(verifier="v2")) as b,
    ):
        toy.gate.clear()
        a.link.ask([asking("first")])
        await toy.passing()
        a.link.ask([asking("x"), asking("y")])
        b.link.ask([asking("x")])
        await eventually(lambda: served.runner.queue == 3)
        toy.gate.set()
        await a.told("first", "x", "y")
        await b.told("x")
    assert [len(sessions) for sessions in toy.passes] == [1, 3]


async def test_all_of_a_step_that_fits_is_one_message() -> None:
    async with wired(ToyDrafter()) as caller:
        figures = caller.link.figures
        sent, received = figures.messages_sent, figures.messages_received
        await caller.ask(*[asking(str(i)) for i in range(16)])
        assert figures.messages_sent - sent == 1
        assert figures.messages_received - received == 1
        caller.link.close("3")
        await caller.ask(*[asking(str(i), 1) for i in range(3)])
        assert figures.messages_sent - sent == 2


def test_a_drafter_is_a_drafter() -> None:
    """The toy keeps the protocol that it stands for."""
    toy: Drafter = ToyDrafter()
    (reply,) = toy.propose([asking("s")])
    assert isinstance(reply, Draft)
