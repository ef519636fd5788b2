"""The sequences that run at a verifier, as arrays: one row (slot) each, the same for its life."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dspark.scheduler.simulation.profiles import Blocks, FloatArray, IntArray
from dspark.scheduler.simulation.requests import Job


class Rows:
    """order: slots in use, by arrival. By slot: prefill, left: tokens of the prompt to compute, of
    the answer to commit. context: tokens computed. started: whether it has its first token.
    block: length of the draft in hand, 0 for none; number: of its arrival; logits, survival [γ],
    stands: of it. saving: mean seconds that a draft saved, NaN before the first; reach: how
    long a draft is worth asking for, likewise. unasked: rounds since a draft was asked for."""

    def __init__(self, slots: int, gamma: int) -> None:
        self.jobs: list[Job | None] = [None] * slots
        self.order: IntArray = np.zeros(0, np.intp)
        self.tenant, self.domain, self.drafter = (np.zeros(slots, np.intp) for _ in range(3))
        self.prefill, self.left, self.context = (np.zeros(slots, np.intp) for _ in range(3))
        self.group, self.block, self.number = (np.zeros(slots, np.intp) for _ in range(3))
        self.stands, self.unasked = (np.zeros(slots, np.intp) for _ in range(2))
        self.started: NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self.saving = np.full(slots, np.nan)
        self.reach = np.full(slots, np.nan)
        self.logits: FloatArray = np.zeros((slots, gamma))
        self.survival: FloatArray = np.zeros((slots, gamma))
        self.reserved = 0
        self._free = list(range(slots - 1, -1, -1))
        self._slots = slots

    def __len__(self) -> int:
        return len(self.order)

    @property
    def room(self) -> int:
        return self._slots - len(self.order)

    def add(self, job: Job, prefill: int, group: int, drafter: int) -> None:
        slot = self._free.pop()
        job.slot = slot
        self.jobs[slot] = job
        self.reserved += job.tokens
        self.tenant[slot], self.domain[slot], self.drafter[slot] = job.tenant, job.domain, drafter
        self.prefill[slot], self.left[slot] = prefill, job.answer
        self.context[slot] = job.prompt - prefill
        self.group[slot], self.block[slot], self.unasked[slot] = group, 0, 0
        self.started[slot] = False
        self.saving[slot] = self.reach[slot] = np.nan
        self.order = np.append(self.order, slot)

    def of_group(self, group: int) -> IntArray:
        mine: IntArray = self.order[self.group[self.order] == group]
        return mine

    def give(self, at: IntArray, blocks: Blocks, survival: FloatArray) -> None:
        """What the drafts of slots `at` are."""
        self.logits[at], self.survival[at] = blocks.logits, survival
        self.stands[at] = blocks.stands

    def remove(self, slots: IntArray) -> list[Job]:
        """Those that are over leave."""
        jobs = []
        for slot in slots.tolist():
            job = self.jobs[slot]
            assert job is not None, "a slot that is not in use cannot end"
            jobs.append(job)
            self.jobs[slot] = None
            self.reserved -= job.tokens
            self._free.append(slot)
        self.order = self.order[~np.isin(self.order, slots)]
        return jobs
