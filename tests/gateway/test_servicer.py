"""The gRPC front over a real channel: what is said, what is refused and how, how it stops."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from dspark.client.wire_client import error_from_rpc, logprobs_from_wire
from dspark.core.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    DsparkError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unauthenticated,
    Unavailable,
)
from dspark.core.requests import Event, Request
from dspark.gateway import Tokenizer
from dspark.gateway.aside import LONG_PROMPT
from dspark.gateway.gateway import Gateway, ServedModel
from dspark.gateway.keys import KeyRing, Tenant, TenantLimits, key_hash
from dspark.gateway.prompts import Prompt
from dspark.gateway.servicer import SERVICE, GenerationServicer
from dspark.serving import TlsFiles, serve_grpc
from dspark.v1 import generation_pb2 as pb
from dspark.v1 import generation_pb2_grpc as pb_grpc

from ..verifier.toy import HandClock, ScriptedDrafter, ToyBackend, oracle, toy_engine
from .toy_front import (
    FOR_EVER,
    ROOM,
    RULE,
    VOCAB,
    Front,
    HeldBackend,
    certificate,
    expected,
    front,
    needs_openssl,
    tokenizer,
    toy,
)

PROMPT = "Hello"
PROMPT_IDS = tuple(tokenizer().encode(PROMPT))


class Said:
    """A finished call: its chunks by choice, and how it ended."""

    def __init__(self, responses: Sequence[pb.GenerateResponse]) -> None:
        assert responses[0].WhichOneof("event") == "started"
        self.started = responses[0].started
        self.chunks = [response.chunk for response in responses[1:]]

    def of(self, choice: int = 0) -> list[pb.GenerationChunk]:
        return [chunk for chunk in self.chunks if chunk.choice == choice]

    def ids(self, choice: int = 0) -> list[int]:
        return [id for chunk in self.of(choice) for id in chunk.ids]

    def text(self, choice: int = 0) -> str:
        return "".join(chunk.text for chunk in self.of(choice))

    def end(self, choice: int = 0) -> pb.GenerationEnd:
        *before, last = self.of(choice)
        assert last.HasField("end")
        assert not any(chunk.HasField("end") for chunk in before)
        return last.end


@asynccontextmanager
async def stub(to: Front, *options: tuple[str, int]) -> AsyncIterator[pb_grpc.GenerationAsyncStub]:
    async with grpc.aio.insecure_channel(to.address, options) as channel:
        yield pb_grpc.GenerationStub(channel)


def asked(max_tokens: int = 40, text: str = PROMPT, **rest: Any) -> pb.GenerateRequest:
    sampling = {"temperature": 0.0, "max_tokens": max_tokens, **rest.pop("sampling", {})}
    return pb.GenerateRequest(
        prompt=rest.pop("prompt", pb.Prompt(text=text)),
        sampling=pb.SamplingParams(**sampling),
        **rest,
    )


async def say(client: Any, request: pb.GenerateRequest, **call: Any) -> Said:
    return Said([response async for response in client.Generate(request, **call)])


async def refusal(waiting: Any) -> tuple[grpc.StatusCode, DsparkError]:
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await waiting
    return told.value.code(), error_from_rpc(told.value)


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def ring(clock: Any = time.monotonic, **tenants: TenantLimits) -> KeyRing:
    """Each tenant's key is its name."""
    return KeyRing(
        {
            key_hash(name): Tenant(name, limits=limits, clock=clock)
            for name, limits in tenants.items()
        }
    )


# --- what is said


async def test_an_answer_is_started_goes_on_in_chunks_and_ends() -> None:
    async with front() as served, stub(served) as client:
        said = await say(client, asked(request_id="mine", return_prompt_ids=True))
        assert said.started == pb.GenerationStarted(
            protocol_version=1,
            request_id="mine",
            model="toy",
            prompt_tokens=len(PROMPT_IDS),
            prompt_ids=PROMPT_IDS,
        )
        index = 0
        for chunk in said.chunks:
            assert chunk.index == index
            index += len(chunk.ids)
        assert said.ids() == expected(PROMPT, 40)
        assert said.text() == tokenizer().decode(said.ids())
        end = said.end()
        assert end.reason == pb.FINISH_REASON_LENGTH
        assert end.usage == pb.Usage(prompt_tokens=len(PROMPT_IDS), completion_tokens=40)
        assert 0 < end.speculation.accepted <= end.speculation.verified


