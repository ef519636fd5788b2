"""A drafter's sessions are a cache (design.md §7): what they hold never changes a draft, whatever
their mates, their history, the window, and what was forgotten.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark.core.drafts import Draft, DraftRequest, NeedContext
from dspark.core.errors import ConfigError, InvalidRequest
from dspark.models.drafters.drafting import ModelDrafter
from dspark.models.drafters.sessions import FIRST_SLOTS

from .plain import plain_draft
from .scene import GAMMA, KINDS, NATIVE, D, Talk, only, tiny, tiny_drafter

MODELS = {name: tiny_drafter(name.removeprefix("native-")) for name in (*KINDS, *NATIVE)}
# Two ways to the same float32 sum; a missing or doubled position moves logits by more than 0.01.
CLOSE = 1e-5


def drafter(name: str, **options: int) -> ModelDrafter:
    return tiny(name, model=MODELS[name], **options)


def check(drafter: ModelDrafter, name: str, reply: Draft, talk: Talk, anchor: int) -> None:
    """A reply is what plain drafting over the window says."""
    ids, confidence = plain_draft(
        MODELS[name], talk.features, talk.ids[: anchor + 1], window=drafter.context_window
    )
    assert list(reply.ids) == ids[: len(reply.ids)]
    assert len(reply.ids) == len(ids)
    np.testing.assert_allclose(reply.confidence_logits, confidence, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("name", [*KINDS, *NATIVE])
def test_cached_context_is_recomputed_context(name: str) -> None:
    """Rounds that bring 1 to 6 positions each, from a context of 1 to one past the first slots."""
    mine, talk = drafter(name), Talk("a", FIRST_SLOTS + 40)
    anchors = [1, 2, 5, 11, 12, 60, FIRST_SLOTS - 2, FIRST_SLOTS + 3, FIRST_SLOTS + 9]
    start = 0
    for n, anchor in enumerate(anchors):
        reply = only(mine.propose([talk.ask(start, anchor, n)]))
        check(mine, name, reply, talk, anchor)
        start = anchor


@pytest.mark.parametrize("name", [*KINDS, *NATIVE])
def test_a_ragged_batch_is_one_by_one(name: str) -> None:
    """Contexts of 1 to 300, new positions of 1 to 300, all in one call."""
    together, alone = drafter(name), drafter(name)
    talks = [Talk(str(i), 320, seed=i) for i in range(5)]
    anchors = [1, 7, 40, 129, 300]
    together.propose([talk.ask(0, 30) for talk in talks[3:]])
    alone.propose([talk.ask(0, 30) for talk in talks[3:]])
    asked = [
        talk.ask(30 if i > 2 else 0, anchor, 1)
        for i, (talk, anchor) in enumerate(zip(talks, anchors, strict=True))
    ]
    for request, reply in zip(asked, together.propose(asked), strict=True):
        assert isinstance(reply, Draft)
        single = only(alone.propose([request]))
        assert reply.ids == single.ids
        np.testing.assert_allclose(
            reply.confidence_logits, single.confidence_logits, atol=CLOSE, rtol=CLOSE
        )
        assert reply.session == request.session


@pytest.mark.parametrize("name", ["markov", "eagle3", "native-markov"])
@pytest.mark.parametrize("window", [1, 7, 16])
def test_a_window_reads_the_last_positions(name: str, window: int) -> None:
    """While it fills, when it is full, and after the ring has gone round several times."""
    mine, talk = drafter(name, window=window), Talk("a", 90)
    start = 0
    for n, anchor in enumerate([1, 4, 7, 8, 16, 18, 33, 34, 80]):
        reply = only(mine.propose([talk.ask(start, anchor, n)]))
        check(mine, name, reply, talk, anchor)
        start = anchor


def test_the_cost_of_context_is_paid_once() -> None:
    """Rows that go through the key projection: each position of context once, and each block."""
    model = tiny_drafter("markov")
    mine, talk = tiny("markov", model=model), Talk("a", 300)
    seen: list[int] = []
    keys = model.get_submodule("layers.0.self_attn.k_proj")
    keys.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    for n, (start, anchor) in enumerate([(0, 200), (200, 203), (203, 204), (190, 210)]):
        only(mine.propose([talk.ask(start, anchor, n)]))
    assert seen == [200, GAMMA, 3, GAMMA, 1, GAMMA, 6, GAMMA]


def test_the_window_is_the_checkpoints_own() -> None:
    model = tiny_drafter("markov", window=6)
    assert tiny("markov", model=model).context_window == 6
    assert tiny("markov", model=model, window=9).context_window == 9


def test_a_missing_session_is_asked_for() -> None:
    mine, talk = drafter("markov"), Talk("a", 50)
    assert mine.propose([talk.ask(10, 20)]) == [NeedContext("a", 0)]
    assert isinstance(only(mine.propose([talk.ask(0, 20)])), Draft)
    mine.close("a")
    mine.close("nobody")
    assert mine.propose([talk.ask(20, 22, 1)]) == [NeedContext("a", 0)]


def test_a_missing_session_needs_no_more_than_the_window() -> None:
    mine, talk = drafter("markov", window=8), Talk("a", 50)
    assert mine.propose([talk.ask(33, 40)]) == [NeedContext("a", 32)]
    reply = only(mine.propose([talk.ask(32, 40)]))
    check(mine, "markov", reply, talk, 40)
    reply = only(mine.propose([talk.ask(40, 43, 1)]))
    check(mine, "markov", reply, talk, 43)


def test_a_lagging_session_is_asked_for_what_it_lacks() -> None:
    mine, talk = drafter("markov", window=16), Talk("a", 80)
    only(mine.propose([talk.ask(0, 20)]))
    assert mine.propose([talk.ask(22, 25, 1)]) == [NeedContext("a", 20)]
    check(mine, "markov", only(mine.propose([talk.ask(20, 25, 1)])), talk, 25)
    assert mine.propose([talk.ask(60, 70, 2)]) == [NeedContext("a", 54)]  # a new window
    check(mine, "markov", only(mine.propose([talk.ask(54, 70, 2)])), talk, 70)


@pytest.mark.parametrize("name", ["markov", "eagle3", "native-markov"])
def test_a_session_that_jumps_back(name: str) -> None:
    """To an earlier anchor, and to another text: what no longer holds is not looked at."""
    mine, talk = drafter(name), Talk("a", 60)
    only(mine.propose([talk.ask(0, 40)]))
    check(mine, name, only(mine.propose([talk.ask(0, 25, 1)])), talk, 25)
    check(mine, name, only(mine.propose([talk.ask(25, 30, 2)])), talk, 30)
    other = talk.changed(at=28)
    check(mine, name, only(mine.propose([other.ask(20, 45, 3)])), other, 45)
    third = other.changed(at=1)
    check(mine, name, only(mine.propose([third.ask(0, 44, 4)])), third, 44)


def test_a_jump_back_behind_the_ring_needs_context() -> None:
    """The ring holds the last 8 positions before 40, the anchor 38 reads two that are gone."""
    mine, talk = drafter("markov", window=8), Talk("a", 60)
    only(mine.propose([talk.ask(0, 40)]))
    assert mine.propose([talk.ask(35, 38, 1)]) == [NeedContext("a", 30)]
    check(mine, "markov", only(mine.propose([talk.ask(30, 38, 1)])), talk, 38)


def test_a_pair_depends_on_the_id_after_it() -> None:
    """EAGLE-3 reads (feature i, id i + 1): another anchor makes the pair before it stale, whose
    feature the request does not bring."""
    mine, talk = drafter("eagle3"), Talk("a", 60)
    only(mine.propose([talk.ask(0, 20)]))
    other = talk.changed(at=20)
    assert other.ids[20] != talk.ids[20]
    assert mine.propose([other.ask(20, 24, 1)]) == [NeedContext("a", 19)]
    check(mine, "eagle3", only(mine.propose([other.ask(19, 24, 1)])), other, 24)
    # A parallel drafter does not care: features before the anchor are the same.
    mine = drafter("markov")
    only(mine.propose([talk.ask(0, 20)]))
    check(mine, "markov", only(mine.propose([other.ask(20, 24, 1)])), other, 24)


@pytest.mark.parametrize("name", ["markov", "eagle3", "native-markov"])
@given(data=st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_history_of_requests(name: str, data: st.DataObject) -> None:
    """Whatever was asked before, in whatever order: a reply is a plain draft, and a NeedContext
    that is obeyed ends in one."""
    window = data.draw(st.sampled_from([3, 8, 1000]), "window")
    mine = drafter(name, window=window, max_sessions=2)
    talks = [Talk(name, 40, seed=seed) for seed, name in enumerate("abc")]
    untold = [40, 40, 40]  # from where a text differs from the one that was told last
    for n in range(data.draw(st.integers(1, 8), "calls")):
        which = data.draw(st.integers(0, 2), "session")
        if data.draw(st.booleans(), "another text"):
            at = data.draw(st.integers(1, 39), "from")
            talks[which], untold[which] = talks[which].changed(at), min(untold[which], at)
        talk = talks[which]
        anchor = data.draw(st.integers(1, 39), "anchor")
        start = data.draw(st.integers(0, min(anchor, untold[which])), "start")
        reply = mine.propose([talk.ask(start, anchor, n)])[0]
        for _ in range(2):
            if isinstance(reply, Draft):
                break
            assert 0 <= reply.start < anchor
            reply = mine.propose([talk.ask(reply.start, anchor, n)])[0]
        assert isinstance(reply, Draft)
        check(mine, name, reply, talk, anchor)
        if anchor >= untold[which]:
            untold[which] = 40


def test_the_same_round_gets_the_same_reply() -> None:
    mine, talk = drafter("markov"), Talk("a", 50)
    sampled = replace(
        talk.ask(0, 20).sampling,
        mode="rejection",
        temperature=1.0,
    )
    first = only(mine.propose([talk.ask(0, 20, 3, sampling=sampled)]))
    assert only(mine.propose([talk.ask(0, 20, 3, sampling=sampled)])) is first
    assert only(mine.propose([talk.ask(20, 20, 3, sampling=sampled)])) is first
    again = mine.propose([talk.ask(0, 20, 3, sampling=sampled), talk.ask(0, 20, 3)])
    assert again == [first, first]
    assert only(mine.propose([talk.ask(20, 20, 4, sampling=sampled)])) is not first


def test_a_session_twice_in_one_call() -> None:
    mine, talk = drafter("markov"), Talk("a", 50)
    replies = mine.propose([talk.ask(0, 20, 0), talk.ask(20, 24, 1), talk.ask(0, 20, 0)])
    for reply, anchor in zip(replies, (20, 24, 20), strict=True):
        assert isinstance(reply, Draft)
        check(mine, "markov", reply, talk, anchor)


def test_least_recently_used_goes_first() -> None:
    mine = drafter("markov", max_sessions=2)
    a, b, c = (Talk(name, 50, seed=i) for i, name in enumerate("abc"))
    for talk in (a, b, a, c):
        only(mine.propose([talk.ask(0, 20, 5)]))
    assert "b" not in mine.sessions
    assert "a" in mine.sessions
    check(mine, "markov", only(mine.propose([a.ask(20, 22, 6)])), a, 22)


def test_a_call_keeps_all_of_its_own() -> None:
    """Bounds hold between calls; none of a call's sessions is dropped while it is served."""
    mine = drafter("markov", max_sessions=2, max_bytes=1)
    talks = [Talk(str(i), 50, seed=i) for i in range(5)]
    asked = [talk.ask(0, 20) for talk in talks]
    for talk, reply in zip(talks, mine.propose(asked), strict=True):
        assert isinstance(reply, Draft)
        check(mine, "markov", reply, talk, 20)
    assert len(mine.sessions) == 5
    only(mine.propose([talks[3].ask(20, 21, 1)]))
    assert len(mine.sessions) == 1


