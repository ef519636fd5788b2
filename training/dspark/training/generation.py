"""Answers of the target to many prompts, through the engine, with what training reads of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from dspark.core.config import EngineConfig
from dspark.core.drafts import Drafter
from dspark.core.errors import ConfigError
from dspark.core.requests import Committed, Finished, FinishReason, Request
from dspark.core.sampling import SamplingParams
from dspark.models.targets.backend import Backend
from dspark.scheduler import OnlineStepCost
from dspark.training.errors import DataError
from dspark.training.examples import Example, Layout, Origin
from dspark.training.jobs import Job
from dspark.training.reading import Reader
from dspark.training.recorder import Key, RecordingBackend
from dspark.training.shard_writer import ShardWriter
from dspark.verifier.engine import Engine


@dataclass(slots=True)
class Made:
    """Sums of one run. seconds: of the whole loop."""

    answers: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    dropped: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        """Answer tokens a second."""
        return self.answer_tokens / self.seconds if self.seconds else 0.0


# Told after each step: what was made so far, and tokens of the answers that are being made.
Watch = Callable[[Made, int], None]


@dataclass(slots=True)
class _Running:
    job: Job
    ids: list[int] = field(default_factory=list)


def request_for(job: Job, max_tokens: int, context: int) -> Request:
    """A seeded request, so that an answer made twice is the same one twice (design.md §4, L3). Its
    answer ends where the context does."""
    room = context - len(job.prompt.ids)
    heat = job.heat
    params = SamplingParams(
        temperature=heat.temperature,
        top_p=heat.top_p,
        seed=None if heat.greedy else job.seed,
        max_tokens=min(max_tokens, room),
    )
    return Request(_request_id(job), job.prompt.ids, params)


def room_for(jobs: Sequence[Job], max_tokens: int, concurrency: int, gamma: int) -> EngineConfig:
    """An engine that holds `concurrency` answers at their longest, and never takes a row back."""
    config = EngineConfig(max_sequences=concurrency, max_step_tokens=max(512, concurrency))
    longest = max(len(job.prompt.ids) for job in jobs) + max_tokens + gamma + config.block_size
    blocks = -(-longest // config.block_size)
    return replace(
        config,
        kv_tokens=concurrency * blocks * config.block_size,
        gamma=gamma,
        verify="early-stop" if gamma else "none",
        max_waiting=concurrency,
    )


def read_given(
    backend: Backend,
    layout: Layout,
    jobs: Sequence[Job],
    writer: ShardWriter,
    *,
    together: int = 16,
    watch: Watch = lambda _made, _running: None,
    clock: Callable[[], float] = time.monotonic,
) -> Made:
    """The jobs whose prompts bring their answers: the target only reads them."""
    texts = [
        ([*job.prompt.ids, *(job.prompt.answer_ids or ())], len(job.prompt.ids)) for job in jobs
    ]
    longest = max(len(ids) for ids, _ in texts)
    room = max(16_384, longest + backend.block_size)
    reader = Reader(backend, layout, kv_tokens=room)
    made, begun = Made(), clock()
    try:
        for start in range(0, len(jobs), together):
            part = slice(start, start + together)
            found = reader.read(texts[part])
            for job, (ids, prompt), (features, target) in zip(
                jobs[part], texts[part], found, strict=True
            ):
                token_ids = torch.tensor(ids, dtype=torch.int32)
                origin = _origin(job, "given")
                writer.add(Example(origin, token_ids, prompt, features, target))
                made.answers += 1
                made.prompt_tokens += prompt
                made.answer_tokens += len(ids) - prompt
            made.seconds = clock() - begun
            watch(made, 0)
    finally:
        writer.flush()
    return made


def generate(
    backend: Backend,
    layout: Layout,
    jobs: Iterable[Job],
    writer: ShardWriter,
    *,
    max_tokens: int,
    config: EngineConfig,
    cost: OnlineStepCost,
    eos_ids: Collection[int],
    drafters: dict[str, Drafter] | None = None,
    watch: Watch = lambda _made, _running: None,
    clock: Callable[[], float] = time.monotonic,
) -> Made:
    """Do the jobs that `writer` does not hold yet, `config.max_sequences` at once.

    KV room for all of them at their longest is asked of `config`, so that no row is lost to
    preemption. Raises ConfigError for too little of it, DataError where a shard cannot be written.
    Ctrl-C writes what is finished and is raised again; a kill loses the shard that was filling.
    """
    recorder = RecordingBackend(backend, layout)
    engine = Engine(recorder, config, cost, drafters=drafters, eos_ids=eos_ids)
    recorder.owners = lambda: {s.state.key: s.blocks for s in engine.running}
    context = engine.limits.sequence_tokens
    todo = _checked((job for job in jobs if job.name not in writer.done), max_tokens, config)
    running: dict[Key, _Running] = {}
    made = Made()
    begun = clock()
    try:
        while True:
            while len(running) < config.max_sequences and (job := next(todo, None)):
                request = request_for(job, max_tokens, context)
                engine.submit(request)
                running[request.request_id, 0] = _Running(job)
            if not running:
                break
            for key, event in engine.step():
                if isinstance(event, Committed):
                    running[key].ids += event.ids
                    made.answer_tokens += len(event.ids)
                else:
                    _store(recorder, writer, key, running.pop(key), event, made)
            made.seconds = clock() - begun
            watch(made, sum(len(one.ids) for one in running.values()))
    finally:
        # Also on Ctrl-C: what is finished is worth keeping.
        writer.flush()
    return made


def _checked(jobs: Iterable[Job], max_tokens: int, config: EngineConfig) -> Iterator[Job]:
    room = config.kv_blocks // config.max_sequences * config.block_size
    for job in jobs:
        # A block more: the last one is part-filled, and drafts may reach past the end.
        longest = len(job.prompt.ids) + max_tokens + config.gamma + config.block_size
        if longest > room:
            raise ConfigError(
                f"kv_tokens: {config.kv_tokens} for {config.max_sequences} sequences at once is "
                f"{room} tokens each, and line {job.prompt.line} needs up to {longest}: ask for "
                "fewer at once, shorter answers, or more room"
            )
        yield job


def _store(
    recorder: RecordingBackend,
    writer: ShardWriter,
    key: Key,
    one: _Running,
    finished: Finished,
    made: Made,
) -> None:
    job = one.job
    figures = finished.speculation
    made.drafted += figures.drafted
    made.accepted += figures.accepted
    reason = _useless(one, finished)
    if reason:
        made.dropped += 1
        writer.drop(*job.name, reason)
        return
    ids = [*job.prompt.ids, *one.ids]
    try:
        features, target = recorder.take(key, ids, len(job.prompt.ids))
    except LookupError as error:  # the KV room was checked: a bug
        raise DataError(f"line {job.prompt.line}: {error}") from error
    made.answers += 1
    made.prompt_tokens += len(job.prompt.ids)
    token_ids = torch.tensor(ids, dtype=torch.int32)
    origin = _origin(job, finished.reason.value)
    writer.add(Example(origin, token_ids, len(job.prompt.ids), features, target))


def _origin(job: Job, finish: str) -> Origin:
    prompt, heat = job.prompt, job.heat
    return Origin(
        prompt.line,
        job.sample,
        prompt.domain,
        prompt.source,
        heat.temperature,
        heat.top_p,
        finish,
    )


def _useless(one: _Running, finished: Finished) -> str:
    """Why nothing can be learned from an answer, "" if something can."""
    if finished.reason is FinishReason.ERROR:
        return str(finished.error)
    if len(one.ids) == 1 and finished.reason is FinishReason.STOP:
        return "the answer is empty"
    return ""


def _request_id(job: Job) -> str:
    return f"{job.prompt.line}.{job.sample}"
