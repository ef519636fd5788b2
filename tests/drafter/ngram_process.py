"""A drafter replica in a process of its own, to be stopped: `python ngram_process.py` prints its
address and serves prompt lookup until it is ended."""

from __future__ import annotations

import asyncio

from dspark.core.replicas import Replica
from dspark.drafter import DrafterOffer, DraftingServicer, DraftRunner
from dspark.models.drafters import NgramDrafter
from dspark.serving import serve_grpc


async def main() -> None:
    drafter = NgramDrafter(4)
    async with DraftRunner(drafter) as runner:
        servicer = DraftingServicer(runner, DrafterOffer.of(drafter), Replica("d1"))
        async with serve_grpc(servicer) as server:
            print(server.address, flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
