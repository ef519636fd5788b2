"""A user's words as a message: prompts of every kind, and all options by keyword."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypedDict

from dspark.client.wire_client import sampling_to_wire, speculation_to_wire
from dspark.core.drafts import MAX_GAMMA, PROTOCOL_VERSION
from dspark.core.errors import InvalidRequest
from dspark.core.requests import Speculation
from dspark.core.sampling import SamplingParams, check_sampling
from dspark.v1 import generation_pb2 as pb

# {"role": ..., "content": ...}
Message = Mapping[str, str]
# A text to continue, ids to continue, or messages to answer.
Prompt = str | Sequence[int] | Sequence[Message]

MAX_INT32 = 2**31 - 1


class Options(TypedDict, total=False):
    """Everything that may be said of a request beside its prompt.

    First the sampling parameters of `SamplingParams`, whose defaults hold (`stop` may be one
    string). `params` gives them all at once; a keyword beside it changes one.

    model: None takes what the server serves. deadline_s: seconds for the whole answer, retries
    included. priority: higher goes first. floor_tps: tokens a second each choice should never fall
    below. speculation: drafter, gamma, verify. request_id: made up if left out. traceparent: W3C
    trace context that the server's spans continue; left out, that of OpenTelemetry's active span
    where the application uses it. return_prompt_ids: in the result.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    n: int
    stop: str | Sequence[str]
    stop_ids: Sequence[int]
    min_tokens: int
    max_tokens: int | None
    ignore_eos: bool
    logprobs: bool
    top_logprobs: int
    params: SamplingParams
    model: str | None
    deadline_s: float | None
    priority: int
    floor_tps: float
    speculation: Speculation | None
    request_id: str
    traceparent: str
    return_prompt_ids: bool


_SAMPLING = {field.name for field in fields(SamplingParams)}


def generate_request(prompt: Prompt, options: Mapping[str, Any]) -> pb.GenerateRequest:
    """Without attempt, deadline and resume, which change with each attempt.

    Raises InvalidRequest for what the server would refuse whatever it serves (it checks again), and
    TypeError for an option that does not exist.
    """
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    params = _sampling(options)
    check_sampling(params, MAX_INT32)
    wish = options.get("speculation") or Speculation()
    if wish.gamma is not None and not 0 <= wish.gamma <= MAX_GAMMA:
        raise InvalidRequest("speculation.gamma", wish.gamma, f"must be in [0, {MAX_GAMMA}]")
    return pb.GenerateRequest(
        protocol_version=PROTOCOL_VERSION,
        request_id=options.get("request_id") or secrets.token_hex(12),
        model=options.get("model") or "",
        prompt=prompt_to_wire(prompt),
        sampling=sampling_to_wire(replace(params, top_k=min(params.top_k, MAX_INT32))),
        n=params.n,
        stop=[_text("stop", stop) for stop in params.stop],
        speculation=speculation_to_wire(wish),
        priority=_int32("priority", options.get("priority", 0)),
        floor_tps=options.get("floor_tps", 0.0),
        return_prompt_ids=options.get("return_prompt_ids", False),
    )


def _sampling(options: Mapping[str, Any]) -> SamplingParams:
    given = {name: value for name, value in options.items() if name in _SAMPLING}
    for name in ("stop", "stop_ids"):
        if name in given:
            value = given[name]
            given[name] = (value,) if isinstance(value, str) else tuple(value)
    for name in ("max_tokens", "min_tokens"):
        if given.get(name) is not None:
            _int32(name, given[name])
    params: SamplingParams = options.get("params", SamplingParams())
    return replace(params, **given)


def prompt_to_wire(prompt: Prompt) -> pb.Prompt:
    if isinstance(prompt, str):
        return pb.Prompt(text=_text("prompt", prompt))
    items = list(prompt)
    if items and isinstance(items[0], Mapping):
        messages = [_message(f"messages[{i}]", item) for i, item in enumerate(items)]
        return pb.Prompt(chat=pb.Chat(messages=messages))
    return pb.Prompt(token_ids=pb.TokenIds(ids=[_int32("prompt", id) for id in items]))


def as_chat(messages: str | Sequence[Message]) -> Sequence[Message]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def _message(field: str, message: Any) -> pb.ChatMessage:
    if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
        raise InvalidRequest(field, message, 'must have "role" and "content", and nothing else')
    return pb.ChatMessage(
        role=_text(f"{field}.role", message["role"]),
        content=_text(f"{field}.content", message["content"]),
    )


def _text(field: str, text: object) -> str:
    if not isinstance(text, str):
        raise InvalidRequest(field, text, "must be a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            field, text, f"has half a surrogate pair at character {error.start}"
        ) from None
    return text


def _int32(field: str, number: Any) -> int:
    """Any kind of integer (NumPy's too)."""
    try:
        value = operator.index(number)
    except TypeError:
        raise InvalidRequest(field, number, "must be an integer") from None
    if not -MAX_INT32 <= value <= MAX_INT32:
        raise InvalidRequest(field, value, "must fit in 32 bits")
    return value
