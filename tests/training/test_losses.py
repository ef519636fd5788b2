"""Eq. 9 to 12 against their formulas, and chunks against the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.training.examples import Target
from dspark.training.losses import Rows, Weights, chunked_losses, denominators, row_losses

PLACES = 40


def rows(n: int, k: int, seed: int = 0, *, outside: float = 0.0) -> tuple[torch.Tensor, Rows]:
    """Logits [n, PLACES] in float64 and what is asked of them. outside: share of the target's ids
    and labels that are not in the draft vocabulary."""
    noise = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(n, PLACES, generator=noise, dtype=torch.float64)
    p = (2.0 * torch.randn(n, PLACES, generator=noise, dtype=torch.float64)).softmax(-1)
    top = p.topk(k, -1)
    ids = top.indices.clone()
    ids[torch.rand(n, k, generator=noise) < outside] = -1
    labels = torch.randint(0, PLACES, (n,), generator=noise)
    labels[torch.rand(n, generator=noise) < outside] = -1
    w = torch.rand(n, generator=noise, dtype=torch.float64)
    return logits, Rows(labels, Target(ids, top.values, 1.0 - top.values.sum(-1)), w)


def spelled_out(z: torch.Tensor, row: Rows, at: int) -> tuple[float, float, float]:
    """The three losses of a row as sums over ids, the unkept ones counted as one."""
    q = z[at].softmax(-1)
    label, ids = int(row.labels[at]), row.target.top_ids[at].tolist()
    kept = dict(zip(ids, row.target.top_p[at].tolist(), strict=True))
    outside = [p for i, p in zip(ids, row.target.top_p[at].tolist(), strict=True) if i < 0]
    kept.pop(-1, None)
    rest = 1.0 - sum(float(q[i]) for i in kept)
    tv = sum(abs(float(q[i]) - p) for i, p in kept.items()) + sum(outside)
    tv += abs(rest - float(row.target.tail[at]))
    soft = -sum(p * float(q[i].log()) for i, p in kept.items())
    return 0.0 if label < 0 else -float(q[label].log()), tv, soft


@pytest.mark.parametrize("outside", [0.0, 0.3])
def test_each_loss_is_its_formula(outside: float) -> None:
    z, row = rows(9, 6, outside=outside)
    found = torch.stack(row_losses(z, row.labels, row.target), 1).tolist()
    assert found == [pytest.approx(spelled_out(z, row, i), abs=1e-9) for i in range(9)]


@pytest.mark.parametrize("outside", [0.0, 0.3])
def test_their_gradients_are_those_of_the_formulas(outside: float) -> None:
    z, row = rows(5, 6, outside=outside)
    z.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: row_losses(x, row.labels, row.target), (z,))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), k=st.integers(1, PLACES))
def test_sparse_total_variation_is_the_dense_one_within_what_was_not_kept(
    seed: int, k: int
) -> None:
    """Exact when every id is kept; else too small by at most twice the lesser of the two rests."""
    z, row = rows(8, k, seed)
    whole = rows(8, PLACES, seed)[1].target
    p = torch.zeros(8, PLACES, dtype=torch.float64).scatter(1, whole.top_ids, whole.top_p)
    q = z.softmax(-1)
    dense = (q - p).abs().sum(-1)
    _, sparse, _ = row_losses(z, row.labels, row.target)
    rest = 1.0 - q.gather(1, row.target.top_ids).sum(-1)
    lesser = torch.minimum(rest, row.target.tail)
    assert (sparse <= dense + 1e-9).all()
    assert (sparse >= dense - 2 * lesser - 1e-9).all()
    if k == PLACES:
        assert torch.allclose(sparse, dense)


class Head(torch.nn.Module):
    """A trunk, a latent and a head, as a drafter has them."""

    def __init__(self) -> None:
        super().__init__()
        noise = torch.Generator().manual_seed(5)
        for name, shape in {
            "trunk": (6, 10), "w1": (6, 4), "w2": (4, PLACES), "head": (10, PLACES), "c": (10, 1),
        }.items():  # fmt: skip
            value = torch.randn(*shape, generator=noise, dtype=torch.float64)
            setattr(self, name, torch.nn.Parameter(value))

    def losses(self, x: torch.Tensor, row: Rows, weights: Weights, chunk: int) -> float:
        """Backward through chunks; eq. 12."""
        hidden = torch.tanh(x @ self.trunk)
        sums = chunked_losses(
            {"hidden": hidden, "latent": x @ self.w1},
            lambda part: part["hidden"] @ self.head + part["latent"] @ self.w2,
            (hidden @ self.c)[:, 0],
            row,
            weights,
            denominators(row),
            chunk=chunk,
        )
        return sums.means(weights)["loss"]

    def whole(self, x: torch.Tensor, row: Rows, weights: Weights) -> torch.Tensor:
        """The same as one expression."""
        hidden = torch.tanh(x @ self.trunk)
        z = hidden @ self.head + (x @ self.w1) @ self.w2
        ce, tv, soft = row_losses(z, row.labels, row.target)
        c_star = (1.0 - 0.5 * tv).detach()
        c = torch.sigmoid((hidden @ self.c)[:, 0])
        bce = -(c_star * c.log() + (1 - c_star) * (1 - c).log())
        labelled = row.w * (row.labels >= 0)
        mean = row.w / row.w.sum()
        return (
            weights.ce * (labelled * ce).sum() / labelled.sum()
            + weights.tv * (mean * tv).sum()
            + weights.confidence * (mean * bce).sum()
            + weights.soft * (mean * soft).sum()
        )


@pytest.mark.parametrize("chunk", [1, 4, 7, 100])
@pytest.mark.parametrize("weights", [Weights(), Weights(1.0, 0.0, 0.0), Weights(0, 0, 0, 1.0)])
def test_chunks_give_the_loss_and_gradients_of_the_whole(chunk: int, weights: Weights) -> None:
    _, row = rows(17, 6, outside=0.2)
    x = torch.randn(17, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    chunked, whole = Head(), Head()
    loss = whole.whole(x, row, weights)
    loss.backward()
    assert chunked.losses(x, row, weights, chunk) == pytest.approx(float(loss.detach()))
    for name, parameter in chunked.named_parameters():
        expected = whole.get_parameter(name).grad
        if expected is not None:
            assert parameter.grad is not None
            assert torch.allclose(parameter.grad, expected, atol=1e-12), name


def test_a_loss_of_parts_is_that_of_the_whole_when_divided_by_the_whole() -> None:
    """What micro-batches and several workers rest on."""
    weights = Weights()
    _, row = rows(20, 6, outside=0.2)
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    one, parts = Head(), Head()
    one.losses(x, row, weights, 20)
    over = denominators(row)
    for part in (slice(0, 5), slice(5, 20)):
        some = Rows(row.labels[part], row.target[part], row.w[part])
        hidden = torch.tanh(x[part] @ parts.trunk)
        chunked_losses(
            {"hidden": hidden, "latent": x[part] @ parts.w1},
            lambda rows: rows["hidden"] @ parts.head + rows["latent"] @ parts.w2,
            (hidden @ parts.c)[:, 0],
            some,
            weights,
            over,
            chunk=4,
        )
    for name, parameter in one.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, parts.get_parameter(name).grad, atol=1e-12), name


def test_logits_exist_for_a_chunk_at_a_time() -> None:
    """So memory does not grow with anchors and γ."""
    asked = []
    _, row = rows(50, 6)
    hidden = torch.zeros(50, 3, dtype=torch.float64, requires_grad=True)

    def logits(part: dict[str, torch.Tensor]) -> torch.Tensor:
        asked.append(len(part["hidden"]))
        return part["hidden"] @ torch.ones(3, PLACES, dtype=torch.float64)

    over = denominators(row)
    chunked_losses({"hidden": hidden}, logits, None, row, Weights(), over, chunk=16)
    assert asked == [16, 16, 16, 2]
