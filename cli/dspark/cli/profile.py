"""`dspark profile`: what a step costs on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from dspark.cli import options
from dspark.cli.console import load_with_progress

if TYPE_CHECKING:
    from dspark.models.targets.backend import Backend
    from dspark.models.targets.native.limits import Limits


def profile(
    model: options.Model = "smollm2-135m",
    backend: options.Backend = "auto",
    dtype: options.DType = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = 0,
    cached: Annotated[
        bool,
        typer.Option("--cached", help="Show the cached measurement if there is one that holds."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure T(P, R, B, context), the seconds of a verifier step, and keep it for the planner.

    P prefill tokens, R decoding requests, B tokens in all, context tokens in the KV cache.
    """
    from dspark.deploy.single import TargetConfig

    config = TargetConfig(model=model, backend=backend, dtype=dtype, device=device, threads=threads)
    loaded = load_with_progress(config, profile=not cached)
    cost, limits, ran = loaded.cost, _limits(loaded.backend), loaded.config
    if as_json:
        facts = {
            "model": model,
            "backend": ran.backend,
            "dtype": ran.dtype,
            "device": device,
            "hardware": loaded.hardware,
            "threads": loaded.threads,
            "measured_now": loaded.profiled,
            "step_cost": asdict(cost),
        }
        if limits:
            facts["native"] = asdict(limits)
        typer.echo(json.dumps(facts))
        return
    out = Console(highlight=False, markup=False, emoji=False)
    out.print(
        f"{model}, {ran.backend}, {ran.dtype} on {device}, {loaded.threads} threads, "
        f"{loaded.hardware}"
    )
    table = Table("B", "ms", "ms a token", title="one sequence, B tokens")
    for tokens, seconds in zip(cost.tokens, cost.table_s, strict=True):
        table.add_row(str(tokens), f"{1e3 * seconds:.1f}", f"{1e3 * seconds / tokens:.2f}")
    out.print(table)
    out.print(
        f"and {1e3 * cost.per_sequence_s:.3f} ms a sequence, "
        f"{1e6 * cost.per_context_token_s:.2f} µs a token of context, "
        f"{1e3 * cost.per_verified_sequence_s:.3f} ms a sequence where drafts are verified"
    )
    if limits:
        _put_limits(out, limits)


def _limits(backend: Backend) -> Limits | None:
    """Of the native backend, which knows its matrix products."""
    from dspark.models.targets.native import NativeBackend
    from dspark.models.targets.native.limits import measure_limits

    return measure_limits(backend) if isinstance(backend, NativeBackend) else None


def _put_limits(out: Console, limits: Limits) -> None:
    table = Table("B", "ms", "reading weights", "arithmetic", "times the limit")
    table.title = "matrix products"
    for one in limits.products:
        times = (one.seconds, one.reading_s, one.arithmetic_s)
        table.add_row(str(one.B), *(f"{1e3 * s:.2f}" for s in times), f"{one.distance:.2f}")
    out.print(table)
    out.print(
        f"{limits.kernels}, {limits.threads} threads, {limits.weight_bytes / 1e6:.0f} MB of "
        f"weights, read at {limits.bandwidth / 1e9:.1f} GB/s, "
        f"{limits.arithmetic / 1e9:.0f} G multiply-adds/s"
    )
