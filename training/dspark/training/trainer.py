"""The training loop: batch, losses, step, and now and then a checkpoint.

Batches, anchors and the schedule are functions of seed and step, so a run that was killed goes on
with the same curve; and several workers take parts of one batch, so together they walk the same.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dspark.models.drafters.trunk import Trunk
from dspark.training.config import TrainingSection
from dspark.training.errors import TrainingStopped
from dspark.training.examples import Example
from dspark.training.exchange import Alone, Exchange, sum_gradients
from dspark.training.flops import step_flops
from dspark.training.losses import Rows, Sums, Weights, chunked_losses, denominators
from dspark.training.packing import Pack, choose_anchors, pack
from dspark.training.passes import greedy_blocks, run, stands, supervised
from dspark.training.run_state import trained
from dspark.training.sources import Source, read_ahead, steps

# Anchors of the held-out answers are the same in every run.
_HELD_OUT_SEED = 1_000_003


@dataclass(frozen=True, slots=True)
class StepReport:
    """step: done, from 1. figures: means of the batch (`Sums.means`). block_tokens: supervised;
    flops: of matrix products; both of all workers. seconds: of this one."""

    step: int
    figures: dict[str, float]
    learning_rate: float
    grad_norm: float
    block_tokens: int
    flops: float
    seconds: float


class Trainer:
    """Steps of one drafter on `indices` of a source.

    The drafter's parameters with requires_grad are trained. step: how many are done.
    """

    def __init__(
        self,
        drafter: Trunk,
        source: Source,
        indices: Sequence[int],
        config: TrainingSection,
        weights: Weights,
        *,
        balance: bool = False,
        exchange: Exchange | None = None,
        step: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafter = drafter
        self.step = step
        self.config = config
        self.weights = weights
        self._exchange: Exchange = exchange or Alone()
        self._source = source
        self._clock = clock
        self._parameters = list(trained(drafter).values())
        self.optimizer = torch.optim.AdamW(
            _groups(drafter, config.weight_decay),
            lr=config.learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        domains = [origin.domain for origin in source.origins]
        batches = steps(
            indices, domains, config.sequences, config.seed, balance=balance, first=step
        )
        own = slice(self._exchange.rank, None, self._exchange.size)
        self._batches = read_ahead(source, batches, own)

    def advance(self) -> StepReport:
        """One step. Raises TrainingStopped, parameters unchanged, for a loss that is no number."""
        begun = self._clock()
        batch, examples = next(self._batches)
        own = range(self._exchange.rank, len(batch), self._exchange.size)
        packs = self._packs(examples, own)
        rows = [supervised(self.drafter, one, self.weights) for one in packs]
        over = self._exchange.sum(_total(rows))
        self.optimizer.zero_grad(set_to_none=True)
        sums = Sums.none()
        for one, supervision in zip(packs, rows, strict=True):
            sums += self._losses(one, supervision, over)
        flops = sum(step_flops(self.drafter.config, one) for one in packs)
        shared = self._exchange.sum(torch.cat((sums.values, torch.tensor([flops]).double())))
        sums, flops = Sums(shared[:-1]), float(shared[-1])
        sum_gradients(self._parameters, self._exchange)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self.config.grad_norm))
        figures = sums.means(self.weights)
        self._check(figures, norm, [batch[i] for i in own])
        rate = learning_rate(self.step, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.step += 1
        seconds = self._clock() - begun
        tokens = int(sums.values[-1])
        return StepReport(self.step, figures, rate, norm, tokens, flops, seconds)

    def _packs(self, examples: Sequence[Example], own: Sequence[int]) -> list[Pack]:
        gamma, together = self.drafter.config.gamma, self.config.together
        anchors = [
            choose_anchors(
                example.prompt_tokens,
                len(example.token_ids),
                self.config.anchors,
                np.random.default_rng([self.config.seed, self.step, i]),
            )
            for i, example in zip(own, examples, strict=True)
        ]
        device = self._parameters[0].device
        return [
            pack(examples[i : i + together], anchors[i : i + together], gamma).to(device)
            for i in range(0, len(examples), together)
        ]

    def _losses(self, one: Pack, rows: Rows, over: torch.Tensor, *, backward: bool = True) -> Sums:
        with self._precision():
            passed = run(self.drafter, one)
            confidence = passed.confidence
            return chunked_losses(
                {name: t.flatten(0, 1) for name, t in passed.hidden.items()},
                passed.logits,
                None if confidence is None else confidence.flatten().float(),
                rows,
                self.weights,
                over,
                chunk=self.config.chunk_rows,
                backward=backward,
            )

    def _precision(self) -> AbstractContextManager[None]:
        if self.config.precision == "float32":
            return nullcontext()
        return _bfloat16(self._parameters[0].device.type)

    def _check(self, figures: dict[str, float], norm: float, batch: Sequence[int]) -> None:
        wrong = [name for name, value in figures.items() if not math.isfinite(value)]
        if not math.isfinite(norm):
            wrong.append("gradient norm")
        if wrong:
            lines = sorted({self._source.origins[i].line for i in batch})
            shown = ", ".join(map(str, lines[:8]))
            raise TrainingStopped(
                f"step {self.step + 1}: {', '.join(wrong)} is not a finite number, on answers to "
                f"lines {shown}{' …' if len(lines) > 8 else ''}; the step was not taken"
            )

    def check_parameters(self) -> None:
        """Raises TrainingStopped: what is kept has to be good."""
        for name, parameter in trained(self.drafter).items():
            if not torch.isfinite(parameter).all():
                raise TrainingStopped(f"step {self.step}: {name} has numbers that are not finite")

    @torch.no_grad()
    def held_out(self, indices: Sequence[int]) -> dict[str, Any]:
        """Figures of answers that are not trained on, with their losses' weighted means; accepted:
        by position, how many of the blocks whose first k tokens are those of the text; tau: mean
        tokens a block would have committed, the bonus token counted."""
        gamma = self.drafter.config.gamma
        sums, standing = Sums.none(), torch.zeros(gamma + 1, dtype=torch.float64)
        own = list(indices)[self._exchange.rank :: self._exchange.size]
        for start in range(0, len(own), self.config.together):
            part = own[start : start + self.config.together]
            examples = self._source.examples(part)
            anchors = [
                choose_anchors(
                    example.prompt_tokens,
                    len(example.token_ids),
                    self.config.anchors,
                    np.random.default_rng([_HELD_OUT_SEED, i]),
                )
                for i, example in zip(part, examples, strict=True)
            ]
            one = pack(examples, anchors, gamma).to(self._parameters[0].device)
            rows = supervised(self.drafter, one, self.weights)
            sums += self._losses(one, rows, denominators(rows), backward=False)
            accepted = stands(greedy_blocks(self.drafter, one), one)
            standing += torch.bincount(accepted.cpu(), minlength=gamma + 1)
        values = self._exchange.sum(torch.cat((sums.values, standing)))
        counts = values[-gamma - 1 :]
        blocks = max(float(counts.sum()), 1.0)
        # Blocks that stand at least k tokens, k = 1..γ.
        at_least = counts.flip(0).cumsum(0).flip(0)[1:] / blocks
        return {
            **Sums(values[: -gamma - 1]).means(self.weights),
            "tau": 1.0 + float(at_least.sum()),
            "accepted": [round(x, 5) for x in at_least.tolist()],
        }


@contextmanager
def _bfloat16(device: str) -> Iterator[None]:
    """Products in bfloat16; norms are of float32 weights, as they should be, which torch remarks
    on."""
    with warnings.catch_warnings(), torch.autocast(device, torch.bfloat16):
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        yield


def learning_rate(step: int, config: TrainingSection) -> float:
    """Of the step after `step`: a line up to the peak, then half a cosine to 0 at the last."""
    rising = max(round(config.warmup * config.steps), 1)
    if step < rising:
        return config.learning_rate * (step + 1) / rising
    done = (step - rising) / max(config.steps - rising, 1)
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))


def _total(rows: Sequence[Rows]) -> torch.Tensor:
    total = torch.zeros(2, dtype=torch.float64)
    for part in rows:
        total += denominators(part).cpu()
    return total


def _groups(drafter: Trunk, weight_decay: float) -> list[dict[str, Any]]:
    """Norms and biases are not pulled towards zero."""
    matrices = [p for p in trained(drafter).values() if p.dim() > 1]
    others = [p for p in trained(drafter).values() if p.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
