"""The official `openai` client, unchanged, against the whole front."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from openai import NOT_GIVEN

from dspark.gateway.keys import KeyRing, Tenant, TenantLimits, key_hash

from .served import FOR_EVER, SAID, SCRIPT, Served, said, saying, serve, tokenizer, toy

CHAT: list[Any] = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi 日"}]
CHAT_PROMPT = "system: Be.\nuser: Hi 日\nassistant:"
EIGHT = 8.0  # a target that strays, so that sampling has something to choose


@pytest.fixture(scope="module")
def straying() -> Any:
    with serve(toy(saying(EIGHT))) as served:
        yield served


# --- chat and completions


def test_a_chat_is_answered(front: Served) -> None:
    told = front.client.chat.completions.create(
        model="toy", messages=CHAT, max_completion_tokens=60, temperature=0
    )
    (choice,) = told.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.message.content == said(CHAT_PROMPT, 60)
    assert told.id.startswith("chatcmpl-")
    assert told.id.endswith(str(told._request_id))
    assert (told.model, told.system_fingerprint) == ("toy", "toy-target")
    usage = told.usage
    assert usage is not None
    assert usage.prompt_tokens == len(tokenizer().encode(CHAT_PROMPT))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens == 60
    figures = usage.to_dict()["speculation"]
    assert isinstance(figures, dict)
    assert figures["drafted"] >= figures["verified"] >= figures["accepted"] > 0
    assert figures["rounds"] + figures["accepted"] == 59
    assert figures["accepted_length"] == pytest.approx(1 + figures["accepted"] / figures["rounds"])


def test_a_prompt_found_in_the_cache_is_told(front: Served) -> None:
    for _ in range(2):
        told = front.client.completions.create(model="toy", prompt="cached " * 20, max_tokens=3)
    assert told.usage is not None
    assert told.usage.prompt_tokens_details is not None
    cached = told.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert told.usage.prompt_tokens > cached > told.usage.prompt_tokens / 2


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "prompt", ["Hi 日", ["Hi", "Hello, you"], [5, 6, 7], [[5, 6, 7], [8], [9, 10]]]
)
def test_prompts_of_every_form(front: Served, prompt: Any, n: int) -> None:
    told = front.client.completions.create(
        model="toy", prompt=prompt, max_tokens=9, n=n, temperature=0
    )
    several = prompt if isinstance(prompt[0], str | list) and len(prompt[0]) > 1 else [prompt]
    prompts = [one if isinstance(one, str) else tuple(one) for one in several]
    assert [choice.index for choice in told.choices] == list(range(len(prompts) * n))
    assert [choice.text for choice in told.choices] == [
        said(one, 9) for one in prompts for _ in range(n)
    ]
    assert told.usage is not None
    assert told.usage.completion_tokens == 9 * n * len(prompts)


def test_completions_are_short_unless_asked(front: Served) -> None:
    told = front.client.completions.create(model="toy", prompt="Hi")
    assert told.usage is not None
    assert told.usage.completion_tokens == 16


@pytest.mark.parametrize("prompt", ["Hi 日", tokenizer().encode("Hi 日")])
def test_an_echo_comes_first(front: Served, prompt: Any) -> None:
    ask = {"model": "toy", "prompt": prompt, "max_tokens": 5, "echo": True, "temperature": 0}
    expected = "Hi 日" + said("Hi 日", 5)
    assert front.client.completions.create(**ask).choices[0].text == expected
    chunks = list(front.client.completions.create(**ask, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected


def test_an_answer_goes_back_as_the_client_keeps_it(front: Served) -> None:
    create = front.client.chat.completions.create
    first = create(model="toy", messages=CHAT, max_tokens=5).choices[0].message
    again = [*CHAT, first, {"role": "user", "content": "more"}]
    told = create(model="toy", messages=again, max_tokens=5, temperature=0)
    prompt = f"{CHAT_PROMPT} {first.content}\nuser: more\nassistant:"
    assert told.choices[0].message.content == said(prompt, 5)


def test_text_parts_are_joined(front: Served) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages: list[Any] = [{"role": "user", "content": parts}]
    told = front.client.chat.completions.create(
        model="toy", messages=messages, max_tokens=5, temperature=0
    )
    assert told.choices[0].message.content == said("user: one\ntwo\nassistant:", 5)


def test_models(front: Served) -> None:
    (card,) = front.client.models.list()
    assert card == front.client.models.retrieve("toy")
    assert (card.id, card.object, card.owned_by) == ("toy", "model", "dspark")
    assert card.to_dict()["max_model_len"] == front.engine.limits.sequence_tokens
    with pytest.raises(openai.NotFoundError) as caught:
        front.client.models.retrieve("gpt-5/large")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_fields_that_change_nothing_pass(front: Served) -> None:
    told = front.client.chat.completions.create(
        model="toy",
        messages=CHAT,
        max_tokens=5,
        temperature=0,
        n=1,
        stream=False,
        stop=None,
        store=False,
        metadata={"job": "1"},
        service_tier="auto",
        user="me",
        logit_bias={},
        logprobs=False,
        parallel_tool_calls=True,
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        seed=None,
        top_logprobs=None,
    )
    assert told.choices[0].message.content == said(CHAT_PROMPT, 5)


# --- streams


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chat_stream_joins_to_the_whole(straying: Served, seed: int, temperature: float) -> None:
    ask: Any = {
        "model": "toy",
        "messages": [{"role": "user", "content": "x" * seed}],
        "max_tokens": 150,
        "temperature": temperature,
        "seed": seed,
    }
    whole = straying.client.chat.completions.create(**ask)
    chunks = list(
        straying.client.chat.completions.create(
            **ask, stream=True, stream_options={"include_usage": True}
        )
    )
    *pieces, end, usage = chunks
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    assert text == whole.choices[0].message.content
    assert not text.isascii()
    assert pieces[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in pieces[1:])
    assert all(chunk.choices[0].finish_reason is None for chunk in pieces)
    assert end.choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert usage.choices == []
    assert usage.usage is not None
    assert whole.usage is not None
    assert usage.usage.completion_tokens == whole.usage.completion_tokens
    assert len({(chunk.id, chunk.created, chunk.object) for chunk in chunks}) == 1
    assert len(pieces) < 150  # several tokens a step


def test_choices_of_several_prompts_stream_side_by_side(straying: Served) -> None:
    ask: Any = {"model": "toy", "prompt": ["a", "bb"], "n": 3, "max_tokens": 60, "seed": 11}
    whole = straying.client.completions.create(**ask)
    texts, ends = [""] * 6, [""] * 6
    for chunk in straying.client.completions.create(**ask, stream=True):
        (choice,) = chunk.choices
        assert not ends[choice.index]
        texts[choice.index] += choice.text
        ends[choice.index] = choice.finish_reason or ""
    assert texts == [choice.text for choice in whole.choices]
    assert len(set(texts)) == 6
    assert ends == ["length"] * 6


async def test_the_asynchronous_client_and_many_at_once(front: Served) -> None:
    client = front.async_client

    async def ask(i: int) -> tuple[str, str]:
        text = ""
        stream = await client.completions.create(
            model="toy", prompt=f"prompt {i}", max_tokens=20 + i, temperature=0, stream=True
        )
        async for chunk in stream:
            text += chunk.choices[0].text
        return text, said(f"prompt {i}", 20 + i)

    for text, expected in await asyncio.gather(*(ask(i) for i in range(40))):
        assert text == expected
    await client.close()


# --- sampling


def test_a_seed_makes_the_text(straying: Served) -> None:
    def ask(seed: int, **more: Any) -> list[str]:
        told = straying.client.completions.create(
            model="toy", prompt="Hi", max_tokens=80, seed=seed, **more
        )
        return [choice.text for choice in told.choices]

    assert ask(1) == ask(1) != ask(2)
    four = ask(1, n=4)
    assert four == ask(1, n=4, extra_body={"speculation": {"drafter": "none"}})
    assert len(set(four)) == 4
    assert four[:1] == ask(1)


def test_a_bias_decides(front: Served) -> None:
    (token,) = tokenizer().encode("!")
    told = front.client.completions.create(
        model="toy", prompt="Hi", max_tokens=5, temperature=0, logit_bias={str(token): 100}
    )
    assert told.choices[0].text == "!!!!!"


@pytest.mark.parametrize("stop", ["<stop>", ["and", "<stop>", "nowhere"]])
def test_a_stop_string_ends_the_answer(front: Served, stop: Any) -> None:
    ask: Any = {"model": "toy", "prompt": "H", "max_tokens": 300, "temperature": 0, "stop": stop}
    told = front.client.completions.create(**ask)
    assert told.choices[0].finish_reason == "stop"
    assert told.choices[0].text == said("H", 300).partition("<stop>")[0]
    assert told.usage is not None
    assert told.usage.completion_tokens < 200


def test_our_own_parameters(front: Served) -> None:
    (space,) = tokenizer().encode(" ")

    def ask(**extra: Any) -> Any:
        return front.client.chat.completions.create(
            model="toy", messages=CHAT, max_tokens=12, temperature=1.0, extra_body=extra
        )

    told = ask(top_k=1, stop_token_ids=[space], min_tokens=4, priority=-3, floor_tps=1.5)
    assert told.choices[0].finish_reason in {"stop", "length"}
    assert ask(top_k=1).choices[0].message.content == said(CHAT_PROMPT, 12)
    plain = ask(speculation={"drafter": "none"}).usage.to_dict()["speculation"]
    assert plain["drafted"] == 0
    short = ask(speculation={"gamma": 2, "verify": "fixed:1"}, min_p=0.0, deadline=60)
    figures = short.usage.to_dict()["speculation"]
    assert figures["drafted"] <= 2 * figures["rounds"]
    assert figures["verified"] <= figures["rounds"]
    ids = ask(return_token_ids=True).choices[0]
    assert tokenizer().decode(ids.token_ids) == ids.message.content
    assert tuple(ids.prompt_token_ids) == tokenizer().encode(CHAT_PROMPT)


# --- log-probabilities


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_chat(straying: Served, stream: bool) -> None:
    ask: Any = {
        "model": "toy",
        "messages": CHAT,
        "max_tokens": 80,
        "seed": 3,
        "logprobs": True,
        "top_logprobs": 3,
    }
    create = straying.client.chat.completions.create
    choices = [choice for chunk in create(**ask, stream=True) for choice in chunk.choices]
    whole = create(**ask).choices[0]
    text = whole.message.content
    assert text is not None
    if stream:
        entries = [
            entry
            for choice in choices
            if choice.logprobs is not None
            for entry in choice.logprobs.content or ()
        ]
    else:
        assert whole.logprobs is not None
        entries = whole.logprobs.content or []
    assert len(entries) == 80
    data = b"".join(bytes(entry.bytes or ()) for entry in entries)
    assert data.decode("utf-8", "replace") == text
    for entry in entries:
        spelled = bytes(entry.bytes or ())
        assert entry.token.encode() == spelled or entry.token.startswith("bytes:\\x")
        assert len(entry.top_logprobs) == 3
        assert 0 >= entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        assert entry.top_logprobs[0].logprob >= entry.logprob


def test_log_probabilities_of_a_completion(straying: Served) -> None:
    ask: Any = {"model": "toy", "prompt": "Hi", "max_tokens": 60, "seed": 3, "logprobs": 2}
    whole = straying.client.completions.create(**ask).choices[0]
    told = whole.logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.text_offset is not None
    assert told.top_logprobs is not None
    assert len(told.tokens) == len(told.text_offset) == len(told.token_logprobs or ()) == 60
    for token, offset, top in zip(told.tokens, told.text_offset, told.top_logprobs, strict=True):
        assert token in top
        assert 2 <= len(top) <= 3
        if not token.startswith("bytes:"):
            assert whole.text[offset:].startswith(token)
    parts = [
        chunk.choices[0].logprobs
        for chunk in straying.client.completions.create(**ask, stream=True)
        if chunk.choices[0].logprobs is not None
    ]
    assert [token for part in parts for token in part.tokens or ()] == told.tokens
    assert [offset for part in parts for offset in part.text_offset or ()] == told.text_offset


def test_log_probabilities_without_alternatives(front: Served) -> None:
    told = front.client.completions.create(model="toy", prompt="Hi", max_tokens=3, logprobs=0)
    logprobs = told.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.token_logprobs or ()) == 3
    assert logprobs.top_logprobs is None


def test_a_special_token_has_its_name(front: Served) -> None:
    told = front.client.chat.completions.create(
        model="toy", messages=CHAT, max_tokens=3, temperature=0, logit_bias={"0": 100},
        logprobs=True,
    )  # fmt: skip
    (choice,) = told.choices
    assert (choice.message.content, choice.finish_reason) == ("", "stop")
    assert choice.logprobs is not None
    assert [entry.token for entry in choice.logprobs.content or ()] == ["</s>"]


# --- errors


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("n", 0),
        ("n", 10**6),
        ("max_tokens", -5),
        ("max_completion_tokens", 10**9),
        ("presence_penalty", 3),
        ("logit_bias", {"99999": 1}),
        ("logit_bias", {"x": 1}),
        ("seed", 2**70),
        ("stop", [""]),
        ("stop", 5),
        ("top_logprobs", 10**6),
        ("top_logprobs", 2),
        ("stream_options", {"include_usage": True}),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "auto"),
        ("response_format", {"type": "json_object"}),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("store", True),
        ("reasoning_effort", "high"),
        ("service_tier", "flex"),
    ],
)
def test_what_cannot_be_served_is_named(front: Served, field: str, value: Any) -> None:
    given: Any = {"max_tokens": NOT_GIVEN, field: value}
    with pytest.raises(openai.BadRequestError) as caught:
        front.client.chat.completions.create(model="toy", messages=CHAT, **given)
    assert caught.value.param == field
    assert caught.value.type == "invalid_request_error"
    assert field in caught.value.message


def test_a_key_is_asked_for() -> None:
    keys = KeyRing({key_hash("sesame"): Tenant("acme")})
    with serve(keys=keys, key="sesame") as front:
        told = front.client.completions.create(model="toy", prompt="Hi", temperature=0)
        assert told.choices[0].text == said("Hi", 16)
        stranger = front.client.with_options(api_key="guess")
        for ask in (
            lambda: stranger.completions.create(model="toy", prompt="Hi"),
            lambda: stranger.chat.completions.create(model="toy", messages=CHAT, stream=True),
            stranger.models.list,
            lambda: stranger.models.retrieve("toy"),
        ):
            with pytest.raises(openai.AuthenticationError) as caught:
                ask()
            assert caught.value.code == "invalid_api_key"
            assert "guess" not in str(caught.value)


def test_a_tenant_has_limits_and_its_tokens_are_counted() -> None:
    clock = [0.0]
    limits = TenantLimits(concurrent_requests=1, tokens_per_minute=60, max_priority=0)
    tenant = Tenant("acme", 1.0, limits, lambda: clock[0])
    with serve(keys=KeyRing({key_hash("k"): tenant}), key="k") as front:
        ask: Any = {"model": "toy", "prompt": "Hi"}
        stream = front.client.completions.create(**ask, max_tokens=FOR_EVER, stream=True)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="the limit is 1") as caught:
            front.client.completions.create(**ask)
        assert caught.value.response.headers["retry-after"] == "1"
        stream.close()
        front.wait_freed(2)
        with pytest.raises(openai.RateLimitError, match="60 tokens a minute") as caught:
            front.client.completions.create(**ask)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        clock[0] = 10_000.0
        front.client.completions.create(**ask, max_tokens=58)  # 2 of the prompt
        with pytest.raises(openai.RateLimitError):
            front.client.completions.create(**ask)


def test_a_full_queue_is_told_with_when_to_come_again() -> None:
    with serve(toy(max_sequences=1, max_waiting=1)) as front:
        ask: Any = {"model": "toy", "prompt": "Hi", "max_tokens": FOR_EVER, "stream": True}
        running = front.client.completions.create(**ask)
        next(iter(running))
        with pytest.raises(openai.RateLimitError) as caught:
            front.client.completions.create(model="toy", prompt="Hi", n=8)
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.response.headers["retry-after-ms"] == "1000"
        running.close()


def test_text_of_everything_came_by() -> None:
    """That the tests above saw what they are about."""
    text = said("H", 300)
    assert len(SCRIPT) < 140
    assert SAID in text
    assert tokenizer().decode(tokenizer().encode(SAID)) == SAID


def test_a_simple_reader_of_lines_gets_whole_events(front: Served) -> None:
    """SAID has characters that end lines for `splitlines`, which httpx reads streams with."""
    ask = {"prompt": "H", "max_tokens": 200, "temperature": 0, "stream": True}
    with httpx.stream("POST", front.url + "/v1/completions", json=ask) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    text = "".join(piece["choices"][0]["text"] for piece in pieces)
    assert text == said("H", 200)
    assert {"\u2028", "\u0085"} <= set(text)
