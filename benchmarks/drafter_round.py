"""What a round of a trained drafter costs, and the share of its sequential head.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/drafter_round.py --json

Weights are random: times do not depend on them. Shapes are those of the default target. CPU time of
the process is measured, which on one thread is the round's own time however busy the machine is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from smollm2_shape import LAYERS, D, V, drafter_config

from dspark.core.drafts import DraftRequest, DraftSampling
from dspark.core.sampling import SamplingMode
from dspark.models.drafters.backbone import ParallelDrafter
from dspark.models.drafters.blocks import backbone_pass, sequential_stage
from dspark.models.drafters.checkpoint import DrafterCheckpoint
from dspark.models.drafters.choosing import Chooser
from dspark.models.drafters.draft_vocab import DraftVocabulary
from dspark.models.drafters.drafting import ModelDrafter
from dspark.models.drafters.kinds import new_drafter
from dspark.models.drafters.sessions import Ready
from dspark.models.drafters.target_tensors import TargetTensors

NEW = 3  # positions that a round brings


def make(args: argparse.Namespace, candidates: int) -> tuple[ParallelDrafter, ModelDrafter]:
    torch.manual_seed(0)
    config = drafter_config(
        gamma=args.gamma,
        num_layers=args.layers,
        head=args.head,
        rank=args.rank,
        draft_vocab_size=args.vocabulary,
    )
    vocabulary = None
    if args.vocabulary:
        vocabulary = DraftVocabulary(np.arange(args.vocabulary) * (V // args.vocabulary), V)
    target = TargetTensors(torch.randn(V, D), torch.randn(V, D), 1.0, None, LAYERS)
    model = new_drafter(config, target, vocabulary)
    assert isinstance(model, ParallelDrafter)
    return model, ModelDrafter(DrafterCheckpoint(model, "bench"), candidates=candidates)


def request(
    session: int, round_: int, start: int, anchor: int, mode: SamplingMode, rng: Any
) -> DraftRequest:
    return DraftRequest(
        str(session),
        round_,
        start,
        tuple(rng.integers(0, V, anchor - start + 1).tolist()),
        rng.standard_normal((anchor - start, D)).astype(np.float32),
        anchor,
        DraftSampling(mode, temperature=1.0, seed=7),
        64,
    )


def median_ms(function: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begin = time.process_time()
        function()
        times.append(time.process_time() - begin)
    return 1e3 * statistics.median(times)


@torch.inference_mode()
def measure(
    args: argparse.Namespace, requests: int, candidates: int, mode: SamplingMode
) -> dict[str, Any]:
    model, drafter = make(args, candidates)
    rng = np.random.default_rng(0)
    anchor = args.context
    asked = [request(r, 0, 0, anchor, mode, rng) for r in range(requests)]
    drafter.propose(asked)

    rounds = []
    for round_ in range(1, args.rounds + 1):
        last = [a.tokens[-1] for a in asked]
        asked = [request(r, round_, anchor, anchor + NEW, mode, rng) for r in range(requests)]
        asked = [replace(a, tokens=(t, *a.tokens[1:])) for a, t in zip(asked, last, strict=True)]
        anchor += NEW
        begin = time.process_time()
        drafter.propose(asked)
        rounds.append(time.process_time() - begin)
    whole = 1e3 * statistics.median(rounds)
    # The next round of the same contexts, for its parts one by one.
    asked = [replace(a, round=-1, start=anchor, tokens=a.tokens[-1:]) for a in asked]
    placed = [drafter.sessions.place(a) for a in asked]
    batch = [ready for ready in placed if isinstance(ready, Ready)]
    anchors = torch.tensor([a.tokens[-1] for a in asked])
    hidden = backbone_pass(model, drafter.sessions, batch, anchors)
    logits = model.base_logits(hidden)

    def head() -> None:
        chooser = Chooser(asked, rng, tops=False)
        sequential_stage(model, hidden, logits, anchors, chooser, candidates)

    ms = {
        "backbone": median_ms(
            lambda: backbone_pass(model, drafter.sessions, batch, anchors), args.rounds
        ),
        "base logits": median_ms(lambda: model.base_logits(hidden), args.rounds),
        "sequential head": median_ms(head, args.rounds),
    }
    return {
        "R": requests,
        "mode": mode.value,
        "candidates": candidates,
        "round_ms": round(whole, 2),
        **{f"{name}_ms": round(value, 2) for name, value in ms.items()},
        "head_share": round(ms["sequential head"] / whole, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--gamma", type=int, default=6)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--head", default="vanilla")
    parser.add_argument("--vocabulary", type=int, default=8192, help="0: all of the target's")
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--candidates", type=int, nargs="*", default=[128, 0])
    parser.add_argument("--modes", nargs="*", default=["greedy", "rejection", "coupled"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = [
        measure(args, requests, candidates, SamplingMode(mode))
        for mode in args.modes
        for candidates in args.candidates
        for requests in args.requests
    ]
    if args.json:
        print(json.dumps({"threads": torch.get_num_threads(), "results": results}, indent=1))
        return
    for result in results:
        print("  ".join(f"{name} {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
