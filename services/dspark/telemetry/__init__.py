"""What a replica tells of itself: traces, metrics, logs. Importing this imports nothing else.

config      the section of a configuration
process     all of it for one process: `async with telemetry(...)`
tracing     which requests are traced, and spans as plain data
spans       from what a replica remembers of a request to its spans
rounds      where a round's time goes, from spans
otlp        the one module that knows OpenTelemetry: spans and metrics to a collector
readings    figures of engines, drafters, schedulers, as they are when somebody asks
collectors  readings as Prometheus' metrics, with their names (docs/telemetry.md)
endpoint    GET /metrics
logs        one line an event, with request and trace id
"""