async def test_all_choices_come_with_their_own_indices_and_noise() -> None:
    async with front() as served, stub(served) as client:
        said = await say(client, asked(25, n=3, sampling={"temperature": 0.9, "seed": 7}))
        for choice in range(3):
            ids = expected(PROMPT, 25, temperature=0.9, seed=7, choice=choice)
            assert said.ids(choice) == ids
            assert said.text(choice) == tokenizer().decode(ids)
            assert said.end(choice).usage.completion_tokens == 25
        assert len({said.text(choice) for choice in range(3)}) == 3


async def test_log_probabilities_stand_beside_each_id() -> None:
    async with front() as served, stub(served) as client:
        said = await say(client, asked(12, sampling={"logprobs": True, "top_logprobs": 2}))
        for chunk in said.chunks:
            tokens = logprobs_from_wire(chunk.logprobs)
            assert len(tokens) == len(chunk.ids)
            for id, token in zip(chunk.ids, tokens, strict=True):
                assert token.top[0] == (id, token.logprob)  # greedy
                assert len(token.top) == 2


async def test_a_stop_string_is_not_shown_and_nothing_follows_it() -> None:
    whole = tokenizer().decode(expected(PROMPT, 60))
    stop = whole[30:33]
    async with front() as served, stub(served) as client:
        said = await say(client, asked(60, stop=[stop, "never"]))
        assert said.text() == whole[: whole.index(stop)]
        assert said.end().reason == pb.FINISH_REASON_STOP
        assert said.end().usage.completion_tokens == len(said.ids()) < 60
        await served.freed()


def cut_character(at_least: int, **sampling: Any) -> int:
    """A length at which the answer's last character is incomplete, so that its text is held back
    until the end."""
    for tokens in range(at_least, at_least + 100):
        detokenizer = tokenizer().detokenizer()
        for id in expected(PROMPT, tokens, **sampling):
            detokenizer.push(id)
        if detokenizer.flush():
            return tokens
    raise AssertionError("every answer ends with a whole character")


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.2, "seed": 2**64 - 1}])
@pytest.mark.parametrize("stops", [False, True])
async def test_resumed_behind_any_chunk_nothing_is_repeated_or_lost(
    sampling: dict[str, Any], stops: bool
) -> None:
    async with front() as served, stub(served) as client:
        request = asked(cut_character(40, **sampling), sampling=sampling)
        if stops:
            request.stop.append((await say(client, request)).text()[25:28])
        whole = await say(client, request)
        assert stops or whole.chunks[-1].text
        ids: list[int] = []
        text = ""
        for attempt, chunk in enumerate(whole.chunks, start=1):
            ids, text = [*ids, *chunk.ids], text + chunk.text
            request.attempt = attempt
            del request.resume[:]
            request.resume.add(choice=0, ids=ids)
            rest = await say(client, request)
            assert rest.chunks[0].index == len(ids)
            assert [*ids, *rest.ids()] == whole.ids()
            if not chunk.HasField("end"):
                assert text + rest.text() == whole.text()
            assert rest.end().reason == whole.end().reason
            assert rest.end().usage.completion_tokens == len(whole.ids())


async def test_prompts_of_every_kind_are_counted_as_they_are_answered() -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=PROMPT)])
    prompts = [
        (pb.Prompt(text=PROMPT), PROMPT_IDS),
        (pb.Prompt(token_ids=pb.TokenIds(ids=[5, 6])), (5, 6)),
        (pb.Prompt(chat=chat), tokenizer().chat([{"role": "user", "content": PROMPT}])),
    ]
    async with front() as served, stub(served) as client:
        for prompt, ids in prompts:
            said = await say(client, asked(2, prompt=prompt, return_prompt_ids=True))
            assert tuple(said.started.prompt_ids) == ids
            counted = await client.CountTokens(pb.CountTokensRequest(prompt=prompt))
            assert counted.prompt_tokens == len(ids)


async def test_the_model_says_what_it_is() -> None:
    async with front(couple_unseeded=True) as served, stub(served) as client:
        for name in ("", "toy"):
            told = await client.ModelInfo(pb.ModelInfoRequest(model=name))
            assert told == pb.ModelInfoResponse(
                protocol_version=1,
                model="toy",
                target_id="toy",
                tokenizer_hash=tokenizer().tokenizer_hash,
                vocab_size=VOCAB,
                sequence_tokens=ROOM,
                eos_ids=tokenizer().eos_ids,
                has_chat_template=True,
                drafters=[pb.DrafterInfo(drafter_id="scripted", kind="scripted", gamma=7)],
                verify="early-stop",
                couple_unseeded=True,
            )


