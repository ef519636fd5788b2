"""An engine whose drafters answer later: what it waits for, what it overlaps, what it gives up, and
that its text is the target's alone whatever they do (design.md §4 L1, L3, L5; §5.6)."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dspark.core.drafts import Draft, DraftRequest, Faulty, Lost, NeedContext
from dspark.core.errors import Unavailable
from dspark.core.sampling import SamplingParams
from dspark.verifier.pacing import work_of
from dspark.verifier.tally import report_of, verdicts_of

from .remote import FEATURES, RemoteScene, ScriptedLink, World, adopt, after, remote_scene
from .toy import (
    Answer,
    Proposal,
    Script,
    ScriptedDrafter,
    greedy,
    history_rule,
    oracle,
    request,
    target_only,
)

V, TOKENS = 32, 24
RULE = history_rule(V, seed=3, loop=9)
PROMPTS = [[(7 * i + j * j) % V for j in range(5 + 4 * i)] for i in range(8)]


def honest(wrong_every: int = 5, **rest: Any) -> ScriptedDrafter:
    return ScriptedDrafter(oracle(RULE, wrong_every=wrong_every), feature_id=FEATURES, **rest)


def linked(
    *fates: Any, verify: str = "fixed:7", **config: Any
) -> tuple[RemoteScene, list[ScriptedLink], World]:
    """An engine with one link for each fate."""
    world = World()
    of = remote_scene(RULE, V, world, verify=verify, **config)
    links = []
    for i, fate in enumerate(fates):
        links.append(ScriptedLink(world, honest(), fate))
        adopt(of, f"d{i}", links[-1])
    return of, links, world


def ask(of: RemoteScene, n: int = len(PROMPTS), tokens: int = TOKENS, **sampling: Any) -> None:
    """Submit n requests."""
    params = SamplingParams(max_tokens=tokens, **sampling) if sampling else greedy(tokens)
    of.submit(*(request(str(i), prompt, params) for i, prompt in enumerate(PROMPTS[:n])))


def check(of: RemoteScene, n: int = len(PROMPTS), tokens: int = TOKENS, **how: Any) -> None:
    """Run all to their ends: the target's text, and nothing is left over."""
    of.drain()
    for i, prompt in enumerate(PROMPTS[:n]):
        assert of.answers[str(i), 0].ids == target_only(RULE, prompt, tokens, **how)
    assert not of.engine.desk.errands
    assert not any(source.sessions for source in of.engine.drafters.values())
    assert of.engine.cache.pool.owned == 0


def until_asked(of: RemoteScene) -> None:
    """Step until a draft is under way; no time passes after that."""
    while not of.engine.desk.errands:
        of.take(of.engine.step())


# --- answers as they may come ---------------------------------------------------------------------


def test_a_draft_that_comes_later_is_waited_for_and_verified() -> None:
    of, (link,), _ = linked(after(0.005))
    ask(of, 1)
    check(of, 1)
    figures, answers = of.engine.figures, of.engine.desk.answers
    assert figures.speculation.accepted > TOKENS / 2
    assert answers["used"] + answers["empty"] == len(link.asked)
    # All of it is exposed where one sequence runs alone.
    assert figures.draft_wait_s == pytest.approx(0.005 * len(link.asked), rel=0.01)
    assert of.engine.drafters["d0"].cost.seconds(1) == pytest.approx(0.005, rel=0.01)


FATES: dict[str, Any] = {
    "late by turns": lambda r, n: (0.001 if r.round % 3 else 0.2,),
    "twice": lambda r, n: (0.002, 0.004),
    "again a second later": lambda r, n: (0.002, 1.0),
    "now and then never": lambda r, n: (0.003,) if r.round % 4 else (),
    "never": lambda r, n: (),
    "out of order": lambda r, n: (0.002 + 0.003 * (sum(map(ord, r.session)) % 5),),
    "at once": lambda r, n: (0.0,),
}


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("fate", FATES)
def test_text_does_not_depend_on_when_answers_come(fate: str, seeded: bool) -> None:
    """L1 and L3. Prompts in chunks, fewer places than requests, so that all of it is mixed."""
    of, _, _ = linked(FATES[fate], verify="early-stop", max_sequences=5, prefill_chunk=16)
    if seeded:
        ask(of, seed=4)
        check(of, temperature=1.0, seed=4)
    else:
        ask(of)
        check(of)
    assert not of.engine.desk.faults
    assert (of.engine.figures.speculation.accepted > 0) == (fate != "never")


