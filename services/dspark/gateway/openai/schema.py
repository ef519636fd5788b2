"""What OpenAI's clients send, field by field, and what it asks of the gateway.

A field is served, or accepted because the value given changes nothing, or refused by its name;
nothing is dropped in silence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, FailFast, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from dspark.core.errors import InvalidRequest
from dspark.core.requests import Speculation
from dspark.core.sampling import SamplingParams
from dspark.gateway.aside import aside
from dspark.gateway.openai.errors import BadField
from dspark.gateway.openai.values import (
    biases,
    content_text,
    ids_of,
    labels,
    only,
    prompts_of,
    short,
    stops,
)
from dspark.gateway.prompts import Prompt
from dspark.gateway.strict_file import Strict

# Prompts of one call times n: more than a step holds, and no work without end in one call.
MAX_CHOICES_A_CALL = 256
# What /v1/completions has always answered with where nobody says how much is wanted.
COMPLETION_MAX_TOKENS = 16

# Bytes of a body that are read in the time that a character of a prompt is encoded in: above 64 KiB
# a body is read in a thread.
BYTES_OF_ONE = 32

# pydantic's and our words for what went wrong, and OpenAI's.
CODES = {
    "missing": "missing_required_parameter",
    "unknown": "unknown_parameter",
    "unsupported": "unsupported_parameter",
}


class Fields(Strict):
    """Refuses the first field it does not know: one error, however many there are."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        for name in data if isinstance(data, dict) else ():
            if name not in cls.model_fields:
                told = {"told": "is not a known field", "name": name}
                raise PydanticCustomError("unknown", "{told}", told)
        return data


class StreamOptions(Fields):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, only(False)] = None


class SpeculationFields(Fields):
    """Wishes within the operator's limits: they change speed, never the text's distribution."""

    drafter: str | None = None
    gamma: int | None = None
    verify: str | None = None


class CompletionFields(Fields, ABC):
    """What both kinds of completion take."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[Any, AfterValidator(biases)] = None
    seed: int | None = None
    stop: Annotated[Any, AfterValidator(stops)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Ours. deadline: seconds from the receipt of the request.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Annotated[Any, AfterValidator(ids_of)] = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    deadline: Annotated[float, Field(gt=0)] | None = None
    floor_tps: Annotated[float, Field(ge=0)] | None = None
    speculation: SpeculationFields | None = None
    return_token_ids: bool | None = None

    # They say who asks, or file the answer; the answer is the same.
    user: str | None = None
    metadata: Annotated[Any, AfterValidator(labels)] = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Annotated[Any, only(False)] = None
    service_tier: Annotated[Any, only("auto", "default")] = None

    @model_validator(mode="after")
    def _streams(self) -> CompletionFields:
        if self.stream_options is not None and not self.stream:
            given = self.stream_options.model_dump(exclude_none=True)
            raise InvalidRequest("stream_options", given, "needs stream to be true")
        return self

    @property
    @abstractmethod
    def prompts(self) -> tuple[Prompt, ...]: ...

    @property
    @abstractmethod
    def sampling(self) -> SamplingParams: ...

    @property
    def names(self) -> Mapping[str, str]:
        """What core's errors call a field, and what it is called here."""
        return {"stop_ids": "stop_token_ids", "verify": "speculation.verify"}

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def echoes(self) -> bool:
        return False

    @property
    def wishes(self) -> Speculation:
        wish = self.speculation or SpeculationFields()
        return Speculation(wish.drafter, wish.gamma, wish.verify)

    def _sampling(self, **own: Any) -> SamplingParams:
        """What was given, over core's defaults. own: of one kind of completion."""
        given = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias,
            "seed": self.seed,
            "n": self.n,
            "stop": self.stop,
            "stop_ids": self.stop_token_ids,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            **own,
        }
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})


class Message(Fields):
    role: str
    content: Annotated[Any, AfterValidator(content_text)] = None
    # An answer of ours, sent back as the client's library prints it, has these.
    refusal: Annotated[Any, only()] = None
    annotations: Annotated[Any, only([])] = None
    audio: Annotated[Any, only()] = None
    function_call: Annotated[Any, only()] = None
    tool_calls: Annotated[Any, only([])] = None
    name: Annotated[Any, only()] = None


