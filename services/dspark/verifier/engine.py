"""The verifier's engine: compose, plan, forward, judge, commit, ask for the next drafts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Seq

import numpy as np

from dspark.core.config import EngineConfig
from dspark.core.drafts import Drafter, DrafterLink
from dspark.core.errors import (
    Cancelled,
    DeadlineExceeded,
    DsparkError,
    InvalidRequest,
    Overloaded,
)
from dspark.core.plans import CalibrationTable
from dspark.core.requests import (
    Committed,
    Event,
    Finished,
    FinishReason,
    Limits,
    Request,
    SpeculationFigures,
    check_request,
)
from dspark.core.sequence import SequenceState
from dspark.core.verdicts import Verdict
from dspark.models.targets.backend import Backend, StepOutput
from dspark.models.targets.features import FeatureProjection
from dspark.models.verification import Scratch, TokenCounts, argmax_rows
from dspark.scheduler import OnlineStepCost, Policy
from dspark.verifier.asking import Asking
from dspark.verifier.batcher import Batcher, Item
from dspark.verifier.desk import DraftDesk
from dspark.verifier.drafters import Drafters
from dspark.verifier.figures import Figures, Stopwatch
from dspark.verifier.flatten import flatten
from dspark.verifier.guidance import Guidance
from dspark.verifier.judging import Outcome, judge_step
from dspark.verifier.kv_cache import KVCache
from dspark.verifier.ledger import Ledger
from dspark.verifier.pacing import Pacing
from dspark.verifier.planning import StepPlanner
from dspark.verifier.sequence import Sequence
from dspark.verifier.sources import Bell
from dspark.verifier.tally import Crowd, Tally
from dspark.verifier.tracing import Traces
from dspark.verifier.versions import Versions

Key = tuple[str, int]
EngineEvent = tuple[Key, Event]


class Engine:
    """Runs requests on one target. Not thread-safe: one caller submits, cancels and steps.

    drafters: of this process, by name; the first is the default. Links to others are adopted while
    it runs. clock: seconds; deadlines are points on it. patience: seconds for which nothing is to
    be stepped because waiting for drafts pays, unless a link's bell rings; 0: step again.
    """

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        cost: OnlineStepCost,
        *,
        drafters: Mapping[str, Drafter] | None = None,
        eos_ids: Collection[int] = (),
        clock: Callable[[], float] = time.monotonic,
        rng: np.random.Generator | None = None,
    ) -> None:
        self.config = config
        self.figures = Figures()
        self.limits = Limits(
            backend.vocab_size,
            backend.context_length,
            config.kv_blocks * backend.block_size,
        )
        self.cache = KVCache(backend, config.kv_blocks)
        self.guidance = Guidance(clock)
        faults, answers = Counter[str](), Counter[str]()
        self.drafters = Drafters(drafters or {}, faults, answers)
        self.desk = DraftDesk(
            self.drafters,
            self.cache.features,
            backend.vocab_size,
            self.guidance,
            clock,
            faults,
            answers,
        )
        self.versions = Versions(backend, self.cache, self.drafters, clock)
        self.pacing = Pacing(cost, self.desk, self.drafters, clock)
        self._asking = Asking(self.desk, self.drafters, self.pacing, config.prefill_chunk)
        self.patience = 0.0
        self.planner = StepPlanner(
            cost, Policy.parse(config.verify), config.max_step_tokens, self.guidance
        )
        self._backend = backend
        self._scratch = Scratch()
        self._batcher = Batcher(self.cache, config, self.desk.forget)
        self._eos_ids = frozenset(eos_ids)
        self.clock = clock
        self.ledger = Ledger(clock)
        self.traces = Traces(clock)
        self._rng = rng or np.random.default_rng()
        self._sequences: dict[Key, Sequence] = {}
        self._arrivals = 0
        self._events: list[EngineEvent] = []
        self._waits_since: float | None = None
        self._began = 0.0  # the step; on the engine's clock
        self._forward_s = 0.0

    @property
    def target_id(self) -> str:
        return self._backend.target_id

    @property
    def backend_name(self) -> str:
        """Backend, precision and device."""
        return self._backend.name

    @property
    def idle(self) -> bool:
        return not self._sequences and not self._events

    @property
    def stalled(self) -> bool:
        """Nothing can be stepped: nobody is there, or every reader stands still."""
        return not self._events and all(s.paused for s in self._sequences.values())

    @property
    def active(self) -> int:
        """Requests' choices that are waiting or running."""
        return len(self._sequences)

    @property
    def running(self) -> list[Sequence]:
        """Sequences that own blocks now."""
        return list(self._batcher.running)

    @property
    def preemptions(self) -> int:
        return self._batcher.preemptions

    def submit(self, request: Request) -> None:
        """Queue one choice. Raises InvalidRequest or Overloaded and then keeps nothing of it."""
        check_request(request, self.limits)
        if request.speculation.verify is not None:
            Policy.parse(request.speculation.verify)
        promise = self.drafters.promise(request, self.config.gamma)
        key = (request.request_id, request.choice)
        running = self._sequences.get(key)
        if running is not None and running.state.request.attempt >= request.attempt:
            raise InvalidRequest(
                "attempt",
                request.attempt,
                f"is not newer than attempt {running.state.request.attempt}, which is running",
            )
        if len(self._batcher) >= self.config.max_waiting:
            raise Overloaded(
                f"{len(self._batcher)} requests are waiting, the limit is "
                f"{self.config.max_waiting}",
                self.config.retry_after_s,
            )
        if running is not None:
            self._finish(running, Cancelled(f"attempt {request.attempt} took over"))
        self._arrivals += 1
        state = SequenceState(
            request,
            eos_ids=self._eos_ids,
            max_tokens_total=self.limits.sequence_tokens,
            arrival=self._arrivals,
        )
        sequence = Sequence(
            state,
            rng=self._rng.spawn(1)[0],
            drafter=promise.drafter,
            gamma=promise.gamma,
            feature_id=promise.feature_id,
        )
        sequence.trace = self.traces.begin(request)
        if request.sampling.penalized:
            sequence.counts = TokenCounts.of(request.prompt_ids, state.ids[state.prompt_tokens :])
        self._sequences[key] = sequence
        self._batcher.add(sequence)

    def cancel(self, request_id: str, choice: int = 0) -> None:
        """The caller hung up: free everything at once. An unknown request is fine."""
        sequence = self._sequences.get((request_id, choice))
        if sequence is not None:
            self._finish(sequence, Cancelled("cancelled by the caller"))

    def pause(self, request_id: str, choice: int, paused: bool) -> None:
        """The caller cannot take more now, or can again. A paused choice keeps its place, blocks
        and draft and is not stepped; it ends with Overloaded after `stall_timeout_s`. An unknown
        request is fine."""
        sequence = self._sequences.get((request_id, choice))
        if sequence is None or paused == sequence.paused:
            return
        sequence.paused_at = self.clock() if paused else None
        if paused:
            self._batcher.pause(sequence)
        else:
            self._batcher.go_on(sequence)

    def step(self) -> list[EngineEvent]:
        """Run one step, or none while waiting for drafts pays (`patience`); returns what was
        committed and what ended since the last call. Never waits itself."""
        clock = Stopwatch()
        self._end_what_is_over()
        self.versions.tidy()
        self._account_for_waiting()
        self.desk.collect()
        self._batcher.set_shares(self.guidance.shares)
        items = self._ready()
        if items:
            self._began = self.clock()
            going = [s for s in self._batcher.running if not s.paused]
            joining = sum(s.state.uncomputed > 1 for s in going)
            away = len(going) - joining - sum(item.decoding for item in items)
            step = self.planner.plan(items, joining, away)
            batch = flatten(items, step.lengths, self.cache)
            with clock.lap("forward"):
                output = self._backend.forward(batch)
            with clock.lap("argmax"):
                argmax = argmax_rows(output.logits)
            verdicts = judge_step(items, step.lengths, output.logits, argmax, self._scratch)
            self._forward_s = clock.laps["forward"] + clock.laps["argmax"]
            self.planner.learn(items, step)
            self._keep_features(items, step.lengths, verdicts, output)
            self._commit(items, step.lengths, verdicts)
            seconds = clock.total  # all of the step's work but drafting, which has its own price
            self.planner.took(step, seconds)
            self.ledger.add_step(items, step, seconds)
            self._asking.ask(self.planner, items, self._batcher.running, step)
            self.figures.add_step(clock, step, seconds, self.drafters.spent_s)
        return self.take_events()

    def _ready(self) -> list[Item]:
        """What the next step holds; nothing while waiting for drafts pays."""
        most_linked = self.pacing.most_linked(self._batcher.running)
        while True:
            items = self._batcher.compose(most_linked)
            decision, errands = self.pacing.decide(items, most_linked)
            if not decision.given_up:
                break
            for index in decision.given_up:  # they go on plainly, in this very step
                self.desk.give_up(errands[index].left.values())
        self.patience = decision.wait_s
        if self.patience:
            self._waits_since = self.clock()
            return []
        return items

    def _account_for_waiting(self) -> None:
        """What the engine stood still for drafts since its last look."""
        if self._waits_since is None:
            return
        waited_s = max(self.clock() - self._waits_since, 0.0)
        self._waits_since = None
        errands = self.desk.errands
        if errands:
            self.figures.draft_wait_s += waited_s
        for errand in errands:
            errand.idle_s += waited_s

    def take_events(self) -> list[EngineEvent]:
        """What was committed and what ended since the last call."""
        events, self._events = self._events, []
        return events

    def fail(self, error: DsparkError) -> None:
        """End every choice with `error`: a step broke, or the engine stops."""
        for sequence in list(self._sequences.values()):
            self._finish(sequence, error)

    def _end_what_is_over(self) -> None:
        """Before a step: choices past their deadline, those that nobody reads any more, and replays
        that were complete already."""
        now, stall = self.clock(), self.config.stall_timeout_s
        for sequence in list(self._sequences.values()):
            deadline = sequence.state.request.deadline
            if sequence.state.finish is not None:
                self._finish(sequence)
            elif deadline is not None and now >= deadline:
                self._finish(sequence, DeadlineExceeded("the request's deadline passed"))
            elif sequence.paused_at is not None and now - sequence.paused_at >= stall:
                told = f"the reader took nothing for {stall:g} s, and its buffer is full"
                self._finish(sequence, Overloaded(told, self.config.retry_after_s))

    def _keep_features(
        self, items: Seq[Item], lengths: Seq[int], verdicts: Seq[Outcome], output: StepOutput
    ) -> None:
        """Store features of tokens that stand; those of rejected rows are dropped (L4)."""
        features = {name: rows.cpu().numpy() for name, rows in output.features.items()}
        row = 0
        for item, length, outcome in zip(items, lengths, verdicts, strict=True):
            sequence = item.sequence
            if not sequence.feature_id:
                continue
            accepted = outcome.accepted if isinstance(outcome, Verdict) else 0
            rows = features[sequence.feature_id][row : row + item.tokens + accepted]
            self.cache.features.store(
                sequence.feature_id, sequence.blocks, sequence.state.computed, rows
            )
            row += item.tokens + length

    def _commit(self, items: Seq[Item], lengths: Seq[int], verdicts: Seq[Outcome]) -> None:
        for item, length, outcome in zip(items, lengths, verdicts, strict=True):
            sequence = item.sequence
            sequence.state.computed += item.tokens
            if sequence.trace is not None and sequence.trace.admitted is None:
                sequence.trace.admitted = self._began
            if isinstance(outcome, DsparkError):
                self.cache.discard(sequence)
                self._finish(sequence, outcome)
            elif outcome is not None:
                self._commit_one(item, length, outcome)
            if sequence.blocks:
                self.cache.remember(sequence)

    def _commit_one(self, item: Item, verified: int, verdict: Verdict) -> None:
        sequence, state = item.sequence, item.sequence.state
        index = state.outputs
        stand = state.commit(verdict.ids)
        accepted = min(verdict.accepted, stand)
        # The last token that stands is the new anchor, or the end; it counts as not computed even
        # where a cut made an accepted draft token the last one.
        state.computed += min(accepted, stand - 1)
        figures = SpeculationFigures()
        if item.decoding and index:
            drafted = 0 if sequence.draft is None else len(sequence.draft.draft.ids)
            figures = SpeculationFigures(1, drafted, verified, accepted)
        judged = min(verified, verdict.accepted + 1, stand)
        self.ledger.add_round(sequence, judged, accepted, stand)
        self.traces.add_round(sequence, self._began, self._forward_s, figures, stand)
        sequence.draft = None
        sequence.round += 1
        ids = verdict.ids[:stand]
        if sequence.counts is not None:
            sequence.counts = sequence.counts.after(ids)
        self._batcher.charge(state.request.tenant, stand)
        state.figures += figures
        self.figures.add_commit(stand, figures, verdict.fallbacks)
        event = Committed(index, ids, verdict.logprobs[:stand], figures, state.cached or 0)
        self._events.append((state.key, event))
        if state.finish is not None:
            self._finish(sequence)

    def take_tally(self) -> tuple[Tally, Crowd]:
        """What was seen since the last call, and who is here now: a report's two halves. The first
        call begins it."""
        exposed_s, self.desk.exposed_s = self.desk.exposed_s, {}
        running, waiting = (
            [sequence.state.request for sequence in sequences]
            for sequences in (self._batcher.running, self._batcher.waiting)
        )
        free = self.cache.pool.available
        return self.ledger.take(exposed_s, free, running=running, waiting=waiting)

    def adopt(
        self,
        name: str,
        link: DrafterLink,
        projection: FeatureProjection | None = None,
        calibration: Iterable[CalibrationTable] = (),
        bell: Bell | None = None,
    ) -> None:
        """A drafter in another process may be asked from now on. name: its replica id. projection:
        of the features that it reads, if they are not made yet. bell: the link's. Raises ModelError
        for another projection than its card names."""
        self.versions.begin(link.card, projection)
        self.guidance.ship(calibration)
        self.drafters.add(name, link, bell)

    def dismiss(self, name: str) -> None:
        """A drafter is gone: its rounds go on plainly, its sequences elsewhere. Features that
        nobody reads any more are not made any more."""
        self.desk.lose(name)
        self.drafters.remove(name)
        self._retire_features()

    def _retire_features(self) -> None:
        self.versions.retire({s.feature_id for s in self._sequences.values()})

    def _finish(self, sequence: Sequence, error: DsparkError | None = None) -> None:
        """The last event of a sequence; everything it held goes back."""
        state = sequence.state
        reason = FinishReason.ERROR if error is not None else state.finish
        assert reason is not None, "a sequence without an end cannot finish"
        self._batcher.remove(sequence)
        self.desk.close(sequence)
        del self._sequences[state.key]
        if sequence.feature_id and sequence.feature_id not in self.drafters.feature_ids():
            self._retire_features()
        self._events.append((state.key, Finished(reason, state.usage, state.figures, error)))
        self.traces.end(sequence, reason, error)

    def check_integrity(self) -> None:
        """Every block is free, idle or owned once; every sequence stands in one queue."""
        running, waiting = self._batcher.running, self._batcher.waiting
        self.cache.pool.check_integrity([s.blocks for s in running])
        assert not any(s.blocks for s in waiting), "a waiting sequence owns blocks"
        assert sorted(map(id, (*running, *waiting))) == sorted(map(id, self._sequences.values())), (
            "a sequence is lost or queued twice"
        )
        for sequence in running:
            state = sequence.state
            assert state.computed < len(state.ids), "nothing is left to compute"
            held = len(sequence.blocks) * self.cache.pool.block_size
            assert held >= state.computed, "computed tokens without a block"
        under_way = [s for errand in self.desk.errands for s in errand.left.values()]
        asked = [s for s in running if s.asked is not None]
        assert sorted(map(id, under_way)) == sorted(map(id, asked)), "a round is lost"
        assert not any(s.draft for s in asked), "a draft in hand and another under way"
