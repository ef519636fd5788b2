"""What a training step costs in multiplications and additions, counted from shapes."""

from __future__ import annotations

from dspark.models.drafters.config import DrafterConfig
from dspark.training.packing import Pack


def step_flops(config: DrafterConfig, pack: Pack) -> float:
    """Of matrix products, forward and backward, of one pass over a pack; a multiplication and an
    addition count as two. Norms, softmax and elementwise work are left out (a few percent).

    Backward costs a trained weight twice the forward pass, the frozen LM head once (gradients of
    what goes in), W_c once (gradients of the weight).
    """
    d, kv = config.hidden_size, config.num_kv_heads * config.head_dim
    heads = config.num_heads * config.head_dim
    T, rows = len(pack.token_ids), pack.ids.shape[0] * pack.gamma
    inputs = 2 * d if config.kind == "eagle3" else d
    layer = inputs * (heads + 2 * kv) + heads * d + 3 * d * config.intermediate_size
    joined = 2 * d * d if config.kind == "mtp" else 0
    r, vocab = config.rank, config.draft_vocab
    gates = {"gated": r * (d + r), "rnn": 3 * r * (2 * r + d)}.get(config.head, 0)
    trained_rows = config.num_layers * layer + joined + gates + r * vocab
    trained_context = config.num_layers * inputs * 2 * kv + joined
    # Each block sees what is before its anchor, and itself: twice, for scores and for values.
    seen = float(pack.positions[pack.anchors].sum()) * pack.gamma + rows * pack.gamma
    attention = config.num_layers * 2 * seen * heads
    return 2.0 * (
        3 * (rows * trained_rows + T * trained_context + attention)
        + 2 * rows * d * vocab
        + 2 * T * len(config.target_layer_ids) * d * d
    )
