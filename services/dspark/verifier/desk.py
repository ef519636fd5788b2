"""The engine's correspondence with its drafters: requests out, replies in, rounds under way."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from dspark.core.drafts import Draft, DraftRequest, DraftSampling, Faulty, Lost, NeedContext
from dspark.core.traces import TRACED_ROUNDS
from dspark.scheduler import afforded
from dspark.verifier.drafters import Drafters
from dspark.verifier.drafting import fault_of, survival
from dspark.verifier.features import FeatureCache
from dspark.verifier.guidance import Guidance
from dspark.verifier.sequence import Asked, DraftInHand, Errand, Sequence
from dspark.verifier.sources import LocalSource, Source

log = logging.getLogger(__name__)

# A drafter that answers NEED_CONTEXT twice for one round has lost more than a window.
CONTEXT_RETRIES = 2


class DraftDesk:
    """Sends each sequence's next DraftRequest and keeps what comes back in `sequence.draft`.

    One way for all: `ask`, and `collect` at the beginning of each step; what a local drafter says
    is there at once. A sequence has one round under way or one draft in hand, never both.

    faults: replies that are no draft, by what is wrong with them; nothing a drafter says can raise
    here. answers: how rounds came out: used, empty, lost, given up; late and stale: replies to
    rounds that were over. received: drafts, numbered as they arrive: the causal barrier's count.
    exposed_s: by source, seconds that rounds waited for replies with nothing else to do.
    """

    def __init__(
        self,
        drafters: Drafters,
        features: FeatureCache,
        vocab_size: int,
        guidance: Guidance,
        clock: Callable[[], float],
        faults: Counter[str],
        answers: Counter[str],
    ) -> None:
        self.faults = faults
        self.answers = answers
        self.received = 0
        self.exposed_s: dict[str, float] = {}
        self._drafters = drafters
        self._features = features
        self._vocab_size = vocab_size
        self._guidance = guidance
        self._clock = clock
        self._errands: list[Errand] = []
        self._sequences: dict[str, Sequence] = {}  # by session, those under way

    # --- out --------------------------------------------------------------------------------------

    def ask(
        self, source: Source, wanting: Seq[Sequence], hopeful: Callable[[Sequence], bool]
    ) -> list[Sequence]:
        """Ask for all that the scheduler's budget of a drafter allows, and say for whom. hopeful:
        see `Asked`. What a local one says is in hand on return."""
        asking = self._affordable(source, wanting)
        if asking:
            for sequence in asking:
                self._open(source, sequence)
            self._send(source, [(sequence, 1, hopeful(sequence)) for sequence in asking])
        return asking

    def _affordable(self, source: Source, wanting: Seq[Sequence]) -> list[Sequence]:
        """Those that the budget is enough for; it is spent on them."""
        if not wanting:
            return []
        blocks = [_block(sequence, source) for sequence in wanting]
        tokens = self._guidance.affordable(source.name, sum(blocks), max(blocks))
        if tokens >= sum(blocks):
            self._guidance.spend(source.name, sum(blocks))
            return list(wanting)
        savings = [np.nan if s.saving_s is None else s.saving_s for s in wanting]
        chosen = afforded(blocks, savings, tokens).tolist()
        self._guidance.spend(source.name, sum(blocks[i] for i in chosen))
        return [wanting[i] for i in chosen]

    def _open(self, source: Source, sequence: Sequence) -> None:
        """Its session is with this source from now on. Elsewhere than in this process it begins
        with the window that is read there; features of all of it are kept here."""
        if sequence.source == source.name and sequence.session in source.sessions:
            return
        before = self._drafters.get(sequence.source)
        if before is not None:
            before.close(sequence.session)
        if sequence.checkpoint != source.card.drafter_id:
            sequence.checkpoint = source.card.drafter_id
            sequence.forget_worth()
        source.sessions.add(sequence.session)
        sequence.source = source.name
        window = source.context_window
        sequence.sent = max(0, len(sequence.state.ids) - 1 - window) if window else 0

    def _send(self, source: Source, asking: Seq[tuple[Sequence, int, bool]]) -> None:
        errand = Errand(source.name, self._clock(), len(asking))
        requests = []
        for sequence, tries, hopeful in asking:
            request = self._request(sequence, source)
            requests.append(request)
            sequence.asked = Asked(request, errand, tries, hopeful)
            errand.left[sequence.session] = self._sequences[sequence.session] = sequence
            # A round tells a block and the token after it.
            errand.context += max(len(request.tokens) - 2 - source.card.gamma, 0)
        self._errands.append(errand)
        try:
            source.ask(requests)
        except Exception:  # a link that breaks while it is written to
            self.faults["raised"] += 1
            self._lose(errand)
            return
        if isinstance(source, LocalSource):
            errand.idle_s = self._clock() - errand.at
            self._collect(source, self._clock())
            # What asking costs here is all that it takes, not the drafter alone.
            _learn_cost(source, errand, max(self._clock() - errand.at, 0.0))

    def _request(self, sequence: Sequence, source: Source) -> DraftRequest:
        state = sequence.state
        params = state.request.sampling
        sampling = DraftSampling(
            params.mode, params.temperature, params.seed or 0, state.request.choice
        )
        features = None
        if source.card.feature_id:
            features = self._features.read(
                sequence.feature_id, sequence.blocks, sequence.sent, len(state.ids) - 1
            )
        return DraftRequest(
            session=sequence.session,
            round=sequence.round,
            start=sequence.sent,
            tokens=tuple(state.ids[sequence.sent :]),
            features=features,
            output_position=state.outputs,
            sampling=sampling,
            gamma=_block(sequence, source),
            traceparent=_traceparent(sequence),
        )

    # --- in ---------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Take what has come from elsewhere since the last call."""
        now = self._clock()
        for source in self._drafters.links.values():
            self._collect(source, now)

    def _collect(self, source: Source, now: float) -> None:
        again: list[tuple[Sequence, int, bool]] = []

        def under_way(session: str) -> DraftRequest | None:
            sequence = self._sequences.get(session)
            if sequence is None or sequence.asked is None or sequence.source != source.name:
                return None
            return sequence.asked.request

        for request, reply, came in source.answers(under_way, now):
            sequence = self._sequences.get(request.session)
            if sequence is None or sequence.asked is None or sequence.asked.request is not request:
                self.answers["late"] += 1  # a second answer among these
                continue
            asked, retry = sequence.asked, False
            try:
                retry = self._take(source, sequence, asked, reply, came)
            except Exception:  # in a way that no check foresaw
                self.faults["malformed"] += 1
            self._over(sequence, came)
            if retry:
                again.append((sequence, asked.tries + 1, asked.hopeful))
            elif sequence.draft is None:
                sequence.saved_nothing()
        if again:
            self._send(source, again)

    def _over(self, sequence: Sequence, when: float | None, *, given_up: bool = False) -> None:
        """A round is under way no more. when: its reply came, or it was given up; None if it ended
        otherwise, which says nothing of its drafter."""
        asked = sequence.asked
        assert asked is not None, "nothing was asked"
        errand = asked.errand
        sequence.asked = None
        del self._sequences[sequence.session]
        errand.left.pop(sequence.session, None)
        if not errand.left:
            self._errands = [other for other in self._errands if other is not errand]
        if when is None:
            return
        waited_s = self.exposed_s.get(errand.source, 0.0) + errand.idle_s
        self.exposed_s[errand.source] = waited_s
        source = self._drafters.links.get(errand.source)
        if source is not None and not errand.left:
            _learn_cost(source, errand, max(when - errand.at, 0.0), given_up=given_up)

    def _take(
        self, source: Source, sequence: Sequence, asked: Asked, reply: object, came: float
    ) -> bool:
        """Keep a sound draft, count anything else. Whether to ask again, from further back."""
        request = asked.request
        if isinstance(reply, Lost):
            self.answers["lost"] += 1
            if source.linked:  # so is its session
                source.sessions.discard(request.session)
            return False
        if isinstance(reply, Faulty):
            self.faults["malformed"] += 1
            if self.faults["malformed"] == 1:
                log.warning("drafter %s: %s", source.name, reply.why)
            return False
        if not isinstance(reply, NeedContext):
            self._accept(source, sequence, asked, reply, came)
            return False
        self.faults["need context"] += 1
        if not (isinstance(reply.start, int) and 0 <= reply.start < request.anchor_position):
            return False
        sequence.sent = reply.start
        return asked.tries < CONTEXT_RETRIES

    def _accept(
        self, source: Source, sequence: Sequence, asked: Asked, reply: object, came: float
    ) -> None:
        request = asked.request
        fault = fault_of(request, reply, self._vocab_size)
        if fault is not None or not isinstance(reply, Draft):
            self.faults[fault or "not a draft"] += 1
            return
        sequence.sent = request.anchor_position
        if not len(reply.ids):
            self.answers["empty"] += 1
            return
        self.received += 1
        self.answers["used"] += 1
        asked.errand.drafted += len(reply.ids)
        draft = replace(reply, ids=tuple(map(int, reply.ids)))  # NumPy's integers end here
        scaling = self._guidance.scaling(
            source.card.drafter_id, request.sampling.mode, len(draft.ids)
        )
        sequence.draft = DraftInHand(
            number=self.received,
            draft=draft,
            survival=survival(draft.confidence_logits, scaling),
            source=source.name,
            linked=source.linked,
            drafter_id=source.card.drafter_id,
            asked_at=asked.errand.at,
            answered_at=came,
        )
        if len(sequence.draft.survival) < len(draft.ids):
            self.faults["bad confidence"] += 1

    # --- under way --------------------------------------------------------------------------------

    @property
    def errands(self) -> list[Errand]:
        """Those of which something is still awaited."""
        return [errand for errand in self._errands if errand.left]

    def cost_s(self, errand: Errand) -> tuple[float, float]:
        """(mean, deviation) of what such an errand takes, seconds."""
        source = self._drafters.get(errand.source)
        if source is None:
            return 0.0, 0.0
        return source.cost.seconds(errand.n, errand.context), source.cost.deviation

    def give_up(self, sequences: Iterable[Sequence]) -> None:
        """Their rounds go on without drafts; replies that still come are late. What took longer
        than it should has saved nothing, and that it took so long is what is learnt of its drafter,
        or it would look as quick as ever. A round that is given up before says nothing of
        either."""
        now = self._clock()
        for sequence in list(sequences):
            if sequence.asked is None:
                continue
            self.answers["given up"] += 1
            errand = sequence.asked.errand
            overdue = now - errand.at >= self.cost_s(errand)[0]
            self._over(sequence, now, given_up=True)
            if overdue:
                sequence.saved_nothing()

    def forget(self, sequence: Sequence) -> None:
        """A sequence is preempted or over: its round is nobody's any more."""
        sequence.draft = None
        if sequence.asked is not None:
            self._over(sequence, None)

    def close(self, sequence: Sequence) -> None:
        """The sequence is over: its session goes."""
        self.forget(sequence)
        source = self._drafters.get(sequence.source)
        if source is not None:
            source.close(sequence.session)

    def lose(self, name: str) -> None:
        """A drafter is gone: what it was asked comes no more."""
        for errand in self.errands:
            if errand.source == name:
                self._lose(errand)

    def _lose(self, errand: Errand) -> None:
        for sequence in list(errand.left.values()):
            self.answers["lost"] += 1
            self._over(sequence, None)


def _learn_cost(source: Source, errand: Errand, seconds: float, *, given_up: bool = False) -> None:
    """An errand is over. Without a draft it may have taken no time at all: that makes a drafter no
    quicker, but it may make it slower."""
    expected = source.cost.seconds(errand.n, errand.context)
    if given_up and seconds < expected:
        return
    if errand.drafted:
        source.cost.observe(errand.n, seconds, errand.context)
    else:
        source.cost.observe(errand.n, max(seconds, expected))


def _block(sequence: Sequence, source: Source) -> int:
    """Draft tokens that a sequence asks for."""
    return min(sequence.wanted, sequence.gamma, source.card.gamma, sequence.state.draft_room)


def _traceparent(sequence: Sequence) -> str:
    """Of its decode span; of its request's where spans of that are not ours. Of the first rounds
    only: an answer may have thousands."""
    request = sequence.state.request
    if not request.traceparent or sequence.round > TRACED_ROUNDS:
        return ""
    return request.traceparent if sequence.trace is None else sequence.trace.drafting
