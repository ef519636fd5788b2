"""Bad requests (issue 2): each is refused with its field, its value and the limit. Values that have
an accepted meaning elsewhere have it here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dspark.core.errors import DsparkError, InvalidRequest
from dspark.core.requests import Limits, Request, Speculation, check_request
from dspark.core.sampling import SamplingMode, SamplingParams, check_sampling

V = 100
LIMITS = Limits(vocab_size=V, context_length=64, kv_tokens=4096)
NAN, INF = float("nan"), float("inf")


def ask(prompt: int = 10, *, limits: Limits = LIMITS, **sampling: Any) -> None:
    check_request(Request("a", (1,) * prompt, SamplingParams(**sampling)), limits)


# (what is asked, the field that is named, the value as it is shown, what the limit says)
REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"temperature": -1.0}, "temperature", "-1.0", "in [0, 100]"),
    ({"temperature": -1e-30}, "temperature", "-1e-30", "in [0, 100]"),
    ({"temperature": NAN}, "temperature", "nan", "in [0, 100]"),
    ({"temperature": INF}, "temperature", "inf", "in [0, 100]"),
    ({"temperature": 101}, "temperature", "101", "in [0, 100]"),
    ({"top_p": 0.0}, "top_p", "0.0", "in (0, 1]"),
    ({"top_p": 1.5}, "top_p", "1.5", "in [0, 1]"),
    ({"top_p": -0.1}, "top_p", "-0.1", "in [0, 1]"),
    ({"top_p": NAN}, "top_p", "nan", "in [0, 1]"),
    ({"top_k": -2}, "top_k", "-2", "[-1, 2^31)"),
    ({"min_p": -0.1}, "min_p", "-0.1", "in [0, 1]"),
    ({"min_p": 1.1}, "min_p", "1.1", "in [0, 1]"),
    ({"min_p": NAN}, "min_p", "nan", "in [0, 1]"),
    ({"presence_penalty": 2.1}, "presence_penalty", "2.1", "in [-2, 2]"),
    ({"presence_penalty": NAN}, "presence_penalty", "nan", "in [-2, 2]"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "-2.1", "in [-2, 2]"),
    ({"frequency_penalty": INF}, "frequency_penalty", "inf", "in [-2, 2]"),
    ({"repetition_penalty": 0.0}, "repetition_penalty", "0.0", "above 0"),
    ({"repetition_penalty": -1.0}, "repetition_penalty", "-1.0", "in [0, 100]"),
    ({"repetition_penalty": NAN}, "repetition_penalty", "nan", "in [0, 100]"),
    ({"n": 0}, "n", "0", "in [1, 64]"),
    ({"n": -1}, "n", "-1", "in [1, 64]"),
    ({"n": 100}, "n", "100", "in [1, 64]"),
    ({"seed": 2**64}, "seed", str(2**64), "fit in 64 bits"),
    ({"seed": -(2**63) - 1}, "seed", str(-(2**63) - 1), "fit in 64 bits"),
    ({"logit_bias": {V: 1.0}}, "logit_bias", str(V), "token id of the vocabulary [0, 100)"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias", "-1", "token id of the vocabulary [0, 100)"),
    ({"logit_bias": {5: 100.5}}, "logit_bias[5]", "100.5", "in [-100, 100]"),
    ({"logit_bias": {5: NAN}}, "logit_bias[5]", "nan", "in [-100, 100]"),
    ({"logit_bias": {5: -INF}}, "logit_bias[5]", "-inf", "in [-100, 100]"),
    ({"stop_ids": (V,)}, "stop_ids", str(V), "token id of the vocabulary [0, 100)"),
    ({"stop_ids": (-1,)}, "stop_ids", "-1", "token id of the vocabulary [0, 100)"),
    ({"stop_ids": (1,) * 129}, "stop_ids", "129", "more than 128"),
    ({"stop": ("",)}, "stop", "''", "not be an empty string"),
    ({"stop": ("x",) * 17}, "stop", "17", "more than 16"),
    ({"stop": ("x" * 1025,)}, "stop", "'xxx", "longer than 1024"),
    ({"max_tokens": 0}, "max_tokens", "0", "at least 1"),
    ({"max_tokens": -1}, "max_tokens", "-1", "at least 1"),
    ({"min_tokens": -1}, "min_tokens", "-1", "at least 0"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "6", "at most max_tokens = 5"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21", "in [0, 20]"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "-1", "in [0, 20]"),
    ({"top_logprobs": 3}, "top_logprobs", "3", "needs logprobs"),
    # against the room: 64 tokens in all, 10 of prompt
    ({"max_tokens": 55}, "max_tokens", "55", "64 tokens - 10 prompt tokens = 54"),
    ({"min_tokens": 55}, "min_tokens", "55", "above the room left: 54 tokens"),
]


@pytest.mark.parametrize(
    ("sampling", "field", "value", "limit"),
    REFUSED,
    ids=[f"{field}={value[:12]}" for _, field, value, _ in REFUSED],
)
def test_a_bad_value_is_refused_by_name(
    sampling: dict[str, Any], field: str, value: str, limit: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ask(**sampling)
    assert refused.value.field == field
    assert str(refused.value).startswith(f"{field}: {value}")
    assert limit in str(refused.value)
    assert isinstance(refused.value, DsparkError)


def test_a_long_value_is_not_repeated_at_length() -> None:
    with pytest.raises(InvalidRequest) as refused:
        ask(stop=("y" * 100_000,))
    assert len(str(refused.value)) < 200


TAKEN: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 1e-30},
    {"temperature": 100},
    {"top_p": 1.0},
    {"top_p": 1e-9},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": V + 1},
    {"top_k": 10**9},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"presence_penalty": -2.0, "frequency_penalty": 2.0},
    {"repetition_penalty": 1e-3},
    {"n": 1},
    {"n": 64},
    {"seed": 2**64 - 1},
    {"seed": -(2**63)},
    {"logit_bias": {0: -100.0, V - 1: 100.0}},
    {"stop_ids": (0, V - 1)},
    {"max_tokens": 1},
    {"max_tokens": 54},
    {"min_tokens": 54},
    {"min_tokens": 5, "max_tokens": 5},
    {"logprobs": True, "top_logprobs": 20},
]


@pytest.mark.parametrize("sampling", TAKEN, ids=str)
def test_values_at_their_limits_are_taken(sampling: dict[str, Any]) -> None:
    ask(**sampling)


@pytest.mark.parametrize(
    ("sampling", "mode"),
    [
        ({"temperature": 0.0}, SamplingMode.GREEDY),
        ({"temperature": 0.0, "seed": 3}, SamplingMode.GREEDY),
        ({"temperature": 1e-30}, SamplingMode.GREEDY),
        ({"top_k": 1}, SamplingMode.GREEDY),
        ({}, SamplingMode.REJECTION),
        ({"temperature": 1e-4}, SamplingMode.REJECTION),
        ({"top_k": -1}, SamplingMode.REJECTION),
        ({"seed": 0}, SamplingMode.COUPLED),
    ],
    ids=str,
)
def test_parameters_imply_a_mode(sampling: dict[str, Any], mode: SamplingMode) -> None:
    params = SamplingParams(**sampling)
    check_sampling(params, V)
    assert params.mode is mode


@pytest.mark.parametrize("choice", [-1, 64, 2**32])
def test_a_choice_that_no_request_has_is_refused(choice: int) -> None:
    """The noise of a seeded request is keyed by it; a bad one must not get as far as a step."""
    asked = Request("a", (1, 2), SamplingParams(seed=1), choice=choice)
    with pytest.raises(InvalidRequest, match=f"choice: {choice}"):
        check_request(asked, LIMITS)


# --- the prompt -----------------------------------------------------------------------------------


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="prompt: '' is empty: it must have at least 1 token"):
        ask(prompt=0)


@pytest.mark.parametrize("token", [-1, V, 2**40])
@pytest.mark.parametrize("where", ["prompt_ids", "committed_ids"])
def test_an_id_outside_the_vocabulary_is_refused(where: str, token: int) -> None:
    asked = replace(Request("a", (1, 2)), **{where: (1, token)})
    with pytest.raises(InvalidRequest) as refused:
        check_request(asked, LIMITS)
    assert str(refused.value).startswith(f"prompt_ids: {token} is not a token id")


@pytest.mark.parametrize("prompt", [64, 65, 5000])
def test_a_prompt_at_and_beyond_the_context_is_refused(prompt: int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ask(prompt=prompt)
    assert str(refused.value) == (
        f"prompt: '{prompt} tokens' leaves no room to answer: prompt and answer together hold at "
        "most 64 tokens"
    )


def test_a_prompt_that_is_too_long_is_not_looked_at_id_by_id() -> None:
    class Long(tuple[int, ...]):
        def __len__(self) -> int:
            return 10_000_000

        def __iter__(self) -> Iterator[int]:
            raise AssertionError("its ids are looked at")

    with pytest.raises(InvalidRequest, match="'10000000 tokens' leaves no room"):
        check_request(Request("a", Long((V,))), LIMITS)


def test_a_prompt_one_below_the_context_has_room_for_one_token() -> None:
    ask(prompt=63)
    ask(prompt=63, max_tokens=1)
    with pytest.raises(InvalidRequest, match="max_tokens: 2 is above the room left"):
        ask(prompt=63, max_tokens=2)


def test_the_smaller_of_context_and_pool_is_the_limit() -> None:
    small_pool = Limits(vocab_size=V, context_length=64, kv_tokens=32)
    ask(prompt=31, limits=small_pool)
    with pytest.raises(InvalidRequest, match="at most 32 tokens"):
        ask(prompt=32, limits=small_pool)


@pytest.mark.parametrize("gamma", [-1, 65, 2**32])
def test_a_block_that_nobody_drafts_is_refused(gamma: int) -> None:
    asked = Request("a", (1,), speculation=Speculation(gamma=gamma))
    with pytest.raises(InvalidRequest, match=rf"speculation.gamma: {gamma} must be in \[0, 64\]"):
        check_request(asked, LIMITS)
