"""What rounding costs a trained drafter: accepted lengths by kernel, on answers that are the same.

    python benchmarks/native_draft_quality.py CHECKPOINT PROMPTS.jsonl... [--dtype int8]

The target answers the first prompts of each file three times, with the drafter on torch in float32
and on the native kernels in float32 and int8. Text is the target's alone, so it is the same and
accepted lengths τ (bonus token counted, blocks verified whole) compare answer by answer: printed
are τ, its ratio to torch's with a 95 % interval (bootstrap over answers), and over rounds that
begin at the same place the share of drafted ids that are the same and the mean distance of
confidences.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dspark.cli.target import Target
from dspark.models.drafters.loading import load_drafter
from dspark.models.drafters.native import NativeDraftOptions
from dspark.training.rounds import Answer, Asking, ask


def lengths(answers: Sequence[Answer]) -> np.ndarray:
    """[answers, 2]: tokens that rounds brought, and rounds."""
    return np.array(
        [(sum(1 + r.accepted for r in one.rounds), len(one.rounds)) for one in answers], float
    )


def tau(figures: np.ndarray) -> float:
    tokens, rounds = figures.sum(0)
    return float(tokens / rounds)


def ratio(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(ours), (2000, len(ours)))
    ratios = [tau(ours[pick]) / tau(theirs[pick]) for pick in picks]
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)


def agreement(ours: Sequence[Answer], theirs: Sequence[Answer]) -> tuple[float, float]:
    same, apart = [], []
    for mine, other in zip(ours, theirs, strict=True):
        known = {r.start: r for r in other.rounds}
        for r in mine.rounds:
            if (twin := known.get(r.start)) is None:
                continue
            for k, (a, b) in enumerate(zip(r.draft, twin.draft, strict=False)):
                same.append(a == b)
                if a != b:
                    break  # what follows reads another token
                p, q = 1 / (1 + np.exp(-np.array([x.logits[k] for x in (r, twin)])))
                apart.append(abs(p - q))
    return float(np.mean(same)), float(np.mean(apart))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("prompts", type=Path, nargs="+")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--count", type=int, default=4, help="prompts of each file")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0: seeded")
    args = parser.parse_args()
    target = Target(args.model, "native", args.dtype, "cpu", args.threads)
    prompts = [
        one.ids
        for file in args.prompts
        for one in target.prompts(file, skip_bad=True)[: args.count]
    ]
    asking = Asking(
        args.temperature, coupled=args.temperature > 0, max_tokens=args.tokens, concurrency=16
    )
    told: dict[str, list[Answer]] = {}
    for name, native in (
        ("torch", None),
        ("float32", NativeDraftOptions("float32", threads=args.threads)),
        ("int8", NativeDraftOptions("int8", threads=args.threads)),
    ):
        drafter = load_drafter(args.checkpoint, target.tensors, native=native)
        target.backend.load_projection(drafter.projection)
        told[name] = ask(target.backend, drafter, prompts, asking, eos_ids=target.eos_ids)
        mine, theirs = lengths(told[name]), lengths(told["torch"])
        assert [a.ids for a in told[name]] == [a.ids for a in told["torch"]]
        low, high = ratio(mine, theirs)
        same, apart = agreement(told[name], told["torch"])
        print(
            f"{drafter.kernel.name:>28}: tau {tau(mine):.3f} in {mine.sum(0)[1]:.0f} rounds, "
            f"ratio {tau(mine) / tau(theirs):.4f} [{low:.4f}, {high:.4f}], "
            f"same ids {same:.4f}, confidences {apart:.4f} apart",
            flush=True,
        )


if __name__ == "__main__":
    main()
