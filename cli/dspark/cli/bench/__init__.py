"""`dspark bench`: how fast a server answers, and next to what."""

from __future__ import annotations

import typer

from dspark.cli.bench.serve import serve

__all__ = ["app"]

app = typer.Typer(name="bench", help="Measure servers under load.", no_args_is_help=True)
app.command()(serve)
