"""What int8 costs in quality: the native backend's two precisions on the same greedy answers.

    python benchmarks/native_quality.py DIRECTORY_OF_JSONL [--prompts 4] [--tokens 64] [--model M]
                                        [--groups 64,1536]

For each file the first prompts are answered greedily in float32. Both precisions then read prompts
and answers: KL(float32 || int8) and equal argmaxes over the answers (with a 95 % Wilson interval),
and perplexity of the answers and of the prompts' own text. With several --groups int8 is also
compiled with scales of other numbers of inputs, and the speed of each is printed: 64 is what
serves, the longest row of the model is no grouping.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from native_step import best, forward, products, step

from dspark.models import load_target, load_tokenizer, resolve
from dspark.models.targets.backend import RaggedBatch
from dspark.models.targets.native import NativeBackend, NativeOptions, compiling
from dspark.models.targets.native.library import load_library

BLOCK, CHUNK = 16, 256
SERVED_GROUP = 64


def rows(backend: NativeBackend, ids: list[int], done: int, end: int) -> torch.Tensor:
    """Logits of ids[done:end] behind the first `done`, in the blocks from 0 on."""
    count = end - done
    blocks = -(-end // BLOCK)
    return backend.forward(
        RaggedBatch(
            token_ids=np.array(ids[done:end], np.int32),
            positions=np.arange(done, end, dtype=np.int32),
            query_start=np.array([0, count], np.int32),
            context_len=np.array([done], np.int32),
            block_table=np.arange(blocks, dtype=np.int32)[None],
            logit_rows=np.arange(count, dtype=np.int32),
            feature_rows=np.empty(0, np.int32),
        )
    ).logits


def answer(backend: NativeBackend, prompt: list[int], tokens: int, ends: set[int]) -> list[int]:
    ids, done = list(prompt), 0
    while len(ids) < len(prompt) + tokens and not (len(ids) > len(prompt) and ids[-1] in ends):
        end = min(done + CHUNK, len(ids))
        logits = rows(backend, ids, done, end)
        done = end
        if done == len(ids):
            ids.append(int(logits[-1].argmax()))
    return ids


class Tally:
    """Sums over texts."""

    def __init__(self) -> None:
        self.kl = self.equal = self.tokens = self.read = 0.0
        self.surprise = {"answers": [0.0, 0.0], "prompts": [0.0, 0.0]}

    def add(
        self, exact: torch.Tensor, rough: torch.Tensor, ids: torch.Tensor, answered: int
    ) -> None:
        """Log-probabilities [n, V] of rows before the tokens ids [n], the last ones answers."""
        n = len(ids)
        mine = slice(max(n - answered, 0), n)
        p = exact[mine].exp()
        self.kl += float((p * (exact[mine] - rough[mine])).sum())
        self.equal += float((exact[mine].argmax(-1) == rough[mine].argmax(-1)).sum())
        self.tokens += len(p)
        for i, one in enumerate((exact, rough)):
            surprise = -one.gather(1, ids[:, None])[:, 0]
            self.surprise["answers"][i] += float(surprise[mine].sum())
            self.surprise["prompts"][i] += float(surprise[: mine.start].sum())
        self.read += n - len(p)

    def line(self, name: str) -> str:
        share, n = self.equal / self.tokens, self.tokens
        middle = (share + 1.92 / n) / (1 + 3.84 / n)
        half = 1.96 * math.sqrt(share * (1 - share) / n + 0.96 / n**2) / (1 + 3.84 / n)
        told = ""
        for text, count in (("answers", n), ("prompts", max(self.read, 1))):
            exact, rough = (math.exp(one / count) for one in self.surprise[text])
            told += f"  {text} {exact:.3f} -> {rough:.3f} ({100 * (rough / exact - 1):+.2f} %)"
        return (
            f"{name:<16}{n:>6.0f} tokens  KL {self.kl / n:.4f}  argmax {100 * share:.1f} % "
            f"[{100 * (middle - half):.1f}, {100 * (middle + half):.1f}]  "
            f"perplexity{told}"
        )


def cache_of(group: int, room: Path) -> Path | None:
    """Where a library is compiled whose int8 scales are of so many inputs; None: the one that
    serves. A group as large as the longest row is one scale a row."""
    if group == SERVED_GROUP:
        return None
    real, wrapper = compiling.find_compiler(), room / f"cxx-{group}"
    wrapper.write_text(f'#!/bin/sh\nexec {real} -DDN_GROUP={group} "$@"\n')
    wrapper.chmod(0o755)
    os.environ["CXX"] = str(wrapper)
    load_library(print, room / f"cache-{group}")
    os.environ["CXX"] = str(real)
    return room / f"cache-{group}"


def speeds(groups: list[int], roughs: list[NativeBackend]) -> None:
    """Milliseconds of a step, context 300, and of its products alone, all by turns."""
    print(f"{'R':<4}" + "".join(f"{f'group {group}: step  products':>32}" for group in groups))
    for sequences in (1, 4, 16, 64):
        batch = step(sequences, 0, 300)
        for one in roughs:
            one.allocate(batch.block_table.size)
            one.forward(batch)
        steps = [forward(one, batch) for one in roughs]
        times = best([*steps, *(products(one, sequences) for one in roughs)])
        pairs = zip(times[: len(roughs)], times[len(roughs) :], strict=True)
        print(f"{sequences:<4}" + "".join(f"{whole:>22.2f}{part:>10.2f}" for whole, part in pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts_directory", type=Path)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kv", default=None)
    parser.add_argument("--groups", default=str(SERVED_GROUP), help="64,1536: also one a row")
    asked = parser.parse_args()
    groups = [int(group) for group in asked.groups.split(",")]
    with tempfile.TemporaryDirectory() as room:
        caches = [cache_of(group, Path(room)) for group in groups]
        compare(asked, groups, caches)


def compare(asked: argparse.Namespace, groups: list[int], caches: list[Path | None]) -> None:
    path = resolve(asked.model, progress=print)
    model, tokenizer = load_target(path, dtype=torch.float32, device="cpu"), load_tokenizer(path)
    exact = NativeBackend(model, BLOCK, NativeOptions("float32", asked.kv))
    roughs = [
        NativeBackend(model, BLOCK, NativeOptions("int8", asked.kv, cache=cache))
        for cache in caches
    ]
    ends = {int(tokenizer.eos_token_id)}
    for one in (exact, *roughs):
        one.allocate(2048 // BLOCK)
    everything = [Tally() for _ in groups]
    for file in sorted(asked.prompts_directory.glob("*.jsonl")):
        tallies = [Tally() for _ in groups]
        for line in file.read_text(encoding="utf-8").splitlines()[: asked.prompts]:
            message = [{"role": "user", "content": json.loads(line)["prompt"]}]
            prompt = tokenizer.apply_chat_template(
                message, add_generation_prompt=True, return_dict=False
            )[-1500:]
            ids = answer(exact, prompt, asked.tokens, ends)
            for done in range(0, len(ids) - 1, CHUNK):
                end = min(done + CHUNK, len(ids) - 1)
                known = torch.tensor(ids[done + 1 : end + 1])
                answered = max(min(end + 1 - len(prompt), end - done), 0)
                truth = rows(exact, ids, done, end).log_softmax(-1)
                for i, one in enumerate(roughs):
                    scores = rows(one, ids, done, end).log_softmax(-1)
                    for sums in (tallies[i], everything[i]):
                        sums.add(truth, scores, known, answered)
        for group, tally in zip(groups, tallies, strict=True):
            print(tally.line(f"{file.stem} {group}"), flush=True)
    for group, tally in zip(groups, everything, strict=True):
        print(tally.line(f"all {group}"))
    if len(groups) > 1:
        speeds(groups, roughs)


if __name__ == "__main__":
    main()
