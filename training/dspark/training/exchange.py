"""Workers that train one drafter together: what each adds up with the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Exchange(Protocol):
    """One worker's way to the others; every worker calls the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of all workers' tensors, equal shapes; may be the tensor itself, changed."""
        ...


class Alone:
    """One worker."""

    rank = 0
    size = 1

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class ProcessGroup:
    """Workers of `torch.distributed`, whose default group somebody else has set up (Ray Train)."""

    def __init__(self) -> None:
        self.rank = torch.distributed.get_rank()
        self.size = torch.distributed.get_world_size()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(tensor)
        return tensor


def sum_gradients(parameters: Sequence[torch.nn.Parameter], exchange: Exchange) -> None:
    """Every worker's gradients become the sum of all: that of the whole batch, since each worker
    divided by the whole batch's weights. One message for all of them."""
    if exchange.size == 1:
        return
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    flat = exchange.sum(torch.cat([grad.flatten() for grad in grads]))
    parts = torch.split(flat, [grad.numel() for grad in grads])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
