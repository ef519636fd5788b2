"""A whole small cluster in one process with its telemetry on: scheduler, drafter, verifier, gateway
behind HTTP and gRPC, every one with a tracer and a registry of its own; all over real gRPC."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dspark.core.replicas import Member, Pool, Replica
from dspark.core.requests import Request
from dspark.drafter import DrafterOffer, DraftingServicer, DraftRunner
from dspark.gateway.dispatch import Dispatch
from dspark.gateway.gateway import Gateway, ServedModel
from dspark.gateway.keys import KeyRing
from dspark.gateway.metrics import Metrics
from dspark.gateway.openai import Door, HttpConfig, make_app, serve_http
from dspark.gateway.servicer import GenerationServicer
from dspark.gateway.verifier_client import VerificationClient
from dspark.models.targets.backend import RaggedBatch, StepOutput
from dspark.scheduler.central import Scheduler, SchedulerConfig
from dspark.scheduler.store import MemoryStore
from dspark.scheduling.client import SchedulingClient
from dspark.scheduling.membership import Membership
from dspark.scheduling.servicer import SchedulingServicer, WireCodec
from dspark.serving import serve_grpc
from dspark.telemetry.otlp import Export
from dspark.telemetry.process import Telemetry
from dspark.telemetry.tracing import Span, Tracer
from dspark.verifier.adoption import Adoption
from dspark.verifier.engine import Engine
from dspark.verifier.enrolment import enrol
from dspark.verifier.lines import Run
from dspark.verifier.runner import EngineRunner
from dspark.verifier.servicer import VerificationServicer

from ..gateway.openai.served import VOCAB, saying, tokenizer
from ..scheduling.cluster import COST, PATIENT_S, QUICK, card_of, until
from ..verifier.toy import ScriptedDrafter, ToyBackend, oracle, toy_engine

GAMMA = 4


class Breakable(ToyBackend):
    """Until it is broken."""

    broken = False

    def forward(self, batch: RaggedBatch) -> StepOutput:
        if self.broken:
            raise RuntimeError("the target is broken")
        return super().forward(batch)


class Noting(EngineRunner):
    """submitted: what it was asked to run, in order."""

    def __init__(self, *arguments: Any, **rest: Any) -> None:
        super().__init__(*arguments, **rest)
        self.submitted: list[Request] = []

    def submit(self, run: Run) -> None:
        self.submitted.append(run.request)
        super().submit(run)


@dataclass
class Traced:
    """http: its URL; grpc, scheduler: addresses. spans: our own records of all replicas, as they
    were written; exported: as an exporter gets them, by the replica that told them."""

    http: str
    grpc: str
    scheduler: str
    backend: Breakable
    runner: Noting
    replicas: dict[str, Telemetry]
    spans: list[Span]
    _exports: dict[str, tuple[Export, InMemorySpanExporter]] = field(default_factory=dict)

    @property
    def engine(self) -> Engine:
        return self.runner.engine

    def text(self, replica: str) -> str:
        """GET /metrics of a replica."""
        registry = self.replicas[replica].registry
        assert registry is not None
        return generate_latest(registry).decode()

    def figures(self, replica: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(self.text(replica))
            for sample in family.samples
        }

    def exported(self) -> dict[str, Sequence[ReadableSpan]]:
        """All that was told so far. The last word: nothing is exported after this."""
        for export, _ in self._exports.values():
            export.close(30)
        return {name: memory.get_finished_spans() for name, (_, memory) in self._exports.items()}

    async def told(self, name: str, count: int = 1) -> list[Span]:
        """Spans of a name, once there are so many."""
        await until(lambda: len(self.named(name)) >= count)
        return self.named(name)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


@asynccontextmanager
async def traced(sample: float = 1.0, traces: bool = True) -> AsyncIterator[Traced]:
    """traces: False leaves tracers out and has metrics only."""
    spans: list[Span] = []
    replicas: dict[str, Telemetry] = {}
    exports: dict[str, tuple[Export, InMemorySpanExporter]] = {}

    def tells(name: str) -> Telemetry:
        memory = InMemorySpanExporter()
        export = Export(memory, {"service.instance.id": name}, every_s=0.05)
        exports[name] = export, memory

        def sink(span: Span) -> None:
            spans.append(span)
            export.put(span)

        tracer = Tracer(sink, sample) if traces else None
        replicas[name] = Telemetry(name, tracer, CollectorRegistry())
        return replicas[name]

    rule = saying()
    backend = Breakable(rule, VOCAB)
    engine = toy_engine(
        backend,
        clock=time.monotonic,
        eos_ids=tokenizer().eos_ids,
        gamma=GAMMA,
        verify=f"fixed:{GAMMA}",
        kv_tokens=8192,
    )
    drafter = ScriptedDrafter(oracle(rule, wrong_every=5), gamma=GAMMA)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        try:
            # The scheduler.
            told = tells("s1")
            central = await enter(
                Scheduler(MemoryStore(), WireCodec(), SchedulerConfig(**QUICK), "s1")
            )
            told.watch_scheduler(central)
            service = SchedulingServicer(central, told.tracer)
            scheduler_server = await enter(serve_grpc(service, drain_s=0.0))
            scheduler = await enter(SchedulingClient([scheduler_server.address], call_s=PATIENT_S))
            # A drafter.
            told = tells("d1")
            drafts = await enter(DraftRunner(drafter, watch=told.drafts))
            told.watch_drafter(drafts)
            drafting = DraftingServicer(drafts, DrafterOffer.of(drafter), Replica("d1"))
            drafter_server = await enter(serve_grpc(drafting, drain_s=0.0))
            place = Replica("d1", drafter_server.address)
            member = Member(Pool.DRAFTER, place, drafts.card)
            await enter(Membership(scheduler, member, load=drafts.load))
            # A verifier.
            told = tells("v1")
            told.watch_engine(engine)
            runner = await enter(Noting(engine, told.runs))
            card = card_of(engine)
            verification = VerificationServicer(runner, card, Replica("v1"))
            verifier_server = await enter(serve_grpc(verification, drain_s=0.0))
            adoption = await enter(Adoption(scheduler, runner, card, "v1", 4))

            def begin_life(epoch: int) -> None:
                verification.begin_life(epoch)
                adoption.begin_life(epoch)

            place = Replica("v1", verifier_server.address)
            member = Member(Pool.VERIFIER, place, card)
            membership = await enter(enrol(scheduler, runner, member, COST, on_life=begin_life))
            told.watch_outage("scheduler", membership.outage)
            # A gateway.
            told = tells("g1")
            target = await enter(
                Dispatch(
                    scheduler,
                    "g1",
                    lambda replica: VerificationClient(replica.address),
                    lease_s=PATIENT_S,
                    tracer=told.tracer,
                )
            )
            told.watch_dispatch(target)
            gateway = Gateway(
                target,
                tokenizer(),
                ServedModel("toy", engine.target_id, engine.limits),
                metrics=Metrics(registry=told.registry),
                tracer=told.tracer,
            )
            door, bounds = Door(), HttpConfig(drain_s=0.2)
            front = await enter(serve_grpc(GenerationServicer(gateway, KeyRing()), drain_s=0.0))
            app = make_app(gateway, KeyRing(), door, bounds)
            http = await enter(serve_http(app, door, "127.0.0.1", config=bounds))
            door.open()
            await until(lambda: "d1" in adoption.links and bool(target.members))
            yield Traced(
                f"http://{http.address}",
                front.address,
                scheduler_server.address,
                backend,
                runner,
                replicas,
                spans,
                exports,
            )
        finally:
            for export, _ in exports.values():
                export.close(30)
