"""Asking drafters for blocks and taking their replies for what they are: untrusted hints (L5)."""

from __future__ import annotations

import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dspark.core.drafts import (
    Draft,
    Drafter,
    DraftRequest,
    DraftSampling,
    NeedContext,
)
from dspark.core.sampling import SamplingMode
from dspark.models.verification import check_support
from dspark.verifier.features import FeatureCache
from dspark.verifier.guidance import Guidance
from dspark.verifier.sequence import DraftInHand, Sequence

# A drafter that answers NEED_CONTEXT twice for one round has lost more than a window.
CONTEXT_RETRIES = 2


def survival(logits: NDArray[np.float32], temperatures: NDArray[np.float64]) -> NDArray[np.float64]:
    """Raw confidence logits [γ] -> calibrated survival a_k = ∏_{i<=k} σ(logit_i / t_i).

    Ends before the first logit that is not a finite number: only x_<k may be admitted then.
    """
    alive, survivals = 1.0, []
    # A block is a handful of numbers: plain floats are five times as fast as arrays here.
    for logit, temperature in zip(logits.tolist(), temperatures.tolist(), strict=True):
        if not math.isfinite(logit):
            break
        alive /= 1.0 + math.exp(min(-logit / temperature, 700.0))
        survivals.append(alive)
    return np.array(survivals, np.float64)


class DraftDesk:
    """Sends each sequence's next DraftRequest and keeps what comes back in `sequence.draft`.

    Faulty replies are counted by kind in `faults` and count as no draft; nothing a drafter says can
    raise here. `draft_s`: by drafter, running mean of the seconds a step's drafts took in it;
    `spent_s`: all of them together.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        features: FeatureCache,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
        *,
        guidance: Guidance | None = None,
    ) -> None:
        self.faults: Counter[str] = Counter()
        self.received = 0
        self.draft_s: dict[str, float] = {}
        self.spent_s = 0.0
        self._drafters = drafters
        self._features = features
        self._vocab_size = vocab_size
        self._clock = clock
        self._guidance = guidance or Guidance(clock)

    def ask(self, sequences: Seq[Sequence]) -> None:
        """One call to each drafter for all its sequences; replies land in `sequence.draft`. Where
        the scheduler's budget is short, those go first whose drafts save most."""
        by_drafter: dict[str, list[Sequence]] = {}
        for sequence in sequences:
            by_drafter.setdefault(sequence.drafter, []).append(sequence)
        for name, wanting in by_drafter.items():
            asking = self._affordable(name, wanting)
            if not asking:
                continue
            before = self.spent_s
            self._ask_one(self._drafters[name], asking)
            spent = self.spent_s - before
            self.draft_s[name] = 0.9 * self.draft_s.get(name, spent) + 0.1 * spent

    def _affordable(self, drafter: str, wanting: list[Sequence]) -> list[Sequence]:
        wanted = sum(map(_block, wanting))
        left = self._guidance.affordable(drafter, wanted)
        if left >= wanted:
            return wanting
        asking = []
        for sequence in sorted(wanting, key=_worth, reverse=True):
            if (block := _block(sequence)) <= left:
                left -= block
                asking.append(sequence)
        return asking

    def _ask_one(self, drafter: Drafter, asking: list[Sequence]) -> None:
        for _ in range(CONTEXT_RETRIES):
            requests = [self._request(sequence) for sequence in asking]
            begin = self._clock()
            try:
                replies = list(drafter.propose(requests))
            except Exception:  # an untrusted reply may be wrong in any way at all
                self.faults["raised"] += 1
                return
            finally:
                self.spent_s += self._clock() - begin
            if len(replies) != len(requests):
                self.faults["wrong count"] += 1
                return
            again = []
            for sequence, request, reply in zip(asking, requests, replies, strict=True):
                try:
                    if self._take(sequence, request, reply):
                        again.append(sequence)
                except Exception:  # in a way that no check below foresaw
                    self.faults["malformed"] += 1
            if not again:
                return
            asking = again

    def _take(self, sequence: Sequence, request: DraftRequest, reply: object) -> bool:
        """Keep a sound draft, count anything else. Whether to ask again, from further back."""
        if not isinstance(reply, NeedContext):
            self._accept(sequence, request, reply)
            return False
        self.faults["need context"] += 1
        if not (isinstance(reply.start, int) and 0 <= reply.start < request.anchor_position):
            return False
        sequence.sent = reply.start
        return True

    def _request(self, sequence: Sequence) -> DraftRequest:
        state = sequence.state
        params = state.request.sampling
        sampling = DraftSampling(
            params.mode, params.temperature, params.seed or 0, state.request.choice
        )
        features = None
        if sequence.feature_id:
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
            gamma=_block(sequence),
            traceparent=state.request.traceparent,
        )

    def _accept(self, sequence: Sequence, request: DraftRequest, reply: object) -> None:
        fault = self._fault(request, reply)
        if fault is not None or not isinstance(reply, Draft):
            self.faults[fault or "not a draft"] += 1
            return
        sequence.sent = request.anchor_position
        if not len(reply.ids):
            return
        self.received += 1
        draft = replace(reply, ids=tuple(map(int, reply.ids)))  # NumPy's integers end here
        card = self._drafters[sequence.drafter].card
        temperatures = self._guidance.temperatures(
            card.drafter_id, request.sampling.mode, len(draft.ids)
        )
        sequence.draft = DraftInHand(
            number=self.received,
            draft=draft,
            survival=survival(draft.confidence_logits, temperatures),
        )
        if len(sequence.draft.survival) < len(draft.ids):
            self.faults["bad confidence"] += 1

    def _fault(self, request: DraftRequest, reply: object) -> str | None:
        """What makes a reply no draft as a whole, or None. May raise on what is no reply at all."""
        if not isinstance(reply, Draft):
            return "not a draft"
        if (reply.session, reply.round) != (request.session, request.round):
            return "stale"
        if len(reply.ids) > request.gamma:
            return "too long"
        logits = reply.confidence_logits
        if not isinstance(logits, np.ndarray) or logits.shape != (len(reply.ids),):
            return "malformed"
        if logits.dtype.kind != "f":
            return "malformed"
        if not all(0 <= operator.index(token) < self._vocab_size for token in reply.ids):
            return "malformed"
        if request.sampling.mode is SamplingMode.REJECTION and not self._support_is_sound(reply):
            return "bad support"
        return None

    def _support_is_sound(self, draft: Draft) -> bool:
        ids, weights = draft.support_ids, draft.support_weights
        if ids is None and weights is None:
            return True
        if not (isinstance(ids, np.ndarray) and isinstance(weights, np.ndarray)):
            return False
        if ids.dtype.kind not in "iu" or weights.dtype != np.float32:  # the wire type, see L2
            return False
        return check_support(ids, weights, draft.ids, self._vocab_size)

    def close(self, sequence: Sequence) -> None:
        """The sequence is over: its session goes."""
        if sequence.drafter:
            try:
                self._drafters[sequence.drafter].close(sequence.session)
            except Exception:  # the same distrust on the way out
                self.faults["raised"] += 1


def _block(sequence: Sequence) -> int:
    """Draft tokens that a sequence asks for."""
    return min(sequence.gamma, sequence.state.draft_room)


def _worth(sequence: Sequence) -> float:
    """Seconds that its drafts save a round, those nobody knows yet before all others."""
    return float("inf") if sequence.saving_s is None else sequence.saving_s
