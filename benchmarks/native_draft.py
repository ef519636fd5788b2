"""A draft round of the default target's drafter on the native kernels and on torch, in one run.

    python benchmarks/native_draft.py [--checkpoint DIRECTORY --target smollm2-135m] [--threads N]

A round is a whole `propose`: new context comes in (`new` positions a request) and a block of γ is
drafted after `context` positions. Figures are milliseconds, medians over bursts of the best call of
a burst; drafters take turns, so that a busy machine hits all alike. `products` are the matrix
products of the native round alone: what it cannot be faster than. With `--cold` other memory is
read before each call, as a target's step does; else weights that fit a cache stay there. Weights
are random unless a checkpoint is given: times do not depend on them. With one, the share of drafted
ids that are those of torch in float32 is told, on features that are random.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from smollm2_shape import LAYERS, D, V, drafter_config

from dspark.core.drafts import Draft, DraftRequest, DraftSampling
from dspark.core.sampling import SamplingMode
from dspark.models.drafters.checkpoint import DrafterCheckpoint, load_checkpoint
from dspark.models.drafters.draft_vocab import DraftVocabulary
from dspark.models.drafters.drafting import ModelDrafter
from dspark.models.drafters.kinds import new_drafter
from dspark.models.drafters.native import NativeDraftOptions, NativeKernel
from dspark.models.drafters.target_tensors import TargetTensors
from dspark.models.targets.native.threads import usable_threads

BURSTS, CALLS = 12, 4
OTHER_BYTES = 128 << 20  # more than a cache holds


class Rounds:
    """A drafter's requests, each some positions further every time it is called."""

    def __init__(
        self, drafter: ModelDrafter, requests: int, context: int, new: int, mode: SamplingMode
    ) -> None:
        self.drafter = drafter
        self._rng = np.random.default_rng(0)
        self._requests, self._new = requests, new
        self._sampling = DraftSampling(mode, temperature=1.0, seed=7)
        self._round, self._anchor = 0, 0
        self._last = [0] * requests
        self.prepare(context)
        self()

    def prepare(self, new: int) -> None:
        """The next call's requests, outside of its time."""
        self._round += 1
        begin, self._anchor = self._anchor, self._anchor + new
        vocab = self.drafter.card.vocab_size
        self._asked = []
        for r in range(self._requests):
            ids = (self._last[r], *self._rng.integers(0, vocab, new).tolist())
            self._last[r] = ids[-1]
            features = self._rng.standard_normal((new, self.drafter.card.feature_width))
            self._asked.append(
                DraftRequest(
                    str(r), self._round, begin, ids, features.astype(np.float32),
                    self._anchor, self._sampling, 64,
                )
            )  # fmt: skip

    def __call__(self) -> Sequence[object]:
        replies = self.drafter.propose(self._asked)
        assert all(isinstance(reply, Draft) for reply in replies)
        return replies


@dataclass(frozen=True, slots=True)
class Timed:
    """before: not timed."""

    call: Callable[[], object]
    before: Callable[[], object] = lambda: None


def medians(work: Sequence[Timed], cold: bool) -> list[float]:
    """Milliseconds, by turns."""
    other = np.ones(OTHER_BYTES // 8) if cold else np.zeros(0)
    seconds = np.full((BURSTS, len(work)), np.inf)
    for burst in range(BURSTS):
        for i, one in enumerate(work):
            for _ in range(CALLS):
                one.before()
                other.sum()
                begin = time.perf_counter()
                one.call()
                seconds[burst, i] = min(seconds[burst, i], time.perf_counter() - begin)
    return [float(1e3 * one) for one in np.median(seconds, axis=0)]


def checkpoint(args: argparse.Namespace) -> DrafterCheckpoint:
    if args.checkpoint:
        from dspark.models import resolve

        return load_checkpoint(args.checkpoint, TargetTensors.read(resolve(args.target)))
    torch.manual_seed(0)
    config = drafter_config(gamma=args.gamma, head=args.head, draft_vocab_size=8192)
    target = TargetTensors(torch.randn(V, D), torch.randn(V, D), 1.0, None, LAYERS)
    vocabulary = DraftVocabulary(np.arange(8192) * (V // 8192), V)
    return DrafterCheckpoint(new_drafter(config, target, vocabulary), "bench")


def same(ours: Rounds, theirs: Rounds, rounds: int) -> float:
    equal = drafted = 0
    for _ in range(rounds):
        ours.prepare(3)
        theirs.prepare(3)
        for mine, other in zip(ours(), theirs(), strict=True):
            assert isinstance(mine, Draft)
            assert isinstance(other, Draft)
            equal += sum(a == b for a, b in zip(mine.ids, other.ids, strict=True))
            drafted += len(mine.ids)
    return equal / drafted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--head", default="vanilla")
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--new", type=int, nargs="*", default=[1, 3])
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--modes", nargs="*", default=["greedy", "rejection", "coupled"])
    parser.add_argument("--kv", choices=["float32", "float16"])
    parser.add_argument("--cold", action="store_true", help="empty the caches before each call")
    args = parser.parse_args()
    threads = usable_threads(args.threads)
    torch.set_num_threads(threads)
    # torch packs the model it gets, so it goes last.
    made = checkpoint(args)
    drafters = {
        precision: ModelDrafter(made, native=NativeDraftOptions(precision, args.kv, threads))
        for precision in ("float32", "int8")
    }
    native = list(drafters.values())
    drafters["torch"] = ModelDrafter(made)
    print(", ".join(one.kernel.name for one in drafters.values()), f"{threads} threads")
    if args.checkpoint:
        talks = [Rounds(one, 4, 40, 3, SamplingMode.GREEDY) for one in drafters.values()]
        for talk, name in zip(talks[:2], drafters, strict=False):
            theirs = Rounds(drafters["torch"], 4, 40, 3, SamplingMode.GREEDY)
            print(f"same ids, {name}: {same(talk, theirs, 50):.3f}")
    print(f"{'mode':>9}{'R':>4}{'new':>4}{'torch':>8}", end="")
    print("".join(f"{name:>9} products" for name in ("float32", "int8")))
    for mode in map(SamplingMode, args.modes):
        for requests in args.requests:
            for new in args.new:
                report(
                    list(drafters.values()), native, requests, args.context, new, mode, args.cold
                )


def report(
    drafters: Sequence[ModelDrafter],
    native: Sequence[ModelDrafter],
    requests: int,
    context: int,
    new: int,
    mode: SamplingMode,
    cold: bool,
) -> None:
    rounds = [Rounds(one, requests, context, new, mode) for one in drafters]
    work = [Timed(one, partial(one.prepare, new)) for one in rounds]
    for one in native:
        assert isinstance(one.kernel, NativeKernel)
        work.append(Timed(partial(one.kernel.products, requests, requests * new)))
    float32, int8, theirs, products32, products8 = medians(work, cold)
    print(
        f"{mode.value:>9}{requests:>4}{new:>4}{theirs:>8.2f}"
        f"{float32:>9.2f}{products32:>9.2f}{int8:>9.2f}{products8:>9.2f}",
        flush=True,
    )
    for one in drafters:
        for r in range(requests):
            one.close(str(r))


if __name__ == "__main__":
    main()
