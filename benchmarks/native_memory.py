"""What the weights of the native backend cost in memory and time, alone and in company.

    python benchmarks/native_memory.py [--model M] [--precisions float32,int8] [--steps 0]

Each line is one of the processes that open at once, its weights packed for itself (`private`) or in
a file that all map: `made` where it is not there yet, `found`, and `cold` where neither it nor the
checkpoint is in memory. Of each process: seconds to load the transformers model, to pack or map,
and to check; then, the model dropped, what the system says it holds (PSS: pages that n processes
share count 1/n for each). `nothing` is a process that has the modules and no model.

With --steps N: resident memory of one process over N ragged steps of the real model.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark.models import load_target, resolve
from dspark.models.targets.backend import RaggedBatch
from dspark.models.targets.native import NativeBackend, NativeOptions, Shelf, open_native
from dspark.models.targets.native.opening import self_check

BLOCK = 16
SEQUENCES, ROOM = 16, 384  # tokens of a sequence at most


def held(pid: int | str) -> dict[str, float]:
    """MB by kind."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kinds = {words[0].rstrip(":"): int(words[1]) / 1e3 for words in map(str.split, lines)}
    return {
        "rss": kinds["Rss"],
        "pss": kinds["Pss"],
        "private": kinds["Private_Clean"] + kinds["Private_Dirty"],
    }


def child(asked: argparse.Namespace) -> None:
    """Open as told, say how long it took, and hold until the parent says otherwise."""
    facts: dict[str, Any] = {}
    if asked.child != "nothing":
        shelf = None if asked.child == "private" else Shelf(asked.shelf)
        options = NativeOptions(asked.precisions, threads=asked.threads, shelf=shelf)
        begin = time.perf_counter()
        model = load_target(resolve(asked.model), dtype=torch.float32, device="cpu")
        loaded = time.perf_counter()
        backend = NativeBackend(model, BLOCK, options)
        packed = time.perf_counter()
        self_check(backend, model, asked.precisions)
        checked = time.perf_counter()
        facts["seconds"] = (loaded - begin, packed - loaded, checked - packed)
        gone = weakref.ref(model)
        del model
        facts["dropped_at_once"] = gone() is None
        gc.collect()
    print(json.dumps(facts), flush=True)
    sys.stdin.readline()


def forget(directory: Path) -> None:
    """Let the system drop the files' pages, which must be clean and mapped by nobody."""
    for file in directory.iterdir():
        with file.open("rb") as held_open:
            os.fsync(held_open.fileno())
            os.posix_fadvise(held_open.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(asked: argparse.Namespace, how: str, precision: str, shelf: Path, count: int) -> None:
    command = [sys.executable, __file__, "--child", how, "--precisions", precision]
    command += ["--shelf", str(shelf), "--model", asked.model, "--threads", str(asked.threads)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(count)]  # type: ignore[call-overload]
    try:
        told = [json.loads(one.stdout.readline()) for one in processes]
        memory = [held(one.pid) for one in processes]
    finally:
        for one in processes:
            one.communicate("\n")
    for facts, kinds in zip(told, memory, strict=True):
        seconds = "".join(f"{one:7.2f}" for one in facts.get("seconds", ()))
        megabytes = "".join(f"{kinds[kind]:9.0f}" for kind in ("rss", "pss", "private"))
        late = "" if facts.get("dropped_at_once", True) else "  (model dropped by the collector)"
        print(f"{precision:<9}{how:<8}{count:>3}  {seconds:<21}{megabytes}{late}", flush=True)


def walk(asked: argparse.Namespace, precision: str) -> None:
    """Ragged steps: sequences that begin and end at random, prompts in pieces, verify blocks."""
    model = load_target(resolve(asked.model), dtype=torch.float32, device="cpu")
    options = NativeOptions(precision, threads=asked.threads, shelf=Shelf(asked.shelf))
    backend = open_native(model, BLOCK, options)
    del model
    gc.collect()
    blocks = ROOM // BLOCK
    backend.allocate(SEQUENCES * blocks)
    table = np.arange(SEQUENCES * blocks, dtype=np.int32).reshape(SEQUENCES, blocks)
    draw, done = np.random.default_rng(0), np.zeros(SEQUENCES, np.int32)
    begin = time.perf_counter()
    for step in range(asked.steps + 1):
        if step % max(asked.steps // 5, 1) == 0:
            at = time.perf_counter() - begin
            print(f"{precision} {step:>6} steps {at:6.1f} s {held('self')['rss']:8.1f} MB resident")
            sys.stdout.flush()
        live = np.flatnonzero(draw.random(SEQUENCES) < asked.busy)
        live = live if len(live) else np.array([0])
        done[(done > ROOM - 64) | (draw.random(SEQUENCES) < 0.01)] = 0
        counts = np.where(done[live] == 0, draw.integers(1, 40, len(live)), 1).astype(np.int32)
        counts = counts + (draw.random(len(live)) < 0.2) * draw.integers(1, 6, len(live))
        starts = np.cumsum([0, *counts], dtype=np.int32)
        rows = [np.arange(done[i], done[i] + n) for i, n in zip(live, counts, strict=True)]
        backend.forward(
            RaggedBatch(
                token_ids=draw.integers(0, backend.vocab_size, starts[-1]).astype(np.int32),
                positions=np.concatenate(rows).astype(np.int32),
                query_start=starts,
                context_len=done[live].copy(),
                block_table=table[live],
                logit_rows=starts[1:] - 1,
                feature_rows=np.empty(0, np.int32),
            )
        )
        done[live] += counts.astype(np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--precisions", default="float32,int8")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--busy", type=float, default=0.2, help="share of the sequences in a step")
    parser.add_argument("--shelf", type=Path, default=None)
    parser.add_argument("--child", default=None)
    asked = parser.parse_args()
    if asked.child:
        return child(asked)
    with tempfile.TemporaryDirectory() as room:
        asked.shelf = asked.shelf or Path(room)
        if asked.steps:
            for precision in asked.precisions.split(","):
                walk(asked, precision)
            return None
        print("                      load   pack  check      rss      pss  private (MB)")
        for count in (1, 2):
            run(asked, "nothing", "-", asked.shelf, count)
        for precision in asked.precisions.split(","):
            for how in ("private", "made", "found", "cold"):
                if how == "cold":
                    forget(asked.shelf)
                    forget(resolve(asked.model))
                run(asked, how, precision, asked.shelf, 1)
            for how in ("private", "found"):
                run(asked, how, precision, asked.shelf, 2)
    return None


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
