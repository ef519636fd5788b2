"""`dspark serve`: one process that answers over gRPC and OpenAI-compatible HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark.cli import options
from dspark.cli.console import load_with_progress, say

if TYPE_CHECKING:
    from dspark.deploy.serve import Running
    from dspark.deploy.serve_config import ServeConfig
    from dspark.deploy.single import Loaded

SERVER = "Server"


def serve(
    config_file: Annotated[
        Path | None,
        typer.Option("--config", help="YAML or JSON; see --print-config.", rich_help_panel=SERVER),
    ] = None,
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config",
            help="Print the whole configuration as YAML and stop.",
            rich_help_panel=SERVER,
        ),
    ] = False,
    host: Annotated[
        str | None,
        typer.Option(
            "--host", help="Of both servers; loopback by default.", rich_help_panel=SERVER
        ),
    ] = None,
    http_port: Annotated[
        int | None, typer.Option("--http-port", help="0 is any free one.", rich_help_panel=SERVER)
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option("--grpc-port", help="0 is any free one.", rich_help_panel=SERVER)
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option("--keys", help="File of API keys and tenants.", rich_help_panel=SERVER),
    ] = None,
    tls_certificate: Annotated[
        str | None, typer.Option("--tls-certificate", help="PEM file.", rich_help_panel=SERVER)
    ] = None,
    tls_key: Annotated[
        str | None, typer.Option("--tls-key", help="PEM file.", rich_help_panel=SERVER)
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="What requests call the model.", rich_help_panel=SERVER),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="As for generate.", rich_help_panel=options.TARGET)
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option("--backend", help="As for generate.", rich_help_panel=options.TARGET),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter",
            help="auto (the one that comes with dspark for the model, else ngram), ngram, none, "
            "or a trained one: a directory or hub id.",
            rich_help_panel=options.TARGET,
        ),
    ] = None,
    gamma: Annotated[
        int | None, typer.Option("--gamma", help="As for generate.", rich_help_panel=options.TARGET)
    ] = None,
    verify: Annotated[
        str | None,
        typer.Option("--verify", help="As for generate.", rich_help_panel=options.TARGET),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="float32, bfloat16, or int8 (native only).",
            rich_help_panel=options.TARGET,
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda:N.", rich_help_panel=options.TARGET)
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", help="0 takes all cores.", rich_help_panel=options.TARGET),
    ] = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option("--kv-tokens", help="Room of the KV cache.", rich_help_panel=options.TARGET),
    ] = None,
) -> None:
    """Serve a model until SIGTERM or Ctrl-C; what runs then is finished first.

    Flags win over environment variables (DSPARK_HTTP__PORT=8080), those over the --config file.
    """
    from dspark.deploy.serve_config import configure

    config = configure(
        config_file,
        os.environ,
        {
            "http.host": host,
            "grpc.host": host,
            "http.port": http_port,
            "grpc.port": grpc_port,
            "keys": keys,
            "tls.certificate": tls_certificate,
            "tls.key": tls_key,
            "name": name,
            "model": model,
            "backend": backend,
            "drafter": drafter,
            "engine.gamma": gamma,
            "engine.verify": verify,
            "dtype": dtype,
            "device": device,
            "threads": threads,
            "engine.kv_tokens": kv_tokens,
        },
    )
    if print_config:
        typer.echo(config.to_yaml(), nl=False)
        return
    from dspark.deploy import serve as server
    from dspark.telemetry.logs import set_up_logging

    set_up_logging(config.log_level, config.telemetry.log_format, pool="serve")

    access = server.access(config)
    loaded = load_with_progress(config.target())
    say(_made_of(loaded))

    def ready(servers: Running) -> None:
        _tell(config, servers, chats=loaded.tokenizer.has_chat_template)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(server.serve(config, access, loaded, ready))
    say("stopped")


def loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop's loop saves a third of a small round trip; where it is not to be had (Windows) the
    standard one serves."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


def _made_of(loaded: Loaded) -> str:
    """What `auto` has come to, for backend and drafter."""
    cards = [drafter.card for drafter in loaded.engine.drafters.values()]
    drafters = [f"{card.drafter_id}, up to {card.gamma} tokens a draft" for card in cards]
    return (
        f"backend {loaded.engine.backend_name}, {loaded.threads} threads; "
        f"drafter {' and '.join(drafters) or 'none'}"
    )


def _tell(config: ServeConfig, servers: Running, *, chats: bool) -> None:
    """The ready line on stdout, for scripts too, and a request to paste. chats: whether the model
    has a chat template."""
    typer.echo(f"dspark serves {config.served_name}: {servers.url} and gRPC {servers.grpc.address}")
    asked: dict[str, object] = {"model": config.served_name, "stream": True}
    question = "Why is the sky blue?"
    if chats:
        route = "chat/completions"
        asked["messages"] = [{"role": "user", "content": question}]
    else:
        route = "completions"
        asked |= {"prompt": question, "max_tokens": 64}
    # The server's own certificate is trusted as it is, whoever signed it.
    trusted = [] if config.tls is None else ["--cacert", config.tls.certificate]
    words = ["curl", "-N", *trusted, f"{servers.url}/v1/{route}"]
    # In double quotes: the shell that it is pasted into knows the key.
    key = "" if config.keys is None else '-H "Authorization: Bearer $DSPARK_API_KEY" '
    body = ["-H", "Content-Type: application/json", "-d", json.dumps(asked)]
    typer.echo(f"try: {shlex.join(words)} {key}{shlex.join(body)}")
