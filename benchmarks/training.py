"""How fast a drafter trains, in how much memory, and how both grow.

    python benchmarks/training.py [--threads N] [--precision float32|bfloat16]

One process a row, on answers made up at random in the sizes of SmolLM2-135M (D 576, V 49,152, five
layers read), 120 prompt and 160 answer tokens each, 8 answers a step. Seconds are of the process's
CPU time, so that a busy machine does not count; growth is memory above that before the first step.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

BASE = {
    "kind": "dspark",
    "gamma": 6,
    "layers": 2,
    "rank": 64,
    "draft_vocab": 8192,
    "anchors": 32,
    "chunk_rows": 512,
}
ROWS = [
    {},
    {"anchors": 8},
    {"anchors": 128},
    {"gamma": 3},
    {"gamma": 12},
    {"draft_vocab": 2048},
    {"draft_vocab": 32768},
    {"draft_vocab": 49152},
    {"anchors": 128, "chunk_rows": 100_000},
    {"draft_vocab": 49152, "chunk_rows": 100_000},
    {"kind": "dflash", "layers": 5},
    {"kind": "eagle3", "layers": 1},
    {"kind": "mtp", "layers": 1, "gamma": 1},
]
STEPS = 3


def measure(row: dict[str, object], threads: int, precision: str) -> dict[str, float]:
    """Of this process: block tokens a CPU second, seconds a step, MB before and above it."""
    import numpy as np
    import torch
    from smollm2_shape import LAYERS_READ, D, V, drafter_config

    from dspark.models.drafters.draft_vocab import DraftVocabulary
    from dspark.models.drafters.kinds import new_drafter
    from dspark.models.drafters.target_tensors import TargetTensors
    from dspark.training.config import LossSection, TrainingSection
    from dspark.training.examples import Example, Layout, Origin, Target
    from dspark.training.trainer import Trainer

    torch.set_num_threads(threads)
    facts = {**BASE, **row}
    dspark = facts["kind"] == "dspark"
    embedding = 0.05 * torch.randn(V, D)
    config = drafter_config(
        kind=str(facts["kind"]),
        gamma=int(facts["gamma"]),
        num_layers=int(facts["layers"]),
        head="vanilla" if dspark else "none",
        rank=int(facts["rank"]) if dspark else 0,
        confidence=dspark,
        draft_vocab_size=int(facts["draft_vocab"]) % V,
    )
    places = config.draft_vocab
    vocabulary = DraftVocabulary(np.arange(places), V) if places < V else None
    drafter = new_drafter(config, TargetTensors(embedding, embedding, 1.0, None, 30), vocabulary)
    made = []
    for i in range(16):
        p = torch.rand(160, 64).sort(-1, descending=True).values
        p = p / p.sum(-1, keepdim=True)
        made.append(
            Example(
                Origin(i),
                torch.randint(0, places, (280,), dtype=torch.int32),
                120,
                torch.randn(280, D * len(LAYERS_READ)).half(),
                Target(
                    torch.randint(0, places, (160, 64), dtype=torch.int32),
                    p.half(),
                    torch.zeros(160),
                ),
            )
        )

    class Made:
        def __init__(self) -> None:
            self.layout = Layout(LAYERS_READ, D, 64)
            self.origins = [one.origin for one in made]
            self.lengths = [(120, 160)] * len(made)

        def examples(self, indices: list[int], *, features: bool = True) -> list[Example]:
            return [made[i] for i in indices]

    trainer = Trainer(
        drafter,
        Made(),
        range(len(made)),
        TrainingSection(
            steps=1000,
            sequences=8,
            anchors=int(facts["anchors"]),
            chunk_rows=int(facts["chunk_rows"]),
            precision=precision,
        ),
        LossSection().weights(config.kind, config.confidence),
        clock=time.process_time,
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    trainer.advance()
    reports = [trainer.advance() for _ in range(STEPS)]
    seconds = sum(report.seconds for report in reports) / STEPS
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    tokens = sum(report.block_tokens for report in reports) / STEPS
    return {
        "tokens": tokens,
        "rate": tokens / seconds,
        "seconds": seconds,
        "before": before,
        "above": peak - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.row is not None:
        print(json.dumps(measure(json.loads(asked.row), asked.threads, asked.precision)))
        return
    print(f"{asked.precision}, {asked.threads} threads; " + json.dumps(BASE))
    print("| change | block tokens a step | s a step | block tokens/s | MB before | MB above |")
    print("|---|---|---|---|---|---|")
    for row in ROWS:
        command = [sys.executable, __file__, "--row", json.dumps(row)]
        command += ["--threads", str(asked.threads), "--precision", asked.precision]
        found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        change = ", ".join(f"{name} {value}" for name, value in row.items()) or "as above"
        print(
            f"| {change} | {found['tokens']:.0f} | {found['seconds']:.2f} | {found['rate']:.0f} | "
            f"{found['before']:.0f} | {found['above']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
