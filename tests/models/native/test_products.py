"""Matrix products of every kernel set: what int8 means, and how near float32 comes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dspark.models.targets.native import NativeBackend, NativeOptions
from dspark.models.targets.native.library import kernel_sets, load_library

from ..tiny import tiny_model

CPUINFO = Path("/proc/cpuinfo")
GROUP = 64
SHAPES = [(1, 33, 100), (2, 160, 64), (5, 64, 96), (7, 31, 128), (13, 96, 577), (29, 40, 320)]


def run_here() -> list[str]:
    return kernel_sets(load_library(print))


@pytest.mark.skipif(not CPUINFO.is_file(), reason="only Linux tells what the processor has")
def test_every_set_that_the_processor_runs_was_compiled() -> None:
    """A set that the compiler refuses is left out in silence, which here would be our mistake."""
    flags = set(CPUINFO.read_text().split())
    wanted = {"avx512vnni": "avx512_vnni", "avxvnni": "avx_vnni", "avx2": "avx2"}
    assert run_here() == [*(name for name, flag in wanted.items() if flag in flags), "portable"]


@pytest.fixture(scope="module")
def backends() -> dict[str, NativeBackend]:
    return {
        name: NativeBackend(tiny_model("llama"), 16, NativeOptions(threads=2, kernels=name))
        for name in run_here()
    }


def operands(rows: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, k, generator=noise)
    x[:, :: max(k // 3, 1)] *= 30  # outliers, as activations have
    return 0.1 * torch.randn(n, k, generator=noise), x


def steps(values: NDArray[np.float32], scale: NDArray[np.float32]) -> NDArray[np.float64]:
    """Whole steps of each number, [.., groups, 64]."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(np.rint(values / scale[..., None])).clip(-127, 127).astype(float)


def grouped(values: NDArray[np.float32]) -> NDArray[np.float32]:
    rows, k = values.shape
    padded = np.zeros((rows, -(-k // GROUP) * GROUP), np.float32)
    padded[:, :k] = values
    return padded.reshape(rows, -1, GROUP)


def int8_product(weight: torch.Tensor, x: torch.Tensor) -> NDArray[np.float64]:
    """The definition: whole steps times scales, one scale for 64 inputs on either side; a weight's
    scale is the next bfloat16, so that no weight is beyond 127 steps."""
    w, a = grouped(weight.numpy()), grouped(x.numpy())
    up = (np.abs(w).max(-1) / np.float32(127)).view(np.uint32)
    w_scale = ((up + 0xFFFF) >> 16 << 16).astype(np.uint32).view(np.float32)
    a_scale = np.abs(a).max(-1) / np.float32(127)
    sums = np.einsum("ngk,rgk->rng", steps(w, w_scale), steps(a, a_scale))
    return np.einsum("rng,ng,rg->rn", sums, w_scale.astype(float), a_scale.astype(float))


@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_int8_is_what_it_says(
    backends: dict[str, NativeBackend], rows: int, n: int, k: int
) -> None:
    weight, x = operands(rows, n, k)
    truth = int8_product(weight, x)
    exact = (x.double() @ weight.double().T).numpy()
    assert np.abs(truth - exact).max() < 0.03 * np.abs(exact).max()
    for backend in backends.values():
        # A number half-way between two steps may be rounded to either.
        ours = backend.multiply(weight, x, int8=True).double().numpy()
        assert np.abs(ours - truth).max() < 2e-3 * np.abs(truth).max()
        assert np.median(np.abs(ours - truth)) < 1e-6 * np.abs(truth).max()


@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_int8_is_the_same_by_every_set_that_fuses(
    backends: dict[str, NativeBackend], rows: int, n: int, k: int
) -> None:
    weight, x = operands(rows, n, k)
    fused = [
        backend.multiply(weight, x, int8=True)
        for name, backend in backends.items()
        if name != "portable"
    ]
    assert all(torch.equal(fused[0], other) for other in fused[1:])


@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_float32_is_near_the_exact_product(
    backends: dict[str, NativeBackend], rows: int, n: int, k: int
) -> None:
    weight, x = operands(rows, n, k)
    exact = x.double() @ weight.double().T
    for backend in backends.values():
        ours = backend.multiply(weight, x, int8=False).double()
        assert (ours - exact).abs().max() < 1e-6 * x.double().abs().max() * k


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("sick", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_stay_in_their_row(
    backends: dict[str, NativeBackend], sick: float, int8: bool
) -> None:
    weight, x = operands(9, 40, 192)
    whole = {name: one.multiply(weight, x, int8=int8) for name, one in backends.items()}
    x[4, 100] = sick
    for name, backend in backends.items():
        out = backend.multiply(weight, x, int8=int8)
        assert not out[4].isfinite().any()
        well = torch.arange(9) != 4
        assert torch.equal(out[well], whole[name][well])
