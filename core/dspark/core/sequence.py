"""The state of one running choice: it is told what was committed and says what comes next.

No I/O, no clock, no tensors. Blocks, drafts and sessions belong to the engine's parts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dspark.core.requests import FinishReason, Request, SpeculationFigures, Usage


class SequenceState:
    """Tokens of one choice, how many of them are in the KV cache, and when it ends.

    ids: prompt and committed tokens; the last one is the anchor. computed: the first so many have
    keys and values. cached: how many of them a prefix hit brought at first, None before that. Stop
    ids, EOS and the token limit cut inside an accepted block (L6).
    """

    def __init__(
        self, request: Request, *, eos_ids: Collection[int], max_tokens_total: int, arrival: int
    ) -> None:
        self.request = request
        self.arrival = arrival
        self.ids = [*request.prompt_ids]
        self.computed = 0
        self.cached: int | None = None
        self.figures = SpeculationFigures()
        self.finish: FinishReason | None = None
        params = request.sampling
        ends = set(params.stop_ids) if params.ignore_eos else {*params.stop_ids, *eos_ids}
        self.stop_ids = frozenset(ends)
        room = max_tokens_total - len(request.prompt_ids)
        self.max_outputs = room if params.max_tokens is None else min(room, params.max_tokens)
        self.commit(request.committed_ids)

    @property
    def key(self) -> tuple[str, int]:
        return self.request.request_id, self.request.choice

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def outputs(self) -> int:
        """Committed tokens after the prompt; also the output position of the next one."""
        return len(self.ids) - self.prompt_tokens

    @property
    def anchor(self) -> int:
        return self.ids[-1]

    @property
    def uncomputed(self) -> int:
        """Tokens the target has still to run; 1 is a decoding step, more is prefill."""
        return len(self.ids) - self.computed

    @property
    def draft_room(self) -> int:
        """Draft tokens that could still be committed beside the bonus token."""
        return max(self.max_outputs - self.outputs - 1, 0)

    def commit(self, ids: Sequence[int]) -> int:
        """Append tokens until one ends the choice; returns how many stand."""
        for count, token in enumerate(ids, start=1):
            self.ids.append(token)
            if token in self.stop_ids and self.outputs >= self.request.sampling.min_tokens:
                self.finish = FinishReason.STOP
                return count
            if self.outputs >= self.max_outputs:
                self.finish = FinishReason.LENGTH
                return count
        return len(ids)

    def forget_computed(self) -> None:
        """Its blocks were taken away: everything must be run again (or be found cached)."""
        self.computed = 0

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.outputs, self.cached or 0)