async def test_a_drafter_is_told_with_its_kind() -> None:
    drafter = ScriptedDrafter(oracle(RULE), drafter_id="fast", gamma=5)
    backend = ToyBackend(RULE, VOCAB, context_length=ROOM)
    async with front(toy_engine(backend, drafter)) as served, stub(served) as client:
        told = await client.ModelInfo(pb.ModelInfoRequest())
        card = pb.DrafterInfo(drafter_id="fast", kind="scripted", gamma=5)
        assert list(told.drafters) == [card]
        speculation = pb.SpeculationOptions(drafter=card.drafter_id)
        said = await say(client, asked(20, speculation=speculation))
        assert said.end().speculation.accepted > 0


class Watched:
    """A tokenizer, and the threads it worked in."""

    def __init__(self, inner: Tokenizer) -> None:
        self.threads: list[int] = []
        self._inner = inner

    def encode(self, text: str) -> tuple[int, ...]:
        self.threads.append(threading.get_ident())
        return self._inner.encode(text)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        self.threads.append(threading.get_ident())
        return self._inner.chat(messages)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def a_chat(text: str) -> pb.Prompt:
    return pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=text)]))


@pytest.mark.parametrize(
    "prompt", [lambda text: pb.Prompt(text=text), a_chat], ids=["text", "chat"]
)
async def test_a_long_prompt_is_encoded_beside_the_event_loop(
    prompt: Callable[[str], pb.Prompt],
) -> None:
    async with front() as served, stub(served) as client:
        watched: Any = Watched(tokenizer())
        served.gateway.tokenizer = watched
        for text, aside in ((PROMPT, False), ("a " * LONG_PROMPT, True)):
            said = await say(client, asked(2, prompt=prompt(text)))
            counted = await client.CountTokens(pb.CountTokensRequest(prompt=prompt(text)))
            assert counted.prompt_tokens == said.started.prompt_tokens
            assert [thread != threading.get_ident() for thread in watched.threads] == [aside] * 2
            watched.threads.clear()


def test_messages_without_a_word_are_work_too() -> None:
    empty = {"role": "user", "content": ""}
    assert Prompt(chat=(empty,) * 10_000).size > LONG_PROMPT
    assert Prompt(chat=(empty,) * 10).size < LONG_PROMPT


async def test_what_the_call_wishes_reaches_the_target() -> None:
    clock = HandClock(100.0)
    keys = ring(acme=TenantLimits(max_priority=3))
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with front(toy(clock=clock), keys) as served, stub(served) as client:
        request = asked(
            2,
            request_id="r",
            priority=9,
            deadline_s=50.0,
            floor_tps=2.5,
            speculation=pb.SpeculationOptions(drafter="none", gamma=2, verify="fixed:1"),
        )
        for traceparent in (trace, "nonsense"):
            await say(client, request, metadata=(*bearer("acme"), ("traceparent", traceparent)))
        first, second = served.asked
        assert (first.tenant, first.request_id) == ("acme", "acme/r")
        assert (first.priority, first.deadline, first.floor_tps) == (3, 150.0, 2.5)
        assert first.speculation.drafter == "none"
        assert first.speculation.verify == "fixed:1"
        assert (first.traceparent, second.traceparent) == (trace, "")


@pytest.mark.parametrize(
    ("deadline_s", "timeout", "left"),
    [(None, 20.0, 20), (50.0, 20.0, 20), (5.0, 20.0, 5), (5.0, None, 5), (None, None, None)],
)
async def test_of_two_deadlines_the_target_is_told_the_nearer(
    deadline_s: float | None, timeout: float | None, left: float | None
) -> None:
    async with front(toy(clock=HandClock(100.0))) as served, stub(served) as client:
        await say(client, asked(2, deadline_s=deadline_s), timeout=timeout)
        told = served.asked[0].deadline
        assert told == (None if left is None else pytest.approx(100 + left, abs=3))


# --- what is refused


