"""Configuration of one engine: every default once, with its unit and its reason."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dspark.core.drafts import MAX_GAMMA
from dspark.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What a verifier's engine may use.

    kv_tokens: room of the KV pool, tokens. block_size: tokens a block; 16 wastes half a block a
    sequence on average and keeps tables short. max_sequences: R at most. max_step_tokens: B at
    most. prefill_chunk: prompt tokens a step beside decoding requests, which wait for it.
    max_waiting: requests queued before new ones are refused. gamma: draft tokens asked for at most.
    verify: policy of the planner. retry_after_s: told to refused callers. buffered_events: of one
    choice that wait for its reader before its sequence pauses; at half of them it goes on.
    stall_timeout_s: seconds that a choice may stand paused; a tab that sleeps is given up, a reader
    that is merely slow is not. heartbeat_s: seconds between two signs of life to a gateway,
    which takes more than three that are missed for a death. They are given between steps, so who
    loads a target makes it half its longest step where that is more (`deploy.single`).
    """

    kv_tokens: int = 65_536
    block_size: int = 16
    max_sequences: int = 64
    max_step_tokens: int = 512
    prefill_chunk: int = 256
    max_waiting: int = 1024
    gamma: int = 7
    verify: str = "early-stop"
    retry_after_s: float = 1.0
    buffered_events: int = 64
    stall_timeout_s: float = 30.0
    heartbeat_s: float = 0.5

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str) and not value > 0 and field.name != "gamma":
                raise ConfigError(f"{field.name}: {value!r} must be above 0")
        if not 0 <= self.gamma <= MAX_GAMMA:
            raise ConfigError(f"gamma: {self.gamma!r} must be in [0, {MAX_GAMMA}]")
        if self.max_step_tokens < self.max_sequences:
            raise ConfigError(
                f"max_step_tokens: {self.max_step_tokens} is below max_sequences = "
                f"{self.max_sequences}: a step must hold one token of each sequence"
            )
        if self.kv_tokens < self.block_size:
            raise ConfigError(
                f"kv_tokens: {self.kv_tokens} is below one block of {self.block_size} tokens"
            )

    @property
    def kv_blocks(self) -> int:
        return self.kv_tokens // self.block_size
