"""Where a server listens."""

from __future__ import annotations

import socket

from dspark.core.errors import ConfigError

# Connections that wait to be accepted.
BACKLOG = 2048


def address_of(host: str, port: int) -> str:
    """host:port as its callers write it, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """port 0: any free one. Raises ConfigError."""
    try:
        family, kind, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
        try:
            # A port whose last connections are still closing can be had; one that is served cannot.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        told = f"address: {address_of(host, port)} cannot be listened on: {error}"
        raise ConfigError(told) from error
    return listener