@pytest.mark.parametrize(
    ("request_", "field", "value", "limit"),
    [
        (asked(sampling={"temperature": 101.0}), "temperature", "101.0", "[0, 100]"),
        (asked(n=0), "n", "0", "[1, 64]"),
        (asked(n=2**32 - 1), "n", "4294967295", "[1, 64]"),
        (asked(0), "max_tokens", "0", "at least 1"),
        (asked(ROOM), "max_tokens", str(ROOM), "room left"),
        (asked(stop=[""]), "stop", "''", "empty"),
        (asked(text=""), "prompt", "''", "at least 1 token"),
        (asked(prompt=pb.Prompt()), "prompt", "None", "missing"),
        (asked(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[VOCAB]))), "prompt_ids", "300", "300"),
        (asked(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[-1]))), "prompt_ids", "-1", "300"),
        (asked(text="a" * (ROOM + 1)), "prompt", f"'{ROOM + 1} tokens'", str(ROOM)),
        (asked(deadline_s=0.0), "deadline_s", "0.0", "above 0"),
        (asked(deadline_s=float("nan")), "deadline_s", "nan", "above 0"),
        (asked(floor_tps=float("inf")), "floor_tps", "inf", "a number"),
        (asked(attempt=2**20), "attempt", str(2**20), "65535"),
        (asked(resume=[pb.Resume(choice=1)]), "resume", "1", "n = 1"),
        (asked(resume=[pb.Resume(), pb.Resume()]), "resume", "0", "before"),
        (
            asked(speculation=pb.SpeculationOptions(drafter="big")),
            "speculation.drafter",
            "'big'",
            "scripted",
        ),
        (asked(sampling={"logit_bias": {-1: 1.0}}), "logit_bias", "-1", "300"),
        (
            asked(sampling={"top_logprobs": 10**6, "logprobs": True}),
            "top_logprobs",
            "1000000",
            "20",
        ),
    ],
)
async def test_a_bad_field_is_named_with_its_value_and_limit(
    request_: pb.GenerateRequest, field: str, value: str, limit: str
) -> None:
    async with front() as served, stub(served) as client:
        status, error = await refusal(say(client, request_))
        assert status is grpc.StatusCode.INVALID_ARGUMENT
        assert isinstance(error, InvalidRequest)
        assert (error.field, error.value) == (field, value)
        assert limit in error.limit
        assert str(error).startswith(f"{field}: ")
        assert (await say(client, asked(3))).ids() == expected(PROMPT, 3)


async def test_another_model_is_not_found() -> None:
    async with front() as served, stub(served) as client:
        for call in (
            say(client, asked(model="gpt")),
            client.CountTokens(pb.CountTokensRequest(model="gpt", prompt=pb.Prompt(text="a"))),
            client.ModelInfo(pb.ModelInfoRequest(model="gpt")),
        ):
            status, error = await refusal(call)
            assert status is grpc.StatusCode.NOT_FOUND
            assert isinstance(error, NotFound)
            assert str(error) == "model: 'gpt' is not served here; 'toy' is"


@pytest.mark.parametrize("metadata", [None, bearer("wrong"), (("authorization", "acme"),)])
async def test_a_caller_without_a_known_key_gets_nothing(metadata: Any) -> None:
    async with front(keys=ring(acme=TenantLimits())) as served, stub(served) as client:
        for call in (
            say(client, asked(), metadata=metadata),
            client.CountTokens(pb.CountTokensRequest(), metadata=metadata),
            client.ModelInfo(pb.ModelInfoRequest(), metadata=metadata),
        ):
            status, error = await refusal(call)
            assert status is grpc.StatusCode.UNAUTHENTICATED
            assert isinstance(error, Unauthenticated)
            assert "wrong" not in str(error)
        assert served.asked == []
        assert (await say(client, asked(3), metadata=bearer("acme"))).ids()


async def test_a_tenant_over_its_limit_is_told_when_to_come_again() -> None:
    clock = HandClock()
    keys = ring(clock, acme=TenantLimits(tokens_per_minute=60), other=TenantLimits())
    async with front(keys=keys) as served, stub(served) as client:
        said = await say(client, asked(90), metadata=bearer("acme"))
        status, error = await refusal(say(client, asked(), metadata=bearer("acme")))
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(error, Overloaded)
        debt = len(PROMPT_IDS) + len(said.ids()) - 60
        assert error.retry_after_s == pytest.approx(debt + 1)
        await say(client, asked(2), metadata=bearer("other"))
        clock.now += error.retry_after_s
        await say(client, asked(2), metadata=bearer("acme"))


async def test_a_running_call_counts_until_it_ends_however_it_ends() -> None:
    keys = ring(acme=TenantLimits(concurrent_requests=1))
    async with front(keys=keys) as served, stub(served) as client:
        call: Any = client.Generate(asked(FOR_EVER), metadata=bearer("acme"))
        await begun(call)
        status, _ = await refusal(say(client, asked(), metadata=bearer("acme")))
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
        call.cancel()
        await served.freed()
        for _ in range(3):
            await refusal(say(client, asked(0), metadata=bearer("acme")))
            await say(client, asked(2), metadata=bearer("acme"))


