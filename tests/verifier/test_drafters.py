"""Which drafter drafts for whom: wishes, leases, versions that come and go with their features."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from dspark.core.drafts import Draft, DrafterCard, DraftRequest, DraftSampling
from dspark.core.errors import ConfigError, InvalidRequest, ModelError
from dspark.core.requests import Speculation
from dspark.core.sampling import SamplingMode
from dspark.models.targets.features import FeatureProjection
from dspark.verifier.drafters import Drafters, Promise
from dspark.verifier.sources import Bell, LinkSource
from dspark.verifier.versions import KEEP_S

from .remote import PROJECTION, Fate, RemoteScene, ScriptedLink, World, adopt, after, remote_scene
from .toy import ScriptedDrafter, greedy, history_rule, lookup, oracle, request, target_only

V = 32
RULE = history_rule(V, seed=3, loop=9)
OLD, NEW = PROJECTION, FeatureProjection((2,))


class CardedLink(ScriptedLink):
    """A link whose card says what a test likes."""

    def __init__(self, **card: Any) -> None:
        super().__init__(World(), ScriptedDrafter(oracle(RULE)))
        self._card = DrafterCard(**{"drafter_id": "x", "kind": "dspark", "gamma": 7, **card})

    @property
    def card(self) -> DrafterCard:
        return self._card


def roster(*local: Any, **links: CardedLink) -> Drafters:
    named = {drafter.card.drafter_id: drafter for drafter in local}
    drafters = Drafters(named, Counter(), Counter())
    for name, link in links.items():
        drafters.add(name, link)
    return drafters


def promised(drafters: Drafters, wish: str | None = None, gamma: int = 7, **rest: Any) -> Promise:
    wishes = Speculation(drafter=wish)
    return drafters.promise(request("a", [1], greedy(), speculation=wishes, **rest), gamma)


def trained(drafter_id: str, feature_id: str = "f", **card: Any) -> CardedLink:
    return CardedLink(drafter_id=drafter_id, feature_id=feature_id, feature_width=3, **card)


# --- what a request is promised -------------------------------------------------------------------


def test_the_newest_version_is_the_default_and_a_lease_names_another() -> None:
    drafters = roster(lookup(), d1=trained("one", "f1"), d2=trained("two", "f2", gamma=5))
    assert promised(drafters) == Promise("two", "f2", 5)
    assert promised(drafters, drafter="d1") == Promise("one", "f1", 7)
    assert promised(drafters, drafter="gone") == Promise("two", "f2", 5)
    assert promised(drafters, "one", drafter="d2") == Promise("one", "f1", 7), "the wish is first"
    assert promised(drafters, "dspark") == Promise("two", "f2", 5)
    assert promised(drafters, "ngram") == Promise("ngram", "", 7)
    assert promised(drafters, "none") == promised(drafters, gamma=0) == Promise()


def test_a_version_that_comes_back_is_the_newest_again() -> None:
    drafters = roster(d1=trained("one"), d2=trained("two"))
    drafters.add("d3", trained("one"))
    assert promised(drafters).drafter == "two", "one more replica of it is no new version"
    drafters.remove("d1")
    drafters.remove("d3")
    drafters.add("d4", trained("one"))
    assert promised(drafters).drafter == "one"


def test_a_trained_drafter_goes_before_prompt_lookup_elsewhere() -> None:
    drafters = roster(d1=trained("one"), d2=CardedLink(drafter_id="ngram", kind="ngram"))
    assert promised(drafters) == Promise("one", "f", 7)
    assert promised(drafters, "ngram") == Promise("ngram", "", 7)


def test_a_version_that_is_draining_is_taken_only_if_it_is_all_there_is() -> None:
    one, two = trained("one"), trained("two")
    drafters = roster(d1=one, d2=two)
    two.draining = True
    assert promised(drafters).drafter == "one"
    one.draining = True
    assert promised(drafters).drafter == "two"


def test_an_unknown_wish_is_refused_unless_failure_explains_it() -> None:
    alone = roster(lookup())
    with pytest.raises(InvalidRequest, match="'dspark' is not one of: ngram, none"):
        promised(alone, "dspark")
    pooled = roster(lookup(), d1=trained("one"))
    with pytest.raises(InvalidRequest, match="'dpsark' is not one of: ngram, one, none"):
        promised(pooled, "dpsark")
    pooled.remove("d1")
    assert promised(pooled, "one") == Promise("ngram", "", 7), "it was there a moment ago"
    assert promised(pooled, "eagle3") == Promise("ngram", "", 7), "a kind that may yet come"
    assert promised(alone, "two", attempt=1) == Promise("ngram", "", 7), "let in elsewhere before"
    assert promised(roster(), "two", committed_ids=(1,)) == Promise()


def test_a_link_may_not_take_the_name_of_a_local_drafter() -> None:
    with pytest.raises(ConfigError, match="'ngram' is the name"):
        roster(lookup()).add("ngram", trained("one"))


def test_readers_of_other_threads_see_a_whole_list() -> None:
    drafters = roster(lookup(), d1=trained("one"))
    cards = iter(drafters.values())
    next(cards)
    drafters.remove("d1")
    drafters.add("d2", trained("two"))
    assert [source.name for source in cards] == ["d1"]
    assert list(drafters) == ["ngram", "d2"]


# --- links in an engine ---------------------------------------------------------------------------


def version(world: World, projection: FeatureProjection, drafter_id: str) -> ScriptedLink:
    drafter = ScriptedDrafter(
        oracle(RULE, wrong_every=5), drafter_id=drafter_id, feature_id=projection.feature_id
    )
    return ScriptedLink(world, drafter, after(0.002))


def scene(*local: Any, **config: Any) -> tuple[RemoteScene, World]:
    world = World()
    settings = {"verify": "fixed:7", "max_sequences": 6, **config}
    return remote_scene(RULE, V, world, *local, **settings), world


def take(of: RemoteScene, name: str, link: ScriptedLink, projection: FeatureProjection) -> None:
    of.engine.adopt(name, link, projection, bell=link.bell)


def test_sequences_go_to_the_least_used_replica() -> None:
    of, world = scene()
    links = [version(world, OLD, "one") for _ in range(3)]
    for i, link in enumerate(links):
        adopt(of, f"d{i}", link)
    of.submit(*(request(str(i), [i, 2], greedy(30)) for i in range(9)))
    of.step(8)
    assert [len(of.engine.drafters[f"d{i}"].sessions) for i in range(3)] == [2, 2, 2]
    of.drain()


def test_a_projection_that_is_not_the_cards_is_refused() -> None:
    of, world = scene()
    with pytest.raises(ModelError, match="projection: none"):
        of.engine.adopt("d0", version(world, OLD, "one"))
    with pytest.raises(ModelError, match=NEW.feature_id):
        of.engine.adopt("d0", version(world, OLD, "one"), NEW)
    assert not of.engine.drafters.links
    take(of, "d0", version(world, OLD, "one"), OLD)
    of.engine.adopt("d1", version(world, OLD, "two"))  # makes them already


def test_a_link_that_comes_back_as_another_is_asked_nothing() -> None:
    of, world = scene()
    link = version(world, OLD, "one")
    take(of, "d0", link, OLD)
    of.submit(request("a", [1, 2, 3], greedy(30)))
    of.step(8)
    asked = len(link.asked)
    link.drafter = version(world, OLD, "two").drafter
    of.drain()
    assert of.answers["a", 0].ids == target_only(RULE, [1, 2, 3], 30)
    assert len(link.asked) <= asked + 1


def test_a_version_is_swapped_under_load_and_hits_keep_their_features() -> None:
    """Scripted drafters check each feature they get: one that was left out, or another version's
    rows, is a fault. Requests keep their version to their end; new ones take the new one."""
    of, world = scene(max_sequences=4, kv_tokens=1024)
    old = version(world, OLD, "old")
    take(of, "d0", old, OLD)
    prefix = [5, 3, 8, 1] * 8  # two blocks

    def ask(names: str) -> None:
        of.submit(*(request(name, [*prefix, ord(name) % V], greedy(30)) for name in names))

    ask("abcd")
    of.step(12)
    new = version(world, NEW, "new")
    take(of, "d1", new, NEW)
    ask("efgh")
    of.step(3)
    ask("ijkl")
    of.drain()
    assert not of.engine.desk.faults
    for name in "abcdefghijkl":
        answer = of.answers[name, 0]
        assert answer.ids == target_only(RULE, [*prefix, ord(name) % V], 30)
    assert {r.session[0] for r in old.drafter.asked} == set("abcd")
    assert {r.session[0] for r in new.drafter.asked} == set("efghijkl")
    cached = {name: of.answers[name, 0].commits[0].cached_tokens for name in "efghijkl"}
    assert all(cached[name] >= 32 for name in "ijkl"), "hits of the new version, with features"
    # The new version's first blocks were made anew: nothing was substituted.
    assert cached["e"] == 0

    def tau(names: str) -> float:
        figures = [c.speculation for name in names for c in of.answers[name, 0].commits]
        return sum(f.accepted for f in figures) / sum(f.rounds for f in figures)

    assert tau("ijkl") > 0.8 * tau("abcd")


def test_the_same_projection_keeps_hits_across_versions() -> None:
    of, world = scene()
    take(of, "d0", version(world, OLD, "old"), OLD)
    of.ask(request("a", [5, 3, 8, 1] * 8, greedy(20)))
    take(of, "d1", version(world, OLD, "new"), OLD)
    of.engine.dismiss("d0")
    (answer,) = of.ask(request("b", [5, 3, 8, 1] * 8, greedy(20)))
    assert answer.commits[0].cached_tokens >= 31
    assert not of.engine.desk.faults


def test_a_drafter_that_restarts_finds_its_features_cached() -> None:
    """Also those of a request that was under way. Meanwhile none are made."""
    of, world = scene()
    take(of, "d0", version(world, OLD, "old"), OLD)
    of.ask(request("a", [5, 3, 8, 1] * 8, greedy(20)))
    (before,) = of.ask(request("b", [5, 3, 8, 1] * 8, greedy(20)))
    assert before.commits[0].cached_tokens >= 31
    of.engine.dismiss("d0")
    of.ask(request("plain", [5, 3, 8, 1] * 9, greedy(20)))
    assert not of.engine.versions.made(OLD.feature_id)
    take(of, "d0", version(world, OLD, "old"), OLD)
    (after_,) = of.ask(request("c", [5, 3, 8, 1] * 8, greedy(20)))
    assert after_.commits[0].cached_tokens == before.commits[0].cached_tokens
    assert not of.engine.desk.faults
    assert after_.ids == before.ids


@pytest.mark.parametrize("why", ["time", "another"])
def test_what_nobody_reads_any_more_is_forgotten(why: str) -> None:
    """In some minutes, or when another version wants the room."""
    of, world = scene()
    take(of, "d0", version(world, OLD, "old"), OLD)
    features = of.engine.cache.features
    of.ask(request("a", [5, 3, 8, 1] * 8, greedy(5)))
    of.submit(request("b", [5, 3, 8, 1] * 8, greedy(30)))
    of.step(5)
    of.engine.dismiss("d0")
    assert of.engine.versions.made(OLD.feature_id), "a sequence still has them"
    of.drain()
    assert not of.engine.versions.made(OLD.feature_id)
    assert set(features.widths()) == {OLD.feature_id}
    if why == "time":
        world.now += KEEP_S
        of.step()
        assert features.widths() == {}
    else:
        take(of, "d2", version(world, NEW, "new"), NEW)
        assert set(features.widths()) == {NEW.feature_id}
        of.engine.dismiss("d2")
    # What was cached with them serves tokens; they are not taken for features when it comes back.
    take(of, "d1", version(world, OLD, "old"), OLD)
    (answer,) = of.ask(request("c", [5, 3, 8, 1] * 8, greedy(20)))
    assert answer.commits[0].cached_tokens == 0
    assert not of.engine.desk.faults
    assert answer.ids == target_only(RULE, [5, 3, 8, 1] * 8, 20)


def test_a_dismissed_drafters_rounds_go_on_at_once() -> None:
    of, world = scene()
    link = version(world, OLD, "one")
    link.fate = after(0.5)
    take(of, "d0", link, OLD)
    of.submit(request("a", [1, 2, 3], greedy(30)))
    while not of.engine.desk.errands:
        of.take(of.engine.step())
    of.engine.dismiss("d0")
    of.drain()
    assert of.answers["a", 0].ids == target_only(RULE, [1, 2, 3], 30)
    assert of.engine.figures.draft_wait_s == 0.0


def mostly(seconds: float, rng: np.random.Generator) -> Fate:
    """One answer in that time, but for one in twenty that never comes."""
    return lambda request, n: (seconds,) if rng.random() < 0.95 else ()


def test_drafters_come_and_go_at_random() -> None:
    """Cut, back, drained, dismissed, adopted, of two versions, while requests come and go in a pool
    too small for them: texts are right, nothing is left over, and no feature is ever wrong."""
    rng = np.random.default_rng(5)
    of, world = scene(lookup(), verify="early-stop", kv_tokens=176, prefill_chunk=24)
    links: dict[str, ScriptedLink] = {}
    prompts: dict[str, list[int]] = {}
    for turn in range(1200):
        kind = rng.random()
        if kind < 0.04 and len(links) < 4:
            which = int(rng.integers(2))
            link = version(world, (OLD, NEW)[which], ("old", "new")[which])
            slow = float(rng.choice([0.001, 0.01, 0.04]))
            link.fate = mostly(slow, rng)
            name = f"d{turn}"
            links[name] = link
            take(of, name, link, (OLD, NEW)[which])
        elif kind < 0.07 and links:
            name = str(rng.choice(list(links)))
            links.pop(name).cut()
            of.engine.dismiss(name)
        elif kind < 0.10 and links:
            link = links[str(rng.choice(list(links)))]
            if link.available:
                link.cut()
            else:
                link.available = True
        elif kind < 0.12 and links:
            links[str(rng.choice(list(links)))].draining = True
        elif kind < 0.35 and len(prompts) < 60:
            name = f"r{turn}"
            prompts[name] = [int(rng.integers(3)), 5, 3, 8, 1] * int(rng.integers(1, 9))
            lease = str(rng.choice([*links, ""]))
            of.submit(request(name, prompts[name], greedy(40), drafter=lease))
        of.step()
    of.drain()
    assert len(prompts) == 60
    for name, prompt in prompts.items():
        assert of.answers[name, 0].ids == target_only(RULE, prompt, 40)
    assert set(of.engine.desk.faults) <= {"need context"}
    answers = of.engine.desk.answers
    assert min(answers["used"], answers["lost"], answers["given up"]) > 0
    assert of.engine.preemptions > 0
    for name in list(links):
        of.engine.dismiss(name)
    world.now += KEEP_S
    of.step()
    assert of.engine.cache.features.widths() == {}
    assert list(of.engine.drafters) == ["ngram"]


# --- when a reply came ----------------------------------------------------------------------------


def test_a_reply_that_is_read_before_it_rings_makes_the_next_one_no_earlier() -> None:
    """Its ring is left behind: the drafter would look as if it answered before it was asked."""
    world, link = World(), trained("one")
    bell = Bell(world)
    source = LinkSource("d1", link, Counter(), Counter(), bell)
    sampling = DraftSampling(SamplingMode.GREEDY)
    asked = {name: DraftRequest(name, 0, 0, (1,), None, 0, sampling, 1) for name in "abcd"}

    def came(*said: str, rings: int) -> list[float]:
        """When these came, if the bell rang so often since the last look, and once a second."""
        link._inbox = [Draft(name, 0, (1,), np.zeros(1, np.float32)) for name in said]
        for _ in range(rings):
            world.now += 1.0
            bell()
        return [at for *_, at in source.answers(asked.get, world.now)]

    assert came("a", rings=0) == [0.0]
    assert came("b", rings=2) == [2.0], "the first of them was for a"
    assert came("a", "b", rings=3) == [4.0, 5.0]
    assert came("a", "b", "c", "d", rings=1) == [6.0] * 4
    assert came("a", "b", "c", "d", rings=2) == [7.0, 7.0, 8.0, 8.0]
