"""Drafter modules around targets of each family: what they take from it, and what is their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from dspark.core.errors import ConfigError
from dspark.models.drafters.autoregressive import MtpDrafter
from dspark.models.drafters.draft_vocab import DraftVocabulary
from dspark.models.drafters.kinds import empty_drafter, new_drafter
from dspark.models.drafters.target_tensors import TargetTensors
from dspark.models.drafters.trunk import TARGET_TENSORS

from ..tiny import FAMILIES, tiny_model
from .plain import packed_hidden, plain_draft
from .scene import KINDS, SOME_IDS, Talk, V, config_of, tensors, tiny_drafter


@pytest.mark.parametrize("family", FAMILIES)
def test_it_embeds_and_scores_as_its_target(family: str) -> None:
    """Gemma scales its embeddings and caps its logits; a drafter for it must do the same."""
    model = tiny_model(family)
    drafter = tiny_drafter("markov", TargetTensors.of(model))
    ids = torch.arange(V)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert torch.allclose(drafter.embed(ids), model.get_input_embeddings()(ids), atol=1e-6)
        logits = model.get_output_embeddings()(hidden)
        cap = getattr(model.config, "final_logit_softcapping", None)
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        assert torch.allclose(drafter.base_logits(hidden), logits, atol=1e-5)


def test_a_reduced_head_has_its_rows_of_the_targets() -> None:
    target = tensors()
    drafter = tiny_drafter("reduced", target)
    assert torch.equal(drafter.lm_head.weight, target.head[SOME_IDS])
    assert drafter.embed_tokens.weight.shape == (V, 64)


@pytest.mark.parametrize("name", KINDS)
def test_the_projection_is_the_modules_own(name: str) -> None:
    """What a verifier loads gives what training computes."""
    drafter = tiny_drafter(name)
    hidden = torch.randn(5, 64 * len(drafter.config.target_layer_ids))
    projection = drafter.projection()
    assert torch.allclose(projection.apply(hidden), drafter.project(hidden), atol=1e-5)
    assert projection.layer_ids == drafter.config.target_layer_ids
    assert (projection.norm_weight is None) == (name == "eagle3")


def test_mtp_in_plain_words() -> None:
    """One layer over W [norm(embedding of i + 1); H_i], causal, and the shared head."""
    drafter = tiny_drafter("mtp")
    assert isinstance(drafter, MtpDrafter)
    talk, anchor = Talk("a", 30), 12
    ids = torch.tensor(talk.ids[1 : anchor + 1])
    layer = drafter.layers[0]

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def turned(x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(anchor)[:, None, None] * 10_000.0 ** -(torch.arange(8) / 8)
        a, b = x.chunk(2, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    with torch.inference_mode():
        embedded = norm(drafter.embed_tokens.weight[ids], drafter.embed_norm.weight)
        context = torch.from_numpy(talk.features[:anchor])
        joined = torch.cat((embedded, context), -1) @ drafter.eh_proj.weight.T
        x = norm(joined, layer.input_layernorm.weight)
        own = layer.self_attn
        query = turned(norm((x @ own.q_proj.weight.T).view(anchor, 4, 16), own.q_norm.weight))
        key = turned(norm((x @ own.k_proj.weight.T).view(anchor, 2, 16), own.k_norm.weight))
        value = (x @ own.v_proj.weight.T).view(anchor, 2, 16)
        seen = functional.scaled_dot_product_attention(
            query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1),
            is_causal=True, enable_gqa=True,
        )  # fmt: skip
        hidden = joined + seen.transpose(0, 1).flatten(1) @ own.o_proj.weight.T
        hidden = hidden + layer.mlp(norm(hidden, layer.post_attention_layernorm.weight))
        logits = norm(hidden[-1], drafter.norm.weight) @ drafter.lm_head.weight.T
    (token,), _ = plain_draft(drafter, talk.features, talk.ids[: anchor + 1])
    assert token == SOME_IDS[int(logits.argmax())]
    state = torch.from_numpy(talk.features[anchor - 1 : anchor])
    assert torch.allclose(drafter.join(state, ids[-1:])[0], joined[-1:], atol=1e-5)


@pytest.mark.parametrize("name", ["markov", "gated", "rnn"])
def test_sequential_heads_in_plain_words(name: str) -> None:
    """Eq. 5 and 6 and the gated form, position by position, from the tensors as they are stored;
    step by step and for a whole block."""
    head = tiny_drafter(name).markov_head
    noise = torch.Generator().manual_seed(2)
    h, ids = torch.randn(6, 64, generator=noise), torch.randint(0, V, (6,), generator=noise)
    r, s, expected = 8, torch.zeros(8), []
    for k in range(6):
        e = head.markov_w1.weight[ids[k]]
        if name == "gated":
            z = torch.cat((h[k], e))
            e = torch.sigmoid(head.gate_proj.weight @ z + head.gate_proj.bias) * e
        elif name == "rnn":
            z = torch.cat((s, e, h[k]))
            joint = head.joint_proj.weight @ z + head.joint_proj.bias
            g = torch.sigmoid(joint[:r])
            s = g * s + (1 - g) * torch.tanh(joint[r : 2 * r])
            e = torch.tanh(joint[2 * r :])
        expected.append(e)
    assert torch.allclose(head.latents(ids, h), torch.stack(expected), atol=1e-6)
    state, prepared = head.start(h[0]), head.prepare(h)
    for k in range(6):
        latent, state = head.latent(head.previous(ids[k]), prepared[k], state)
        assert torch.allclose(latent, expected[k], atol=1e-6)


def test_a_new_drafter_trains_all_but_its_targets_tensors() -> None:
    target, config = tensors(), config_of("rnn")
    seeds = [torch.Generator().manual_seed(seed) for seed in (3, 3, 4)]
    one, same, other = (new_drafter(config, target, generator=seed) for seed in seeds)
    frozen = {name for name, p in one.named_parameters() if not p.requires_grad}
    assert frozen == set(TARGET_TENSORS)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name)), name
        if name not in frozen and "norm" not in name and "bias" not in name:
            assert not torch.equal(parameter, other.get_parameter(name)), name


@pytest.mark.parametrize("name", ["markov", "gated", "rnn", "reduced"])
def test_gradients_reach_every_tensor_of_a_parallel_drafter(name: str) -> None:
    """Through the packed pass, the head's latents and the confidence head."""
    model = new_drafter(
        config_of(name),
        tensors(),
        DraftVocabulary(SOME_IDS, V) if name == "reduced" else None,
        generator=torch.Generator().manual_seed(0),
    )
    context, ids = torch.randn(9, 128), torch.randint(0, V, (5,))
    mask = torch.ones(5, 14, dtype=torch.bool)
    hidden = packed_hidden(model, context, ids, torch.arange(9, 14), mask)
    head, confidence = model.markov_head, model.confidence_head
    rows = torch.from_numpy(model.vocabulary.index)[ids]
    logits = model.base_logits(hidden) + head.markov_w2(head.latents(rows, hidden))
    said = confidence(hidden, head.previous(rows))
    (logits.logsumexp(-1).sum() + said.sum()).backward()
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, parameter_name
            assert parameter.grad.abs().sum() > 0, parameter_name


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="80 of 160 ids, the configuration says 160 of 160"):
        empty_drafter(config_of(), DraftVocabulary(np.arange(0, V, 2), V))
    with pytest.raises(ConfigError, match="vocab_size: the drafter was made for 160"):
        new_drafter(config_of(), replace(tensors(), embedding=torch.zeros(7, 64)))
