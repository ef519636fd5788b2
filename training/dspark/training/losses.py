"""Eq. 9 to 12, on a sparse target: its K likeliest ids and the mass of the rest.

Vocabulary-wide numbers exist for a chunk of rows at a time, so memory does not grow with anchors,
γ and vocabulary together (`chunked_losses`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from dspark.training.examples import Target

# Rows [n] -> their logits [n, Vd], differentiable.
Logits = Callable[[slice], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Weights:
    """Of the parts of eq. 12. position_decay: w_k = exp(-(k - 1) / position_decay).

    ce: of the text's own token (eq. 9). tv: eq. 10. confidence: eq. 11. soft: of the target's
    distribution in place of the text's token, which is EAGLE-3's loss.
    """

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    soft: float = 0.0
    position_decay: float = 4.0


class _RowLosses(torch.autograd.Function):
    """(ce, tv, soft) of each row; one vocabulary-wide product each way.

    With s_v = ∂tv/∂q_v on kept ids (the rest of q counts as one number) the gradient of a row is
    q (g_ce + g_soft P - g_tv Σ q s) + at kept ids (g_tv q s - g_soft p) - at the label g_ce.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        ids: torch.Tensor,
        p: torch.Tensor,
        tail: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        known = ids >= 0
        at = ids.clamp(min=0)
        top = logits.amax(-1, keepdim=True)
        q = (logits - top).exp_()
        total = q.sum(-1, keepdim=True)
        q /= total
        log_total = total.log() + top
        labelled = labels >= 0
        own = logits.gather(1, labels.clamp(min=0)[:, None])
        ce = ((log_total - own)[:, 0]) * labelled
        q_kept = q.gather(1, at) * known
        q_rest = 1.0 - q_kept.sum(-1)
        tv = (q_kept - p).abs().sum(-1) + (q_rest - tail).abs()
        soft = (p * known * (log_total - logits.gather(1, at))).sum(-1)
        slope = ((q_kept - p).sign() - (q_rest - tail).sign()[:, None]) * q_kept
        ctx.save_for_backward(q, labels, labelled, at, p * known, slope)
        return ce, tv, soft

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        g_ce, g_tv, g_soft = grads
        q, labels, labelled, at, p, slope = ctx.saved_tensors
        g_ce = g_ce * labelled
        along = g_ce + g_soft * p.sum(-1) - g_tv * slope.sum(-1)
        # q is ours alone and backward runs once: `chunked_losses` keeps no graph.
        d = q * along[:, None]
        d.scatter_add_(1, at, g_tv[:, None] * slope - g_soft[:, None] * p)
        d.scatter_add_(1, labels.clamp(min=0)[:, None], -g_ce[:, None])
        return d, None, None, None, None