def test_bytes_are_counted() -> None:
    mine = drafter("markov")
    assert mine.sessions.nbytes == 0
    talk = Talk("a", FIRST_SLOTS + 50)
    only(mine.propose([talk.ask(0, 20)]))
    # 2 layers, keys and values, 2 heads of 16 float32
    assert mine.sessions.nbytes == (FIRST_SLOTS + GAMMA) * 2 * 2 * 2 * 16 * 4
    only(mine.propose([talk.ask(20, FIRST_SLOTS + 40, 1)]))
    assert mine.sessions.nbytes == (2 * FIRST_SLOTS + GAMMA) * 2 * 2 * 2 * 16 * 4
    mine.close("a")
    assert mine.sessions.nbytes == 0


@pytest.mark.parametrize("name", ["markov", "eagle3", "native-markov"])
def test_fewer_tokens_are_a_prefix(name: str) -> None:
    """A block is always whole inside; a request for less gets its beginning."""
    mine, talk = drafter(name), Talk("a", 50)
    whole = only(mine.propose([talk.ask(0, 20)]))
    asked = [Talk(str(i), 50).ask(0, 20, gamma=i) for i in range(GAMMA + 3)]
    for i, reply in enumerate(mine.propose(asked)):
        assert isinstance(reply, Draft)
        assert reply.ids == whole.ids[:i]
        np.testing.assert_allclose(
            reply.confidence_logits, whole.confidence_logits[:i], atol=CLOSE, rtol=CLOSE
        )


