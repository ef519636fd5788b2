"""What clients get wrong: each gets its status and OpenAI's error object; the server goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import model_validator

from dspark.core.errors import InvalidRequest
from dspark.core.requests import Event, Finished, FinishReason, Request, Usage
from dspark.gateway.aside import LONG_PROMPT
from dspark.gateway.openai import HttpConfig
from dspark.gateway.openai.schema import CompletionRequest, read
from dspark.gateway.wire_verifier_client import run_to_wire

from ...verifier.toy import HandClock
from .served import FOR_EVER, ROOM, HeldBackend, Served, said, saying, serve, toy

JSON = {"content-type": "application/json"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


# Only they know what drafts they have, and by which rules.
KNOWN_TO_VERIFIERS = ("speculation.drafter", "speculation.verify")


class Wire:
    """A verifier behind gRPC, as far as what it is asked."""

    async def run(self, request: Request) -> AsyncGenerator[Event, None]:
        run_to_wire(request, 0.0)
        yield Finished(FinishReason.LENGTH, Usage(len(request.prompt_ids), 0))


@pytest.fixture(scope="module")
def wired() -> Iterator[Served]:
    """A front of a cluster."""
    with serve(target=Wire()) as served:
        yield served


def told(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, which has OpenAI's fields and no trace of our insides."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    for inside in ("Traceback", ".py", "pydantic", "dspark."):
        assert inside not in response.text
    error: dict[str, Any] = body["error"]
    return error


def alive(front: Served) -> None:
    assert front.post(prompt="Hi", temperature=0).json()["choices"][0]["text"] == said("Hi", 16)


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("frobnicate", {"frobnicate": 1}),
        ("messages", {"messages": []}),
        ("speculation.depth", {"speculation": {"depth": 1}}),
        ("speculation.gamma", {"speculation": {"gamma": "7"}}),
        ("speculation.gamma", {"speculation": {"gamma": -1}}),
        ("speculation.gamma", {"speculation": {"gamma": 65}}),
        ("speculation.gamma", {"speculation": {"gamma": 2**32}}),
        ("speculation.drafter", {"speculation": {"drafter": "gpt"}}),
        ("speculation.verify", {"speculation": {"verify": "always"}}),
        ("speculation", {"speculation": 7}),
        ("stream_options", {"stream_options": {}}),
        ("stream_options.chunks", {"stream": True, "stream_options": {"chunks": 1}}),
        ("stream", {"stream": "yes"}),
        ("n", {"n": True}),
        ("n", {"n": 1.5}),
        ("n", {"n": -1}),
        ("n", {"n": 10**30}),
        ("temperature", {"temperature": 1e400}),
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": [0]}),
        ("top_p", {"top_p": 1.1}),
        ("min_p", {"min_p": -0.5}),
        ("top_k", {"top_k": -7}),
        ("top_k", {"top_k": 2**40}),
        ("repetition_penalty", {"repetition_penalty": 0}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": ROOM}),
        ("min_tokens", {"min_tokens": 20, "max_tokens": 10}),
        ("logprobs", {"logprobs": 10**6}),
        ("logprobs", {"logprobs": True}),
        ("logprobs", {"logprobs": -1}),
        ("echo", {"echo": True, "logprobs": 1}),
        ("suffix", {"suffix": "end"}),
        ("best_of", {"best_of": 3}),
        ("seed", {"seed": 0.5}),
        ("stop", {"stop": [1]}),
        ("stop", {"stop": ["x"] * 17}),
        ("stop_token_ids", {"stop_token_ids": [10**6]}),
        ("stop_token_ids", {"stop_token_ids": 3}),
        ("logit_bias", {"logit_bias": {"-1": 1}}),
        ("logit_bias", {"logit_bias": {"1": "x"}}),
        ("logit_bias[1]", {"logit_bias": {"1": 200}}),
        ("logit_bias", {"logit_bias": [1]}),
        ("logit_bias", {"logit_bias": {"1": 10**400}}),
        ("prompt", {"prompt": [-1], "echo": True}),
        ("prompt", {"prompt": [2**40], "echo": True}),
        ("metadata", {"metadata": {"a": 1}}),
        ("priority", {"priority": 2**40}),
        ("deadline", {"deadline": 0}),
        ("deadline", {"deadline": -3}),
        ("floor_tps", {"floor_tps": -1}),
        ("prompt", {"prompt": None}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": 5}),
        ("prompt", {"prompt": ["a", 1]}),
        ("prompt", {"prompt": [1, True]}),
        ("prompt", {"prompt": [[1], [[2]]]}),
        ("prompt", {"prompt": [[1], []]}),
        ("prompt", {"prompt": [1, 10**9]}),
        ("prompt", {"prompt": [-1]}),
        ("prompt", {"prompt": ["a"] * 200, "n": 2}),
    ],
)
def test_a_bad_field_of_a_completion_is_named(
    front: Served, wired: Served, field: str, body: dict[str, Any]
) -> None:
    content = json.dumps({"prompt": "Hi"} | body)
    for of in (front, wired):
        if of is wired and field in KNOWN_TO_VERIFIERS:
            continue
        error = told(httpx.post(of.url + COMPLETIONS, content=content, headers=JSON), 400)
        assert error["param"] == field
        assert error["type"] == "invalid_request_error"
        assert field.partition("[")[0] in error["message"]
        assert len(error["message"]) < 400


@pytest.mark.parametrize(
    ("field", "messages"),
    [
        ("messages", None),
        ("messages", []),
        ("messages", "Hi"),
        ("messages[0]", ["Hi"]),
        ("messages[1].role", [{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}]),
        ("messages[0].role", [{"content": "a"}]),
        ("messages[0].content", [{"role": "user"}]),
        ("messages[0].content", [{"role": "user", "content": 5}]),
        ("messages[0].content", [{"role": "user", "content": [{"type": "image_url"}]}]),
        ("messages[0].content", [{"role": "user", "content": [{"type": "text"}]}]),
        ("messages[0].content", [{"role": "user", "content": [5]}]),
        ("messages[0].name", [{"role": "user", "content": "a", "name": "Ann"}]),
        ("messages[0].mood", [{"role": "user", "content": "a", "mood": "good"}]),
        ("messages[0].tool_calls", [{"role": "assistant", "content": "", "tool_calls": [1]}]),
        ("messages", [{"role": "tool", "content": "the template refuses it"}]),
        ("messages", [{"role": "user", "content": "a" * (2 * ROOM)}]),
    ],
)
def test_a_bad_message_is_named(front: Served, field: str, messages: Any) -> None:
    error = told(front.post(CHAT, messages=messages), 400)
    assert error["param"] == field


def test_what_is_said_of_a_refused_field(front: Served) -> None:
    error = told(front.post(prompt="Hi", frobnicate={"a": 1}), 400)
    assert error["code"] == "unknown_parameter"
    assert error["message"] == "frobnicate: {'a': 1} is not a known field"
    error = told(front.post(CHAT, messages=[], tools=[1]), 400)
    assert error["code"] == "unsupported_parameter"
    assert error["message"] == "tools: [1] is not served here, but as []"
    parts = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert "'image_url': only text" in told(front.post(CHAT, messages=parts), 400)["message"]
    error = told(front.post(CHAT), 400)
    assert (error["param"], error["code"]) == ("messages", "missing_required_parameter")
    given = [{"role": "user", "content": "a"}]
    for name in ("max_tokens", "max_completion_tokens"):
        assert told(front.post(CHAT, messages=given, **{name: 0}), 400)["param"] == name
    error = told(front.post(CHAT, messages=given, max_tokens=5, max_completion_tokens=6), 400)
    assert error["param"] == "max_completion_tokens"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "half',
        b'{"prompt": "\xff\xfe"}',
        b"\xef\xbb\xbf{}",
        b'{"prompt": "\\ud83d"}',
        b"[" * 100_000,
        b'{"n": ' + b"9" * 5000 + b"}",
        b"null",
        b"[]",
        b"prompt=Hi",
    ],
)
def test_what_is_no_json_object_is_said(front: Served, body: bytes) -> None:
    error = told(httpx.post(front.url + COMPLETIONS, content=body, headers=JSON), 400)
    assert error["param"] == "body"


@pytest.mark.parametrize("fill", ["1,", "{},", '"a",', "[[],{}],"])
@pytest.mark.parametrize(
    ("path", "field"),
    [(CHAT, "messages"), (CHAT, "stop"), (COMPLETIONS, "prompt"), (CHAT, "what")],
)
def test_a_million_mistakes_are_one(front: Served, path: str, field: str, fill: str) -> None:
    items = fill * (500_000 // len(fill))
    body = f'{{"{field}": [{items} "x", 5, null]}}'
    response = httpx.post(front.url + path, content=body, headers=JSON, timeout=60)
    error = told(response, 400)
    assert len(error["message"]) < 400
    assert error["param"].startswith(field)


def test_names_without_end_are_cut(front: Served) -> None:
    body = "{" + ",".join(f'"{"k" * 50}{i}": 1' for i in range(20_000)) + "}"
    error = told(httpx.post(front.url + CHAT, content=body, headers=JSON), 400)
    assert error["param"] == "k" * 50 + "0"
    error = told(httpx.post(front.url + CHAT, content=f'{{"{"k" * 10**6}": 1}}', headers=JSON), 400)
    assert len(error["message"]) < 400
    assert len(error["param"]) <= 100


def test_two_megabytes_of_prompt_disturb_nobody(front: Served) -> None:
    ends = []

    def ask() -> None:
        ends.append(front.post(prompt="日 long " * 200_000, max_tokens=1))

    asking = threading.Thread(target=ask)
    asking.start()
    while asking.is_alive():
        alive(front)
    asking.join()
    error = told(ends[0], 400)
    assert error["param"] == "prompt"
    assert "tokens" in error["message"]


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit_is_not_read_to_its_end(declared: bool) -> None:
    with serve(config=HttpConfig(body_bytes=10_000, drain_s=0.2)) as front:
        body = json.dumps({"prompt": "Hi", "user": "u" * 300_000}).encode()
        content: Any = (
            body if declared else (body[at : at + 999] for at in range(0, len(body), 999))
        )
        with httpx.Client() as client:
            error = told(client.post(front.url + COMPLETIONS, content=content, headers=JSON), 413)
            assert "10000 bytes" in error["message"]
            # The same connection goes on.
            at_limit = json.dumps({"prompt": "Hi", "user": ""}).ljust(10_000)
            response = client.post(front.url + COMPLETIONS, content=at_limit, headers=JSON)
            assert response.status_code == 200
            response = client.post(front.url + COMPLETIONS, content=at_limit + " ", headers=JSON)
            told(response, 413)
        alive(front)


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({}, "application/json"),
        ({"content-type": "application/x-www-form-urlencoded"}, "application/json"),
        ({"content-type": "text/json; charset=utf-8"}, "application/json"),
        (JSON | {"content-encoding": "gzip"}, "content-encoding"),
    ],
)
def test_another_media_type(front: Served, headers: dict[str, str], named: str) -> None:
    error = told(httpx.post(front.url + CHAT, content=b"{}", headers=headers), 415)
    assert named in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/chat/completions", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", COMPLETIONS, 405),
        ("PUT", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/metrics", 405),
    ],
)
def test_no_such_route(front: Served, method: str, path: str, status: int) -> None:
    response = httpx.request(method, front.url + path)
    told(response, status)
    assert (status == 405) == ("allow" in response.headers)


def test_another_model(front: Served) -> None:
    error = told(front.post(prompt="Hi", model="gpt-5"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "'toy'" in error["message"]
    assert front.post(prompt="Hi", model="toy").status_code == 200
    assert front.post(prompt="Hi", model=None).status_code == 200


# --- errors after the request was accepted


def test_a_deadline_that_passes_before_the_first_token() -> None:
    clock, held = HandClock(), HeldBackend(saying(), hold_at=1)
    with serve(toy(backend=held, clock=clock, prefill_chunk=8), clock=clock) as front:

        def pass_time() -> None:
            front.wait_active(1)
            clock.now = 10.0
            held.go_on.set()

        passing = threading.Thread(target=pass_time)
        passing.start()
        response = front.post(prompt="Hi " * 30, deadline=9, stream=True)
        passing.join()
        error = told(response, 504)
        assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
        assert response.headers["x-should-retry"] == "false"


def test_an_error_after_the_stream_began_is_its_last_event() -> None:
    clock = HandClock()
    with serve(toy(clock=clock), clock=clock) as front:
        body = {"prompt": "Hi", "deadline": 9, "max_tokens": FOR_EVER, "stream": True}
        with httpx.stream("POST", front.url + COMPLETIONS, json=body) as response:
            assert response.status_code == 200
            parts = response.iter_text()
            text = next(parts)
            clock.now = 10.0
            text += "".join(parts)
        *events, last, nothing = text.split("\n\n")
        assert nothing == ""
        assert "[DONE]" not in text
        assert all(event.startswith('data: {"id":"cmpl-') for event in events)
        kind, _, data = last.partition("\n")
        assert kind == "event: error"
        error = json.loads(data.removeprefix("data: "))["error"]
        assert error["code"] == "deadline_exceeded"
        stream = front.client.completions.create(
            model="toy", prompt="Hi", max_tokens=FOR_EVER, stream=True, extra_body={"deadline": 9}
        )
        next(iter(stream))
        clock.now = 20.0
        with pytest.raises(openai.APIError, match="deadline") as caught:
            list(stream)
        assert caught.value.code == "deadline_exceeded"
        front.wait_freed(2)


class FailingBackend(HeldBackend):
    def forward(self, batch: Any) -> Any:
        raise RuntimeError("/secret/path.py")


class BrokenTarget:
    async def run(self, request: Request) -> AsyncGenerator[Event, None]:
        events: tuple[Event, ...] = ()
        for event in events:
            yield event
        raise RuntimeError("/secret/path.py")


def test_a_step_that_fails_is_unavailable_without_its_words() -> None:
    with serve(toy(backend=FailingBackend(saying(), 1))) as front:
        response = front.post(prompt="Hi")
        assert "secret" not in response.text
        assert told(response, 503)["code"] == "unavailable"
        assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize("stream", [False, True])
def test_our_own_mistake_is_a_500_without_its_words(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(target=BrokenTarget()) as front:
        response = front.post(prompt="Hi", stream=stream)
        assert "secret" not in response.text
        assert told(response, 500)["code"] == "internal_error"
    assert "/secret/path.py" in caplog.text


class Read(CompletionRequest):
    """Says where it is read."""

    @model_validator(mode="before")
    @classmethod
    def _where(cls, data: Any) -> Any:
        return {**data, "metadata": {"thread": str(threading.get_ident())}}


@pytest.mark.parametrize(("characters", "aside"), [(60_000, False), (70_000, True)])
async def test_a_large_body_is_read_beside_the_event_loop(characters: int, aside: bool) -> None:
    body = json.dumps({"prompt": "a" * characters}).encode()
    asked = await read(Read, body)
    assert asked.metadata is not None
    thread = asked.metadata["thread"]
    assert (thread != str(threading.get_ident())) is aside
    with pytest.raises(InvalidRequest, match="frobnicate"):
        await read(Read, body[:-1] + b', "frobnicate": 1}')


def test_an_echo_of_many_ids_is_decoded_beside_the_event_loop() -> None:
    with serve() as front:
        inner, seen = front.gateway.tokenizer, list[int]()

        class Where:
            def __getattr__(self, name: str) -> Any:
                return getattr(inner, name)

            def decode(self, ids: Any) -> str:
                seen.append(threading.get_ident())
                return inner.decode(ids)

        front.gateway.tokenizer = Where()  # type: ignore[assignment]
        loop = list[int]()
        front.call(lambda: loop.append(threading.get_ident()))
        for ids, aside in ((10, False), (LONG_PROMPT + 1, True)):
            answer = front.post(prompt=[5] * ids, echo=True, max_tokens=1)
            assert answer.status_code == 200
            assert (seen.pop() != loop[0]) is aside
