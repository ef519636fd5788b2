"""What secures the connections of a process, over every protocol.

Files are read when a server or a client starts; a new certificate is taken up by starting it again.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from dspark.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. client_ca: if set, clients must show a certificate that it signed (mTLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Raises ConfigError for a file that cannot be read."""
        ca = None if self.client_ca is None else _read(self.client_ca)
        pair = (_read(self.key), _read(self.certificate))
        return grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)

    def check(self) -> None:
        """Raises ConfigError for files that cannot be read, are none or do not belong together."""
        self.credentials()  # names a file that is missing
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with _told(f"{self.certificate} and {self.key} are no certificate and its key"):
            context.load_cert_chain(self.certificate, self.key, password="")
        if self.client_ca is not None:
            with _told(f"{self.client_ca} is no certificate"):
                context.load_verify_locations(self.client_ca)


@dataclass(frozen=True, slots=True)
class PeerFiles:
    """PEM files of one service among others: each shows its certificate, and takes only who `ca`
    has signed. server_name: checked in place of a peer's host, "" for the host."""

    ca: Path
    certificate: Path
    key: Path
    server_name: str = ""

    @property
    def server(self) -> TlsFiles:
        return TlsFiles(self.certificate, self.key, self.ca)

    def credentials(self) -> grpc.ChannelCredentials:
        """Of a client. Raises ConfigError for a file that cannot be read."""
        return grpc.ssl_channel_credentials(
            _read(self.ca), private_key=_read(self.key), certificate_chain=_read(self.certificate)
        )

    def check(self) -> None:
        """Raises ConfigError for files that cannot be used, a certificate that its own peers would
        not take, from a server or from a client, and one without the name that they look for."""
        self.server.check()
        ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        ours.verify_mode = ssl.CERT_REQUIRED
        ours.load_verify_locations(self.ca)
        peer = ssl.create_default_context(cafile=self.ca)
        peer.check_hostname = bool(self.server_name)
        for context in (ours, peer):
            context.load_cert_chain(self.certificate, self.key, password="")
        try:
            _shake_hands(ours, peer, self.server_name or None)
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", None) or error.reason or "no handshake"
            raise ConfigError(
                f"tls: {self.certificate}: peers that trust {self.ca} would refuse it: {why}"
            ) from None


def named(server_name: str) -> tuple[tuple[str, str], ...]:
    """Options of a channel whose peer's certificate is checked for this name; "" for its host."""
    return (("grpc.ssl_target_name_override", server_name),) if server_name else ()


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None) -> None:
    """In memory. Raises ssl.SSLError where one side refuses the other."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(down, up, server_hostname=name),
        server.wrap_bio(up, down, server_side=True),
    ]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            ends.remove(end)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"tls: {file}: {error.strerror}") from error


@contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except (ssl.SSLError, ValueError) as error:
        why = getattr(error, "reason", None) or "cannot be read"
        raise ConfigError(f"tls: {what}: {why}") from None
