"""Which drafter drafts for which sequence: local ones by name, links by replica id.

A sequence keeps its drafter's version for its life, because it keeps that version's features; its
rounds may go to any replica of it. Where none can be asked, prompt lookup in this process helps
out if the operator has it, and else it decodes plainly: nothing here may cost more than speed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass

from dspark.core.drafts import Drafter, DrafterCard, DrafterLink
from dspark.core.errors import ConfigError, InvalidRequest
from dspark.core.requests import Request
from dspark.verifier.sequence import Sequence
from dspark.verifier.sources import Bell, LinkSource, LocalSource, Source

NO_DRAFTER = "none"
LOOKUP = "ngram"
# What a request of a cluster may wish for even while no such drafter is there.
KINDS = ("dspark", "dflash", "eagle3", "mtp", LOOKUP)
# Sessions that a step moves away from a draining drafter: each sends its window of features anew,
# and a drain lasts for hundreds of steps.
MOVES_A_STEP = 2


@dataclass(frozen=True, slots=True)
class Promise:
    """What drafts for a sequence all its life. drafter: see `Sequence`. gamma: its longest block;
    0: nothing drafts for it."""

    drafter: str = ""
    feature_id: str = ""
    gamma: int = 0


class Drafters(Mapping[str, Source]):
    """By name. Any thread may read it: it is replaced, never changed; all else is the engine's.

    pooled: there is a pool that drafters may come from.
    """

    def __init__(
        self, local: Mapping[str, Drafter], faults: Counter[str], outcomes: Counter[str]
    ) -> None:
        self.pooled = False
        self._local = {name: LocalSource(name, drafter, faults) for name, drafter in local.items()}
        self._links: dict[str, LinkSource] = {}
        self._all: dict[str, Source] = dict(self._local)
        self._versions: dict[str, int] = {}  # of links, by drafter id, the newest highest
        self._seen = set(KINDS)
        self._faults = faults
        self._outcomes = outcomes
        self._moves = 0
        self._coming: Counter[str] = Counter()  # sessions of this step, by link

    def __getitem__(self, name: str) -> Source:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def values(self) -> ValuesView[Source]:
        return self._all.values()

    def items(self) -> ItemsView[str, Source]:
        return self._all.items()

    @property
    def local(self) -> Mapping[str, LocalSource]:
        return self._local

    @property
    def links(self) -> Mapping[str, LinkSource]:
        return self._links

    @property
    def spent_s(self) -> float:
        """Seconds that local drafters have taken."""
        return sum(source.spent_s for source in self._local.values())

    # --- links come and go ------------------------------------------------------------------------

    def add(self, name: str, link: DrafterLink, bell: Bell | None = None) -> LinkSource:
        """Raises ConfigError for a name that one in this process has."""
        if name in self._local:
            raise ConfigError(f"drafter: {name!r} is the name of one in this process")
        source = LinkSource(name, link, self._faults, self._outcomes, bell)
        card = source.card
        self.pooled = True
        self._seen |= {card.kind, card.drafter_id}
        if all(card.drafter_id != other.card.drafter_id for other in self._links.values()):
            self._versions[card.drafter_id] = max(self._versions.values(), default=0) + 1
        self._set({**self._links, name: source})
        return source

    def remove(self, name: str) -> None:
        links = {other: source for other, source in self._links.items() if other != name}
        there = {source.card.drafter_id for source in links.values()}
        self._versions = {v: n for v, n in self._versions.items() if v in there}
        self._set(links)

    def _set(self, links: dict[str, LinkSource]) -> None:
        self._links = links
        self._all = {**self._local, **links}

    def feature_ids(self) -> set[str]:
        """That drafters which are here read."""
        return {source.card.feature_id for source in self._all.values()} - {""}

    # --- what drafts for a sequence ---------------------------------------------------------------

    def promise(self, request: Request, gamma: int) -> Promise:
        """What a request's drafts come from: its wish within the operator's limits. gamma: the
        operator's. Raises InvalidRequest."""
        wish = request.speculation
        if wish.drafter == NO_DRAFTER:
            return Promise()
        card, name = self._version(request)
        if card is None:
            if wish.drafter is not None and not self._may_come(request):
                known = ", ".join([*self._local, *self._versions, NO_DRAFTER])
                raise InvalidRequest("speculation.drafter", wish.drafter, f"is not one of: {known}")
            fallback = self._lookup()
            if fallback is None:
                return Promise()
            card, name = fallback.card, fallback.name
        gamma = min(gamma, card.gamma)
        if wish.gamma is not None:
            gamma = min(gamma, wish.gamma)
        return Promise(name, card.feature_id, gamma) if gamma else Promise()

    def _version(self, request: Request) -> tuple[DrafterCard | None, str]:
        """The card and name of what a request is promised: of its lease's drafter if that fits the
        wish, else of the newest version, trained ones first; a local one where no link fits."""
        wish = request.speculation.drafter
        named = self._links.get(request.drafter)
        if named is not None and _is(named.card, wish):
            return named.card, named.card.drafter_id
        fitting = [link for link in self._links.values() if _is(link.card, wish)]
        if fitting:
            newest = max(
                fitting,
                key=lambda link: (
                    not link.draining,
                    link.card.kind != LOOKUP,
                    self._versions[link.card.drafter_id],
                ),
            )
            return newest.card, newest.card.drafter_id
        local = next(iter(self._local), "") if wish is None else wish
        if local in self._local:
            return self._local[local].card, local
        return None, ""

    def _may_come(self, request: Request) -> bool:
        """A wish that no drafter fulfils now and that is no mistake: of a cluster, or of a replay,
        which was let in before."""
        known = self.pooled and request.speculation.drafter in self._seen
        return known or request.attempt > 0 or bool(request.committed_ids)

    def _lookup(self) -> LocalSource | None:
        """The local drafter that helps out, if there is one."""
        for source in self._local.values():
            if source.card.kind == LOOKUP:
                return source
        return None

    # --- who is asked for a sequence's next round -------------------------------------------------

    def begin_step(self) -> None:
        self._moves = MOVES_A_STEP
        self._coming.clear()

    def source_for(self, sequence: Sequence) -> Source | None:
        """Who is to draft a sequence's next round: where its session is if that can be, another
        replica of its version, a local drafter, None."""
        if not sequence.drafter:
            return None
        here = self._links.get(sequence.source)
        if here is not None and not (here.available and _serves(here, sequence)):
            here = None
        if here is not None and not (here.draining and self._moves):
            return here
        other = self._open_to(sequence)
        if other is not None:
            if here is not None:  # also where nothing is asked for it now: its place must be free
                here.close(sequence.session)
                sequence.source = ""
                self._moves -= 1
            self._coming[other.name] += 1
            return other
        if here is not None:
            return here
        local = self._local.get(sequence.drafter)
        if local is not None and local.card.feature_id == sequence.feature_id:
            return local
        return self._lookup()

    def _open_to(self, sequence: Sequence) -> LinkSource | None:
        """A replica that takes a new session: the one that its lease names, else the least used."""
        fitting = [
            link
            for link in self._links.values()
            if link.available and not link.draining and _serves(link, sequence)
        ]
        named = sequence.state.request.drafter
        return min(
            fitting,
            key=lambda link: (link.name != named, len(link.sessions) + self._coming[link.name]),
            default=None,
        )


def _is(card: DrafterCard, wish: str | None) -> bool:
    return wish in (None, card.drafter_id, card.kind)


def _serves(link: LinkSource, sequence: Sequence) -> bool:
    """Whether it is of the sequence's version, and reads what is kept for it."""
    card = link.card
    return card.drafter_id == sequence.drafter and card.feature_id in ("", sequence.feature_id)
