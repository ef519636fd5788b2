"""Which answers to make: a function of its inputs, so that a plan can be gone on with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dspark.core.errors import InvalidRequest
from dspark.core.sampling import GREEDY_TEMPERATURE
from dspark.training.prompts import Prompt, domains


@dataclass(frozen=True, slots=True)
class Heat:
    """One part of a temperature mix. share: of the answers, relative to the other parts."""

    temperature: float
    top_p: float = 1.0
    share: float = 1.0

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to make. sample: number of the answer to this prompt. seed: of its sampling."""

    prompt: Prompt
    sample: int
    heat: Heat
    seed: int

    @property
    def name(self) -> tuple[int, int]:
        """What it is known by in shards: (line, sample)."""
        return self.prompt.line, self.sample


def parse_mix(text: str) -> tuple[Heat, ...]:
    """`temperature[/top_p]:share,…`, as in "0:0.5,0.3/0.9:0.25,0.8:0.25". Raises InvalidRequest."""
    parts = []
    for part in text.split(","):
        try:
            how, _, share = part.partition(":")
            temperature, _, top_p = how.partition("/")
            heat = Heat(float(temperature), float(top_p or 1.0), float(share or 1.0))
            if not (0 <= heat.temperature <= 100 and 0 < heat.top_p <= 1 and 0 < heat.share < 1e9):
                raise ValueError
        except ValueError:
            raise InvalidRequest(
                "mix", part, "must be temperature[/top_p]:share, as 0.3/0.9:0.25"
            ) from None
        parts.append(heat)
    return tuple(parts)


def plan_jobs(
    prompts: Sequence[Prompt], answers: int, mix: Sequence[Heat], *, balance: bool, seed: int
) -> list[Job]:
    """`answers` jobs in the order they are done; more answers only add to the end.

    Prompts are taken in a shuffled order. balance: domains take turns instead, so each gets the
    same number of answers, and one that has run out of prompts begins again. A prompt's further
    samples never repeat a greedy answer while the mix has any other heat. A prompt that brings its
    answer has just that one.
    """
    rng = np.random.default_rng(seed)
    groups = list(domains(prompts).values()) if balance else [list(prompts)]
    walks = [_walk(group, rng.spawn(1)[0], mix) for group in groups]
    taken: list[Job] = []
    while walks and len(taken) < answers:
        for walk in list(walks):
            job = next(walk, None)
            if job is None:
                walks.remove(walk)
            elif len(taken) < answers:
                taken.append(job)
    return taken


def _walk(group: Sequence[Prompt], rng: np.random.Generator, mix: Sequence[Heat]) -> Iterator[Job]:
    """Jobs of one group without end; those of given answers once."""
    order = [group[i] for i in rng.permutation(len(group))]
    shares = np.array([heat.share for heat in mix])
    sampled = np.array([heat.share if not heat.greedy else 0.0 for heat in mix])
    was_greedy = set()
    for sample in itertools.count():
        again = False
        for prompt in order:
            if prompt.answer_ids is not None:
                if sample == 0:
                    yield Job(prompt, 0, Heat(0.0), 0)
                continue
            weights = sampled if prompt.line in was_greedy and sampled.any() else shares
            if prompt.line in was_greedy and not sampled.any():
                continue  # greedy alone has one answer to a prompt
            heat = mix[int(rng.choice(len(mix), p=weights / weights.sum()))]
            if heat.greedy:
                was_greedy.add(prompt.line)
            again = True
            yield Job(prompt, sample, heat, int(rng.integers(2**63)))
        if not again:
            return