async def test_a_tenant_cannot_end_what_another_one_runs() -> None:
    keys = ring(acme=TenantLimits(), other=TenantLimits())
    async with front(keys=keys) as served, stub(served) as client:
        call: Any = client.Generate(asked(300, request_id="r"), metadata=bearer("acme"))
        first = await call.read()
        await say(client, asked(2, request_id="r", attempt=5), metadata=bearer("other"))
        assert Said([first, *await _rest(call)]).ids() == expected(PROMPT, 300)


async def test_a_newer_attempt_ends_the_older_one() -> None:
    async with front() as served, stub(served) as client:
        old = client.Generate(asked(FOR_EVER, request_id="r"))
        await begun(old)
        said = await say(client, asked(30, request_id="r", attempt=1))
        assert said.ids() == expected(PROMPT, 30)
        status, error = await refusal(_rest(old))
        assert status is grpc.StatusCode.CANCELLED
        assert isinstance(error, Cancelled)


async def begun(call: Any) -> None:
    """Read until the engine has the request: `started` is said before it gets it."""
    started, chunk = await call.read(), await call.read()
    assert started.HasField("started")
    assert chunk.HasField("chunk")


async def _rest(call: Any) -> list[Any]:
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
        responses.append(response)
    return responses


async def test_a_message_over_the_limit_costs_its_caller_only() -> None:
    async with front() as served, stub(served) as client:
        other: Any = client.Generate(asked(200))
        first = await other.read()
        status, error = await refusal(say(client, asked(text="a" * (9 * 2**20))))
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(error, InvalidRequest)
        assert error.field == "message"
        assert Said([first, *await _rest(other)]).ids() == expected(PROMPT, 200)


class Broken:
    """A target with a bug, whose text is nobody's business."""

    async def run(self, request: Request) -> AsyncIterator[Event]:
        raise RuntimeError("secret of another tenant")
        yield