def says_nothing(history: tuple[int, ...], asked: DraftRequest) -> Proposal:
    return Proposal()


@pytest.mark.parametrize("answer", ["empty", "lost", "a lie"])
def test_a_drafter_that_never_has_a_draft_is_soon_asked_for_probes_only(answer: str) -> None:
    """Its rounds saved nothing, and how long it takes to say so is known."""
    of, (link,), _ = linked(after(0.005), verify="early-stop")
    if answer == "empty":
        link.drafter = ScriptedDrafter(says_nothing, feature_id=FEATURES)
    elif answer == "a lie":
        link.drafter = ScriptedDrafter(lambda h, r: Proposal((V + 7,), (1.0,)), feature_id=FEATURES)
    else:
        link.lie = lambda r: Lost(r.session, r.round, "busy")
    of.submit(request("a", [1, 2, 3], greedy(100)))
    of.drain()
    assert 0 < len(link.asked) <= 10


def test_a_drafter_that_was_silent_for_a_while_is_asked_again() -> None:
    """As soon as a probe finds that its drafts save something."""
    of, (link,), _ = linked(after(0.001), verify="early-stop")
    talks = link.drafter
    link.drafter = ScriptedDrafter(says_nothing, feature_id=FEATURES)
    of.submit(request("a", [1, 2, 3], greedy(300)))
    while of.engine.desk.answers["empty"] < 6:
        of.step()
    link.drafter = talks
    before = of.engine.figures.speculation.accepted
    of.drain()
    assert of.engine.figures.speculation.accepted - before > 100


def test_a_round_that_is_given_up_before_its_time_says_nothing_of_its_drafter() -> None:
    """It would look quick: all that passed is the moment until somebody thought better of it."""
    of, _, world = linked(after(0.005))
    ask(of, 1, tokens=60)
    while of.engine.desk.answers["used"] < 6:
        of.step()
    until_asked(of)
    (errand,) = of.engine.desk.errands
    (sequence,) = errand.left.values()
    cost, saving = of.engine.drafters["d0"].cost.seconds(1), sequence.saving_s
    world.now += 0.0005
    of.engine.desk.give_up([sequence])
    assert of.engine.drafters["d0"].cost.seconds(1) == cost
    assert sequence.saving_s == saving
    until_asked(of)
    world.now += 0.02
    of.engine.desk.give_up([sequence])
    assert of.engine.drafters["d0"].cost.seconds(1) > cost, "but one that is late does"
    assert saving is not None
    assert sequence.expected_saving_s < saving


def test_an_answer_counts_once_and_for_its_own_round_only() -> None:
    of, _, _ = linked(lambda r, n: (0.002, 0.003, 0.5))
    ask(of, 3)
    check(of, 3)
    answers = of.engine.desk.answers
    assert answers["used"] == of.engine.desk.received
    # Two more of each came, or would have: between two rounds, into the next, or after the end.
    assert answers["stale"] + answers["late"] > answers["used"] / 2
    assert not of.engine.desk.faults


