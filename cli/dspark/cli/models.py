"""`dspark models`: what can be served by name."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models known by name; a directory, a GGUF file or a hub id works as well."""
    from dspark.models import SERVABLE, known_models

    known = known_models()
    if as_json:
        facts = [{**asdict(m), "disk_bytes": m.disk_bytes} for m in known]
        typer.echo(json.dumps({"models": facts, "servable_types": list(SERVABLE)}))
        return
    table = Table("name", "what", "license", "download", "on disk", "ready")
    for model in known:
        table.add_row(
            model.name,
            model.description,
            model.license,
            f"{model.download_bytes / 1e6:.0f} MB",
            f"{model.disk_bytes / 1e6:.0f} MB",
            "yes" if model.cached else "on first use",
        )
    out = Console()
    out.print(table)
    out.print(f"Model types that are served: {', '.join(SERVABLE)}", highlight=False)