class ChatRequest(CompletionFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast()]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    parallel_tool_calls: bool | None = None
    tools: Annotated[Any, only([])] = None
    tool_choice: Annotated[Any, only("none")] = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none")] = None
    response_format: Annotated[Any, only({"type": "text"})] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Annotated[Any, only()] = None
    prediction: Annotated[Any, only()] = None
    reasoning_effort: Annotated[Any, only()] = None
    verbosity: Annotated[Any, only()] = None
    web_search_options: Annotated[Any, only()] = None

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        asked = self.max_completion_tokens
        if asked is not None and self.max_tokens not in (None, asked):
            raise InvalidRequest(
                "max_completion_tokens", asked, f"contradicts max_tokens = {self.max_tokens}"
            )
        return self

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        chat = tuple({"role": said.role, "content": said.content} for said in self.messages)
        return (Prompt(chat=chat),)

    @property
    def sampling(self) -> SamplingParams:
        asked = self.max_completion_tokens
        return self._sampling(
            max_tokens=self.max_tokens if asked is None else asked,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
        )

    @property
    def names(self) -> Mapping[str, str]:
        names = {**super().names, "prompt": "messages", "prompt_ids": "messages"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names


class CompletionRequest(CompletionFields):
    """Body of POST /v1/completions."""

    prompt: Annotated[Any, AfterValidator(prompts_of)]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: Annotated[Any, only("")] = None

    @model_validator(mode="after")
    def _together(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise InvalidRequest(
                "echo", True, "cannot go with logprobs: those of a prompt are not computed"
            )
        n = 1 if self.n is None else self.n
        if self.best_of not in (None, n):
            told = f"is not served here, but as n = {n}"
            raise BadField("best_of", self.best_of, told, CODES["unsupported"])
        if len(self.prompt) * max(n, 1) > MAX_CHOICES_A_CALL and len(self.prompt) > 1:
            told = f"times n = {n} is above the limit of {MAX_CHOICES_A_CALL} choices"
            raise InvalidRequest("prompt", f"{len(self.prompt)} prompts", told)
        return self

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        found: tuple[Prompt, ...] = self.prompt
        return found

    @property
    def sampling(self) -> SamplingParams:
        return self._sampling(
            max_tokens=COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            logprobs=self.logprobs is not None,
            top_logprobs=self.logprobs,
        )

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def names(self) -> Mapping[str, str]:
        return {**super().names, "prompt_ids": "prompt", "top_logprobs": "logprobs"}


Asked = TypeVar("Asked", bound=CompletionFields)


async def read(kind: type[Asked], body: bytes) -> Asked:
    """As `parse`, beside the event loop where there is much of it."""
    return await aside(len(body) // BYTES_OF_ONE, partial(parse, kind), body)


def parse(kind: type[Asked], body: bytes) -> Asked:
    """Raises InvalidRequest naming the first field that is wrong."""
    try:
        # Not `model_validate_json`, which makes all of the body's objects twice.
        return kind.model_validate(from_json(body))
    except ValidationError as error:
        raise _bad_field(error.errors(include_url=False)[0]) from None
    except ValueError as error:
        start = body[:100].decode("utf-8", "replace")
        raise BadField("body", start, f"is not JSON: {error}", "invalid_json") from None


def _bad_field(problem: Any) -> BadField:
    kind, value, told = problem["type"], problem["input"], problem["msg"]
    path = list(problem["loc"])
    if kind == "unknown":
        path.append(problem["ctx"]["name"])
        value = value[path[-1]]
    elif kind == "missing":
        value, told = None, "is missing"
    elif kind == "model_type":
        told = "must be an object"
    field = "".join(f"[{step}]" if isinstance(step, int) else f".{step[:80]}" for step in path)
    field, told = field.removeprefix(".") or "body", told.removeprefix("Input ")
    return BadField(field, short(value), told, CODES.get(kind, "invalid_value"))
