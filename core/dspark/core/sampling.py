"""How the next token of a request is chosen: parameters, their limits, and the mode they imply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from dspark.core.errors import InvalidRequest

# Below this a temperature is greedy: dividing logits by it would overflow float32, and other
# servers (vLLM) draw the line at the same place.
GREEDY_TEMPERATURE = 1e-5

MAX_CHOICES = 64
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_IDS = 128
MAX_LOGIT_BIAS = 1024


class SamplingMode(StrEnum):
    """Which rule makes speculation lossless for a request (design.md §4, L1 to L3)."""

    GREEDY = "greedy"
    REJECTION = "rejection"
    COUPLED = "coupled"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters as users know them from other servers; a default leaves a rule off.

    Penalties: presence and frequency count generated tokens, repetition counts the prompt too.
    Order of application: penalties, bias, min_tokens mask, temperature, top_k, top_p, min_p.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0

    @property
    def mode(self) -> SamplingMode:
        if self.temperature < GREEDY_TEMPERATURE or self.top_k == 1:
            return SamplingMode.GREEDY
        return SamplingMode.REJECTION if self.seed is None else SamplingMode.COUPLED

    @property
    def penalized(self) -> bool:
        """Whether logits depend on which tokens came before."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def plain(self) -> bool:
        """Whether the next token is the bare argmax of the model's logits."""
        return (
            self.mode is SamplingMode.GREEDY
            and not self.penalized
            and not self.logit_bias
            and self.min_tokens == 0
            and not self.logprobs
        )


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise `InvalidRequest` naming the first field that is out of its range."""
    p = params
    _number("temperature", p.temperature, 0.0, 100.0)
    if not -1 <= p.top_k < 2**31:
        raise InvalidRequest("top_k", p.top_k, "must be in [-1, 2^31) (0 and -1 turn it off)")
    _number("top_p", p.top_p, 0.0, 1.0)
    if p.top_p == 0.0:
        raise InvalidRequest("top_p", p.top_p, "must be in (0, 1]; for greedy use temperature 0")
    _number("min_p", p.min_p, 0.0, 1.0)
    _number("presence_penalty", p.presence_penalty, -2.0, 2.0)
    _number("frequency_penalty", p.frequency_penalty, -2.0, 2.0)
    _number("repetition_penalty", p.repetition_penalty, 0.0, 100.0)
    if p.repetition_penalty == 0.0:
        raise InvalidRequest(
            "repetition_penalty", p.repetition_penalty, "must be above 0 (1 turns it off)"
        )
    if not 1 <= p.n <= MAX_CHOICES:
        raise InvalidRequest("n", p.n, f"must be in [1, {MAX_CHOICES}]")
    if p.seed is not None and not -(2**63) <= p.seed < 2**64:
        raise InvalidRequest("seed", p.seed, "must fit in 64 bits")
    _bias(p.logit_bias, vocab_size)
    _stops(p, vocab_size)
    if p.max_tokens is not None and p.max_tokens < 1:
        raise InvalidRequest("max_tokens", p.max_tokens, "must be at least 1")
    if p.min_tokens < 0 or (p.max_tokens is not None and p.min_tokens > p.max_tokens):
        limit = "" if p.max_tokens is None else f" and at most max_tokens = {p.max_tokens}"
        raise InvalidRequest("min_tokens", p.min_tokens, f"must be at least 0{limit}")
    if not 0 <= p.top_logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidRequest("top_logprobs", p.top_logprobs, f"must be in [0, {MAX_TOP_LOGPROBS}]")
    if p.top_logprobs and not p.logprobs:
        raise InvalidRequest("top_logprobs", p.top_logprobs, "needs logprobs to be true")


def _number(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # nor is NaN, nor an integer that no float holds
        raise InvalidRequest(name, value, f"must be a number in [{low:g}, {high:g}]")


def _bias(bias: Mapping[int, float], vocab_size: int) -> None:
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest("logit_bias", len(bias), f"has more than {MAX_LOGIT_BIAS} entries")
    for token, value in bias.items():
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                "logit_bias", token, f"is not a token id of the vocabulary [0, {vocab_size})"
            )
        _number(f"logit_bias[{token}]", value, -100.0, 100.0)


def _stops(p: SamplingParams, vocab_size: int) -> None:
    if len(p.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", len(p.stop), f"has more than {MAX_STOP_STRINGS} strings")
    for text in p.stop:
        if not text:
            raise InvalidRequest("stop", text, "must not be an empty string")
        if len(text) > MAX_STOP_STRING_CHARS:
            raise InvalidRequest("stop", text, f"is longer than {MAX_STOP_STRING_CHARS} characters")
    if len(p.stop_ids) > MAX_STOP_IDS:
        raise InvalidRequest("stop_ids", len(p.stop_ids), f"has more than {MAX_STOP_IDS} ids")
    for token in p.stop_ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                "stop_ids", token, f"is not a token id of the vocabulary [0, {vocab_size})"
            )
