"""The `dspark` command. Heavy modules are imported inside the commands that need them."""

from __future__ import annotations

import os
import sys

import typer

from dspark.cli.chat import chat
from dspark.cli.generate import generate
from dspark.cli.models import models
from dspark.cli.profile import profile
from dspark.core.errors import DsparkError, InvalidRequest

app = typer.Typer(
    name="dspark",
    help="Large language models with confidence-scheduled speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(chat)
app.command()(profile)
app.command()(models)


@app.callback()
def root() -> None:
    """One command a job; `dspark COMMAND --help` teaches each."""


def main() -> None:
    """Entry point. An expected error is one line on stderr: exit 2 for bad input, 1 for the rest."""
    # OpenMP's threads spin where they wait; beside another busy process that makes a step dozens
    # of times slower. Read once, when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        app()
    except DsparkError as error:
        print(f"dspark: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InvalidRequest) else 1)
