"""What a gateway counts of its calls, in Prometheus' text format. Names: docs/telemetry.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dspark.gateway.answers import Answer
from dspark.telemetry.calls import PROVIDER
from dspark.telemetry.collectors import EngineCollector
from dspark.telemetry.event_loop import EventLoopMetrics
from dspark.telemetry.readings import EngineReading

# Seconds. A first token takes from a cached prompt's one step to minutes of queue.
FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
# Those that the semantic conventions for generative AI ask for.
REQUEST_BUCKETS = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64),
    *(1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
GEN_AI_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
GEN_AI_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
USAGE_BUCKETS = tuple(float(4**n) for n in range(14))
# By which they are told apart.
CALL = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")


class Metrics:
    """What is counted here, and an engine's own figures as they are when somebody asks.

    registry: what else a process tells; its own if there is none.
    """

    def __init__(
        self,
        read_engine: Callable[[], EngineReading] | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self._requests = Counter(
            "dspark_requests",
            "Requests by protocol, route and status",
            ("protocol", "route", "status"),
            registry=self.registry,
        )
        self._inside = Gauge(
            "dspark_requests_in_flight",
            "Requests that have no whole response yet",
            ("protocol",),
            registry=self.registry,
        )
        self._first_token = Histogram(
            "dspark_time_to_first_token_seconds",
            "From a choice's start to its first token",
            ("protocol",),
            buckets=FIRST_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._token = Histogram(
            "dspark_time_per_output_token_seconds",
            "Mean time of a choice's tokens after the first",
            ("protocol",),
            buckets=TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._server_request = self._seconds(
            "gen_ai_server_request_duration",
            "A call, to its last byte",
            REQUEST_BUCKETS,
            "error_type",
        )
        self._server_first_token = self._seconds(
            "gen_ai_server_time_to_first_token", "To the first token", GEN_AI_FIRST_TOKEN_BUCKETS
        )
        self._server_token = self._seconds(
            "gen_ai_server_time_per_output_token", "After the first token", GEN_AI_TOKEN_BUCKETS
        )
        self._client_operation = self._seconds(
            "gen_ai_client_operation_duration",
            "One choice on its target",
            REQUEST_BUCKETS,
            "error_type",
        )
        self._client_usage = Histogram(
            "gen_ai_client_token_usage",
            "Tokens of one choice",
            (*CALL, "gen_ai_token_type"),
            buckets=USAGE_BUCKETS,
            registry=self.registry,
        )
        self._loop = EventLoopMetrics(self.registry)
        if read_engine is not None:
            self.registry.register(EngineCollector(read_engine))

    def _seconds(self, name: str, what: str, buckets: tuple[float, ...], *more: str) -> Histogram:
        return Histogram(
            f"{name}_seconds", what, (*CALL, *more), buckets=buckets, registry=self.registry
        )

    def answered(
        self, protocol: str, operation: str, model: str, answer: Answer, tokens: int
    ) -> None:
        """A choice ended well. tokens: that it made, those it was resumed with not counted."""
        timing, call = answer.timing, (operation, PROVIDER, model)
        if tokens > 0:
            self._first_token.labels(protocol).observe(timing.ttft_s)
            self._server_first_token.labels(*call).observe(timing.ttft_s)
        if tokens > 1:
            self._token.labels(protocol).observe(timing.tpot_s)
            self._server_token.labels(*call).observe(timing.tpot_s)
        self._client_operation.labels(*call, "").observe(timing.total_s)
        self._client_usage.labels(*call, "input").observe(answer.usage.prompt_tokens)
        self._client_usage.labels(*call, "output").observe(tokens)

    def failed(self, operation: str, model: str, seconds: float, error: str) -> None:
        """A choice did not. error: its kind."""
        self._client_operation.labels(operation, PROVIDER, model, error).observe(seconds)

    def called(self, operation: str, model: str, seconds: float, error: str) -> None:
        """A call is over. error: its kind, "" for a good end."""
        self._server_request.labels(operation, PROVIDER, model, error).observe(seconds)

    @contextmanager
    def request(self, protocol: str, route: str, gone: str) -> Iterator[Responding]:
        """One request, from its begin to the end of its response. gone: the status of one whose
        client hung up."""
        responding = Responding(gone)
        with self._inside.labels(protocol).track_inprogress():
            try:
                yield responding
            finally:
                self._requests.labels(protocol, route, responding.status).inc()

    async def watch_loop(self) -> None:
        """Measures until it is cancelled."""
        await self._loop.watch()

    def text(self) -> bytes:
        return generate_latest(self.registry)


@dataclass(slots=True)
class Responding:
    """status: of the response, once it is known."""

    status: str
