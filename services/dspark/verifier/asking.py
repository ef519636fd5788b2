"""After a step: whose next drafts are asked for, and of which drafter."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq

from dspark.scheduler import WAITING, Beside
from dspark.verifier.batcher import Item
from dspark.verifier.desk import DraftDesk
from dspark.verifier.drafters import Drafters
from dspark.verifier.pacing import Pacing
from dspark.verifier.planning import StepPlan, StepPlanner
from dspark.verifier.sequence import Sequence


class Asking:
    """prefill_chunk: prompt tokens that a step works on."""

    def __init__(
        self, desk: DraftDesk, drafters: Drafters, pacing: Pacing, prefill_chunk: int
    ) -> None:
        self._desk = desk
        self._drafters = drafters
        self._pacing = pacing
        self._prefill_chunk = prefill_chunk

    def ask(
        self,
        planner: StepPlanner,
        items: Seq[Item],
        running: Collection[Sequence],
        step: StepPlan,
    ) -> None:
        """For those of a step that are decoding now. Of drafters elsewhere first: while they draft,
        those of this process do."""
        self._drafters.begin_step()
        if planner.rests():
            return
        wanting: dict[str, list[Sequence]] = {}
        for item in items:
            sequence, state = item.sequence, item.sequence.state
            if state.uncomputed != 1 or state.finish is not None or not sequence.blocks:
                continue
            source = self._drafters.source_for(sequence) if state.draft_room else None
            if source is not None:
                wanting.setdefault(source.name, []).append(sequence)
        linked = [name for name in wanting if name in self._drafters.links]
        if linked:
            asking = [sequence for name in linked for sequence in wanting[name]]
            self._ask_together(planner, linked, wanting, step, self._beside(asking, running))
        for name in wanting:
            if name not in linked:
                self._ask_together(planner, [name], wanting, step)

    def _ask_together(
        self,
        planner: StepPlanner,
        names: Seq[str],
        wanting: Mapping[str, list[Sequence]],
        step: StepPlan,
        beside: Seq[Beside] = (WAITING,),
    ) -> None:
        """Drafters that answer side by side."""
        sequences = [sequence for name in names for sequence in wanting[name]]
        whose = [at for at, name in enumerate(names) for _ in wanting[name]]
        costs = [self._drafters[name].cost for name in names]
        wanted = planner.how_much_to_ask(sequences, costs, whose, step, beside)
        for sequence, tokens in zip(sequences, wanted, strict=True):
            sequence.wanted = tokens

        asked: set[Sequence] = set()
        for at, name in enumerate(names):
            known = costs[at].known

            def hopeful(sequence: Sequence, known: bool = known) -> bool:
                """Whether a draft is asked for whatever the last ones were worth."""
                return not known or sequence.probed or planner.taken_at_its_word(sequence)

            asking = [s for s, by in zip(sequences, whose, strict=True) if s.wanted and by == at]
            asked.update(self._desk.ask(self._drafters[name], asking, hopeful))
        for sequence in sequences:  # also those for whom a budget was short are unasked
            sequence.rounds_unasked = 0 if sequence in asked else sequence.rounds_unasked + 1

    def _beside(self, asking: Collection[Sequence], running: Collection[Sequence]) -> list[Beside]:
        """What may be done while they are drafted for."""
        going = [s for s in running if not s.paused]
        prompts = sum(s.state.uncomputed for s in going if s.state.uncomputed > 1)
        return self._pacing.beside(asking, going, min(prompts, self._prefill_chunk))