def test_the_first_position_of_a_text() -> None:
    """Nothing stands before it: a block without context, and no pair at all."""
    talk = Talk("a", 5)
    reply = only(drafter("markov").propose([talk.ask(0, 0)]))
    check(drafter("markov"), "markov", reply, talk, 0)
    mine = drafter("eagle3")
    assert only(mine.propose([talk.ask(0, 0)])).ids == ()
    check(mine, "eagle3", only(mine.propose([talk.ask(0, 2, 1)])), talk, 2)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"features": None}, "features: None must be"),
        ({"features": np.zeros((20, D + 1), np.float32)}, f"must be [20, {D}]"),
        ({"features": np.zeros((19, D), np.float32)}, f"(19, {D}) must be [20, {D}]"),
        ({"features": np.zeros((20, D), np.float64)}, "'float64' must be float32"),
        ({"tokens": (1,) * 20 + (160,)}, "160 must be below 160"),
        ({"tokens": (1,) * 20 + (-1,)}, "at least 0"),
    ],
)
def test_a_malformed_request_is_refused(changes: dict[str, object], told: str) -> None:
    """By name and with both values, and nothing of it or of its mates is kept."""
    mine, talk, mate = drafter("markov"), Talk("a", 50), Talk("b", 50)
    with pytest.raises(InvalidRequest) as refused:
        mine.propose([mate.ask(0, 20), talk.ask(0, 20, **changes)])
    assert told in str(refused.value)
    assert not len(mine.sessions)


def test_sampling_needs_a_temperature() -> None:
    mine, talk = drafter("markov"), Talk("a", 50)
    request: DraftRequest = talk.ask(0, 20)
    for mode in ("rejection", "coupled"):
        cold = replace(request.sampling, mode=mode)
        with pytest.raises(InvalidRequest, match="temperature"):
            mine.propose([replace(request, sampling=cold)])


@pytest.mark.parametrize("option", ["window", "max_sessions", "max_bytes"])
def test_bounds_are_checked(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}: 0"):
        drafter("markov", **{option: 0})


def test_what_broke_is_forgotten() -> None:
    """A pass that fails leaves no session behind that believes to hold what it does not."""
    model = tiny_drafter("markov")
    mine, talk = tiny("markov", model=model), Talk("a", 50)
    only(mine.propose([talk.ask(0, 20)]))

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    hook = model.get_submodule("layers.1.mlp").register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError):
        mine.propose([talk.ask(20, 25, 1)])
    hook.remove()
    assert mine.propose([talk.ask(25, 30, 2)]) == [NeedContext("a", 0)]
