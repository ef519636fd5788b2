"""`dspark bench`: how fast a server answers, and next to what; which verify lengths pay."""

from __future__ import annotations

import typer

from dspark.cli.bench.serve import serve
from dspark.cli.bench.sweep import sweep

__all__ = ["app"]

app = typer.Typer(
    name="bench", help="Measure servers and verify policies under load.", no_args_is_help=True
)
app.command()(serve)
app.command()(sweep)
