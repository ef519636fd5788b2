"""Linear layers with weights laid out for oneDNN, for float32 on a CPU.

torch multiplies float32 by MKL, whose kernels for a few rows (a verify block, a small batch) read
the weights at a fraction of the memory's speed, most of all on processors that are not Intel's. The
same torch carries oneDNN, whose prepacked kernels do not. docs/results/ has the figures.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

# Rows the layout is chosen for. Hints from 4 to 256 gave the same layout and times; 1 a slower one.
ROWS_HINT = 64


def padded_rows(rows: int) -> int:
    """Rows to compute instead of so many: 32 or fewer as they are, then multiples of 4, above 128
    of 16.

    oneDNN compiles a kernel for each number of rows and shape of weights, keeps it for good (0.3 to
    0.5 MB) and takes milliseconds to make it. Of 512 numbers of rows this leaves 80.
    """
    step = 1 if rows <= 32 else 4 if rows <= 128 else 16
    return -(-rows // step) * step


class PackedLinear(nn.Module):
    """A frozen `nn.Linear` whose only copy of the weights is oneDNN's. [.., in] -> [.., out]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS_HINT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return cast(torch.Tensor, out)


def pack_linears(module: nn.Module) -> None:
    """Replace every linear layer below `module`, in place. Weights shared with an embedding stay
    there for look-ups."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch, device and dtype have the kernels."""
    return (
        device.type == "cpu"
        and dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
