"""One request over all its attempts: what to ask next, and what has come. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

from dspark.client.results import Choice, Chunk, DrafterInfo, Generation, ModelInfo
from dspark.client.wire_client import (
    figures_from_wire,
    logprobs_from_wire,
    reason_from_wire,
    usage_from_wire,
)
from dspark.core.errors import DsparkError
from dspark.core.requests import FinishReason, SpeculationFigures, TokenLogprob, Usage
from dspark.v1 import generation_pb2 as pb


@dataclass(slots=True)
class _Held:
    """What has come of one choice."""

    ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: FinishReason | None = None
    usage: Usage | None = None
    speculation: SpeculationFigures = field(default_factory=SpeculationFigures)


class AnswerState:
    """Told every response of every attempt. A further attempt resumes behind the ids that are held:
    they are not sent again, nor is the text that they release."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = request
        self._held = [_Held() for _ in range(request.n)]
        self._started: pb.GenerationStarted | None = None

    @property
    def begun(self) -> bool:
        """Some ids are held: a server had room for it once. `started` says no such thing."""
        return any(held.ids for held in self._held)

    @property
    def complete(self) -> bool:
        return all(held.reason is not None for held in self._held)

    def request(self, attempt: int, left_s: float | None) -> pb.GenerateRequest:
        """left_s: seconds to the deadline."""
        wire = pb.GenerateRequest()
        wire.CopyFrom(self._request)
        wire.attempt = attempt
        if left_s is not None:
            wire.deadline_s = left_s
        wire.resume.extend(
            pb.Resume(choice=choice, ids=held.ids)
            for choice, held in enumerate(self._held)
            if held.ids
        )
        return wire

    def take(self, response: pb.GenerateResponse) -> Chunk | None:
        """What is new in it. Raises DsparkError for a response that does not fit what is held."""
        if response.WhichOneof("event") == "started":
            self._started = self._started or response.started
            return None
        wire = response.chunk
        if wire.choice >= len(self._held):
            raise DsparkError(f"the server answers choice {wire.choice}, which was not asked for")
        held = self._held[wire.choice]
        if wire.index != len(held.ids):
            raise DsparkError(
                f"the server sent position {wire.index} of choice {wire.choice} "
                f"where {len(held.ids)} was due"
            )
        if held.reason is not None:
            return None  # of a choice that was complete before this attempt, the end again
        chunk = Chunk(
            choice=wire.choice,
            index=wire.index,
            ids=tuple(wire.ids),
            text=wire.text,
            logprobs=logprobs_from_wire(wire.logprobs),
            finish_reason=reason_from_wire(wire.end.reason) if wire.HasField("end") else None,
            usage=usage_from_wire(wire.end.usage) if wire.HasField("end") else None,
            speculation=(figures_from_wire(wire.end.speculation) if wire.HasField("end") else None),
        )
        held.ids += chunk.ids
        held.text.append(chunk.text)
        held.logprobs += chunk.logprobs
        held.reason, held.usage = chunk.finish_reason, chunk.usage
        held.speculation = chunk.speculation or held.speculation
        return chunk

    @property
    def generation(self) -> Generation:
        """All that has come so far."""
        started = self._started or pb.GenerationStarted(request_id=self._request.request_id)
        prompt_tokens = started.prompt_tokens
        return Generation(
            request_id=started.request_id,
            model=started.model,
            prompt_tokens=prompt_tokens,
            choices=tuple(
                Choice(
                    index=index,
                    text="".join(held.text),
                    token_ids=tuple(held.ids),
                    finish_reason=held.reason,
                    usage=held.usage or Usage(prompt_tokens, len(held.ids)),
                    speculation=held.speculation,
                    logprobs=tuple(held.logprobs),
                )
                for index, held in enumerate(self._held)
            ),
            prompt_ids=tuple(started.prompt_ids),
        )


def model_from_wire(wire: pb.ModelInfoResponse) -> ModelInfo:
    return ModelInfo(
        name=wire.model,
        target_id=wire.target_id,
        tokenizer_hash=wire.tokenizer_hash,
        vocab_size=wire.vocab_size,
        sequence_tokens=wire.sequence_tokens,
        eos_ids=tuple(wire.eos_ids),
        has_chat_template=wire.has_chat_template,
        drafters=tuple(DrafterInfo(d.drafter_id, d.kind, d.gamma) for d in wire.drafters),
        verify=wire.verify,
        couple_unseeded=wire.couple_unseeded,
    )
