"""Where the store is and how to reach it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from dspark.core.errors import ConfigError
from dspark.scheduler.store.names import check_cluster

MIN_VERSION = (6, 2)
IN_MEMORY = "memory://"


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """url: redis://[[user]:password@]host[:6379][/database], rediss:// for TLS, or
    unix:///path.sock; memory:// for a store in this process that no other reaches; empty: an
    embedded Valkey. cluster: stores of several clusters may share a server. password_file: instead
    of a password in the URL. ca_file: certificates, PEM, trusted beside the system's. cert_file,
    key_file: shown to a server that asks. connect_timeout_s, answer_timeout_s: a script takes well
    below 10 ms, so a server silent for longer is no help. connections: open at once, at most; one
    more call waits.
    """

    url: str = field(default="", repr=False)  # it may hold a password
    cluster: str = "default"
    password_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    connect_timeout_s: float = 0.5
    answer_timeout_s: float = 0.2
    connections: int = 8

    def __post_init__(self) -> None:
        check_cluster(self.cluster)
        for name in ("connect_timeout_s", "answer_timeout_s", "connections"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)!r} must be above 0")
        server = Server.of(self.url) if self.url and self.url != IN_MEMORY else None
        if server is not None and server.password and self.password_file:
            raise ConfigError("password_file: the URL of the store has a password already")
        if server is None and self.password_file:
            raise ConfigError("password_file: is of no use without the URL of a server")
        files = [f.name for f in fields(self) if f.name in _TLS and getattr(self, f.name)]
        if files and not (server is not None and server.tls):
            raise ConfigError(f"{files[0]}: is of no use without rediss://")
        if self.key_file and not self.cert_file:
            raise ConfigError("key_file: needs cert_file")

    def password(self) -> str | None:
        """From the file or the URL. Raises ConfigError naming a file that cannot be read."""
        if self.password_file is None:
            return Server.of(self.url).password
        try:
            password = self.password_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"password_file: {self.password_file}: {error}") from None
        if not password:
            raise ConfigError(f"password_file: {self.password_file}: is empty")
        return password


_TLS = ("ca_file", "cert_file", "key_file")


@dataclass(frozen=True, slots=True)
class Server:
    """A URL taken apart. path: of a socket, None for TCP."""

    host: str
    port: int
    path: str | None
    database: int
    tls: bool
    user: str | None = field(repr=False)
    password: str | None = field(repr=False)

    @classmethod
    def of(cls, url: str) -> Server:
        """Raises ConfigError; its text never holds the URL, which may hold a password."""
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise ConfigError(f"url of the store: {error}") from None
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ConfigError("url of the store: must begin with redis://, rediss:// or unix://")
        if parts.query or parts.fragment:
            raise ConfigError("url of the store: takes no options after ? or #")
        user, password = (unquote(p) if p else None for p in (parts.username, parts.password))
        if parts.scheme == "unix":
            if parts.hostname or not parts.path:
                raise ConfigError("url of the store: a socket is unix:///path")
            return cls("", 0, unquote(parts.path), 0, False, user, password)
        return cls(
            parts.hostname or "localhost",
            _port(parts),
            None,
            _database(parts.path),
            parts.scheme == "rediss",
            user,
            password,
        )

    @property
    def where(self) -> str:
        """For people; without the password."""
        if self.path is not None:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{host}:{self.port}/{self.database}"


def _port(parts: SplitResult) -> int:
    try:
        return parts.port or 6379
    except ValueError:
        raise ConfigError("url of the store: its port must be in [1, 65535]") from None


def _database(path: str) -> int:
    text = path.strip("/")
    if text and not text.isdecimal():
        raise ConfigError("url of the store: its path must be the number of a database")
    return int(text or 0)


def check_version(version: str) -> None:
    """Of the server, as INFO gives it (Valkey gives the Redis that it stands in for). Raises
    ConfigError with both versions."""
    try:
        numbers = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        numbers = (0,)
    if numbers < MIN_VERSION:
        wanted = ".".join(map(str, MIN_VERSION))
        raise ConfigError(f"the store's server is Redis {version}: {wanted} or newer is needed")
