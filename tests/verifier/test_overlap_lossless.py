"""L2 of design.md §4 with drafters elsewhere: sampled text follows the target's law whatever comes
when. χ² as in test_lossless.py, whose toy and law these are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .remote import RemoteScene, ScriptedLink, World, adopt, remote_scene
from .test_lossless import ALPHA, CERTAIN, GAMMA, PLAIN, STATES, P, drafter, law, triples_p_value
from .toy import bigram_rule, request

# Seconds of a step of B tokens: nearly as many for few as for many, so drafts are worth a wait.
STEPS = {1: 0.010, 64: 0.040}


def fate(seed: int, usual_s: float) -> Any:
    """In time, late, twice, never, out of order: by chance that knows nothing of a draft. usual_s:
    seconds of most replies, at least."""
    rng = np.random.default_rng(seed)

    def of(_: Any, n: int) -> tuple[float, ...]:
        kind = rng.random()
        if kind < 0.1:
            return (0.2,)
        if kind < 0.15:
            return ()
        if kind < 0.3:
            return 0.002, 0.02
        return (usual_s * (1 + rng.random()),)

    return of


def scene(links: list[ScriptedLink], world: World, n: int, verify: str, R: int = 12) -> RemoteScene:
    of = remote_scene(
        bigram_rule(P), STATES, world, table=STEPS, verify=verify, max_sequences=R, max_waiting=n,
        gamma=GAMMA, seed=21, kv_tokens=1024,
    )  # fmt: skip
    for i, link in enumerate(links):
        adopt(of, f"d{i}", link)
    return of


def sampled(of: RemoteScene, n: int) -> list[list[int]]:
    answers = of.ask(*(request(str(i), [i % STATES], PLAIN) for i in range(n)))
    return [answer.ids for answer in answers]


@pytest.mark.parametrize(
    ("verify", "usual_s"), [("early-stop", 0.001), ("top-k", 0.001), ("fixed:3", 0.015)]
)
def test_sampled_text_follows_the_targets_law_whatever_comes_when(
    verify: str, usual_s: float
) -> None:
    """Where replies take as long as steps, which a policy has to insist on here, in two groups."""
    world = World()
    links = [ScriptedLink(world, drafter(), fate(seed, usual_s)) for seed in (1, 2)]
    of = scene(links, world, 1600, verify)
    texts = sampled(of, 1600)
    assert triples_p_value(texts, law(PLAIN)) > ALPHA
    # Or it is no test: drafts stood, some fell, and many were late, twice or lost.
    figures, answers = of.engine.figures.speculation, of.engine.desk.answers
    assert 0 < figures.accepted < figures.verified
    assert min(answers["given up"], answers["late"] + answers["stale"]) > 20
    assert not of.engine.desk.faults


def test_a_drafter_that_delays_by_what_it_drew_is_seen_by_this_test() -> None:
    """Power, and the reason why drafters are authenticated: one that holds its reply back for ever
    when it drew a token that it does not like biases the text, as one that lies about q does."""
    world = World()

    class Spiteful(ScriptedLink):
        def _saying(self, answer: Any, of: Any) -> Any:
            kept = super()._saying(answer, of)
            return (lambda: None) if answer.ids and answer.ids[0] == 1 else kept

    of = scene([Spiteful(world, drafter(), lambda r, n: (0.002,))], world, 700, "fixed:5", R=16)
    assert triples_p_value(sampled(of, 700), law(PLAIN)) < CERTAIN
