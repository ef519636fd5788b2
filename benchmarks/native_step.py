"""A step of the default model on the native backend and on transformers, in one run.

    python benchmarks/native_step.py [--model M] [--threads N] [--rows 1,16,64] [--context 300,2000]

Every figure is the best of short bursts that take turns, so that a busy machine hits all alike;
times in ms. `products` are the step's matrix products alone; `of limit` is the step over its
products plus the bytes of its keys and values at the measured bandwidth (issue 7: 1.35 at most).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from dspark.models import load_target, resolve
from dspark.models.targets.backend import Backend, RaggedBatch
from dspark.models.targets.native import NativeBackend, NativeOptions
from dspark.models.targets.native.limits import measure_limits
from dspark.models.targets.transformers import TransformersBackend

BURSTS = 8
BLOCK = 16


def step(sequences: int, drafts: int, context: int) -> RaggedBatch:
    """Sequences of `context` tokens, each with one token and `drafts` drafted ones."""
    rows = 1 + drafts
    blocks = -(-(context + rows) // BLOCK)
    every = np.arange(sequences * rows, dtype=np.int32)
    return RaggedBatch(
        token_ids=every % 1000 + 5,
        positions=np.tile(np.arange(context, context + rows), sequences).astype(np.int32),
        query_start=np.arange(sequences + 1, dtype=np.int32) * rows,
        context_len=np.full(sequences, context, np.int32),
        block_table=np.arange(sequences * blocks, dtype=np.int32).reshape(sequences, blocks),
        logit_rows=every,
        feature_rows=np.empty(0, np.int32),
    )


def best(calls: list[Callable[[], object]]) -> list[float]:
    """Milliseconds of each call, by turns."""
    seconds = np.full((BURSTS, len(calls)), np.inf)
    for burst in range(BURSTS):
        for i, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            seconds[burst, i] = time.perf_counter() - begin
    return [float(1e3 * one) for one in seconds[1:].min(axis=0)]


def products(backend: NativeBackend, rows: int) -> Callable[[], object]:
    return lambda: backend.products(rows, rows)


def forward(backend: Backend, batch: RaggedBatch) -> Callable[[], object]:
    return lambda: backend.forward(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rows", default="1,16,64")
    parser.add_argument("--context", default="300,2000")
    parser.add_argument("--drafts", default="0")
    parser.add_argument("--without-transformers", action="store_true")
    asked = parser.parse_args()
    path = resolve(asked.model, progress=print)
    model = load_target(path, dtype=torch.float32, device="cpu")
    native = [
        NativeBackend(model, BLOCK, NativeOptions(precision, threads=asked.threads), print)
        for precision in ("float32", "int8")
    ]
    torch.set_num_threads(native[0].threads)
    bandwidth = []
    for one in native:
        limits = measure_limits(one, ())
        bandwidth.append(limits.bandwidth)
        print(
            f"{one.name}: {one.threads} threads, weights {limits.weight_bytes / 1e6:.0f} MB, "
            f"{limits.bandwidth / 1e9:.1f} GB/s, {limits.arithmetic / 1e9:.0f} G multiply-adds/s"
        )
    theirs = None if asked.without_transformers else TransformersBackend(model, BLOCK)
    print(f"{'R':>4}{'l':>3}{'context':>9}  {'transformers':>12}", end="")
    print("".join(f"{one.name.split('-')[1]:>9} products of limit" for one in native))
    for context in map(int, asked.context.split(",")):
        for rows in map(int, asked.rows.split(",")):
            for drafts in map(int, asked.drafts.split(",")):
                report(native, theirs, bandwidth, rows, drafts, context)


def report(
    native: list[NativeBackend],
    theirs: Backend | None,
    bandwidth: list[float],
    sequences: int,
    drafts: int,
    context: int,
) -> None:
    batch = step(sequences, drafts, context)
    backends: list[Backend] = [*native, *([theirs] if theirs else [])]
    for backend in backends:
        backend.allocate(batch.block_table.size)
        backend.forward(batch)
    alone = [products(one, len(batch.token_ids)) for one in native]
    times = best([*alone, *(forward(one, batch) for one in backends)])
    line = f"{sequences:>4}{drafts:>3}{context:>9}  {times[4] if theirs else float('nan'):>12.1f}"
    for i, one in enumerate(native):
        limit = times[i] + 1e3 * one.kv_bytes / bandwidth[i]
        line += f"{times[2 + i]:>9.2f}{times[i]:>9.2f}{times[2 + i] / limit:>9.2f}"
    print(line, flush=True)
    for backend in backends:
        backend.allocate(0)


if __name__ == "__main__":
    main()
