"""Sequential and confidence heads (§3.1 eq. 4 to 6, §3.2.1 eq. 7).

A sequential head adds a bias to the base logits of position k that depends on the token before it:
B_k = W2 · latent_k. The latent is r numbers, so it is what is computed for each position; W2 is
applied by the caller, to all of the draft vocabulary, to some candidates, or in chunks.
Names of parameters are those of the public DeepSpec format.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn import functional

from dspark.models.drafters.config import DrafterConfig

# What a head carries from position to position; an empty tensor for one that carries nothing.
State = torch.Tensor


class MarkovHead(nn.Module):
    """Eq. 5: latent = W1[x_{k-1}].

    rows: of W1, one for each id that can come before (`DraftVocabulary.rows`). draft_vocab: Vd.
    """

    def __init__(self, config: DrafterConfig, rows: int, draft_vocab: int) -> None:
        super().__init__()
        self.rank = config.rank
        self.markov_w1 = nn.Embedding(rows, config.rank)
        self.markov_w2 = nn.Linear(config.rank, draft_vocab, bias=False)

    def previous(self, rows: torch.Tensor) -> torch.Tensor:
        """W1 at rows [..] -> [.., r]."""
        return cast(torch.Tensor, self.markov_w1(rows))

    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        """What hidden states [.., d] contribute, for all positions in one product: [.., n]."""
        return hidden[..., :0]

    def start(self, hidden: torch.Tensor) -> State:
        """s_0 for rows like hidden [.., d]."""
        return hidden[..., :0]

    def latent(
        self, previous: torch.Tensor, prepared: torch.Tensor, state: State
    ) -> tuple[torch.Tensor, State]:
        """One position: W1[x_{k-1}] [.., r], its prepared part, s_{k-1} -> latent [.., r], s_k."""
        return previous, state

    def latents(self, rows: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """All positions, given the tokens before each: rows [.., γ], hidden [.., γ, d]
        -> [.., γ, r]."""
        previous, prepared = self.previous(rows), self.prepare(hidden)
        state, out = self.start(hidden[..., 0, :]), []
        for k in range(rows.shape[-1]):
            latent, state = self.latent(previous[..., k, :], prepared[..., k, :], state)
            out.append(latent)
        return torch.stack(out, -2)


class GatedHead(MarkovHead):
    """latent = σ(W_g [h_k; W1[x_{k-1}]] + b) ⊙ W1[x_{k-1}], as in the public code."""

    def __init__(self, config: DrafterConfig, rows: int, draft_vocab: int) -> None:
        super().__init__(config, rows, draft_vocab)
        self.gate_proj = nn.Linear(config.hidden_size + config.rank, config.rank)

    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        by_hidden = self.gate_proj.weight[:, : hidden.shape[-1]]
        return functional.linear(hidden, by_hidden, self.gate_proj.bias)

    def latent(
        self, previous: torch.Tensor, prepared: torch.Tensor, state: State
    ) -> tuple[torch.Tensor, State]:
        by_previous = self.gate_proj.weight[:, -self.rank :]
        gate = torch.sigmoid(prepared + functional.linear(previous, by_previous))
        return gate * previous, state


class RnnHead(MarkovHead):
    """Eq. 6: z_k = [s_{k-1}; W1[x_{k-1}]; h_k]; gate, candidate and output are thirds of one map.

    s_k = g ⊙ s_{k-1} + (1 - g) ⊙ tanh(candidate); latent = tanh(output).
    """

    def __init__(self, config: DrafterConfig, rows: int, draft_vocab: int) -> None:
        super().__init__(config, rows, draft_vocab)
        self.joint_proj = nn.Linear(2 * config.rank + config.hidden_size, 3 * config.rank)

    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        by_hidden = self.joint_proj.weight[:, 2 * self.rank :]
        return functional.linear(hidden, by_hidden, self.joint_proj.bias)

    def start(self, hidden: torch.Tensor) -> State:
        return hidden.new_zeros(*hidden.shape[:-1], self.rank)

    def latent(
        self, previous: torch.Tensor, prepared: torch.Tensor, state: State
    ) -> tuple[torch.Tensor, State]:
        by_rest = self.joint_proj.weight[:, : 2 * self.rank]
        joint = prepared + functional.linear(torch.cat((state, previous), -1), by_rest)
        gate, candidate, output = joint.chunk(3, -1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(candidate)
        return torch.tanh(output), state


class ConfidenceHead(nn.Module):
    """Eq. 7 before the sigmoid: wᵀ[h_k; W1[x_{k-1}]] + b."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        reads = config.rank if config.confidence_reads_prev else 0
        self.proj = nn.Linear(config.hidden_size + reads, 1)

    def by_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """The part of h, with the bias: [.., d] -> [..]."""
        weight = self.proj.weight[:, : hidden.shape[-1]]
        return functional.linear(hidden, weight, self.proj.bias).squeeze(-1)

    def by_previous(self, previous: torch.Tensor) -> torch.Tensor:
        """The part of W1[prev]: [.., r] -> [..]."""
        return functional.linear(previous, self.proj.weight[:, -previous.shape[-1] :]).squeeze(-1)

    def forward(self, hidden: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
        """Logits [..] of hidden [.., d] and, if it reads them, previous [.., r]."""
        logits = self.by_hidden(hidden)
        return logits if previous is None else logits + self.by_previous(previous)


_HEADS = {"vanilla": MarkovHead, "gated": GatedHead, "rnn": RnnHead}


def make_head(config: DrafterConfig, rows: int, draft_vocab: int) -> MarkovHead | None:
    """The configured sequential head, untrained; None for kinds and configurations without."""
    kind = _HEADS.get(config.head)
    return None if kind is None else kind(config, rows, draft_vocab)
