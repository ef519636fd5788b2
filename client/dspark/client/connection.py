"""Where the server is, how it is trusted, and who calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import grpc

from dspark.core.errors import ConfigError

Stub = TypeVar("Stub")

OPTIONS: tuple[tuple[str, int], ...] = (
    # The server bounds what it takes; an answer's messages are small, a prompt's ids come in one.
    ("grpc.max_receive_message_length", 16 * 2**20),
    # A server that restarts is found again within what a retry waits, not within gRPC's minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A server that is gone without a word is noticed within 40 s of a call.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files. ca: who signed the server's certificate; None takes the system's. certificate and
    key: our own, for a server that asks for one (mTLS)."""

    ca: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(
            _read(self.ca), private_key=_read(self.key), certificate_chain=_read(self.certificate)
        )


@dataclass(frozen=True, slots=True)
class Connection:
    """address: host:port, or those of several gateways of one cluster. tls: True trusts the
    system's authorities."""

    address: str | Sequence[str]
    api_key: str | None = field(default=None, repr=False)
    tls: Tls | bool = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """Raises ConfigError where there is none."""
        addresses = (self.address,) if isinstance(self.address, str) else tuple(self.address)
        if not addresses:
            raise ConfigError("address: [] must name at least one gateway")
        return addresses

    def channels(self) -> list[grpc.Channel]:
        """One for each address; each connects when it is first used."""
        tls = self._credentials()
        if tls is None:
            return [grpc.insecure_channel(address, OPTIONS) for address in self.addresses]
        return [grpc.secure_channel(address, tls, OPTIONS) for address in self.addresses]

    def async_channels(self) -> list[grpc.aio.Channel]:
        tls = self._credentials()
        if tls is None:
            return [grpc.aio.insecure_channel(address, OPTIONS) for address in self.addresses]
        return [grpc.aio.secure_channel(address, tls, OPTIONS) for address in self.addresses]

    def metadata(self, traceparent: str = "") -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        key = self.api_key
        return (
            *(() if key is None else (("authorization", f"Bearer {key}"),)),
            *((("traceparent", traceparent),) if traceparent else ()),
        )

    def _credentials(self) -> grpc.ChannelCredentials | None:
        tls = Tls() if self.tls is True else self.tls
        return tls.credentials() if isinstance(tls, Tls) else None


class Turns(Generic[Stub]):
    """Which of several gateways a try goes to: the next one after each that failed, and new
    requests begin where the last try went. Clients begin at different ones."""

    def __init__(self, stubs: Sequence[Stub]) -> None:
        self._stubs = stubs
        self._at = random.randrange(len(stubs))

    def request(self) -> Callable[[int], Stub]:
        """Of one request: the stub for its try number 0, 1, …"""
        first = self._at

        def stub(attempt: int) -> Stub:
            self._at = (first + attempt) % len(self._stubs)
            return self._stubs[self._at]

        return stub


def _read(file: str | Path | None) -> bytes | None:
    if file is None:
        return None
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"tls: {file}: {error.strerror}") from error