async def test_a_bug_is_told_as_one_and_keeps_its_text_to_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = toy().limits
    gateway = Gateway(Broken(), tokenizer(), ServedModel("toy", "toy", limits))  # type: ignore[arg-type]
    async with (
        serve_grpc(GenerationServicer(gateway, KeyRing()), drain_s=0) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        status, error = await refusal(say(pb_grpc.GenerationStub(channel), asked()))
        assert status is grpc.StatusCode.INTERNAL
        assert str(error) == "internal error"
        assert "secret of another tenant" in caplog.text  # for the operator


# --- deadlines and hang-ups


async def test_the_requests_own_deadline_ends_it() -> None:
    clock = HandClock()
    async with front(toy(clock=clock)) as served, stub(served) as client:
        call: Any = client.Generate(asked(FOR_EVER, deadline_s=3.0))
        await begun(call)
        clock.now += 3
        status, error = await refusal(_rest(call))
        assert status is grpc.StatusCode.DEADLINE_EXCEEDED
        assert isinstance(error, DeadlineExceeded)
        await served.freed()


@pytest.mark.parametrize("deadline_s", [None, 1e-3, 3600.0])
async def test_the_calls_deadline_holds_beside_it(deadline_s: float | None) -> None:
    timeout = 0.2 if deadline_s != 1e-3 else 60
    async with front(toy(clock=time.monotonic)) as served, stub(served) as client:
        status, _ = await refusal(
            say(client, asked(FOR_EVER, deadline_s=deadline_s), timeout=timeout)
        )
        assert status is grpc.StatusCode.DEADLINE_EXCEEDED
        await served.freed()


@pytest.mark.parametrize("n", [1, 4])
async def test_a_client_that_hangs_up_frees_the_engine(n: int) -> None:
    async with front() as served, stub(served) as client:
        calls = [client.Generate(asked(FOR_EVER, n=n)) for _ in range(5)]
        for call in calls:
            await begun(call)
        assert served.engine.active == 5 * n
        for call in calls:
            call.cancel()
        await served.freed()
        assert (await say(client, asked(3))).ids() == expected(PROMPT, 3)


async def test_a_client_that_is_lost_frees_the_engine() -> None:
    async with front() as served:
        async with stub(served) as client:
            call: Any = client.Generate(asked(FOR_EVER))
            await begun(call)
        await served.freed()


@pytest.mark.parametrize("hangs_up", [False, True])
async def test_a_client_that_reads_nothing_is_given_up_and_told(
    hangs_up: bool, caplog: pytest.LogCaptureFixture
) -> None:
    # A window that a few messages fill, and messages that fill it.
    narrow = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
    async with front(stall_timeout_s=0.05) as served, stub(served, *narrow) as client:
        sampling = {"logprobs": True, "top_logprobs": 20}
        call: Any = client.Generate(asked(FOR_EVER, sampling=sampling))
        await begun(call)
        await served.freed()
        if hangs_up:
            call.cancel()
        else:
            status, error = await refusal(_rest(call))
            assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert isinstance(error, Overloaded)
            assert str(error) == "the reader took nothing for 0.05 s, and its buffer is full"
    assert caplog.text == ""


# --- the server


async def test_health_and_reflection_answer_without_a_key() -> None:
    async with (
        front(keys=ring(acme=TenantLimits())) as served,
        grpc.aio.insecure_channel(served.address) as channel,
    ):
        health: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            told = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert told.status == health_pb2.HealthCheckResponse.SERVING
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        questions = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        ]
        listed, file = [r async for r in reflection.ServerReflectionInfo(iter(questions))]
        names = {service.name for service in listed.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= names
        (proto,) = file.file_descriptor_response.file_descriptor_proto
        assert b"GenerateRequest" in proto


async def test_a_stop_lets_calls_finish_and_takes_no_new_ones() -> None:
    backend = HeldBackend(3)
    async with front(toy(backend)) as served, stub(served) as client:
        call: Any = client.Generate(asked(30))
        await call.read()
        first = await call.read()
        async with grpc.aio.insecure_channel(served.address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            stopping = asyncio.create_task(served.server.drain(60))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
        async with stub(served) as late:
            status, error = await refusal(say(late, asked(3)))
            assert status is grpc.StatusCode.UNAVAILABLE
            assert isinstance(error, Unavailable)
        assert not stopping.done()
        backend.go_on.set()
        rest = await _rest(call)
        ids = [*first.chunk.ids, *(id for r in rest for id in r.chunk.ids)]
        assert ids == expected(PROMPT, 30)
        await stopping


async def test_what_a_stop_cannot_wait_for_ends_with_a_clear_status() -> None:
    async with front() as served, stub(served) as client:
        calls = [client.Generate(asked(FOR_EVER)) for _ in range(20)]
        for call in calls:
            await begun(call)
        stopping = asyncio.create_task(served.server.drain(0))
        for call in calls:
            status, error = await refusal(_rest(call))
            assert status is grpc.StatusCode.UNAVAILABLE
            assert str(error) == "this gateway has stopped"
        await asyncio.gather(stopping, served.server.drain(0))
        await served.freed()


async def test_a_port_in_use_is_an_error_that_names_it() -> None:
    async with front() as served:
        with pytest.raises(ConfigError, match=rf"address: {served.address} cannot be listened on"):
            async with front(port=served.server.port):
                pass


@needs_openssl
@pytest.mark.parametrize(
    ("ca", "shown", "let_in"),
    [
        (None, None, True),
        ("caller", "caller", True),
        ("caller", None, False),
        ("caller", "stranger", False),
    ],
)
async def test_tls_and_client_certificates(
    tmp_path: Path, ca: str | None, shown: str | None, let_in: bool
) -> None:
    pairs = {name: certificate(tmp_path, name) for name in ("server", "caller", "stranger")}
    root = pairs["server"][0].read_bytes()
    own = () if shown is None else [file.read_bytes() for file in reversed(pairs[shown])]
    files = TlsFiles(*pairs["server"], None if ca is None else pairs[ca][0])
    files.check()
    async with (
        front(tls=files) as served,
        grpc.aio.secure_channel(
            served.address, grpc.ssl_channel_credentials(root, *own)
        ) as channel,
    ):
        client: pb_grpc.GenerationAsyncStub = pb_grpc.GenerationStub(channel)
        if let_in:
            assert (await say(client, asked(3))).ids() == expected(PROMPT, 3)
        else:
            status, _ = await refusal(say(client, asked(3)))
            assert status is grpc.StatusCode.UNAVAILABLE
            assert served.asked == []


@pytest.mark.parametrize("content", [None, b"no certificate"])
async def test_tls_files_that_cannot_be_used_are_named(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "server.pem"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"server\.pem|cannot be listened on"):
        async with front(tls=TlsFiles(file, file)):
            pass
