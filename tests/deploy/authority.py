"""Certificates for tests: an authority of their own and what it signs."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import grpc

from dspark.serving import PeerFiles

_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Authority:
    """In a directory of its own. ca: its certificate."""

    directory: Path

    @classmethod
    def make(cls, directory: Path) -> Authority:
        directory.mkdir(parents=True, exist_ok=True)
        made = cls(directory)
        openssl(
            *("req", "-x509", *_EC, "-days", "2", "-subj", "/CN=tests"),
            *("-keyout", directory / "ca.key", "-out", made.ca),
        )
        return made

    @property
    def ca(self) -> Path:
        return self.directory / "ca.pem"

    def sign(self, name: str, san: str = "IP:127.0.0.1", usage: str = "") -> tuple[Path, Path]:
        """A certificate and its key. san: what it may be reached as. usage: extendedKeyUsage, ""
        for any."""
        key, file = self.directory / f"{name}.key", self.directory / f"{name}.pem"
        request, wanted = self.directory / f"{name}.csr", self.directory / f"{name}.ext"
        extensions = [f"subjectAltName={san}\n"]
        if usage:
            extensions.append(f"extendedKeyUsage={usage}\n")
        wanted.write_text("".join(extensions))
        openssl("req", "-new", *_EC, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        openssl(
            *("x509", "-req", "-days", "2", "-in", request, "-extfile", wanted, "-out", file),
            *("-CA", self.ca, "-CAkey", self.directory / "ca.key", "-CAcreateserial"),
        )
        return file, key

    def peer(self, name: str, san: str = "IP:127.0.0.1", server_name: str = "") -> PeerFiles:
        return PeerFiles(self.ca, *self.sign(name, san), server_name)

    def trusting(self) -> grpc.ChannelCredentials:
        """Of a client that knows the authority and shows nothing."""
        return grpc.ssl_channel_credentials(self.ca.read_bytes())


def openssl(*arguments: object) -> None:
    binary = shutil.which("openssl")
    assert binary is not None
    subprocess.run([binary, *map(str, arguments)], check=True, capture_output=True)
