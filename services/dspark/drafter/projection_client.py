"""A drafter's projection over the wire."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from dspark.client.wire_client import error_from_rpc
from dspark.core.drafts import DrafterCard
from dspark.core.errors import ModelError, Unavailable
from dspark.v1 import drafting_pb2 as pb
from dspark.v1 import drafting_pb2_grpc as pb_grpc

if TYPE_CHECKING:  # torch
    from dspark.models.targets.features import FeatureProjection


async def fetch_projection(
    channel: grpc.aio.Channel, card: DrafterCard, *, max_bytes: int, timeout_s: float
) -> FeatureProjection:
    """Raises NotFound for a drafter that has none, Unavailable, and ModelError for one that is not
    the card's or is larger than max_bytes."""
    from dspark.drafter.projection import projection_from_bytes  # torch

    stub: pb_grpc.DraftingAsyncStub = pb_grpc.DraftingStub(channel)
    call = stub.Projection(pb.ProjectionRequest(feature_id=card.feature_id), timeout=timeout_s)
    data = bytearray()
    try:
        async for response in call:
            data += response.part
            if len(data) > max_bytes:
                told = f"projection of {card.drafter_id!r}: has more than {max_bytes} bytes"
                raise ModelError(told)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # gRPC's word for a call whose channel is closed under it.
        raise Unavailable("the drafter was lost while it sent its projection") from None
    finally:
        call.cancel()
    # Also the copy: a gigabyte takes half a second.
    return await asyncio.to_thread(lambda: projection_from_bytes(bytes(data), card))
