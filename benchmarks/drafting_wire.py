"""What the wire between a verifier and a drafter costs: the drafter drafts nothing.

    python benchmarks/drafting_wire.py [--rounds N] [--uvloop] [--json]

Two processes over loopback. A round is one step of R sequences: each brings five new positions (and
their features, d = 576, in bfloat16) and gets a block of seven. Printed: microseconds from `ask` to
the last answer (median and 95th percentile), and bytes and messages a round, up and down.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import numpy as np

from dspark.core.drafts import Draft, DrafterCard, DraftRequest, DraftSampling, NeedContext
from dspark.core.replicas import Replica
from dspark.core.sampling import SamplingMode
from dspark.drafter import (
    DrafterOffer,
    DraftingServicer,
    DraftRunner,
    RemoteDrafter,
    VerifierFacts,
)
from dspark.serving import serve_grpc

V, WIDTH, NEW, GAMMA = 49_152, 576, 5, 7
GREEDY = DraftSampling(SamplingMode.GREEDY)


class Nothing:
    """Drafts the same block for everybody, and remembers nobody."""

    def __init__(self, width: int) -> None:
        feature_id = "null" if width else ""
        self.card = DrafterCard(
            "null", "null", GAMMA, V, layer_ids=(0,), feature_id=feature_id, feature_width=width
        )
        self._ids, self._logits = tuple(range(40_000, 40_000 + GAMMA)), np.zeros(GAMMA, np.float32)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | NeedContext]:
        return [Draft(r.session, r.round, self._ids, self._logits) for r in requests]

    def close(self, session: str) -> None:
        """Nothing is remembered."""


@dataclass(frozen=True)
class Cost:
    sequences: int
    width: int
    median_us: float
    p95_us: float
    bytes_up: float
    bytes_down: float
    messages_up: float
    messages_down: float


async def serve(width: int, pipe: Connection) -> None:
    drafter = Nothing(width)
    async with DraftRunner(drafter) as runner:
        servicer = DraftingServicer(runner, DrafterOffer.of(drafter), Replica("d1"))
        async with serve_grpc(servicer, drain_s=0.0) as server:
            pipe.send(server.address)
            await asyncio.to_thread(pipe.poll, None)


def replica(width: int, pipe: Connection, fast_loop: bool) -> None:
    with asyncio.Runner(loop_factory=factory(fast_loop)) as runner:
        runner.run(serve(width, pipe))


def factory(fast_loop: bool) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if not fast_loop:
        return None
    import uvloop

    return uvloop.new_event_loop


def requests(sequences: int, width: int, round_: int) -> list[DraftRequest]:
    start = 300 + NEW * round_
    rng = np.random.default_rng(round_)
    return [
        DraftRequest(
            session=f"tenant/0123456789abcdef01234567{s:02}/0/0",
            round=round_,
            start=start,
            tokens=tuple(rng.integers(0, V, NEW + 1).tolist()),
            features=rng.standard_normal((NEW, width)).astype(np.float32) if width else None,
            output_position=start,
            sampling=GREEDY,
            gamma=GAMMA,
        )
        for s in range(sequences)
    ]


async def measure(address: str, sequences: int, width: int, rounds: int) -> Cost:
    loop, bell = asyncio.get_running_loop(), asyncio.Event()
    facts = VerifierFacts("v1", 1, "", V, "", 30)

    def ring() -> None:
        loop.call_soon_threadsafe(bell.set)

    async with RemoteDrafter(Replica("d1", address), facts, ring) as link:

        async def ask(batch: list[DraftRequest]) -> None:
            link.ask(batch)
            left = len(batch)
            while left:
                await bell.wait()
                bell.clear()
                for answer in link.answers():
                    assert isinstance(answer, Draft), answer
                    left -= 1

        took = []
        for round_ in range(rounds + 20):
            if round_ == 20:
                before = asdict(link.figures)
            batch = requests(sequences, width, round_)
            begin = time.perf_counter()
            await ask(batch)
            took.append(time.perf_counter() - begin)
        spent = {name: value - before[name] for name, value in asdict(link.figures).items()}
    micros = np.array(took[20:]) * 1e6
    return Cost(
        sequences,
        width,
        float(np.median(micros)),
        float(np.quantile(micros, 0.95)),
        spent["bytes_sent"] / rounds,
        spent["bytes_received"] / rounds,
        spent["messages_sent"] / rounds,
        spent["messages_received"] / rounds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--uvloop", action="store_true", help="on both sides")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    costs = []
    for width in (0, WIDTH):
        ours, theirs = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=replica, args=(width, theirs, args.uvloop), daemon=True)
        process.start()
        try:
            address = ours.recv()
            for sequences in (1, 8, 16):
                with asyncio.Runner(loop_factory=factory(args.uvloop)) as runner:
                    costs.append(runner.run(measure(address, sequences, width, args.rounds)))
        finally:
            ours.send("stop")
            process.join(10)
            process.kill()
    if args.json:
        print(json.dumps([asdict(cost) for cost in costs]))
        return
    print("   R    d   median µs  95 % µs  bytes up  down   messages up  down")
    for c in costs:
        print(
            f"{c.sequences:4} {c.width:4}  {c.median_us:10.0f} {c.p95_us:8.0f}"
            f"  {c.bytes_up:8.0f} {c.bytes_down:5.0f}"
            f"   {c.messages_up:11.2f} {c.messages_down:5.2f}"
        )


if __name__ == "__main__":
    main()
