"""What a row of logits costs on its way to a token, by mode, vocabulary and rows of a step.

    python benchmarks/logits_path.py [--vocabulary 49152,151936,262144] [--rows 1,6,96]
        [--modes greedy,seeded,…] [--before CHECKOUT] [--json FILE]

Microseconds per judged row of `argmax_rows` and `judge_step`, the best of some turns: what runs
between a backend's logits and a step's verdicts. 1 row is one sequence without a draft, 6 rows one
with five draft tokens that all stand, 96 rows sixteen of those. `floor` is one pass over a row
(its maximum) at the bandwidth of that vocabulary and number of rows.

--before: another checkout of this project, with this file in it. Both are measured in processes of
their own that take turns, and the last columns are its figure and how many times slower it is.
One thread. Logits are of a language model's shape: standard deviation 2.5, and twenty candidates
8 to 18 above the mean.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "rejected": {},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "flat top-p 0.9": {"temperature": 4.0, "top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "seeded": {"seed": 7},
    "seeded top-p 0.9": {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    "penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.1,
    },
    "bias of 300": {"temperature": 0.0, "logit_bias": {7 * i: 0.5 for i in range(300)}},
    "logprobs 0": {"temperature": 0.0, "logprobs": True},
    "logprobs 5": {"temperature": 0.0, "logprobs": True, "top_logprobs": 5},
    "logprobs 20": {"temperature": 0.0, "logprobs": True, "top_logprobs": 20},
    "all together": {
        "temperature": 0.8,
        "top_k": 200,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.1,
        "logit_bias": {7 * i: 0.5 for i in range(300)},
        "logprobs": True,
        "top_logprobs": 20,
        "seed": 7,
    },
}
DRAFTS = 5
PROMPT, OUTPUT = 500, 500
TURNS = 7
TURN_S = 0.02
Call = Callable[[], int]


def prepare(mode: str, vocab_size: int, rows: int) -> Call:
    """A step of `rows` rows, to be run again and again; returns how many rows it judged."""
    import numpy as np
    import torch

    from dspark.core.drafts import Draft
    from dspark.core.requests import Request
    from dspark.core.sampling import SamplingParams
    from dspark.core.sequence import SequenceState
    from dspark.core.verdicts import Verdict
    from dspark.models.verification import Scratch, TokenCounts, argmax_rows
    from dspark.verifier.batcher import Item
    from dspark.verifier.judging import judge_step
    from dspark.verifier.sequence import DraftInHand, Sequence

    torch.set_num_threads(1)
    rng = np.random.default_rng(1)
    values = rng.standard_normal((rows, vocab_size), np.float32) * np.float32(2.5)
    values[:, rng.integers(0, vocab_size, 20)] = rng.uniform(8, 18, (rows, 20))
    logits = torch.from_numpy(values)
    if mode == "floor":
        return lambda: len(values.max(axis=1))
    params = SamplingParams(**MODES[mode])
    seen = rng.integers(0, vocab_size, PROMPT + OUTPUT).tolist()
    drafted = 0 if rows == 1 else DRAFTS
    items = []
    for r in range(rows // (1 + drafted)):
        request = Request(f"r{r}", tuple(seen[:PROMPT]), params, committed_ids=tuple(seen[PROMPT:]))
        state = SequenceState(request, eos_ids=(), max_tokens_total=10**6, arrival=r)
        sequence = Sequence(state, np.random.default_rng(r))
        sequence.counts = TokenCounts.of(seen[:PROMPT], seen[PROMPT:])
        items.append(Item(sequence, 1, True, True, drafted))
    scratch = Scratch()

    def run(lengths: list[int], rows: torch.Tensor = logits) -> list[Verdict]:
        outcomes = judge_step(items, lengths, rows, argmax_rows(rows), scratch)
        return [one for one in outcomes if isinstance(one, Verdict)]

    # Drafts that stand: a target's own tokens, found one by one; with rejection sampling the
    # likeliest token, drafted with next to no weight, so that it is never refused.
    refused = mode == "rejected"
    rejection = params.mode.value == "rejection"
    blocks = np.zeros((len(items), drafted), np.int64)
    for k in range(drafted):
        if rejection:
            place = -1 if refused else 0  # the least likely or the likeliest
            order = values[k :: 1 + drafted].argsort(axis=1)
            blocks[:, k] = order[:, 0 if place else -1]
        else:
            for i, item in enumerate(items):
                item.sequence.draft = _in_hand(Draft, DraftInHand, blocks[i, :k], None)
            part = np.concatenate([values[i * 6 : i * 6 + k + 1] for i in range(len(items))])
            verdicts = run([k] * len(items), torch.from_numpy(part))
            blocks[:, k] = [one.ids[k] for one in verdicts]
    for i, item in enumerate(items):
        support = None
        if rejection and drafted:
            others = rng.permutation(vocab_size)[:127]
            ids = np.stack([[x, *others[others != x][:126]] for x in blocks[i]]).astype(np.int32)
            weights = np.ones(ids.shape, np.float32)
            weights[:, 0] = 1e4 if refused else 1e-9
            support = ids, weights
        if drafted:
            item.sequence.draft = _in_hand(Draft, DraftInHand, blocks[i], support)
    lengths = [drafted] * len(items)
    return lambda: sum(len(one.ids) for one in run(lengths))


def _in_hand(draft: Any, in_hand: Any, ids: Any, support: Any) -> Any:
    import numpy as np

    made = draft("", 0, tuple(map(int, ids)), np.zeros(len(ids), np.float32), *(support or ()))
    return in_hand(0, made, np.ones(len(ids)))


def measure(call: Call) -> float:
    """Microseconds per judged row, the best of one turn."""
    best, end = float("inf"), time.perf_counter() + TURN_S
    while True:
        begin = time.perf_counter()
        judged = call()
        now = time.perf_counter()
        best = min(best, 1e6 * (now - begin) / judged)
        if now > end:
            return best


def serve() -> None:
    """Lines in: a new [mode, V, rows], or an empty one for another turn; lines out: its figure."""
    call: Call = lambda: 1  # noqa: E731
    for line in sys.stdin:
        if line.strip():
            mode, vocab_size, rows = json.loads(line)
            call = prepare(mode, vocab_size, rows)
            call()
        print(measure(call), flush=True)


class Worker:
    """A process that measures one checkout."""

    def __init__(self, checkout: Path) -> None:
        roots = ("core", "models", "scheduler", "services", "client", "protos")
        path = os.pathsep.join(str(checkout / root) for root in roots)
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        file = checkout / "benchmarks" / Path(__file__).name
        self._process = subprocess.Popen(
            [sys.executable, str(file), "--worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
        )  # fmt: skip

    def ask(self, line: str) -> float:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(10)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", default="49152,151936,262144")
    parser.add_argument("--rows", default="1,6,96")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--before", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        serve()
        return
    checkouts = [Path(__file__).resolve().parents[1], *([asked.before] if asked.before else [])]
    workers = [Worker(one.resolve()) for one in checkouts]
    found = []
    try:
        print(f"{'mode':<18}{'V':>8}{'rows':>5}{'floor':>8}{'us/row':>9}", end="")
        print(f"{'before':>9}{'ratio':>7}" if asked.before else "")
        for vocab_size in map(int, asked.vocabulary.split(",")):
            for rows in map(int, asked.rows.split(",")):
                (floor,) = by_turns(workers[:1], ("floor", vocab_size, rows))
                for mode in asked.modes.split(","):
                    if mode == "rejected" and rows == 1:
                        continue
                    us = by_turns(workers, (mode, vocab_size, rows))
                    line = f"{mode:<18}{vocab_size:>8}{rows:>5}{floor:>8.1f}{us[0]:>9.1f}"
                    line += "".join(f"{one:>9.1f}{one / us[0]:>7.2f}" for one in us[1:])
                    print(line, flush=True)
                    names = ("mode", "vocabulary", "rows", "floor_us", "us", "before_us")
                    found.append(
                        dict(zip(names, (mode, vocab_size, rows, floor, *us), strict=False))
                    )
    finally:
        for worker in workers:
            worker.close()
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


def by_turns(workers: list[Worker], case: tuple[str, int, int]) -> list[float]:
    best = [worker.ask(json.dumps(case)) for worker in workers]
    for _ in range(TURNS - 1):
        best = [min(b, worker.ask("")) for b, worker in zip(best, workers, strict=True)]
    return best


if __name__ == "__main__":
    main()