def row_losses(
    logits: torch.Tensor, labels: torch.Tensor, target: Target
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each row: -log q(label), ‖q - p‖₁ and -Σ p log q over kept ids, each [n].

    logits: [n, Vd]. labels int64 [n]: place in the draft vocabulary, -1 for a token that is not in
    it, whose ce is 0. target.top_ids: places likewise, -1 outside, where q is 0. Ids that the
    target did not keep count as one: ‖·‖₁ is exact where they have no mass on one side, else a
    lower bound that is short by at most twice the smaller of the two masses.
    """
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _RowLosses.apply(  # type: ignore[no-untyped-call]
        logits, labels, target.top_ids, target.top_p, target.tail
    )
    return found


@dataclass(frozen=True, slots=True)
class Sums:
    """Weighted sums over rows, and their weights: float64 scalars as a tensor [9], to be added up
    over packs and workers.

    In order: ce, tv, confidence, soft; Σ w of labelled rows, Σ w of all rows; Σ w c*, hits (rows
    whose likeliest id is the text's), rows.
    """

    values: torch.Tensor

    @staticmethod
    def none() -> Sums:
        return Sums(torch.zeros(9, dtype=torch.float64))

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.values + other.values)

    def means(self, weights: Weights) -> dict[str, float]:
        """Weighted means, and eq. 12 as `loss`."""
        ce, tv, confidence, soft, w_labelled, w, label, hits, rows = self.values.tolist()
        parts = {
            "ce": ce / max(w_labelled, 1e-12),
            "tv": tv / max(w, 1e-12),
            "confidence": confidence / max(w, 1e-12),
            "soft": soft / max(w, 1e-12),
        }
        loss = sum(getattr(weights, name) * value for name, value in parts.items())
        return {
            "loss": loss,
            **parts,
            "acceptance": label / max(w, 1e-12),
            "agreement": hits / max(rows, 1.0),
        }


@dataclass(frozen=True, slots=True)
class Rows:
    """What is supervised, N rows. labels, target: places in the draft vocabulary. w float [N]:
    position weights, 0 beyond a text's end."""

    labels: torch.Tensor
    target: Target
    w: torch.Tensor


def denominators(rows: Rows) -> torch.Tensor:
    """Σ w of labelled rows and of all rows: float64 [2], to be added up over packs and workers
    before a backward pass, so that means are over the whole batch."""
    labelled = rows.w * (rows.labels >= 0)
    return torch.stack((labelled.double().sum(), rows.w.double().sum()))


def chunked_losses(
    hidden: dict[str, torch.Tensor],
    logits: Callable[[dict[str, torch.Tensor]], torch.Tensor],
    confidence: torch.Tensor | None,
    rows: Rows,
    weights: Weights,
    over: torch.Tensor,
    *,
    chunk: int,
    backward: bool = True,
) -> Sums:
    """Losses of N rows, `chunk` at a time, and with `backward` the gradients of their weighted
    means over `over` (`denominators` of the whole batch).

    hidden: tensors [N, ·] that `logits` makes rows of [n, Vd] from. confidence: logits [N] of
    eq. 7. Gradients go into all parameters: those that `logits` uses at once, chunk after chunk,
    and those behind `hidden` and `confidence` in one pass at the end.
    """
    w_labelled, w_all = over.clamp(min=1e-12).tolist()
    leaves = {name: t.detach().requires_grad_(backward) for name, t in hidden.items()}
    sums = torch.zeros(9, dtype=torch.float64)
    slopes = []
    for start in range(0, len(rows.w), chunk):
        part = slice(start, start + chunk)
        labels, w, target = rows.labels[part], rows.w[part], rows.target[part]
        with torch.set_grad_enabled(backward):
            z = logits({name: t[part] for name, t in leaves.items()})
            z = z.float() if z.dtype == torch.bfloat16 else z
            ce, tv, soft = row_losses(z, labels, target)
            if backward:
                loss = (
                    (weights.ce / w_labelled) * (w * ce).sum()
                    + (weights.tv / w_all) * (w * tv).sum()
                    + (weights.soft / w_all) * (w * soft).sum()
                )
                loss.backward()
        ce, tv, soft = ce.detach(), tv.detach(), soft.detach()
        standing = (1.0 - 0.5 * tv).clamp(0.0, 1.0)  # c* (eq. 8)
        bce = torch.zeros_like(w)
        if confidence is not None:
            c = confidence.detach()[part]
            bce = functional.binary_cross_entropy_with_logits(c, standing, reduction="none")
            slopes.append((weights.confidence / w_all) * w * (torch.sigmoid(c) - standing))
        hits = (z.detach().argmax(-1) == labels) & (w > 0)
        sums += torch.stack(
            [
                *((w * x).double().sum() for x in (ce, tv, bce, soft)),
                (w * (labels >= 0)).double().sum(),
                w.double().sum(),
                (w * standing).double().sum(),
                hits.double().sum(),
                (w > 0).double().sum(),
            ]
        ).cpu()
    if backward:
        ends = [t for t in hidden.values() if t.requires_grad]
        given = [leaves[name].grad for name, t in hidden.items() if t.requires_grad]
        if confidence is not None and confidence.requires_grad:
            ends.append(confidence)
            given.append(torch.cat(slopes))
        torch.autograd.backward(ends, given)
    return Sums(sums)