LIES: dict[str, Any] = {
    "nobody's": Draft("x/0/0", 0, (1,), np.zeros(1, np.float32)),
    "lost, nobody's": Lost("x/0/0", 0, "?"),
    "context, nobody's": NeedContext("x/0/0", 0),
    "the future": Draft("0/0/0", 99, (1,), np.zeros(1, np.float32)),
    "no answer": 42,
    "unhashable": Draft([], 0, (1,), np.zeros(1, np.float32)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("lie", LIES)
def test_what_a_link_should_not_say_costs_nothing(lie: str) -> None:
    of, (link,), _ = linked(after(0.003))
    ask(of, 2)
    until_asked(of)
    for _ in range(3):
        link.say(LIES[lie])
    check(of, 2)
    assert of.engine.desk.answers["used"] > 0


def test_a_link_that_raises_costs_its_rounds() -> None:
    class Torn(ScriptedLink):
        def ask(self, requests: Any) -> None:
            raise OSError("torn")

    world = World()
    of = remote_scene(RULE, V, world)
    adopt(of, "d0", Torn(world, honest()))
    ask(of, 2)
    check(of, 2)
    assert of.engine.desk.faults["raised"] > 0


# --- context --------------------------------------------------------------------------------------


def test_a_reply_that_is_no_draft_is_a_fault_and_the_session_goes_on() -> None:
    """Its window is not sent again with each round, and the alert sees it."""
    of, (link,), _ = linked(after(0.003))
    ask(of, 1, tokens=60)
    while of.engine.desk.answers["used"] < 2:
        of.step()
    before = len(link.drafter.asked)
    link.lie = lambda r: Faulty(r.session, r.round, "ids outside the vocabulary")
    while of.engine.desk.faults["malformed"] < 3:
        of.step()
    link.lie = None
    check(of, 1, tokens=60)
    assert set(of.engine.desk.faults) == {"malformed"}
    assert of.engine.desk.answers["lost"] == 0
    assert all(r.start > 0 for r in link.drafter.asked[before:])


def test_context_that_a_drafter_lost_is_sent_again_within_the_round() -> None:
    of, (link,), _ = linked(after(0.002))
    ask(of, 2)
    for step in range(1000):
        if of.engine.idle:
            break
        of.step()
        if step % 7 == 0:
            link.drafter.forget("0/0/0")
    check(of, 2)
    assert of.engine.desk.faults["need context"] > 0
    assert of.engine.desk.answers["used"] == sum(link.asked) - of.engine.desk.faults["need context"]


def test_a_drafter_that_needs_context_for_ever_is_asked_twice_a_round() -> None:
    of, (link,), _ = linked(after(0.002))
    link.drafter.propose = lambda requests: [  # type: ignore[method-assign]
        NeedContext(r.session, 0) for r in requests
    ]
    ask(of, 1)
    check(of, 1)
    # One ask and one more a round; the last token's round has no room for a draft.
    assert len(link.asked) == 2 * (TOKENS - 2)


def test_a_session_opens_with_the_window_that_is_read() -> None:
    world = World()
    of = remote_scene(RULE, V, world)
    asked: list[tuple[int, int]] = []

    def script(history: Any, request: Any) -> Proposal:
        asked.append((request.start, request.anchor_position))
        return Proposal()

    class Windowed(ScriptedDrafter):
        """Remembers nothing before the window, and asks for nothing there."""

        def _answer(self, request: Any) -> Any:
            script((), request)
            return Draft(request.session, request.round, (), np.zeros(0, np.float32))

    adopt(of, "d0", ScriptedLink(world, Windowed(script), context_window=8))
    of.ask(request("a", range(30), greedy(4)))
    assert asked[0] == (22, 30)  # 30 of the prompt; the anchor is the first new token
    assert asked[1] == (30, 31)


# --- drafters that die, drain, and come back ------------------------------------------------------


def test_a_link_that_dies_in_a_round_costs_no_wait_at_all() -> None:
    of, (link,), _ = linked(after(0.2))
    ask(of, 3)
    until_asked(of)
    link.cut()
    waited_s, steps = of.engine.figures.draft_wait_s, of.engine.figures.steps
    of.step()
    assert of.engine.figures.steps == steps + 1, "a step was to be done at once"
    check(of, 3)
    assert of.engine.figures.draft_wait_s == waited_s
    assert of.engine.desk.answers["lost"] == 3


def test_another_replica_takes_over_with_the_features_kept() -> None:
    """The scripted drafter checks that features are whole and of the right tokens."""
    of, (first, second), _ = linked(after(0.002), after(0.002))
    ask(of, 4)
    of.step(12)
    first.cut()
    check(of, 4)
    assert not of.engine.desk.faults, "a session did not open with what it needs"
    assert len(second.asked) > len(first.asked)
    assert of.engine.figures.speculation.accepted_length > 3


def test_prompt_lookup_helps_out_until_a_link_is_back() -> None:
    world = World()
    ngram = ScriptedDrafter(oracle(RULE, wrong_every=3), drafter_id="ngram")
    ngram.card = ScriptedDrafter(oracle(RULE), drafter_id="ngram").card
    object.__setattr__(ngram.card, "kind", "ngram")
    of = remote_scene(RULE, V, world, ngram, verify="fixed:7")
    link = ScriptedLink(world, honest(), after(0.002))
    adopt(of, "d0", link)
    ask(of, 2, tokens=60)
    of.step(10)
    assert not ngram.asked
    link.cut()
    of.step(6)
    helped = len(ngram.asked)
    assert helped > 0
    assert all(r.features is None for r in ngram.asked)
    link.available = True
    asked = len(link.asked)
    of.drain()
    check(of, 2, tokens=60)
    assert len(link.asked) > asked
    assert len(ngram.asked) <= helped + 2


def test_without_any_drafter_it_decodes_plainly_and_goes_back() -> None:
    of, (link,), _ = linked(after(0.002))
    ask(of, 1, tokens=60)
    of.step(6)
    link.cut()
    of.step()
    waited_s = of.engine.figures.draft_wait_s
    of.step(5)
    assert of.engine.figures.draft_wait_s == waited_s
    link.available = True
    asked = len(link.asked)
    check(of, 1, tokens=60)
    assert len(link.asked) > asked


def test_a_draining_drafter_loses_its_sessions_step_by_step() -> None:
    of, (old, new), _ = linked(after(0.002), after(0.002))
    for i in range(8):
        of.submit(request(str(i), PROMPTS[i], greedy(60), drafter="d0"))
    while len(of.engine.drafters["d0"].sessions) < 8:
        of.step()
    assert not of.engine.drafters["d1"].sessions  # each lease named the first
    old.draining = True
    of.submit(request("late", PROMPTS[0], greedy(60), drafter="d0"))
    left = []
    while of.engine.drafters["d0"].sessions:
        before = of.engine.figures.steps
        of.step()
        if of.engine.figures.steps > before:
            left.append(len(of.engine.drafters["d0"].sessions))
    assert all(a - b <= 2 for a, b in zip([8, *left], left, strict=False))
    assert "late/0/0" not in old.drafter.closed
    of.drain()
    assert not of.engine.desk.faults
    assert len(new.asked) > 0


def test_a_draining_drafter_is_better_than_none() -> None:
    of, (link,), _ = linked(after(0.002))
    ask(of, 2)
    of.step(4)
    link.draining = True
    asked = len(link.asked)
    check(of, 2)
    assert len(link.asked) > asked


# --- two groups -----------------------------------------------------------------------------------


def in_steps(draft_s: float, n: int = 8) -> tuple[RemoteScene, list[set[str]]]:
    """n sequences whose whole blocks stand; who was in each step, without the first ones, in which
    D is learnt, and the last."""
    of, (link,), _ = linked(after(draft_s), max_sequences=n, kv_tokens=8192)
    link.drafter = ScriptedDrafter(oracle(RULE), feature_id=FEATURES)
    of.submit(*(request(str(i), [i, 2, 3], greedy(160)) for i in range(n)))
    steps = []
    while not of.engine.idle:
        told = of.step()
        if told:
            steps.append({key[0] for key, _ in told})
    return of, steps[4:-4]


@pytest.mark.parametrize(
    ("draft_s", "round_s", "still_s"), [(0.040, 0.066, 0.014), (0.021, 0.052, 0)]
)
def test_two_groups_really_alternate(draft_s: float, round_s: float, still_s: float) -> None:
    """Beside T(64) = 42 and T(32) = 26 ms one group takes 42 ms and D a round. With D = 40 ms a
    group is back 14 ms after the other is verified, with 21 ms before that: then all eight are
    ready, and those that have been for longest go first."""
    of, steps = in_steps(draft_s)
    for one, next_one in itertools.pairwise(steps):
        assert len(one) == 4
        assert not one & next_one
    figures = of.engine.figures
    assert figures.draft_wait_s / of.world.now == pytest.approx(still_s / round_s, abs=0.05)
    assert of.world.now / (figures.steps / 2) == pytest.approx(round_s, rel=0.05)


def test_a_ready_sequence_waits_for_one_that_is_nearly_there() -> None:
    """Two replicas, one a millisecond slower; steps cost the same for one sequence and for two."""
    world = World()
    of = remote_scene(RULE, V, world, table={1: 0.030, 64: 0.030}, verify="fixed:7")
    for name, seconds in (("d0", 0.005), ("d1", 0.006)):
        adopt(of, name, ScriptedLink(world, honest(), after(seconds)))
    ask(of, 2)
    check(of, 2)
    widths = of.engine._backend.widths  # type: ignore[attr-defined]
    assert widths[4:-6] == [2] * len(widths[4:-6])


def test_of_more_than_a_group_those_go_first_that_are_ready_for_longest() -> None:
    of, _, world = linked(after(0.040), max_sequences=8, kv_tokens=8192)
    for _ in range(10):
        of.engine.drafters["d0"].cost.observe(8, 0.040)
        of.engine.drafters["d0"].cost.observe(4, 0.040)
    of.submit(*(request(str(i), [i, 2, 3], greedy(160)) for i in range(8)))
    until_asked(of)
    world.run_to(world.now + 0.050)
    of.engine.desk.collect()
    order = [3, 0, 7, 4, 1, 6, 2, 5]
    for sequence in of.engine.running:
        assert sequence.draft is not None
        came = order.index(int(sequence.state.request.request_id))
        sequence.draft = replace(sequence.draft, number=came)
    told = of.step()
    assert {int(key[0]) for key, _ in told} == set(order[:4])


def by_chance(share: float) -> Script:
    """The target's next token with this probability at each position, and confidence that says
    so."""
    logit = math.log(share / (1 - share))
    right = oracle(RULE, logit=logit)

    def script(history: tuple[int, ...], request: DraftRequest) -> Proposal:
        block = right(history, request)
        rng = np.random.default_rng([*history[:6], len(history)])
        wrong = rng.random(len(block.ids)) >= share
        return Proposal(
            tuple((token + int(off)) % V for token, off in zip(block.ids, wrong, strict=True)),
            block.logits,
        )

    return script


# Seconds of steps of B tokens: by the token, by the step, and in between.
TABLES = [{1: 0.010, 8: 0.017, 100: 0.1}, {1: 0.010, 8: 0.012, 100: 0.03}, {1: 0.015, 100: 0.15}]


@pytest.mark.parametrize("share", [0.5, 0.7, 0.85])
@pytest.mark.parametrize("draft_s", [0.004, 0.015, 0.025])
@pytest.mark.parametrize("table", TABLES)
def test_drafts_that_do_not_pay_cost_next_to_nothing(
    table: dict[int, float], draft_s: float, share: float
) -> None:
    """Eight requests, by the target's time alone. What hides behind other steps is not free: they
    are smaller steps. A tenth is for learning in the first of 200 tokens what drafts take."""
    world = World()
    of = remote_scene(RULE, V, world, table=table, verify="early-stop", kv_tokens=8192)
    drafter = ScriptedDrafter(by_chance(share), feature_id=FEATURES)
    adopt(of, "d0", ScriptedLink(world, drafter, after(draft_s)))
    ask(of, 8, tokens=200)
    check(of, 8, tokens=200)
    plain_s = 200 * float(np.interp(8, list(table), list(table.values())))
    assert world.now < 1.1 * plain_s


def test_the_last_one_left_is_drafted_for_though_many_were_not_worth_it() -> None:
    """What drafts save is tokens, and alone a token costs a whole step."""
    world = World()
    of = remote_scene(RULE, V, world, table=TABLES[1], verify="early-stop", kv_tokens=8192)
    link = ScriptedLink(world, ScriptedDrafter(by_chance(0.85), feature_id=FEATURES), after(0.015))
    adopt(of, "d0", link)
    ask(of, 8, tokens=60)
    of.submit(request("long", [1, 2, 3], greedy(300)))
    check(of, 8, tokens=60)
    assert link.asked[-20:] == [1] * 20
    # A step and a draft for some four tokens; without drafts 10 ms a token.
    alone = [w for w in of.engine._backend.widths if w == 1]  # type: ignore[attr-defined]
    assert len(alone) < 100


def test_one_group_where_drafts_are_quick() -> None:
    of, steps = in_steps(0.004)
    assert all(len(step) == 8 for step in steps)
    assert of.world.now / of.engine.figures.steps == pytest.approx(0.046, rel=0.05)


def test_a_prompt_is_worked_on_while_drafts_are_under_way() -> None:
    of, (link,), _ = linked(after(0.050), prefill_chunk=16)
    ask(of, 1)
    while len(link.asked) < 3 or not of.engine.desk.errands:
        of.take(of.engine.step())
        of.world.run_to(of.world.now + of.engine.patience)
    of.submit(request("new", range(30), greedy(2)))
    before = of.engine.figures.prefill_tokens
    of.step()
    assert of.engine.figures.prefill_tokens == before + 16
    of.drain()


# --- what happens meanwhile -----------------------------------------------------------------------


@pytest.mark.parametrize("end", ["cancel", "deadline", "fail", "newer attempt"])
def test_a_sequence_that_ends_under_way_leaves_nothing(end: str) -> None:
    of, (link,), world = linked(after(0.05))
    deadline = 0.03 if end == "deadline" else None
    of.submit(request("a", PROMPTS[3], greedy(TOKENS), deadline=deadline))
    until_asked(of)
    if end == "cancel":
        of.engine.cancel("a")
    elif end == "fail":
        of.engine.fail(Unavailable("the engine stops"))
    elif end == "newer attempt":
        of.engine.submit(request("a", PROMPTS[3], greedy(TOKENS), attempt=1))
        of.take(of.engine.take_events())
        of.answers["a", 0] = Answer()
    of.drain()
    assert of.engine.cache.pool.owned == 0
    assert not of.engine.desk.errands
    assert not link.drafter.sessions
    world.run_to(world.now + 1.0)  # its answer comes all the same
    of.take(of.engine.step())
    assert of.engine.idle


def test_blocks_may_be_taken_from_a_sequence_under_way() -> None:
    """A pool too small for all: the text stays right, and features are made again."""
    of, _, _ = linked(after(0.01), kv_tokens=12 * 16, prefill_chunk=16, verify="early-stop")
    ask(of, tokens=40)
    check(of, tokens=40)
    assert of.engine.preemptions > 0
    assert not of.engine.desk.faults


def test_a_paused_reader_keeps_the_draft_that_comes() -> None:
    of, (link,), world = linked(after(0.01))
    ask(of, 1)
    until_asked(of)
    of.engine.pause("0", 0, True)
    world.run_to(world.now + 0.02)
    of.take(of.engine.step())
    (sequence,) = of.engine.running
    assert sequence.draft is not None
    of.engine.pause("0", 0, False)
    asked = len(link.asked)
    of.step()
    assert len(link.asked) == asked + 1
    check(of, 1)


def test_patience_ends_however_long_nothing_comes() -> None:
    """A drafter that was always quick and then falls silent, without anybody saying that it is
    lost: a wait ends by what it could still win, and then it is known to be slow."""
    silent = [False]
    of, (link,), world = linked(lambda r, n: () if silent[0] else (0.004,), verify="early-stop")
    ask(of, 4, tokens=200)
    while len(link.asked) < 12:
        of.step()
    silent[0] = True
    asked, steps, begin = len(link.asked), of.engine.figures.steps, world.now
    waited_s = [of.engine.figures.draft_wait_s]
    while not of.engine.idle:
        of.step()
        if of.engine.figures.steps > steps:
            steps = of.engine.figures.steps
            waited_s.append(of.engine.figures.draft_wait_s)
    check(of, 4, tokens=200)
    # Plain decoding of four commits a token each in 12 ms, drafts 4.9. One may be overdue by
    # 4.9 · 12 - 29 ms before waiting pays no more, and a look sees it after twice as long at most.
    waits = np.diff(waited_s)
    mean_s = of.engine.drafters["d0"].cost.seconds(4)
    assert 0.012 < waits.max() < mean_s + 2 * 0.030
    # Each time it is believed less; then it is probed in a hundredth of the time.
    assert len(link.asked) - asked < 10
    assert waits.sum() < 0.2 * (world.now - begin)


# --- what is told ---------------------------------------------------------------------------------


def test_reports_name_replicas_and_calibration_checkpoints() -> None:
    of, _, _ = linked(after(0.004), after(0.004))
    of.engine.take_tally()
    ask(of, 4)
    check(of, 4)
    tally, crowd = of.engine.take_tally()
    report = report_of(tally, crowd, "v1", 1, verdicts_of(tally.drafts))
    assert [use.drafter for use in report.drafters] == ["d0", "d1"]
    assert all(0 < use.exposed_s < 0.01 for use in report.drafters)
    assert {c.drafter_id for t in report.tenants for c in t.verdicts} == {"scripted"}


def test_who_is_in_a_step_is_decided_without_looking_at_a_draft() -> None:
    """L2: the load of what is ready is the same whatever its draft says."""
    of, _, world = linked(after(0.002))
    ask(of, 1)
    until_asked(of)
    world.run_to(1.0)
    of.engine.desk.collect()
    (sequence,) = of.engine.running
    hand = sequence.draft
    assert hand is not None
    before = work_of([sequence])
    for survival in (np.empty(0), np.zeros(7), np.ones(7)):
        sequence.draft = replace(hand, survival=survival, draft=replace(hand.draft, ids=(1,)))
        assert work_of([sequence]) == before
