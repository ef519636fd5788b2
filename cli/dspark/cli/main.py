"""The `dspark` command. Heavy modules are imported inside the commands that need them."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Sequence

import typer

from dspark.cli.bench import app as bench
from dspark.cli.calibrate import calibrate
from dspark.cli.chat import chat
from dspark.cli.data import app as data
from dspark.cli.down import down
from dspark.cli.drafter import app as drafter
from dspark.cli.drain import drain
from dspark.cli.evaluate import app as evaluate
from dspark.cli.generate import generate
from dspark.cli.models import models
from dspark.cli.profile import profile
from dspark.cli.replica import replica
from dspark.cli.scale import scale
from dspark.cli.serve import serve
from dspark.cli.simulate import simulate
from dspark.cli.status import status
from dspark.cli.top import top
from dspark.cli.train import train
from dspark.cli.up import up
from dspark.core.errors import ConfigError, DsparkError, InvalidRequest

# typer carries a click of its own and gives no name to the root of its usage errors.
UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]

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
app.command()(serve)
app.command()(replica)
app.command()(up)
app.command()(status)
app.command()(top)
app.command()(scale)
app.command()(drain)
app.command()(down)
app.command()(train)
app.command()(calibrate)
app.command()(simulate)
app.add_typer(bench)
app.add_typer(data)
app.add_typer(drafter)
app.add_typer(evaluate)


@app.callback()
def root() -> None:
    """One command a job; `dspark COMMAND --help` teaches each."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the exit status. An expected error is one line on stderr: 2 for bad input, 1 for
    a model or a machine that cannot. Ctrl-C is 130."""
    # OpenMP's threads spin where they wait; beside another busy process that makes a step dozens
    # of times slower. Read once, when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Python's last collection goes through all that torch left behind: a second, for nothing.
    atexit.register(gc.freeze)
    try:
        return app(arguments, standalone_mode=False) or 0
    except UsageError as error:
        return _refuse(_with_value(error), error.exit_code)
    except DsparkError as error:
        return _refuse(str(error), 2 if isinstance(error, InvalidRequest | ConfigError) else 1)


def _refuse(message: str, status: int) -> int:
    if message:  # else help was shown in its place
        print(f"dspark: {' '.join(message.split())}", file=sys.stderr)
    return status


def _with_value(error: typer.BadParameter) -> str:
    """The message of a usage error and what was given, which only its cause (pydantic's) knows."""
    causes: list[dict[str, object]] = getattr(error.__cause__, "errors", list)()
    given = f": {causes[0]['input']!r} was given" if causes else ""
    return f"{error.format_message().rstrip('.')}{given}"
