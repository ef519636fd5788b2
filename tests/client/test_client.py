"""The SDK against a real server over a toy engine: answers, retries that resume, errors, ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from dspark.client import (
    AsyncClient,
    AsyncStream,
    Chunk,
    Client,
    ConfigError,
    DeadlineExceeded,
    FinishReason,
    Generation,
    InvalidRequest,
    NotFound,
    Overloaded,
    Retry,
    SamplingParams,
    Speculation,
    Tls,
    Unauthenticated,
    Unavailable,
    Usage,
)
from dspark.client.answer_client import AnswerState
from dspark.client.request_client import generate_request
from dspark.client.retry import Tries
from dspark.core.errors import DsparkError
from dspark.gateway.keys import KeyRing, Tenant, TenantLimits, key_hash
from dspark.serving import TlsFiles
from dspark.v1 import generation_pb2 as pb
from dspark.v1 import generation_pb2_grpc as pb_grpc

from ..gateway.toy_front import (
    FOR_EVER,
    ROOM,
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
from ..verifier.toy import HandClock

REPO = Path(__file__).resolve().parents[2]
PROMPT = "Hello"
PROMPT_IDS = tokenizer().encode(PROMPT)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "日本 😀"}]
# Tries often, so that a server that comes back is found at once.
SOON = Retry(attempts=400, first_s=0.001, most_s=0.02)


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[tuple[Front, AsyncClient]]:
    async with front(**options) as served, AsyncClient(served.address) as client:
        yield served, client


async def chunks(stream: AsyncStream) -> list[Chunk]:
    return [chunk async for chunk in stream]


def check_whole(got: Iterable[Chunk], whole: Generation) -> None:
    """Chunks of a stream add up to the answer, choice by choice, with nothing twice."""
    got = list(got)
    for choice in whole.choices:
        own = [chunk for chunk in got if chunk.choice == choice.index]
        assert "".join(chunk.text for chunk in own) == choice.text
        assert tuple(id for chunk in own for id in chunk.ids) == choice.token_ids
        index = 0
        for chunk in own:
            assert chunk.index == index
            index += len(chunk.ids)
        assert [chunk.finish_reason for chunk in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason is choice.finish_reason
        assert own[-1].usage is not None
        assert own[-1].usage.completion_tokens == len(choice.token_ids)
        assert tokenizer().decode(choice.token_ids).startswith(choice.text)


# --- answers


async def test_an_answer_streamed_and_whole_is_the_same() -> None:
    async with serving() as (_, client):
        options: Any = {"temperature": 0.8, "seed": -5, "max_tokens": 40, "n": 2}
        whole = await client.generate(PROMPT, **options)
        stream = client.stream(PROMPT, **options)
        got = await chunks(stream)
        check_whole(got, whole)
        assert [c.token_ids for c in stream.generation.choices] == [
            c.token_ids for c in whole.choices
        ]
        ids = expected(PROMPT, 40, temperature=0.8, seed=2**64 - 5, choice=1)
        assert list(whole.choices[1].token_ids) == ids
        assert (whole.text, whole.token_ids) == (whole.choices[0].text, whole.choices[0].token_ids)
        assert whole.finish_reason is FinishReason.LENGTH
        assert whole.choices[0].usage == Usage(
            len(PROMPT_IDS), 40, whole.choices[0].usage.cached_tokens
        )
        assert (whole.model, whole.prompt_tokens) == ("toy", len(PROMPT_IDS))


async def test_blocking_calls_say_the_same() -> None:
    async with serving() as (served, client):
        options: Any = {"temperature": 0, "max_tokens": 40, "logprobs": True, "top_logprobs": 1}
        whole = await client.generate(PROMPT, **options)

        def block() -> None:
            with Client(served.address) as blocking:
                again = blocking.generate(PROMPT, **options)
                assert again.choices[0].token_ids == whole.choices[0].token_ids
                assert again.choices[0].logprobs == whole.choices[0].logprobs
                stream = blocking.stream(PROMPT, **options)
                check_whole(stream, again)
                assert list(stream) == []
                assert blocking.chat("Hi", max_tokens=3, return_prompt_ids=True).prompt_ids == (
                    tokenizer().chat([{"role": "user", "content": "Hi"}])
                )
                assert blocking.count_tokens(PROMPT) == len(PROMPT_IDS)
                assert blocking.model_info().vocab_size == VOCAB

        await asyncio.to_thread(block)
        assert len(whole.choices[0].logprobs) == 40
        assert whole.choices[0].logprobs[3].top[0][0] == whole.token_ids[3]


async def test_prompts_of_every_kind() -> None:
    async with serving() as (_, client):
        for prompt, ids in (
            (PROMPT, PROMPT_IDS),
            (list(PROMPT_IDS), PROMPT_IDS),
            (np.array(PROMPT_IDS), PROMPT_IDS),
            (CHAT, tokenizer().chat(CHAT)),
        ):
            got = await client.generate(prompt, max_tokens=2, return_prompt_ids=True)  # type: ignore[arg-type]
            assert got.prompt_ids == ids
            assert await client.count_tokens(prompt) == len(ids)  # type: ignore[arg-type]
        assert (await client.chat(CHAT, max_tokens=1)).prompt_tokens == len(tokenizer().chat(CHAT))


async def test_a_keyword_changes_what_params_say() -> None:
    async with serving() as (served, client):
        params = SamplingParams(temperature=0.0, max_tokens=9, stop_ids=(7,))
        got = await client.generate(PROMPT, params=params, max_tokens=5, stop="@#", top_k=2**31 - 1)
        assert len(got.token_ids) == 5
        (asked,) = served.asked
        assert asked.sampling == SamplingParams(
            temperature=0.0, max_tokens=5, stop=("@#",), stop_ids=(7,), top_k=2**31 - 1
        )


async def test_all_that_may_be_said_of_a_request_arrives() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    wish = Speculation(drafter="none", gamma=3, verify="fixed:2")
    async with serving(engine=toy(clock=HandClock(5.0))) as (served, client):
        await client.generate(
            PROMPT,
            model="toy",
            max_tokens=1,
            request_id="mine",
            priority=-2,
            floor_tps=1.5,
            speculation=wish,
            deadline_s=60,
            traceparent=trace,
            logit_bias={3: -1.5},
        )
        (asked,) = served.asked
        assert asked.request_id == "default/mine"
        assert (asked.priority, asked.floor_tps, asked.speculation) == (-2, 1.5, wish)
        assert asked.traceparent == trace
        assert asked.deadline == pytest.approx(65, abs=1)
        assert dict(asked.sampling.logit_bias) == {3: -1.5}


async def test_the_model_and_its_limits() -> None:
    async with serving() as (_, client):
        info = await client.model_info()
        assert (info.name, info.sequence_tokens, info.eos_ids) == ("toy", ROOM, (0,))
        assert info.has_chat_template
        assert [(drafter.drafter_id, drafter.gamma) for drafter in info.drafters] == [
            ("scripted", 7)
        ]
        assert await client.model_info("toy") == info


# --- retries that resume


class Cable:
    """TCP between a client and a server. `address` is the client's end."""

    def __init__(self, to: str) -> None:
        self._host, _, port = to.rpartition(":")
        self._port = int(port)
        self._writers: list[asyncio.StreamWriter] = []
        self._carrying: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Cable:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._carrying)

    def cut(self) -> None:
        """Both ends are lost without a word. Who comes again gets through."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, far_writer]
        for ends in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._carry(*ends))
            self._carrying.add(task)
            task.add_done_callback(self._carrying.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.1, "seed": 42},
    {"temperature": 0.9, "seed": 1, "n": 3, "logprobs": True},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("stops", [False, True])
async def test_through_a_server_that_restarts_no_token_is_repeated_or_lost(
    sampling: dict[str, Any], stops: bool
) -> None:
    """Each server comes to a halt in the middle, so that each has to be left and found again."""
    options: Any = {"max_tokens": 60, **sampling}
    async with serving() as (served, client):
        if stops:
            options["stop"] = (await client.generate(PROMPT, **options)).text[40:44]
        whole = await client.generate(PROMPT, **options)
        port = served.server.port
    async with AsyncClient(f"127.0.0.1:{port}", retry=SOON) as client:
        stream = client.stream(PROMPT, request_id="r", **options)
        got: list[Chunk] = []
        resumed: list[int] = []
        for hold_at in (4, 3, 5):
            backend = HeldBackend(hold_at)
            async with front(toy(backend), port=port) as served:
                while not served.asked:  # what the last server had sent comes first
                    got.append(await anext(stream))
                resumed.append(sum(len(request.committed_ids) for request in served.asked))
                await served.server.drain(0)
                backend.go_on.set()
        async with front(port=port) as served:
            got += await chunks(stream)
            resumed.append(sum(len(request.committed_ids) for request in served.asked))
            assert {request.request_id for request in served.asked} == {"default/r"}
            assert served.asked[0].attempt >= 3
        assert resumed == sorted(set(resumed))  # each took it up further on
        check_whole(got, whole)
        again = stream.generation
        for choice, same in zip(again.choices, whole.choices, strict=True):
            assert choice.token_ids == same.token_ids
            assert choice.logprobs == same.logprobs
            assert choice.usage.completion_tokens == same.usage.completion_tokens


async def test_blocking_calls_resume_too() -> None:
    backend = HeldBackend(4)
    async with front(toy(backend)) as served:
        port = served.server.port
        blocking = Client(served.address, retry=SOON)
        stream = blocking.stream(PROMPT, temperature=0.0, max_tokens=50)
        got = [await asyncio.to_thread(next, stream)]
        rest = asyncio.create_task(asyncio.to_thread(list, stream))
        await served.server.drain(0)
        backend.go_on.set()
    async with front(port=port) as served:
        got += await rest
        assert served.asked[0].committed_ids
        assert [id for chunk in got for id in chunk.ids] == expected(PROMPT, 50)
        check_whole(got, stream.generation)
        await asyncio.to_thread(blocking.close)


async def test_what_one_gateway_cannot_finish_goes_on_at_another() -> None:
    """Whichever is lost first, the other has it all; what is asked next begins there."""
    backends = [HeldBackend(4), HeldBackend(4)]
    async with front(toy(backends[0])) as one, front(toy(backends[1])) as other:
        fronts = [one, other]
        async with AsyncClient([one.address, other.address], retry=SOON) as client:
            stream = client.stream(PROMPT, temperature=0.0, max_tokens=50)
            got = [await anext(stream)]
            lost, left = fronts if one.asked else reversed(fronts)
            assert not left.asked
            for backend in backends:
                backend.go_on.set()
            await lost.server.drain(0)
            got += await chunks(stream)
            assert len(left.asked) == 1
            assert [id for chunk in got for id in chunk.ids] == expected(PROMPT, 50)
            check_whole(got, stream.generation)
            await client.model_info()
            await client.generate(PROMPT, max_tokens=2)
            assert (len(lost.asked), len(left.asked)) == (1, 2)


async def test_of_several_gateways_the_blocking_client_finds_one_that_is_there() -> None:
    async with front() as served, front() as gone:
        address = gone.address
        await gone.server.drain(0)
        for _ in range(5):  # whichever it begins with
            with Client([address, served.address], retry=SOON) as client:
                answer = await asyncio.to_thread(
                    client.generate, PROMPT, temperature=0.0, max_tokens=2
                )
            assert list(answer.choices[0].token_ids) == expected(PROMPT, 2)
    with pytest.raises(ConfigError, match="at least one gateway"):
        Client([])


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_a_connection_that_is_lost_is_made_again(sampling: dict[str, Any]) -> None:
    options: Any = {"max_tokens": 80, **sampling}
    async with front() as served, Cable(served.address) as cable:
        async with AsyncClient(cable.address, retry=SOON) as client:
            whole = await client.generate(PROMPT, **options)
            stream = client.stream(PROMPT, **options)
            got = []
            async for chunk in stream:
                got.append(chunk)
                if len(got) % 5 == 1:
                    cable.cut()
            check_whole(got, whole)
            assert served.asked[-1].attempt >= 1
        await served.freed()


async def test_tries_that_bring_nothing_are_counted_and_waited_for() -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async with front() as served:
        address = served.address
    retry = Retry(attempts=5, first_s=1.0, most_s=3.0)
    async with AsyncClient(address, retry=retry, sleep=sleep) as client:
        for call in (
            client.generate(PROMPT),
            client.count_tokens(PROMPT),
            client.model_info(),
        ):
            waits.clear()
            with pytest.raises(Unavailable) as error:
                await call
            assert error.value.__notes__ == ["after 5 attempts"]
            assert len(waits) == 4
            for wait, most in zip(waits, (1.0, 2.0, 3.0, 3.0), strict=True):
                assert most / 2 < wait <= most


async def test_without_retries_what_came_is_kept() -> None:
    backend = HeldBackend(4)
    async with front(toy(backend)) as served:
        client = AsyncClient(served.address, retry=Retry(attempts=1))
        stream = client.stream(PROMPT, temperature=0.0, max_tokens=50)
        first = await anext(stream)
        await served.server.drain(0)
        got = [first]

        async def rest() -> None:
            async for chunk in stream:
                got.append(chunk)

        with pytest.raises(Unavailable, match="this gateway has stopped"):
            await rest()
        await rest()  # it is over
        partial = stream.generation
        assert partial.finish_reason is None
        assert partial.token_ids == tuple(id for chunk in got for id in chunk.ids)
        assert partial.text == "".join(chunk.text for chunk in got)
        assert partial.choices[0].usage.completion_tokens == len(partial.token_ids)
        backend.go_on.set()
        await client.close()


def test_tries_are_bounded_by_the_deadline_and_progress_begins_anew() -> None:
    clock = HandClock()
    tries = Tries(Retry(3, 1.0, 8.0), 10.0, clock=clock, chance=lambda: 0.0)
    gone, busy = Unavailable("gone"), Overloaded("busy", 5.0)
    assert tries.left_s() == 10
    assert [tries.failed(gone), tries.failed(gone)] == [1, 2]
    tries.progressed()
    assert [tries.failed(gone), tries.failed(gone)] == [1, 2]
    assert tries.attempt == 4
    with pytest.raises(Unavailable):
        tries.failed(gone)
    tries.progressed()
    with pytest.raises(Overloaded):
        tries.failed(busy)
    assert tries.failed(busy, accepted=True) == 5
    tries.progressed()
    clock.now = 6.0
    with pytest.raises(DeadlineExceeded, match="within 10 s") as error:
        tries.failed(busy, accepted=True)
    assert error.value.__cause__ is busy
    clock.now = 10.0
    with pytest.raises(DeadlineExceeded):
        tries.left_s()


class Full(pb_grpc.GenerationServicer):
    """Takes every request for good, and then has no room."""

    def __init__(self) -> None:
        self.asked = 0

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]
        self.asked += 1
        await context.write(pb.GenerateResponse(started=pb.GenerationStarted(model="toy")))
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")


async def test_what_was_refused_before_its_first_token_is_not_tried_again() -> None:
    """The server is busy: more of the same is what it does not need."""
    server, full = grpc.aio.server(), Full()
    pb_grpc.add_GenerationServicer_to_server(full, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with AsyncClient(address, retry=SOON) as client:
            with pytest.raises(Overloaded):
                await client.generate(PROMPT)
        assert full.asked == 1
        with Client(address, retry=SOON) as blocking, pytest.raises(Overloaded):
            await asyncio.to_thread(blocking.generate, PROMPT)
        assert full.asked == 2
    finally:
        await server.stop(None)


@pytest.mark.parametrize("error", [InvalidRequest("n", 0, "is bad"), DsparkError("a bug")])
def test_what_will_not_get_better_is_not_tried_again(error: DsparkError) -> None:
    with pytest.raises(type(error)):
        Tries(Retry()).failed(error, accepted=True)


@pytest.mark.parametrize("fields", [{"attempts": 0}, {"first_s": -1.0}, {"first_s": 9.0}])
def test_a_retry_policy_that_makes_no_sense_is_refused(fields: Any) -> None:
    with pytest.raises(ConfigError):
        Retry(**fields)


@pytest.mark.parametrize(
    "chunk",
    [
        pb.GenerationChunk(choice=0, index=0, ids=[1]),
        pb.GenerationChunk(choice=0, index=3, ids=[1]),
        pb.GenerationChunk(choice=1, ids=[1]),
    ],
)
def test_a_server_that_does_not_resume_is_noticed(chunk: pb.GenerationChunk) -> None:
    state = AnswerState(generate_request(PROMPT, {}))
    state.take(pb.GenerateResponse(chunk=pb.GenerationChunk(ids=[5, 6], text="ab")))
    with pytest.raises(DsparkError, match="the server"):
        state.take(pb.GenerateResponse(chunk=chunk))


# --- errors


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ({"temperature": -1.0}, "temperature", "-1.0"),
        ({"temperature": float("nan")}, "temperature", "nan"),
        ({"n": 65}, "n", "65"),
        ({"n": 2**70}, "n", "1180591620717411303424"),
        ({"max_tokens": -1}, "max_tokens", "-1"),
        ({"max_tokens": 2**40}, "max_tokens", "1099511627776"),
        ({"min_tokens": 2**40}, "min_tokens", "1099511627776"),
        ({"top_logprobs": 3}, "top_logprobs", "3"),
        ({"seed": 2**64}, "seed", "18446744073709551616"),
        ({"stop": ""}, "stop", "''"),
        ({"stop": "\ud83d"}, "stop", r"'\ud83d'"),
        ({"stop_ids": [-1]}, "stop_ids", "-1"),
        ({"logit_bias": {2**40: 1.0}}, "logit_bias", "1099511627776"),
        ({"speculation": Speculation(gamma=-1)}, "speculation.gamma", "-1"),
        ({"priority": 2**31}, "priority", "2147483648"),
        ({"deadline_s": 0}, "deadline_s", "0"),
    ],
)
async def test_a_bad_option_is_named_before_anything_is_sent(
    options: Any, field: str, value: str
) -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest) as error:
            client.stream(PROMPT, **options)
    assert error.value.field == field
    assert str(error.value).startswith(f"{field}: {value} ")


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("\ud83d", "prompt"),
        ([2**31], "prompt"),
        ([1, "x"], "prompt"),
        ([{"role": "user"}], "messages[0]"),
        ([*CHAT, "hello"], "messages[2]"),
        ([{"role": "user", "content": "a", "name": "b"}], "messages[0]"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
    ],
)
async def test_a_bad_prompt_is_named_before_anything_is_sent(prompt: Any, field: str) -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest) as error:
            await client.generate(prompt)
    assert error.value.field == field


async def test_an_unknown_option_is_a_mistake_of_the_program() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(TypeError, match="unknown options: tempratur"):
            await client.generate(PROMPT, tempratur=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("prompt", "options", "field", "value", "limit"),
    [
        ([], {}, "prompt", "''", "at least 1 token"),
        ([VOCAB], {}, "prompt_ids", str(VOCAB), f"[0, {VOCAB})"),
        (PROMPT, {"max_tokens": ROOM}, "max_tokens", str(ROOM), "room left"),
        (PROMPT, {"stop_ids": [VOCAB]}, "stop_ids", str(VOCAB), f"[0, {VOCAB})"),
        ([{"role": "robot", "content": ""}], {}, "messages[0].role", "'robot'", "one of"),
        (PROMPT, {"speculation": Speculation(verify="x")}, "verify", "'x'", ""),
        ("x" * 9 * 2**20, {}, "message", "", "too large"),
    ],
)
async def test_what_the_server_refuses_is_the_same_error_here(
    prompt: Any, options: Any, field: str, value: str, limit: str
) -> None:
    async with serving() as (_, client):
        with pytest.raises(InvalidRequest) as error:
            await client.generate(prompt, **options)
    assert field in error.value.field
    assert error.value.value == value
    assert limit in str(error.value)


async def test_another_model_is_not_found() -> None:
    async with serving() as (_, client):
        for call in (
            client.generate(PROMPT, model="gpt"),
            client.count_tokens(PROMPT, model="gpt"),
            client.model_info("gpt"),
        ):
            with pytest.raises(NotFound, match="'gpt' is not served here"):
                await call


async def test_keys_open_the_door_and_limits_are_told() -> None:
    limits = TenantLimits(requests_per_minute=30, concurrent_requests=1)
    keys = KeyRing({key_hash("right"): Tenant("acme", limits=limits, clock=HandClock())})
    async with front(keys=keys) as served:
        for key in (None, "wrong"):
            async with AsyncClient(served.address, api_key=key) as client:
                with pytest.raises(Unauthenticated):
                    await client.generate(PROMPT)
        async with AsyncClient(served.address, api_key="right") as client:
            for _ in range(30):  # one after the other: each is over when it is answered
                await client.generate(PROMPT, max_tokens=1)
            with pytest.raises(Overloaded) as error:
                await client.generate(PROMPT)
            assert error.value.retry_after_s == pytest.approx(2)
        assert "right" not in repr(client.__dict__)


@needs_openssl
async def test_tls_with_certificates_of_both_sides(tmp_path: Path) -> None:
    server, server_key = certificate(tmp_path, "server")
    caller, caller_key = certificate(tmp_path, "caller")
    async with front(tls=TlsFiles(server, server_key, caller)) as served:
        for tls, let_in in (
            (Tls(server, caller, caller_key), True),
            (Tls(server), False),
            (True, False),
            (False, False),
        ):
            retry = Retry(attempts=1)
            async with AsyncClient(served.address, tls=tls, retry=retry) as client:
                if let_in:
                    assert (await client.generate(PROMPT, max_tokens=3)).token_ids
                else:
                    with pytest.raises(Unavailable):
                        await client.generate(PROMPT)
            with Client(served.address, tls=tls, retry=retry) as blocking:
                if let_in:
                    assert await asyncio.to_thread(blocking.count_tokens, PROMPT)


async def test_a_tls_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"tls: /no/such/ca\.pem"):
        await AsyncClient("127.0.0.1:1", tls=Tls("/no/such/ca.pem")).model_info()


# --- deadlines and cancellation


async def test_a_deadline_ends_the_answer() -> None:
    async with serving(engine=toy(clock=time.monotonic)) as (served, client):
        stream = client.stream(PROMPT, max_tokens=FOR_EVER, deadline_s=0.3)
        with pytest.raises(DeadlineExceeded):
            await chunks(stream)
        await served.freed()


async def test_a_deadline_holds_while_nobody_answers() -> None:
    async with AsyncClient("127.0.0.1:1", retry=Retry(100, 0.01, 0.01)) as client:
        for call in (
            client.generate(PROMPT, deadline_s=0.1),
            client.count_tokens(PROMPT, deadline_s=0.1),
        ):
            with pytest.raises(DeadlineExceeded):
                await call


@pytest.mark.parametrize("how", ["aclose", "with", "cancel"])
async def test_a_stream_that_is_left_frees_the_engine(how: str) -> None:
    async with serving() as (served, client):
        stream = client.stream(PROMPT, max_tokens=FOR_EVER, n=2)
        if how == "with":
            async with stream:
                await anext(stream)
        elif how == "aclose":
            await anext(stream)
            await stream.aclose()
        else:
            begun = asyncio.Event()

            async def read() -> None:
                async for _ in stream:
                    begun.set()

            task = asyncio.create_task(read())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await served.freed()
        assert [chunk async for chunk in stream] == []
        assert len((await client.generate(PROMPT, max_tokens=3)).token_ids) == 3


async def test_a_stream_closed_by_another_task_ends_for_its_reader() -> None:
    backend = HeldBackend(4)
    async with serving(engine=toy(backend)) as (served, client):
        stream = client.stream(PROMPT, max_tokens=FOR_EVER)
        for _ in range(3):
            await anext(stream)
        reader = asyncio.create_task(chunks(stream))
        await asyncio.sleep(0)  # now it waits for the fourth
        await stream.aclose()
        assert await reader == []
        assert stream.generation.finish_reason is None
        backend.go_on.set()
        await served.freed()


async def test_a_blocking_stream_is_closed_by_another_thread() -> None:
    backend = HeldBackend(4)
    async with front(toy(backend)) as served:
        with Client(served.address) as blocking:
            stream = blocking.stream(PROMPT, max_tokens=FOR_EVER)
            for _ in range(3):
                await asyncio.to_thread(next, stream)
            reader = asyncio.create_task(asyncio.to_thread(list, stream))
            stream.close()
            assert await reader == []
            backend.go_on.set()
            await served.freed()


async def test_a_blocking_stream_that_is_left_frees_the_engine() -> None:
    async with front() as served:

        def leave() -> None:
            with Client(served.address) as blocking, blocking.stream("a", max_tokens=FOR_EVER) as s:
                next(s)

        await asyncio.to_thread(leave)
        await served.freed()


def test_an_async_client_may_be_made_before_the_loop_runs() -> None:
    client = AsyncClient("127.0.0.1:1", retry=Retry(attempts=1))

    async def ask() -> None:
        async with client:
            with pytest.raises(Unavailable):
                await client.model_info()

    asyncio.run(ask())


# --- how it is installed


def test_it_imports_with_nothing_but_its_own_dependencies() -> None:
    """In a process where only the standard library and the base dependencies can be imported."""
    script = """
import sys
allowed = {"dspark", "grpc", "google", "numpy", "typing_extensions"} | sys.stdlib_module_names
class Door:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in allowed:
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Door())
try:
    import torch
except ImportError:
    import dspark.client
    client = dspark.client.Client("127.0.0.1:1")
    client.stream("Hello")
    assert not {"torch", "ray", "transformers", "dspark.gateway"} & set(sys.modules)
    print(*dspark.client.__all__)
"""
    roots = [str(REPO / name) for name in ("protos", "core", "client")]
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {"Client", "AsyncClient", "InvalidRequest"} <= set(done.stdout.split())


@pytest.mark.parametrize("name", ["sdk_sync.py", "sdk_async.py"])
async def test_the_examples_run(name: str) -> None:
    async with front() as served:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(REPO / "examples" / name),
            env={**os.environ, "DSPARK_ADDRESS": served.address},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        assert "toy" in out.decode()
        await served.freed()
