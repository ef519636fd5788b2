"""The CUDA path: `make check-gpu`, ten minutes at most. README says whether it has ever run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.core.config import EngineConfig
from dspark.core.requests import Committed, Request
from dspark.core.sampling import SamplingParams
from dspark.deploy.single import TargetConfig, load
from dspark.models.targets.attention import PaddedAttention
from dspark.models.targets.backend import RaggedBatch
from dspark.models.targets.kv import PagedKV
from dspark.verifier.engine import Engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]

DEVICE = "cuda"
PROMPTS = ["Why is the sky blue?", "Repeat three times: one two three four five six seven."]


def ragged(rng: np.random.Generator, block_size: int) -> RaggedBatch:
    """Decodes, verify blocks and a prefill chunk over scattered blocks."""
    contexts = np.array([0, 5, 16, 17, 200, 1000], np.int32)
    queries = np.array([70, 1, 6, 8, 1, 3], np.int32)
    blocks = -(-(contexts + queries) // block_size)
    order = rng.permutation(int(blocks.sum())).astype(np.int32)
    table = np.zeros((len(contexts), int(blocks.max())), np.int32)
    start = 0
    for row, count in zip(table, blocks, strict=True):
        row[:count] = order[start : start + count]
        start += count
    total = int(queries.sum())
    return RaggedBatch(
        token_ids=np.zeros(total, np.int32),
        positions=np.concatenate(
            [c + np.arange(q) for c, q in zip(contexts, queries, strict=True)]
        ).astype(np.int32),
        query_start=np.concatenate([[0], np.cumsum(queries)]).astype(np.int32),
        context_len=contexts,
        block_table=table,
        logit_rows=np.arange(total, dtype=np.int32),
        feature_rows=np.empty(0, np.int32),
    )


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (64, None), (None, 20.0)])
def test_flashinfer_equals_padded_attention(
    head_dim: int, window: int | None, softcap: float | None
) -> None:
    from dspark.models.targets.attention_cuda import WORKSPACE_BYTES, FlashInferStep

    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    batch, device = ragged(rng, 16), torch.device(DEVICE)
    kv = PagedKV(256, 16)
    shape = (3, 256 * 16, head_dim)
    past = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2)]
    every, none = (
        torch.arange(256 * 16, device=device),
        torch.empty(0, dtype=torch.int64).to(device),
    )
    kv.write(0, past[0], past[1], every, none)
    query = torch.randn(9, len(batch.token_ids), head_dim, dtype=torch.bfloat16, device=device)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    ours = PaddedAttention(batch, kv, device)(0, query, head_dim**-0.5, window, softcap)
    theirs = FlashInferStep(batch, kv, device, workspace)(0, query, head_dim**-0.5, window, softcap)
    # bfloat16 keeps 8 bits: values of about 1 may differ in the last place or two.
    torch.testing.assert_close(theirs, ours, atol=2e-2, rtol=2e-2)


def answers(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    for request in requests:
        engine.submit(request)
    ids: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while not engine.idle:
        for (name, _), event in engine.step():
            if isinstance(event, Committed):
                ids[name] += event.ids
        engine.check_integrity()
    return ids


def texts(dtype: str, drafter: str, verify: str, params: SamplingParams) -> dict[str, list[int]]:
    loaded = load(
        TargetConfig(
            dtype=dtype,
            device=DEVICE,
            drafter=drafter,
            engine=EngineConfig(kv_tokens=8192, verify=verify),
        )
    )
    prompts = [loaded.tokenizer.chat([{"role": "user", "content": text}]) for text in PROMPTS]
    return answers(loaded.engine, [Request(str(i), p, params) for i, p in enumerate(prompts)])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=64),
        SamplingParams(temperature=0.8, seed=7, max_tokens=64),
    ],
)
def test_l1_and_l3_in_float32(params: SamplingParams) -> None:
    plain = texts("float32", "none", "none", params)
    for verify in ("fixed:5", "early-stop", "top-k"):
        assert texts("float32", "ngram", verify, params) == plain


def test_bfloat16_mismatch_is_counted(record_property: pytest.RecordProperty) -> None:
    """Rows differ with the batch's shape in bfloat16: the rate is published, not promised."""
    params = SamplingParams(temperature=0, max_tokens=64)
    plain = texts("bfloat16", "none", "none", params)
    spec = texts("bfloat16", "ngram", "fixed:5", params)
    first_difference = {
        name: next(
            (i for i, (a, b) in enumerate(zip(ids, spec[name], strict=False)) if a != b), None
        )
        for name, ids in plain.items()
    }
    record_property("first_difference", str(first_difference))
    assert all(spec.values()), "a prompt got no answer"


def test_l2_first_token_is_drawn_from_the_target() -> None:
    """χ² of the first sampled token after a known anchor, speculating against plain decoding."""
    from scipy.stats import chi2_contingency

    counts = []
    for drafter, verify in (("none", "none"), ("ngram", "fixed:5")):
        loaded = load(
            TargetConfig(
                device=DEVICE,
                drafter=drafter,
                engine=EngineConfig(kv_tokens=65_536, verify=verify),
            )
        )
        prompt = loaded.tokenizer.chat([{"role": "user", "content": PROMPTS[1]}])
        params = SamplingParams(temperature=1.0, top_k=8, max_tokens=4)
        ids = answers(loaded.engine, [Request(str(i), prompt, params) for i in range(2000)])
        counts.append([tuple(tokens[1:3]) for tokens in ids.values()])
    kinds = sorted(set(counts[0]) | set(counts[1]))
    table = np.array([[side.count(kind) for kind in kinds] for side in counts])
    common = table.sum(0) >= 10
    pooled = np.column_stack([table[:, common], table[:, ~common].sum(1)])
    assert chi2_contingency(pooled[:, pooled.sum(0) > 0]).pvalue > 1e-3


def test_step_cost_and_speed(record_property: pytest.RecordProperty) -> None:
    """One profile and one bench, recorded for docs/results."""
    loaded = load(TargetConfig(dtype="bfloat16", device=DEVICE), profile=True)
    record_property("step_cost", loaded.cost.to_json())
    prompt = loaded.tokenizer.chat([{"role": "user", "content": PROMPTS[0]}])
    params = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True)
    ids = answers(loaded.engine, [Request(str(i), prompt, params) for i in range(16)])
    figures = loaded.engine.figures
    assert sum(map(len, ids.values())) == 16 * 256
    record_property("tokens_per_s", round(16 * 256 / figures.step_s, 1))
    record_property("added_ms_a_step", round(1e3 * figures.added_s / figures.steps, 3))
