"""What secures the connections of a process, over every protocol."""

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
        try:
            pair = (self.key.read_bytes(), self.certificate.read_bytes())
            ca = None if self.client_ca is None else self.client_ca.read_bytes()
        except OSError as error:
            raise ConfigError(f"tls: {error.filename}: {error.strerror}") from error
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


@contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except (ssl.SSLError, ValueError) as error:
        why = getattr(error, "reason", None) or "cannot be read"
        raise ConfigError(f"tls: {what}: {why}") from None
